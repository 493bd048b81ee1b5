"""Benchmark on one GPU: step time compared with peers, fp8, planned memory, saving, and profiles.

``python -m benchmarks.gpu --json gpu.json --folder models`` trains models of 0.3 to 30 billion parameters
with this project, the Trainer, TRL, Accelerate and bare loops. Each loop runs in a separate process. The
loops of a part load their models at the same time if all fit, compile one after another, and then take a few
steps in turns, so that changes in the speed of the GPU affect all of them.

Each part takes about 200 seconds. Every row is written as soon as it is measured. If the command is repeated,
it continues with the loops whose turns are incomplete, also after it was killed. With
``--folder``, the models stay there, so that a second call does not write them again. Without a GPU, or with
``--small``, the models are tiny, and the run only shows that the program works. docs/machines.md lists the
parts, the packages, and the order of the calls.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import harness
from benchmarks.loops import (
    AccelerateLoop,
    BareLoop,
    Loop,
    PortableLoop,
    Setting,
    TrainerLoop,
    TrlLoop,
    auto_class,
)
from benchmarks.machine import command_line, describe_machine, print_machine
from portable.checkpoint.store import CheckpointStore
from portable.config import load_config
from portable.loop import iter_steps
from portable.model.parameters import get_state_tensors
from portable.planner.memory_model import StrategySetting as Sharding
from portable.planner.this_machine import build_planner_for_backend
from portable.progress import RunProgress
from portable.ranks.parent_death import die_with_parent
from portable.registry import create_backend
from portable.run.batches import build_train_loader
from portable.run.checkpointing import save_checkpoint
from portable.run.prepare import prepare_run
from portable.run.resolve import resolve_run
from portable.run.restore import restore_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from benchmarks.loops import Turn
    from portable.backend import Backend
    from portable.engines.fsdp.offload import HostParameterCopies
    from portable.run.stages import PreparedRun

START = "spawn"
"""Start method of the processes for ``multiprocessing``. Tests set a different method."""
OURS, BARE, ACCELERATE, TRAINER = "portable-train", "bare PyTorch", "Accelerate", "Trainer"
COMPILED_TRAINER = "Trainer, compiled"
TRL, TORCHAO = "TRL", "bare PyTorch, torchao's AdamW"
LORA = {"adapter.type": "lora", "adapter.r": 16}
ON_HOST = {"memory.offload_optimizer": "cpu"}
ALL_ON_HOST = {**ON_HOST, "memory.offload_params": "cpu"}
WAYS: dict[str, dict[str, Any]] = {
    "no_shard": {},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
    "zero1, optimizer on the host": {"strategy": "zero1", **ON_HOST},
    "zero2, optimizer on the host": {"strategy": "zero2", **ON_HOST},
    "full_shard, optimizer on the host": {"strategy": "full_shard", **ON_HOST},
    "zero3, optimizer on the host": {"strategy": "zero3", **ON_HOST},
    "full_shard, all on the host": {"strategy": "full_shard", **ALL_ON_HOST},
    "zero3, all on the host": {"strategy": "zero3", **ALL_ON_HOST},
}
"""Settings of each strategy, in the order in which the planner lists them, the fastest first."""
ONE_BY_ONE = {"train.micro_batch_size": 1}
RECOMPUTED = {"memory.activation_checkpointing": "full"}
ALL_THREE = {**ONE_BY_ONE, **RECOMPUTED, "precision": "fp16"}
SAVINGS: dict[str, dict[str, Any]] = {
    "compiled": {"compile": True},
    "selective": {"memory.activation_checkpointing": "selective"},
    "recomputed": RECOMPUTED,
    "no chunks in the loss": {"memory.loss_chunk_tokens": 0},
    "adamw_8bit": {"train.optimizer": "adamw_8bit"},
    "lora": LORA,
}
TABLE: dict[str, dict[str, Any]] = {
    "batch of 4": {},
    "gradient accumulation": ONE_BY_ONE,
    "gradient checkpointing": {**ONE_BY_ONE, **RECOMPUTED},
    "mixed precision": {"precision": "fp16"},
    "all three": ALL_THREE,
    "Adafactor": {"train.optimizer": "adafactor"},
    "all three, Adafactor": {**ALL_THREE, "train.optimizer": "adafactor"},
    "8-bit Adam": {"train.optimizer": "adamw_8bit"},
    "all three, 8-bit Adam": {**ALL_THREE, "train.optimizer": "adamw_8bit"},
}
"""Settings for each row of a table that is common in guides to training on one GPU, keyed by row."""
OF_OURS: dict[str, dict[str, Any]] = {
    OURS: {},
    "ours, not compiled": {"compile": False},
    "ours, fp8": {"fp8": "tensorwise"},
    "ours, fp8 by row": {"fp8": "rowwise"},
    **{f"ours, {name}": changes for name, changes in (WAYS | SAVINGS | TABLE).items()},
}
"""For each loop of this project, its settings that differ from the case. Keyed by the name of the
loop.
"""
OF_PEERS: dict[str, dict[str, Any]] = {
    **{key: {"compile": False} for key in (TRAINER, TRL)},  # as users typically run them
    **{f"{TRAINER}, {name}": changes for name, changes in TABLE.items()},
}
COMPLETE_MARK = "complete"
"""Name of the empty file that marks a folder with all files of a case."""
READY = 0.65
"""Fraction of a part's time limit after which a loop that is not ready is skipped."""


# -- cases -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Model, training settings, and the loops that train the model.

    Attributes:
        name: Name of the case.
        loops: Names of the loops, in compilation order.
        model: Config of the model.
        sequences: Number of sequences per step, and number of sequences per micro-batch.
        settings: Additional settings for ``portable-train``.
        seq_len: Number of tokens per sequence.
        precision: Value of the setting ``precision``.
        compile: Value of the setting ``compile``.
        turns: Number of warmup steps, number of measured steps per turn, and number of turns.
        together: Maximum number of loops that fit on the GPU at the same time. None if all fit.
    """

    name: str
    loops: tuple[str, ...]
    model: dict[str, Any]
    sequences: tuple[int, int]
    settings: dict[str, Any] = field(default_factory=dict)
    seq_len: int = 4096
    precision: str = "bf16"
    compile: bool = True
    turns: tuple[int, int, int] = (2, 3, 3)
    together: int | None = None

    def small(self) -> Case:
        """Return a tiny version of this case, for testing the program on a CPU."""
        tiny = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        tiny |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
        tiny |= {"head_dim": 16} if "head_dim" in self.model else {}
        tiny |= (
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
            if "num_experts" in self.model
            else {}
        )
        in_bf16 = "ours, fp8" in self.loops or "train.master_dtype" in self.settings
        precision = "bf16" if in_bf16 else "fp32"
        common: dict[str, Any] = {"sequences": (4, 2), "seq_len": 32, "compile": False, "turns": (1, 2, 2)}
        return replace(self, model={**self.model, **tiny}, precision=precision, **common)

    @property
    def lengths(self) -> list[int]:
        """Number of steps in each turn: the warmup, and then alternately one step and the measured number.

        The one-step turns are not measured. They refill the cache of the memory allocator, which is emptied
        after each turn.
        """
        warmup, counted, rounds = self.turns
        return [warmup, *(length for _ in range(rounds) for length in (1, counted))]

    @property
    def tolerance(self) -> float:
        """Maximum relative difference between the last losses of this project and the bare loop."""
        # Each loop draws different initial values for its adapter, so losses differ more with an adapter.
        return 1e-5 if self.precision == "fp32" and "adapter.type" not in self.settings else 2e-2

    def __str__(self) -> str:
        whole, micro = self.sequences
        words = f"{whole // micro} x {micro} sequences of {self.seq_len} tokens a step, {self.precision}"
        more = "".join(f", {key} {value}" for key, value in self.settings.items())
        return f"{self.name}: {words}{more}{', compiled' if self.compile else ''}"


def _llama(hidden: int, inner: int, layers: int, heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": 8, "max_position_embeddings": 4096}
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        **shape,
        **heads_of,
        "tie_word_embeddings": False,
    } | more


def _qwen3(hidden: int, inner: int) -> dict[str, Any]:
    return _llama(hidden, inner, 28, 16, 151_936, model_type="qwen3", head_dim=128, tie_word_embeddings=True)


LLAMA_1B = _llama(2048, 8192, 16, 16, 49_152)
LLAMA_8B = _llama(4096, 14_336, 32, 32, 128_256)
QLORA = {**LORA, "adapter.base": "nf4"}
MOE = _llama(2048, 6144, 4, 32, 151_936, model_type="qwen3_moe", head_dim=128, num_experts=128)
MOE |= {"num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
BERT = {"model_type": "bert", "vocab_size": 30_522, "hidden_size": 1024, "intermediate_size": 4096}
BERT |= {"num_hidden_layers": 24, "num_attention_heads": 16}
MOE_30B = {**MOE, "num_hidden_layers": 12}
"""Qwen3-30B-A3B with 12 of its 48 layers, so that its files are written in time. The option
``--layers 48`` selects all layers.
"""
IN_BF16 = {"train.master_dtype": "bf16", **RECOMPUTED}
CLASSES = {"model.task": "sequence-classification"}
PLANNED = tuple(f"ours, {name}" for name in [*WAYS, *SAVINGS])
FP8 = ("ours, fp8", "ours, fp8 by row")
FULL = (OURS, "ours, adamw_8bit", "ours, full_shard, optimizer on the host", TORCHAO, TRAINER)
PAIRS = tuple(f"{whose}, {name}" for name in TABLE for whose in ("ours", TRAINER))
CASES = {
    case.name: case
    for case in (
        Case("llama-1.2b", (OURS, TRAINER, BARE, ACCELERATE), LLAMA_1B, (16, 4), turns=(1, 2, 3)),
        Case("llama-8b-lora", (OURS, TRAINER, TRL), LLAMA_8B, (4, 1), LORA, turns=(1, 2, 3)),
        Case("llama-8b-full", FULL, LLAMA_8B, (4, 1), IN_BF16, turns=(1, 2, 2), together=1),
        Case("plan", PLANNED, _qwen3(1024, 3072), (8, 4), compile=False, turns=(2, 2, 1), together=1),
        Case("qwen3-moe", (OURS, TRAINER), MOE, (8, 2), together=1),
        Case("bert-large", PAIRS, BERT, (4, 4), CLASSES, 512, "fp32", False, (3, 16, 3), 2),
        Case("llama-8b-qlora", (OURS, TRAINER, TRL), LLAMA_8B, (4, 1), QLORA, turns=(1, 2, 3)),
        Case("llama-1.2b-fp8", (OURS, *FP8, COMPILED_TRAINER), LLAMA_1B, (16, 4), together=1),
        Case("qwen3-30b-a3b-lora", (OURS, TRAINER), MOE_30B, (4, 1), LORA, turns=(1, 2, 2), together=1),
    )
}
SAVING = "saving"
PROFILED = {f"profile {name}": name for name in ("llama-8b-lora", "llama-8b-full")}
"""Case of each profile, keyed by the name of its part."""
PROFILED["profile"] = "llama-1.2b"
PARTS = (*CASES, SAVING, *PROFILED)
"""Names of all parts, the most important first."""
OF_PART = {SAVING: "plan", **PROFILED}


def case_of(name: str, *, small: bool, loops: Sequence[str] = (), layers: int | None = None) -> Case:
    """Return the case of a part of the benchmark.

    Args:
        name: Name of the part.
        small: Whether to return a tiny version of the case.
        loops: Loops to keep. If none of them belongs to the case, the case keeps all its loops.
        layers: Number of layers of the model. None to keep the number from the case.
    """
    case = CASES[OF_PART.get(name, name)]
    if layers is not None:
        case = replace(case, model={**case.model, "num_hidden_layers": layers})
    if chosen := tuple(loop for loop in case.loops if loop in loops):
        case = replace(case, loops=chosen)
    return case.small() if small else case


def write_case(case: Case, device: str, folder: Path) -> None:
    """Write a model with random bf16 weights, a tokenizer, and a file of random words.

    Does nothing if the folder contains all files of an earlier call.

    To save time, the weights are drawn on the device, and each word is one token.

    Args:
        case: Case with the config of the model and the size of the data.
        device: Device to draw the weights on.
        folder: Folder for the files.
    """
    if (folder / COMPLETE_MARK).exists():
        return
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, PreTrainedTokenizerFast

    torch.manual_seed(0)
    classes = case.settings.get("model.task") == "sequence-classification"
    config = AutoConfig.for_model(**case.model)
    with torch.device(device):
        model = auto_class(case.settings.get("model.task")).from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    del model
    free_memory(device)  # release the memory of this process, because it continues
    vocabulary = {f"w{i}": i for i in range(case.model["vocab_size"] - 1)}
    vocabulary["<|endoftext|>"] = len(vocabulary)
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder / "model")
    count = case.seq_len * case.sequences[0] * (sum(case.lengths) + 3)
    draw = random.Random(0)
    length = case.seq_len if classes else 1024
    with (folder / "text.jsonl").open("w") as file:
        for _ in range(0, count, length):
            text = " ".join(f"w{draw.randrange(len(vocabulary) - 1)}" for _ in range(length))
            row = {"text": text, **({"label": draw.randrange(2)} if classes else {})}
            file.write(json.dumps(row) + "\n")
    (folder / COMPLETE_MARK).touch()


def prepared(case: Case, changes: dict[str, Any], folder: Path, backend: Backend) -> PreparedRun:
    """Start the backend, and prepare the run for a case.

    Args:
        case: Case whose files :func:`write_case` has written to ``folder``.
        changes: Settings that differ from the case.
        folder: Folder of the files.
        backend: Backend that has not been started yet.
    """
    whole, micro = case.sequences
    settings = {
        "output_dir": str(folder / "run"),
        "data.cache_dir": str(folder / "cache"),
        "data.eval_fraction": 0.0,
        "train.schedule": "constant",
        "train.warmup_steps": 0,
        "train.eval_every": None,
        "log.trackers": [],
        "model.name_or_path": str(folder / "model"),
        "data.source": str(folder / "text.jsonl"),
        "data.seq_len": case.seq_len,
        "precision": case.precision,
        "compile": case.compile,
        "train.steps": sum(case.lengths),
        "train.global_batch_size": whole,
        "train.micro_batch_size": micro,
        "train.learning_rate": 1e-4,
        **case.settings,
        **changes,
    }
    resolved = resolve_run(load_config(None, settings), backend.name)
    backend.start()
    with redirect_stderr(StringIO()):
        return prepare_run(resolved, backend)


# -- loops by turns ----------------------------------------------------------------------------------------


class Contestant:
    """Child process that runs one loop.

    Before each turn, the process waits for an order in a pipe. After the turn, it sends its
    measurements.

    Args:
        name: Name of the loop.
        work: Function that runs in the process. Its argument is the process's end of the pipe.
    """

    def __init__(self, name: str, work: Callable[[Connection], None]) -> None:
        context: Any = multiprocessing.get_context(START)
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs,))
        self._process.start()
        theirs.close()

    def order(self) -> None:
        """Order the process to start its next turn."""
        with suppress(OSError):  # the process has ended, which `answer` reports
            self._pipe.send(None)

    def answer(self, seconds: float) -> dict[str, Any]:
        """Wait for the measurements of the current turn.

        Returns:
            The measurements. If the process has ended or does not answer within ``seconds``, a dict that
            maps ``failed`` to an error message.
        """
        try:
            if not self._pipe.poll(max(0.1, seconds)):
                return {"failed": "not ready in time"}
            found: dict[str, Any] = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            return {"failed": f"ended with {self._process.exitcode}"}
        return found

    def end(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()


def take_turns(
    contestants: list[Contestant], rounds: int, seconds: float, record: Callable[[dict[str, Any]], None]
) -> None:
    """Run loops in turns, and then end their processes.

    Args:
        contestants: Started processes of the loops.
        rounds: Number of measured turns per loop.
        seconds: Time limit for all turns.
        record: Callback that receives a row for each measured turn and for each failed loop.
    """
    begun = time.monotonic()
    try:
        ready = []
        for contestant in contestants:
            left = begun + READY * seconds - time.monotonic()
            contestant.order()
            if "failed" in (found := contestant.answer(left)):
                record({"name": contestant.name, **found})
                contestant.end()
            else:
                ready.append(contestant)
        for turn in range(rounds):
            start = turn % max(1, len(ready))
            for contestant in ready[start:] + ready[:start]:
                contestant.order()
                found = contestant.answer(begun + seconds - time.monotonic())
                record({"name": contestant.name, "round": turn, **found})
                if "failed" in found:
                    ready = [other for other in ready if other is not contestant]
                    contestant.end()
    finally:
        for contestant in contestants:
            contestant.end()


def train(
    case: Case, device: str, folder: Path, seconds: float, record: Callable[[dict[str, Any]], None]
) -> None:
    """Write the files of a case and run its loops in turns.

    If not all loops fit on the GPU at the same time, the loops run in groups, one group after the other,
    until the time is over. The processes of a group start together with the turns of the previous group, so
    that they import their libraries while it is measured.

    Args:
        case: Case to run.
        device: Device of the loops.
        folder: Folder for the files.
        seconds: Time limit.
        record: Function that is called with a row for each measured turn, and for each loop that failed.
    """
    end = time.monotonic() + seconds
    write_case(case, device, folder)
    count = case.together or len(case.loops)
    names = [case.loops[i : i + count] for i in range(0, len(case.loops), count)]
    groups: list[list[Contestant]] = []
    try:
        for index in range(len(names)):
            for group in names[len(groups) : index + 2]:
                works = {name: partial(_contend, case, name, device, folder) for name in group}
                groups.append([Contestant(name, work) for name, work in works.items()])
            # A group may use all of the time, because the next call continues with the other groups.
            take_turns(groups[index], case.turns[2], end - time.monotonic(), record)
    finally:
        for contestant in chain.from_iterable(groups):
            contestant.end()


def _contend(case: Case, name: str, device: str, folder: Path, pipe: Connection) -> None:
    """Run one loop of a case in this child process. Each order in the pipe starts a turn.

    If the loop raises an error, the error message is sent to the pipe, and the error is raised again.
    """
    die_with_parent()
    try:
        _follow(case, name, device, folder, pipe)
    except BaseException as error:
        with suppress(OSError):
            pipe.send({"failed": f"{type(error).__name__}: {error}"[-300:]})
        raise


def _follow(case: Case, name: str, device: str, folder: Path, pipe: Connection) -> None:
    backend = create_backend(device)
    changes = {**OF_OURS, **OF_PEERS}.get(name, {})
    run = prepared(case, {"compile": case.compile, **changes}, folder, backend)
    planned = _planned(run, backend) if name in OF_OURS else None
    pipe.recv()
    loop = _loop(name, run, folder / f"run of {name}", sum(case.lengths))
    peak = backend.get_peak_flops(run.config.precision)

    def after(index: int, turn: Turn) -> None:
        if index == 0:
            pipe.send({"ready": True})
        elif index % 2 == 0:
            seconds = statistics.median(turn.seconds)
            tokens = case.sequences[0] * case.seq_len / seconds
            row = {"step_seconds": seconds, "tokens_per_second": tokens, "loss": turn.loss}
            row |= {"mfu": peak and tokens * run.flops_per_token / peak, "planned_memory": planned}
            row |= {"peak_memory": torch.cuda.max_memory_allocated() if device == "cuda" else None}
            pipe.send(row)
        else:  # the turn only filled the allocator's cache, and was not measured
            return
        free_memory(device)
        if index + 1 < len(case.lengths):
            pipe.recv()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()

    if isinstance(loop, TrainerLoop):
        loop.run(case.lengths, after)
    else:
        for index, length in enumerate(case.lengths):
            after(index, loop.turn(length))
    pipe.recv()  # wait until the parent process ends this process


def _loop(name: str, run: PreparedRun, folder: Path, count: int) -> Loop | TrainerLoop:
    if name in OF_OURS:
        return PortableLoop(run, folder)
    setting = Setting.of_files(run, steps=count)
    if name == ACCELERATE:
        return AccelerateLoop(setting)
    if name in (BARE, TORCHAO):
        return BareLoop(setting, name, with_torchao=name == TORCHAO)
    return (TrlLoop if name == TRL else TrainerLoop)(setting, folder, logging_steps=count)


def _planned(run: PreparedRun, backend: Backend) -> int:
    """Return the device memory in bytes that the planner predicts for a run."""
    from portable.adapters.adapter import build_training_model
    from portable.model import build as models

    model = build_training_model(models.load_model_config(run.config.model), run.config)
    return (
        build_planner_for_backend(run.config, model, backend)
        .build_option(Sharding.from_config(run.config))
        .device_bytes.total
    )


def free_memory(device: str) -> None:
    """Collect garbage, and release all cached device memory."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


# -- the profile -------------------------------------------------------------------------------------------

KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "matrix products": ("gemm", "cutlass", "nvjet", "matmul", "aten::mm", "addmm", "bmm", "xmma"),
    "optimizer and clipping": ("multi_tensor", "fused_adam", "adamw", "foreach", "lpnorm"),
    "loss": ("softmax", "cross_entropy", "nll_loss"),
    "copies": ("memcpy", "memset", "copy"),
}


def measure_profile(case: Case, device: str, folder: Path) -> dict[str, Any]:
    """Measure the time that each type of kernel takes in a training step.

    Returns:
        ``step_seconds``, the median time of a step, and ``spent_seconds``, the time in one profiled
        step by type of kernel.
    """
    write_case(case, device, folder)
    backend = create_backend(device)
    run = prepared(case, {}, folder, backend)
    loop = PortableLoop(run, folder / "profile")
    try:
        loop.turn(case.turns[0])
        step = statistics.median(loop.turn(case.turns[1]).seconds)
        return {"step_seconds": step, "spent_seconds": _profiled(loop, device)}
    finally:
        loop.close()
        backend.stop()


def _profiled(loop: PortableLoop, device: str) -> dict[str, float]:
    """Profile one step, and return its seconds by type of kernel.

    On the CPU, operators are measured instead of kernels. The key ``nothing running`` contains the idle
    time.
    """
    from torch.profiler import ProfilerActivity, profile

    cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as trace:
        wall = sum(loop.turn(1).seconds)
    spent = dict.fromkeys([*KINDS, "other kernels"], 0.0)
    for event in trace.key_averages():
        micros = event.self_device_time_total if cuda else event.self_cpu_time_total
        name = event.key.lower()
        found = (kind for kind, words in KINDS.items() if any(word in name for word in words))
        spent[next(found, "other kernels")] += micros / 1e6
    spent["nothing running"] = max(0.0, wall - sum(spent.values()))
    return spent


# -- saving and offloading ---------------------------------------------------------------------------------

STAGED, BLOCKED, COMPLETE = "a bare copy to page-locked memory", "save: blocked", "save: complete"
TO_HOST, TO_DEVICE = "gradients to the host", "parameters to the device"
STEP, STEP_AFTER = "a step", "a step while a save is written"


def measure_saving(case: Case, device: str, folder: Path, rounds: int = 3) -> dict[str, Any]:
    """Measure the speed of offloading, and the time that a background save blocks the training loop.

    For comparison, copies of the same tensors with ``copy_`` are also measured.

    Returns:
        ``seconds``, with a list of times for each measured action, and the sizes of the state and the
        parameters in bytes. The first time in each list includes the allocation of pinned memory.
    """
    write_case(case, device, folder)
    actions = (STAGED, STEP, BLOCKED, STEP_AFTER, COMPLETE, TO_HOST, TO_DEVICE)
    found: dict[str, list[float]] = {name: [] for name in actions}
    with _engine(case, device, folder, {"memory.offload_optimizer": "cpu"}) as (run, engine):
        parameters = [p for p in engine.model.parameters() if p.requires_grad]
        parameter_bytes = sum(p.numel() * p.itemsize for p in parameters)
        for _ in range(rounds):
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            copies: HostParameterCopies = engine._host_copies
            found[TO_HOST].append(timed(copies.move_gradients_to_host, device))
            found[TO_DEVICE].append(timed(copies.copy_to_device, device))
        del engine, parameters, parameter
    free_memory(device)
    with _engine(case, device, folder, {}) as (run, engine):
        checkpoints = CheckpointStore(folder / "saves", keep=1, rank=0)
        state = [tensor for tensor in _state(engine) if tensor.numel()]
        held = [torch.empty(t.shape, dtype=t.dtype, pin_memory=device == "cuda") for t in state]

        def copy_all() -> None:
            for source, target in zip(state, held, strict=True):
                target.copy_(source, non_blocking=True)

        batches = iter(build_train_loader(run, 0))
        take_step = partial(_take_step, run, engine, batches)
        for turn in range(rounds):
            found[STEP].append(timed(take_step, device))
            found[STAGED].append(timed(copy_all, device))
            begun = time.perf_counter()
            saving = partial(save_checkpoint, run, checkpoints, engine, RunProgress(turn + 1, turn + 1))
            found[BLOCKED].append(timed(saving, device))
            found[STEP_AFTER].append(timed(take_step, device))
            checkpoints.finish_save()
            found[COMPLETE].append(time.perf_counter() - begun)
        batches.close()
        state_bytes = sum(t.numel() * t.itemsize for t in state)
    return {"seconds": found, "state_bytes": state_bytes, "parameter_bytes": parameter_bytes}


def _take_step(run: PreparedRun, engine: Any, batches: Iterator[Any]) -> None:
    """Take one optimizer step with the next batches."""
    list(iter_steps(run, engine, batches, RunProgress(0, 0), 1))


@contextmanager
def _engine(
    case: Case, device: str, folder: Path, changes: dict[str, Any]
) -> Iterator[tuple[PreparedRun, Any]]:
    """Yield a run of the case with the strategy ``full_shard``, and its engine after one step.

    The files of the case must be in ``folder``. ``changes`` contains additional settings for the run.
    """
    backend = create_backend(device)
    changes = {"strategy": "full_shard", "compile": False, **changes}
    run = prepared(case, changes, folder, backend)
    try:
        engine: Any = restore_run(run, None).engine
        batches = iter(build_train_loader(run, 0))
        _take_step(run, engine, batches)
        batches.close()
        yield run, engine
    finally:
        backend.stop()


def _state(engine: Any) -> list[torch.Tensor]:
    """Return the tensors that the engine saves in a checkpoint: weights and optimizer moments."""
    from portable.engines.fsdp.optimizer_state import build_optimizer_state_dict

    optimizer = build_optimizer_state_dict(engine._optimizer, engine._optimized)
    moments = [value for values in optimizer["state"].values() for value in values.values()]
    values = [*get_state_tensors(engine.model).values(), *moments]
    return [value.detach() for value in values if isinstance(value, torch.Tensor)]


def timed(work: Callable[[], object], device: str) -> float:
    """Return the duration of a call in seconds, including the work that it queues on the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


# -- tables ------------------------------------------------------------------------------------------------

Rows = list[dict[str, Any]]


def table(part: str, rows: Rows) -> str:
    """Format the rows for a part as a table."""
    makes = {**dict.fromkeys(PROFILED, _profile_table), SAVING: _saving_table}
    return f"{rows[-1]['case']}\n" + (makes[part](rows[-1]) if part in makes else _step_table(rows))


def _step_table(rows: Rows) -> str:
    names = list(dict.fromkeys(row["name"] for row in rows))
    turns = {name: [row for row in rows if row["name"] == name and "failed" not in row] for name in names}
    rates = {
        name: statistics.median(r["tokens_per_second"] for r in own) for name, own in turns.items() if own
    }
    base = TRAINER if TRAINER in rates else next(iter(rates), "")
    width = max(map(len, names)) + 2
    heads = (
        f"{'tokens/s':>10}{'spread':>8}{'step, ms':>10}{'MFU':>7}{'peak GiB':>10}{'planned':>9}{'loss':>9}"
    )
    lines = [f"{'':<{width}}{heads}  x {base}"]
    for name, own in turns.items():
        if not own:
            lines.append(f"{name:<{width}}{next(row['failed'] for row in rows if row['name'] == name)}")
            continue
        every = [row["tokens_per_second"] for row in own]
        spread, step = (max(every) - min(every)) / rates[name], _median(own, "step_seconds") or 0.0
        cells = [
            f"{rates[name]:>10,.0f}{spread:>8.1%}{1e3 * step:>10.1f}",
            f"{_cell(_median(own, 'mfu'), '.1%'):>7}",
            f"{_cell(_median(own, 'peak_memory'), '.1f', 2**30):>10}",
            f"{_cell(_median(own, 'planned_memory'), '.1f', 2**30):>9}",
            f"{_cell(own[-1]['loss'], '.4f'):>9}",
            f"{rates[name] / rates.get(name.replace('ours', TRAINER), rates[base]):>6.2f}",
        ]
        lines.append(f"{name:<{width}}{''.join(cells)}")
    wrong = different(rows)
    return "\n".join([*lines, wrong] if wrong else lines)


def _median(rows: Rows, key: str) -> float | None:
    values = [row[key] for row in rows if row[key] is not None]
    return statistics.median(values) if values else None


def _cell(value: float | None, form: str, unit: float = 1) -> str:
    return "-" if value is None else format(value / unit, form)


def different(rows: Rows) -> str | None:
    """Compare the last losses of this project's loops with the bare loop.

    If the bare loop is missing, the losses are compared with this project's loop with unchanged
    settings.

    Returns:
        A description of the difference, or None if the losses agree.
    """
    last = {row["name"]: row["loss"] for row in rows if row.get("loss") is not None}
    base = BARE if BARE in last else OURS
    for name in (name for name in OF_OURS if name in last and base in last):
        if abs(last[name] - last[base]) > rows[-1]["tolerance"] * abs(last[base]):
            return f"WRONG: the loss of {name} is {last[name]:.7f} where that of {base} is {last[base]:.7f}"
    return None


def _profile_table(found: dict[str, Any]) -> str:
    lines = [f"{'':<26}{'ms of a step':>14}"]
    lines += [f"{name:<26}{1e3 * seconds:>14.2f}" for name, seconds in found["spent_seconds"].items()]
    return "\n".join([*lines, f"the step, unprofiled: {1e3 * found['step_seconds']:.2f} ms"])


def _saving_table(found: dict[str, Any]) -> str:
    lines = [f"{'':<38}{'first, s':>10}{'later, s':>10}{'GB/s':>8}"]
    for name, seconds in found["seconds"].items():
        count = found["parameter_bytes"] if name in (TO_HOST, TO_DEVICE) else found["state_bytes"]
        later = statistics.median(seconds[1:] or seconds)
        rate = "-" if name in (COMPLETE, STEP, STEP_AFTER) else f"{count / later / 1e9:.1f}"
        lines.append(f"{name:<38}{seconds[0]:>10.3f}{later:>10.3f}{rate:>8}")
    state, parameters = found["state_bytes"] / 1e9, found["parameter_bytes"] / 1e9
    return "\n".join([*lines, f"{state:.2f} GB of state, {parameters:.2f} of parameters"])


# -- the command -------------------------------------------------------------------------------------------


def measure(
    part: str,
    case: Case,
    device: str,
    seconds: float,
    folder: Path | None,
    record: Callable[[dict[str, Any]], None],
) -> None:
    """Measure one part of the benchmark in about ``seconds``.

    Args:
        part: Name of the part.
        case: Case of the part; see :func:`case_of`.
        device: Device to measure on.
        seconds: Time limit of the training loops.
        folder: Folder in which the files of the case stay for later calls. None for a temporary folder.
        record: Function that is called with each row of measurements, for :func:`table`.
    """

    def record_row(row: dict[str, Any]) -> None:
        record({"case": str(case), "tolerance": case.tolerance, **row})

    with ExitStack() as stack:
        if folder is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-benchmark-")))
        else:
            place = folder / f"{OF_PART.get(part, part)}, {case.model['num_hidden_layers']} layers"
            place.mkdir(parents=True, exist_ok=True)
            for leftover in place.iterdir():
                if leftover.is_dir() and leftover.name not in ("model", "cache"):
                    shutil.rmtree(leftover)
        if part == SAVING:
            record_row(measure_saving(case, device, place))
        elif part in PROFILED:
            record_row(measure_profile(case, device, place))
        else:
            train(case, device, place, seconds, record_row)


def list_missing_loops(case: Case, rows: Rows) -> tuple[str, ...]:
    """List the loops of a case that earlier calls have not measured completely.

    These are loops with fewer turns than the case has, because the earlier call was killed or their time was
    over. Loops that failed for another reason are not listed.
    """
    failed = {row["name"]: row["failed"] for row in rows if "failed" in row}
    counts = Counter(row["name"] for row in rows if "failed" not in row)
    return tuple(
        name
        for name in case.loops
        if (counts[name] < case.turns[2] if name not in failed else failed[name].startswith("not ready"))
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Returns 1 if a part has no results, or if this project's loss is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny models; the default without a GPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="which to measure")
    parser.add_argument("--loops", nargs="+", default=(), help="of a part; those that no name here has: all")
    parser.add_argument("--layers", type=int, help="of each model, such as 48 for qwen3-30b-a3b-lora")
    parser.add_argument("--seconds", type=float, default=200.0, help="for each part, about; default 200")
    parser.add_argument("--folder", type=Path, help="where the models stay for later calls")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results; what it has is not repeated")
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = command_line("benchmarks.gpu", argv)
    machine = describe_machine(
        torch.device(device), "deepspeed", "peft", "trl", "torchao", "bitsandbytes", "torchtitan", "unsloth"
    )
    print_machine(command, machine)
    parts: dict[str, Rows] = {}
    if options.json is not None and options.json.exists():
        parts = json.loads(options.json.read_text("utf-8"))["parts"]
    for part in options.parts:
        small = options.small or device == "cpu"
        case = case_of(part, small=small, loops=options.loops, layers=options.layers)
        rows = parts.setdefault(part, [])
        missing = list_missing_loops(case, rows) if part in CASES else () if rows else case.loops
        rows[:] = [row for row in rows if row.get("name") not in missing]

        def record(row: dict[str, Any], rows: Rows = rows) -> None:
            rows.append(row)
            harness.write(options.json, command, machine, parts=parts)

        if missing:
            measure(part, replace(case, loops=missing), device, options.seconds, options.folder, record)
        harness.write(options.json, command, machine, parts=parts)
        print("\n" + table(part, parts[part]), flush=True)
    failed = [part for part in options.parts if all("failed" in row for row in parts[part])]
    wrong = [part for part in options.parts if part in CASES and different(parts[part])]
    return int(bool(failed or wrong))


if __name__ == "__main__":
    os.environ.setdefault("USE_TORCH_XLA", "0")
    sys.exit(main())
