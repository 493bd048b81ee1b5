"""Every kind of source, and a one-line error for every problem with a source."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml

from portable.data.sources import rows
from portable.data.sources.documents import Document
from portable.data.sources.hub_dataset import HubDataset
from portable.data.sources.source_kinds import StandardLibrarySource
from portable.errors import UserError
from tests.portable.data_support import settings_of, source, write_jsonl

ROWS = [
    {"text": "one", "n": 1},
    {"text": "two\nlines", "n": 2},
    {"text": "", "n": 3},
    {"text": "drei ß", "n": 4},
]
REFUSED = yaml.safe_load(Path(__file__).with_name("sources_refused.yaml").read_text("utf-8"))
TEXTS = ["one", "two\nlines", "drei ß"]


def read(name: Any, task: str = "causal-lm", **data: Any) -> list[str]:
    return [document.text for document in source(name, task, **data).iter_documents()]


def refusal(name: Any, task: str = "causal-lm", **data: Any) -> str:
    with pytest.raises(UserError) as caught:
        list(source(name, task, **data).iter_documents())
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- the standard library


def test_standard_library_source_selects_by_content(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text("assert True")
    (tmp_path / "latin.py").write_bytes(b"# \xe9")
    (tmp_path / "_sysconfigdata__linux.py").write_text("built_here = True")
    (tmp_path / "broken_link.py").symlink_to(tmp_path / "missing.py")
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.py").write_text(f"name = {name!r}")
    library = StandardLibrarySource(settings_of(), root=tmp_path)
    assert sorted(document.text for document in library.iter_documents()) == [
        f"name = {name!r}" for name in "abc"
    ]
    assert len(list(StandardLibrarySource(settings_of(max_samples=2), root=tmp_path).iter_documents())) == 2


# --- files


LINES = "first line\n  second\r\n\n\n \nthird\n\nfourth\nfifth"


def test_text_split_by_line_or_paragraph_matches_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents match the text reader of the datasets library, except for blank lines."""
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "a.txt"
    path.write_bytes(LINES.replace("\r\n", "\n").replace("\n \n", "\n\n").encode())

    def theirs(by: str) -> list[str]:
        rows = datasets.load_dataset(
            "text", data_files=[str(path)], sample_by=by, split="train", cache_dir=str(tmp_path / "cache")
        )
        return [row["text"].strip("\n") for row in rows if row["text"].strip()]

    assert read(str(path), text_split="line") == theirs("line")
    assert read(str(path), text_split="paragraph") == theirs("paragraph")
    path.write_bytes(LINES.encode())
    assert read(str(path), text_split="line") == ["first line", "  second", "third", "fourth", "fifth"]
    assert read(str(path), text_split="line", max_samples=2) == ["first line", "  second"]
    keys = {source(str(path), text_split=split).cache_key for split in ("file", "line", "paragraph")}
    assert len(keys) == 3
    monkeypatch.setattr(rows, "PIECE_CHARS", 4)
    whole = {
        "line": "first line|  second|third|fourth|fifth|",
        "paragraph": "first line  second|third|fourthfifth|",
        "file": "first line  second thirdfourthfifth|",
    }
    for split, expected in whole.items():
        pieces = source(str(path), text_split=split).iter_documents()
        joined = "".join(piece.text + "|" * piece.is_last_piece for piece in pieces)
        assert joined.replace("\r", "").replace("\n", "") == expected


def read_in_pieces(folder: Path, texts: Sequence[str], split: str) -> list[str]:
    """Write each text to a .txt file, and return the documents of all files, joined from their pieces."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number:05}.txt").write_text(text, "utf-8", newline="")
    documents = [""]
    for piece in source(str(folder), text_split=split).iter_documents():
        documents[-1] += piece.text
        if piece.is_last_piece:
            documents.append("")
    assert not documents.pop(), "the last document does not end"
    return [document.rstrip("\r\n") if split != "file" else document for document in documents]


@pytest.mark.parametrize("split", ["file", "line", "paragraph"])
def test_documents_do_not_depend_on_piece_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    """Blanks and line ends may be anywhere, also at the end of a piece and in the complete last piece."""
    texts = ["".join(text) for n in range(1, 5) for text in product(("a", " ", "\n", "\r\n"), repeat=n)]
    texts += ["ab\n" * 3 + " \n" * 9, " " * 20, " " * 20 + "a", "a" + " " * 20, "a\n" * 8, "a\r\n" * 8]
    whole = read_in_pieces(tmp_path / "texts", texts, split)
    for chars in (1, 2, 3, 8):
        monkeypatch.setattr(rows, "PIECE_CHARS", chars)
        assert read_in_pieces(tmp_path / "texts", texts, split) == whole


def test_paragraph_of_short_lines_is_read_in_linear_time(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a line\n" * 40_000)
    begun = time.process_time()
    assert len(read(str(tmp_path / "a.txt"), text_split="paragraph")) == 1
    assert time.process_time() - begun < 3


def test_source_may_be_folder_glob_or_list(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden/d.txt", "notes.md"):
        (tmp_path / name).write_text(name)
    assert read(str(tmp_path)) == ["a.txt", "b.txt", "sub/c.txt"]
    assert read(str(tmp_path / "*.txt")) == ["a.txt", "b.txt"]
    assert read(str(tmp_path / "**" / "*.txt")) == ["a.txt", "b.txt", "sub/c.txt"]
    assert read([str(tmp_path / "b.txt"), str(tmp_path / "*.txt")]) == ["b.txt", "a.txt"]
    assert read(str(tmp_path), max_samples=2) == ["a.txt", "b.txt"]


def test_source_reads_targets_and_labels(tmp_path: Path) -> None:
    rows = [
        {"en": "a", "de": "b", "c": True},
        {"en": "c", "de": " ", "c": False},
        {"en": "d", "de": "e", "c": 3},
    ]
    path = str(write_jsonl(tmp_path / "a.jsonl", rows))
    found = source(path, "seq2seq-lm", text_field="en", target_field="de").iter_documents()
    assert list(found) == [Document("a", "b"), Document("d", "e")]
    found = source(path, "sequence-classification", text_field="en", label_field="c").iter_documents()
    assert list(found) == [Document("a", label=1), Document("c", label=0), Document("d", label=3)]


# --- errors


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row["line"])
def test_source_errors_name_cause(
    row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in row.get("files", {}).items():
        Path(name).write_bytes(content.encode("latin-1"))
    message = refusal(row["source"], row.get("task", "causal-lm"), **row.get("data", {}))
    assert row["line"] in message and row.get("also", "") in message


# --- the hub


def test_hub_dataset_is_loaded_once_and_reports_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    load = Mock(return_value=datasets.Dataset.from_list(ROWS))
    monkeypatch.setattr(HubDataset, "_datasets_by_key", {})
    monkeypatch.setattr(datasets, "load_dataset", load)
    options = {"config_name": "small", "split": "validation"}
    assert read("org/name", **options) == TEXTS
    assert read("org/name", max_samples=1, **options) == TEXTS[:1]
    load.assert_called_once_with("org/name", "small", split="validation")
    key = source("org/name", **options).cache_key
    assert source("org/name", max_samples=1, **options).cache_key != key
    assert "org/name: row 1: there is no field 'body'" in refusal("org/name", text_field="body", **options)
    load.side_effect = ConnectionError("Couldn't reach\nthe Hub")
    assert "cannot load org/other, train" in refusal("org/other")
