"""The contract of all sources: the same texts in every form, and runs that continue after a stop."""

from __future__ import annotations

import gzip
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from portable.data.sources import source_kinds
from portable.data.sources.source import DataSource
from portable.data.sources.source_kinds import StreamSource
from portable.errors import UserError
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.object_store import ObjectStore
from tests.portable.data_support import source, write_jsonl
from tests.runs import configured, write_conversations, write_corpus

TEXTS = [f"text {number} of\u00df " + "word " * (number % 37) for number in range(400)]


def arrow(path: Path, texts: list[str]) -> None:
    import pyarrow
    from pyarrow import csv, parquet

    table = pyarrow.table({"text": texts, "more": [{"place": number} for number in range(len(texts))]})
    if path.suffix == ".csv":
        csv.write_csv(table.select(["text"]), path)
    else:
        parquet.write_table(table, path, row_group_size=50)


def saved(path: Path, texts: list[str]) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": texts}).save_to_disk(path)


def packed(path: Path, content: bytes) -> None:
    import pyarrow

    if path.suffix == ".gz":  # of two members
        half = len(content) // 2
        path.write_bytes(gzip.compress(content[:half]) + gzip.compress(content[half:]))
    else:
        with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
            file.write(content)


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def listed(texts: list[str]) -> bytes:
    return json.dumps([{"text": text} for text in texts]).encode()


CODE = """
def records():
    import json
    for line in open({path!r}, "rb"):
        yield json.loads(line)
"""

KINDS: dict[str, Callable[[Path, list[str]], object]] = {
    "lines.txt": lambda path, texts: path.write_text("\n".join(texts)),
    "a.jsonl": lambda path, texts: path.write_bytes(lines(texts)),
    "a [1].json": lambda path, texts: path.write_bytes(listed(texts)),
    "a.csv": arrow,
    "a.parquet": arrow,
    "a.jsonl.gz": lambda path, texts: packed(path, lines(texts)),
    "a.jsonl.zst": lambda path, texts: packed(path, lines(texts)),
    "a.json.gz": lambda path, texts: packed(path, listed(texts)),
    "saved": saved,
    "code": lambda path, texts: path.write_bytes(lines(texts)),
}
"""Functions that write texts in the form that a kind of source reads."""
FILES = [name for name in KINDS if "." in name]
IN_PARTS = ("a.jsonl", "a.parquet")


def written(folder: Path, kind: str, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the texts. Returns the value of ``data.source``."""
    KINDS[kind](folder / kind, texts)
    if kind != "code":
        return str(folder / kind)
    (folder / f"records_of_{folder.name}.py").write_text(CODE.format(path=str(folder / kind)))
    monkeypatch.syspath_prepend(folder)
    return f"records_of_{folder.name}:records"


def opened(name: str, folder: Path, **data: Any) -> DataSource:
    return source(name, text_split="line", cache_dir=folder / "cache", **data)


def checked(found: DataSource) -> list[str]:
    with found.check_unchanged():
        return [document.text for document in found.iter_documents()]


def streamed(name: str, folder: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the texts of each part of a stream."""
    monkeypatch.setattr(source_kinds, "PART_BYTES", part_bytes)
    found = opened(name, folder, stream=True)
    assert isinstance(found, StreamSource)
    return [checked(part.open_source(found.settings)) for part in found.shards]


@pytest.mark.parametrize("kind", KINDS)
def test_source_of_every_kind_has_texts_and_cache_key(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache key follows the content, and a change during the read is rejected."""
    name = written(tmp_path, kind, TEXTS, monkeypatch)
    whole = opened(name, tmp_path)
    assert checked(whole) == TEXTS
    few = opened(name, tmp_path, max_samples=7)
    assert checked(few) == TEXTS[:7]
    assert len({whole.cache_key, few.cache_key, opened(name, tmp_path, text_field="other").cache_key}) == 3
    assert opened(name, tmp_path).cache_key == whole.cache_key
    if kind not in ("lines.txt", "saved"):
        with pytest.raises(UserError, match=r"data.text_field: .* no field 'txt' .*did you mean 'text'\?"):
            checked(opened(name, tmp_path, text_field="txt"))
    with (
        pytest.raises(UserError, match=r"changed while it was being read; wait until no program is writing"),
        whole.check_unchanged(),
    ):
        next(documents := whole.iter_documents())
        if kind == "saved":
            shutil.rmtree(tmp_path / kind)
        KINDS[kind](tmp_path / kind, ["other", *TEXTS[1:]])
        list(documents)
    assert opened(name, tmp_path).cache_key != whole.cache_key


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("part_bytes", [1 << 24, 700, 9001])
def test_stream_yields_each_record_once(
    kind: str, part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = written(tmp_path, kind, TEXTS, monkeypatch)
    parts = streamed(name, tmp_path, part_bytes, monkeypatch)
    assert len(parts) == (-(-Path(name).stat().st_size // part_bytes) if kind in IN_PARTS else 1)
    assert [text for part in parts for text in part] == TEXTS


@pytest.mark.parametrize("kind", [*IN_PARTS, "a [1].json", "a.jsonl.gz"])
def test_object_store_source_has_same_texts(
    kind: str, tmp_path: Path, s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, kind, TEXTS, monkeypatch)
    s3.put_tree(tmp_path, "data")
    name = s3.url(f"data/{kind}".replace("[1]", "[[]1]"))
    assert checked(opened(name, tmp_path)) == TEXTS
    parts = streamed(name, tmp_path, 9001, monkeypatch)
    assert [text for part in parts for text in part] == TEXTS


# -- runs ---------------------------------------------------------------------------------------------------

RUNS = yaml.safe_load(Path(__file__).with_name("contract_runs.yaml").read_text("utf-8"))


@pytest.mark.parametrize("kind", RUNS)
def test_stopped_run_has_same_losses_for_every_source(kind: str, tmp_path: Path, brief_runs: None) -> None:
    """The run also continues on a machine without the token cache."""
    corpus, _ = write_corpus(tmp_path), write_conversations(tmp_path)
    (tmp_path / "web").mkdir()
    for file in range(5):
        rows = [{"text": f"f{file}r{row} " * (4 + (row * 7 + file) % 20)} for row in range(30 + 5 * file)]
        write_jsonl(tmp_path / "web" / f"{file}.jsonl", rows)
    given = json.loads(json.dumps(RUNS[kind]).replace('"source": "', f'"source": "{tmp_path}/'))
    if "data__source" in given:
        given["data__source"] = f"{tmp_path}/{given['data__source']}"
    if "data__sources" in given:
        given["data__source"] = None

    def losses(name: str, **more: Any) -> list[dict[str, Any]]:
        config = configured(tmp_path / name, corpus, **given, **more, checkpoint__export=False)
        assert run_rank("cpu", config) == 0
        assert "tokenize-ahead" not in {thread.name for thread in threading.enumerate()}
        rows = read_metrics(tmp_path / name)
        names = ("loss", "samples/web", "samples/talks")
        trained = [{name: row.get(name) for name in names} for row in rows if "loss" in row]
        evaluated = [row for row in rows if any(name.startswith("eval_loss") for name in row)]
        return [*trained, *({key: row[key] for key in row if "eval_loss" in key} for row in evaluated[-1:])]

    whole = losses("whole")
    losses("parted", train__stop_after=3)
    shutil.rmtree(tmp_path / "cache")
    assert losses("parted") == whole
    if kind == "a mixture":
        assert whole[-2]["samples/talks"] == 12 and {"eval_loss/texts", "eval_loss/talks"} <= whole[-1].keys()
