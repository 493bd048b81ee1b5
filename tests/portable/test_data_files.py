"""Unusual files and folders, on disk or in a store: all records are read, or the error names the reason.

Token files of other programs give the tokens and documents that were written, or an error.
"""

from __future__ import annotations

import codecs
import json
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from portable.config.sections import DataConfig
from portable.data.dataset import build_data
from portable.data.sources import token_files
from portable.data.sources.pretokenized import INDEX_FILE, PretokenizedSource
from portable.data.sources.source import DataSource
from portable.data.tokens.tokenizer import Vocabulary, train_tokenizer
from portable.errors import MultipleMistakesError, RunError, UserError
from portable.paths import check_folder_files
from portable.temporary_folder import open_or_build_cache_folder
from tests.object_store import ObjectStore
from tests.portable.data_support import corpus, read_sample, settings_of, source, write_jsonl
from tests.portable.test_stream import length

TEXTS = [f"record {number}, of words" for number in range(20)]


@pytest.fixture(params=["file", "stream"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., DataSource]:
    """Open a source for a cache, or as a stream."""
    cache = tmp_path / "cache"

    def open_one(path: Path, task: str = "causal-lm", **data: Any) -> DataSource:
        return source(str(path), task, stream=request.param == "stream", cache_dir=cache, **data)

    return open_one


def texts(given: DataSource) -> list[str]:
    return [document.text for document in given.iter_documents()]


def refusal(given: DataSource) -> str:
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


def test_csv_source_reads_cells_as_text(opened: Callable[..., DataSource], tmp_path: Path) -> None:
    """The file has a byte order mark, and Windows line ends in cells.

    Some texts resemble numbers or missing values.
    """
    path = tmp_path / "a.csv"
    cells = ["1.50", "NA", "", "None", "two\r\nlines", "ß, quoted"]
    lines = "".join(f'"{cell}",{number}\r\n' for number, cell in enumerate(cells))
    path.write_bytes(codecs.BOM_UTF8 + f"text,n\r\n{lines}".encode())
    assert texts(opened(path)) == [cell for cell in cells if cell]
    labelled = opened(path, "sequence-classification", label_field="n")
    assert [found.label for found in labelled.iter_documents()] == ["0", "1", "3", "4", "5"]
    (tmp_path / "empty.csv").touch()
    assert texts(opened(tmp_path / "empty.csv")) == []
    path.write_text("text;n\na;1\n")
    assert "the columns are separated by ';', not by commas" in refusal(opened(path))


def test_csv_source_reports_line_with_too_many_cells(
    opened: Callable[..., DataSource], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,n\n" + "".join(f'"{text}",1\n' for text in TEXTS) + "a,b,c\nlast,2\n")
    assert "Expected 2 fields in line 22, saw 3" in refusal(opened(path))
    skipping = opened(path, on_bad_record="skip")
    assert texts(skipping) == [*TEXTS, "last"]
    assert skipping.fields.bad is not None and skipping.fields.bad.num_skipped == 1
    assert f"skipped: data.source: {path}: line 22: expected 2 fields, saw 3" in capsys.readouterr().err


def test_csv_source_lists_thousand_lines_with_too_many_cells(
    opened: Callable[..., DataSource], tmp_path: Path
) -> None:
    """The first bad record is another one, in an earlier block of lines than pandas parses at once."""
    path = tmp_path / "a.csv"
    path.write_text("text,n\nshort\n" + "a,1\n" * 10_050 + "a,b,c\n" * 1_100)
    labelled = opened(path, "sequence-classification", label_field="n")
    with pytest.raises(MultipleMistakesError) as caught:
        list(labelled.iter_documents())
    assert "at least 1,000 bad records (999 x " in caught.value.lines[-1]


# -- JSON and text ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", ["file", "line"])
def test_text_source_rejects_utf_16(opened: Callable[..., DataSource], split: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        path.write_text("\n".join(TEXTS), encoding=encoding)
        assert "convert the file to UTF-8 (for example with iconv" in refusal(opened(path, text_split=split))


def test_source_detects_format_if_first_file_is_empty(
    opened: Callable[..., DataSource], tmp_path: Path
) -> None:
    """The first record decides the format, wherever it is."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").touch()
    (tmp_path / "data" / "b.jsonl").write_text("\n")
    talk = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "because"}]
    write_jsonl(tmp_path / "data" / "c.jsonl", [{"messages": talk}])
    assert opened(tmp_path / "data", format="auto").detect_and_set_format() == "messages"
    opened(tmp_path / "data", format="messages").check_readable()
    with pytest.raises(UserError, match="contains no text"):
        opened(tmp_path / "data" / "b.jsonl").check_readable()


# -- folders ------------------------------------------------------------------------------------------------


def test_source_reads_linked_folders_once(opened: Callable[..., DataSource], tmp_path: Path) -> None:
    """Each folder is read once, also if links form a cycle. A link that leaves the folder is rejected."""
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
        with pytest.raises(UserError, match=r"a link points outside of .* put the file itself"):
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
def test_source_of_hub_dataset_copy_reads_one_split(
    card: str, opened: Callable[..., DataSource], tmp_path: Path
) -> None:
    """Only the files of one split are read. The card or the file names define the splits."""
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
    with pytest.raises(
        UserError,
        match=rf"{folder} has no files for the split 'none'; choose another split \(the splits are: train",
    ):
        opened(folder, split="none")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("README.md", "\n \n---\nconfigs:\n- {config_name: default, data_files: x.jsonl}\n---\n"),
        (".huggingface.yaml", "configs:\n- {config_name: default, data_files: x.jsonl}\n"),
    ],
    ids=["card", "settings file"],
)
def test_source_of_hub_dataset_copy_finds_settings(
    name: str, content: str, opened: Callable[..., DataSource], tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    for stem in ("x", "y"):
        write_jsonl(folder / f"{stem}.jsonl", [{"text": stem}])
    (folder / name).write_text(content)
    assert texts(opened(folder)) == ["x"]


def test_source_reads_dataset_saved_to_disk(tmp_path: Path) -> None:
    """The dataset has records or tokens, also with splits."""
    import datasets

    rows = datasets.Dataset.from_list([{"text": text, "label": at % 2} for at, text in enumerate(TEXTS)])
    rows.save_to_disk(tmp_path / "rows")
    splits = datasets.DatasetDict({"train": rows.select(range(5)), "test": rows.select([7])})
    splits.save_to_disk(tmp_path / "splits")
    assert texts(source(str(tmp_path / "rows"))) == TEXTS
    assert texts(source(str(tmp_path / "splits"))) == TEXTS[:5]
    test = source(str(tmp_path / "splits"), task="sequence-classification", split="test")
    assert [(found.text, found.label) for found in test.iter_documents()] == [(TEXTS[7], 1)]
    with pytest.raises(UserError, match=r"data.split: .* has no split 'dev'; use one of test, train"):
        source(str(tmp_path / "splits"), split="dev")
    with pytest.raises(
        UserError,
        match=r"data.stream: .* was saved with save_to_disk and cannot be streamed; set data.stream: false",
    ):
        source(str(tmp_path / "rows"), stream=True)


# -- in an object store ----------------------------------------------------------------------------------


WORDS = ["one line of text", "another,\nwith two lines", "å third"]


@pytest.fixture
def bucket(tmp_path: Path, s3: ObjectStore) -> Path:
    """Write a folder with one file of each kind, and its copy in the bucket as `data`."""
    folder = tmp_path / "data"
    (folder / "more" / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "a.txt").write_text(WORDS[0])
    write_jsonl(folder / "b.jsonl", [{"text": text} for text in ["", *WORDS]])
    (folder / "more" / "c.json").write_text(json.dumps([{"text": text} for text in WORDS]))
    write_jsonl(folder / "more" / "deep" / "d.jsonl", [{"text": text} for text in WORDS])
    write_jsonl(folder / "more" / "e.jsonl", [{"text": text} for text in WORDS])
    (folder / ".hidden" / "f.txt").write_text("not this")
    (folder / "readme.md").write_text("nor this")
    s3.put_tree(folder, "data")
    return folder


def fetched(name: str | list[str], cache: Path) -> DataSource:
    return source(name, cache_dir=cache)


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("a.txt", 1),
        ("more/**/[cd].js*", 6),
        ("", 13),
    ],
)
def test_object_store_source_equals_disk(
    pattern: str, count: int, s3: ObjectStore, bucket: Path, tmp_path: Path
) -> None:
    here = list(source(str(bucket / pattern)).iter_documents())
    there = fetched(f"s3://{s3.bucket}/data/{pattern}", tmp_path / "cache")
    assert list(there.iter_documents()) == here and len(here) == count


def test_object_store_source_is_fetched_again_only_if_changed(
    s3: ObjectStore, bucket: Path, tmp_path: Path
) -> None:
    names = [s3.url("data/b.jsonl"), s3.url("data/more/*.json")]
    given = fetched(names, tmp_path / "cache")
    size = (bucket / "b.jsonl").stat().st_size
    assert given.size_bytes == size + (bucket / "more" / "c.json").stat().st_size
    assert s3.bytes_out("b.jsonl") == 0  # the key and the size come from the listing
    key, first = given.cache_key, list(given.iter_documents())
    again = fetched(names, tmp_path / "cache")
    assert again.cache_key == key and list(again.iter_documents()) == first
    assert s3.bytes_out("b.jsonl") == size
    s3.put("data/b.jsonl", (bucket / "b.jsonl").read_bytes().replace(b"one", b"two"))
    changed = fetched(names, tmp_path / "cache")
    assert changed.cache_key != key
    assert next(document.text for document in changed.iter_documents()) == "two line of text"


def test_object_store_source_error_names_url(s3: ObjectStore, bucket: Path, tmp_path: Path) -> None:
    def refusal(name: str | list[str]) -> str:
        with pytest.raises(UserError) as caught:
            list(fetched(name, tmp_path / "cache").iter_documents())
        assert str(caught.value).startswith("data.source: ")
        return str(caught.value)

    assert f".parquet file at {s3.url('data/nothing.txt')}" in refusal(s3.url("data/nothing.txt"))
    assert "readme.md: this kind of file is not supported" in refusal(s3.url("data/*.md"))
    assert "no such bucket" in refusal("s3://no-such-bucket-here/a.txt")
    s3.put("data/b.jsonl", b'{"text": "a"}\n{"text"\n')
    assert f"{s3.url('data/b.jsonl')}:2: is not valid JSON" in refusal(s3.url("data/b.jsonl"))
    s3.fail(status=403, method="GET", key="a.txt")
    assert "denied" in refusal(s3.url("data/a.txt"))


def test_object_store_source_refetches_damaged_copy(s3: ObjectStore, bucket: Path, tmp_path: Path) -> None:
    name = s3.url("data/b.jsonl")
    first = list(fetched(name, tmp_path / "cache").iter_documents())
    (copy,) = (tmp_path / "cache").rglob("b.jsonl")
    for damaged in (copy.read_bytes().replace(b"one", b"won"), b""):
        copy.write_bytes(damaged)
        assert list(fetched(name, tmp_path / "cache").iter_documents()) == first


def test_object_store_source_error_names_deleted_file(s3: ObjectStore, bucket: Path, tmp_path: Path) -> None:
    deleted = fetched(s3.url("data/b.jsonl"), tmp_path / "cache")
    s3.delete("data/b.jsonl")
    with pytest.raises(UserError, match=r"^data.source: s3://\S+/b.jsonl: was deleted after it was listed"):
        list(deleted.iter_documents())


def test_cache_folder_may_have_subfolders(tmp_path: Path) -> None:
    def write(draft: Path) -> None:
        (draft / "templates").mkdir()
        (draft / "templates" / "chat.jinja").write_text("text")

    folder = open_or_build_cache_folder(
        tmp_path / "copy", lambda folder: folder if folder.exists() else None, write
    )
    assert (folder / "templates" / "chat.jinja").read_text() == "text"


def test_pretokenized_source_has_no_limit_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defaults: Any = check_folder_files.__kwdefaults__
    monkeypatch.setitem(defaults, "max_files", 3)
    for name in (INDEX_FILE, "a", "b", "c"):
        (tmp_path / name).touch()
    settings = settings_of(str(tmp_path), stream=True)
    assert PretokenizedSource.from_names([str(tmp_path)], settings) is not None


# -- tokens of other programs ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """Return a tokenizer's folder and its end token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = train_tokenizer(source(str(corpus(folder))), 300, folder)
    made.save_pretrained(folder / "saved")
    end = Vocabulary.from_tokenizer(made).end_token
    assert end is not None
    return str(folder / "saved"), end


def documents(end: int, count: int = 40) -> list[list[int]]:
    return [[(n * 7 + at) % 250 + 10 for at in range(n * 5 % 23 + 1)] + [end] for n in range(count)]


def flat(written: Sequence[Sequence[int]]) -> list[int]:
    return [token for text in written for token in text]


def nanogpt(path: Path, written: Sequence[Sequence[int]]) -> None:
    """Write tokens as data/*/prepare.py of nanoGPT does."""
    np.array(flat(written), dtype=np.uint16).tofile(path)


def llm_c(path: Path, written: Sequence[Sequence[int]]) -> None:
    """Write tokens as write_datafile of llm.c's data_common.py does."""
    tokens = np.array(flat(written), dtype=np.uint16)
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())


def megatron(path: Path, written: Sequence[Sequence[int]]) -> None:
    """Write tokens as IndexedDatasetBuilder of Megatron-LM does. Each document is two sequences here."""
    parts = [part for text in written for part in (text[: len(text) // 2], text[len(text) // 2 :])]
    np.array(flat(written), dtype=np.int32).tofile(path)
    sizes = np.array([len(part) for part in parts], dtype=np.int32)
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64) * 4]).astype(np.int64)
    ends = np.arange(0, len(parts) + 1, 2, dtype=np.int64)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(parts), len(written) + 1)
    path.with_suffix(".idx").write_bytes(head + sizes.tobytes() + pointers.tobytes() + ends.tobytes())


def built(path: Path | str, tokenizer: str, folder: Path, **more: Any) -> Any:
    given: dict[str, Any] = {"source": str(path), "tokenizer": tokenizer, "seq_len": 16, "eval_fraction": 0.0}
    return build_data(DataConfig(**(given | more), cache_dir=str(folder / "cache")))


def found_in(data: Any) -> list[list[int]]:
    return [
        data.first_tokens.read_document("text", n).tolist() for n in range(data.first_tokens.num_documents)
    ]


@pytest.mark.parametrize("write", [nanogpt, llm_c, megatron])
@pytest.mark.parametrize("chunk", [7, 1 << 22])
def test_token_file_source_reads_tokens_and_documents(
    write: Any, chunk: int, tokenizer: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "_CHUNK", chunk)
    folder, end = tokenizer
    written = documents(end)
    write(tmp_path / "some.bin", written)
    data = built(tmp_path / "some.bin", folder, tmp_path)
    assert found_in(data) == written
    assert read_sample(data.train, 2)["input_ids"].tolist() == flat(written)[32:48]


@pytest.mark.parametrize("stream", [False, True])
def test_token_files_mixed_with_text_are_rejected(
    stream: bool, tokenizer: tuple[str, int], tmp_path: Path
) -> None:
    folder, end = tokenizer
    nanogpt(tmp_path / "some.bin", documents(end))
    (tmp_path / "some.txt").write_text("text")
    names = [str(tmp_path / name) for name in ("some.bin", "some.txt")]
    with pytest.raises(UserError, match=r"some.bin: .* cannot be mixed with other files; specify only"):
        built("", folder, tmp_path, source=names, stream=stream)


def test_token_file_source_rejects_bad_files_in_one_line(tokenizer: tuple[str, int], tmp_path: Path) -> None:
    folder, end = tokenizer
    path = tmp_path / "some.bin"

    def refused(said: str) -> None:
        with pytest.raises(UserError, match=said) as error:
            built(path, folder, tmp_path)
        assert "\n" not in str(error.value)

    refused("no such file")
    nanogpt(path, [[5, 60_000, end]])
    refused("contains the token id 60000, but the tokenizer has only 300 tokens")
    for tokens in ([5, -7, end], [-7, 60_000, end]):
        megatron(path, [tokens])
        refused(r"^data.source: .*some.bin: contains the negative token id -7; write the file again")
    path.with_suffix(".idx").unlink()
    llm_c(path, documents(end))
    path.write_bytes(path.read_bytes()[:-2])
    refused("is not the size of .* tokens of 2 bytes each; copy the file again")
    path.unlink()
    megatron(path, documents(end))
    path.write_bytes(path.read_bytes()[:-4])
    refused("some.idx: does not match some.bin")
    whole = path.with_suffix(".idx").read_bytes()
    path.with_suffix(".idx").write_bytes(whole[:60])
    refused("some.idx: is truncated")
    path.with_suffix(".idx").write_bytes(b"x" * 100)
    refused("is not a Megatron index file")
    with pytest.raises(UserError, match=r"data.tokenizer: .* contains tokens, not text"):
        build_data(DataConfig(source=str(path), cache_dir=str(tmp_path / "cache")))


# -- shards of other programs -------------------------------------------------------------------------------

WRITTEN = Path(__file__).parent.parent / "published" / "tokens"
DOCUMENTS = [[at + n for at in range(n % 7 + 3)] for n in range(50)]
"""Input documents of the programs."""
SHARDED = {
    "mds": DOCUMENTS,
    "mds_bytes_zstd": DOCUMENTS,
    "mds_fixed": [[*range(8)]] * 50,
    "litdata": DOCUMENTS,
}


@pytest.mark.parametrize("name", SHARDED)
def test_token_shards_of_other_programs_are_read(
    name: str, tokenizer: tuple[str, int], tmp_path: Path
) -> None:
    """Mosaic Streaming and litdata wrote the files. As a stream, each shard is read when it is needed."""
    data = built(WRITTEN / name, tokenizer[0], tmp_path, seq_len=4)
    found = found_in(data)
    if name == "litdata":  # whose chunks come in the order in which its workers wrote them
        found = sorted(found, key=lambda text: text[0])
    assert found == SHARDED[name]
    stream = built(WRITTEN / name, tokenizer[0], tmp_path, seq_len=4, stream=True).train
    stream._processes = 0
    samples = [stream.locate_sample(position, 0) for position in range(length(stream))]
    rows = stream.build_batch(samples)["input_ids"].tolist()
    tokens = flat(SHARDED[name])
    blocks = {tuple(tokens[at : at + 4]) for at in range(len(tokens))}
    assert len(rows) >= len(tokens) // 4 - 2 * len(stream._shards) and set(map(tuple, rows)) <= blocks


def test_outage_while_token_shard_is_read_is_no_damage(
    tokenizer: tuple[str, int], tmp_path: Path, s3: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORTABLE_STORAGE_MINUTES", "0.002")
    s3.put_tree(WRITTEN / "mds", "tokens")
    s3.fail(drop=True, key="shard.00001.mds")
    with pytest.raises(RunError, match=r"^data.source: s3://.*shard.00001.mds: .* run the command again$"):
        built(s3.url("tokens"), tokenizer[0], tmp_path)


@pytest.mark.parametrize(
    ("name", "file"),
    [("mds", "shard.00001.mds"), ("mds_bytes_zstd", "shard.00001.mds.zstd"), ("litdata", "chunk-0-1.bin")],
)
def test_damaged_token_shards_are_rejected(
    name: str, file: str, tokenizer: tuple[str, int], tmp_path: Path
) -> None:
    folder = tmp_path / name
    shutil.copytree(WRITTEN / name, folder)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=f"{file}: cannot be read"):
        built(folder, tokenizer[0], tmp_path)
    index = (WRITTEN / name / "index.json").read_text()
    if name == "mds_bytes_zstd":  # its checksum differs
        (folder / file).write_bytes(content)
        first = json.loads(index)["shards"][0]["raw_data"]["hashes"]["sha1"]
        (folder / "index.json").write_text(index.replace(first, "0" * 40))
        with pytest.raises(UserError, match=r"the sha1 checksum does not match index.json"):
            built(folder, tokenizer[0], tmp_path)
    (folder / "index.json").write_text(json.dumps({"shards": [{"format": "mds"}]}))
    with pytest.raises(UserError, match=r"index.json: cannot be read"):
        built(folder, tokenizer[0], tmp_path)


def test_token_source_reads_dataset_saved_to_disk(tokenizer: tuple[str, int], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_dict({"input_ids": DOCUMENTS, "more": list(range(50))})
    saved.save_to_disk(tmp_path / "plain", num_shards=3)
    saved.shuffle(seed=1).save_to_disk(tmp_path / "shuffled")
    for name in ("plain", "shuffled"):
        data = built(tmp_path / name, tokenizer[0], tmp_path)
        found = found_in(data)
        assert (found if name == "plain" else sorted(found, key=lambda text: text[0])) == DOCUMENTS
    saved.remove_columns("input_ids").save_to_disk(tmp_path / "other")
    with pytest.raises(UserError, match=r"has the columns more, but neither input_ids nor tokens"):
        built(tmp_path / "other", tokenizer[0], tmp_path)
