"""The experts of `deepspeed.moe.layer.MoE`, each in a file of its own.

`layer_<moe layer>_expert_<expert>_mp_rank_00_model_states.pt` holds one expert's weights, with the expert's
number in the whole model in their names. The ranks number their own experts from 0 instead. So do the flat
groups of their masters, each of which is partitioned over the ranks that have the same experts.

Source: deepspeed/runtime/engine.py (`_save_moe_checkpoint`), deepspeed/utils/groups.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from converters.containers.torchzip import StoredTensor
from converters.errors import CheckpointError
from converters.formats.deepspeed.rank_files import load

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from converters.storage.folder import Folder

_FILE = re.compile(r"layer_\d{1,9}_expert_(\d{1,9})_mp_rank_00_model_states\.pt")
_NAME = re.compile(r"(.+\.deepspeed_moe\.experts\.deepspeed_experts\.)(\d{1,9})(\..+)")


class Experts:
    """The weights of all experts, by name.

    Raises:
        CheckpointError: a file is damaged or renamed, or holds something else.
    """

    def __init__(self, folder: Folder, files: Sequence[str]) -> None:
        self.where = str(folder.path)
        self.stored: dict[str, StoredTensor] = {}
        for name in files:
            where, match = str(folder.path / name), _FILE.fullmatch(name)
            if match is None:
                raise CheckpointError(
                    f"{where}: expert parallel checkpoints of this form are not supported; only those of "
                    "deepspeed.moe.layer.MoE under ZeRO 1 and 2, without tensor parallelism"
                )
            for key, value in load(folder, name).items():
                found = _NAME.fullmatch(key) if isinstance(key, str) else None
                if found is None or int(found[2]) != int(match[1]) or not isinstance(value, StoredTensor):
                    raise CheckpointError(f"{where}: not the expert parallel weights of its expert")
                if key in self.stored:
                    raise CheckpointError(f"{where}: {key!r} is in another file too")
                self.stored[key] = value

    def local(self, names: Iterable[str]) -> bool:
        """Whether the parameters of a group are those of experts; CheckpointError if only some are."""
        found = {_NAME.fullmatch(name) is not None for name in names}
        if len(found) > 1:
            raise CheckpointError(f"{self.where}: damaged, a group holds parameters of experts and others")
        return True in found

    def names(self, local: Iterable[str], at: int) -> dict[str, str]:
        """The names of one set of ranks, the `at`-th, for their experts -> those in the whole model."""
        matches = [match for name in local if (match := _NAME.fullmatch(name))]
        count = 1 + max((int(match[2]) for match in matches), default=0)
        return {match[0]: f"{match[1]}{int(match[2]) + at * count}{match[3]}" for match in matches}
