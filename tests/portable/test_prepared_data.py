"""``portable-data``: tokens made ahead of time, in parallel, resumed, on several machines, in a store."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from portable.commands.data import main
from portable.config.sections import DataConfig
from portable.data import pretokenize
from portable.data.dataset import build_data
from portable.data.sources.prepared import INDEX
from portable.data.stream import Stream
from portable.data.tokens import tokenize
from portable.errors import UserError
from tests.object_store import ObjectStore
from tests.portable.data_support import write_jsonl
from tests.portable.test_stream import files, length, settings

__all__ = ["files"]


@pytest.fixture
def config(files: Path, tmp_path: Path) -> Path:
    """A config with nine files, one of them without text."""
    write_jsonl(files / "part-4.jsonl", [{"text": " "}])
    build_data(given(tmp_path)).tokenizer.save_pretrained(tmp_path / "tokenizer")
    names = ("source", "stream", "seq_len", "eval_fraction", "cache_dir")
    settings = {name: getattr(given(tmp_path), name) for name in names}
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"data": {**settings, "tokenizer": str(tmp_path / "tokenizer")}}))
    return path


def given(folder: Path, **more: Any) -> DataConfig:
    return settings(folder / "files", **more)


def streamed(settings: DataConfig) -> Stream:
    train = build_data(settings).train
    assert isinstance(train, Stream)
    train._processes = 0
    return train


def rows(settings: DataConfig, count: int) -> list[list[int]]:
    train = streamed(settings)
    places = [train.locate(position, 0) for position in range(count)]
    return sorted(train.batch([place])["input_ids"][0].tolist() for place in places)


def test_the_samples_are_those_of_the_text(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the run that reads them tokenizes nothing, knows its length, and needs no tokenizer's name."""
    out = tmp_path / "tokens"
    assert main(["--config", str(config), "--out", str(out), "--processes", "1"]) == 0
    assert f"{out}: 9 shards, " in capsys.readouterr().out
    of_text = given(tmp_path, tokenizer=str(tmp_path / "tokenizer"))
    total = length(streamed(of_text))
    expected = rows(of_text, total)

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a text was tokenized")

    monkeypatch.setattr(tokenize, "_encode", refuse)
    prepared = given(tmp_path, source=str(out), cache_dir=str(tmp_path / "other"))
    train = streamed(prepared)
    assert train._whole() == total and train.epochs(total) == 1
    assert rows(prepared, total) == expected
    with pytest.raises(UserError, match=r"data.format: .* was made of text"):
        build_data(prepared.model_copy(update={"format": "messages"}))


def test_columns_that_nobody_asks_for_are_in_no_batch(config: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "scored.jsonl", [{"text": f"text {i}", "score": i} for i in range(40)])
    settings = json.loads(config.read_text())
    settings["data"] |= {"source": str(source), "columns": "score", "packing": False}
    settings["train"] = {"loss": "tests.portable.test_user_loss:by_column"}
    config.write_text(json.dumps(settings))
    out = tmp_path / "tokens"
    assert main(["--config", str(config), "--out", str(out), "--processes", "1"]) == 0
    for columns in ([], ["score"]):
        train = streamed(given(tmp_path, source=str(out), packing=False, columns=columns))
        assert ("score" in train.batch([train.locate(0, 0)])) == bool(columns)


def test_it_goes_on_where_it_was_killed(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is whole stays, what is damaged or half is made again, and the result is that of one go."""
    whole, out = tmp_path / "whole", tmp_path / "tokens"
    command = ["--config", str(config), "--processes", "1", "--out"]
    assert main([*command, str(whole)]) == 0
    made: list[int] = []
    stops_at = {5}
    write = pretokenize._Writing.__call__

    def stops(self: Any, item: Any) -> Any:
        if len(made) in stops_at:
            raise KeyboardInterrupt
        made.append(item[0])
        return write(self, item)

    monkeypatch.setattr(pretokenize._Writing, "__call__", stops)
    main([*command, str(out)])
    assert made == [0, 1, 2, 3, 4] and not (out / INDEX).exists()
    (out / "shards" / "000001" / "text.bin").write_bytes(b"half")
    (out / "shards" / "000003" / "meta.json").unlink()
    made.clear()
    stops_at.clear()
    assert main([*command, str(out)]) == 0
    assert made == [1, 3, 5, 6, 7, 8]
    assert (out / INDEX).read_text() == (whole / INDEX).read_text()
    assert not (out / ".making").exists()
    made.clear()
    assert main([*command, str(out)]) == 0 and made == []


def test_several_machines_and_processes_share_the_work(
    config: Path, tmp_path: Path, s3: ObjectStore, capsys: pytest.CaptureFixture[str]
) -> None:
    """To a bucket; read from there with a cache that is bounded."""
    whole = tmp_path / "whole"
    command = ["--config", str(config), "--out"]
    assert main([*command, str(whole), "--processes", "1"]) == 0
    url = s3.url("tokens")
    for part in ("2/2", "1/2"):
        assert main([*command, url, "--processes", "2", "--part", part]) == 0
    said = capsys.readouterr().out
    assert "left to other machines" in said.splitlines()[-2] and "left" not in said.splitlines()[-1]
    count = 700
    local = given(tmp_path, source=str(whole), cache_dir=str(tmp_path / "local"))
    remote = given(tmp_path, source=url, cache_dir=str(tmp_path / "remote"))
    assert rows(remote, count) == rows(local, count)


def test_refusals(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tokens"
    command = ["--config", str(config), "--processes", "1"]
    assert main([*command, "--out", str(out)]) == 0
    capsys.readouterr()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for arguments, said in (
        ([], "--out: is missing"),
        (["--out", str(out), "--part", "3/2"], "--part: '3/2' is not such as 2/8"),
        (["--out", str(tmp_path / "new"), "--data.text_field", "other"], "no field 'other'"),
        (["--out", str(tmp_path / "full")], "is not empty"),
        (
            ["--out", str(tmp_path / "more"), "--data.source", "null"],
            "data.stream: data.source names no files",
        ),
    ):
        assert main([*command, *arguments]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and said in told and told.count("\n") == 1, told
    assert main([*command, "--out", str(tmp_path / "new")]) == 0  # it was not begun with the wrong field
    write_jsonl(tmp_path / "files" / "part-9.jsonl", [{"text": "more"}])
    assert main([*command, "--out", str(out)]) == 2
    assert "was begun with other files" in capsys.readouterr().err
    shutil.rmtree(out / "shards" / "000000")
    with pytest.raises(UserError, match=r"run portable-data again"):
        rows(given(tmp_path, source=str(out)), 700)
