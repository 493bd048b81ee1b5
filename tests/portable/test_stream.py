"""Streams: files are tokenized while the run trains, in one order and within a limit, or ahead of time.

Despite faults, every sample is correct, or the run ends with a one-line error. Nothing hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from portable.commands.data import main
from portable.config.sections import DataConfig, SourceConfig
from portable.data import pretokenize
from portable.data.dataset import RunData, build_data, inspect_data_sizes
from portable.data.preview import build_preview
from portable.data.samples.loader import TrainLoader
from portable.data.samples.order import EpochIndex
from portable.data.sources import file_parts, hub_dataset, source_kinds
from portable.data.sources.file_parts import FileRangeSource
from portable.data.sources.pretokenized import INDEX_FILE
from portable.data.sources.records import Fields
from portable.data.sources.source_kinds import StreamSource, build_evaluation_settings, open_source
from portable.data.stream import StreamSamples
from portable.data.tokens import tokenize
from portable.errors import MultipleMistakesError, RunError, UserError
from tests import hub_datasets
from tests.object_store import ObjectStore
from tests.portable.data_support import read_sample, source, word_level, write_jsonl
from tests.portable.test_data_contract import KINDS, TEXTS, lines

FILES, RECORDS, LENGTH = 9, 30, 16


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Write files of different lengths. Every word names its file and record."""
    folder = tmp_path / "files"
    folder.mkdir()
    for file in range(FILES):
        rows = ({"text": f"f{file}r{r} " * (4 + (r * 7 + file) % 20)} for r in range(RECORDS + 5 * file))
        write_jsonl(folder / f"part-{file}.jsonl", rows)
    return folder


GIVEN: dict[str, Any] = {"stream": True, "seq_len": LENGTH, "eval_fraction": 0.0}


def settings(files: Path, **more: Any) -> DataConfig:
    places = {"source": str(files / "*.jsonl"), "cache_dir": str(files.parent / "cache"), "vocab_size": 400}
    return DataConfig(**{**GIVEN, **places, **more})


def opened(files: Path, **more: Any) -> StreamSamples:
    found = build_data(settings(files, **more)).train
    assert isinstance(found, StreamSamples)
    found._processes = 0  # only tests of the limit set it
    return found


def length(stream: Any) -> int:
    """Return the number of samples of an epoch, which is known after all files were read."""
    while stream._count_epoch_samples() is None:
        stream.locate_sample(stream._ends[-1] if stream._ends else 0, 0)
    return int(stream._count_epoch_samples())


def ids(stream: Any, first: int, count: int) -> list[EpochIndex]:
    return [stream.locate_sample(position, 0) for position in range(first, first + count)]


# -- the order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 20])
def test_stream_epoch_has_every_sample_once(files: Path, window: int) -> None:
    stream = opened(files, shuffle_window=window)
    total = length(stream)
    first = ids(stream, 0, total)
    whole = {(0, k << 32 | n) for k, (length, _) in stream._manifest.items() for n in range(length)}
    assert total == len(whole) and set(first) == whole and stream.count_epochs(total) == 1
    second = ids(stream, total, total)
    assert {(1, index) for _, index in whole} == set(second)
    assert [index for _, index in first] != [index for _, index in second]
    order = [index >> 32 for _, index in first]
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes == FILES - 1 if window == 1 else changes > 3 * FILES


@pytest.fixture(params=["stream", "mixture"])
def uneven_files(request: pytest.FixtureRequest, files: Path) -> dict[str, Any]:
    """Make a file too short for a sample, and one with only short texts. Return the sources as settings."""
    write_jsonl(files / "part-0.jsonl", [{"text": "a"}])
    write_jsonl(files / "part-1.jsonl", [{"text": "a"}] * 90)
    if request.param == "stream":
        return {}
    other = write_jsonl(files.parent / "other.jsonl", [{"text": "b " * 30}] * 50)
    web, plain = {"name": "web", "source": str(files / "*.jsonl")}, {"name": "plain", "source": str(other)}
    return {"source": None, "sources": ({**web, "weight": 2}, {**plain, "weight": 1, "stream": False})}


@pytest.mark.parametrize("packing", [True, False, "documents"])
def test_stream_trial_samples_fill_large_batch(
    packing: Any, uneven_files: dict[str, Any], files: Path
) -> None:
    for seed in range(4):  # different shards come first
        samples = build_data(settings(files, packing=packing, **uneven_files), seed=seed).train
        for count in (1, 300):
            batch = samples.build_batch(samples.list_trial_samples(count))
            assert batch["input_ids"].shape == (count, LENGTH)
        samples.close()


def test_stream_packs_documents_in_batch_of_several_shards(uneven_files: dict[str, Any], files: Path) -> None:
    packed = {"packing": "documents", "seq_len": 64, "shuffle_window": FILES}
    samples = build_data(settings(files, **packed, **uneven_files)).train
    indices = [samples.locate_sample(position, 0) for position in range(60)]
    batch = samples.build_batch(indices)
    widths = set()
    for row, index in enumerate(indices):
        single = samples.build_batch([index])
        widths.add(single["document_lengths"].shape[1])
        for name, values in single.items():
            padding = batch[name][row].numel() - values.numel()
            assert batch[name][row].flatten().tolist() == values.flatten().tolist() + [0] * padding
    samples.close()
    assert len(widths) > 1


def test_stream_resume_does_not_read_consumed_files(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = opened(files)
    position = 500
    expected = ids(stream, position, 40)
    read: list[str] = []
    unchanged = FileRangeSource.check_unchanged

    def counted(self: FileRangeSource) -> Any:
        read.append(self.name)
        return unchanged(self)

    monkeypatch.setattr(FileRangeSource, "check_unchanged", counted)
    other = opened(files, cache_dir=str(files.parent / "other"))
    first = len(read)  # the shard that defines the columns
    other.load_state_dict(stream.state_dict())
    assert ids(other, position, 40) == expected
    other.build_batch(expected)
    needed = {index >> 32 for _, index in expected}
    assert first == 1 and len(read) - first <= len(needed)


# -- the disk -----------------------------------------------------------------------------------------------


def test_stream_cache_limit_bounds_disk_usage(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs fit into about three shards of disk space, with the same samples as without a limit."""
    free = opened(files, cache_dir=str(files.parent / "free"))
    largest = max(_sizes(files.parent / "free"))
    limited = opened(files, cache_limit=3 * largest / 1e9)
    limited._processes = 1
    monkeypatch.setattr(StreamSamples, "_request_shards_ahead", lambda *_: None)
    most = 0
    for position in range(0, 2600, 13):
        place = limited.locate_sample(position, 0)
        assert place == free.locate_sample(position, 0)
        first, second = (read_sample(stream, place.sample_index) for stream in (limited, free))
        assert first["input_ids"].tolist() == second["input_ids"].tolist()
        most = max(most, sum(_sizes(files.parent / "cache")))
    assert len(_sizes(files.parent / "free")) == FILES
    assert most <= 5 * largest  # the newest shard may exceed the limit


def _sizes(cache: Path) -> list[int]:
    folders = [one for one in (cache / "streams" / "tokens").iterdir() if one.is_dir()]
    return [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]


# -- faults -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [lambda text: text.replace("r3 ", "r4 "), lambda _: '{"text": ""}\n'])
def test_stream_rejects_changed_file(change: Callable[[str], str], files: Path) -> None:
    stream = opened(files, cache_limit=1e-9)
    ids(stream, 0, 900)
    shard = stream.locate_sample(0, 0)[1] >> 32
    file = files / f"part-{shard}.jsonl"
    file.write_text(change(file.read_text()))
    shutil.rmtree(files.parent / "cache" / "streams" / "tokens")
    stream._open.clear()
    with pytest.raises(RunError, match=rf"part-{shard}.jsonl has changed since the run read the file"):
        read_sample(stream, stream.locate_sample(0, 0).sample_index)
    other = opened(files, cache_dir=str(files.parent / "other"))
    with pytest.raises(RunError, match="has changed since the checkpoint"):
        other.load_state_dict(stream.state_dict())


def test_stream_replaces_dead_tokenizer_process(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ids(opened(files, cache_dir=str(files.parent / "other")), 0, 900)
    stream = opened(files)
    stream._processes = 2
    monkeypatch.setattr("portable.data.tokens.tokenize.TokenizeJob.__call__", lambda *_: os._exit(3))
    assert ids(stream, 0, 900) == expected
    assert stream._ahead is not None
    stream.close()


@pytest.mark.parametrize("part_bytes", [1 << 26, 200])
def test_stream_skips_and_reports_bad_records(
    tmp_path: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a stream and in a file, the first five are listed and the rest is counted, or the run ends."""
    monkeypatch.setattr(source_kinds, "PART_BYTES", part_bytes)
    texts = [b"{broken", b'{"text": 5}', b"\xff\xfe", b"[]", b'{"txt": "x"}', b"{", b"nul"]
    bad = dict(zip((3, 9, 11, 20, 25, 30, 31), texts, strict=True))
    lines = [bad.get(n, b'{"text": "good %d words of a record"}' % n) for n in range(60)]
    path = tmp_path / "some.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    good = [json.loads(line)["text"] for n, line in enumerate(lines) if n not in bad]
    skipping = source(str(path), stream=part_bytes < 1000, cache_dir=tmp_path, on_bad_record="skip")
    assert [document.text for document in skipping.iter_documents()] == good
    assert skipping.fields.bad is not None
    skipping.fields.bad.print_skipped_count(skipping.name)
    told = capfd.readouterr().err.splitlines()
    place = ":4" if part_bytes > 1000 else ""
    assert [line for line in told if f"{place}: is not valid JSON" in line and "warning: skipped" in line]
    assert len([line for line in told if "skipped: " in line]) == 5
    assert f"warning: {path}: 7 bad records were skipped (data.on_bad_record: skip)" in told
    assert not any("on_bad_record to skip" in line for line in told)
    with pytest.raises(UserError, match="not valid JSON") as error:
        list(source(str(path), stream=part_bytes < 1000, cache_dir=tmp_path).iter_documents())
    last_line = error.value.lines[-1] if isinstance(error.value, MultipleMistakesError) else str(error.value)
    assert last_line.endswith(", or set data.on_bad_record to skip")


COUNT = 1600
"""Samples beyond an epoch: every file was read."""


def rows(found: StreamSamples, count: int = COUNT) -> list[list[int]]:
    return found.build_batch(ids(found, 0, count))["input_ids"].tolist()


@pytest.fixture
def expected(files: Path) -> list[list[int]]:
    found = rows(opened(files, cache_dir=str(files.parent / "expected")))
    assert len(found) == COUNT
    return found


# -- stores -------------------------------------------------------------------------------------------------


def test_stream_survives_store_failures(files: Path, expected: list[list[int]], s3: ObjectStore) -> None:
    """Every third request fails, or its response is cut off."""
    s3.put_tree(files, "data")
    found = opened(files, source=s3.url("data/*.jsonl"))
    found._processes = 1
    s3.fail(status=503, method="GET", key=".jsonl", every=3)
    s3.fail(cut=100, method="GET", key=".jsonl", every=5)
    assert rows(found) == expected
    found.close()


def test_stream_ends_if_store_is_unavailable_and_resumes(
    files: Path, expected: list[list[int]], s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.put_tree(files, "data")
    found = opened(files, source=s3.url("data/*.jsonl"))
    monkeypatch.setenv("PORTABLE_STORAGE_MINUTES", "0.01")
    s3.fail(status=503, method="GET", key=".jsonl")
    with pytest.raises(
        RunError, match=r"^data.source: .*cannot read, because \d+ attempts? failed"
    ) as refused:
        rows(found)
    assert "\n" not in str(refused.value)
    s3.heal()
    assert rows(found) == expected


def test_stream_rejects_object_changed_since_listing(files: Path, s3: ObjectStore) -> None:
    s3.put_tree(files, "data")
    found = opened(files, source=s3.url("data/*.jsonl"))
    name = f"part-{int(found._order[-1])}.jsonl"
    s3.put(f"data/{name}", (files / name).read_bytes().replace(b"r3 ", b"r4 "))
    with pytest.raises(UserError, match=rf"{name}.*changed while it was being read"):
        rows(found)
    s3.delete(f"data/{name}")
    with pytest.raises(UserError, match=rf"{name}.*cannot be read"):
        rows(found)


def test_train_loader_reports_killed_worker(files: Path) -> None:
    loader = TrainLoader(opened(files), seed=0, global_batch_size=4, micro_batch_size=4, num_workers=1)
    batches = iter(loader)
    next(batches)
    generator: Any = batches._batches
    of_torch = generator.gi_frame.f_locals["batches"]
    with contextlib.suppress(AttributeError):  # an event with a lock, with which the process may die
        of_torch._workers_done_event._cond.acquire()
    os.kill(of_torch._workers[0].pid, signal.SIGKILL)
    of_torch._workers[0].join(60)
    with pytest.raises(RunError, match=r"data.num_workers: a process that prepares batches was killed"):
        for _ in range(50):
            next(batches)
    assert of_torch._shutdown
    assert [worker.join(60) or worker.is_alive() for worker in of_torch._workers] == [False]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 160 KiB, about the size of the tokens of five files."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = ["mount", "-t", "tmpfs", "-o", "size=160k", "portable-test", str(folder)]
    if subprocess.run(mounted, capture_output=True).returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_stream_on_full_disk_removes_unused_shards(
    files: Path, expected: list[list[int]], small_disk: Path
) -> None:
    build_data(settings(files)).tokenizer.save_pretrained(files.parent / "tokenizer")
    given = {"tokenizer": str(files.parent / "tokenizer"), "vocab_size": None, "cache_dir": str(small_disk)}
    found = opened(files, **given, cache_limit=1.0)
    assert rows(found) == expected
    shutil.rmtree(small_disk / "streams")
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 4096)
    with pytest.raises(UserError, match=r"^data.cache_dir: cannot write to .* \(.*No space left") as refused:
        opened(files, **given, cache_limit=1.0)
    assert "\n" not in str(refused.value)


def test_streams_share_cache_without_interference(
    files: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stream removes shards that the other may need next, because the limit is very small."""
    monkeypatch.setattr(StreamSamples, "_request_shards_ahead", lambda *_: None)
    runs = [opened(files, cache_limit=1e-6) for _ in range(2)]
    found: list[list[list[int]]] = [[], []]
    for run in runs:
        run._processes = 1  # enforces the limit

    def take(number: int) -> None:
        for position in range(0, 400, 8):
            at = position if number == 0 else 392 - position
            found[number] += runs[number].build_batch(ids(runs[number], at, 8))["input_ids"].tolist()

    threads = [threading.Thread(target=take, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    backwards = [row for at in range(392, -1, -8) for row in expected[at : at + 8]]
    assert found == [expected[:400], backwards]


def test_stream_ignores_incomplete_cache(files: Path, expected: list[list[int]]) -> None:
    """The cache has drafts of killed writers, and a folder without its last file."""
    first = opened(files)
    assert rows(first) == expected
    tokens = files.parent / "cache" / "streams" / "tokens"
    folders = sorted(one for one in tokens.iterdir() if one.is_dir())
    (folders[0] / "meta.json").unlink()
    (folders[1] / "text.bin").write_bytes((folders[1] / "text.bin").read_bytes()[:-4])
    folders[2].rename(folders[2].with_name(f"{folders[2].name}.draft"))
    damaged = bytearray((folders[3] / "text.bin").read_bytes())
    damaged[7] ^= 1
    (folders[3] / "text.bin").write_bytes(damaged)
    assert rows(opened(files)) == expected


# -- parts of .jsonl and .parquet, compressed files, object stores and hub datasets ---------------------


def parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def stream(name: str, folder: Path, **data: Any) -> StreamSource:
    found = source(name, stream=True, cache_dir=folder / "cache", **data)
    assert isinstance(found, StreamSource)
    return found


def texts_of(files: StreamSource) -> list[str]:
    parts = [part.open_source(files.settings) for part in files.shards]
    return [found.text for part in parts for found in part.iter_documents()]


@pytest.mark.parametrize("name", ["a.parquet", "b.jsonl"])
def test_stream_reads_only_bytes_of_object_part(
    name: str, tmp_path: Path, s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_kinds, "PART_BYTES", 100_000)
    monkeypatch.setattr(file_parts, "_BUFFER", 10_000)
    texts = [random.Random(number).randbytes(150).hex() for number in range(3000)]
    path = tmp_path / name
    if name == "a.parquet":
        parquet(path, {"text": texts, "unused": texts}, row_group_size=100, compression="none")
    else:
        path.write_bytes(lines(texts))
    s3.put_tree(tmp_path, "data")
    files = stream(s3.url(f"data/{name}"), tmp_path)
    part = files.shards[5].open_source(files.settings)
    found = [document.text for document in part.iter_documents()]
    assert found and texts[texts.index(found[0]) :][: len(found)] == found
    # Twice the end of a .parquet file, which is its table of contents.
    assert s3.bytes_out(name) <= 120_000 + 2 * 65_536 * (name == "a.parquet")


def test_stream_reports_damaged_file_in_one_line(tmp_path: Path) -> None:
    for name, said in (
        ("a.jsonl.gz", r"a.jsonl.gz: cannot be decompressed .*; copy the file again"),
        ("a.jsonl.zst", r"a.jsonl.zst: cannot be read \(.*Truncated compressed stream"),
        ("a.parquet", r"a.parquet: is not a readable .parquet file \(.*\); copy the file again"),
    ):
        path = tmp_path / name
        KINDS[name](path, TEXTS)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(UserError, match=said) as refused:
            texts_of(stream(str(path), tmp_path))
        assert "\n" not in str(refused.value)
    whole = parquet(tmp_path / "f.parquet", {"text": TEXTS}, write_page_checksum=True)
    damaged = bytearray(whole.read_bytes())
    damaged[3000] ^= 255
    (tmp_path / "f.parquet").write_bytes(damaged)
    with pytest.raises(UserError, match=r"f.parquet: .*(CRC|checksum)"):
        texts_of(stream(str(tmp_path / "f.parquet"), tmp_path))


@pytest.mark.exhaustive
def test_stream_reads_hub_dataset_by_ranges(tmp_path: Path) -> None:
    """The real client, in a separate process, reads Parquet and JSONL shards of a split at one revision."""
    (tmp_path / "data").mkdir()
    half = len(TEXTS) // 2
    for number, texts in enumerate((TEXTS[:half], TEXTS[half:])):
        name = tmp_path / "data" / f"train-0000{number}-of-00002.parquet"
        parquet(name, {"text": texts}, row_group_size=100, compression="none")
    contents = {f"data/{path.name}": path.read_bytes() for path in (tmp_path / "data").iterdir()}
    contents = {"README.md": b"# a dataset\n", **dict(sorted(contents.items()))}
    contents["data/test-00000-of-00001.parquet"] = contents["data/train-00000-of-00002.parquet"]
    requests: list[tuple[str, str]] = []
    with hub_datasets.serving("lab/some", contents, requests) as url:

        def read(split: str, home: str = "home") -> dict[str, Any]:
            environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / home)}
            environment |= {"HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
            command = [sys.executable, "-m", "tests.hub_datasets", url, "lab/some", str(tmp_path), split]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
            return found

        found = read("train")["texts"]
        assert len(found) > 2 and [text for part in found for text in part] == TEXTS
        whole = [path for path, span in requests if path.startswith("GET") and "parquet" in path and not span]
        assert whole == []
        assert (
            "has no files for the split 'other'; choose another split (the splits are: train, test)"
            in read("other")["error"]
        )
        contents["README.md"] = b"---\nconfigs:\n- config_name: default\n  data_files: /etc/passwd\n---\n"
        assert "'/etc/passwd' leads out of the folder" in read("train", "other home")["error"]


def test_cache_key_depends_on_document_settings(tmp_path: Path) -> None:
    """Otherwise, tokens made with other settings would be used, for a stream, a part of it or a file."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(TEXTS))
    task: dict[str, str] = {"target_field": "seq2seq-lm", "source_prefix": "seq2seq-lm"}
    task |= {"label_field": "sequence-classification", "text_pair_field": "sequence-classification"}
    changes: list[tuple[str, Any]] = [
        *(("text_field", "a"), ("target_field", "a"), ("label_field", "a"), ("text_split", "line")),
        *(("text_pair_field", "a"), ("source_prefix", "a"), ("on_bad_record", "skip"), ("columns", ("a",))),
        *(("format", "messages"), ("roles_to_train", ("user",)), ("columns", {"text": "a"})),
    ]
    # The counter of blank records does not change documents.
    assert len(changes) == len(dataclasses.fields(Fields)) - 1
    for parts in (None, False, True):

        def key(task: str = "causal-lm", parts: bool | None = parts, **data: Any) -> str:
            opened = source(str(path), task, stream=parts is not None, cache_dir=tmp_path, **data)
            if parts:
                first_shard: Any = opened
                opened = first_shard.shards[0].open_source(opened.settings)
            return opened.cache_key

        keys = {key(task.get(name, "causal-lm"), **{name: value}) for name, value in changes}
        assert len({*keys, key()}) == len(changes) + 1
        assert key(format="auto") == key()


# -- evaluation data of a stream ----------------------------------------------------------------------------


def write_litdata(folder: Path, tokens: list[int]) -> Path:
    """Write one litdata chunk with a single sample."""
    folder.mkdir(exist_ok=True)
    sample = np.array(tokens, "<u2").tobytes()
    header = np.array([1, 12, 12 + len(sample)], "<u4").tobytes()
    (folder / "chunk-0-0.bin").write_bytes(header + sample)
    config = {"data_format": ["no_header_tensor:20"], "compression": None, "encryption": None}
    index = {"chunks": [{"filename": "chunk-0-0.bin"}], "config": config}
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def write_token_file(path: Path, tokens: list[int]) -> Path:
    np.array(tokens, "<u2").tofile(path)
    return path


def save_tokenizer(folder: Path) -> str:
    word_level(["<e>", *"abcdefgh"], eos_token="<e>").save_pretrained(folder)
    return str(folder)


def read_eval_tokens(data: RunData) -> list[int]:
    samples = data.evals[""]
    rows = [read_sample(samples, number)["input_ids"].tolist() for number in range(len(samples))]
    return [token for row in rows for token in row]


def test_stream_evaluation_follows_replaced_file(files: Path) -> None:
    """The new file has the same name and size."""
    path = files.parent / "held.jsonl"
    fingerprints, tokens = [], []
    for word in "ab":
        write_jsonl(path, [{"text": f"{word} " * 20}] * 5)
        data = build_data(settings(files, eval={"source": str(path)}, tokenizer=save_tokenizer(files / "t")))
        fingerprints.append(data.eval_fingerprints[""])
        tokens.append(read_eval_tokens(data))
    assert fingerprints[0] != fingerprints[1] and tokens[0] != tokens[1]
    # The disk limit of the stream must not delete tokens that the run evaluates on.
    assert len(list(files.parent.glob("cache/tokens/*/meta.json"))) == 2


@pytest.mark.parametrize("kind", ["token file", "litdata"])
def test_stream_evaluates_on_tokens(kind: str, tmp_path: Path) -> None:
    numbers = [list(range(1, 8)) * 6, list(range(7, 0, -1)) * 6]
    names = ["training.bin", "evaluation.bin"]
    write = write_token_file if kind == "token file" else write_litdata
    training, evaluation = (
        str(write(tmp_path / name, row)) for name, row in zip(names, numbers, strict=True)
    )
    data = settings(
        tmp_path, source=training, eval={"source": evaluation}, tokenizer=save_tokenizer(tmp_path / "t")
    )
    assert inspect_data_sizes(data).evals[""].num_samples is None
    assert read_eval_tokens(build_data(data)) == numbers[1][:32]
    assert inspect_data_sizes(data).evals[""].num_samples == 2


def test_stream_evaluation_rejects_training_data_and_portable_data(files: Path) -> None:
    tokenizer = save_tokenizer(files.parent / "t")
    copies = files.parent / "copies"
    shutil.copytree(files, copies)
    for folder in (files, copies):
        evaluation = {"source": str(folder / "*.jsonl")}
        with pytest.raises(UserError, match=r"data.eval: contains the same data as the training data"):
            build_data(settings(files, eval=evaluation, tokenizer=tokenizer))
    write_jsonl(copies / "part-3.jsonl", [{"text": "x" * (len((files / "part-3.jsonl").read_text()) - 13)}])
    sizes = [(folder / "part-3.jsonl").stat().st_size for folder in (files, copies)]
    assert sizes[0] == sizes[1]
    build_data(settings(files, eval={"source": str(copies / "*.jsonl")}, tokenizer=tokenizer))
    (copies / INDEX_FILE).write_text("{}")
    with pytest.raises(
        UserError, match=r"data.eval.source: .* output of portable-data, which can only be tr"
    ):
        build_data(settings(files, eval={"source": str(copies)}, tokenizer=tokenizer))


def test_stream_evaluation_reads_hub_files_of_only_one_split(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading the dataset would download the training split as well."""
    listed: list[tuple[str, str | None, str]] = []

    def list_files(*arguments: Any) -> dict[Path, None]:
        listed.append(arguments)
        return dict.fromkeys(sorted(files.glob("*.jsonl"))[:2] if arguments[2] == "test" else [])

    monkeypatch.setattr(hub_dataset, "list_hub_split_files", list_files)
    evaluation = SourceConfig(split="test", max_samples=3)
    data = DataConfig(source="lab/some", stream=True, eval=evaluation, format="text")
    opened = open_source(build_evaluation_settings(data, "causal-lm")[""])
    assert [document.text.split()[0] for document in opened.iter_documents()] == ["f0r0", "f0r1", "f0r2"]
    assert listed == [("lab/some", None, "test")]


def test_mixture_accepts_streams_of_equal_names_and_sizes(tmp_path: Path) -> None:
    names = {name: str(write_litdata(tmp_path / name, [number] * 60)) for number, name in enumerate("abc")}
    shutil.copytree(names["b"], tmp_path / "d")
    common = {"source": None, "tokenizer": save_tokenizer(tmp_path / "t")}

    def build(folders: str) -> RunData:
        sources = [{"name": name, "source": str(tmp_path / name), "weight": 1} for name in folders]
        return build_data(settings(tmp_path, **common, sources=sources))

    mixture = build("abc")
    samples = mixture.train
    indices = [samples.locate_sample(position, 0) for position in range(9)]
    assert {int(samples.build_batch([index])["input_ids"][0, 0]) for index in indices} == {0, 1, 2}
    with pytest.raises(UserError, match=r"data.sources.d: has the same data as data.sources.b"):
        build("abcd")


def test_stream_preview_shows_trained_share_without_sample_count(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a b c", "completion": "d e"}] * 9)
    common = {"source": str(path), "format": "auto", "tokenizer": save_tokenizer(tmp_path / "t")}
    previews = [
        build_preview(build_data(settings(tmp_path, **common, stream=stream)), 1, 0)
        for stream in (True, False)
    ]
    streamed, expected = (preview.facts for preview in previews)
    assert streamed["samples"] == "an unknown number for training, 16 tokens each"
    assert "%" in expected["trained"]
    for name in ("documents", "tokens", "trained"):
        assert streamed[name] == f"{expected[name]} (only the first part of each stream)"


@pytest.mark.parametrize("packing", [False, "documents"])
def test_stream_skips_shards_without_samples(packing: bool | str, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path / "t")
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(4):
        write_jsonl(
            folder / f"{number}.jsonl",
            [{"text": "a b c"}] * 9 if number == 2 else [{"text": "a " * 99}],
        )
    built = settings(folder, truncation="drop", packing=packing, tokenizer=tokenizer)
    data = build_data(built)
    assert {data.train.get_source_name(data.train.locate_sample(n, 0)[1]) for n in range(9)} == {
        str(folder / "2.jsonl")
    }
    (folder / "2.jsonl").unlink()
    with pytest.raises(UserError, match="no sample is left"):
        build_data(built)


# -- made ahead of time: in parallel, resumed, on several machines, in a store ---------------------------


@pytest.fixture
def config(files: Path, tmp_path: Path) -> Path:
    """Write a config with nine files, one of them without text."""
    write_jsonl(files / "part-4.jsonl", [{"text": " "}])
    build_data(settings(files)).tokenizer.save_pretrained(tmp_path / "tokenizer")
    given = {**GIVEN, "source": str(files / "*.jsonl"), "tokenizer": str(tmp_path / "tokenizer")}
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"data": {**given, "cache_dir": str(tmp_path / "cache")}}))
    return path


def sorted_rows(found: StreamSamples, count: int) -> list[list[int]]:
    return sorted(found.build_batch([place])["input_ids"][0].tolist() for place in ids(found, 0, count))


def test_pretokenize_gives_samples_of_text(
    config: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on prepared tokens tokenizes nothing, has a known length, and needs no tokenizer setting."""
    out = tmp_path / "tokens"
    assert main(["--config", str(config), "--out", str(out), "--processes", "1"]) == 0
    of_text = opened(files, tokenizer=str(tmp_path / "tokenizer"), vocab_size=None)
    total = length(of_text)
    expected = sorted_rows(of_text, total)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a text was tokenized")

    monkeypatch.setattr(tokenize, "_encode_batch", refuse)
    prepared: dict[str, Any] = {"source": str(out), "cache_dir": str(tmp_path / "other"), "vocab_size": None}
    train = opened(files, **prepared)
    assert train._count_epoch_samples() == total and train.count_epochs(total) == 1
    assert sorted_rows(train, total) == expected
    with pytest.raises(UserError, match=r"data.format: .* was created from text"):
        opened(files, **prepared, format="messages")


def test_pretokenize_resumes_after_kill(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete shards stay, and damaged or partial ones are made again.

    The result equals the result of an uninterrupted command.
    """
    whole, out = tmp_path / "whole", tmp_path / "tokens"
    command = ["--config", str(config), "--processes", "1", "--out"]
    assert main([*command, str(whole)]) == 0
    made: list[int] = []
    stops_at = {5}
    write = pretokenize._ShardWriter.__call__

    def stops(self: Any, item: Any) -> Any:
        if len(made) in stops_at:
            raise KeyboardInterrupt
        made.append(item[0])
        return write(self, item)

    monkeypatch.setattr(pretokenize._ShardWriter, "__call__", stops)
    main([*command, str(out)])
    assert made == [0, 1, 2, 3, 4] and not (out / INDEX_FILE).exists()
    (out / "shards" / "000001" / "text.bin").write_bytes(b"half")
    (out / "shards" / "000003" / "meta.json").unlink()
    made.clear()
    stops_at.clear()
    assert main([*command, str(out)]) == 0
    assert made == [1, 3, 5, 6, 7, 8]
    assert (out / INDEX_FILE).read_text() == (whole / INDEX_FILE).read_text()
    assert not (out / ".making").exists()
    made.clear()
    assert main([*command, str(out)]) == 0 and made == []


def test_pretokenize_divides_work_among_machines_and_processes(
    config: Path, files: Path, tmp_path: Path, s3: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """The output is a bucket, which is read with a limited cache."""
    whole = tmp_path / "whole"
    command = ["--config", str(config), "--out"]
    assert main([*command, str(whole), "--processes", "1"]) == 0
    url = s3.url("tokens")
    for part in ("2/2", "1/2"):
        assert main([*command, url, "--processes", "2", "--part", part]) == 0
    said = capsys.readouterr().out
    assert "left to other machines" in said.splitlines()[-2] and "left" not in said.splitlines()[-1]
    local, remote = (
        opened(files, source=source, cache_dir=str(tmp_path / name), vocab_size=None)
        for name, source in (("local", str(whole)), ("remote", url))
    )
    assert sorted_rows(remote, 700) == sorted_rows(local, 700)


def test_pretokenize_rejects_bad_arguments(
    config: Path, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    out, new = str(tmp_path / "tokens"), str(tmp_path / "new")

    def refused(said: str, *arguments: str) -> None:
        assert main(["--config", str(config), "--processes", "1", *arguments]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and said in told and told.count("\n") == 1, told

    refused("no field 'other'", "--out", new, "--data.text_field", "other")
    refused("is not empty", "--out", str(tmp_path / "full"))
    refused("data.stream: data.source names no files", "--out", new, "--data.source", "null")
    assert main(["--config", str(config), "--processes", "1", "--out", out]) == 0
    refused("--part: '3/2' does not have the form I/N", "--out", out, "--part", "3/2")
    write_jsonl(files / "part-9.jsonl", [{"text": "more"}])
    refused("contains output that does not match", "--out", out)
    shutil.rmtree(tmp_path / "tokens" / "shards" / "000000")
    with pytest.raises(UserError, match=r"cannot be read .*\); run portable-data again"):
        sorted_rows(opened(files, source=out, vocab_size=None), 700)
