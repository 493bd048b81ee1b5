"""What is left of the loss and the gradients where two ranks share sequences, here and with peers.

``python -m benchmarks.shared_sequences`` runs it, on CPUs. Each takes a step of SGD at a rate of 1, whose
change of the weights is the gradient, and is compared with plain transformers on whole sequences.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.loops import PortableLoop, Setting, cross_entropy, forget_accelerators, tell_of_cpu_ranks
from benchmarks.zero import _whole_weights as whole_weights
from gpu.zero import private_api
from portable.data.samples.loader import TrainLoader
from portable.errors import RunError, one_line
from portable.ranks.launch import launch
from portable.registry import create_backend
from portable.run.prepare import prepare
from portable.run.resolve import resolve

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from portable.backend import Batch

MODEL = {
    **harness.SMALL_MODEL,
    "model_type": "mistral",
    "max_position_embeddings": 64,
    "num_attention_heads": 4,
}
CASES: dict[str, tuple[bool | str, int | None]] = {
    "plain": (True, None),
    "window": (True, 12),
    "documents": ("documents", None),
    "documents, window": ("documents", 12),
}
"""By name: ``data.packing`` and the sliding window."""
RANKS = 2


def ulysses(model: nn.Module, batch: Batch) -> float:
    """DeepSpeed's Ulysses as Accelerate sets it up, with the Trainer's loss. Returns the loss."""
    import deepspeed
    from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    document = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    document |= {"zero_allow_untested_optimizer": True, "gradient_clipping": 1e6}
    private_api.disable_shared_memory_collectives(deepspeed)
    tell_of_cpu_ranks()
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    kernel = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    parallel = ParallelismConfig(sp_size=RANKS, sp_backend="deepspeed", sp_handler=kernel)
    accelerator: Any = Accelerator(
        parallelism_config=parallel, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=document)
    )
    engine, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    own = {name: column.chunk(RANKS, 1)[dist.get_rank()].contiguous() for name, column in batch.items()}
    loss = deepspeed_sp_compute_loss(accelerator, engine, own, False, parallel)
    accelerator.backward(loss)  # and steps
    return float(loss.item())


PEERS: dict[str, Callable[[nn.Module, Batch], float]] = {
    "DeepSpeed's Ulysses": ulysses,
}
NAMES = (PortableLoop.name, *PEERS)


def differences(name: str, case: str) -> dict[str, float]:
    """On one of two ranks: how far the loss and the gradient of ``name`` are from one rank's, relative to the
    loss and to the largest gradient."""
    packing, window = CASES[case]
    options = harness.Options(steps=1, warmup=0, rounds=1, backend="cpu", small=True)
    with tempfile.TemporaryDirectory(prefix="sequences-") as scratch:
        folder = Path(scratch)
        steps = {"train.learning_rate": 1.0, "train.optimizer": "sgd", "train.betas": [0.0, 0.0]}
        sizes = {"train.global_batch_size": 2, "train.micro_batch_size": 2, "data.seq_len": 64}
        config = harness.quickstart(options, folder, strategy="no_shard").replaced(
            {
                **steps,
                **sizes,
                "train.weight_decay": 0.0,
                "train.max_grad_norm": None,
                "data.packing": packing,
                "model.config": {**MODEL, "sliding_window": window},
                "context_parallel_size": RANKS,
            }
        )
        backend = create_backend("cpu")
        resolved = resolve(config, backend.name)
        backend.start()
        try:
            prepared = prepare(resolved, backend)
            samples = TrainLoader(
                prepared.data.train,
                seed=config.seed,
                position=0,
                global_batch_size=2,
                micro_batch_size=2,
                rank=0,
                world_size=1,
            )
            whole = next(iter(samples))
            positions = torch.arange(64).expand(2, 64)
            batch = {"position_ids": positions, **whole, "shift_labels": whole["labels"]}
            batch.pop("document_lengths", None)
            setting = Setting(prepared, whole_weights(prepared), [batch], time.perf_counter)
            alone, model = setting.build_model(), setting.build_model()
            logits = alone(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
            expected = cross_entropy(logits, batch["labels"])
            expected.backward()
            if name in PEERS:
                loss = PEERS[name](model, {key: column.contiguous() for key, column in batch.items()})
            else:
                loop = PortableLoop(prepared, folder / "portable", time.perf_counter)
                model, found = loop.model, loop.turn(1).loss
                assert found is not None
                loss = found
                loop.close()
            return {"loss": abs(loss / expected.item() - 1), **_off(alone, model)}
        finally:
            backend.stop()
            forget_accelerators()


def _off(alone: nn.Module, stepped: nn.Module) -> dict[str, float]:
    """The factor of all gradients, and the largest difference beyond it, relative to the largest gradient."""
    after = dict(stepped.named_parameters())
    pairs = []
    for name, before in alone.named_parameters():
        assert before.grad is not None
        pairs.append((before.grad.double(), (before - after[name]).detach().double()))
    factor = sum(float((true * found).sum()) for true, found in pairs)
    factor /= sum(float((true * true).sum()) for true, _ in pairs)
    off = max(float((found / factor - true).abs().max()) for true, found in pairs)
    return {"factor": factor, "gradient": off / max(float(true.abs().max()) for true, _ in pairs)}


def _rank(name: str, case: str, path: str) -> int:
    try:
        found: dict[str, Any] = differences(name, case)
    except Exception as error:  # the table has it
        Path(path).write_text(json.dumps({"error": f"{type(error).__name__}: {one_line(error)}"}), "utf-8")
        raise
    if os.environ["RANK"] == "0":
        Path(path).write_text(json.dumps(found), "utf-8")
    return 0


def compare() -> list[dict[str, Any]]:
    """Run everyone in every case, and print a line of each."""
    rows = []
    for name, case in itertools.product(NAMES, CASES):
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            with contextlib.suppress(RunError):  # which is of a rank that has written its error
                launch(_rank, (name, case, file.name), ranks=RANKS)
            found = json.loads(Path(file.name).read_text("utf-8"))
        rows.append({"name": name, "case": case, **found})
        told = found.get("error") or ", ".join(f"{key} {value:.1e}" for key, value in found.items())
        print(f"{name:<28}{case:<20}{told}", flush=True)
    return rows


if __name__ == "__main__":
    compare()
