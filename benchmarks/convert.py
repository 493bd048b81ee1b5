"""Compare `portable-convert` with `cp` and with each framework's conversion script.

``python -m benchmarks.convert`` lets each framework write a checkpoint. It then alternates between
`portable-convert`, `cp` and the framework's script, with a warm page cache, and measures each
complete process. Every result is compared with this project's result, tensor by tensor.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.convert_make import KINDS, RANK, WORLD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MIB = 1 << 20
OURS = "portable-convert"
COPY, COPY_SYNCED = "cp", "cp, then fsync"
NEEDS = {
    "dcp": "torch",
    "fp8": "transformers",
    "merge": "peft",
    "zero2": "deepspeed",
    "zero3": "deepspeed",
    "xla": "torch_xla",
}
SOURCES = {
    "dcp": "torch DCP, FSDP2",
    "zero2": "DeepSpeed ZeRO-2, bf16",
    "zero3": "DeepSpeed ZeRO-3, bf16",
    "xla": "PyTorch/XLA FSDP",
    "fp8": "weights in fp8 by blocks, to bfloat16",
    "merge": f"LoRA adapter of rank {RANK}, merged into its base model in bfloat16",
}
SUBFOLDERS = {"dcp": "pytorch_model_fsdp_0", "merge": "adapter"}
"""Subfolder to convert instead of the complete checkpoint, keyed by kind of checkpoint."""
MORE = {"fp8": "--dequantize", "merge": "--merge-into {source}/../base"}
"""Additional options of `portable-convert`, keyed by kind of checkpoint."""
_ZERO = {
    "zero_to_fp32.py, .bin": "{source}/zero_to_fp32.py {source} {out}",
    "zero_to_fp32.py, safetensors": "{source}/zero_to_fp32.py {source} {out} --safe_serialization",
}
PEERS = {
    "dcp": {
        "accelerate merge-weights": "-m accelerate.commands.accelerate_cli merge-weights {source} {out}",
        "torch dcp_to_torch": "-m torch.distributed.checkpoint.format_utils dcp_to_torch {source} "
        "{out}/model.pt",
    },
    "zero2": _ZERO,
    "zero3": _ZERO,
    "xla": {
        "torch_xla consolidation": "-m torch_xla.distributed.fsdp.consolidate_sharded_ckpts "
        "--ckpt_prefix {source}/rank- --ckpt_suffix *-of-{world:08d}.pth --save_path {out}/model.pth"
    },
    "fp8": {
        "DeepSeek's loop": "-m benchmarks.convert_peers deepseek {source} {out}",
        "transformers, dequantize": "-m benchmarks.convert_peers transformers {source} {out}",
        "compressed-tensors, no model": "-m benchmarks.convert_peers compressed {source} {out}",
    },
    "merge": {"peft merge_and_unload": "-m benchmarks.convert_peers peft {source} {out}"},
}
"""Python command-line arguments that run each of the other programs, keyed by kind of checkpoint
and then by program name.
"""
ROUNDING = {"merge": 1}
"""Units in the last place by which the result of another program may differ, keyed by kind of checkpoint."""
# Hide accelerators, and packages that a user would not have.
ENVIRONMENT = {
    "USE_TORCH_XLA": "0",
    "DS_ACCELERATOR": "cpu",
    "PJRT_DEVICE": "CPU",
    "CUDA_VISIBLE_DEVICES": "",
    "PYTHONDONTWRITEBYTECODE": "",
}


@dataclass(frozen=True)
class Contestant:
    """Program to measure on a checkpoint.

    Attributes:
        name: Name of the program in the table.
        command: Function that returns the command line for a checkpoint and an output folder.
        makes_folder: Whether the program creates the output folder. Otherwise, the benchmark creates
            it.
        writes: Whether the program writes a result that can be compared.
    """

    name: str
    command: Callable[[Path, Path], list[str]]
    makes_folder: bool = False
    writes: bool = True


@dataclass(frozen=True)
class Run:
    """Cost of one complete process.

    Attributes:
        wall: Wall time in seconds.
        cpu: User and system time in seconds. Other programs affect it less than the wall time.
        rss: Peak resident memory in MiB, including pages of mapped files.
        anonymous: Peak anonymous memory in MiB, sampled every 10 ms.
    """

    wall: float
    cpu: float
    rss: float
    anonymous: float


@dataclass
class Result:
    """All runs of one program on one checkpoint.

    Attributes:
        name: Name of the program.
        runs: Measured runs.
        failed: Last output line of the program if it failed, otherwise empty.
    """

    name: str
    runs: list[Run] = field(default_factory=list)
    failed: str = ""

    def median(self, what: str) -> float:
        return float(statistics.median(getattr(run, what) for run in self.runs))


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def portable(kind: str, source: Path, out: Path, *more: str) -> list[str]:
    options = [part.format(source=source) for part in MORE.get(kind, "").split()]
    return python("-m", "portable.converters.cli", str(source), str(out), "--quiet", *more, *options)


def copies(result: Path) -> list[Contestant]:
    """Return two contestants that copy a result's weights with `cp`, without and with a sync to disk."""
    copy = f'cp {shlex.quote(str(result))}/*.safetensors "$0"'

    def shell(name: str, script: str) -> Contestant:
        return Contestant(name, lambda _, out: ["sh", "-c", script, str(out)], writes=False)

    return [shell(COPY, copy), shell(COPY_SYNCED, f'{copy} && sync "$0"/*')]


def contestants(kind: str, result: Path) -> list[Contestant]:
    """Return all contestants for a type of checkpoint.

    Args:
        kind: Type of the checkpoint.
        result: Folder of a finished conversion, used as the source of `cp`.
    """

    def ours(*more: str) -> Callable[[Path, Path], list[str]]:
        return lambda source, out: portable(kind, source, out, *more)

    def peer(template: str) -> Callable[[Path, Path], list[str]]:
        return lambda source, out: python(
            *(part.format(source=source, out=out, world=WORLD) for part in template.split())
        )

    return [
        *copies(result),
        Contestant(OURS, ours(), makes_folder=True),
        Contestant(f"{OURS} --dry-run", ours("--dry-run"), makes_folder=True, writes=False),
        *(Contestant(name, peer(template)) for name, template in PEERS[kind].items()),
    ]


def measure(command: Sequence[str], log: Path) -> tuple[Run, int]:
    """Run a command until it ends, and return its cost and exit code.

    Compiled Python modules are cached next to `log`, as in a real installation.

    Args:
        command: Command line.
        log: File for the output of the command.
    """
    compiled = {"PYTHONPYCACHEPREFIX": str(log.with_name("pycache").absolute())}
    peaks = {"VmHWM": 0, "RssAnon": 0}
    ended = threading.Event()

    def watch(pid: int) -> None:
        while not ended.wait(0.01):
            try:
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            except OSError:
                return
            for line in lines:
                key, _, value = line.partition(":")
                if key in peaks:
                    peaks[key] = max(peaks[key], int(value.split()[0]))

    with log.open("wb") as said:
        start = time.perf_counter()
        child = subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, env={**os.environ, **ENVIRONMENT, **compiled}
        )
        watcher = threading.Thread(target=watch, args=(child.pid,))
        watcher.start()
        _, status, used = os.wait4(child.pid, 0)
        wall = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)  # so that Popen does not wait for the process again
    ended.set()
    watcher.join()
    run = Run(wall, used.ru_utime + used.ru_stime, peaks["VmHWM"] / 1024, peaks["RssAnon"] / 1024)
    return run, child.returncode


def compete(kind: str, source: Path, work: Path, rounds: int, *, peers: bool = True) -> list[Result]:
    """Alternate between all contestants on one checkpoint, and compare their results.

    Every result is compared with this project's result.

    Args:
        kind: Type of the checkpoint.
        source: Checkpoint to convert.
        work: Folder for results and logs.
        rounds: Number of measured rounds.
        peers: Whether to also run other projects' programs.

    Raises:
        AssertionError: If two results differ by more than the tolerance for this type.
        RuntimeError: If this project's conversion fails.
    """
    reference, log = work / f"{kind}-result", work / "log"
    shutil.rmtree(reference, ignore_errors=True)
    _, code = measure(portable(kind, source, reference), log)  # also warms the page cache
    if code:
        raise RuntimeError(last_line(log))
    units = ROUNDING.get(kind, 0)

    def check(contestant: Contestant, out: Path) -> None:
        if contestant.writes:
            message = f"{contestant.name} and {OURS} differ on {kind}"
            assert compare(reference, out) <= (0 if contestant.name == OURS else units), message

    everyone = contestants(kind, reference)
    if not peers:
        everyone = [contestant for contestant in everyone if contestant.name not in PEERS[kind]]
    results = take_turns(everyone, source, work, rounds, check)
    shutil.rmtree(reference)
    return results


def take_turns(
    everyone: Sequence[Contestant],
    source: Path,
    work: Path,
    rounds: int,
    seen: Callable[[Contestant, Path], None],
) -> list[Result]:
    """Run all contestants one after the other for `rounds` rounds, after an unmeasured round.

    The unmeasured round compiles modules and warms the page cache. A contestant that fails is not run
    again.

    Args:
        everyone: Contestants to run.
        source: Checkpoint to convert.
        work: Folder for the results.
        rounds: Number of measured rounds.
        seen: Callback that receives each contestant and its result folder in the unmeasured round.
    """
    out, log = work / "out", work / "log"
    results = {contestant.name: Result(contestant.name) for contestant in everyone}
    for turn in range(-1, rounds):
        # Rotate the order in each round. The sync before each run lets the disk become idle.
        for contestant in (*everyone[turn % len(everyone) :], *everyone[: turn % len(everyone)]):
            result = results[contestant.name]
            if result.failed:
                continue
            shutil.rmtree(out, ignore_errors=True)
            if not contestant.makes_folder:
                out.mkdir()
            os.sync()
            run, code = measure(contestant.command(source, out), log)
            if code:
                result.failed = last_line(log)
            elif turn >= 0:
                result.runs.append(run)
            else:
                seen(contestant, out)
    shutil.rmtree(out, ignore_errors=True)
    return list(results.values())


def compare(one: Path, two: Path) -> float:
    """Compare two results in a separate process that does not use this project's code.

    Returns:
        The largest difference between two elements, in units in the last place, or infinity if the
        names, dtypes or shapes differ.
    """
    command = python("-m", "benchmarks.convert_peers", "compare", str(one), str(two))
    return float(subprocess.run(command, check=True, capture_output=True).stdout)


def last_line(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1][:160] if lines else "failed without a word"


def provide(kind: str, work: Path, gigabytes: float) -> tuple[Path | None, str]:
    """Return a checkpoint folder, writing the checkpoint if it does not exist.

    Args:
        kind: Type of the checkpoint.
        work: Folder that contains all checkpoints.
        gigabytes: Size of the fp32 weights in GB.

    Returns:
        The folder and an empty string, or None and the reason why the checkpoint cannot be written.
    """
    folder, log = work / f"{kind}-{gigabytes:g}", work / "log"
    if not folder.exists():
        if find_spec(NEEDS[kind]) is None:
            return None, f"{NEEDS[kind]} is not installed"
        partial = work / f"{kind}.part"
        shutil.rmtree(partial, ignore_errors=True)
        command = python("-m", "benchmarks.convert_make", kind, str(partial), "--gigabytes", str(gigabytes))
        if measure(command, log)[1]:
            return None, last_line(log)
        partial.rename(folder)
    return folder / SUBFOLDERS.get(kind, ""), ""


def table(kind: str, results: Sequence[Result]) -> str:
    """Format the median results for one checkpoint as a Markdown table."""
    measured = {result.name: result for result in results if result.runs}
    beside = {"x cp+fsync": measured[COPY_SYNCED], "x ours": measured[OURS]}
    return f"{SOURCES[kind]}:\n\n{medians(results, beside)}"


def medians(results: Sequence[Result], beside: Mapping[str, Result]) -> str:
    """Format a Markdown table of median times and peak memory, with one row per contestant.

    Args:
        results: Results of the contestants, one per row.
        beside: Baseline results, keyed by column title. Each column contains the ratio of a
            contestant's wall time to the baseline's wall time.
    """
    titles = ["wall s", "least", "processor s", "peak MiB", "anonymous MiB", *beside]
    others = [other.median("wall") for other in beside.values()]
    lines = [f"| | {' | '.join(titles)} |", "| --- |" + " ---: |" * len(titles)]
    for result in results:
        if result.failed:
            lines.append(f"| {result.name} | fails: {result.failed} |" + " |" * (len(titles) - 1))
            continue
        wall = result.median("wall")
        row = [
            *(f"{value:.2f}" for value in (wall, min(run.wall for run in result.runs), result.median("cpu"))),
            *(f"{max(getattr(run, what) for run in result.runs):.0f}" for what in ("rss", "anonymous")),
            *(f"{wall / other:.2f}" for other in others),
        ]
        lines.append(" | ".join([f"| {result.name}", *row]) + " |")
    return "\n".join(lines) + "\n"


def sparse_checkpoint(folder: Path, count: int, shape: tuple[int, int] = (2000, 4000)) -> None:
    """Write a safetensors file that contains ``count`` fp32 tensors with the given shape.

    The file's blocks are allocated, so it is not sparse, but no zeros are written to the disk.
    """
    nbytes = 4 * prod(shape)
    header = {
        f"layers.{i}.weight": {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [i * nbytes, (i + 1) * nbytes],
        }
        for i in range(count)
    }
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        # Allocate all blocks, because files with holes are refused.
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + count * nbytes)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convert", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=1.4, help="of weights in the result")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--only", nargs="+", choices=KINDS, default=list(KINDS), help="checkpoints to convert"
    )
    parser.add_argument(
        "--no-peers", dest="peers", action="store_false", help="time only cp and portable-convert"
    )
    parser.add_argument("--small", action="store_true", help="2 MB and one round: does it run?")
    parser.add_argument("--folder", type=Path, help="keep the checkpoints there for the next run")
    parser.add_argument("--json", type=Path, help="also write every run to this file")
    options = parser.parse_args(argv)
    if options.small:
        options.gigabytes, options.rounds = 0.002, 1
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark, print its tables, and return 0.

    Raises:
        AssertionError: If the results of two programs differ.
    """
    options = parse(argv)
    work = options.folder or Path(tempfile.mkdtemp(prefix="convert-", dir=Path.cwd()))
    work.mkdir(parents=True, exist_ok=True)
    libraries = [name for name in ("torch", "deepspeed", "accelerate", "torch-xla") if _version(name)]
    print(", ".join([f"{os.cpu_count()} cores", *(f"{name} {_version(name)}" for name in libraries)]))
    document: dict[str, list[dict[str, object]]] = {}
    try:
        for kind in options.only:
            source, missing = provide(kind, work, options.gigabytes)
            if source is None:
                print(f"{SOURCES[kind]}: skipped, {missing}\n")
                continue
            results = compete(kind, source, work, options.rounds, peers=options.peers)
            document[kind] = [asdict(result) for result in results]
            print(table(kind, results), flush=True)
    finally:
        if options.folder is None:
            shutil.rmtree(work)
    if options.json:
        command = f"python -m benchmarks.convert {shlex.join(sys.argv[1:] if argv is None else argv)}"
        options.json.write_text(json.dumps({"command": command, "measured": document}, indent=2) + "\n")
    return 0


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
