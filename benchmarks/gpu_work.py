"""The pieces that :mod:`benchmarks.gpu` measures: a loop, a row of the guide's table, the roofline."""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.loops import AccelerateLoop, BareLoop, Loop, PortableLoop, Setting, TrainerLoop
from benchmarks.train_overhead import forget_accelerators
from portable.config import load_config
from portable.errors import UserError
from portable.registry import create_backend
from portable.run.prepare import Prepared, prepare
from portable.run.settle import settle

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.loops import Turn
    from portable.backend import Backend

CONTESTANTS = ("bare PyTorch", "portable-train", "Accelerate", "Trainer")


@dataclass(frozen=True)
class Scale:
    """Sizes of models and data."""

    llama: dict[str, Any]
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    precision: str
    compile: bool
    lines: int
    warmup: int
    steps: int
    bert: dict[str, Any]
    bert_samples: int
    bert_seq_len: int


FULL = Scale(
    llama={
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    seq_len=4096,
    global_batch_size=16,
    micro_batch_size=4,
    precision="bf16",
    compile=True,
    lines=60_000,
    warmup=3,
    steps=6,
    # bert-large-uncased
    bert={
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "max_position_embeddings": 512,
    },
    bert_samples=512,
    bert_seq_len=512,
)
SMALL = Scale(
    llama={
        "model_type": "llama",
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    },
    seq_len=32,
    global_batch_size=4,
    micro_batch_size=2,
    precision="fp32",
    compile=False,
    lines=600,
    warmup=1,
    steps=2,
    bert={
        "model_type": "bert",
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
    },
    bert_samples=16,
    bert_seq_len=32,
)
SCALES = {"full": FULL, "small": SMALL}


def write_texts(folder: Path, scale: Scale) -> None:
    """The data of both measurements; the tokens are cached beside it, so that one process makes them."""
    words = random.Random(0)
    (folder / "text.txt").write_text(
        "\n".join(f"line {i} of a text with {i * i} words" for i in range(scale.lines))
    )
    with (folder / "classes.jsonl").open("w") as file:
        for i in range(scale.bert_samples):
            text = " ".join(str(words.randrange(10**6)) for _ in range(scale.bert_seq_len))
            file.write(json.dumps({"text": text, "label": i % 2}) + "\n")


def _settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "run"),
        "data.cache_dir": str(folder / "cache"),
        "data.eval_fraction": 0.0,
        "train.schedule": "constant",
        "train.warmup_steps": 0,
        "train.eval_every": None,
        "log.trackers": [],
    }


def _prepared(settings: dict[str, Any], backend: Backend) -> Prepared:
    settled = settle(load_config(None, settings), backend.name)
    backend.start()
    with redirect_stderr(StringIO()):
        return prepare(settled, backend)


def _llama(scale: Scale, folder: Path, backend: Backend) -> Prepared:
    settings = {
        **_settings(folder),
        "model.config": scale.llama,
        "data.source": str(folder / "text.txt"),
        "data.seq_len": scale.seq_len,
        "precision": scale.precision,
        "compile": scale.compile,
        "train.steps": scale.warmup + scale.steps,
        "train.global_batch_size": scale.global_batch_size,
        "train.micro_batch_size": scale.micro_batch_size,
    }
    return _prepared(settings, backend)


# -- the training step -------------------------------------------------------------------------------------


def measure_loop(name: str, scale: Scale, device: str, folder: Path) -> dict[str, Any]:
    """Train the Llama with one contestant: its steps' seconds, tokens/s, MFU, memory and last loss."""
    backend = create_backend(device)
    prepared = _llama(scale, folder, backend)
    scratch = _fresh(folder / "loop")
    loop: Loop | TrainerLoop
    if name == PortableLoop.name:
        loop = PortableLoop(prepared, scratch, time.perf_counter)
    else:
        loop = _peer(name, prepared, scratch, scale)
    _start_counting(device)
    try:
        turn, loss = _two_turns(loop, scale)
        seconds = statistics.median(turn.seconds)
        tokens = scale.global_batch_size * scale.seq_len / seconds
        peak = backend.peak_flops(prepared.config.precision)
        return {
            "name": name,
            "step_seconds": turn.seconds,
            "tokens_per_second": tokens,
            "mfu": None if peak is None else tokens * prepared.flops_per_token / peak,
            "peak_memory": torch.cuda.max_memory_allocated() if device == "cuda" else None,
            "loss": loss,
        }
    finally:
        if isinstance(loop, PortableLoop):
            loop.close()
        backend.stop()
        forget_accelerators()


def _peer(name: str, prepared: Prepared, folder: Path, scale: Scale) -> Loop | TrainerLoop:
    setting = Setting.from_scratch(prepared, time.perf_counter, steps=scale.warmup + scale.steps)
    if name == AccelerateLoop.name:
        return AccelerateLoop(setting)
    if name == TrainerLoop.name:
        return TrainerLoop(setting, folder, logging_steps=scale.steps)
    return BareLoop(setting, name)


def _two_turns(loop: Loop | TrainerLoop, scale: Scale) -> tuple[Turn, float | None]:
    """A turn to warm up, and one that counts."""
    if isinstance(loop, TrainerLoop):
        turns: list[Turn] = []
        loop.run([scale.warmup, scale.steps], lambda _, turn: turns.append(turn))
        return turns[-1], None
    loop.turn(scale.warmup)
    turn = loop.turn(scale.steps)
    return turn, turn.loss


# -- the table of the guide --------------------------------------------------------------------------------

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


def measure_row(row: Row, scale: Scale, device: str, folder: Path) -> dict[str, Any]:
    """An epoch of BERT classification: seconds, samples a second, and memory reported by the driver.

    Two steps before it are not counted.
    """
    backend = create_backend(device)
    steps = scale.bert_samples // 4
    settings = {
        **_settings(folder),
        "model.config": scale.bert,
        "model.task": "sequence-classification",
        "data.source": str(folder / "classes.jsonl"),
        "data.packing": False,
        "data.seq_len": scale.bert_seq_len,
        "precision": "fp32",
        "train.steps": 2 + steps,
        "train.global_batch_size": 4,
        "train.micro_batch_size": 4,
        **row.settings,
    }
    try:
        prepared = _prepared(settings, backend)
        _start_counting(device)
        loop = PortableLoop(prepared, _fresh(folder / "row"), time.perf_counter)
        loop.turn(2)
        seconds = sum(loop.turn(steps).seconds)
        loop.close()
        counted = backend.diagnostics.driver_memory()
    except UserError as error:  # a precision that this device lacks
        return {"name": row.name, "guide": row.guide, "refused": str(error)}
    finally:
        backend.stop()
    return {
        "name": row.name,
        "guide": row.guide,
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


def measure_roofline(scale: Scale, device: str, folder: Path) -> dict[str, Any]:
    """The time of a step at the measured ceilings, and where the real time went."""
    backend = create_backend(device)
    prepared = _llama(scale, folder, backend)
    loop = PortableLoop(prepared, _fresh(folder / "roofline"), time.perf_counter)
    try:
        loop.turn(scale.warmup)
        step = statistics.median(loop.turn(scale.steps).seconds)
        spent = _profiled(loop, device)
        ceilings = _ceilings(scale, backend.device)
        bounds = _bounds(scale, prepared, ceilings)
        return {"step_seconds": step, **ceilings, "bounds_seconds": bounds, "spent_seconds": spent}
    finally:
        loop.close()
        backend.stop()


def _bounds(scale: Scale, prepared: Prepared, ceilings: dict[str, float]) -> dict[str, float]:
    """The least seconds that each part of a step can take, by FLOPs or by bytes, at the measured ceilings."""
    config = prepared.model_config
    flops, bandwidth = ceilings["matrix_flops"], ceilings["bytes_per_second"]
    tokens = scale.global_batch_size * scale.seq_len
    hidden, vocabulary, layers = config.hidden_size, config.vocab_size, config.num_hidden_layers
    weights = prepared.parameters - vocabulary * hidden  # the embedding is looked up
    width = 4 if scale.precision == "fp32" else 2
    micro_batches = scale.global_batch_size // scale.micro_batch_size
    return {
        # Forward once, backward twice; 2 FLOPs a weight and token each.
        "matrix products": 6 * weights * tokens / flops,
        # Two products forward, five backward with what flash attention computes again; half is masked.
        "attention": 7 * layers * hidden * scale.seq_len * tokens / flops,
        # Reads weight, gradient and both moments, writes all but the gradient; the norm reads it, the
        # clipping reads and writes it. All of fp32.
        "optimizer and clipping": 4 * (7 + 3) * prepared.parameters / bandwidth,
        # Reads the fp32 weights and writes them in the compute type, for every micro-batch.
        "casting weights": (0 if width == 4 else (4 + 2) * weights * micro_batches / bandwidth),
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


def _ceilings(scale: Scale, device: torch.device) -> dict[str, float]:
    """FLOP/s of the step's largest common product, and bytes a second of a copy."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[scale.precision]
    tokens = scale.micro_batch_size * scale.seq_len
    hidden, inner = scale.llama["hidden_size"], scale.llama["intermediate_size"]
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


def _profiled(loop: PortableLoop, device: str) -> dict[str, float]:
    """Seconds of one step by kind of kernel (on the CPU: of operator), and those with none running."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as trace:
        wall = sum(loop.turn(1).seconds)
    spent = dict.fromkeys([*KINDS, "other kernels"], 0.0)
    for event in trace.key_averages():
        micros = event.self_device_time_total if cuda else event.self_cpu_time_total
        spent[_kind(event.key.lower())] += micros / 1e6
    spent["nothing running"] = max(0.0, wall - sum(spent.values()))
    return spent


def _kind(kernel: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(w in kernel for w in words)), "other kernels")


def _start_counting(device: str) -> None:
    """Free memory and reset statistics."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _fresh(folder: Path) -> Path:
    """An unused name beside ``folder``."""
    number = 0
    while (path := folder.with_name(f"{folder.name}-{number}")).exists():
        number += 1
    return path
