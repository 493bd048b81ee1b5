"""Compare this project's optimizer step on XLA with a bare torch_xla SPMD loop.

``python -m benchmarks.xla`` trains a Llama with both loops, in turns of a few steps, from the same
weights and on the same data. Without a TPU, it uses virtual devices that share the CPU. It then
measures the work on the host and the compiled graph instead of the speed of a TPU. It fails if the
losses of the two loops differ.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import sys
import tempfile
import time
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "4")
os.environ.setdefault("USE_TORCH_XLA", "0")

import torch
from torch.nn import functional

from benchmarks import harness
from benchmarks.harness import Options, Result, check_losses, table
from benchmarks.loops import Turn
from benchmarks.machine import command_line, describe_machine, print_machine
from portable.loop import iter_steps as taken
from portable.model.parameter_groups import assign_parameter_groups
from portable.optim.optimizers import build_parameter_groups
from portable.progress import RunProgress
from portable.registry import create_backend
from portable.run.batches import build_train_loader
from portable.run.prepare import prepare_run
from portable.run.resolve import resolve_run
from portable.run.restore import restore_run
from portable.tpu.xla.runtime import torch_xla, xr, xs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from portable.backend import Backend
    from portable.batch import Batch
    from portable.run.stages import PreparedRun

SAME_LOSS = 1e-6
BARE = "bare torch_xla"
MODEL = {
    "model_type": "llama",
    "vocab_size": 4096,
    "intermediate_size": 688,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


class Ours:
    """Training loop of ``portable-train``, which reads its loss once at the end of a turn."""

    name = "portable-train"

    def __init__(self, prepared: PreparedRun, backend: Backend) -> None:
        self._prepared, self._backend = prepared, backend
        self.engine = restore_run(prepared, None).engine
        self._batches = iter(build_train_loader(prepared, 0))
        self._progress = RunProgress(0, 0)

    def turn(self, steps: int) -> float:
        until = self._progress.step + steps
        for result in taken(self._prepared, self.engine, self._batches, self._progress, until):
            last = result
        return self._backend.read_to_host([last.loss])[0]

    def close(self) -> None:
        self._batches.close()


class Bare:
    """Hand-written training loop that follows torch_xla's SPMD guide.

    It annotates each tensor with its sharding, takes the optimizer step, and calls ``torch_xla.sync``.
    """

    name = BARE

    def __init__(self, prepared: PreparedRun, weights: dict[str, Tensor], batches: list[Batch]) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_config(
            copy.deepcopy(prepared.model_config), attn_implementation="sdpa", dtype=torch.float32
        )
        model.load_state_dict(weights)
        model.config.use_cache = False
        self._device = torch.device("xla:0")
        self.model = model.to(self._device)
        model.tie_weights()
        devices = xr.global_runtime_device_count()
        self._mesh = xs.Mesh(list(range(devices)), (devices,), ("fsdp",))
        for parameter in model.parameters():
            divisible = [d for d, size in enumerate(parameter.shape) if size % devices == 0]
            largest = max(divisible, key=lambda d: parameter.shape[d], default=None)
            spec = tuple("fsdp" if d == largest else None for d in range(parameter.dim()))
            xs.mark_sharding(parameter, self._mesh, spec)
        settings = prepared.config.train
        self._optimizer = torch.optim.AdamW(
            build_parameter_groups(
                dict(model.named_parameters()),
                assign_parameter_groups(model, settings),
                settings.learning_rate,
            ),
            lr=torch.tensor(settings.learning_rate).to(self._device),
            betas=settings.betas,
            eps=settings.eps,
            capturable=True,
            foreach=False,
        )
        self._batches = iter(batches)

    def turn(self, steps: int) -> float:
        for _ in range(steps):
            batch = next(self._batches)
            placed = {name: tensor.to(self._device) for name, tensor in batch.items()}
            for tensor in placed.values():
                xs.mark_sharding(tensor, self._mesh, ("fsdp", None))
            logits = self.model(input_ids=placed["input_ids"]).logits
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), placed["labels"].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            torch_xla.sync()
        return float(loss.detach())


def both(folder: Path, steps: int, **model: int) -> tuple[Backend, PreparedRun]:
    """Prepare the run for both loops, with a constant learning rate and one micro-batch per step.

    Args:
        folder: Folder of the run.
        steps: Number of steps.
        **model: Settings in the model's config that differ from the defaults.

    Returns:
        The backend, and the prepared run.
    """
    devices = xr.global_runtime_device_count()
    config = harness.quickstart(
        Options(steps=steps, warmup=0, rounds=1),
        folder,
        backend="xla",
        model__config={**MODEL, **model},
        data__seq_len=64 if model["hidden_size"] < 256 else 256,
        data__eval_fraction=0.0,
        train__global_batch_size=2 * devices,
        train__micro_batch_size=2,
    )
    backend = create_backend("xla")
    resolved = resolve_run(config, backend.name)
    return backend, prepare_run(resolved, backend)


def compare(folder: Path, *, layers: int, hidden: int, rounds: int, steps: int) -> list[Result]:
    """Measure both loops in turns, after an unmeasured turn that compiles the graphs.

    The step time is the mean over a turn.

    Args:
        folder: Folder of the run.
        layers: Number of layers in the model.
        hidden: Hidden size of the model.
        rounds: Number of measured turns.
        steps: Number of steps per turn.

    Raises:
        AssertionError: If the loops' last losses in a turn differ.
    """
    backend, prepared = both(folder, (rounds + 1) * steps, num_hidden_layers=layers, hidden_size=hidden)
    ours = Ours(prepared, backend)
    weights = {name: value.cpu() for name, value in ours.engine.model.state_dict().items()}
    loader = iter(build_train_loader(prepared, 0))
    batches = list(islice(loader, (rounds + 1) * steps))
    loader.close()
    loops: list[Bare | Ours] = [Bare(prepared, weights, batches), ours]
    turns: dict[str, list[Turn]] = {loop.name: [] for loop in loops}
    gc.collect()
    gc.freeze()
    for number in range(rounds + 1):
        for loop in loops if number % 2 else loops[::-1]:
            start = time.perf_counter()
            loss = loop.turn(steps)
            turns[loop.name].append(Turn([(time.perf_counter() - start) / steps] * steps, loss))
    gc.unfreeze()
    ours.close()
    results = [Result.of(loop, turns, turns[loop.name][-1].loss or 0.0) for loop in loops]
    check_losses(results, BARE, SAME_LOSS)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.xla", description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of a turn")
    parser.add_argument("--rounds", type=int, default=6, help="measured turns of each loop")
    harness.add_json(parser)
    given = parser.parse_args(argv)
    command = command_line("benchmarks.xla", argv)
    machine = describe_machine(torch.device("cpu"))
    machine["devices"] = f"{xr.global_runtime_device_count()} x {xr.device_type()}"
    print_machine(command, machine)
    with tempfile.TemporaryDirectory(prefix="xla-") as scratch:
        results = compare(
            Path(scratch), layers=given.layers, hidden=given.hidden, rounds=given.rounds, steps=given.steps
        )
    print(f"\n{table(results, BARE)}")
    steps = [asdict(result) for result in results]
    harness.write(given.json, command, machine, steps=steps)
    return 0


if __name__ == "__main__":
    sys.exit(main())
