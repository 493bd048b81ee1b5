"""Run an action in a fork and observe which files it opens, its output and its time.

Three observers together see every read: an audit hook in the fork (each open of Python, with its path),
inotify on the secret files (each open by any library or subprocess), and a search for the marker of the
secret files in everything that the action prints and writes.
"""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import stat
import sys
import sysconfig
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.inotify import OPENED, READ, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MARKER = "SECRETMARKER"
ENVIRONMENT = "FUZZ_SECRET"
"""Environment variable whose value has the marker."""
LONGEST = 10.0
"""Seconds of processor time, and of waiting, after which an action counts as hanging."""
MORE_MEMORY = 3 << 30
"""Bytes of address space that an action may add."""
CODE_RAN = "code-ran"
"""File that the Python code of a hostile folder makes in the scratch folder."""
_REPOSITORY = Path(__file__).parents[2]
_ALLOWED = re.compile(
    r"/proc/(\d+/)?(task/\d+/)?(stat|statm|status|maps|smaps\w*|mounts|mountinfo|cgroup|limits|fd|self|task|meminfo"
    r"|cpuinfo|filesystems|version|sys/.*|net/.*|loadavg|uptime)?(/.*)?"
    r"|/sys/.*|/dev/(null|urandom|random|shm.*|tty|pts/.*)|/etc/(mime\.types|locale\.alias|localtime|os-release|ld\.so.*|nsswitch.*"
    r"|timezone|apache2/.*|httpd/.*|ssl/.*|machine-id|debian_version|lsb-release|host\.conf|resolv\.conf|hosts)"
    r"|(?!/(proc|sys|dev|etc|home|root|tmp)/).*/(mime\.types|\.so\S*)|/usr/.*|/lib/.*|/lib64/.*"
)
"""Files of the system that libraries open by themselves."""
_OPENS = frozenset({"open", "os.listdir", "os.scandir"})
_STARTS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"})
_OWN_PROCESSES = re.compile(
    "resource_tracker|forkserver|multiprocessing|portable|lscpu|uname|ldconfig|gcc|/sbin/"
)
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e]")


class Observer:
    """The observers of one scratch folder.

    Args:
        scratch: Folder with the secret files and the cases.
        secrets: Files and folders that no action may open.
        inside: Folders that an action may read.
        writable: Folders that an action may write.
    """

    def __init__(
        self, scratch: Path, *, secrets: Sequence[Path], inside: Sequence[Path], writable: Sequence[Path]
    ) -> None:
        self.scratch = scratch
        self._secrets = [os.path.realpath(path) for path in secrets]
        libraries: list[str | Path] = [sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), _REPOSITORY]
        self._inside = [os.path.realpath(path) for path in (*libraries, *inside, *writable)]
        self._writable = [os.path.realpath(path) for path in writable]
        self._watch = Watch(OPENED | READ)
        for path in secrets:
            for inner in (path, *(path.rglob("*") if path.is_dir() else ())):
                self._watch.add(inner)
        self._output = scratch / "printed"
        self._opened = scratch / "opened"

    def close(self) -> None:
        """Stop watching."""
        self._watch.__exit__()

    def run(self, action: Callable[[], int]) -> tuple[int | str, list[str], str]:
        """Run an action in a fork.

        Returns:
            The exit code or the kind of hang; the promises that were broken; the output.
        """
        for path in (self._output, self._opened):
            path.write_bytes(b"")
        ran = self.scratch / CODE_RAN
        ran.unlink(missing_ok=True)
        for _ in self._watch.drain():
            pass
        pid = os.fork()
        if pid == 0:
            self._act(action)
        code = _wait(pid)
        printed = self._output.read_bytes().decode("utf-8", "replace")
        broken = self._opened.read_text("utf-8", "replace").splitlines()
        if code not in (0, 2, 65) and not (code == 1 and "\nproblem: " in printed):  # which `inspect` found
            broken.append(f"exit code {code}")
        if "Traceback (most recent call last)" in printed:
            broken.append("a traceback")
        if code in (2, 65) and not re.search("^error: ", printed, re.M):
            broken.append("no error line")
        if control := _CONTROLS.search(printed):
            broken.append(f"control character {control[0]!r}")
        if ran.exists():
            broken.append("code ran")
        broken += sorted({f"opened {path} (inotify)" for _, path in self._watch.drain()})
        if MARKER in printed:
            broken.append("printed a secret")
        broken += [f"wrote a secret to {path}" for path in _files_with_marker(self._writable)]
        return code, broken, printed

    def _act(self, action: Callable[[], int]) -> None:
        code: Any = 1
        try:
            file = os.open(self._output, os.O_WRONLY | os.O_APPEND)
            null = os.open(os.devnull, os.O_RDONLY)
            for number, source in ((0, null), (1, file), (2, file)):
                os.dup2(source, number)
            # Pytest may have replaced both by objects that write to no descriptor.
            sys.stdout, sys.stderr = (
                os.fdopen(n, "w", closefd=False, errors="backslashreplace") for n in (1, 2)
            )
            tempfile.tempdir = None
            for number in (signal.SIGTERM, signal.SIGALRM):
                signal.signal(number, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            used = time.process_time()
            limit = int(used + LONGEST) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            size = pages * resource.getpagesize() + MORE_MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
            self._audit()
            code = action()
        except SystemExit as error:
            code = error.code
        except BaseException:
            traceback.print_exc()
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))

    def _audit(self) -> None:
        report = os.open(self._opened, os.O_WRONLY | os.O_APPEND)
        reported: set[str] = set()

        def tell(line: str) -> None:
            if line not in reported:
                reported.add(line)
                os.write(report, (line.encode("unicode_escape") + b"\n"))

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if event in _OPENS:
                path = arguments[0]
                if path is None or isinstance(path, int):
                    return
                name = os.fsdecode(path)
                if "\0" in name:
                    return
                real = os.path.realpath(name)
                writes = event == "open" and _writes(arguments[1], arguments[2])
                if self.leaves(real, writes=writes):
                    tell(f"{'wrote' if writes else event} {name} -> {real}")
            elif event in _STARTS:
                words = str(arguments[:2])
                if not _OWN_PROCESSES.search(words):
                    tell(f"{event} {words[:300]}")
            elif event == "socket.connect" and isinstance(arguments[1], tuple):
                tell(f"{event} {arguments[1]}")

        sys.addaudithook(hook)

    def leaves(self, real: str, *, writes: bool) -> bool:
        """Return whether no action may open a real path."""
        if any(_below(real, secret) for secret in self._secrets):
            return True
        if any(_below(real, folder) for folder in (self._writable if writes else self._inside)):
            return False
        if writes:
            return real not in ("/dev/null", "/dev/tty") and not real.startswith(
                ("/dev/shm/", "/proc/self/", f"/proc/{os.getpid()}/")
            )
        return not _ALLOWED.fullmatch(real) and real != "/"


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str) and any(letter in mode for letter in "wax+"):
        return True
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _wait(pid: int) -> int | str:
    """Wait until a fork has ended.

    Returns:
        Its exit code, or the reason why it was killed.
    """
    waited, before = 0.0, time.monotonic()
    ended = os.pidfd_open(pid)
    reason = ""
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        while not poll.poll(500):
            now = time.monotonic()
            with suppress(OSError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                # Not while it waits for a processor or a disk, nor while this process itself was stopped.
                waited = waited + min(now - before, 1.0) if state == "S" else 0.0
                if waited > LONGEST:
                    reason = f"blocked for {waited:.0f} s"
                    os.kill(pid, signal.SIGKILL)
            before = now
    finally:
        os.close(ended)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if reason:
        return reason
    return f"used {LONGEST:.0f} s of CPU" if code == -signal.SIGXCPU else code


def _files_with_marker(folders: Sequence[str]) -> Iterator[str]:
    for folder in folders:
        for here, _, names in os.walk(folder):
            for name in names:
                path = os.path.join(here, name)  # noqa: PTH118
                with suppress(OSError):
                    if stat.S_ISREG(os.lstat(path).st_mode) and MARKER.encode() in Path(path).read_bytes():
                        yield path
