"""Write sharded checkpoints of small models: ``python -m tests.converters.make_types OUT TYPE...``.

For each type, two ranks write a DCP checkpoint and rank files with FSDP2, and ZeRO-2 and ZeRO-3 checkpoints
with DeepSpeed itself. ``save_pretrained`` writes the reference.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard

from tests.converters.make_dcp import launch, prepare
from tests.converters.make_deepspeed import config, deepspeed, start
from tests.published_names import FILE
from tests.tiny_models import tiny_model

SOME = ("mixtral", "gpt_neox", "gpt_oss")
CANNOT_BE_SMALL = ("dots3_note", "musicgen", "musicgen_melody", "qwen4_exp_text")
FORMS = ("dcp", "fsdp-ranks", "zero2", "zero3")


def write_type(out: Path, model_type: str) -> None:
    """Write the checkpoints of one model type, on each rank."""
    model = tiny_model(model_type).float()
    torch.manual_seed(1)
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.normal_()
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        model.save_pretrained(out / "pretrained")
        for form in FORMS:
            model.config.save_pretrained(out / form)
    dist.barrier()
    sharded: Any = copy.deepcopy(model)
    fully_shard(sharded)
    dcp_save({"model": sharded.state_dict()}, checkpoint_id=out / "dcp")
    torch.save(sharded.state_dict(), out / "fsdp-ranks" / f"model_world_size_{world}_rank_{rank}.pt")
    for stage in (2, 3):
        engine, *_ = deepspeed.initialize(
            model=(zero_model := copy.deepcopy(model)),
            model_parameters=[p for p in zero_model.parameters() if p.requires_grad],
            config=config(stage, "fp32", {}),
        )
        engine.save_checkpoint(str(out / f"zero{stage}"))
        engine.destroy()


def some(out: Path) -> None:
    """Write the checkpoints of the types in the default test suite."""
    write(out, SOME)


def every(out: Path) -> None:
    """Write the checkpoints of all causal types whose tensors are converted."""
    write(out, list_converted_types())


def list_converted_types() -> list[str]:
    """Return the causal model types whose published tensors differ from the tensors in memory."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    table = json.loads(FILE.read_bytes())
    excluded = {*CANNOT_BE_SMALL, *SOME}
    return [
        name
        for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        if name not in excluded
        and any(table["rules"][number]["kind"] == "convert" for number in table["keys"].get(name, ()))
    ]


def write(out: Path, model_types: Sequence[str]) -> None:
    """Write the checkpoints of several types."""

    def write_all(rank: int, world: int, folder: Path) -> None:
        start(rank, world)
        for model_type in model_types:
            write_type(folder / model_type, model_type)

    prepare()
    launch(2, out, write_all)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2:])
