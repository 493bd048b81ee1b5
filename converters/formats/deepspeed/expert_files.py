"""Read the per-expert files that DeepSpeed saves for mixture-of-experts models."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from portable.converters.containers.torchzip import StoredTensor
from portable.converters.errors import DamagedCheckpointError, UnsupportedCheckpointError
from portable.converters.formats.deepspeed.rank_files import load_rank_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from portable.converters.storage.folder import CheckpointFolder

_EXPERT_FILE = re.compile(r"layer_\d{1,9}_expert_(\d{1,9})_mp_rank_00_model_states\.pt")
_EXPERT = re.compile(r"(.+\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,9})(\..+)")


class LayerTensor(NamedTuple):
    """Tensor in a file of a single layer or expert.

    Attributes:
        location: Path of the file, used in error messages.
        number: Index of the layer or expert, from the file name.
        key: Name of the tensor in the file.
        tensor: The tensor.
    """

    location: str
    number: int
    key: str
    tensor: StoredTensor


def iter_layer_tensors(
    folder: CheckpointFolder, files: Sequence[str], pattern: re.Pattern[str], name_error: str
) -> Iterator[LayerTensor]:
    """Iterate over the tensors in files of layers or experts.

    Args:
        folder: Checkpoint folder.
        files: Names of the files.
        pattern: Pattern of the file names, whose first group is a number.
        name_error: Error message for a file whose name does not match.

    Yields:
        The tensors of all files.

    Raises:
        CheckpointError: If a file name does not match, or if a file contains values that are not
            tensors.
    """
    for name in files:
        location, match = str(folder.path / name), pattern.fullmatch(name)
        if match is None:
            raise UnsupportedCheckpointError(f"{location}: {name_error}")
        for key, value in load_rank_file(folder, name).items():
            if not isinstance(key, str) or not isinstance(value, StoredTensor):
                raise DamagedCheckpointError(f"{location}: does not contain the weights of a layer")
            yield LayerTensor(location, int(match[1]), key, value)


class ExpertFiles:
    """Weights in the files of all experts.

    Args:
        folder: Checkpoint folder.
        files: Names of the files.

    Attributes:
        tensors: Weights, keyed by their names in the complete model.

    Raises:
        CheckpointError: If a file is damaged or was renamed, or if it contains values other than the
            weights of its expert.
    """

    def __init__(self, folder: CheckpointFolder, files: Sequence[str]) -> None:
        self.location = str(folder.path)
        self.tensors: dict[str, StoredTensor] = {}
        name_error = (
            "expert parallel checkpoints of this form are not supported, only checkpoints of "
            "deepspeed.moe.layer.MoE under ZeRO 1 and 2, without tensor parallelism"
        )
        for location, number, key, value in iter_layer_tensors(folder, files, _EXPERT_FILE, name_error):
            match = _EXPERT.fullmatch(key)
            if match is None or int(match[2]) != number:
                raise DamagedCheckpointError(
                    f"{location}: does not contain the expert parallel weights of the expert in its name"
                )
            if self.tensors.setdefault(key, value) is not value:
                raise DamagedCheckpointError(f"{location}: {key!r} is also in another file")

    def has_only_expert_parameters(self, names: Iterable[str]) -> bool:
        """Return whether a group consists of expert parameters.

        Raises:
            CheckpointError: If the group contains both expert parameters and others.
        """
        kinds = {_EXPERT.fullmatch(name) is not None for name in names}
        if len(kinds) > 1:
            raise DamagedCheckpointError(
                f"{self.location}: damaged: a group contains parameters of experts and others"
            )
        return True in kinds

    def map_to_complete_names(self, local_names: Iterable[str], rank_set_index: int) -> dict[str, str]:
        """Map the names of experts on one set of ranks to their names in the complete model.

        The names differ, because each set of ranks numbers its experts from 0.

        Args:
            local_names: Names of parameters on these ranks.
            rank_set_index: Index of the set of ranks.

        Returns:
            Names in the complete model, keyed by the local names. Parameters outside experts are omitted.
        """
        matches = [match for name in local_names if (match := _EXPERT.fullmatch(name))]
        count = 1 + max((int(match[2]) for match in matches), default=0)
        return {
            match[0]: f"{match[1]}{int(match[2]) + rank_set_index * count}{match[3]}" for match in matches
        }
