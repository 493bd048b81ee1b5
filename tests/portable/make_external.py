"""Write training checkpoints of a tiny Llama with the code of other programs, and their expected values.

Run as `python -m tests.portable.make_external OUT [xla]`. Each checkpoint gets a file `<name>.ref.pt` with
the values of the live run: `{"model": ..., "optim": {name: {...}}}`. The layout of torchtitan is written with
torch's DCP.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from tests.runs import TINY_MODEL

STEPS = 3
RATE, BETAS, DECAY = 2e-3, (0.8, 0.95), 0.1


def llama() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY_MODEL))
    model.train()
    return model


def batch(step: int, rank: int = 0) -> dict[str, torch.Tensor]:
    """Return random tokens."""
    tokens = torch.randint(0, 384, (2, 16), generator=torch.Generator().manual_seed(100 * rank + step))
    return {"input_ids": tokens, "labels": tokens}


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Build AdamW with the parameter groups of the Trainer."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS)


def trained(model: Any, optimizer: torch.optim.Optimizer, rank: int = 0) -> None:
    for step in range(STEPS):
        model(**batch(step, rank)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


TEXTS: Any = [{name: tensor[0] for name, tensor in batch(index).items()} for index in range(16)]


def trainer_arguments(folder: Path, **more: Any) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        save_steps=STEPS,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        learning_rate=RATE,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=DECAY,
        optim="adamw_torch",
        lr_scheduler_type="constant",
        logging_steps=1,  # stored in the checkpoint; a resumed Trainer uses it
        **more,
    )


def live(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the values of a run on one rank."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        "model": {name: value.detach().clone() for name, value in model.state_dict().items()},
        "optim": {names[p]: dict(values) for p, values in optimizer.state.items()},
    }


def one_rank(rank: int, world: int, out: Path) -> None:
    from transformers import Trainer

    model = llama()
    run: Any = Trainer(model=model, args=trainer_arguments(out / "trainer"), train_dataset=TEXTS)
    run.train()
    torch.save(live(model, run.optimizer.optimizer), out / "trainer.ref.pt")
    alone = trainer_arguments(out / "trainer-model-only", save_only_model=True)
    Trainer(model=llama(), args=alone, train_dataset=TEXTS).train()
    model = llama()
    optimizer = adamw(model)
    trained(model, optimizer)
    (out / "torch").mkdir()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEPS}
    torch.save(saved, out / "torch" / "last.pt")
    torch.save(live(model, optimizer), out / "torch.ref.pt")
    accelerate(out, model, optimizer)


def accelerate(out: Path, model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Call `save_state` on one rank: it writes safetensors and optimizer.bin.

    Only the state of Adam contains the step.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    accelerator.prepare(model, optimizer, scheduler)
    accelerator.save_state(str(out / "accelerate"))
    model.config.save_pretrained(out / "accelerate")
    torch.save(live(model, optimizer), out / "accelerate.ref.pt")


def sharded(rank: int, world: int, out: Path) -> None:
    """FSDP2, saved by Accelerate's functions, which the Trainer calls too, and as torchtitan lays it out."""
    from types import SimpleNamespace

    import torch.distributed as dist
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
    )
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
    from torch.distributed.fsdp import fully_shard
    from transformers import TrainerState, get_linear_schedule_with_warmup

    from tests.converters.make_peers import save_reference

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    PartialState(cpu=True)
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = adamw(model)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, 10)
    for step in range(STEPS):
        model(**batch(step, rank)).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator: Any = SimpleNamespace(
        num_processes=world,
        process_index=rank,
        wait_for_everyone=dist.barrier,
        is_main_process=not rank,
    )
    folder = out / "accelerate-fsdp"
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    save_fsdp_model(plugin, accelerator, model, str(folder))
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, str(folder))
    save_reference(model, optimizer, folder)
    flat = get_optimizer_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    more = {"train_state": {"step": STEPS, "ntokens_seen": 192}, "lr_scheduler": {"last_epoch": STEPS}}
    titan = out / "torchtitan" / "checkpoint" / f"step-{STEPS}"
    dcp_save({**get_model_state_dict(model), "optimizer": flat, **more}, checkpoint_id=titan)
    own = llama3(get_model_state_dict(model), flat)
    dcp_save({**own, **more}, checkpoint_id=out / "torchtitan-llama3" / "checkpoint" / f"step-{STEPS}")
    if rank == 0:
        for name in ("torchtitan", "torchtitan-llama3", "trainer-fsdp"):
            shutil.copy(out / "accelerate-fsdp.ref.pt", out / f"{name}.ref.pt")
        copy = out / "trainer-fsdp" / f"checkpoint-{STEPS}"
        shutil.copytree(out / "accelerate-fsdp", copy)
        state = TrainerState(global_step=STEPS, epoch=0.75, max_steps=10, train_batch_size=2)
        state.save_to_json(str(copy / "trainer_state.json"))
        torch.save(scheduler.state_dict(), copy / "scheduler.pt")
    dist.barrier()


def llama3(weights: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
    """Convert a state to the names and the row order of torchtitan's Llama 3.

    Torchtitan stores interleaved pairs of rows instead of two halves. See the table and the permutation in
    its adapter (models/llama3/state_dict_adapter.py).
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    table = {
        "model.embed_tokens": "tok_embeddings",
        "model.norm": "norm",
        "model.layers": "layers",
        "self_attn.q_proj": "attention.qkv_linear.wq",
        "self_attn.k_proj": "attention.qkv_linear.wk",
        "self_attn.v_proj": "attention.qkv_linear.wv",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }

    def converted(key: str, value: Any) -> tuple[str, Any]:
        heads = 4 if "q_proj" in key else 2 if "k_proj" in key else 0
        if heads and isinstance(value, DTensor):
            rows, columns = value.shape
            whole = value.full_tensor().view(heads, 2, rows // heads // 2, columns)
            paired = whole.transpose(1, 2).reshape(rows, columns).contiguous()
            value = distribute_tensor(paired, value.device_mesh, value.placements)
        for theirs, ours in table.items():
            key = key.replace(theirs, ours)
        return key, value

    named = dict(converted(key, value) for key, value in weights.items())
    return {**named, "optimizer": dict(converted(key, value) for key, value in optimizer.items())}


def trainer_zero(rank: int, world: int, out: Path) -> None:
    from tests.converters.make_deepspeed import gather, start

    start(rank, world)
    from transformers import Trainer

    for stage, precision in ((2, "fp32"), (3, "bf16")):
        name = f"trainer-zero{stage}"
        bf16 = precision == "bf16"
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": bf16},
            "zero_optimization": {"stage": stage},
            "zero_force_ds_cpu_optimizer": False,
        }
        more = {"deepspeed": settings, "bf16": bf16}
        run = Trainer(model=llama(), args=trainer_arguments(out / name, **more), train_dataset=TEXTS)
        run.train()
        reference = gather(run.model_wrapped, stage)
        if rank == 0:
            torch.save(reference, out / f"{name}.ref.pt")


def deepspeed_alone(out: Path) -> None:
    """Copy only DeepSpeed's files of a checkpoint, without the files of the Trainer."""
    tag = f"global_step{STEPS}"
    shutil.copytree(out / "trainer-zero2" / f"checkpoint-{STEPS}" / tag, out / "deepspeed" / tag)
    (out / "deepspeed" / "latest").write_text(tag)
    shutil.copy(out / "trainer-zero2.ref.pt", out / "deepspeed.ref.pt")


def xla(out: Path) -> None:
    """Two ranks' files of the v1 FSDP, named as the Trainer names them."""
    from tests.converters import make_xla

    make_xla.write(out, "xla-fsdp", make_xla.Run(2, make_xla.trainer, build=llama))


def main() -> None:
    """Write everything under the folder given."""
    warnings.simplefilter("ignore")
    out = Path(sys.argv[1])
    if sys.argv[2:] == ["xla"]:
        xla(out)
        return
    torch.set_num_threads(1)  # before the forks: OpenMP's threads do not survive them
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401 - once, not once a rank
    import transformers.trainer  # noqa: F401 - likewise

    import tests.converters.make_deepspeed  # noqa: F401 - before the forks, too
    from tests.converters.make_dcp import launch

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    adamw(torch.nn.Linear(2, 2)).step()
    launch(1, out, one_rank)
    launch(2, out, sharded)
    launch(2, out, trainer_zero)
    deepspeed_alone(out)


if __name__ == "__main__":
    main()
