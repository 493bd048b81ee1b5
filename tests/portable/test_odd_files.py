"""Files and folders as people have them: all of their records are read, or one line says why not."""

from __future__ import annotations

import codecs
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from portable.data.sources.source import Source
from portable.errors import UserError
from tests.portable.data_support import source, write_jsonl

TEXTS = [f"record {number}, of words" for number in range(20)]


@pytest.fixture(params=["file", "stream"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Source]:
    """Open a source as a whole, or as a stream."""
    cache = tmp_path / "cache"

    def open_one(path: Path, task: str = "causal-lm", **data: Any) -> Source:
        return source(str(path), task, stream=request.param == "stream", cache_dir=cache, **data)

    return open_one


def texts(given: Source) -> list[str]:
    return [document.text for document in given.documents()]


def refusal(given: Source) -> str:
    with pytest.raises(UserError) as caught:
        texts(given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parquet(path: Path, columns: dict[str, Any]) -> Path:
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.table(columns), path)
    return path


# -- tables -------------------------------------------------------------------------------------------------


def test_csv(opened: Callable[..., Source], tmp_path: Path) -> None:
    """A mark at the start, line ends of Windows in cells, texts like numbers and like nothing."""
    path = tmp_path / "a.csv"
    cells = ["1.50", "NA", "", "None", "two\r\nlines", "ß, quoted"]
    lines = "".join(f'"{cell}",{number}\r\n' for number, cell in enumerate(cells))
    path.write_bytes(codecs.BOM_UTF8 + f"text,n\r\n{lines}".encode())
    assert texts(opened(path)) == [cell for cell in cells if cell]
    labelled = opened(path, "sequence-classification", label_field="n")
    assert [found.label for found in labelled.documents()] == [0, 1, 3, 4, 5]
    (tmp_path / "empty.csv").touch()
    assert texts(opened(tmp_path / "empty.csv")) == []
    path.write_text("text;n\na;1\n")
    assert "its columns are separated by ';', not by commas" in refusal(opened(path))


def test_lines_of_csv_with_too_many_cells(
    opened: Callable[..., Source], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,n\n" + "".join(f'"{text}",1\n' for text in TEXTS) + "a,b,c\nlast,2\n")
    assert "Expected 2 fields in line 22, saw 3" in refusal(opened(path))
    skipping = opened(path, on_bad_record="skip")
    assert texts(skipping) == [*TEXTS, "last"]
    assert skipping.fields.bad is not None and skipping.fields.bad.count == 1
    assert f"skipped: data.source: {path}: line 22: expected 2 fields, saw 3" in capsys.readouterr().err


def test_parquet_without_rows_or_columns(opened: Callable[..., Source], tmp_path: Path) -> None:
    import pyarrow

    parquet(tmp_path / "data" / "a.parquet", {"text": TEXTS})
    parquet(tmp_path / "data" / "b.parquet", {"text": pyarrow.array([], pyarrow.string())})
    parquet(tmp_path / "data" / "c.parquet", {})
    assert texts(opened(tmp_path / "data")) == TEXTS
    assert texts(opened(tmp_path / "data" / "c.parquet")) == []


def test_parquet_of_every_type(opened: Callable[..., Source], tmp_path: Path) -> None:
    """Columns that are not read do not matter; of those that are, what Python cannot hold is a bad record."""
    import pyarrow

    far = [*[datetime.datetime(2026, 1, 1)] * 19, None]
    times = pyarrow.array(far, pyarrow.timestamp("us")).cast(pyarrow.int64()).to_pylist()
    columns = {
        "text": pyarrow.array(TEXTS, pyarrow.large_string()).dictionary_encode(),
        "map": pyarrow.array([[("k", 1)]] * 20, pyarrow.map_(pyarrow.string(), pyarrow.int64())),
        "time": pyarrow.array([*times[:7], 2**62, *times[8:]], pyarrow.timestamp("us")),
    }
    path = parquet(tmp_path / "a.parquet", columns)
    assert texts(opened(path)) == TEXTS
    columns["doc"] = pyarrow.array([{"text": text} for text in TEXTS])
    path = parquet(tmp_path / "b.parquet", columns)
    assert "b.parquet: row 8: date value out of range" in refusal(opened(path, text_field="doc.text"))
    assert texts(opened(path, text_field="doc.text", on_bad_record="skip")) == [*TEXTS[:7], *TEXTS[8:]]


# -- JSON and text ------------------------------------------------------------------------------------------


def test_json_after_the_end_of_a_list(opened: Callable[..., Source], tmp_path: Path) -> None:
    """Lists one after the other, as cat makes them, are all read; anything else is refused."""
    path = tmp_path / "a.json"
    parts = [json.dumps([{"text": text} for text in some]) for some in (TEXTS[:5], [], TEXTS[5:])]
    path.write_text("\n".join(parts))
    assert texts(opened(path)) == TEXTS
    path.write_text(parts[0] + "\nrubbish")
    assert "a.json: row 6: not JSON (Expecting value)" in refusal(opened(path))


@pytest.mark.parametrize("split", ["file", "line"])
def test_utf_16_is_not_taken_for_text(opened: Callable[..., Source], split: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        path.write_text("\n".join(TEXTS), encoding=encoding)
        assert "convert it (iconv -t utf-8)" in refusal(opened(path, text_split=split))


def test_the_first_file_is_empty(opened: Callable[..., Source], tmp_path: Path) -> None:
    """The format is that of the first record, wherever it is."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").touch()
    (tmp_path / "data" / "b.jsonl").write_text("\n")
    talk = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "because"}]
    write_jsonl(tmp_path / "data" / "c.jsonl", [{"messages": talk}])
    assert opened(tmp_path / "data", format="auto").recognise() == "messages"
    opened(tmp_path / "data", format="messages").check()
    with pytest.raises(UserError, match="contains no text"):
        opened(tmp_path / "data" / "b.jsonl").check()


# -- folders ------------------------------------------------------------------------------------------------


def test_linked_folders(opened: Callable[..., Source], tmp_path: Path) -> None:
    """Each once, also in a circle; none that leaves the folder."""
    for name in ("data", "data/.hidden", "data/store"):
        (tmp_path / name).mkdir()
        write_jsonl(tmp_path / name / "x.jsonl", [{"text": name}])
    (tmp_path / "data" / "linked").symlink_to("store")
    (tmp_path / "data" / "circle").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "file.jsonl").symlink_to(tmp_path / "data" / ".hidden" / "x.jsonl")
    (tmp_path / "data" / "broken.jsonl").symlink_to("none.jsonl")
    assert texts(opened(tmp_path / "data")) == ["data/.hidden", "data/store", "data"]
    (tmp_path / "by a link").symlink_to(tmp_path / "data")
    assert texts(opened(tmp_path / "by a link")) == ["data/.hidden", "data/store", "data"]
    (tmp_path / "data" / "out").symlink_to(tmp_path)
    write_jsonl(tmp_path / "private.jsonl", [{"text": "private"}])
    for name in ("data", "data/*/*.jsonl"):
        with pytest.raises(UserError, match=r"a link here leaves .* put the file itself there"):
            opened(tmp_path / name)


SPLITS = "data_files: [{split: train, path: 'data/a-*'}, {split: held, path: 'data/b-*'}]"
CARDS = {
    "splits": f"---\nconfigs:\n- config_name: default\n  {SPLITS}\n---\n",
    "names": "# No settings\n",
    "configs": """---
configs:
- {config_name: one, data_files: data/a-train.parquet}
- {config_name: two, data_files: data/b-test.parquet}
---
""",
}


@pytest.mark.parametrize("card", CARDS)
def test_a_copy_of_a_dataset_of_the_hub(card: str, opened: Callable[..., Source], tmp_path: Path) -> None:
    """Only the files of one split, which the card tells or their names."""
    folder = tmp_path / "copy"
    parquet(folder / "data" / "a-train.parquet", {"text": ["to train on"]})
    parquet(folder / "data" / "b-test.parquet", {"text": ["to evaluate"]})
    (folder / "README.md").write_text(CARDS[card])
    if card == "configs":
        assert texts(opened(folder, config_name="two")) == ["to evaluate"]
        with pytest.raises(UserError, match=r"Config name is missing.*\['one', 'two'\]"):
            opened(folder)
        return
    assert texts(opened(folder)) == ["to train on"]
    assert texts(opened(folder, split="held" if card == "splits" else "test")) == ["to evaluate"]
    with pytest.raises(UserError, match=rf"data.split: {folder} has no split 'none' of files; it has train"):
        opened(folder, split="none")


def test_saved_datasets(tmp_path: Path) -> None:
    """Records and tokens, also with splits."""
    import datasets

    rows = datasets.Dataset.from_list([{"text": text, "label": at % 2} for at, text in enumerate(TEXTS)])
    rows.save_to_disk(tmp_path / "rows")
    splits = datasets.DatasetDict({"train": rows.select(range(5)), "test": rows.select([7])})
    splits.save_to_disk(tmp_path / "splits")
    assert texts(source(str(tmp_path / "rows"))) == TEXTS
    assert texts(source(str(tmp_path / "splits"))) == TEXTS[:5]
    test = source(str(tmp_path / "splits"), task="sequence-classification", split="test")
    assert [(found.text, found.label) for found in test.documents()] == [(TEXTS[7], 1)]
    with pytest.raises(UserError, match=r"data.split: .* has no split 'dev'; it has test, train"):
        source(str(tmp_path / "splits"), split="dev")
    with pytest.raises(UserError, match=r"data.stream: .* was saved with save_to_disk; set it to false"):
        source(str(tmp_path / "rows"), stream=True)
