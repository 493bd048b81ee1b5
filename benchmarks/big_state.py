"""Runs with a large state and small steps, to measure checkpoints."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.config import load_config
from portable.loop import train_step
from portable.ranks.launch import launch
from portable.run.batches import train_loader

if TYPE_CHECKING:
    from collections.abc import Callable

    from portable.backend import Engine
    from portable.config import RunConfig
    from portable.run.prepare import Prepared

RANKS = 2


def write_text(folder: Path) -> Path:
    """A short text to train on, in ``folder``."""
    text = folder / "text.txt"
    text.write_text("\n".join(f"line {i} of a text with {i * i} words" for i in range(300)))
    return text


def llama(hidden: int, layers: int) -> dict[str, Any]:
    """A Llama of 4 heads whose parameters are nearly all in its layers."""
    return {
        "model_type": "llama",
        "vocab_size": 384,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32,
    }


def config(folder: Path, strategy: str, hidden: int, layers: int) -> RunConfig:
    """A Llama in fp32, AdamW and sequences of 32 tokens; ``strategy`` is one of the trainer's, or ``xla``."""
    text, model = write_text(folder), llama(hidden, layers)
    settings: dict[str, Any] = {
        "backend": "xla" if strategy == "xla" else "cpu",
        "strategy": "full_shard" if strategy == "xla" else strategy,
        "precision": "fp32",
        "output_dir": str(folder / "run"),
        "model.config": model,
        "data.source": str(text),
        "data.cache_dir": str(folder / "cache"),
        "data.seq_len": 32,
        "train.steps": 1000,
        "train.global_batch_size": RANKS,
        "train.micro_batch_size": 1,
        "log.trackers": [],
    }
    return load_config(None, settings)


def step(run: Prepared, engine: Engine, number: int = 0) -> None:
    """Take one optimizer step, so that the optimizer has its state."""
    batches = iter(train_loader(run, number * run.plan.global_batch_size))
    train_step(
        run.backend,
        engine,
        batches,
        plan=run.plan,
        first_sample=number * run.plan.global_batch_size,
        learning_rate=1e-4,
        max_grad_norm=1.0,
    )
    batches.close()


def dcp_state(engine: Any) -> dict[str, Any]:
    """The state of an FSDP2 engine, as torch's DCP takes it."""
    from gpu.fsdp.optimizer_state import to_store
    from portable.model.parameters import state_tensors

    optimizer = to_store(engine._optimizer, engine._trained)
    return {"model": state_tensors(engine.model), "optim": optimizer}


def on_ranks(function: Callable[..., Any], strategy: str, *arguments: Any, ranks: int = RANKS) -> list[Any]:
    """Call a picklable ``function(strategy, *arguments)`` on all ranks of fresh processes.

    Returns:
        what each rank returned, which JSON must know; XLA is one process.
    """
    if strategy == "xla":
        os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(ranks)}
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return [pool.submit(function, strategy, *arguments).result()]
    with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
        launch(_rank, (function, strategy, arguments, scratch), ranks=ranks)
        return [json.loads(path.read_text("utf-8")) for path in sorted(Path(scratch).iterdir())]


def _rank(function: Callable[..., Any], strategy: str, arguments: tuple[Any, ...], scratch: str) -> int:
    result = function(strategy, *arguments)
    Path(scratch, f"{os.environ['RANK']}.json").write_text(json.dumps(result), "utf-8")
    return 0
