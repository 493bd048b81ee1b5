"""Data and models from custom code.

Also code that reads sharded parameters, and modules named like packages of this project.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from portable import UserError, plugins, train
from portable.api import replace_settings_with_objects
from portable.batch import Batch
from portable.callbacks import Run
from portable.config import RunConfig
from portable.config.sections import DataConfig
from portable.data.dataset import build_data, inspect_data_sizes
from portable.data.sources.custom_records import CustomRecords, write_records_file
from portable.errors import ReportedElsewhereError
from portable.model import build as models
from portable.model.training_loss import Outputs
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.engines import ENGINES, Engines
from tests.parity import opened, take_steps
from tests.portable.data_support import source
from tests.ranks import RankPool
from tests.runs import SENTENCE, configured

HERE = __name__

# -- data --------------------------------------------------------------------------------------------------


def records(count: int = 40) -> Iterator[dict[str, Any]]:
    for number in range(count):
        yield {"text": f"{number}: {SENTENCE[number % 9 :]}"}


def failing() -> Iterator[dict[str, Any]]:
    yield {"text": "one"}
    raise ValueError("no\nmore")


def nothing() -> None: ...


def no_model(model: Any) -> Any:
    return "model"


@pytest.mark.parametrize(
    ("key", "name", "told"),
    [
        ("data.source", "nothing", "provides a NoneType, not an iterable of records; provide an iterable"),
        ("data.source", "failing", "raises an error (ValueError: no more; test_custom_code.py, line"),
        (
            "data.source",
            "Rows(wrong='shape')",
            "labels is int64 [31] in sample 30, but int64 [",
        ),
        ("data.source", "Rows(wrong='tokens')", "sample 30 has token ids from 5 to 1000000, but the"),
        (
            "data.source",
            "NoFingerprint",
            "the attribute fingerprint is missing or not a string; set fingerprint to a string that",
        ),
        ("model.function", "no_model", "no_model: returns a str, not a transformers model or None"),
    ],
)
def test_custom_data_or_model_with_errors_is_rejected(
    key: str, name: str, told: str, finished: dict[str, Any], tmp_path: Path, corpus: Path
) -> None:
    settings = finished if name[0].isupper() else {}
    given = {**settings, key.replace(".", "__"): f"{HERE}:{name}", "train__steps": 30}
    with pytest.raises(UserError) as caught:
        train(configured(tmp_path / "run", corpus, **given))
    assert str(caught.value).startswith(f"{key}: ") and told in str(caught.value)
    assert "\n" not in str(caught.value) and ("wrong" in name or not (tmp_path / "run").exists())


def test_custom_records_in_memory_are_read(tmp_path: Path, corpus: Path) -> None:
    rows = list(records())
    config = replace_settings_with_objects(configured(tmp_path / "run", tmp_path / "corpus.jsonl"), data=rows)
    again = replace_settings_with_objects(configured(tmp_path / "run", tmp_path / "corpus.jsonl"), data=rows)
    assert config.data.source == again.data.source
    found = source(config.data.source)
    assert [document.text for document in found.iter_documents()] == [row["text"] for row in rows]
    with pytest.raises(UserError, match="data: record 2 is a str"):
        replace_settings_with_objects(config, data=[{"text": "a"}, "b"])


@pytest.mark.parametrize("name", ["mappings", "unreadable"])
def test_custom_records_may_be_mappings_other_than_dicts(name: str, tmp_path: Path) -> None:
    """The cache key equals the key of the same records as dicts."""
    records_source = CustomRecords(f"{HERE}:{name}", source(f"{HERE}:{name}").settings)
    if name == "unreadable":
        with pytest.raises(UserError, match="record 1 cannot be converted to JSON"):
            records_source.cache_key  # noqa: B018
        return
    assert [document.text for document in records_source.iter_documents()] == ["a", "b"]
    dicts = CustomRecords(f"{HERE}:mappings", records_source.settings)
    dicts.records = [{"text": "a", "more": {"n": 1}}, {"text": "b"}]
    assert records_source.cache_key == dicts.cache_key
    written = [write_records_file(data.records, tmp_path) for data in (records_source, dicts)]
    assert written[0] == written[1]


def mappings() -> list[MappingProxyType[str, Any]]:
    first = {"text": "a", "more": MappingProxyType({"n": 1})}
    return [MappingProxyType(first), MappingProxyType({"text": "b"})]


def unreadable() -> list[dict[str, Any]]:
    return [{"text": object()}]


# -- finished samples --------------------------------------------------------------------------------------


class Rows:
    """Blocks of numbers as samples of 32 tokens, each with a weight."""

    fingerprint = "rows 1"

    def __init__(self, count: int = 50, wrong: str = "") -> None:
        self.count = count
        self.wrong = wrong

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict[str, Any]:
        tokens = [(number * 7 + at * (1 + number % 3)) % 300 for at in range(33)]
        found: dict[str, Any] = {
            "input_ids": tokens[:-1],
            "labels": torch.tensor(tokens[1:]),
            "share": 0.5 + number % 2,
        }
        if self.wrong == "shape" and number == 30:
            found["labels"] = found["labels"][:-1]
        if self.wrong == "tokens" and number == 30:
            found["input_ids"] = [5] * 31 + [1_000_000]
        return found


@pytest.mark.parametrize("function", [build_data, inspect_data_sizes])
def test_finished_samples_require_tokenizer(function: Callable[[DataConfig], object]) -> None:
    with pytest.raises(UserError, match=r"data\.tokenizer: is required for finished samples"):
        function(DataConfig(source=f"{HERE}:Rows", format="samples", seq_len=32))


class NoFingerprint(Rows):
    fingerprint = None  # type: ignore[assignment]


def shared(outputs: Outputs, batch: Batch) -> Any:
    assert outputs.log_probs is not None
    share = batch["share"][:, None].expand_as(batch["labels"])
    return -(share * outputs.log_probs).sum(), share.sum()


shared.needs = ("log_probs",)  # type: ignore[attr-defined]
shared.weight = lambda batch: float(batch["share"].sum() * batch["labels"].shape[1])  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the settings of runs on custom samples, with the tokenizer of another run."""
    folder = tmp_path_factory.mktemp("tokenizer")
    with opened(configured(folder / "run", corpus)) as trial:
        trial.run.data.tokenizer.save_pretrained(folder / "tokenizer")
    return {
        "data__source": f"{HERE}:Rows",
        "data__tokenizer": str(folder / "tokenizer"),
        "train__loss": f"{HERE}:shared",
        "train__micro_batch_size": 1,
    }


@pytest.mark.parametrize("name", ["full_shard", "xla"])
def test_custom_samples_train_on_every_engine(
    name: str, finished: Any, corpus: Path, tmp_path: Path, engines: Engines
) -> None:
    """The run decides the order of the samples and uses only their number."""
    truth = take_steps(configured(tmp_path / "one", corpus, **finished), 4).losses
    with opened(configured(tmp_path / "one", corpus, **finished)) as trial:
        rows, model = [next(trial.batches) for _ in range(6)], trial.engine.model
        with torch.no_grad():
            losses = [
                functional.cross_entropy(model(row["input_ids"]).logits[0], row["labels"][0]) for row in rows
            ]
        shares = [float(row["share"]) for row in rows]
        total = sum(share * float(loss) for share, loss in zip(shares, losses, strict=True))
        assert truth[0] == pytest.approx(total / sum(shares), rel=1e-5)
    config = configured(tmp_path / "other", corpus, **finished, **ENGINES[name].settings)
    found = engines.run(name, 2, take_steps, config, 4).losses
    assert found == pytest.approx(truth, rel=1e-5) and truth[-1] < truth[0]


# -- models ------------------------------------------------------------------------------------------------


class WithValue(LlamaForCausalLM):  # type: ignore[misc]
    """An additional head whose values are added to the outputs of the model."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.value = nn.Linear(config.hidden_size, 1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, output_hidden_states=True, **kwargs)
        output["scores"] = self.value(output.hidden_states[-1].to(self.value.weight.dtype))[..., 0]
        output["hidden_states"] = None
        return output


def with_value(model: Any) -> Any:
    return WithValue(model.config)


class Valued:
    needs = ("log_probs",)

    def __call__(self, outputs: Outputs, batch: Batch) -> Any:
        assert outputs.log_probs is not None
        valid = batch["labels"] != -100
        values = torch.where(valid, outputs.model["scores"].float().square(), 0.0).sum()
        return values - outputs.log_probs.sum(), valid.sum(), {"values": values}


def with_a_value(config: RunConfig) -> tuple[list[float], dict[str, float], list[str]]:
    with opened(config) as trial:
        results = [trial.step() for _ in range(4)]
        losses = trial.backend.read_to_host([result.loss for result in results])
        numbers = trial.read_metrics(results[-1])
        return losses, numbers, [name for name, _ in trial.engine.model.named_parameters()]


@pytest.mark.parametrize("name", ["full_shard", "xla"])
def test_custom_model_head_is_trained(name: str, corpus: Path, tmp_path: Path, engines: Engines) -> None:
    own = {"model__function": f"{HERE}:with_value", "train__loss": f"{HERE}:Valued"}
    common = {"train__micro_batch_size": 1, "train__global_batch_size": 4, **own}
    two_rows = {**common, "train__micro_batch_size": 2}  # which are compared with their halves
    truth, numbers, names = with_a_value(configured(tmp_path, corpus, **two_rows))
    assert "value.weight" in names and numbers["values"] > 0
    settings = {**common, **ENGINES[name].settings}
    found = engines.run(name, 2, with_a_value, configured(tmp_path, corpus, **settings))
    if name == "xla":
        del numbers["entropy"]  # which it does not log
    assert found[0] == pytest.approx(truth, rel=1e-5) and found[1] == pytest.approx(numbers, rel=1e-4)


# -- parameters in parts ---------------------------------------------------------------------------------


class Norm:
    """Callback that logs the norm of a parameter; with ``gathered``, of the full parameter."""

    def __init__(self, gathered: bool) -> None:
        self.gathered = gathered

    def on_log(self, run: Run, values: Any) -> None:
        parameter: Any = next(run.model.parameters())
        if not self.gathered:
            run.log({"norm": float(parameter.detach().norm())})
        elif isinstance(parameter, DTensor):
            run.log({"norm": parameter.full_tensor().detach().norm()})
        else:
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                run.log({"norm": float(parameter.detach().norm())})


@pytest.fixture
def own(corpus: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """Return the settings of a run in which small parameters are sharded like large ones."""
    pytest.importorskip("deepspeed")
    zero = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    common: dict[str, Any] = {"train__steps": 2, "log__every_steps": 1, "train__micro_batch_size": 1}
    common |= {"checkpoint__export": False, "log__sample_tokens": 0}

    def of(strategy: str, **more: Any) -> RunConfig:
        config = {"deepspeed__config": zero} if strategy == "zero3" else {}
        return configured(tmp_path / strategy, corpus, **common, **config, **more, strategy=strategy)

    return of


def trained(config: RunConfig) -> str:
    try:
        run_rank(config.backend, config)
    except (UserError, ReportedElsewhereError) as error:  # either rank may be the first to report it
        return str(error)
    return ""


WHERE = (
    "reads a parameter outside of the model's forward pass, when each rank has only a shard of the "
    "parameter; "
)


@pytest.mark.parametrize(
    ("strategy", "remedy"),
    [
        ("full_shard", "call full_tensor() on the parameter first, on all ranks"),
        ("zero3", "read the parameter within deepspeed.zero.GatheredParameters, on all ranks"),
    ],
)
def test_callback_must_gather_sharded_parameters(
    strategy: str, remedy: str, own: Any, tmp_path: Path, ranks: RankPool
) -> None:
    part, whole = (f"{HERE}:Norm(gathered={gathered})" for gathered in (False, True))
    refused = f"train.callbacks: {part}: on_log: {WHERE}{remedy}"
    assert ranks.run(2, trained, own(strategy, train__callbacks=part)) == refused
    assert trained(own("no_shard", train__callbacks=part)) == ""
    assert ranks.run(2, trained, own(strategy, train__callbacks=whole)) == ""
    found, truth = (
        [row["norm"] for row in read_metrics(tmp_path / name) if "norm" in row]
        for name in (strategy, "no_shard")
    )
    assert found == pytest.approx(truth, rel=1e-5) and len(found) == 2


def with_scalar(model: Any) -> None:
    model.gain = nn.Parameter(torch.ones(()))


def test_custom_model_with_scalar_parameter_is_rejected(corpus: Path, tmp_path: Path) -> None:
    config = configured(tmp_path, corpus, model__function=f"{HERE}:with_scalar")
    with pytest.raises(UserError, match=r"with_scalar: the parameter gain is a scalar, .* torch\.ones\(1\)"):
        models.build_and_freeze_model(models.load_model_config(config.model), config)


# -- modules named like folders of the repository ---------------------------------------------------------


ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NAMES = ("gpu.py", "tpu/__init__.py", "converters.py", "configs/__init__.py")


@pytest.mark.parametrize("name", PROJECT["project"]["scripts"])
def test_commands_import_project_modules_despite_local_files(name: str, tmp_path: Path) -> None:
    """The current folder has modules with the same names, each of which would leave a mark if imported."""
    folder, mark = tmp_path / "home", tmp_path / "ran"
    for file in NAMES:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(f"open({str(mark)!r}, 'a').write(__file__ + '\\n')\n")
    module, function = PROJECT["project"]["scripts"][name].split(":")
    script = f"import sys; sys.argv[0] = {name!r}; from {module} import {function}; sys.exit({function}())"
    command = [sys.executable, "-c", script, "--help"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert not mark.exists(), mark.read_text()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {name.removesuffix('er')}")


@pytest.mark.parametrize("module", ["configs", "converters", "gpu", "tpu"])
def test_load_plugin_finds_module_named_like_repository_folder(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path(f"{module}.py").write_text("def loss(): return 7\n")
    Path("plugged.py").write_text(f"from {module} import loss\n")
    for name in ("plugged", module):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in (module, "plugged"):
        assert plugins.load_plugin("train.loss", f"{name}:loss")() == 7
        monkeypatch.delitem(sys.modules, name)


def test_package_installs_only_portable() -> None:
    setuptools = pytest.importorskip("setuptools")
    settings = PROJECT["tool"]["setuptools"]
    found = setuptools.find_namespace_packages(str(ROOT), include=settings["packages"]["find"]["include"])
    assert {name.partition(".")[0] for name in found} == {"portable"}
    assert {"portable.configs", "portable.configs.starters"} <= set(found)
    shipped = {
        file
        for line in settings["package-data"]["portable.configs"]
        for file in (ROOT / "configs").glob(line)
    }
    assert shipped == {file for file in (ROOT / "configs").rglob("*") if file.is_file()}


def test_code_digest_is_same_in_each_python_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 has added the field ``type_params``, and the dump of Python 3.13 omits empty lists."""
    monkeypatch.syspath_prepend(str(tmp_path))
    text = (
        "def loss(a: int = 1, *, b=None):\n    return f'{a!r:>{b}}', [], None\n\n\nclass Other:\n    pass\n"
    )
    (tmp_path / "digested_code.py").write_text(text)
    for kind in (ast.FunctionDef, ast.ClassDef):
        if "type_params" not in kind._fields:
            monkeypatch.setattr(kind, "_fields", (*kind._fields, "type_params"))
            monkeypatch.setattr(kind, "type_params", [], raising=False)
    assert plugins.compute_plugin_digest("digested_code:loss") == "36cad338f125"
