"""Streams of tokens beside Hugging Face's streaming with StatefulDataLoader, Mosaic Streaming and litdata.

    python -m benchmarks.data_peers --packages FOLDER [--samples 1050000] [--move]

``FOLDER`` has the peers' packages (``pip install --target FOLDER --no-deps torchdata mosaicml-streaming
litdata lightning-utilities zstandard ...``). Each gets the same samples of 32 tokens in its own files, made
by its own writer, and each measurement is a new process. Times begin after the imports. The peers have two
worker processes; ours has the thread that it has by default, and two processes that make tokens ahead.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

LENGTH, BATCH, BASE = 32, 64, 4096
SYSTEMS = ("ours", "ours, prepared", "hf", "mosaic", "litdata")
SHARDS = 64


def sample(number: int) -> npt.NDArray[np.int32]:
    """The tokens of a sample; the first two are its number."""
    row = np.arange(LENGTH, dtype=np.int32) % 50 + 2
    row[:2] = number // BASE + 2, number % BASE + 2
    return row


def numbers(rows: Any) -> list[int]:
    rows = np.asarray(rows)
    found: list[int] = ((rows[:, 0] - 2) * BASE + rows[:, 1] - 2).tolist()
    return found


# -- files --------------------------------------------------------------------------------------------------


def write(system: str, folder: Path, count: int) -> None:
    if system == "hf":
        import pyarrow
        from pyarrow import parquet

        folder.mkdir()
        for shard in range(SHARDS):
            rows = np.stack(
                [sample(n) for n in range(count * shard // SHARDS, count * (shard + 1) // SHARDS)]
            )
            column = pyarrow.FixedSizeListArray.from_arrays(rows.ravel(), LENGTH)
            table = pyarrow.table({"input_ids": column.cast(pyarrow.list_(pyarrow.int32()))})
            parquet.write_table(table, folder / f"{shard:03}.parquet", row_group_size=4096)
    elif system == "mosaic":
        from streaming import MDSWriter

        size = count * (LENGTH * 4 + 12) // SHARDS
        columns = {"tokens": f"ndarray:int32:{LENGTH}"}
        with MDSWriter(out=str(folder), columns=columns, size_limit=size) as out:
            for number in range(count):
                out.write({"tokens": sample(number)})
    elif system == "litdata":
        from litdata import TokensLoader, optimize

        optimize(
            fn=_tensors,
            inputs=[(count * n // SHARDS, count * (n + 1) // SHARDS) for n in range(SHARDS)],
            output_dir=str(folder),
            chunk_size=count * LENGTH // SHARDS // LENGTH * LENGTH,
            item_loader=TokensLoader(),
            num_workers=1,
        )
    elif system == "ours, prepared":
        from portable.commands.data import main as portable_data

        config = folder.with_name("config.json")
        config.write_text(json.dumps({"data": _settings(folder.with_name("mosaic"), folder.parent)}))
        assert portable_data(["--config", str(config), "--out", str(folder), "--processes", "2"]) == 0


def _tensors(span: tuple[int, int]) -> Iterator[Any]:
    import torch

    for number in range(*span):
        yield torch.from_numpy(sample(number))


def _settings(files: Path, folder: Path) -> dict[str, Any]:
    return {
        "source": str(files),
        "stream": True,
        "seq_len": LENGTH,
        "tokenizer": str(folder / "tokenizer"),
        "eval_fraction": 0.0,
        "shuffle_window": 4,
        "cache_dir": str(folder / "cache"),
        "num_workers": 2,
    }


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<end>": 0, "<unknown>": 1} | {f"w{n}": n + 2 for n in range(BASE)}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>").save_pretrained(folder)


# -- readers ------------------------------------------------------------------------------------------------


class Reader:
    """The batches of one system.

    Args:
        state: what :meth:`state` returned, to go on from there.
    """

    def __init__(self, system: str, folder: Path, workers: int, state: Any, rank: int, world: int) -> None:
        self._system = system
        self._taken = 0
        getattr(self, f"_open_{system.partition(',')[0]}")(system, folder, workers, state, rank, world)
        self._batches = iter(self._loader)

    def _open_ours(self, system: str, folder: Path, workers: int, state: Any, rank: int, world: int) -> None:
        from portable.config import DataConfig
        from portable.data import TrainLoader, build_data

        files = folder / ("ours, prepared" if "prepared" in system else "mosaic")
        settings = _settings(files, folder) | {"cache_dir": str(folder / f"cache {system}")}
        self._data: Any = build_data(DataConfig(**settings), seed=1)
        position, manifest = state or (0, {})
        self._data.train.adopt(manifest)
        self._taken = position // BATCH
        self._loader: Any = TrainLoader(
            self._data.train, seed=1, position=position, global_batch_size=BATCH,
            micro_batch_size=BATCH // world, rank=rank, world_size=world, num_workers=workers,
        )  # fmt: skip

    def _open_hf(self, system: str, folder: Path, workers: int, state: Any, rank: int, world: int) -> None:
        from datasets import load_dataset
        from datasets.distributed import split_dataset_by_node
        from torchdata.stateful_dataloader import StatefulDataLoader

        files = sorted(map(str, (folder / "hf").glob("*.parquet")))
        found = load_dataset("parquet", data_files=files, split="train", streaming=True)
        found = found.shuffle(seed=1, buffer_size=1000)
        found = split_dataset_by_node(found, rank, world)
        self._loader = StatefulDataLoader(found.with_format("numpy"), BATCH // world, num_workers=workers)
        if state is not None:
            self._loader.load_state_dict(state)

    def _open_mosaic(
        self, system: str, folder: Path, workers: int, state: Any, rank: int, world: int
    ) -> None:
        from streaming import StreamingDataLoader, StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()  # on all ranks, which wait for each other
        found = StreamingDataset(
            local=str(folder / "mosaic"), shuffle=True, shuffle_seed=1, batch_size=BATCH // world
        )
        self._loader = StreamingDataLoader(found, batch_size=BATCH // world, num_workers=workers)
        if state is not None:
            self._loader.load_state_dict(state)

    def _open_litdata(
        self, system: str, folder: Path, workers: int, state: Any, rank: int, world: int
    ) -> None:
        from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

        found = StreamingDataset(
            str(folder / "litdata"), item_loader=TokensLoader(block_size=LENGTH), shuffle=True, seed=1,
            drop_last=True,  # the default depends on the number of ranks, and a resume refuses another
        )  # fmt: skip
        self._loader = StreamingDataLoader(found, batch_size=BATCH // world, num_workers=workers)
        if state is not None:
            self._loader.load_state_dict(state)

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._taken += 1
        if isinstance(batch, dict):
            return batch.get("input_ids", batch.get("tokens"))
        return batch

    def state(self) -> Any:
        if self._system.startswith("ours"):
            return self._taken * BATCH, self._data.train.state()
        return self._loader.state_dict()


def moved(system: str, state: Any, count: int) -> Any:
    """A state as it is after ``count`` samples. That of HF has no position, but one of each worker's file."""
    if system == "ours, prepared":  # whose manifest is complete from the start
        return count, state[1]
    if system == "mosaic":
        return {**state, "sample_in_epoch": count}
    assert system == "litdata", system
    new = {"num_samples_yielded": count}
    return {**state, **new, "dataset": {**state["dataset"], **new, "sample_in_epoch": count}}


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """One process: take some batches from a state on, and save one."""
    import pickle

    import torch

    folder, rank, world = Path(asked["folder"]), asked["rank"], asked["world"]
    for name in {"hf": ["datasets", "torchdata"], "mosaic": ["streaming"], "litdata": ["litdata"]}.get(
        asked["system"], ["portable.data", "portable.config", "transformers"]
    ):
        __import__(name)
    if world > 1:
        torch.distributed.init_process_group("gloo")
    state = None
    if asked.get("load"):
        state = pickle.loads(Path(asked["load"]).read_bytes())  # noqa: S301  # written by this benchmark
    begun = time.perf_counter()
    reader = Reader(asked["system"], folder, asked["workers"], state, rank, world)
    found = {"first": 0.0, "taken": 0, "rate": 0.0}
    ids: list[int] = []
    since = begun
    for batch in reader:
        ids += numbers(batch)
        if not found["taken"]:
            since = time.perf_counter()
            found["first"] = since - begun
        found["taken"] += len(batch)
        if found["taken"] >= asked["count"]:
            break
    found["rate"] = (found["taken"] - BATCH) / max(time.perf_counter() - since, 1e-9)
    if asked["system"].startswith("ours") and (whole := reader._data.train._whole()) is not None:
        found["epoch"] = whole
    if asked.get("save"):
        saved = reader.state()
        if asked.get("moved"):
            saved = moved(asked["system"], saved, asked["moved"])
        Path(asked["save"]).write_bytes(pickle.dumps(saved))
        found["state"] = Path(asked["save"]).stat().st_size
    own, children = (
        resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    found["memory"] = max(own, children) / 1024
    np.array(ids).tofile(asked["ids"])
    return found


def run(system: str, folder: Path, packages: str, *, world: int = 1, **asked: Any) -> list[dict[str, Any]]:
    """Measure in ``world`` new processes; what each found, with its ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(world):
        given = {
            "system": system,
            "folder": str(folder),
            "world": world,
            "rank": rank,
            "workers": 0 if system.startswith("ours") else 2,
        }
        given |= asked
        given["ids"] = str(folder / f"ids-{rank}")
        if given.get("save"):
            given["save"] = f"{given['save']}-{rank}"
        environment = {
            **os.environ, "PYTHONPATH": _path(system, packages), "HOME": str(folder),
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        command = [sys.executable, "-m", "benchmarks.data_peers", "--measure", json.dumps(given)]
        processes.append(
            subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    found = []
    for rank, process in enumerate(processes):
        try:
            out, error = process.communicate(timeout=1500)
        except subprocess.TimeoutExpired:
            process.kill()
            out, error = process.communicate()[0], "no answer in 1500 s"
        if process.returncode:
            lines = [line for line in error.strip().splitlines() if line.strip()]
            found.append({"error": lines[-1] if lines else f"ended with {process.returncode}", "ids": []})
        else:
            answer = next(line for line in out.splitlines() if line.startswith('{"first"'))
            ids = np.fromfile(folder / f"ids-{rank}", dtype=np.int64).tolist()
            found.append({**json.loads(answer), "ids": ids})
    return found


def _path(system: str, packages: str) -> str:
    """The ``PYTHONPATH`` of a process: the peers' packages are for them alone."""
    return os.pathsep.join([str(Path.cwd()), *([] if system.startswith("ours") else [packages])])


def compare(
    folder: Path, packages: str, samples: int, repeats: int, systems: list[str], counts: list[int], move: bool
) -> None:
    everything: dict[str, dict[str, Any]] = {system: {} for system in systems}
    for _ in range(repeats):  # interleaved
        for system in systems:
            shutil.rmtree(folder / f"cache {system}", ignore_errors=True)
            first = run(system, folder, packages, count=20_000)[0]
            for key in ("first", "rate", "memory", "error"):
                if key in first:
                    everything[system].setdefault(key, []).append(first[key])
    for system in systems:
        rows = everything[system]
        for count in counts:
            if count + 10_000 > samples:
                continue
            state = str(folder / f"state-{system}-{count}")
            given = {"count": 10 * BATCH, "moved": count} if move else {"count": count}
            saved = run(system, folder, packages, save=state, **given)[0]
            if "error" in saved:
                rows[f"resume {count}"] = saved["error"]
                continue
            resumed = [
                run(system, folder, packages, count=BATCH, load=f"{state}-0")[0] for _ in range(repeats)
            ]
            rows[f"resume {count}"] = [one.get("first", one.get("error")) for one in resumed]
            rows[f"memory {count}"] = saved["memory"]
    print(json.dumps({system: _medians(rows) for system, rows in everything.items()}, indent=1), flush=True)


def _medians(rows: dict[str, Any]) -> dict[str, Any]:
    return {
        key: statistics.median(value)
        if isinstance(value, list) and all(isinstance(one, float | int) for one in value)
        else value
        for key, value in rows.items()
    }


def changes(folder: Path, packages: str, samples: int, systems: list[str]) -> None:
    """What is repeated and lost in an epoch when workers or ranks change at a resume."""
    for system in systems:
        for before, after in (((1, 2), (1, 3)), ((2, 2), (1, 2))):
            state = str(folder / f"changed-{system}")
            first = run(
                system, folder, packages, world=before[0], workers=before[1],
                count=samples // 3 // BATCH * BATCH // before[0],
                save=state,
            )  # fmt: skip
            then = run(
                system, folder, packages, world=after[0], workers=after[1], count=samples, load=f"{state}-0"
            )  # fmt: skip
            errors = [one["error"] for one in (*first, *then) if "error" in one]
            seen = [number for one in first for number in one["ids"]]
            left = [number for one in then for number in one["ids"]]
            whole = samples
            if "epoch" in then[0]:  # ours goes on without end, and leaves out the end of each file
                left, whole = left[: then[0]["epoch"] - len(seen)], then[0]["epoch"]
            told = {
                "system": system,
                "ranks, workers": [before, after],
                "taken": len(seen),
                "repeated": len(seen) + len(left) - len({*seen, *left}),
                "lost": whole - len({*seen, *left}),
                "errors": errors[:1],
            }
            print(json.dumps(told), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--packages", default="")
    parser.add_argument("--samples", type=int, default=1_050_000)
    parser.add_argument(
        "--few", type=int, default=64 * 300, help="samples for the changes of ranks and workers"
    )
    parser.add_argument("--resume", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument(
        "--move", action="store_true", help="set the position in a state, rather than to read so far"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--systems", default=";".join(SYSTEMS))
    parser.add_argument("--only", choices=["speed", "changes"])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(json.loads(args.measure))))
        return
    if args.write:
        system, folder, count = json.loads(args.write)
        write(system, Path(folder), count)
        return
    systems = args.systems.split(";")
    with tempfile.TemporaryDirectory(prefix="data-peers-") as scratch:
        for part, count in (("speed", args.samples), ("changes", args.few)):
            if args.only not in (None, part):
                continue
            folder = Path(scratch) / part
            folder.mkdir()
            _write_tokenizer(folder / "tokenizer")
            for system in dict.fromkeys(["mosaic", *systems]):
                given = json.dumps([system, str(folder / system), count])
                command = [sys.executable, "-m", "benchmarks.data_peers", "--write", given]
                environment = {**os.environ, "PYTHONPATH": _path(system, args.packages), "HOME": scratch}
                subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            if part == "speed":
                compare(folder, args.packages, count, args.repeats, systems, args.resume, args.move)
            else:
                changes(folder, args.packages, count, systems)


if __name__ == "__main__":
    main()
