"""The wheels that a GPU machine without a network needs, in one small folder.

``python -m benchmarks.visit_wheels .wheels`` fills the folder and prints what each wheel weighs. The machine
is expected to have torch, transformers, accelerate and what these need; there, install the rest with::

    python3 -m pip install --no-index --no-deps --no-compile --target SITE .wheels/*.whl
    python3 -m compileall -q -j 0 SITE
    export PYTHONPATH=SITE PATH=SITE/bin:$PATH

Versions are those of ``constraints.txt``. bitsandbytes has a library for each version of CUDA, of which one
is kept; DeepSpeed is built here, without its C++ ops.
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[1]
SETS: dict[str, tuple[str, ...]] = {
    "a run": (
        "isal",
        "ml-dtypes",
        "peft",
        "shtab",
        "pydantic",
        "pydantic-core",
        "annotated-types",
        "typing-inspection",
    ),
    "the tests": ("pytest", "pytest-timeout", "pytest-xdist", "execnet", "pluggy", "iniconfig"),
    "ZeRO": ("deepspeed", "hjson", "msgpack", "py-cpuinfo", "einops", "psutil", "ninja"),
    "4 and 8 bits": ("bitsandbytes", "torchao"),
    "TensorBoard": ("tensorboard", "grpcio", "protobuf", "absl-py", "markdown", "werkzeug"),
}
"""By what needs them, in the order of worth."""
SOURCE_ONLY = ("deepspeed",)
BEYOND = {"torchao": "torchao==0.18.0"}
"""Requirements on packages that the project itself does not use."""
LIMIT = 64 * 2**20
"""Bytes that travel to such a machine, with the project itself."""
_PLATFORMS = ("1", "2010", "2014", *(f"_2_{minor}" for minor in (12, 17, 24, 27, 28)))


def requirement(name: str, constraints: str) -> str:
    """``name`` with the version of ``constraints``, the text of such a file."""
    if name in BEYOND:
        return BEYOND[name]
    found = re.search(rf"^{re.escape(name)}==\S+", constraints, re.MULTILINE)
    if found is None:
        raise SystemExit(f"error: constraints.txt: names no version of {name}; add a line for it")
    return found[0]


def fetch(folder: Path, python: str, cuda: str) -> None:
    """Fill ``folder`` with all wheels for CPython ``python`` (3.12) and CUDA ``cuda`` (130)."""
    constraints = (ROOT / "constraints.txt").read_text("utf-8")
    names = [name for group in SETS.values() for name in group]
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    platforms = [part for name in _PLATFORMS for part in ("--platform", f"manylinux{name}_x86_64")]
    binary = [requirement(name, constraints) for name in names if name not in SOURCE_ONLY]
    wanted = ("--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python)
    into = ("--dest", str(folder))
    subprocess.run([*pip, "download", *wanted, *platforms, *into, *binary], check=True)
    source = [requirement(name, constraints) for name in SOURCE_ONLY]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), *source], check=True)
    for path in folder.glob("bitsandbytes-*.whl"):
        keep_libraries(path, ("cpu", f"cuda{cuda}"))


def keep_libraries(wheel: Path, kinds: Sequence[str]) -> None:
    """Drop the libraries of bitsandbytes' wheel but those of ``kinds``; its licence stays."""
    with zipfile.ZipFile(wheel) as whole, tempfile.NamedTemporaryFile(dir=wheel.parent, delete=False) as file:
        names = [name for name in whole.namelist() if not _dropped(name, kinds)]
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as small:
            for name in names:
                data = whole.read(name)
                if name.endswith(".dist-info/RECORD"):
                    data = _of(data, names)
                small.writestr(name, data)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(wheel)


def _dropped(name: str, kinds: Sequence[str]) -> bool:
    library = re.fullmatch(r"bitsandbytes/libbitsandbytes_(\w+)\.so", name)
    return library is not None and library[1] not in kinds


def _of(record: bytes, names: Sequence[str]) -> bytes:
    """The lines of a wheel's RECORD for ``names``."""
    kept = io.StringIO()
    rows = csv.reader(io.StringIO(record.decode()))
    csv.writer(kept, lineterminator="\n").writerows(row for row in rows if row[0] in names)
    return kept.getvalue().encode()


def table(folder: Path) -> str:
    """Megabytes of each wheel, and of each set."""
    sizes = {_name(path): path.stat().st_size for path in folder.glob("*.whl")}
    lines = []
    for group, names in SETS.items():
        inside = {name: sizes.pop(name) for name in names if name in sizes}
        lines.append(f"{group}: {sum(inside.values()) / 2**20:.1f} MiB")
        lines += [f"  {name:<20}{size / 2**20:>6.1f}" for name, size in inside.items()]
    lines += [f"not of any set: {name} {size / 2**20:.1f}" for name, size in sizes.items()]
    return "\n".join(lines)


def _name(wheel: Path) -> str:
    return wheel.name.split("-")[0].replace("_", "-").lower()


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the folder; 1 if it and the project are too large to travel."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.visit_wheels", description=__doc__)
    parser.add_argument("folder", type=Path, help="for the wheels; older ones in it are removed")
    parser.add_argument("--python", default="3.12", help="of that machine")
    parser.add_argument("--cuda", default="130", help="of that machine's torch")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    for old in options.folder.glob("*.whl"):
        old.unlink()
    fetch(options.folder, options.python, options.cuda)
    print(table(options.folder))
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    project = sum((ROOT / name).stat().st_size for name in listed.decode().split("\0") if name)
    wheels = sum(path.stat().st_size for path in options.folder.glob("*.whl"))
    together = project + wheels
    print(
        f"wheels {wheels / 2**20:.1f} MiB, project {project / 2**20:.1f} MiB: {together / 2**20:.1f} of "
        f"{LIMIT / 2**20:.0f} MiB"
    )
    return int(together > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
