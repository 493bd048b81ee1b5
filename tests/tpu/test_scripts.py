"""``tpu/scripts``: printed and executed commands, and a real worker. Needs no TPU and no Google Cloud."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import wait_for

SCRIPTS = Path(__file__).resolve().parents[2] / "tpu" / "scripts"
COMMANDS = ["create", "install", "train", "status", "logs", "keep", "stop", "fetch", "convert", "delete"]
VM = ["--name", "llama", "--zone", "us-west4-a"]
POD = ["--name", "pod", "--zone", "us-west4-a", "--project", "mine"]

# Emulates the queued resource and worker 0 by a list of answers, and records its arguments.
FAKE_GCLOUD = """\
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["FAKE_GCLOUD"])
with (folder / "calls.jsonl").open("a") as file:
    file.write(json.dumps(["gcloud", *sys.argv[1:]]) + "\\n")
asks = "describe" in sys.argv or any("worker.sh state" in word for word in sys.argv)
answers = json.loads((folder / "answers.json").read_text()) if asks else []
if asks and not answers:
    sys.exit("the script asked once more than the play goes on")
if asks:
    (folder / "answers.json").write_text(json.dumps(answers[1:]))
    if answers[0] == "NOT_FOUND":
        sys.exit("ERROR: (gcloud) NOT_FOUND: no such resource")
    if answers[0] == "UNREACHABLE":
        sys.exit(255)
    print(answers[0])
"""


def cloud(*words: str | Path, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TMPDIR": "/tmp", **variables}
    if path is not None:
        environment |= {"PATH": f"{path}:{os.environ['PATH']}", "FAKE_GCLOUD": str(path)}
    return subprocess.run(
        ["bash", str(SCRIPTS / "cloud.sh"), *map(str, words)],
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )


def printed(*words: str | Path) -> list[str]:
    """Return the commands that a command prints, without comments."""
    result = cloud(*words, "--print") if "--" not in words else cloud(words[0], "--print", *words[1:])
    assert (result.returncode, result.stderr) == (0, "")
    return [line for line in result.stdout.splitlines() if not line.startswith("#")]


@pytest.fixture
def gcloud(tmp_path: Path) -> Path:
    """Return a folder for PATH whose gcloud only records its arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "fake.py").write_text(FAKE_GCLOUD)
    for program in ("gcloud", "git", "portable-convert"):
        call = f'exec {shlex.quote(sys.executable)} -IS "{folder}/fake.py" "$@"\n'
        (folder / program).write_text("#!/bin/sh\n" + (call if program == "gcloud" else "exit 0\n"))
        (folder / program).chmod(0o755)
    return folder


def calls(folder: Path) -> list[list[str]]:
    path = folder / "calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def play(folder: Path, *answers: str) -> None:
    (folder / "answers.json").write_text(json.dumps(answers))


def test_cloud_scripts_pass_shellcheck() -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed")
    checked = subprocess.run(
        [program, "--external-sources", "--check-sourced", SCRIPTS / "cloud.sh", SCRIPTS / "worker.sh"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (checked.returncode, checked.stdout) == (0, "")


def test_cloud_help_lists_commands() -> None:
    known = cloud("--help").stdout
    for command in COMMANDS:
        result = cloud(command, "--help")
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith(f"usage: cloud.sh {command} [OPTIONS]")
        assert "--print" in result.stdout and f"\n  {command} " in known


def test_cloud_commands_for_single_host(tmp_path: Path) -> None:
    """These commands differ from the commands for the pod below."""
    config = tmp_path / "run.yaml"
    config.touch()
    tpu, zone = "gcloud compute tpus tpu-vm", "--zone=us-west4-a"
    assert printed("create", *VM, "--type", "v5e-8") == [
        f"{tpu} create llama {zone} --accelerator-type=v5litepod-8 --version=v2-alpha-tpuv5-lite"
    ]
    assert printed("train", *VM, "--config", config, "--", "--train.steps", "20") == [
        f"{tpu} scp {config} llama:portable/run.yaml {zone} --worker=all",
        f"{tpu} ssh llama {zone} --worker=all "
        "'--command=bash portable/worker.sh start --config portable/run.yaml --train.steps 20'",
    ]
    assert printed("stop", *VM) == [
        f"{tpu} ssh llama {zone} --worker=all '--command=bash portable/worker.sh stop'"
    ]
    assert printed("fetch", *VM, "--output-dir", "runs/quickstart", "--to", tmp_path / "run") == [
        f"{tpu} scp --recurse llama:runs/quickstart {tmp_path}/run {zone} --worker=0",
    ]
    assert printed("convert", "--from", "run", "--to", "out", "--", "--dtype", "bfloat16") == [
        "portable-convert run out --dtype bfloat16"
    ]
    assert printed("delete", *VM) == [f"{tpu} delete llama {zone} --quiet"]


def test_cloud_commands_for_spot_pod(tmp_path: Path) -> None:
    wheel, setup = tmp_path / "portable_trainer-0.1.0-py3-none-any.whl", tmp_path / "mount.sh"
    wheel.touch()
    setup.touch()
    queue = "gcloud compute tpus queued-resources"
    where = "--zone=us-west4-a --project=mine"
    ssh = f"gcloud compute tpus tpu-vm ssh pod {where}"
    scp = "gcloud compute tpus tpu-vm scp"
    request = (
        f"{queue} create pod {where} --node-id=pod --accelerator-type=v5litepod-16 "
        "--runtime-version=v2-alpha-tpuv5-lite --spot --network=fast"
    )
    describe = f"{queue} describe pod {where} '--format=value(state.state)' --verbosity=error"
    delete = f"{queue} delete pod {where} --force --quiet"
    install = [
        f"{ssh} --worker=all '--command=mkdir -p portable'",
        f"{scp} {setup} pod:portable/setup.sh {where} --worker=all",
        f"{scp} {SCRIPTS}/worker.sh {wheel} pod:portable/ {where} --worker=all",
        f"{ssh} --worker=all '--command=bash portable/setup.sh && bash portable/worker.sh install "
        f"'\\''portable/{wheel.name}[tpu]'\\'''",
    ]
    train = [f"{ssh} --worker=all '--command=bash portable/worker.sh start --output_dir /mnt/runs/a'"]
    made = ["--type", "v5litepod-16", "--spot", "--create-flag", "--network=fast"]
    installed = ["--package", str(wheel), "--setup", str(setup)]

    assert printed("create", *POD, *made) == [request, describe]
    assert printed("install", *POD, *installed) == install
    assert printed("train", *POD, "--output-dir", "/mnt/runs/a") == train
    in_a_bucket = [line.replace("/mnt/runs/a", "gs://bucket/a") for line in train]
    assert printed("train", *POD, "--output-dir", "gs://bucket/a") == in_a_bucket
    kept = printed("keep", *POD, *made, *installed, "--output-dir", "gs://bucket/a")
    assert kept[-1:] == in_a_bucket
    assert printed("status", *POD, "--spot") == [
        describe,
        f"{ssh} --worker=all '--command=bash portable/worker.sh status'",
    ]
    assert printed("logs", *POD, "--worker", "3")[0].startswith(f"{ssh} --worker=3 ")
    assert printed("delete", *POD, "--spot") == [delete]
    assert printed("keep", *POD, *made, *installed, "--output-dir", "/mnt/runs/a") == [
        describe,
        request,
        f"{ssh} --worker=0 '--command=if [ -f portable/worker.sh ]; then bash portable/worker.sh state; "
        "else echo not-installed; fi'",
        f"gcloud compute tpus tpu-vm describe pod {where} '--format=value(state)' --verbosity=error",
        delete,
        request,
        *install,
        *train,
    ]


def test_cloud_installs_last_commit_of_clone() -> None:
    lines = printed("install", *VM)
    folder = "/tmp/portable-trainer.XXXXXX"  # mktemp creates it for only this user
    assert lines[0] == f"mktemp -d {folder}"
    assert lines[1] == (
        f"git -C {SCRIPTS.parents[1]} archive --format=tar.gz --prefix=portable-trainer/ "
        f"--output={folder}/portable-trainer.tar.gz HEAD"
    )
    assert f"{folder}/portable-trainer.tar.gz" in lines[3].split()
    assert lines[4] == f"rm -r {folder}"
    assert "'portable/portable-trainer.tar.gz[tpu]'" in shlex.split(lines[5])[-1]
    assert "portable-trainer.tar.gz[torchtpu]'" in printed("install", *VM, "--backend", "tpu")[5]


def test_cloud_archive_is_created_in_private_folder(gcloud: Path, tmp_path: Path) -> None:
    """A file that another user has created at the expected path is neither written nor sent."""
    trap = tmp_path / "portable-trainer.tar.gz"
    trap.write_text("a stranger's")
    result = cloud("install", *VM, path=gcloud, TMPDIR=str(tmp_path))
    assert (result.returncode, result.stderr) == (0, "")
    sent = next(word for call in calls(gcloud) for word in call if word.endswith("portable-trainer.tar.gz"))
    assert Path(sent).parent.parent == tmp_path and Path(sent) != trap
    assert trap.read_text() == "a stranger's" and [*tmp_path.glob("portable-trainer.*")] == [trap]


def test_cloud_runs_printed_commands(gcloud: Path, tmp_path: Path) -> None:
    """The words reach gcloud unchanged, through any number of shells."""
    awkward = ["--data.source", 'it\'s a "$HOME" & more; `ls`', "--model.config", '{"model_type": "llama"}']
    for words in (
        ["create", *VM, "--type", "v6e-4"],
        ["install", *VM, "--package", "portable-trainer[tpu]"],
        ["train", *VM, "--", *awkward],
        ["stop", *VM],
        ["logs", *VM],
        ["fetch", *VM, "--output-dir", "runs/my run", "--to", str(tmp_path / "run")],
        ["delete", *VM, "--yes"],
    ):
        before = len(calls(gcloud))
        shown = cloud(words[0], "--print", *words[1:], path=gcloud)
        assert len(calls(gcloud)) == before
        result = cloud(*words, path=gcloud)
        assert (result.returncode, result.stderr) == (0, "")
        assert calls(gcloud)[before:] == [shlex.split(line) for line in shown.stdout.splitlines()]
    remote = next(call[-1] for call in calls(gcloud) if "worker.sh start" in call[-1])
    assert shlex.split(remote.removeprefix("--command="))[3:] == awkward


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["fly"], "fly: no such command; use one of: create install"),
        (["create", "--zone", "us-west4-a"], "--name: missing"),
        (["create", "--name", "Llama 2", "--zone", "us-west4-a"], "--name: Llama 2 must be lower-case"),
        (["create", "--name", "llama", "--zone", "here"], "--zone: here is no zone; write it like"),
        (["create", *VM], "--type: missing; for example v5e-8"),
        (["create", *VM, "--type", "a100-8"], "--type: a100-8 is unknown; write a generation of v2"),
        (["create", *VM, "--type", "tpu7x-8"], "--type: tpu7x is not offered by the Cloud TPU API; create"),
        (["create", *VM, "--type", "--spot"], "--type: needs a value after it"),
        (["create", *VM, "--type", "v5e-8", "--spot=yes"], "--spot: takes no value; leave out =yes"),
        (["create", *VM, "--type", "v5e-8", "--poll", "often"], "--poll: often is no number of seconds"),
        (["train", *VM, "--train.steps", "20"], "--train.steps: not an option of train; see: cloud.sh train"),
        (["train", *VM, "run.yaml"], "run.yaml: not an option; arguments for another program come after --"),
        (["train", *VM, "--config", "no.yaml"], "--config: there is no no.yaml"),
        (["fetch", *VM, "--output-dir", "gs://b/run", "--to", "x"], "--output-dir: gs://b/run is a URL"),
        (["logs", *VM, "--worker", "all"], "--worker: all is no worker; give one number, from 0"),
        (["keep", *VM, "--type", "v5e-8"], "--output-dir: keep needs what outlives the TPU: a URL"),
        (["fetch", *VM, "--output-dir", "runs/a", "--to", "/tmp"], "--to: /tmp exists; name a new folder"),
        (["delete", *VM], "--yes: needed where nobody can be asked"),
    ],
)
def test_cloud_rejects_bad_input(words: list[str], error: str, gcloud: Path) -> None:
    result = cloud(*words, path=gcloud)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: {error}")
    assert result.stderr.count("\n") == 1
    assert calls(gcloud) == []


def verbs(folder: Path) -> list[str]:
    """Return the calls in brief: the action on the queued resource or on its workers."""
    short = []
    for call in calls(folder):
        words = " ".join(call)
        for verb in ("describe", "worker.sh state", "worker.sh install", "worker.sh start", "mkdir", " scp "):
            if verb in words:
                short.append(verb.split()[-1])
                break
        else:
            short.append(call[4])
    return [verb for verb in short if verb not in ("mkdir", "scp")]


KEEP = ["keep", *POD, "--type", "v5e-16", "--spot", "--output-dir", "/mnt/runs/a", "--poll", "0"]
KEEP += ["--package", "portable-trainer[tpu]"]


def test_cloud_keep_survives_preemption(gcloud: Path) -> None:
    play(
        gcloud,
        *("NOT_FOUND", "WAITING_FOR_RESOURCES"),
        *("ACTIVE", "not-installed", "ACTIVE", "running"),
        *("ACTIVE", "ended-75", "SUSPENDING", "SUSPENDED", "PROVISIONING"),
        *("ACTIVE", "UNREACHABLE", "READY", "ACTIVE", "not-installed"),
        *("ACTIVE", "UNREACHABLE", "PREEMPTED", "ACTIVE", "not-installed"),
        *("ACTIVE", "lost", "ACTIVE", "running", "ACTIVE", "ended-0"),
    )
    result = cloud(*KEEP, path=gcloud)
    assert result.returncode == 0, result.stderr
    assert "the run is done; pod is still there, and paid for, until you delete it" in result.stderr
    assert verbs(gcloud) == [
        *("describe", "create", "describe"),
        *("describe", "state", "install", "start", "describe", "state"),
        *("describe", "state", "describe", "describe", "delete", "create", "describe"),
        *("describe", "state", "describe", "describe", "state", "install", "start"),
        *("describe", "state", "describe", "delete", "create", "describe", "state", "install", "start"),
        *("describe", "state", "install", "start", "describe", "state", "describe", "state"),
    ]


@pytest.mark.parametrize("code", [2, 75])
def test_cloud_keep_ends_with_run(gcloud: Path, code: int) -> None:
    play(gcloud, "ACTIVE", "running", *("ACTIVE", f"ended-{code}") * 2)
    result = cloud(*KEEP, path=gcloud)
    assert result.returncode == code
    assert result.stderr.splitlines()[-1] == f"error: pod: the run has ended with {code}; see cloud.sh logs"


def test_cloud_keep_limits_attempts(gcloud: Path) -> None:
    play(gcloud, *("ACTIVE", "UNREACHABLE", "READY") * 10)
    result = cloud(*KEEP, path=gcloud)
    assert result.returncode == 1
    assert "error: pod: 10 attempts in a row have failed; the last state was READY" in result.stderr


def test_cloud_create_waits_until_active(gcloud: Path) -> None:
    create = ["create", *POD, "--type", "v5e-16", "--spot", "--poll", "0"]
    play(gcloud, "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE")
    assert cloud(*create, path=gcloud).returncode == 0
    play(gcloud, "WAITING_FOR_RESOURCES", "FAILED")
    result = cloud(*create, path=gcloud)
    assert result.returncode == 1
    assert result.stderr.endswith("error: --name: pod is FAILED; delete it and create it again\n")


def test_cloud_accepts_commands_of_docs(tmp_path: Path) -> None:
    page = (SCRIPTS.parents[1] / "docs" / "tpu.md").read_text()
    lines = re.findall(r"^\$cloud .*$", page, re.MULTILINE)
    assert {line.split()[1] for line in lines} == {*COMMANDS} - {"stop"}
    (tmp_path / "run.yaml").touch()
    (tmp_path / "mount.sh").touch()
    shown = [re.sub(r"^(\$cloud [a-z]+)", r"\1 --print", line) for line in lines]
    script = [f"cloud={shlex.quote(f'bash {SCRIPTS}/cloud.sh')}", f"at={shlex.quote(' '.join(VM))}", *shown]
    result = subprocess.run(
        ["bash", "-ec", "\n".join(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


class Worker:
    """The worker's side in real processes, with a fake portable-train."""

    def __init__(self, home: Path) -> None:
        self.home = home
        home.mkdir()

    def install(self, trainer: str, name: str = "portable-train") -> None:
        program = self.home / "venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text("#!/bin/bash\n" + trainer)
        program.chmod(0o755)

    def __call__(self, *words: str, **variables: str) -> str:
        environment = {**os.environ, "PORTABLE_HOME": str(self.home), **variables}
        environment.pop("PJRT_DEVICE", None)
        # Output to a file, because the run that `start` leaves behind would keep a pipe open.
        with (self.home / "answer").open("w+") as answer:
            subprocess.run(
                ["bash", str(SCRIPTS / "worker.sh"), *words], env=environment, stdout=answer, check=True
            )
            answer.seek(0)
            return answer.read().strip()

    def wait_for(self, state: str) -> None:
        wait_for(lambda: self("state") == state)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path / "portable")


def test_worker_starts_once_stops_and_restarts(worker: Worker) -> None:
    assert worker("state") == "not-installed"
    worker.install('trap "exit 75" TERM\necho "on $PJRT_DEVICE: $*"\nwhile :; do sleep 0.05; done\n')
    assert worker("state") == "not-started"
    assert worker("start", "--data.source", "two words").startswith("started")
    assert worker("start") == "already running"
    log = worker.home / "run.log"
    wait_for(lambda: "on TPU" in log.read_text())
    assert worker("status") == "running\non TPU: --backend xla --data.source two words"
    assert worker("stop") == "ended-75"
    assert worker("stop") == "ended-75"
    assert worker("start").startswith("started")
    worker("stop")
    assert log.read_text().count("===") == 2


@pytest.mark.parametrize(
    ("hosts", "told"),
    [
        ("localhost", "portable-train --backend tpu --seed 1"),
        (
            "a,b",
            "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr a --master-port 29500 "
            "-m portable.cli --backend tpu --seed 1 at a:8070",
        ),
    ],
)
def test_worker_starts_torchtpu_on_one_or_several_hosts(hosts: str, told: str, worker: Worker) -> None:
    """The output of ``python -m torch.tpu.distributed`` on one of two hosts is fake."""
    for name in ("portable-train", "torchrun"):
        worker.install(f'echo "{name} $*${{TORCH_TPU_SLICEBUILDER_ADDRESSES:+ at a:8070}}"\n', name)
    says = 'WORLD_SIZE=8 NNODES=2 NODE_RANK="1" MASTER_ADDR=a MASTER_PORT=29500'
    worker.install(f"echo '{says} TORCH_TPU_SLICEBUILDER_ADDRESSES=\"a:8070\"'\n", "python")
    (worker.home / "backend").write_text("tpu\n")
    worker("start", "--seed", "1", TPU_WORKER_HOSTNAMES=hosts)
    worker.wait_for("ended-0")
    assert worker("status").splitlines()[-1] == told


def test_worker_keeps_exit_code_until_restart_of_machine(worker: Worker) -> None:
    """The process id of the run may be reused by another process, here by this one."""
    worker.install("exit 2\n")
    worker("start")
    worker.wait_for("ended-2")
    (worker.home / "run.exit").unlink(missing_ok=True)
    (worker.home / "run.pid").write_text(str(os.getpid()))
    assert worker("state") == "lost"
