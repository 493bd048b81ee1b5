"""DeepSpeed's JSON: it is converted, completed, and never misread silently."""

from __future__ import annotations

import inspect
import json
from functools import cache
from typing import Any

import pytest
import yaml

pytest.importorskip("deepspeed")

from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from pydantic import BaseModel

from portable.config import RunConfig, dump_yaml, load_config
from portable.errors import UserError
from portable.gpu.zero import private_api
from portable.gpu.zero import runtime as zero_runtime
from portable.gpu.zero.config.document import read_deepspeed_document as read_document
from portable.importing.foreign_file import ImportedRun
from portable.run.rank import run_rank
from portable.run.resolve import resolve_run
from tests import published
from tests.gpu.test_parity import STEPS, Losses, assert_close, our_losses
from tests.published import shapes
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured, losses, weights

# Unchanged files of Hugging Face's DeepSpeed guide. ``test_published_deepspeed`` checks their meaning.
GUIDE = {shape.name: shape.config for shape in shapes("deepspeed.json") if shape.name.startswith("guide-")}


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> Any:
    return zero_runtime.import_deepspeed("cpu")


def resolved(folder: Path, corpus: Path, document: Any, **settings: Any) -> RunConfig:
    config = configured(folder, corpus, deepspeed__config=document, **settings)
    return resolve_run(config, "cpu", 2).config


LEARNING: dict[str, Any] = {
    "train__global_batch_size": 4,
    "train__learning_rate": 0.006,
    "data__eval_fraction": 0,
}
"""Settings of a run that learns despite DeepSpeed's slow warmup; each of two ranks has two micro-batches."""


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Callable[[str], Losses]:
    """Return the losses of one rank without ZeRO, by schedule."""

    @cache
    def losses(schedule: str) -> Losses:
        folder = tmp_path_factory.mktemp("truth")
        settings = {**LEARNING, "strategy": "no_shard", "train__schedule": schedule}
        return our_losses(configured(folder, corpus, **settings))

    return losses


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.ops("async_io") if "nvme" in name else ()) for name in GUIDE],
)
def test_deepspeed_json_of_guide_trains(
    name: str, truth: Callable[[str], Losses], tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(GUIDE[name]).replace("/local_nvme", str(tmp_path)))
    schedule = "WarmupLR" if "scheduler" in GUIDE[name] else "constant"
    settings: dict[str, Any] = {**LEARNING, "train__micro_batch_size": 1, "train__schedule": schedule}
    config = configured(tmp_path, corpus, deepspeed__config=str(file), **settings)
    assert_close(ranks.run(2, our_losses, config), truth(schedule), 1e-5, falls=0.2)
    assert not list(tmp_path.glob("portable-swap-*"))


def forced(folder: Path, corpus: Path, **settings: Any) -> RunConfig:
    document = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": True,
    }
    return configured(folder, corpus, deepspeed__config=document, train__micro_batch_size=1, **settings)


def forced_leg(folder: Path, corpus: Path, stop: int | None, updates: int) -> int:
    """Train a launch, and check that DeepSpeed's optimizer makes its updates."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    own = DeepSpeedCPUAdam.step
    with patch.object(DeepSpeedCPUAdam, "step", autospec=True, side_effect=own) as step:
        status = run_rank("cpu", forced(folder, corpus, **SHORT, train__stop_after=stop))
    assert step.call_count >= updates
    return status


SHORT: dict[str, Any] = {**LEARNING, "train__steps": STEPS, "train__schedule": "constant"}


@pytest.mark.ops("cpu_adam")
def test_deepspeed_cpu_optimizer_is_used_on_request(
    truth: Callable[[str], Losses], tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    """Its losses match torch's, and a resumed run continues bit for bit."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert ranks.run(2, forced_leg, whole, corpus, None, STEPS) == 0
    plain = [loss for loss, _ in truth("constant")]
    assert list(losses(whole).values()) == pytest.approx(plain, rel=1e-5)
    assert plain[-1] < plain[0] - 0.3  # it is learning, so that equal losses mean equal updates
    assert ranks.run(2, forced_leg, run, corpus, 2, 2) == 0
    assert ranks.run(2, forced_leg, run, corpus, None, STEPS - 2) == 0
    assert weights(run) == weights(whole)


def test_resolved_config_agrees_with_deepspeed_json(tmp_path: Path, corpus: Path) -> None:
    (sections,) = (shape.config for shape in shapes("deepspeed_keys.yaml") if shape.name == "sections")
    given = {"model": {"config": TINY_MODEL}, "deepspeed": {"config": sections}}
    config = resolve_run(load_config(given), "cpu", 2).config
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert resolve_run(load_config(tmp_path / "config.yaml"), "cpu", 2).config == config


def models() -> dict[str, Any]:
    """Return the models with which the installed DeepSpeed reads sections."""
    return {
        section: model
        for section, model in private_api.get_config_models().items()
        if inspect.isclass(model) and issubclass(model, BaseModel)
    }


def read_mapping(document: dict[str, Any]) -> tuple[dict[str, Any], ImportedRun]:
    config = {"strategy": "zero2", "model": {"config": TINY_MODEL}, "deepspeed": {"config": document}}
    read = read_document(load_config(config))
    assert read is not None
    return read.values, read.imported.raise_first_refusal()


def test_deepspeed_null_and_default_values_have_no_effect() -> None:
    assert len(models()) > 5
    fields = {
        section: [
            name
            for name, field in model.model_fields.items()
            if not (field.json_schema_extra or {}).get("deprecated")
        ]
        for section, model in models().items()
    }
    values, imported = read_mapping({section: dict.fromkeys(names) for section, names in fields.items()})
    assert not any(values[section].keys() - {"stage"} for section in values)
    defaults = {
        section: model().model_dump(mode="json", include=set(fields[section]))
        for section, model in models().items()
    }
    assert defaults["zero_optimization"].pop("stage") == 0  # the strategy decides
    values, imported = read_mapping(defaults)
    assert "tensor_parallel" not in values  # which is refused with any other value
    assert not any("unknown" in note for note in imported.notes)


@pytest.mark.parametrize("section", ["", "zero_optimization", "zero_optimization.offload_param", "aio"])
def test_deepspeed_unknown_keys_that_are_off_have_no_effect(section: str) -> None:
    off: dict[str, Any] = {"new_thing": False, "new_name": "", "new_table": {}, "new_list": [], "none": None}
    for value in (off, {"new_thing": True}, {"new_thing": 0}):
        document = value
        for part in reversed(section.split(".") if section else []):
            document = {part: document}
        if value is not off:
            with pytest.raises(UserError, match=r"unknown key .*new_thing"):
                read_mapping(document)
            continue
        values, imported = read_mapping(document)
        assert "new_" not in json.dumps(values)
        assert sum("new_" in note for note in imported.notes) == 4
    with pytest.raises(UserError, match=r"did you mean zero_optimization\.overlap_comm"):
        read_mapping({"zero_optimization": {"overlap_com": False}})  # its default may be true


ROWS = yaml.safe_load((Path(published.__file__).parent / "deepspeed_refused.yaml").read_text())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.get("text") or json.dumps(row["json"]))
def test_deepspeed_json_contradiction_names_both_settings(
    row: dict[str, Any], tmp_path: Path, corpus: Path
) -> None:
    document: Any = str(tmp_path / "ds.json")
    if "text" in row:
        Path(document).write_text(row["text"])
    else:
        document = {"zero_optimization": {"stage": 2}, **row["json"]}
    beside = {key.replace(".", "__"): value for key, value in row.get("beside", {}).items()}
    with pytest.raises(UserError) as caught:
        resolved(tmp_path, corpus, document, **beside)
    line = str(caught.value)
    assert "\n" not in line
    for word in row["words"]:
        assert word in line
