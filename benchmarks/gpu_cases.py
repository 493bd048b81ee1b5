"""The models that :mod:`benchmarks.gpu` trains with several loops, their files, and one loop of them."""

from __future__ import annotations

import gc
import random
import statistics
import time
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_turns import Orders, Plan
from benchmarks.loops import AccelerateLoop, BareLoop, Loop, PortableLoop, Setting, TrainerLoop
from portable.config import load_config
from portable.planner.memory_model import Setting as Sharding
from portable.planner.this_machine import planner_here
from portable.registry import create_backend
from portable.run.prepare import prepare
from portable.run.settle import settle

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.loops import Turn
    from portable.backend import Backend
    from portable.run.stages import Prepared

OURS, BARE, ACCELERATE, TRAINER = "portable-train", "bare PyTorch", "Accelerate", "Trainer"
COMPILED_TRAINER, FLOAT8 = "Trainer, compiled", "portable-train, fp8"
VARIANTS: dict[str, dict[str, Any]] = {
    TRAINER: {"compile": False},  # as people run it
    FLOAT8: {"model.function": "benchmarks.float8:converted"},
}
"""What differs from the case's settings, by loop."""

_PLAN = Plan(warmup=2, steps=3, rounds=3)


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and the loops that train it.

    Attributes:
        loops: their names, in the order in which they compile.
        model: its config.
        settings: of ``portable-train``.
        sequences: of a step, and of a micro-batch.
        plan: the turns.
        together: whether the card holds the state of all loops at once.
    """

    name: str
    loops: tuple[str, ...]
    model: dict[str, Any]
    sequences: tuple[int, int]
    settings: dict[str, Any] = field(default_factory=dict)
    seq_len: int = 4096
    precision: str = "bf16"
    compile: bool = True
    plan: Plan = _PLAN
    together: bool = True

    def small(self) -> Case:
        """The same for a CPU: it shows that the program works."""
        tiny = {
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            **({"head_dim": 16} if "head_dim" in self.model else {}),
        }
        return replace(
            self,
            model={**self.model, **tiny},
            sequences=(4, 2),
            seq_len=32,
            precision="bf16" if FLOAT8 in self.loops else "fp32",
            compile=False,
            plan=Plan(warmup=1, steps=2, rounds=2),
        )

    def __str__(self) -> str:
        whole, micro = self.sequences
        words = f"{whole // micro} x {micro} sequences of {self.seq_len} tokens a step, {self.precision}"
        more = "".join(f", {key} {value}" for key, value in self.settings.items())
        return f"{self.name}: {words}{more}{', compiled' if self.compile else ''}"


def _llama(hidden: int, inner: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def _qwen3(hidden: int, inner: int) -> dict[str, Any]:
    more = {"model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": True}
    return {**_llama(hidden, inner, 28, 16, 151_936), **more}


LLAMA_1B = _llama(2048, 8192, 16, 16, 49_152)
LLAMA_8B = _llama(4096, 14_336, 32, 32, 128_256)
CASES = {
    case.name: case
    for case in (
        Case("llama-1.2b", (OURS, TRAINER, BARE, ACCELERATE), LLAMA_1B, (16, 4)),
        Case(
            "llama-8b-lora",
            (OURS, TRAINER, BARE),
            LLAMA_8B,
            (8, 1),
            settings={"adapter.type": "lora", "adapter.r": 16},
            plan=Plan(warmup=2, steps=2, rounds=2, share=0.2),  # steps are long, and compiling 32 layers is
        ),
        Case("qwen3-1.7b", (OURS, TRAINER, BARE), _qwen3(2048, 6144), (16, 2)),
        Case("qwen3-0.6b", (OURS, TRAINER, BARE), _qwen3(1024, 3072), (16, 4)),
        Case("llama-1.2b-fp8", (OURS, FLOAT8, COMPILED_TRAINER), LLAMA_1B, (16, 4)),
        Case(
            "llama-8b-full",
            (OURS, TRAINER),
            LLAMA_8B,
            (4, 1),
            settings={"train.optimizer": "adamw_8bit", "memory.activation_checkpointing": "full"},
            plan=Plan(warmup=1, steps=2, rounds=1, share=0.15),
            together=False,
        ),
    )
}


def cases(*, small: bool) -> dict[str, Case]:
    """All cases by name, in the order of worth."""
    return {name: case.small() if small else case for name, case in CASES.items()}


# -- files -------------------------------------------------------------------------------------------------


def write_case(case: Case, device: str, folder: Path) -> None:
    """Write a model with random weights in bf16, a tokenizer, and a text of random words.

    Weights are drawn on the device, and each word is a token, so that nothing takes long.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = AutoConfig.for_model(**case.model)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    del model
    free_memory(device)  # of this process, which goes on
    vocabulary = {f"w{i}": i for i in range(case.model["vocab_size"] - 1)}
    vocabulary["<|endoftext|>"] = len(vocabulary)
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>")
    tokenizer.save_pretrained(folder / "model")
    count = case.seq_len * case.sequences[0] * (sum(case.plan.lengths) + 3)
    draw = random.Random(0)
    with (folder / "text.txt").open("w") as file:
        for _ in range(0, count, 1024):
            file.write(" ".join(f"w{draw.randrange(len(vocabulary) - 1)}" for _ in range(1024)) + "\n")


def common_settings(folder: Path) -> dict[str, Any]:
    """Settings of every run of a benchmark: its files in ``folder``, and nothing beside the steps."""
    return {
        "output_dir": str(folder / "run"),
        "data.cache_dir": str(folder / "cache"),
        "data.eval_fraction": 0.0,
        "train.schedule": "constant",
        "train.warmup_steps": 0,
        "train.eval_every": None,
        "log.trackers": [],
    }


def prepared(settings: dict[str, Any], backend: Backend) -> Prepared:
    """The run of ``settings`` on ``backend``, which is started."""
    settled = settle(load_config(None, settings), backend.name)
    backend.start()
    with redirect_stderr(StringIO()):
        return prepare(settled, backend)


def prepared_case(case: Case, loop: str, folder: Path, backend: Backend) -> Prepared:
    """The run of a case whose files are in ``folder``, with what differs for ``loop``."""
    whole, micro = case.sequences
    settings = {
        **common_settings(folder),
        "model.name_or_path": str(folder / "model"),
        "data.source": str(folder / "text.txt"),
        "data.seq_len": case.seq_len,
        "precision": case.precision,
        "compile": case.compile,
        "train.steps": sum(case.plan.lengths),
        "train.global_batch_size": whole,
        "train.micro_batch_size": micro,
        "train.learning_rate": 1e-4,
        **case.settings,
        **VARIANTS.get(loop, {}),
    }
    return prepared(settings, backend)


# -- one loop ----------------------------------------------------------------------------------------------


def contend(case: Case, name: str, device: str, folder: Path) -> None:
    """Train a case with one loop, as its leader orders (:mod:`benchmarks.gpu_turns`)."""
    orders = Orders()
    orders.wait()  # until the files are there
    backend = create_backend(device)
    run = prepared_case(case, name, folder, backend)
    scratch = folder / f"run of {name}"
    planned: dict[str, Any] = {}
    loop: Loop | TrainerLoop
    if name in (OURS, FLOAT8):
        planned = {"planned_memory": _planned(run, backend)} if name == OURS else {}
        loop = PortableLoop(run, scratch, time.perf_counter)
    else:
        steps = sum(case.plan.lengths)
        setting = Setting.of_files(run, time.perf_counter, steps=steps)
        loop = _peer(name, setting, scratch, steps)
    orders.answer(ready=True)
    orders.wait()
    peak = backend.peak_flops(case.precision)

    def after(index: int, turn: Turn) -> None:
        if index % 2:  # not counted: it fills the allocator, and peaks are counted from its end on
            return
        seconds = statistics.median(turn.seconds)
        tokens = case.sequences[0] * case.seq_len / seconds
        orders.answer(
            step_seconds=seconds,
            tokens_per_second=tokens,
            mfu=None if peak is None else tokens * run.flops_per_token / peak,
            peak_memory=torch.cuda.max_memory_allocated() if device == "cuda" else None,
            loss=turn.loss,
            **planned,
        )
        if index + 1 < len(case.plan.lengths):
            free_memory(device)
            orders.wait()
            start_counting(device)

    if isinstance(loop, TrainerLoop):
        loop.run(case.plan.lengths, after)
    else:
        for index, length in enumerate(case.plan.lengths):
            after(index, loop.turn(length))
    orders.wait()  # the leader ends the process


def _planned(run: Prepared, backend: Backend) -> int:
    """Bytes on the device that the planner expects of a run as it is."""
    from portable.adapters.adapter import training_model
    from portable.model import build as models

    model = training_model(models.model_config(run.config.model), run.config)
    planner = planner_here(run.config, model, backend)
    return planner.option(Sharding.of(run.config)).device_bytes.total


def _peer(name: str, setting: Setting, folder: Path, steps: int) -> Loop | TrainerLoop:
    if name == ACCELERATE:
        return AccelerateLoop(setting)
    if name in (TRAINER, COMPILED_TRAINER):
        return TrainerLoop(setting, folder, logging_steps=steps)
    return BareLoop(setting, name)


def free_memory(device: str) -> None:
    """Give back all memory of the device that holds nothing."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def start_counting(device: str) -> None:
    """Count the peak of allocated memory anew."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
