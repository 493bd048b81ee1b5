"""Write a checkpoint as torch's `HuggingFaceStorageWriter` does: safetensors that DCP loads.

The files are those of `--to safetensors`, numbered and with an index, their headers hold what DCP adds,
and tied tensors have all their names, as the state of a live model has. So `HuggingFaceStorageReader` and
`from_pretrained` both open the folder. The format holds tensors only: the optimizer's state is written as
`--to safetensors` writes it.

Source: torch/distributed/checkpoint/hf_storage.py, filesystem.py, _hf_utils.py.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from converters.formats.dcp_safetensors import INFO, OFFSETS
from converters.writers.safetensors_writer import plan_safetensors
from converters.writers.targets import Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from converters.checkpoint import Checkpoint
    from converters.writers.conversion import Choices, Entry, Plan


def plan_dcp_safetensors(checkpoint: Checkpoint, choices: Choices) -> Plan:
    """The plan of `--to dcp-safetensors`."""
    return plan_safetensors(checkpoint, choices, about=_sharding)


def _sharding(entries: Sequence[Entry]) -> dict[str, str]:
    """Where each tensor of a file begins in the whole: at its start."""
    table = {entry.name: {OFFSETS: [0] * len(entry.tensor.shape)} for entry in entries}
    return {INFO: json.dumps(table), "DCP_VERSION": "1.0"}


TARGET = Target(plan_dcp_safetensors, "`HuggingFaceStorageReader` (torchtitan, Automodel), `from_pretrained`")
