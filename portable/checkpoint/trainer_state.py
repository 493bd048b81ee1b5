"""Read and write ``trainer_state.json``: the step, data position and settings of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

from portable.converters import CheckpointError, check_manifest
from portable.converters.manifest import MANIFEST
from portable.converters.storage.store_errors import RemoteError
from portable.errors import DamagedError, UserError, to_one_line
from portable.evaluation.best_tracker import EvalHistory
from portable.paths import read_json_file, write_durably

if TYPE_CHECKING:
    from pathlib import Path

    from portable.converters.storage.path_or_url import AnyPath

FORMAT_VERSION = 2
"""Version of the file format. Version 1 had no manifest."""
_FIRST_VERSION_WITH_MANIFEST = 2
STATE_FILE = "trainer_state.json"
"""Name of the file in a checkpoint's folder. The folder is not a checkpoint without it."""
# The alternatives match DeepSpeed's files, DeepSpeed's swap files, and the files of DCP.
_RANK_FILE_NAME = re.compile(
    r"(?:.*/)?\w*pp_rank_(\d+)_.*|(?:.*/)?offloaded_tensors/rank(\d+)/.*|__(\d+)[_.].*"
)
_STEP_FOLDER_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class TrainerState:
    """State of a run, stored as JSON with the shards.

    Attributes:
        step: Number of optimizer steps taken, including steps whose update was skipped.
        samples: Number of sequences consumed, which is the position in the data.
        seed: Seed of the run.
        schedule: Settings of the learning rate schedule.
        run: Settings that must not change when the run resumes.
        data: Fingerprint of the training data, to detect that a resumed run uses different
            data. It is usually a digest of all tokens. A user-defined dataset provides its
            fingerprint. Empty for a single streamed source.
        backend: Backend of the launch that wrote the checkpoint. May change when the run
            resumes.
        strategy: Strategy of the launch that wrote the checkpoint. May change when the run
            resumes.
        world_size: World size of the launch that wrote the checkpoint. May change when the run
            resumes.
        metadata: Additional information, such as the evaluation history.
        format_version: Version of the file format.
    """

    step: int
    samples: int
    seed: int
    schedule: dict[str, Any]
    run: dict[str, Any]
    data: str
    backend: str
    strategy: str
    world_size: int
    metadata: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    @classmethod
    def read(cls, folder: AnyPath) -> TrainerState:
        """Read ``trainer_state.json`` in ``folder``.

        Raises:
            DamagedError: If the file is damaged or cannot be read, or if its step differs from the
                step in the folder's name.
            UserError: If the file is missing or has a newer format.
            RemoteError: If a request to the object store fails.
        """
        path = folder / STATE_FILE
        try:
            values = read_json_file(path)
            version = values["format_version"]
            if version > FORMAT_VERSION:
                raise UserError(
                    f"{path}: has format version {version}, but this program supports versions up to "
                    f"{FORMAT_VERSION}; upgrade portable-trainer"
                )
            state = cls(**values)._check_types_and_ranges()
            if (folder_step := parse_checkpoint_step(folder.name)) is not None and folder_step != state.step:
                raise ValueError(
                    f"the recorded step is {state.step}, but the folder has the name {folder.name}"
                )
            return state
        except FileNotFoundError as error:
            raise UserError(
                f"{path}: is missing; use the folder of a checkpoint that this program wrote"
            ) from error
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = to_one_line(error)
            reason = f"{type(error).__name__}: {reason if len(reason) <= 200 else reason[:197] + '...'}"
            raise DamagedError(f"{path}: is damaged ({reason}); use an older checkpoint") from error

    def _check_types_and_ranges(self) -> TrainerState:
        """Check the types and ranges of all fields, and return this object.

        Raises:
            TypeError: If a value has the wrong type, or if :attr:`schedule` has no integer
                ``total_steps``.
            ValueError: If a number is too small.
        """
        for name, kind in get_type_hints(TrainerState).items():
            value = getattr(self, name)
            if not isinstance(value, get_origin(kind) or kind) or isinstance(value, bool):
                expected_type = get_origin(kind) or kind
                raise TypeError(
                    f"{name} has the type {type(value).__name__}, but must be of type "
                    f"{expected_type.__name__}"
                )
        for name, least in (("step", 0), ("samples", 0), ("world_size", 1), ("format_version", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least {least}")
        if not isinstance(self.schedule.get("total_steps"), int):
            raise TypeError("schedule.total_steps is missing or not an integer")
        return self

    def verify_files(self, folder: AnyPath, rank: int = 0, world_size: int = 1) -> str | None:
        """Verify the files of the checkpoint in ``folder`` against its manifest.

        Ranks divide the work. Rank ``r % world_size`` verifies the checksums of the files that rank
        ``r`` of the previous launch wrote. Rank 0 also verifies the files without a rank in their
        names, and the sizes of all files.

        Args:
            folder: Folder of the checkpoint.
            rank: This rank.
            world_size: Number of ranks that share the work.

        Returns:
            A warning if the checkpoint has an old format without a manifest, otherwise None.

        Raises:
            DamagedError: If a file is missing or was changed, if a file of another format was
                added, or if the manifest is missing, is damaged, has a newer format, or belongs to
                another checkpoint.
            RemoteError: If a request to the object store fails.
        """
        try:
            is_own = lambda name: parse_rank_of_file(name) % world_size == rank  # noqa: E731
            manifest = check_manifest(folder, only=is_own if rank else None, reads=is_own)
        except RemoteError:  # the store failed, so the error does not describe the checkpoint
            raise
        except CheckpointError as error:
            raise DamagedError(f"{to_one_line(error.reason)}; use an older checkpoint") from error
        if manifest is None:
            if self.format_version >= _FIRST_VERSION_WITH_MANIFEST:
                raise DamagedError(f"{folder / MANIFEST}: is missing; use an older checkpoint")
            return (
                f"{folder}: was written by an older version of this program, without a manifest of "
                "checksums, so only the shards are checked"
            )
        if manifest.get("step") != self.step or manifest.get("run") != self.run_digest:
            raise DamagedError(f"{folder / MANIFEST}: belongs to another checkpoint; use an older checkpoint")
        return None

    @property
    def run_digest(self) -> str:
        """Digest of :attr:`run`.

        The manifest of the checkpoint stores the digest of its run. If the stored digest is not
        equal to this digest, the manifest belongs to another checkpoint.
        """
        return hashlib.blake2b(json.dumps(self.run, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def skipped_steps(self) -> int:
        """Number of steps whose update was skipped because it was not finite. 0 if not recorded."""
        counted = self.metadata.get("skipped_steps", 0)
        return counted if isinstance(counted, int) else 0

    @property
    def eval_history(self) -> EvalHistory:
        """Best evaluation results and early-stopping counters, from :attr:`metadata`.

        Empty if they are not recorded.
        """
        return EvalHistory.from_json(self.metadata.get("standing"))

    def write(self, folder: Path) -> None:
        """Write ``trainer_state.json`` into ``folder``, and flush it to disk."""
        write_durably(folder / STATE_FILE, json.dumps(asdict(self), indent=2) + "\n")


def parse_rank_of_file(name: str) -> int:
    """Return the rank that wrote a checkpoint file, parsed from its name. 0 if the name has no rank."""
    match = _RANK_FILE_NAME.fullmatch(name)
    return int(next(filter(None, match.groups()))) if match else 0


def parse_checkpoint_step(name: str) -> int | None:
    """Return the step in the name of a checkpoint folder, such as ``step-000100``.

    Returns None for all other names, such as ``.step-000100.partial`` and ``step-000100.damaged``.
    """
    match = _STEP_FOLDER_NAME.fullmatch(name)
    return int(match[1]) if match else None
