"""A SLURM of two nodes on this machine, without users, cgroups or authentication."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tests.ranks import free_port

CORES = 8  # claimed by each node, so that a test's tasks fit on any machine


class Slurm:
    """Two ``slurmd`` and a ``slurmctld`` of the distribution's package, in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Start the nodes. Raises AssertionError if they are not idle within two minutes."""
        host = socket.gethostname()
        ports = [free_port() for _ in range(3)]
        (self._folder / "slurm.conf").write_text(
            f"""\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=60
{self._plugins()}
StateSaveLocation={self._folder}/state
SlurmdSpoolDir={self._folder}/spool.%n
SlurmctldPidFile={self._folder}/ctld.pid
SlurmdPidFile={self._folder}/%n.pid
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={CORES}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={CORES}
PartitionName=all Nodes=ALL Default=YES State=UP
"""
        )
        (self._folder / "state").mkdir()
        self._run([_program("slurmctld"), "-D", "-c"])
        step = Path(_program("slurmstepd"))
        for node in ("node1", "node2"):
            self._run([_program("slurmd"), "-D", "-N", node, "-d", str(step)])
        end = time.monotonic() + 120
        while self.command("sinfo", "-h", "-o", "%D %t").stdout.strip() != "2 idle":
            assert time.monotonic() < end, self._log()
            time.sleep(0.2)

    def command(self, name: str, *arguments: str, seconds: float = 180) -> subprocess.CompletedProcess[str]:
        """Run one of SLURM's commands, and wait for it."""
        return subprocess.run(
            [_program(name), *arguments],
            env=self.environment,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def close(self) -> None:
        """Cancel all jobs before the daemons end, because a step without its controller retries forever."""
        self.command("scancel", "--state=RUNNING", "--state=PENDING", "-u", "root")
        end = time.monotonic() + 30
        while self.command("squeue", "-h").stdout and time.monotonic() < end:
            time.sleep(0.2)
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()
            process.wait()

    def _run(self, command: list[str]) -> None:
        log = (self._folder / "log").open("ab")
        self._processes.append(
            subprocess.Popen(command, env=self.environment, stdout=log, stderr=subprocess.STDOUT)
        )

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")

    @staticmethod
    def _plugins() -> str:
        """Return the setting for plugins of a package that was unpacked outside the root folder."""
        beside = Path(_program("slurmd")).parents[1].glob("lib/*/slurm-wlm/auth_none.so")
        return "".join(f"PluginDir={path.parent}" for path in beside)


def missing() -> str | None:
    """Return the reason why no cluster can be started here, or None."""
    if os.geteuid() != 0:
        return "slurmd runs as root"
    for name in ("slurmctld", "slurmd", "slurmstepd", "srun"):
        if not _program(name):
            return f"{name} is not installed (Debian: apt install slurm-wlm)"
    return None


def _program(name: str) -> str:
    """Find a daemon. Debian appends ``-wlm`` to its name, and its folder may not be on the path."""
    path = f"{os.environ.get('PATH', '')}:/usr/sbin"
    return shutil.which(name, path=path) or shutil.which(f"{name}-wlm", path=path) or ""
