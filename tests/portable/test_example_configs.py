"""The files in ``configs/``: each trains as it is, but for the machine and the hub.

What comes from a hub is replaced (a model of the same kind with small layers, a text on disk), and what needs
an accelerator runs on CPU ranks or virtual XLA devices.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from portable.config import RunConfig, load_config
from portable.config.reference import ROOT
from portable.data.dataset import build_data
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.engines import Engines
from tests.runs import configured

CONFIGS = [
    pytest.param(path, id=path.stem, marks=pytest.mark.ops("async_io") if "nvme" in path.stem else ())
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if path.stem != "quickstart"
]
TRAINED = [
    pytest.param(
        *one.values, id=one.id, marks=[*one.marks, pytest.mark.xla] if "tpu" in str(one.id) else one.marks
    )
    for one in CONFIGS
]
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
}
RANKS = {"hybrid_shard": 4}
KINDS = {"Qwen": "qwen3", "google-bert": "bert"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Path]:
    """A small pretrained model of each kind that the files name, with a tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = build_data(configured(folder, corpus).data).tokenizer
    for kind in KINDS.values():
        make: Any = AutoModelForSequenceClassification if kind == "bert" else AutoModelForCausalLM
        make.from_config(AutoConfig.for_model(kind, **SMALL)).save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
    return {kind: folder / kind for kind in KINDS.values()}


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reviews") / "reviews.jsonl"
    for name, first in ((path.name, 0), ("others.jsonl", 80)):
        rows = (
            {"sentence": f"film {i} is {('dull', 'fine')[i % 2]}", "label": i % 2}
            for i in range(first, first + 80)
        )
        path.with_name(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def here(path: Path, folder: Path, models: dict[str, Path], corpus: Path, reviews: Path) -> dict[str, Any]:
    """What a file needs changed to run on this machine, by dotted key."""
    config = load_config(path)
    assert config.model.name_or_path is not None
    classifies = config.model.task == "sequence-classification"
    settings: dict[str, Any] = {
        "backend": "xla" if config.backend == "xla" else "cpu",
        "output_dir": str(folder),
        "model.name_or_path": str(models[KINDS[config.model.name_or_path.split("/")[0]]]),
        "data.source": str(reviews if classifies else corpus),
        "data.config_name": None,
        "data.cache_dir": str(folder.parent / "cache"),
        "data.seq_len": 32,
        "data.max_samples": 60,
    }
    if config.data.eval is not None:
        settings["data.eval"] = {"source": str(reviews.with_name("others.jsonl"))}
    if config.strategy == "hybrid_shard":
        settings["fsdp.shard_group_size"] = 2
    if config.memory.nvme_path is not None:
        settings["memory.nvme_path"] = str(folder.parent)
    return settings


SHORT: dict[str, Any] = {
    "train.epochs": None,
    "train.steps": 2,
    "train.warmup_steps": 1,
    "train.global_batch_size": 16,
    "train.eval_every": 2,
    "train.eval_batches": 1,
    "log.every_steps": 1,
    "log.trackers": [],
    "log.sample_tokens": 4,
}


def leg(config: RunConfig) -> int:
    return run_rank(config.backend, config)


@pytest.mark.parametrize("path", TRAINED)
def test_trains(
    path: Path,
    tmp_path: Path,
    models: dict[str, Path],
    corpus: Path,
    reviews: Path,
    engines: Engines,
) -> None:
    settings = here(path, tmp_path / "run", models, corpus, reviews) | SHORT
    config = load_config(path, settings)
    name, size = ("xla", 4) if config.backend == "xla" else (config.strategy, RANKS.get(config.strategy, 2))
    assert engines.run(name, size, leg, config) == 0
    losses = [row["loss"] for row in read_metrics(tmp_path / "run") if "loss" in row]
    assert len(losses) == 2 and all(0 < loss < 10 for loss in losses)
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
