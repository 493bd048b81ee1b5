"""Data files in an object store: found by URL and pattern, fetched once, the documents those of a disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from portable.data.sources.source import Source
from portable.errors import UserError
from tests.object_store import ObjectStore
from tests.portable.data_support import source, write_jsonl

TEXTS = ["one line of text", "another,\nwith two lines", "å third"]


@pytest.fixture
def files(tmp_path: Path, s3: ObjectStore) -> Path:
    """A folder of one file of each kind, and its copy in the bucket as `data`."""
    folder = tmp_path / "data"
    (folder / "more" / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "a.txt").write_text(TEXTS[0])
    write_jsonl(folder / "b.jsonl", [{"text": text} for text in ["", *TEXTS]])
    (folder / "more" / "c.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
    write_jsonl(folder / "more" / "deep" / "d.jsonl", [{"text": text} for text in TEXTS])
    write_jsonl(folder / "more" / "e.jsonl", [{"text": text} for text in TEXTS])
    (folder / ".hidden" / "f.txt").write_text("not this")
    (folder / "readme.md").write_text("nor this")
    s3.put_tree(folder, "data")
    return folder


def opened(name: str | list[str], cache: Path, max_samples: int | None = None) -> Source:
    return source(name, cache_dir=cache, max_samples=max_samples)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("a.txt", 1),
        ("[ab].*", 4),
        ("more/*.*", 6),
        ("more/**/[cd].js*", 6),
        ("more/**", 9),
        ("", 13),
        ("more/deep/", 3),
    ],
)
def test_the_same_documents_as_from_a_disk(
    pattern: str, count: int, s3: ObjectStore, files: Path, tmp_path: Path
) -> None:
    here = list(source(str(files / pattern)).documents())
    there = opened(f"s3://{s3.bucket}/data/{pattern}", tmp_path / "cache")
    assert list(there.documents()) == here and len(here) == count
    few = opened(f"s3://{s3.bucket}/data/{pattern}", tmp_path / "cache", max_samples=3)
    assert list(few.documents()) == list(source(str(files / pattern), max_samples=3).documents())


def test_fetched_once_until_it_changes(s3: ObjectStore, files: Path, tmp_path: Path) -> None:
    names = [s3.url("data/b.jsonl"), s3.url("data/more/*.json")]
    given = opened(names, tmp_path / "cache")
    size = (files / "b.jsonl").stat().st_size
    assert given.size_bytes == size + (files / "more" / "c.json").stat().st_size
    assert s3.bytes_out("b.jsonl") == 0  # the key and the size come from the listing
    key, first = given.key, list(given.documents())
    again = opened(names, tmp_path / "cache")
    assert again.key == key and list(again.documents()) == first
    assert s3.bytes_out("b.jsonl") == size
    s3.put("data/b.jsonl", (files / "b.jsonl").read_bytes().replace(b"one", b"two"))
    changed = opened(names, tmp_path / "cache")
    assert changed.key != key
    assert next(document.text for document in changed.documents()) == "two line of text"


def test_refusals_name_the_url(s3: ObjectStore, files: Path, tmp_path: Path) -> None:
    def refusal(name: str | list[str]) -> str:
        with pytest.raises(UserError) as caught:
            list(opened(name, tmp_path / "cache").documents())
        assert str(caught.value).startswith("data.source: ")
        return str(caught.value)

    for name in ("data/nothing.txt", "data/*.parquet", "nowhere"):
        assert f"there is no .txt, .jsonl, .json, .csv, .parquet file at {s3.url(name)}" in refusal(
            s3.url(name)
        )
    assert "readme.md: cannot read this kind of file" in refusal(s3.url("data/*.md"))
    assert "no such bucket" in refusal("s3://no-such-bucket-here/a.txt")
    assert "not both" in refusal([s3.url("data/a.txt"), "b.txt"])
    s3.put("data/b.jsonl", b'{"text": "a"}\n{"text"\n')
    assert f"{s3.url('data/b.jsonl')}:2: not a line of JSON" in refusal(s3.url("data/b.jsonl"))
    s3.fail(status=403, method="GET", key="a.txt")
    assert "denied" in refusal(s3.url("data/a.txt"))


def test_a_damaged_copy_is_fetched_again(s3: ObjectStore, files: Path, tmp_path: Path) -> None:
    name = s3.url("data/b.jsonl")
    first = list(opened(name, tmp_path / "cache").documents())
    (copy,) = (tmp_path / "cache").rglob("b.jsonl")
    for damaged in (copy.read_bytes().replace(b"one", b"won"), b""):
        copy.write_bytes(damaged)
        assert list(opened(name, tmp_path / "cache").documents()) == first


def test_what_changes_on_the_way_is_not_kept_under_the_old_name(
    s3: ObjectStore, files: Path, tmp_path: Path
) -> None:
    """By another text of the same length, between the listing and the fetching."""
    given = opened(s3.url("data/b.jsonl"), tmp_path / "cache")
    assert given.key
    s3.put("data/b.jsonl", (files / "b.jsonl").read_bytes().replace(b"one", b"two"))
    with pytest.raises(UserError, match=r"s3://.*b.jsonl changed while it was read"):
        list(given.documents())
    assert not [*(tmp_path / "cache").rglob("b.jsonl")]
