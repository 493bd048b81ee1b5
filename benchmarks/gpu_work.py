"""What :mod:`benchmarks.gpu` measures beside loops: the guide's rows, a roofline, saving and offloading."""

from __future__ import annotations

import json
import random
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_cases import (
    OURS,
    Case,
    common_settings,
    free_memory,
    prepared,
    prepared_case,
    start_counting,
)
from benchmarks.loops import PortableLoop
from portable.checkpoint.store import Checkpoints
from portable.errors import UserError
from portable.loop import Progress, steps
from portable.model.parameters import state_tensors
from portable.registry import create_backend
from portable.run.batches import train_loader
from portable.run.restore import restore
from portable.run.save import save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from portable.backend import Engine
    from portable.run.stages import Prepared

# -- the table of the guide --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bert:
    """A classifier and its data."""

    config: dict[str, Any]
    samples: int
    seq_len: int


# bert-large-uncased; an epoch of the guide has 512 samples.
FULL_BERT = Bert(
    {
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 512,
    },
    samples=512,
    seq_len=512,
)
SMALL_BERT = Bert(
    {
        "model_type": "bert",
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    },
    samples=16,
    seq_len=32,
)


def write_classes(bert: Bert, folder: Path) -> None:
    """The guide's data: random texts of two classes."""
    words = random.Random(0)
    with (folder / "classes.jsonl").open("w") as file:
        for i in range(bert.samples):
            text = " ".join(str(words.randrange(10**6)) for _ in range(bert.seq_len))
            file.write(json.dumps({"text": text, "label": i % 2}) + "\n")


_ONE = {"train.micro_batch_size": 1}
_RECOMPUTED = {**_ONE, "memory.activation_checkpointing": "full"}
_ALL = {**_RECOMPUTED, "precision": "fp16"}


@dataclass(frozen=True)
class Row:
    """A way to train, and what Hugging Face's single-GPU guide measured for it with the Trainer on a V100.

    Attributes:
        guide: seconds for the epoch, samples a second, MB of GPU memory in use; None where it has no row.
    """

    name: str
    settings: dict[str, Any]
    guide: tuple[float, float, int] | None


ROWS = (
    Row("vanilla", {}, (57.82, 8.86, 14949)),
    Row("gradient accumulation, 4 x 1", _ONE, (66.03, 7.75, 8681)),
    Row("and gradient checkpointing", _RECOMPUTED, (85.47, 5.99, 6775)),
    Row("fp16", {"precision": "fp16"}, (27.46, 18.64, 13939)),
    Row("all of these", _ALL, (50.76, 10.09, 7275)),
    Row("Adafactor", {"train.optimizer": "adafactor"}, (64.31, 7.96, 12295)),
    Row("all, Adafactor", {**_ALL, "train.optimizer": "adafactor"}, (56.54, 9.06, 4847)),
    Row("8-bit Adam", {"train.optimizer": "adamw_8bit"}, (55.95, 9.15, 13085)),
    Row("all, 8-bit Adam", {**_ALL, "train.optimizer": "adamw_8bit"}, (49.46, 10.35, 5363)),
    Row("bf16", {"precision": "bf16"}, None),
)


def measure_row(row: Row, bert: Bert, device: str, folder: Path) -> dict[str, Any]:
    """An epoch of BERT classification: seconds, samples a second, and memory reported by the driver.

    Two steps before it are not counted.
    """
    found: dict[str, Any] = {"name": row.name, "guide": row.guide}
    backend = create_backend(device)
    steps = bert.samples // 4
    settings = {
        **common_settings(folder),
        "model.config": bert.config,
        "model.task": "sequence-classification",
        "data.source": str(folder / "classes.jsonl"),
        "data.packing": False,
        "data.seq_len": bert.seq_len,
        "precision": "fp32",
        "train.steps": 2 + steps,
        "train.global_batch_size": 4,
        "train.micro_batch_size": 4,
        **row.settings,
    }
    free_memory(device)
    start_counting(device)
    try:
        loop = PortableLoop(prepared(settings, backend), _fresh(folder / "row"), time.perf_counter)
        loop.turn(2)
        seconds = sum(loop.turn(steps).seconds)
        loop.close()
        counted = backend.diagnostics.driver_memory()
    except UserError as error:  # a precision that this device lacks
        return {**found, "refused": str(error)}
    finally:
        backend.stop()
    return {
        **found,
        "seconds": seconds,
        "samples_per_second": steps * 4 / seconds,
        "driver_memory": None if counted is None else counted[0],
        "peak_memory": torch.cuda.max_memory_allocated() if device == "cuda" else None,
    }


# -- the roofline ------------------------------------------------------------------------------------------

KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "matrix products": ("gemm", "cutlass", "nvjet", "matmul", "aten::mm", "addmm", "bmm", "xmma"),
    "optimizer and clipping": ("multi_tensor", "fused_adam", "adamw", "foreach", "lpnorm"),
    "loss": ("softmax", "cross_entropy", "nll_loss"),
    "copies": ("memcpy", "memset", "copy"),
}


def measure_roofline(case: Case, device: str, folder: Path, trace: Path | None) -> dict[str, Any]:
    """The time of a step at the measured ceilings, and where the real time went.

    Args:
        case: whose files are in ``folder``.
        device: cuda or cpu.
        folder: for all files.
        trace: receives the kernels of a step, as chrome://tracing reads them.
    """
    backend = create_backend(device)
    run = prepared_case(case, OURS, folder, backend)
    loop = PortableLoop(run, _fresh(folder / "roofline"), time.perf_counter)
    try:
        loop.turn(case.plan.warmup)
        step = statistics.median(loop.turn(case.plan.steps).seconds)
        spent = _profiled(loop, device, trace)
        ceilings = _ceilings(case, backend.device)
        bounds = _bounds(case, run, ceilings)
        return {"step_seconds": step, **ceilings, "bounds_seconds": bounds, "spent_seconds": spent}
    finally:
        loop.close()
        backend.stop()


def _bounds(case: Case, run: Prepared, ceilings: dict[str, float]) -> dict[str, float]:
    """The least seconds that each part of a step can take, by FLOPs or by bytes, at the measured ceilings."""
    config = run.model_config
    flops, bandwidth = ceilings["matrix_flops"], ceilings["bytes_per_second"]
    whole, micro = case.sequences
    tokens = whole * case.seq_len
    hidden, vocabulary, layers = config.hidden_size, config.vocab_size, config.num_hidden_layers
    weights = run.parameters - vocabulary * hidden  # the embedding is looked up
    width = 4 if case.precision == "fp32" else 2
    return {
        # Forward once, backward twice; 2 FLOPs a weight and token each.
        "matrix products": 6 * weights * tokens / flops,
        # Two products forward, five backward with what flash attention computes again; half is masked.
        "attention": 7 * layers * hidden * case.seq_len * tokens / flops,
        # Reads weight, gradient and both moments, writes all but the gradient; the norm reads it, the
        # clipping reads and writes it. All of fp32.
        "optimizer and clipping": 4 * (7 + 3) * run.parameters / bandwidth,
        # Reads the fp32 weights and writes them in the compute type, for every micro-batch.
        "casting weights": (0 if width == 4 else (4 + 2) * weights * (whole // micro) / bandwidth),
        # Logits are written and read forward, and once more backward with their gradient, in fp32.
        "loss": 6 * 4 * vocabulary * tokens / bandwidth,
        # Of a layer, at the least: two norms, the rotation, the gated product and two sums, each input read
        # and each output written once forward and twice backward.
        "between the products": 3
        * width
        * (10 * hidden + 3 * config.intermediate_size)
        * layers
        * tokens
        / bandwidth,
    }


def _ceilings(case: Case, device: torch.device) -> dict[str, float]:
    """FLOP/s of the step's largest common product, and bytes a second of a copy."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.precision]
    tokens = case.sequences[1] * case.seq_len
    hidden, inner = case.model["hidden_size"], case.model["intermediate_size"]
    left = torch.randn(tokens, hidden, device=device).to(dtype)
    right = torch.randn(hidden, inner, device=device).to(dtype)
    product = _seconds(lambda: left @ right, device)
    data = torch.randn(tokens * hidden * (8 if device.type == "cuda" else 1), device=device)
    other = torch.empty_like(data)
    copied = _seconds(lambda: other.copy_(data), device)
    return {
        "matrix_flops": 2 * tokens * hidden * inner / product,
        "bytes_per_second": 2 * data.numel() * data.element_size() / copied,
    }


def _seconds(work: Callable[[], object], device: torch.device, times: int = 20) -> float:
    """The median over five rounds of the mean of some calls."""
    rounds = []
    for _ in range(6):
        begin = time.perf_counter()
        for _ in range(times):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        rounds.append((time.perf_counter() - begin) / times)
    return statistics.median(rounds[1:])


def _profiled(loop: PortableLoop, device: str, file: Path | None) -> dict[str, float]:
    """Seconds of one step by kind of kernel (on the CPU: of operator), and those with none running."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as trace:
        wall = sum(loop.turn(1).seconds)
    if file is not None:
        trace.export_chrome_trace(str(file))
    spent = dict.fromkeys([*KINDS, "other kernels"], 0.0)
    for event in trace.key_averages():
        micros = event.self_device_time_total if cuda else event.self_cpu_time_total
        spent[_kind(event.key.lower())] += micros / 1e6
    spent["nothing running"] = max(0.0, wall - sum(spent.values()))
    return spent


def _kind(kernel: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(w in kernel for w in words)), "other kernels")


# -- saving and offloading ---------------------------------------------------------------------------------

STAGED, BLOCKED, COMPLETE = "a bare copy to page-locked memory", "save: blocked", "save: complete"
TO_HOST, TO_DEVICE = "gradients to the host", "parameters to the device"


def measure_saving(
    case: Case, device: str, folder: Path, rounds: int = 3, seconds: float = 300.0
) -> dict[str, Any]:
    """How fast offloading copies, and what a save in the background blocks, beside bare copies.

    Args:
        case: whose files are in ``folder``.
        device: cuda or cpu.
        folder: for all files.
        rounds: of each; the first of a kind, which allocates page-locked memory, is told apart.
        seconds: after which no other save begins.

    Returns:
        seconds by name, a list each, and the bytes of the state and of the parameters.
    """
    end = time.monotonic() + seconds
    offloaded: dict[str, list[float]] = {TO_HOST: [], TO_DEVICE: []}
    saved: dict[str, list[float]] = {STAGED: [], BLOCKED: [], COMPLETE: []}
    with _engine(case, device, folder, {"memory.offload_optimizer": "cpu"}) as (run, engine):
        host: Any = engine._host
        parameters = [p for p in engine.model.parameters() if p.requires_grad]
        parameter_bytes = sum(p.numel() * p.itemsize for p in parameters)
        for _ in range(rounds):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            offloaded[TO_HOST].append(_timed(host.fetch_gradients, device))
            offloaded[TO_DEVICE].append(_timed(host.copy_back, device))
        del engine, host, parameters, parameter
    free_memory(device)
    with _engine(case, device, folder) as (run, engine):
        checkpoints = Checkpoints(folder / "saves", keep=1, rank=0)
        state = [t for t in _tensors(engine) if t.numel()]
        held = [torch.empty(t.shape, dtype=t.dtype, pin_memory=device == "cuda") for t in state]
        for turn in range(rounds):
            if turn and time.monotonic() > end:
                break
            saved[STAGED].append(_timed(partial(_copy_all, state, held), device))
            begun = time.perf_counter()
            saving = partial(save, run, checkpoints, engine, Progress(turn + 1, turn + 1))
            saved[BLOCKED].append(_timed(saving, device))
            checkpoints.finish()
            saved[COMPLETE].append(time.perf_counter() - begun)
        state_bytes = sum(t.numel() * t.itemsize for t in state)
    return {"seconds": saved | offloaded, "state_bytes": state_bytes, "parameter_bytes": parameter_bytes}


@contextmanager
def _engine(
    case: Case, device: str, folder: Path, more: dict[str, Any] | None = None
) -> Iterator[tuple[Prepared, Any]]:
    """The run of ``case``, strategy full_shard, and its engine after one step, with optimizer state."""
    backend = create_backend(device)
    settings = {**case.settings, "strategy": "full_shard", "compile": False, **(more or {})}
    run = prepared_case(replace(case, settings=settings), OURS, folder, backend)
    try:
        engine: Any = restore(run, None).engine
        _step(run, engine)
        yield run, engine
    finally:
        backend.stop()


def _tensors(engine: Any) -> list[torch.Tensor]:
    """The tensors of a checkpoint: weights and moments."""
    from portable.engines.fsdp.optimizer_state import to_store

    optimizer = to_store(engine._optimizer, engine._trained)
    moments = [value for values in optimizer["state"].values() for value in values.values()]
    return [
        value.detach()
        for value in [*state_tensors(engine.model).values(), *moments]
        if isinstance(value, torch.Tensor)
    ]


def _step(run: Prepared, engine: Engine) -> None:
    """Take one optimizer step, so that the optimizer has its state."""
    batches = iter(train_loader(run, 0))
    list(steps(run, engine, batches, Progress(0, 0), 1))
    batches.close()


def _copy_all(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)


def _timed(work: Callable[[], object], device: str) -> float:
    """Seconds of a call, and of what it queued on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _fresh(folder: Path) -> Path:
    """An unused name beside ``folder``."""
    number = 0
    while (path := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return path
