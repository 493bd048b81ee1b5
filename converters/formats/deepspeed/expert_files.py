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
    """Iterate over the tensors in files that each contain one layer or one expert.

    Args:
        folder: Checkpoint folder.
        files: Names of the files.
        pattern: Pattern of the file names. Its first group is the index of the layer or expert.
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
                raise DamagedCheckpointError(f"{location}: contains a value that is not a named tensor")
            yield LayerTensor(location, int(match[1]), key, value)


class ExpertFiles:
    """Weights in the files of all experts.

    Args:
        folder: Checkpoint folder.
        files: Names of the files.

    Attributes:
        tensors: Weights, keyed by their names in the complete model.

    Raises:
        CheckpointError: If the name of a file belongs to an unsupported type of expert
            parallelism, if a file is damaged or was renamed, if it contains values other than
            the weights of its expert, or if two files contain the same weight.
    """

    def __init__(self, folder: CheckpointFolder, files: Sequence[str]) -> None:
        self.location = str(folder.path)
        self.tensors: dict[str, StoredTensor] = {}
        name_error = (
            "expert parallelism is only supported with deepspeed.moe.layer.MoE and ZeRO-1 or ZeRO-2, and "
            "without tensor parallelism"
        )
        for location, number, key, value in iter_layer_tensors(folder, files, _EXPERT_FILE, name_error):
            match = _EXPERT.fullmatch(key)
            if match is None or int(match[2]) != number:
                raise DamagedCheckpointError(
                    f"{location}: contains {key!r}, which is not a weight of expert {number}"
                )
            if self.tensors.setdefault(key, value) is not value:
                raise DamagedCheckpointError(f"{location}: {key!r} is stored in two files")

    def has_only_expert_parameters(self, names: Iterable[str]) -> bool:
        """Return whether the parameters of a group belong to experts.

        Raises:
            CheckpointError: If the group contains both expert parameters and other parameters.
        """
        kinds = {_EXPERT.fullmatch(name) is not None for name in names}
        if len(kinds) > 1:
            raise DamagedCheckpointError(
                f"{self.location}: damaged: a parameter group contains both expert parameters and other "
                "parameters"
            )
        return True in kinds

    def map_to_complete_names(
        self, local_names: Iterable[str], rank_set_index: int, all_local_names: Iterable[str]
    ) -> dict[str, str]:
        """Map the local names of expert parameters to their names in the complete model.

        The ranks that have the same experts form a set, and each set numbers its experts from 0.
        For example, if each set has 4 experts, expert 1 of the second set is expert 5 of the
        complete model.

        Args:
            local_names: Names of the parameters in a group on the ranks of one set.
            rank_set_index: Index of this set of ranks.
            all_local_names: Names of the parameters in all groups on a rank. The number of experts in
                each set is derived from the largest expert index in each layer. A single group may
                lack the last expert, because DeepSpeed splits large groups.

        Returns:
            Names in the complete model, keyed by the local names. Parameters outside experts are
            omitted.
        """
        num_experts: dict[str, int] = {}
        for match in filter(None, map(_EXPERT.fullmatch, all_local_names)):
            num_experts[match[1]] = max(num_experts.get(match[1], 0), int(match[2]) + 1)
        return {
            match[0]: f"{match[1]}{int(match[2]) + rank_set_index * num_experts[match[1]]}{match[3]}"
            for match in filter(None, map(_EXPERT.fullmatch, local_names))
        }
