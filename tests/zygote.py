"""Commands that start fast: forks of one process that has everything loaded.

The programs in :attr:`Zygote.folder`, which is first on PATH, have the names of the real ones. They pass
their arguments, folder, environment and open files to that process, pass signals to its fork, and end like
the fork. Ranks that a command launches are forks of their launcher, too.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

LOADED = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "portable.commands.dry_run",
    "portable.checkpoint.match_to_model",
    "tensorboard.plugins.hparams.api",
    "torch.utils.tensorboard",
)
"""Imports of commands, in addition to the imports of ranks at their start."""
PROGRAMS = (
    "accelerate",
    "portable-chat",
    "portable-convert",
    "portable-plan",
    "portable-report",
    "portable-train",
    "python",
    "torchrun",
)

MARK = "for-"  # no space: SLURM reads names in /proc as one word
LIBRARY = "TESTS_STANDARD_LIBRARY"
"""Variable with a folder that replaces the standard library, from which runs without a source read
megabytes."""


class Zygote:
    """The process, and the folder of programs.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        import multiprocessing

        self.folder = folder
        address = f"\0{folder}"  # of Linux's own kind, which leaves no file
        for name in PROGRAMS:
            (folder / name).write_text(
                f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" "{folder}" {name} "$@"\n'
            )
            (folder / name).chmod(0o755)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address)
        listener.listen()
        self._process = multiprocessing.get_context("forkserver").Process(target=serve, args=(listener,))
        self._process.start()
        listener.close()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of this process, with the programs first on PATH.

        Torchrun also starts its ranks by them.
        """
        path = os.pathsep.join([str(self.folder), str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**os.environ, "PATH": path, "PYTHON_EXEC": str(self.folder / "python")}

    def start(self, *command: str, **more: str) -> subprocess.Popen[str]:
        """Start one of the programs, with ``more`` in its environment."""
        import subprocess

        return subprocess.Popen(
            command,
            executable=self.folder / command[0],
            env={**self.environment, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *command: str, timeout: float = 300, **more: str) -> subprocess.CompletedProcess[str]:
        """Run one of the programs to its end."""
        import subprocess

        process = self.start(*command, **more)
        out, errors = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(command, process.returncode, out, errors)

    def close(self) -> None:
        """End the process and all its forks."""
        if self._process.pid is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()


def stands_for(pid: int) -> int:
    """Return the fork that runs the program ``pid`` of :attr:`Zygote.folder`, or ``pid`` itself."""
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    return int(name.removeprefix(MARK)) if name.startswith(MARK) else pid


def serve(listener: socket.socket) -> None:
    """Run requested programs, each in a fork."""
    import gc
    import importlib
    import multiprocessing
    from multiprocessing.connection import wait

    import torch

    from portable.ranks import launch

    launch.START_METHOD = "fork"

    def begin() -> None:
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        # torch creates its thread pool again at its first use in a fork, and crashes if two threads use it at
        # once (pthreadpool-cpp.cc, torch 2.9), such as the threads of the first backward pass, one per XLA
        # device.
        torch.set_num_threads(torch.get_num_threads())

    os.register_at_fork(after_in_child=begin)
    os.setsid()
    torch.set_num_threads(1)
    gc.disable()
    for name in LOADED:
        with suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who answers, is not waited for
    parent = multiprocessing.parent_process()
    assert parent is not None
    while True:
        if parent.sentinel in wait([listener, parent.sentinel]):  # killed tests must not leave any process
            os.killpg(0, signal.SIGKILL)
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            answer(connection)
            os._exit(0)
        connection.close()


def answer(connection: socket.socket) -> None:
    """Read one command, run it in a fork, and return its process id and exit code.

    If the program that requested it is killed, the fork is killed, too.
    """
    from multiprocessing.connection import wait

    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    words, folder, environment = json.loads(connection.makefile().readline())
    command = os.fork()
    if command == 0:
        connection.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has replaced it by /dev/null
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        code: object = 1
        try:
            code = execute(words)
        except SystemExit as left:
            code = left.code
        except BaseException:
            sys.excepthook(*sys.exc_info())
        if isinstance(code, str):
            print(code, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
    for file in files:
        os.close(file)
    connection.sendall(command.to_bytes(4, "big"))
    ended = os.pidfd_open(command)
    if ended not in wait([connection, ended]):
        os.kill(command, signal.SIGKILL)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    with suppress(BrokenPipeError):  # who asked was killed at the same time
        connection.sendall(bytes([code if code >= 0 else 128 - code]))


def execute(words: list[str]) -> object:
    """Do the work of the program ``words[0]``.

    ``python`` supports only the options that tests and pages use.
    """
    import importlib
    import runpy
    import sysconfig
    import tempfile
    from importlib.metadata import entry_points

    from huggingface_hub import constants

    # It has read the environment only once, when it was loaded.
    importlib.reload(constants)
    if library := os.environ.get(LIBRARY):
        place = sysconfig.get_path
        sysconfig.get_path = lambda name, *more: library if name == "stdlib" else place(name, *more)
    tempfile.tempdir = None
    sys.argv = words
    if words[0] != "python":
        (program,) = entry_points(group="console_scripts", name=words[0])
        return program.load()()
    arguments = [word for word in words[1:] if word != "-u"]
    sys.path.insert(0, "")
    sys.argv = arguments[1:]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        assert arguments[0] == "-m", arguments
        sys.modules.pop(arguments[1], None)  # runpy would warn that it is there
        if arguments[1] == "ipykernel_launcher":  # whose threads and sockets do not survive a fork
            sys.modules["portable.ranks.launch"].__dict__["START_METHOD"] = "spawn"
        if arguments[1] == "deepspeed.launcher.launch":  # which uses this to start its ranks
            sys.executable = os.environ["PYTHON_EXEC"]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    return 0


def ask(address: str, words: list[str]) -> int:
    """Let the process at ``address`` run ``words``. Returns the exit code."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"."], [0, 1, 2])
        connection.sendall(json.dumps([words, str(Path.cwd()), dict(os.environ)]).encode() + b"\n")
        pid = int.from_bytes(connection.recv(4), "big")
        Path("/proc/self/comm").write_text(f"{MARK}{pid}")  # for who wants to know whose signals it passes on

        def pass_on(number: int, _: object) -> None:
            with suppress(ProcessLookupError):  # which has ended, and is about to be answered for
                os.kill(pid, number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
        return connection.recv(1)[0]


if __name__ == "__main__":
    sys.exit(ask(f"\0{sys.argv[1]}", sys.argv[2:]))
