"""Files of tokens of other programs: the tokens and documents that they wrote, or a refusal."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from portable.config.sections import DataConfig
from portable.data.dataset import build_data
from portable.data.sources import token_files
from portable.data.tokens.tokenizer import Vocabulary, train_tokenizer
from portable.errors import UserError
from tests.portable.data_support import corpus, source
from tests.portable.test_stream import length


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """A tokenizer's folder and its end token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    made = train_tokenizer(source(str(corpus(folder))), 300, folder)
    made.save_pretrained(folder / "saved")
    end = Vocabulary.of(made).end
    assert end is not None
    return str(folder / "saved"), end


def documents(end: int, count: int = 40) -> list[list[int]]:
    return [[(n * 7 + at) % 250 + 10 for at in range(n * 5 % 23 + 1)] + [end] for n in range(count)]


def flat(texts: Sequence[Sequence[int]]) -> list[int]:
    return [token for text in texts for token in text]


def nanogpt(path: Path, texts: Sequence[Sequence[int]]) -> None:
    """As data/*/prepare.py of nanoGPT does."""
    np.array(flat(texts), dtype=np.uint16).tofile(path)


def llm_c(path: Path, texts: Sequence[Sequence[int]]) -> None:
    """As write_datafile of llm.c's data_common.py does."""
    tokens = np.array(flat(texts), dtype=np.uint16)
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())


def megatron(path: Path, texts: Sequence[Sequence[int]]) -> None:
    """As IndexedDatasetBuilder of Megatron-LM does: each document is two sequences here."""
    parts = [part for text in texts for part in (text[: len(text) // 2], text[len(text) // 2 :])]
    np.array(flat(texts), dtype=np.int32).tofile(path)
    sizes = np.array([len(part) for part in parts], dtype=np.int32)
    pointers = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64) * 4]).astype(np.int64)
    ends = np.arange(0, len(parts) + 1, 2, dtype=np.int64)
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, len(parts), len(texts) + 1)
    path.with_suffix(".idx").write_bytes(head + sizes.tobytes() + pointers.tobytes() + ends.tobytes())


def built(path: Path | str, tokenizer: str, folder: Path, **more: Any) -> Any:
    given: dict[str, Any] = {"source": str(path), "tokenizer": tokenizer, "seq_len": 16, "eval_fraction": 0.0}
    return build_data(DataConfig(**(given | more), cache_dir=str(folder / "cache")))


def found_in(data: Any) -> list[list[int]]:
    return [data.tokens.document("text", n).tolist() for n in range(data.tokens.documents)]


@pytest.mark.parametrize("write", [nanogpt, llm_c, megatron])
@pytest.mark.parametrize("chunk", [7, 1 << 22])
def test_tokens_and_documents_are_those_of_the_file(
    write: Any, chunk: int, tokenizer: tuple[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_files, "_CHUNK", chunk)
    folder, end = tokenizer
    texts = documents(end)
    write(tmp_path / "some.bin", texts)
    data = built(tmp_path / "some.bin", folder, tmp_path)
    assert found_in(data) == texts
    assert data.train[2]["input_ids"].tolist() == flat(texts)[32:48]


def test_several_files_and_a_stream_of_them(tokenizer: tuple[str, int], tmp_path: Path) -> None:
    folder, end = tokenizer
    texts = documents(end, 90)
    for number in range(3):
        (nanogpt, llm_c, megatron)[number](tmp_path / f"{number}.bin", texts[30 * number : 30 * number + 30])
    whole = built(tmp_path / "*.bin", folder, tmp_path)
    assert found_in(whole) == texts
    stream = built(tmp_path / "*.bin", folder, tmp_path, stream=True).train
    stream._processes = 0
    apart = [built(tmp_path / f"{n}.bin", folder, tmp_path).train for n in range(3)]
    places = [stream.locate(at, 0) for at in range(sum(map(len, apart)))]
    rows = {tuple(row) for row in stream.batch(places)["input_ids"].tolist()}
    assert rows == {tuple(one[at]["input_ids"].tolist()) for one in apart for at in range(len(one))}


def test_wrong_files_are_refused_in_one_line(tokenizer: tuple[str, int], tmp_path: Path) -> None:
    folder, end = tokenizer
    path = tmp_path / "some.bin"

    def refused(said: str) -> None:
        with pytest.raises(UserError, match=said) as error:
            built(path, folder, tmp_path)
        assert "\n" not in str(error.value)

    refused("no such file")
    nanogpt(path, [[5, 60_000, end]])
    refused("has the token 60000, beyond the 300 of the tokenizer")
    llm_c(path, documents(end))
    path.write_bytes(path.read_bytes()[:-2])
    refused("not those of .* tokens of 2 bytes; copy the file again")
    path.unlink()
    megatron(path, documents(end))
    path.write_bytes(path.read_bytes()[:-4])
    refused("some.idx: does not fit some.bin")
    whole = path.with_suffix(".idx").read_bytes()
    path.with_suffix(".idx").write_bytes(whole[:60])
    refused("some.idx: is cut off")
    path.with_suffix(".idx").write_bytes(b"x" * 100)
    refused("is no index of Megatron's")
    with pytest.raises(UserError, match=r"data.tokenizer: .* has tokens and no text"):
        build_data(DataConfig(source=str(path), cache_dir=str(tmp_path / "cache")))


# -- shards of other programs -------------------------------------------------------------------------------

WRITTEN = Path(__file__).parent.parent / "published" / "tokens"
TEXTS = [[at + n for at in range(n % 7 + 3)] for n in range(50)]
"""The documents that the programs were given."""
SHARDED = {"mds": TEXTS, "mds_bytes_zstd": TEXTS, "mds_fixed": [[*range(8)]] * 50, "litdata": TEXTS}


@pytest.mark.parametrize("name", SHARDED)
def test_shards_of_other_programs(name: str, tokenizer: tuple[str, int], tmp_path: Path) -> None:
    """Files that Mosaic Streaming and litdata wrote; as a stream, each shard is read when it is needed."""
    data = built(WRITTEN / name, tokenizer[0], tmp_path, seq_len=4)
    found = found_in(data)
    if name == "litdata":  # whose chunks come in the order in which its workers wrote them
        found = sorted(found, key=lambda text: text[0])
    assert found == SHARDED[name]
    stream = built(WRITTEN / name, tokenizer[0], tmp_path, seq_len=4, stream=True).train
    stream._processes = 0
    rows = stream.batch([stream.locate(at, 0) for at in range(length(stream))])["input_ids"].tolist()
    tokens = flat(SHARDED[name])
    blocks = {tuple(tokens[at : at + 4]) for at in range(len(tokens))}
    assert len(rows) >= len(tokens) // 4 - 2 * len(stream._shards) and set(map(tuple, rows)) <= blocks


@pytest.mark.parametrize(
    ("name", "file"),
    [("mds", "shard.00001.mds"), ("mds_bytes_zstd", "shard.00001.mds.zstd"), ("litdata", "chunk-0-1.bin")],
)
def test_damaged_shards_are_refused(name: str, file: str, tokenizer: tuple[str, int], tmp_path: Path) -> None:
    folder = tmp_path / name
    shutil.copytree(WRITTEN / name, folder)
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=f"{file}: cannot read it"):
        built(folder, tokenizer[0], tmp_path)
    index = (WRITTEN / name / "index.json").read_text()
    if name == "mds_bytes_zstd":  # its checksum tells
        (folder / file).write_bytes(content)
        first = json.loads(index)["shards"][0]["raw_data"]["hashes"]["sha1"]
        (folder / "index.json").write_text(index.replace(first, "0" * 40))
        with pytest.raises(UserError, match=r"another sha1 than in index.json"):
            built(folder, tokenizer[0], tmp_path)
    (folder / "index.json").write_text(json.dumps({"shards": [{"format": "mds"}]}))
    with pytest.raises(UserError, match=r"index.json: cannot read it"):
        built(folder, tokenizer[0], tmp_path)


def test_a_dataset_saved_to_disk(tokenizer: tuple[str, int], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_dict({"input_ids": TEXTS, "more": list(range(50))})
    saved.save_to_disk(tmp_path / "plain", num_shards=3)
    saved.shuffle(seed=1).save_to_disk(tmp_path / "shuffled")
    for name in ("plain", "shuffled"):
        data = built(tmp_path / name, tokenizer[0], tmp_path)
        found = found_in(data)
        assert (found if name == "plain" else sorted(found, key=lambda text: text[0])) == TEXTS
    saved.remove_columns("input_ids").save_to_disk(tmp_path / "other")
    with pytest.raises(UserError, match=r"has the columns more, not input_ids or tokens"):
        built(tmp_path / "other", tokenizer[0], tmp_path)
