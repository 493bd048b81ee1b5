"""The files of a stream: parts of .jsonl and .parquet, compressed files, object stores and hub data sets."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from portable.config.sections import DataConfig
from portable.data.dataset import build_data
from portable.data.sources import file_parts, opening
from portable.data.sources.documents import Fields
from portable.data.sources.opening import StreamedFiles
from portable.data.stream import Stream
from portable.errors import UserError
from tests import hub_datasets
from tests.object_store import ObjectStore
from tests.portable.data_support import source
from tests.portable.order_support import write_tokenizer
from tests.portable.test_data_contract import KINDS, TEXTS, lines


def parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, **options)
    return path


def stream(name: str, folder: Path, **data: Any) -> StreamedFiles:
    found = source(name, stream=True, cache_dir=folder / "cache", **data)
    assert isinstance(found, StreamedFiles)
    return found


def texts_of(files: StreamedFiles) -> list[str]:
    parts = [part.open(files.settings) for part in files.parts]
    return [found.text for part in parts for found in part.documents()]


@pytest.mark.parametrize("name", ["a.parquet", "b.jsonl"])
def test_a_part_of_an_object_costs_its_own_bytes(
    name: str, tmp_path: Path, s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "PART_BYTES", 100_000)
    monkeypatch.setattr(file_parts, "_BUFFER", 10_000)
    texts = [random.Random(number).randbytes(150).hex() for number in range(3000)]
    path = tmp_path / name
    if name == "a.parquet":
        parquet(path, {"text": texts, "unused": texts}, row_group_size=100, compression="none")
    else:
        path.write_bytes(lines(texts))
    s3.put_tree(tmp_path, "data")
    files = stream(s3.url(f"data/{name}"), tmp_path)
    part = files.parts[5].open(files.settings)
    found = [document.text for document in part.documents()]
    assert found and texts[texts.index(found[0]) :][: len(found)] == found
    # Twice the end of a .parquet file, which is its table of contents.
    assert s3.bytes_out(name) <= 120_000 + 2 * 65_536 * (name == "a.parquet")


def test_damaged_files_end_in_one_line(tmp_path: Path) -> None:
    for name, said in (
        ("a.jsonl.gz", r"a.jsonl.gz: Compressed file ended before .*; copy the file again"),
        ("a.jsonl.zst", r"a.jsonl.zst: cannot read it: Truncated compressed stream"),
        ("a.parquet", r"a.parquet: not a readable .parquet file \(.*\); copy it again"),
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


def test_a_run_on_a_large_store_begins_at_once(
    tmp_path: Path, s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a listing, here of two pages, and of one object the part that comes first."""
    monkeypatch.setattr(opening, "PART_BYTES", 10_000)
    content = lines([f"line {number} of many" for number in range(1000)])
    for number in range(1100):
        s3.put(f"data/{number:04}.jsonl", content)
    tokenizer = str(write_tokenizer(tmp_path / "tokenizer"))
    given = {"tokenizer": tokenizer, "seq_len": 16, "eval_fraction": 0.0, "cache_dir": str(tmp_path)}
    s3.forget()
    data = build_data(DataConfig(source=s3.url("data/*.jsonl"), stream=True, **given))  # type: ignore[arg-type]
    assert isinstance(data.train, Stream)
    data.train._processes = 0
    data.train.batch([data.train.locate(0, 0)])
    assert s3.count() < 2 + 15  # pages of the list, and ranges
    assert s3.bytes_out(".jsonl") < 60_000


@pytest.mark.exhaustive
def test_a_hub_dataset_is_read_by_ranges(tmp_path: Path) -> None:
    """Parquet and JSONL shards of a split, at one revision, by the real client in a process of its own."""
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

        def read(split: str) -> dict[str, Any]:
            environment = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home")}
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
        assert "has no split 'other' of files; it has train, test" in read("other")["error"]


def test_whatever_changes_the_documents_changes_the_key(tmp_path: Path) -> None:
    """Of a stream, of a part of it and of a file; else tokens made otherwise would be taken for these."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(TEXTS))
    task: dict[str, str] = {"target_field": "seq2seq-lm", "source_prefix": "seq2seq-lm"}
    task |= {"label_field": "sequence-classification", "text_pair_field": "sequence-classification"}
    changes: dict[str, Any] = {
        "text_field": "a", "target_field": "a", "label_field": "a", "text_split": "line",
        "text_pair_field": "a", "source_prefix": "a", "on_bad_record": "skip", "columns": ("a",),
        "format": "messages", "roles_to_train": ("user",),
    }  # fmt: skip
    assert len(changes) == len(dataclasses.fields(Fields))
    for parts in (None, False, True):

        def key(task: str = "causal-lm", parts: bool | None = parts, **data: Any) -> str:
            opened = source(str(path), task, stream=parts is not None, cache_dir=tmp_path, **data)
            return opened.parts[0].open(opened.settings).key if parts else opened.key  # type: ignore[attr-defined]

        keys = {key(task.get(name, "causal-lm"), **{name: value}) for name, value in changes.items()}
        assert len({*keys, key()}) == len(changes) + 1
        assert key(format="auto") == key()
