"""The optimizer step on XLA beside a bare torch_xla SPMD loop, and how long compilation takes by depth.

``python -m benchmarks.xla`` trains one Llama with both, in turns of a few steps, from the same weights on the
same data. Without a TPU it runs on virtual devices that share the CPU: what is measured there is what the
host does and which graph results, not the speed of a TPU. It fails if, in fp32, the losses differ.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "4")
os.environ.setdefault("USE_TORCH_XLA", "0")

import torch
from torch.nn import functional

from benchmarks.machine import command_line, describe_machine
from portable.config import load_config
from portable.loop import Progress
from portable.loop import steps as taken
from portable.model.groups import groups_of
from portable.optim.optimizers import parameter_groups
from portable.registry import create_backend
from portable.run.batches import train_loader
from portable.run.prepare import prepare
from portable.run.restore import restore
from portable.run.settle import settle
from tpu.xla.graphs import counted
from tpu.xla.runtime import torch_xla, xr, xs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from portable.backend import Backend, Batch
    from portable.run.stages import Prepared

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
    """The loop of ``portable-train``, with a read of the loss at the end of a turn."""

    name = "portable-train"

    def __init__(self, prepared: Prepared, backend: Backend) -> None:
        self._prepared, self._backend = prepared, backend
        self.engine = restore(prepared, None).engine
        self._batches = iter(train_loader(prepared, 0))
        self._progress = Progress(0, 0)

    def turn(self, steps: int) -> float:
        until = self._progress.step + steps
        for result in taken(self._prepared, self.engine, self._batches, self._progress, until):
            last = result
        return self._backend.read([last.loss])[0]

    def close(self) -> None:
        self._batches.close()


class Bare:
    """A loop written by hand after the torch_xla guide: mark every tensor, step, sync."""

    name = BARE

    def __init__(self, prepared: Prepared, weights: dict[str, Tensor], batches: list[Batch]) -> None:
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
            parameter_groups(
                dict(model.named_parameters()), groups_of(model, settings), settings.learning_rate
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


def both(folder: Path, steps: int, *, loop: bool = False, **model: int) -> tuple[Backend, Prepared]:
    """The run of both: no warm-up and a constant rate, one micro-batch a step."""
    devices = xr.global_runtime_device_count()
    config = load_config(
        None,
        {
            "backend": "xla",
            "precision": "fp32",
            "output_dir": str(folder / "run"),
            "model.config": {**MODEL, **model},
            "data.seq_len": 64 if model["hidden_size"] < 256 else 256,
            "train.steps": steps,
            "train.schedule": "constant",
            "train.warmup_steps": 0,
            "train.global_batch_size": 2 * devices,
            "train.micro_batch_size": 2,
            "data.eval_fraction": 0.0,
            "xla.scan_layers": loop,
        },
    )
    backend = create_backend("xla")
    settled = settle(config, backend.name)
    return backend, prepare(settled, backend)


def compare(folder: Path, *, layers: int, hidden: int, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds a step of each turn of both loops, after a turn that compiles.

    Raises:
        AssertionError: if a turn's last losses differ.
    """
    backend, prepared = both(folder, (rounds + 1) * steps, num_hidden_layers=layers, hidden_size=hidden)
    ours = Ours(prepared, backend)
    weights = {name: value.cpu() for name, value in ours.engine.model.state_dict().items()}
    loader = iter(train_loader(prepared, 0))
    batches = list(islice(loader, (rounds + 1) * steps))
    loader.close()
    loops: list[Bare | Ours] = [Bare(prepared, weights, batches), ours]
    seconds: dict[str, list[float]] = {loop.name: [] for loop in loops}
    gc.collect()
    gc.freeze()
    for turn in range(rounds + 1):
        losses = []
        for loop in loops if turn % 2 else loops[::-1]:
            start = time.perf_counter()
            losses.append(loop.turn(steps))
            if turn:
                seconds[loop.name].append((time.perf_counter() - start) / steps)
        if abs(losses[0] - losses[1]) > SAME_LOSS * losses[0]:
            raise AssertionError(f"the losses of turn {turn} differ: {losses}")
    gc.unfreeze()
    ours.close()
    return seconds


def compile_times(folder: Path, depths: Sequence[int]) -> list[dict[str, float]]:
    """For each depth: seconds to record a step and start it, before and after its graph is known.

    Once layer by layer, and once with ``xla.scan_layers``.
    """
    rows = []
    for layers, loop in itertools.product(depths, (False, True)):
        backend, prepared = both(folder, 10, loop=loop, num_hidden_layers=layers, hidden_size=64)
        ours = Ours(prepared, backend)
        before = counted()["graphs_compiled"]
        times = []
        for _ in range(4):
            start = time.perf_counter()
            ours.turn(1)
            times.append(time.perf_counter() - start)
        compiled = counted()["graphs_compiled"] - before
        rows.append(
            {
                "layers": layers,
                "loop": loop,
                "first": times[0],
                "later": statistics.median(times[1:]),
                "graphs": compiled,
            }
        )
        ours.close()
        del ours, prepared
        gc.collect()
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.xla", description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of a turn")
    parser.add_argument("--rounds", type=int, default=6, help="measured turns of each loop")
    parser.add_argument("--depths", type=int, nargs="*", default=[2, 4, 8, 16], metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure as well")
    given = parser.parse_args(argv)
    command = command_line("benchmarks.xla", argv)
    machine = describe_machine(torch.device("cpu"))
    print(f"$ {command}")
    print("\n".join(f"{name:<13} {value}" for name, value in machine.items()))
    print(f"{'devices':<13} {xr.global_runtime_device_count()} x {xr.device_type()}")
    with tempfile.TemporaryDirectory(prefix="xla-") as scratch:
        seconds = compare(
            Path(scratch), layers=given.layers, hidden=given.hidden, rounds=given.rounds, steps=given.steps
        )
        depths = compile_times(Path(scratch), given.depths)
    bare = seconds[BARE]
    print(f"\n{'':<16}{'step, ms':>10}{'x bare':>9}")
    for name, values in seconds.items():
        ratio = statistics.median(v / b for v, b in zip(values, bare, strict=True))
        print(f"{name:<16}{1e3 * statistics.median(values):>10.1f}{ratio:>9.3f}")
    print(f"\n{'layers':>6}{'loop':>6}{'first step, s':>15}{'later, s':>10}{'graphs':>8}")
    for row in depths:
        looped = "yes" if row["loop"] else "no"
        figures = f"{row['first']:>15.2f}{row['later']:>10.3f}{row['graphs']:>8.0f}"
        print(f"{row['layers']:>6}{looped:>6}{figures}")
    if given.json is not None:
        document = {"command": command, "machine": machine, "steps": seconds, "depths": depths}
        given.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
