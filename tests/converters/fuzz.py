"""Mutate files of every format at scale, and measure time, memory and tracebacks.

    python -m tests.converters.fuzz FOLDER [--files 10000] [--only torch] [--seed 0]

Half of the damage is random. The other half follows the format: a pickle is changed within its zip, whose
checksums are correct. For each format, the program prints the number of files and errors, the longest time,
the largest growth of memory, and the number of tracebacks. It keeps the files that caused a traceback in
`work-*/found`.
"""

from __future__ import annotations

import argparse
import json
import os
import pickletools
import random
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from copy import deepcopy
from importlib.util import find_spec
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, NamedTuple

from portable.converters import CheckpointError, Tensor, cli, open_checkpoint
from portable.converters.containers.pickle_reader import to_json_value
from tests.converters.compare import REFUSALS

LONGEST, LARGEST = 10.0, 300 << 20
"""Limits of the cost of a small file: seconds, and bytes of memory."""

_PATIENCE = 60
_CONVERTED = 20
_WORDS = [0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 62, (1 << 64) - 1]
_LONG = b"\x8a\x1f" + b"\xff" * 30 + b"\x7f"
_INTEGERS = [b"K\x00", b"K\x01", b"K\x02", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f", b"N", b"\x88", _LONG]
_INTEGERS += [b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"G\x7f\xf0" + bytes(6), b"G\x7f\xf8" + bytes(6)]
# Opcodes that make a larger value of the previous one.
_AGAIN = b"q\xc8(" + b"h\xc8" * 200 + b"t"
_GROWN = [b"2\x86" * 60, b"\x85" * 300, _AGAIN * 2, b"\x85cbuiltins\nset\nq\xc90h\xc9", b"2\x86" * 3]
_GROWN += [b"\x85R", b"0}", b"0]", b"0)"]
_JSON_VALUES: list[Any] = [None, True, -1, 0, 1 << 62, 1 << 200, 1e300, float("nan"), "", "../x", "\x1b[2J"]
_JSON_VALUES += ["\ud800", [], {}, [[]] * 100, "x" * 5000, [1 << 62] * 60]


class Cost(NamedTuple):
    """Result for one file: whether it was rejected, seconds, bytes of memory, and a traceback."""

    refused: bool
    seconds: float
    memory: int
    traceback: str

    @property
    def too_much(self) -> bool:
        return bool(self.traceback) or self.seconds > LONGEST or self.memory > LARGEST


def row(name: str, costs: list[Cost]) -> str:
    """Format the figures of one format."""
    refused, failed = (sum(map(bool, column)) for column in (*zip(*costs, strict=True),)[::3])
    longest, largest = max(cost.seconds for cost in costs), max(cost.memory for cost in costs) / 2**20
    return f"{name:<24} {len(costs):>8,} {refused:>8,} {longest:>8.2f} s {largest:>7.0f} MiB {failed:>4}"


# -- damage --------------------------------------------------------------------------------------------------


def blind(rng: random.Random, data: bytes) -> bytes:
    """Change a few bytes or words, cut out, repeat or move a piece, or cut off the end."""
    bad = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        edge = min(len(bad), 4096)
        at = rng.choice(
            [rng.randrange(len(bad) + 1), rng.randrange(edge + 1), len(bad) - rng.randrange(edge + 1)]
        )
        kind = rng.randrange(7)
        if kind == 0:
            bad[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1 and at < len(bad):
            bad[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            width = rng.choice([2, 4, 8])
            bad[at : at + width] = struct.pack(rng.choice("<>") + "Q", rng.choice(_WORDS))[:width]
        elif kind == 3:
            del bad[at : at + rng.randrange(1, 200)]
        elif kind == 4:
            bad[at:at] = bad[at : at + rng.randrange(1, 200)]
        elif kind == 5:
            del bad[at:]
        else:
            other = rng.randrange(len(bad) + 1)
            bad[at:at] = bad[other : other + rng.randrange(1, 200)]
    return bytes(bad)


def pickle_of(rng: random.Random, data: bytes) -> bytes:
    """Replace, repeat, move or remove opcodes of a pickle, or make values larger."""
    try:
        ends = [pos for _, _, pos in pickletools.genops(data) if pos is not None]
    except Exception:  # it was damaged before
        return blind(rng, data)
    parts = [data[low:high] for low, high in zip(ends, [*ends[1:], len(data)], strict=True)]
    for _ in range(rng.choice([1, 1, 2, 3])):
        at, other = rng.randrange(len(parts)), rng.randrange(len(parts))
        kind = rng.randrange(6)
        if kind == 0:
            numbers = [i for i, part in enumerate(parts) if part[:1] in (b"K", b"M", b"J", b"\x8a", b"G")]
            parts[rng.choice(numbers or [at])] = rng.choice(_INTEGERS)
        elif kind == 1:
            parts[at] = parts[other]
        elif kind == 2:
            parts.insert(at, parts[other])
        elif kind == 3 and len(parts) > 1:
            del parts[at]
        elif kind == 4:
            parts.insert(at, rng.choice(_GROWN))
        else:
            parts[at], parts[other] = parts[other], parts[at]
    return b"".join(parts)


def _value(rng: random.Random) -> Any:
    return deepcopy(rng.choice(_JSON_VALUES))  # otherwise, a later change could put a list into itself


def json_of(rng: random.Random, data: bytes) -> bytes:
    """Replace some values of JSON, and their keys."""
    try:
        tree = json.loads(data)
    except ValueError:
        return blind(rng, data)
    for _ in range(rng.choice([1, 1, 2, 3])):
        node = tree
        while isinstance(node, dict | list) and node:
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            if not isinstance(node[key], dict | list) or not node[key] or rng.random() < 0.25:
                if isinstance(node, dict) and rng.random() < 0.2:
                    node[str(_value(rng))[:200]] = node.pop(key)
                else:
                    node[key] = _value(rng)
                break
            node = node[key]
    return json.dumps(tree).encode()


def zip_of(rng: random.Random, data: bytes) -> bytes:
    """Replace the pickle in a zip of torch.save, with correct checksums."""
    made = BytesIO()
    with zipfile.ZipFile(BytesIO(data)) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            held = old.read(info)
            if info.filename.endswith("/data.pkl") or (len(held) < 64 and rng.random() < 0.02):
                held = pickle_of(rng, held)
            if rng.random() < 0.995:
                new.writestr(info.filename, held)
    return made.getvalue()


def knowing(rng: random.Random, path: Path, data: bytes) -> bytes:
    """Damage a file such that the checks of the outer layers do not detect it."""
    if path.name.endswith(".metadata"):
        return pickle_of(rng, data)
    if path.suffix == ".json" or path.name in ("_METADATA", ".zarray"):
        return json_of(rng, data)
    if path.suffix == ".safetensors" and len(data) > 8:
        length = int.from_bytes(data[:8], "little")
        header = (
            json_of(rng, data[8 : 8 + length]) if rng.random() < 0.8 else blind(rng, data[8 : 8 + length])
        )
        return len(header).to_bytes(8, "little") + header + data[8 + length :]
    try:
        return zip_of(rng, data)
    except (zipfile.BadZipFile, struct.error, ValueError, EOFError):
        return blind(rng, data)


# -- one file ------------------------------------------------------------------------------------------------


def read_all(folder: Path, out: Path) -> bool:
    """Read all values that a conversion would read. Returns whether the checkpoint was rejected."""
    try:
        checkpoint = open_checkpoint(folder)
        optimizer = checkpoint.optimizer
        state = (
            [value for values in optimizer.state.values() for value in values.values()] if optimizer else []
        )
        for tensor in (*checkpoint.tensors.values(), *state):
            if isinstance(tensor, Tensor) and tensor.nbytes < 1 << 24:
                tensor.read()
        if optimizer:
            json.dumps(to_json_value(optimizer.param_groups, limit=10_000_000))
        _ = checkpoint.counters
    except CheckpointError:
        return True
    return False


def convert(folder: Path, out: Path) -> bool:
    """Convert a checkpoint as a user would. Returns whether it was rejected."""
    shutil.rmtree(out, ignore_errors=True)
    told = StringIO()
    with redirect_stdout(StringIO()), redirect_stderr(told):
        code = cli.main([str(folder), str(out), "--optimizer", "--quiet"])
    assert code in (0, *REFUSALS), f"exit code {code}: {told.getvalue()}"
    assert code == 0 or told.getvalue().count("\n") == 1, told.getvalue()
    return code != 0


class _TooLongError(BaseException):
    pass


def _too_long(signum: int, frame: object) -> None:
    raise _TooLongError


def _memory(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) << 10


def _cost(use: Callable[[Path, Path], bool], folder: Path, out: Path) -> Cost:
    refused, failed = False, ""
    with suppress(OSError):  # some containers do not allow it
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, started = _memory("VmRSS"), time.perf_counter()
    signal.alarm(_PATIENCE)
    try:
        refused = use(folder, out)
    except (Exception, _TooLongError):
        failed = traceback.format_exc()
    finally:
        signal.alarm(0)
    return Cost(refused, time.perf_counter() - started, max(0, _memory("VmHWM") - before), failed)


def run(name: str, folder: Path, work: Path, *, files: int, seed: int = 0) -> list[Cost]:
    """Damage the files of the checkpoint in `folder`, one at a time.

    Args:
        name: Name of the format.
        folder: Folder of the checkpoint.
        work: Empty folder for the damaged copy, and for files that caused a traceback.
        files: Number of damaged files.
        seed: Seed of the damage.
    """
    copy, out, found = work / name / "checkpoint", work / name / "out", work / "found"
    shutil.copytree(folder, copy)
    found.mkdir(exist_ok=True)
    rng, costs = random.Random(f"{name} {seed}"), list[Cost]()
    seal = copy / "shard_checksums.json"
    victims = [
        path for path in sorted(copy.rglob("*")) if path.is_file() and not path.name.endswith(".ref.pt")
    ]
    previous = signal.signal(signal.SIGALRM, _too_long)
    try:
        while len(costs) < files:
            path = rng.choice(victims)
            good = path.read_bytes()
            bad = knowing(rng, path, good) if rng.random() < 0.5 else blind(rng, good)
            path.write_bytes(bad)
            sealed = seal.read_bytes() if seal.exists() and path != seal and rng.random() < 0.7 else None
            if sealed is not None:
                seal.unlink()
            use = read_all if len(costs) % _CONVERTED else convert
            costs.append(cost := _cost(use, copy, out))
            if cost.too_much:
                kept = found / f"{name}-{seed}-{len(costs)}-{path.name}"
                kept.write_bytes(bad)
                text = f"{cost.seconds:.1f} s, {cost.memory:,} bytes\n{cost.traceback}"
                kept.with_name(kept.name + ".txt").write_text(text)
            path.write_bytes(good)
            if sealed is not None:
                seal.write_bytes(sealed)
    finally:
        signal.signal(signal.SIGALRM, previous)
    return costs


def checkpoints(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield (name, folder) of a sample of each format. Samples that do not exist yet are written."""
    from tests.converters.making import make
    from tests.converters.samples import MAKERS, ORBAX, all_samples

    for sample in all_samples():
        if find_spec(sample.needs) is None:
            continue
        maker = MAKERS.get(sample.fixture, sample.name)
        base = ORBAX if sample.fixture == "orbax_samples" else folder / maker
        if not base.exists():
            base.mkdir(parents=True)
            sample.make(base) if sample.make else make(maker, base)
        yield sample.name, base / sample.folder


def main(argv: list[str] | None = None) -> int:
    """Run all formats. The exit code is 1 if a file cost too much or caused a traceback."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--files", type=int, default=10_000, help="of each format")
    parser.add_argument("--only", default="", help="formats whose name holds this")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    made = options.folder / "made"
    samples = [(name, path) for name, path in checkpoints(made) if options.only in name]
    work = options.folder / f"work-{os.getpid()}"
    work.mkdir()
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, resource.RLIM_INFINITY))
    every = list[Cost]()
    for name, path in samples:
        costs = run(name, path, work, files=options.files, seed=options.seed)
        print(row(name, costs), flush=True)
        every += costs
        shutil.rmtree(work / name)
    print(row(f"{len(samples)} formats", every))
    for last in sorted({cost.traceback.strip().splitlines()[-1][:150] for cost in every if cost.traceback}):
        print("  " + last)
    return int(any(cost.too_much for cost in every))


if __name__ == "__main__":
    sys.exit(main())
