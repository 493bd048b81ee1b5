"""Uploads to the hub: the client of huggingface_hub with a fake hub server that can fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import yaml
from huggingface_hub.utils import get_session
from safetensors.numpy import load, save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from portable import Run
from portable.config import load_config
from portable.errors import RunError, UserError
from portable.output import hub as hub_module
from portable.output.export import EXPORT_MARKER_FILE
from portable.output.hub import HubRepository
from portable.reporting.model_card import MODEL_CARD_FILE, build_model_card
from portable.run.rank import run_rank
from portable.run.uploads import HubUploadCallback
from tests import hub_datasets
from tests.composite import build_composite
from tests.exports import write_source
from tests.hub_server import DROP, LOST, TOKEN, FakeHub, Repository, serving
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, checked, configured, tiny
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("brief_runs")
MODEL = {**TINY_MODEL, "num_hidden_layers": 1}


def use(url: str, token: str | None, patch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub of this process use the server at ``url``."""
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the fake server does not support this storage
    patch.setattr(constants, "HF_TOKEN_PATH", "/nowhere/token")
    patch.delenv("HF_TOKEN", raising=False)
    if token is not None:
        patch.setenv("HF_TOKEN", token)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serving(FakeHub()) as found:
        use(found.url, TOKEN, monkeypatch)
        monkeypatch.setattr(hub_module, "RETRY_WAIT_SECONDS", (0.0, 0.0))
        yield found


def run(folder: Path, corpus: Path, **settings: Any) -> int:
    given = {"train__steps": 2, "checkpoint__every_steps": 1, "model__config": MODEL, "hub__push": "end"}
    return run_rank("cpu", configured(folder, corpus, **{**given, "log__sample_tokens": 0, **settings}))


def on_rank(url: str, config: Any) -> int:
    with pytest.MonkeyPatch.context() as patch:
        use(url, TOKEN, patch)
        patch.setattr(hub_module, "RETRY_WAIT_SECONDS", (0.0, 0.0))
        return run_rank("cpu", config)


def test_hub_upload_of_two_ranks_happens_once(
    tmp_path: Path, corpus: Path, hub: FakeHub, ranks: RankPool
) -> None:
    """The repository of the user is private and contains only the files of ``final``."""
    settings = tiny(tmp_path / "of-two", corpus, train__steps=2, hub__push="end", model__config=MODEL)
    ranks.run(2, on_rank, hub.url, load_config(None, settings))
    repository = hub.repositories["me/of-two"]
    final = tmp_path / "of-two" / "final"
    assert repository.private and [message for message, _ in repository.commits] == ["Final model, step 2"]
    there = {path.name: path.read_bytes() for path in final.iterdir() if path.name != EXPORT_MARKER_FILE}
    assert repository.files == there and "model.safetensors" in there
    assert load(there["model.safetensors"])
    assert sum("/commit/" in one for one in hub.requests) == sum("create" in one for one in hub.requests) == 1
    assert f"{hub.url}/me/of-two" in (tmp_path / "of-two" / "log.txt").read_text("utf-8")
    card = there[MODEL_CARD_FILE].decode()
    assert yaml.safe_load(card.split("---\n")[1])["pipeline_tag"] == "text-generation"
    assert str(tmp_path) not in card and str(corpus.parent) not in card and "corpus.jsonl" in card
    assert not any(json.loads(line)["text"] in card for line in corpus.read_text().splitlines())


@pytest.mark.parametrize("model_type", ["mixtral", "gemma3"])
def test_hub_upload_of_best_model_has_published_names(
    model_type: str, tmp_path: Path, corpus: Path, hub: FakeHub
) -> None:
    if model_type == "mixtral":
        model = tiny_model(model_type)
    else:
        model = build_composite(model_type)
    base = write_source(tmp_path / "base", model, corpus)
    from_base = {"model__config": None, "model__name_or_path": str(base), "data__eval_fraction": 0.2}
    best = {"train__eval_every": 1, "checkpoint__keep_best": 1, "checkpoint__export_best": True}
    assert run(tmp_path / "best", corpus, **from_base, **best) == 0
    uploaded = load(hub.repositories["me/best"].files["model.safetensors"])
    expected = load((base / "model.safetensors").read_bytes())
    assert {name: tensor.shape for name, tensor in uploaded.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }


def test_hub_upload_of_adapter_has_peft_files(tmp_path: Path, corpus: Path, hub: FakeHub) -> None:
    run(tmp_path / "lora", corpus, adapter__type="lora", adapter__r=2, train__steps=1)
    there = hub.repositories["me/lora"].files
    assert "adapter_config.json" in there and "model.safetensors" not in there
    assert all(".lora_" in name for name in load(there["adapter_model.safetensors"]))
    assert yaml.safe_load(there[MODEL_CARD_FILE].decode().split("---\n")[1])["library_name"] == "peft"


def test_model_card_config_reproduces_run(tmp_path: Path, corpus: Path) -> None:
    """The config in the card has the settings of the run, except for settings of the machine."""
    run(tmp_path / "run", corpus, hub__push=None, train__steps=1)
    text = (tmp_path / "run" / "final" / MODEL_CARD_FILE).read_text("utf-8")
    (tmp_path / "again.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
    again = load_config(tmp_path / "again.yaml").fingerprint()
    mine = load_config(tmp_path / "run" / "config.yaml").fingerprint()
    assert {key for key in mine if mine[key] != again[key]} <= {"data.source", "data.format"}
    assert "source: corpus.jsonl\n" in text


@pytest.mark.parametrize("number", [1, 10, 11, 20, 100])
def test_model_card_has_ten_points_and_last_evaluation(number: int) -> None:
    """A value that a callback logs is not an evaluation, although its name begins with ``eval_``."""
    rows: list[dict[str, Any]] = [
        {"step": step, "loss": 2.0, "eval_mine": 7.0} for step in range(1, number + 1)
    ]
    rows.insert(number - 1, {"step": number - 1, "eval_loss/news": 1.5})
    config = load_config(None, {"output_dir": "runs/mine", "backend": "cpu"})
    card = build_model_card(
        config,
        adapter=None,
        architecture="LlamaForCausalLM",
        model_type="llama",
        data_description="texts",
        metrics=rows,
    )
    points = re.findall(r"^\| (\d+) \| 2\.0000 \|$", card, re.MULTILINE)
    assert len(points) <= 10 and points[0] == "1" and points[-1] == str(number)
    assert "| last evaluation | value |\n|---|---|\n| eval_loss/news | 1.5000 |\n\n" in card


RELEASE = threading.Event()


class Release:
    """Lets the first upload end only once all steps are done."""

    def on_end(self, run: Run) -> None:
        RELEASE.set()


def test_hub_uploads_checkpoints_in_background(tmp_path: Path, corpus: Path, hub: FakeHub) -> None:
    """One upload runs at a time.

    A slow one does not delay training, and newer checkpoints replace waiting ones.
    """
    hub.hold = RELEASE
    run(
        tmp_path / "run",
        corpus,
        train__steps=6,
        train__callbacks="tests.portable.test_hub:Release",
        hub__push="checkpoints",
        hub__repo="lab/tiny",
        checkpoint__keep=1,
    )
    commits = hub.repositories["lab/tiny"].commits
    messages = [message for message, _ in commits]
    # The upload of step 6 may have begun before the end; then nothing is left to commit.
    assert messages[0] == "Step 1" and messages[-1] in ("Step 6", "Final model, step 6")
    assert len(messages) <= 3
    weights = [files["model.safetensors"] for _, files in commits]
    assert weights[0] != weights[-1] == (tmp_path / "run" / "final" / "model.safetensors").read_bytes()
    card = commits[0][1][MODEL_CARD_FILE].decode()
    assert "| 1 |" in card and "| 2 |" not in card  # the evaluations up to that step
    assert not any("optim" in name or "trainer_state" in name for _, files in commits for name in files)
    left = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert left == ["step-000006"] and not (tmp_path / "run" / ".scratch").exists()


@pytest.fixture
def export(tmp_path: Path) -> Path:
    """Write a folder like an export."""
    folder = tmp_path / "final"
    folder.mkdir()
    save_file({"weight": np.arange(6.0)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / MODEL_CARD_FILE).write_text("---\nlibrary_name: transformers\n---\n")
    (folder / EXPORT_MARKER_FILE).write_text("{}")
    return folder


def of(folder: Path, **settings: Any) -> HubRepository:
    given = {"hub.push": "end", "output_dir": str(folder / "run"), "backend": "cpu"}
    return HubRepository(
        checked(None, given | {key.replace("__", "."): value for key, value in settings.items()})
    )


def test_hub_upload_is_retried(export: Path, hub: FakeHub) -> None:
    """A commit whose response was lost is not repeated."""
    hub.faults = {"POST /me/run.git": [503], "PUT /lfs": [DROP], "/commit/": [500, LOST]}
    assert of(export).push_export(export, "Step 1") == f"{hub.url}/me/run"
    assert not any(hub.faults.values()) and len(hub.repositories["me/run"].commits) == 1
    assert set(hub.repositories["me/run"].files) == {"model.safetensors", "config.json", MODEL_CARD_FILE}


def test_hub_upload_times_out(export: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of huggingface_hub has no time limit by default."""
    before = get_session().timeout
    hub.hold = threading.Event()
    monkeypatch.setattr(hub_module, "_UPLOAD_TIMEOUT_SECONDS", 0.3)
    with pytest.raises(RunError, match="timed out"):
        of(export).push_export(export, "Step 1")
    hub.hold.set()
    assert get_session().timeout == before


def test_hub_that_is_down_at_start_is_a_warning(
    export: Path, hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults = {"whoami": [503, DROP]}
    one = of(export)
    one.check_access()
    one.create_repository()
    assert capsys.readouterr().err.count("warning: hub.push: the hub does not respond (") == 1
    one.push_export(export, "Step 1")
    assert hub.repositories["me/run"].commits


@pytest.mark.parametrize("fault", [500, 403], ids=str)
def test_hub_upload_failure_does_not_end_run(
    fault: int | str, tmp_path: Path, corpus: Path, hub: FakeHub, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.faults = {"/commit/": [fault] * 9}
    assert run(tmp_path / "run", corpus, hub__push="checkpoints", train__steps=1) == 0
    told = [line for line in capfd.readouterr().err.splitlines() if "warning: hub" in line]
    final = tmp_path / "run" / "final"
    assert (final / "model.safetensors").is_file() and not hub.repositories["me/run"].commits
    by_hand = (
        f"upload the folder manually: hf upload me/run {final} . --exclude {EXPORT_MARKER_FILE} --private"
    )
    assert told[-1].endswith(by_hand), told
    assert sum("/commit/" in one for one in hub.requests) in ((1, 2) if fault == 403 else (3, 6))


@pytest.mark.parametrize("num_failures", [0, 1, 2])
def test_first_upload_failure_prints_warning_after_replaced_checkpoint(
    num_failures: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that a newer one replaces is reported at the end, and does not hide a failed upload."""
    begun, released = threading.Event(), threading.Event()
    errors = [RunError(f"failure {number}") for number in range(num_failures)]

    def push_export(*_: object) -> str:
        begun.set()
        released.wait()
        if errors:
            raise errors.pop(0)
        return ""

    repository = Mock(push_export=push_export)
    repository.name = "me/run"
    uploads = HubUploadCallback(repository, Mock(), tmp_path / "scratch")
    uploads.request_upload(tmp_path / "step-000001")
    begun.wait()
    uploads.request_upload(tmp_path / "step-000002")
    uploads.request_upload(tmp_path / "step-000003")
    released.set()
    (problem,) = uploads.finish_uploads(None, None).problems
    reason = "replaced by newer checkpoints before the upload"
    reason = f"failure {num_failures - 1}; 1 {reason}" if num_failures else reason
    missed = f"{num_failures + 1} checkpoint{'s' * bool(num_failures)}"
    assert problem == f"hub.push: {missed} not uploaded to me/run ({reason})"
    warning = "warning: hub.push: failure 0; the run continues\n" if num_failures else ""
    assert capsys.readouterr().err == warning


PUBLIC = Repository(private=False)
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"faults": {"whoami": [401]}}, "the hub does not accept the token; set HF_TOKEN"),
    ({}, {"role": "read"}, "the token has only read access"),
    (
        {"hub__repo": "other/tiny"},
        {},
        "does not exist, and me, the owner of the token, cannot create repositories under",
    ),
    ({"hub__repo": "lab/tiny"}, {"writable": {"me"}}, "no write access to lab/tiny"),  # known on creation
    (
        {"hub__repo": "other/open", "hub__private": False},
        {"repositories": {"other/open": PUBLIC}},
        "the token has no write access to other/open",
    ),
    (
        {"hub__repo": "lab/open"},
        {"repositories": {"lab/open": PUBLIC}},
        "hub.private: lab/open exists and is public; set hub.private to false",
    ),
    ({}, {"token": None}, "hub.push: there is no Hugging Face token; set HF_TOKEN"),
    ({}, {"offline": True}, "HF_HUB_OFFLINE is set"),
]
"""Settings of the run, state of the server or of this machine, and the expected error."""


@pytest.mark.parametrize(("settings", "state", "told"), REFUSED, ids=[row[-1][:40] for row in REFUSED])
def test_hub_push_is_rejected_before_run_starts(
    settings: dict[str, Any],
    state: dict[str, Any],
    told: str,
    tmp_path: Path,
    corpus: Path,
    hub: FakeHub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rejected run writes nothing."""
    vars(hub).update({name: value for name, value in state.items() if hasattr(hub, name)})
    if "token" in state:
        use(hub.url, None, monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", "offline" in state)
    before = hub.repositories.keys() | set()
    with pytest.raises(UserError) as caught:
        run(tmp_path / "run", corpus, **settings)
    assert told in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists() and hub.repositories.keys() == before
    assert state.keys().isdisjoint({"token", "offline"}) or not hub.requests


LOAD_MODEL = """
import torch._dynamo  # imported once here, not by each rank after the fork
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from portable.config import load_config
from portable.data.tokens.tokenizer import load_tokenizer
from portable.hub_requests import get_revisions_read
from portable.model.build import build_model_on_meta, load_model_config
from portable.model.pretrained import load_pretrained_weights

def load(name):
    settings = load_config(None, {"model.name_or_path": name, "data.source": "texts.jsonl"}).model
    model = build_model_on_meta(load_model_config(settings), settings)
    load_tokenizer(name)
    assert get_revisions_read() == {f"model {name}": sys.argv[1]}
    return sorted(load_pretrained_weights(settings, model).tensors)
"""
LOAD_DATASET = """
import datasets

from portable.config.sections import DataConfig
from portable.data.sources.hub_dataset import HubDataset
from portable.data.sources.source import SourceSettings

def load(name):
    source = HubDataset(name, SourceSettings(DataConfig(source=name)))
    texts = [document.text for document in source.iter_documents()]
    assert len(texts) == 3, texts
    return [texts, source.compute_digest(), [shard.identity for shard in source.iter_shards(1000)]]
"""
ON_RANKS = """
for name, ranks in (("lab/alone", 1), ("lab/together", 3)):
    children = []
    for rank in range(ranks):
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
                os.write(writing, repr(load(name)).replace(name, "NAME").encode())
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)  # without the exit handlers of the parent
        children.append((child, reading))
    assert [os.waitpid(child, 0)[1] for child, _ in children] == [0] * ranks
    answers = [os.read(reading, 1 << 16) for _, reading in children]
    assert len(set(answers)) == 1 and answers[0]
"""


@pytest.mark.parametrize("kind", ["models", "datasets"])
def test_hub_files_are_requested_by_one_rank_per_node(kind: str, tmp_path: Path) -> None:
    """Three ranks send hardly more requests than a single rank, and read the same files."""
    if kind == "models":
        tiny_model("llama").save_pretrained(tmp_path)
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, "w0"))
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w1").save_pretrained(tmp_path)
    else:
        rows = (json.dumps({"text": f"a line {number}"}) for number in range(3))
        (tmp_path / "train.jsonl").write_text("\n".join(rows))
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    requests: list[tuple[str, str]] = []
    names = ("lab/alone", "lab/together")
    load_on_ranks = f"import os, sys, traceback\n{LOAD_MODEL if kind == 'models' else LOAD_DATASET}{ON_RANKS}"
    with hub_datasets.serving(names, files, requests, kind=kind) as url:
        settings = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        subprocess.run(
            [sys.executable, "-c", load_on_ranks, hub_datasets.COMMIT],
            env={**os.environ, **settings, "HF_HOME": str(tmp_path / "cache")},
            check=True,
            timeout=300,
        )
    alone, together = ([request for request, _ in requests if name in request] for name in names)
    # The rank that lists the files may differ from the rank that loaded the dataset. It then repeats some
    # requests, which a single rank answers from its memory.
    assert 0 < len(alone) <= len(together) < 2 * len(alone), requests
