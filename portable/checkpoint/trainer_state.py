"""``trainer_state.json``: the step, position in the data and settings of a checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

from portable.converters import CheckpointError, check_manifest
from portable.converters.manifest import MANIFEST
from portable.errors import DamagedError, UserError, to_one_line
from portable.evaluation.best_tracker import EvalHistory
from portable.paths import read_json, write_durably

if TYPE_CHECKING:
    from pathlib import Path

    from portable.converters.storage.path_or_url import Place

FORMAT_VERSION = 2
"""Version 1 had no manifest."""
_WITH_MANIFEST = 2
STATE_FILE = "trainer_state.json"
# Files of DeepSpeed, its swap files, and files of DCP.
_RANK_FILE = re.compile(r"(?:.*/)?\w*pp_rank_(\d+)_.*|(?:.*/)?offloaded_tensors/rank(\d+)/.*|__(\d+)[_.].*")
_STEP_FOLDER = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class TrainerState:
    """The state of a run, in JSON beside the shards.

    Attributes:
        step: optimizer steps done.
        samples: sequences consumed, which is the position in the data.
        seed: of the run.
        schedule: the settings of the learning rate schedule.
        run: the settings that must not change within a run.
        data: digest of every token of the data set, to detect other data.
        backend, strategy, world_size: of the launch that wrote the checkpoint. The next launch may differ.
        metadata: more information for the user.
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
    def read(cls, folder: Place) -> TrainerState:
        """Read ``folder/trainer_state.json``.

        Raises:
            DamagedError: if the file is damaged.
            UserError: if it is missing or has a newer format.
        """
        path = folder / STATE_FILE
        try:
            values = read_json(path)
            version = values["format_version"]
            if version > FORMAT_VERSION:
                raise UserError(
                    f"{path}: format version {version} is newer than this program ({FORMAT_VERSION})"
                )
            state = cls(**values)._validate()
            if (folder_step := parse_step(folder.name)) is not None and folder_step != state.step:
                raise ValueError(f"step is {state.step}")
            return state
        except FileNotFoundError as error:
            raise UserError(f"{path}: missing; is {folder} a checkpoint of this program?") from error
        except (OSError, ValueError, TypeError, KeyError) as error:
            reason = to_one_line(error)
            reason = f"{type(error).__name__}: {reason if len(reason) <= 200 else reason[:197] + '...'}"
            raise DamagedError(f"{path}: damaged ({reason}); use an older checkpoint") from error

    def _validate(self) -> TrainerState:
        for name, kind in get_type_hints(TrainerState).items():
            value = getattr(self, name)
            if not isinstance(value, get_origin(kind) or kind) or isinstance(value, bool):
                raise TypeError(f"{name} is of type {type(value).__name__}")
        for name, least in (("step", 0), ("samples", 0), ("world_size", 1), ("format_version", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}")
        if not isinstance(self.schedule.get("total_steps"), int):
            raise TypeError("schedule has no total_steps")
        return self

    def check_files(self, folder: Place, rank: int = 0, world_size: int = 1) -> str | None:
        """Check every file of this checkpoint in ``folder`` against the manifest.

        If all ranks call it, they share the work: a rank compares the checksums of the files that it would
        have written, and rank 0 also those of all other files, and the sizes of all.

        Args:
            folder: Folder of the checkpoint.
            rank: This rank.
            world_size: Number of ranks that call this method.

        Returns:
            a warning if the checkpoint has an old format without a manifest.

        Raises:
            DamagedError: if a file is missing or was changed.
        """
        try:
            is_own = lambda name: find_rank_of_file(name) % world_size == rank  # noqa: E731
            manifest = check_manifest(folder, only=is_own if rank else None, reads=is_own)
        except CheckpointError as error:
            raise DamagedError(f"{to_one_line(error)}; use an older checkpoint") from error
        if manifest is None:
            if self.format_version >= _WITH_MANIFEST:
                raise DamagedError(f"{folder / MANIFEST}: missing; use an older checkpoint")
            return (
                f"{folder}: written by an older version of this program, without a manifest; only its shards "
                "are checked"
            )
        if manifest.get("step") != self.step or manifest.get("run") != self.run_digest:
            raise DamagedError(f"{folder / MANIFEST}: belongs to another checkpoint; use an older one")
        return None

    @property
    def run_digest(self) -> str:
        """A digest of ``run``."""
        return hashlib.blake2b(json.dumps(self.run, sort_keys=True).encode(), digest_size=16).hexdigest()

    @property
    def skipped_steps(self) -> int:
        """The number of steps whose update was skipped because it was not finite."""
        counted = self.metadata.get("skipped_steps", 0)
        return counted if isinstance(counted, int) else 0

    @property
    def eval_history(self) -> EvalHistory:
        """What the evaluations so far came to."""
        return EvalHistory.from_json(self.metadata.get("standing"))

    def write(self, folder: Path) -> None:
        write_durably(folder / STATE_FILE, json.dumps(asdict(self), indent=2) + "\n")


def find_rank_of_file(name: str) -> int:
    """Return the rank that wrote a file of a checkpoint; 0 if the name has no rank."""
    match = _RANK_FILE.fullmatch(name)
    return int(next(filter(None, match.groups()))) if match else 0


def parse_step(name: str) -> int | None:
    """Parse the step from a checkpoint's name; None for other names."""
    match = _STEP_FOLDER.fullmatch(name)
    return int(match[1]) if match else None
