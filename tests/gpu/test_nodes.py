"""Several nodes: two torchrun agents, and two nodes of a real SLURM, all on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from portable.cli import main
from portable.config import dump_yaml
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests import slurm
from tests.ranks import free_port, wait_for
from tests.runs import configured, flags, tiny
from tests.slurm import Slurm
from tests.zygote import Zygote

HYBRID: dict[str, Any] = {
    "strategy": "hybrid_shard",
    "train__global_batch_size": 8,
    "train__micro_batch_size": 1,
    "train__steps": 3,
    "log__sample_tokens": 0,
}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[float]:
    """Return the losses of one rank."""
    folder = tmp_path_factory.mktemp("truth")
    assert run_rank("cpu", configured(folder, corpus, **{**HYBRID, "strategy": "no_shard"})) == 0
    return losses(folder)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


def check_meshes(folder: Path) -> None:
    """Check that each node has a copy of the state, and that gradients are summed between the nodes."""
    meshes = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]
    assert [mesh["node"] for mesh in meshes] == [0, 0, 1, 1]
    for mesh in meshes:
        # Each mesh of a process has a number after the name of its axis.
        assert [name.rstrip("0123456789") for name in mesh["names"]] == ["replicate", "shard"]
        assert mesh["ranks"] == [[0, 1], [2, 3]]


def test_torchrun_trains_on_two_nodes(
    tmp_path: Path, corpus: Path, truth: list[float], zygote: Zygote
) -> None:
    settings = flags(tiny(tmp_path / "run", corpus, **HYBRID))
    port = str(free_port())
    agents = []
    for node in ("0", "1"):
        command = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", node]
        command += ["--master-addr", "127.0.0.1", "--master-port", port]
        command += ["-m", "tests.gpu.mesh_of_rank", str(tmp_path), *settings]
        agents.append(zygote.start(*command))
    for agent in agents:
        _, errors = agent.communicate(timeout=300)
        assert agent.returncode == 0, errors
    check_meshes(tmp_path)
    assert losses(tmp_path / "run") == pytest.approx(truth, rel=1e-5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Iterator[Slurm]:
    """Start a SLURM cluster whose tasks are forks of the zygote: its real processes pass signals to them."""
    if (reason := slurm.missing()) is not None:
        pytest.skip(reason)
    nodes = slurm.Slurm(tmp_path_factory.mktemp("slurm"))
    # This machine cannot resolve the names of the nodes, unlike a real cluster.
    nodes.environment |= {"MASTER_ADDR": "127.0.0.1", "PATH": zygote.environment["PATH"]}
    try:
        nodes.start()
        yield nodes
    finally:
        nodes.close()


@pytest.mark.slow
def test_srun_trains_on_two_nodes(tmp_path: Path, corpus: Path, truth: list[float], cluster: Slurm) -> None:
    settings = flags(tiny(tmp_path / "run", corpus, **HYBRID))
    layout = ("--nodes", "2", "--ntasks-per-node", "2", "--chdir", str(Path.cwd()))
    command = ("python", "-m", "tests.gpu.mesh_of_rank", str(tmp_path), *settings)
    done = cluster.command("srun", *layout, *command)
    assert done.returncode == 0, done.stderr
    check_meshes(tmp_path)
    assert losses(tmp_path / "run") == pytest.approx(truth, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True], ids=["signal", "killed rank"])
def test_slurm_template_saves_checkpoint_and_requeues_job(
    killed: bool, tmp_path: Path, corpus: Path, cluster: Slurm
) -> None:
    settings = {**HYBRID, "backend": "auto", "train__steps": 4000, "checkpoint__every_steps": 2}
    if killed:
        settings["train__callbacks"] = ["tests.ranks:KilledOnce"]
    config = configured(tmp_path / "run", corpus, **settings)
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    assert main(["init", str(tmp_path / "run.yaml"), "--for", "slurm", "--device", "h100:16"]) == 0
    output = tmp_path / "job.out"
    template = tmp_path / "run.slurm.sbatch"
    # Two tasks per node, on nodes without GPUs.
    sizes = ("--ntasks-per-node", "2", "--gpus-per-node", "0", "--cpus-per-task", "1")
    note = tmp_path / "note"
    submitted = cluster.command(
        *("sbatch", "--parsable", *sizes, "--output", str(output), "--chdir", str(tmp_path)),
        *("--export", f"ALL,KILLED_ONCE={note},PYTHONPATH={Path.cwd()}", str(template)),
    )
    assert submitted.returncode == 0, submitted.stderr
    job = submitted.stdout.strip()
    metrics = tmp_path / "run" / "metrics.jsonl"
    if killed:
        wait_for(lambda: output.exists() and "queued again" in output.read_text(errors="replace"))
        assert "error: rank 1 on " in output.read_text(errors="replace")
        assert "failed with code 137; newest checkpoint: " in output.read_text(errors="replace")
        assert cluster.command("scancel", job).returncode == 0
        return
    wait_for(lambda: metrics.exists() and len(losses(tmp_path / "run")) >= 3)
    # Like --signal=TERM@300 five minutes before the end: the steps get a signal, the script does not.
    assert cluster.command("scancel", "--signal", "TERM", job).returncode == 0
    wait_for(lambda: "queued again" in output.read_text(errors="replace"))
    stopped = len(losses(tmp_path / "run"))
    assert (tmp_path / "run" / "checkpoints" / f"step-{stopped:06d}").exists()
    # The controller restarts the job shortly after the script's request.
    wait_for(lambda: "Requeue=1 Restarts=1" in cluster.command("scontrol", "show", "job", job).stdout)
    assert cluster.command("scancel", job).returncode == 0
