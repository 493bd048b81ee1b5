"""What ``portable-plan`` keeps of a model: that it is used, and when it is not."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from portable.config import load_config
from portable.planner import kept
from portable.planner.cli import main
from portable.planner.kept import KeptSubject, fingerprint
from portable.planner.passes import Activations, Peak, Request
from tests.runs import TINY_MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from portable.config import RunConfig
    from portable.planner.inventory import Inventory
    from tests.zygote import Zygote

pytestmark = pytest.mark.usefixtures("passes_known")
LENGTH = ["--data.seq_len", "64", "--train.global_batch_size", "16", "--devices", "2", "--json"]
MODEL = {**TINY_MODEL, "architectures": ["LlamaForCausalLM"]}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "portable-trainer" / "plans"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's, without weights."""
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(MODEL))
    return made


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with each model that is built."""
    from portable.model import build as models

    found: list[str] = []
    build = models.build_model

    def counted(*arguments: Any) -> Any:
        found.append(arguments[0].model_type)
        return build(*arguments)

    monkeypatch.setattr(models, "build_model", counted)
    return found


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*LENGTH, *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def config_of(**settings: Any) -> RunConfig:
    return load_config(None, {"backend": "cuda", "model.config": TINY_MODEL, "data.source": "x", **settings})


@pytest.mark.parametrize("device", ["h100", "v5e"])
def test_a_later_plan_is_the_same_and_needs_neither_torch_nor_transformers(
    device: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--model.name_or_path", str(folder), "--device", device]
    first = plan(capsys, *given)
    look = (
        "import sys; from portable.planner.cli import main; main(sys.argv[1:]); "
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules], file=sys.stderr)"
    )
    again = subprocess.run(
        [sys.executable, "-c", look, *LENGTH, *given], capture_output=True, text=True, check=True
    )
    assert json.loads(again.stdout) == first
    assert again.stderr.strip() == "[]"


def test_it_serves_other_devices_and_is_added_to(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str], builds: list[str]
) -> None:
    given = ["--model.name_or_path", str(folder)]
    plan(capsys, *given, "--device", "h100")
    small = plan(capsys, *given, "--device-memory", "1GB", "--host-memory", "1GB")
    assert small["usable_memory"] < 1e9
    plan(capsys, *given, "--device", "a100-40", "--train.optimizer", "sgd", "--strategy", "full_shard")
    assert builds == ["llama"]
    plan(capsys, *given, "--device", "h100", "--train.micro_batch_size", "1")
    assert builds == ["llama"] * 2
    for size in ("1", "4"):
        plan(capsys, *given, "--device", "h100", "--train.micro_batch_size", size)
    assert builds == ["llama"] * 2
    assert len(list(cache.iterdir())) == 1


def test_another_model_under_the_same_name_is_looked_at_anew(
    folder: Path, capsys: pytest.CaptureFixture[str], builds: list[str]
) -> None:
    first = plan(capsys, "--model.name_or_path", str(folder))
    (folder / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 5}))
    assert plan(capsys, "--model.name_or_path", str(folder))["parameters"] > first["parameters"]
    assert len(builds) == 2


def test_what_it_depends_on_is_in_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = fingerprint(config_of())
    assert plain is not None
    alike: tuple[dict[str, Any], ...] = (
        {"strategy": "full_shard"},
        {"data.seq_len": 32},
        {"memory.offload_optimizer": "cpu", "strategy": "full_shard"},
        {"train.optimizer": "adafactor"},
        {"memory.activation_checkpointing": "full"},
    )
    assert {fingerprint(config_of(**settings)) for settings in alike} == {plain}
    others: tuple[dict[str, Any], ...] = (
        {"model.config": {**TINY_MODEL, "num_hidden_layers": 7}},
        {"model.task": "sequence-classification"},
        {"model.attention": "eager"},
        {"model.attention": "sdpa"},  # which is refused where there is none; the default makes way
        {"fsdp.min_num_params": 1000, "strategy": "full_shard"},
        {"backend": "xla"},
    )
    found = {fingerprint(config_of(**settings)) for settings in others}
    assert len(found - {plain, None}) == len(others)

    release = kept._release
    for package in ("torch", "transformers", "accelerate"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kept, "_release", lambda p, p0=package: "99.1" if p == p0 else release(p))
            assert fingerprint(config_of()) not in (plain, None)
            patch.setattr(kept, "_release", lambda p, p0=package: None if p == p0 else release(p))
            assert fingerprint(config_of()) is None
    sources = list(kept._sources())
    assert any("def fingerprint" in text for text in sources)
    assert any("class _Zero" in text for text in sources)
    monkeypatch.setattr(kept, "_sources", lambda: iter([*sources[:-1], sources[-1] + "\n"]))
    assert fingerprint(config_of()) not in (plain, None)


class Installed:
    def __init__(self, version: str, direct_url: str | None = None) -> None:
        self.version = version
        self._direct_url = direct_url

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._direct_url


@pytest.mark.parametrize(
    ("installed", "finished"),
    [
        (Installed("2.9.1+cpu"), True),
        (Installed("5.23.0"), True),
        (Installed("2.9.1", '{"url": "file:///wheel.whl", "archive_info": {}}'), True),
        (Installed("5.24.0.dev0"), False),
        (Installed("2.10.0a0+git1234567"), False),
        (Installed("5.23.0", '{"url": "file:///src", "dir_info": {"editable": true}}'), False),
        (Installed("5.23.0", '{"url":"file:///src","dir_info":{"editable":true}}'), False),
    ],
)
def test_only_releases_are_taken_to_stay_as_they_are(
    installed: Installed, finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "distribution", lambda _: installed)
    assert (kept._release("torch") is not None) == finished


def test_a_model_that_changes_while_it_is_built_is_not_kept(
    folder: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from portable.model import build as models

    build = models.build_model

    def slow(*arguments: Any) -> Any:
        (folder / "config.json").write_text(json.dumps({**MODEL, "num_hidden_layers": 5}))
        return build(*arguments)

    monkeypatch.setattr(models, "build_model", slow)
    plan(capsys, "--model.name_or_path", str(folder))
    assert not cache.exists()


def test_a_machine_without_what_it_needs_plans_as_if_nothing_were_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a home; with a file among the sources that is none."""

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    config = config_of()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "default_cache_dir", nobody)
        assert kept._file_of(config) is None
    assert kept._file_of(config) is not None
    package = tmp_path / "sources"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / ".#plan.py").symlink_to("nowhere")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(kept, "_ROOMS", ("sources",))
    assert list(kept._sources()) == [""]


def test_code_that_comes_with_a_model_is_never_taken_for_known(folder: Path) -> None:
    named = {"model.config": None, "model.name_or_path": str(folder)}
    assert fingerprint(config_of(**named)) is not None
    assert fingerprint(config_of(**named, **{"model.trust_remote_code": True})) is None
    (folder / "config.json").write_text(json.dumps({**MODEL, "configuration_files": ["config.9.0.json"]}))
    assert fingerprint(config_of(**named)) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"hidden_size"', '"width"'),
        lambda text: text.replace('"micro_batch"', '"batch"'),
        lambda text: text.replace('"peaks"', '"others"'),
        lambda text: text.replace('"state_bytes": ', '"state_bytes": 1'),
        lambda text: text.partition("\n")[2],
    ],
)
def test_a_damaged_file_counts_as_none(
    damage: Any, folder: Path, cache: Path, capsys: pytest.CaptureFixture[str], builds: list[str]
) -> None:
    first = plan(capsys, "--model.name_or_path", str(folder))
    (file,) = cache.iterdir()
    whole = file.read_text()
    file.write_text(damage(whole))
    assert plan(capsys, "--model.name_or_path", str(folder)) == first
    assert len(builds) == 2
    assert file.read_text() == whole


def test_a_cache_that_cannot_be_written_is_done_without(
    cache: Path, capsys: pytest.CaptureFixture[str], builds: list[str]
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("no folder")
    for _ in range(2):
        plan(capsys, "--model.config", json.dumps(TINY_MODEL))
    assert len(builds) == 2


def test_what_is_refused_is_refused_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(capsys, "--model.name_or_path", str(folder))
    for _ in range(2):
        long = ["--data.seq_len", "1000000", "--train.global_batch_size", "2"]
        assert main(["--model.name_or_path", str(folder), *long]) == 2
        assert "data.seq_len: 1000000 tokens exceed" in capsys.readouterr().err


class Scripted:
    """A model that takes as much as it is told, or cannot be run."""

    def __init__(self, inventory: Inventory, failure: str | None = None) -> None:
        self.inventory = inventory
        self.failure = failure
        self.asked = 0

    def activations(self, request: Request) -> Activations:
        self.asked += 1
        return Activations(Peak(request.micro_batch, 0), Peak(1, 2), self.failure)


def test_a_guess_is_made_again_each_time(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan(capsys, "--model.config", json.dumps(TINY_MODEL))
    config = config_of()

    def not_asked_for() -> Scripted:
        raise AssertionError

    inventory = KeptSubject(config, not_asked_for).inventory
    request = Request.of(config, micro_batch=7, compute="cast", on_gpu=True)
    for failure, asked_again in (("ValueError: no", 1), (None, 0)):
        for times in (1, asked_again):
            live = Scripted(inventory, failure)
            subject = KeptSubject(config, lambda live=live: live)  # type: ignore[misc]
            found = subject.activations(request)
            assert (found.before, found.failure, live.asked) == (Peak(7, 0), failure, times)
            subject.keep()


def test_only_so_many_models_are_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "MOST_MODELS", 3)
    live = Scripted(inspected(config_of()))
    for layers in range(1, 6):
        config = config_of(**{"model.config": {**TINY_MODEL, "num_hidden_layers": layers}})
        subject = KeptSubject(config, lambda: live)
        subject.activations(Request.of(config, micro_batch=1, compute="cast", on_gpu=True))
        subject.keep()
        newest = f"{fingerprint(config)}.json"
    names = {file.name for file in cache.iterdir()}
    assert len(names) == 3
    assert newest in names


def inspected(config: RunConfig) -> Inventory:
    from portable.model.build import build_model, model_config
    from portable.planner.subject import inspect

    return inspect(build_model(model_config(config.model), config.model))


# -- the hub -----------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """Answers huggingface_hub's own client as the hub does, which cannot be reached from here."""

    content: ClassVar[bytes]
    asked: ClassVar[list[str]]

    def do_HEAD(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        found = self.path.endswith("/config.json")
        self.send_response(200 if found else 404)
        commit = sha256(self.content).hexdigest()[:40]
        self.send_header("ETag", f'"{commit}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(self.content) if found else 0))
        if not found:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        if self.path.endswith("/config.json"):
            self.wfile.write(self.content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[type[Hub], dict[str, str]]]:
    """A server, and the environment that leads to it."""
    handler = type("Handler", (Hub,), {"asked": [], "content": json.dumps(MODEL).encode()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    leads = {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hub"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    yield handler, leads
    server.shutdown()
    server.server_close()


def test_a_model_of_the_hub_is_looked_at_again_when_it_has_changed_there(
    hub: tuple[type[Hub], dict[str, str]], monkeypatch: pytest.MonkeyPatch, zygote: Zygote
) -> None:
    handler, leads = hub
    for name, value in leads.items():
        monkeypatch.setenv(name, value)
    given = [*LENGTH, "--model.name_or_path", "someone/tiny"]
    look = (
        "import sys; from portable.planner.cli import main; main(sys.argv[1:]); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules], file=sys.stderr)"
    )

    def planned() -> int:
        """Where nothing is known of the model yet."""
        ran = zygote.run("portable-plan", *given)
        assert ran.returncode == 0, ran.stderr
        parameters: int = json.loads(ran.stdout)["parameters"]
        return parameters

    def planned_without_torch() -> int:
        ran = subprocess.run([sys.executable, "-c", look, *given], capture_output=True, text=True, check=True)
        assert ran.stderr.strip().splitlines()[-1] == "[]"
        parameters: int = json.loads(ran.stdout)["parameters"]
        return parameters

    first = planned()
    assert planned_without_torch() == first
    assert handler.asked[-1] == "HEAD /someone/tiny/resolve/main/config.json"
    handler.content = json.dumps({**MODEL, "num_hidden_layers": 5}).encode()
    second = planned()
    assert second > first
    assert planned_without_torch() == second
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # where nobody answers
    assert planned_without_torch() == second
