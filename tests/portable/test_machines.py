"""`portable-train init --for`: its files pass the checks of their programs, and their commands run."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from portable.cli import main
from portable.command_line import parse_train_args
from portable.config import dump_yaml
from tests.object_store import ObjectStore
from tests.ranks import wait_for
from tests.runs import configured
from tests.zygote import Zygote, stands_for

SCHEMAS = Path(__file__).with_name("schemas")
SUFFIX = {"slurm": "sbatch", "hf-jobs": "sh", "cloud-tpu": "sh"}
FILES: list[tuple[str, list[str]]] = [
    ("sky", ["h100:8"]),
    ("sky", ["4090:4", "v5e:8", "h200:1", "v4:4"]),
    ("dstack", ["a100-40:8", "h100:8"]),
    ("jobset", ["h100:16"]),
    ("jobset", ["v5e:16"]),
    ("trainjob", ["h100:16"]),
    ("trainjob", ["v6e:8"]),
    ("hf-jobs", ["h200:8"]),
    ("slurm", ["h100:16"]),
    ("cloud-tpu", ["v5p:16"]),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, which has a config."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("output_dir: s3://bucket/run\ndata: {source: org/data}\n")
    return tmp_path


def written(target: str, *words: str) -> Path:
    """Return the file that the command writes in the current folder."""
    assert main(["init", "--for", target, *words]) == 0
    return Path(f"run.{target}.{SUFFIX.get(target, 'yaml')}")


def scripts(target: str, file: Path) -> list[str]:
    """Return the bash scripts that the program runs, on the machine or here."""
    if file.suffix != ".yaml":
        return [file.read_text()]
    made: Any = yaml.safe_load(file.read_text())
    if target == "sky":
        return [made["setup"], made["run"]]
    if target == "dstack":
        return list(made["commands"])
    if target == "trainjob":
        return list(made["spec"]["trainer"]["args"])
    (jobs,) = made["spec"]["replicatedJobs"]
    (container,) = jobs["template"]["spec"]["template"]["spec"]["containers"]
    return list(container["args"])


@pytest.mark.parametrize(("target", "devices"), FILES)
def test_init_for_program_writes_valid_file(target: str, devices: list[str], folder: Path) -> None:
    file = written(target, *(word for device in devices for word in ("--device", device)))
    text = file.read_text()
    assert max(map(len, text.splitlines())) < 125
    for script in scripts(target, file):
        assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
        for line in script.splitlines():
            if " --config " in line and "run.yaml" in line and "cloud.sh" not in line and "init" not in line:
                words = shlex.split(line.replace("~/", "").replace("'", ""))
                parse_train_args([w for w in words[words.index("--config") :] if w != "$@"])
    if file.suffix == ".yaml":
        schema = json.loads((SCHEMAS / f"{target}.json").read_text())
        jsonschema.validate(yaml.safe_load(text), schema)
        broken = yaml.safe_load(text) | {"replicas": 2}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)
    if target in ("jobset", "trainjob"):
        assert (folder / "run.yaml").read_text() in _values_of(yaml.safe_load(text))


@pytest.mark.parametrize("target", ["jobset", "trainjob"])
def test_init_for_kubernetes_keeps_config_text(target: str, folder: Path) -> None:
    text = "  # of mine\noutput_dir: s3://bucket/run\nlog: {name: a$$b $(HF_TOKEN)}\n"
    (folder / "run.yaml").write_text(text)
    values = _values_of(yaml.safe_load(written(target, "--device", "h100:8").read_text()))
    filled_in = [re.sub(r"\$\$|\$\(\w+\)", lambda at: "$" * (at[0] == "$$"), str(value)) for value in values]
    assert text in filled_in


def _values_of(made: Any) -> list[Any]:
    inside = made.values() if isinstance(made, dict) else made if isinstance(made, list) else ()
    return [made, *(value for part in inside for value in _values_of(part))]


REFUSED = [
    ("sky", [], "specify the machine, for example --device h100:8"),
    ("sky", ["--device", "h101:8"], "--device: h101:8: unknown device 'h101'; did you mean h100?"),
    ("sky", ["--device", "h100:12"], "a machine has 8"),
    ("sky", ["--device", "mi300x:8"], "mi300x is an AMD GPU, but by default pip installs PyTorch for NVIDIA"),
    ("sky", ["--device", "v5e:16"], "use --for cloud-tpu"),
    ("hf-jobs", ["--device", "h100:8"], "has no such machine"),
    ("sky", ["--device", "h100:8", "--output_dir", "runs/mine"], "output_dir: runs/mine would be lost"),
    ("hf-jobs", ["--device", "h200:8", "--output_dir", "s3://a b"], "' ', which is not safe in"),
]


def test_init_for_program_rejects_errors_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target, words, expected in REFUSED:
        assert main(["init", "--for", target, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and expected in line
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]


def test_preempted_run_resumes_under_another_program(
    s3: ObjectStore, corpus: Path, folder: Path, zygote: Zygote
) -> None:
    """The run in one bucket is killed under SkyPilot, stopped under JobSet and finished under dstack."""
    settings: dict[str, Any] = {
        "backend": "auto",
        "train__steps": 400,
        "checkpoint__every_steps": 3,
        "log__sample_tokens": 0,
        "data__cache_dir": str(folder / "cache"),
    }
    config = configured(s3.url("run"), corpus, **settings)
    (folder / "run.yaml").write_text(dump_yaml(config))
    (folder / "trainer").mkdir()
    (folder / "trainer" / "bin").symlink_to(zygote.folder)  # where setup installs
    pip = folder / "bin" / "pip"
    pip.parent.mkdir()
    pip.write_text("#!/bin/sh\n")
    pip.chmod(0o755)
    environment = {**zygote.environment, **s3.environment, "HOME": str(folder)}
    environment["PATH"] = f"{pip.parent}:{environment['PATH']}"

    def started(target: str) -> subprocess.Popen[bytes]:
        script = scripts(target, written(target, "--device", "h100:1"))[-1]
        machine = folder / target
        machine.mkdir()
        text = (folder / "run.yaml").read_text()
        if target == "dstack":  # "files"
            (machine / "run.yaml").write_text(text)
        with (machine / "log").open("wb") as log:
            return subprocess.Popen(
                ["bash", "-ec", script],
                cwd=machine,
                env=environment | {"RUN_YAML": text},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def saved() -> int:
        names = s3.names("run/checkpoints/")
        return max((int(n[5:11]) for n in names if n.endswith("_COMPLETE")), default=0)

    def started_and_saving(target: str, beyond: int) -> subprocess.Popen[bytes]:
        process = started(target)
        wait_for(lambda: saved() > beyond or process.poll() is not None)
        assert process.poll() is None, process.returncode
        return process

    first = started_and_saving("sky", 0)
    rank = stands_for(first.pid)
    os.kill(rank, signal.SIGKILL)  # no notice
    first.wait()
    wait_for(lambda: not Path(f"/proc/{rank}").exists())  # the next one would wait a minute for its lease
    after_kill = saved()
    second = started_and_saving("jobset", after_kill)
    second.send_signal(signal.SIGTERM)
    assert second.wait(120) == 75, (folder / "jobset" / "log").read_text()
    after_term = saved()
    assert after_term > after_kill
    text = dump_yaml(configured(s3.url("run"), corpus, **settings, train__stop_after=after_term + 2))
    (folder / "run.yaml").write_text(text)
    assert started("dstack").wait(120) == 0, (folder / "dstack" / "log").read_text()
    rows = [json.loads(line) for line in s3.get("run/metrics.jsonl").splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, after_term + 3))
