"""The files in ``configs/``: each trains without changes, except for the machine and the hub.

Models and data of a hub are replaced by a model of the same kind with small layers and by a text on disk.
Configs for an accelerator run on CPU ranks or virtual XLA devices.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from portable.config import load_config
from portable.config.reference import ROOT
from portable.data.dataset import build_data
from tests.engines import Engines
from tests.parity import launched
from tests.portable.data_support import write_jsonl
from tests.runs import configured, losses

MARKS = {"nvme": pytest.mark.ops("async_io"), "tpu": pytest.mark.xla}
CONFIGS = [
    pytest.param(path, id=path.stem, marks=[mark for word, mark in MARKS.items() if word in path.stem])
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if path.stem != "quickstart"
]
SMALL = yaml.safe_load(Path(__file__).with_name("example_configs_small.yaml").read_text("utf-8"))
RANKS = {"hybrid_shard": 4}
KINDS = {"Qwen": "qwen3", "google-bert": "bert"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[str, Path]:
    """Write a small pretrained model with a tokenizer for each kind that the files name."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = build_data(configured(folder, corpus).data).tokenizer
    for kind in KINDS.values():
        make: Any = AutoModelForSequenceClassification if kind == "bert" else AutoModelForCausalLM
        make.from_config(AutoConfig.for_model(kind, **SMALL["model"])).save_pretrained(folder / kind)
        tokenizer.save_pretrained(folder / kind)
    return {kind: folder / kind for kind in KINDS.values()}


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reviews") / "reviews.jsonl"
    for name, first in ((path.name, 0), ("others.jsonl", 80)):
        said = ((i, ("dull", "fine")[i % 2]) for i in range(first, first + 80))
        rows = ({"sentence": f"film {i} is {word}", "label": i % 2} for i, word in said)
        write_jsonl(path.with_name(name), rows)
    return path


def here(path: Path, folder: Path, models: dict[str, Path], corpus: Path, reviews: Path) -> dict[str, Any]:
    """Return the changes that a file needs to run on this machine, by dotted key."""
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


@pytest.mark.parametrize("path", CONFIGS)
def test_example_config_trains(
    path: Path,
    tmp_path: Path,
    models: dict[str, Path],
    corpus: Path,
    reviews: Path,
    engines: Engines,
) -> None:
    settings = here(path, tmp_path / "run", models, corpus, reviews) | SMALL["run"]
    config = load_config(path, settings)
    name, size = ("xla", 4) if config.backend == "xla" else (config.strategy, RANKS.get(config.strategy, 2))
    assert engines.run(name, size, launched, config) == 0
    found = losses(tmp_path / "run").values()
    assert len(found) == 2 and all(0 < loss < 10 for loss in found)
    assert (tmp_path / "run" / "final" / "model.safetensors").is_file()
