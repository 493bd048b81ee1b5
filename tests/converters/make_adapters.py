"""Write checkpoints of peft models with the programs that train them, and the adapter that peft saves.

`<name>/` is the checkpoint of the program. `<name>.adapter/` is the result of `PeftModel.save_pretrained` for
the same values, gathered from the live run. Ranks are forked from one process that has imported DeepSpeed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard

from tests.converters.make_dcp import launch
from tests.converters.make_deepspeed import config as deepspeed_config
from tests.converters.make_deepspeed import deepspeed, start
from tests.converters.make_peers import save_with_accelerate
from tests.tiny_models import tiny_model

LORA: dict[str, Any] = {
    "r": 3,
    "lora_alpha": 5,
    "use_dora": True,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "modules_to_save": ["lm_head"],
    "bias": "lora_only",
    "task_type": "CAUSAL_LM",
}


def llama(*, tied: bool = False) -> Any:
    return tiny_model("llama", attention_bias=True, tie_word_embeddings=tied)


def adapted(*, tied: bool = False) -> Any:
    model = llama(tied=tied)
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(**{**LORA, "modules_to_save": ["lm_head"][tied:]}))


def loss_of(model: Any, step: int) -> torch.Tensor:
    tokens = torch.arange(step, step + 6)[None] + dist.get_rank() % 2
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


def save_reference(values: dict[str, torch.Tensor], folder: str, *, tied: bool = False) -> None:
    """Save a model with these values by peft."""
    model = adapted(tied=tied)
    missing, unexpected = model.load_state_dict(values, strict=False)
    assert not unexpected
    assert not [name for name in missing if "lora" in name]
    model.save_pretrained(folder)


def zero(
    out: Path, name: str, stage: int, precision: str = "fp32", *, frozen: bool = False, tied: bool = False
) -> None:
    """Save as the Trainer does (only trained parameters), or as Accelerate's `save_state` (all of them)."""
    model = adapted(tied=tied)
    settings = deepspeed_config(stage, precision, {})
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=settings)
    for step in range(2):
        engine.backward(loss_of(engine, step))
        engine.step()
    engine.save_checkpoint(str(out / name), exclude_frozen_parameters=not frozen)
    values = {
        name: deepspeed.utils.safe_get_full_fp32_param(parameter).clone()
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }
    if dist.get_rank() == 0:
        save_reference(values, f"{out / name}.adapter", tied=tied)
    engine.destroy()
    dist.barrier()


def fsdp(out: Path) -> None:
    """Save as Accelerate and the Trainer do under FSDP2: all parameters, or only the adapter."""
    PartialState(cpu=True)
    model: Any = adapted()
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    values: Any = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    for kind in ("sharded", "full"):
        for alone in (False, True):
            folder = out / f"fsdp-{kind}{'-alone' if alone else ''}"
            how = f"{kind.upper()}_STATE_DICT"
            save_with_accelerate(folder, model, optimizer, 2, how, adapter_only=alone)
            if dist.get_rank() == 0:
                save_reference(values, f"{folder}.adapter")
            dist.barrier()


def two_ranks(rank: int, world: int, out: Path) -> None:
    start(rank, world)
    zero(out, "zero1", 1)
    zero(out, "zero2-bf16", 2, "bf16")
    zero(out, "zero3", 3)
    zero(out, "zero3-tied", 3, tied=True)
    zero(out, "zero2-frozen", 2, frozen=True)
    zero(out, "zero3-frozen", 3, frozen=True)
    fsdp(out)


def main(out: Path) -> None:
    launch(2, out, two_ranks)
    llama().save_pretrained(out / "base")
    # The names of peft's modules in the transformers model itself.
    model = adapted()
    for parameter in model.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter) if parameter.requires_grad else 0
    live = model.base_model.model
    trained = {name for name, parameter in live.named_parameters() if parameter.requires_grad}
    state = {name: value for name, value in live.state_dict().items() if name in trained}
    dcp_save({"model": state}, checkpoint_id=out / "live", no_dist=True)
    for name in ("live", "pickled"):
        model.save_pretrained(f"{out / name}.adapter")
    model.save_pretrained(out / "pickled", safe_serialization=False)
    for folder in out.glob("*.adapter"):
        shutil.copy(folder / "adapter_config.json", out / folder.stem)
