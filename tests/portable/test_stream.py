"""Streams: files tokenized while the run trains, in one order, within a limit, through faults."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from portable.config.sections import DataConfig
from portable.data.dataset import build_data
from portable.data.sources import opening
from portable.data.sources.file_parts import FilePart
from portable.data.stream import Stream
from portable.errors import RunError, UserError
from tests.portable.data_support import source, write_jsonl

FILES, RECORDS, LENGTH = 9, 30, 16


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Files of different lengths; every word names its file and record."""
    folder = tmp_path / "files"
    folder.mkdir()
    for file in range(FILES):
        rows = ({"text": f"f{file}r{r} " * (4 + (r * 7 + file) % 20)} for r in range(RECORDS + 5 * file))
        write_jsonl(folder / f"part-{file}.jsonl", rows)
    return folder


def settings(files: Path, **more: Any) -> DataConfig:
    given: dict[str, Any] = {
        "source": str(files / "*.jsonl"),
        "stream": True,
        "seq_len": LENGTH,
        "vocab_size": 400,
        "eval_fraction": 0.0,
        "cache_dir": str(files.parent / "cache"),
    }
    return DataConfig(**(given | more))


def opened(files: Path, **more: Any) -> Stream:
    found = build_data(settings(files, **more)).train
    assert isinstance(found, Stream)
    found._processes = 0  # tests of it alone set it
    return found


def length(stream: Any) -> int:
    """The samples of an epoch, known once all files were read."""
    while stream._whole() is None:
        stream.locate(stream._ends[-1] if stream._ends else 0, 0)
    return int(stream._whole())


def ids(stream: Any, first: int, count: int) -> list[tuple[int, int]]:
    return [stream.locate(position, 0) for position in range(first, first + count)]


# -- the order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 20])
def test_an_epoch_has_every_sample_once(files: Path, window: int) -> None:
    stream = opened(files, shuffle_window=window)
    total = length(stream)
    first = ids(stream, 0, total)
    whole = {(0, k << 32 | n) for k, (length, _) in stream._manifest.items() for n in range(length)}
    assert total == len(whole) and set(first) == whole and stream.epochs(total) == 1
    second = ids(stream, total, total)
    assert {(1, index) for _, index in whole} == set(second)
    assert [index for _, index in first] != [index for _, index in second]
    order = [index >> 32 for _, index in first]
    changes = sum(a != b for a, b in itertools.pairwise(order))
    assert changes == FILES - 1 if window == 1 else changes > 3 * FILES


def test_a_resume_reads_nothing_that_was_consumed(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = opened(files)
    position = 500
    expected = ids(stream, position, 40)
    read: list[str] = []
    unchanged = FilePart.unchanged

    def counted(self: FilePart) -> Any:
        read.append(self.name)
        return unchanged(self)

    monkeypatch.setattr(FilePart, "unchanged", counted)
    other = opened(files, cache_dir=str(files.parent / "other"))
    first = len(read)  # the shard that tells the columns
    other.adopt(stream.state())
    assert ids(other, position, 40) == expected
    other.batch(expected)
    needed = {index >> 32 for _, index in expected}
    assert first == 1 and len(read) - first <= len(needed)


# -- the disk -----------------------------------------------------------------------------------------------


def test_no_more_is_on_disk_than_the_limit(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs within the room of about three shards, with the same samples as without a limit."""
    free = opened(files, cache_dir=str(files.parent / "free"))
    largest = max(_sizes(files.parent / "free"))
    limited = opened(files, cache_limit=3 * largest / 1e9)
    limited._processes = 1
    monkeypatch.setattr(Stream, "_read_ahead", lambda *_: None)
    most = 0
    for position in range(0, 2600, 13):
        place = limited.locate(position, 0)
        assert place == free.locate(position, 0)
        assert limited[place[1]]["input_ids"].tolist() == free[place[1]]["input_ids"].tolist()
        most = max(most, sum(_sizes(files.parent / "cache")))
    assert len(_sizes(files.parent / "free")) == FILES
    assert most <= 5 * largest  # what was just made may be beyond the limit


def _sizes(cache: Path) -> list[int]:
    folders = [one for one in (cache / "streams" / "tokens").iterdir() if one.is_dir()]
    return [sum(file.stat().st_size for file in folder.iterdir()) for folder in folders]


# -- faults -------------------------------------------------------------------------------------------------


def test_a_file_that_changed_is_refused(files: Path) -> None:
    stream = opened(files, cache_limit=1e-9)
    ids(stream, 0, 900)
    shard = stream.locate(0, 0)[1] >> 32
    file = files / f"part-{shard}.jsonl"
    text = file.read_text()
    file.write_text(text.replace("r3 ", "r4 "))
    shutil.rmtree(files.parent / "cache" / "streams" / "tokens")
    stream._open.clear()
    with pytest.raises(RunError, match=rf"part-{shard}.jsonl has changed since the run read it"):
        stream[stream.locate(0, 0)[1]]
    other = opened(files, cache_dir=str(files.parent / "other"))
    with pytest.raises(RunError, match="has changed since the checkpoint"):
        other.adopt(stream.state())


def test_a_process_that_dies_is_replaced_where_its_work_is_needed(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ids(opened(files, cache_dir=str(files.parent / "other")), 0, 900)
    stream = opened(files)
    stream._processes = 2
    monkeypatch.setattr("portable.data.tokens.tokenize.TokenizeJob.__call__", lambda *_: os._exit(3))
    assert ids(stream, 0, 900) == expected
    assert stream._ahead is not None
    stream.close()


# -- whole runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part_bytes", [1 << 26, 200])
def test_bad_records_are_skipped_and_told(
    tmp_path: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In a stream and in a file: the first five with their place, then the number; or the run ends."""
    monkeypatch.setattr(opening, "PART_BYTES", part_bytes)
    texts = [b"{broken", b'{"text": 5}', b"\xff\xfe", b"[]", b'{"txt": "x"}', b"{", b"nul"]
    bad = dict(zip((3, 9, 11, 20, 25, 30, 31), texts, strict=True))
    lines = [bad.get(n, b'{"text": "good %d words of a record"}' % n) for n in range(60)]
    path = tmp_path / "some.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    good = [json.loads(line)["text"] for n, line in enumerate(lines) if n not in bad]
    skipping = source(str(path), stream=part_bytes < 1000, cache_dir=tmp_path, on_bad_record="skip")
    assert [document.text for document in skipping.documents()] == good
    assert skipping.fields.bad is not None
    skipping.fields.bad.tell(skipping.name)
    told = capfd.readouterr().err.splitlines()
    place = ":4" if part_bytes > 1000 else ""
    assert [line for line in told if f"{place}: not a line of JSON" in line and "warning: skipped" in line]
    assert len([line for line in told if "skipped: " in line]) == 5
    assert f"warning: {path}: 7 records were skipped (data.on_bad_record)" in told
    with pytest.raises(UserError, match=r"not a line of JSON .* or set data.on_bad_record to skip"):
        list(source(str(path), stream=part_bytes < 1000, cache_dir=tmp_path).documents())
