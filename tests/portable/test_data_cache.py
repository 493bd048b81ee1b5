"""The token cache: complete or absent, built once by any number of processes, and verified before use."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from portable.data.sources.documents import Document
from portable.data.sources.records import CsvCell
from portable.data.sources.source import DataSource, SourceShard, TokenChunk, TokenSource
from portable.data.tokens import cache as caching
from portable.data.tokens import tokenize as tokenizing
from portable.data.tokens.cache import CacheDamagedError, TokenCache, TokenCacheWriter
from portable.data.tokens.special_tokens import build_special_token_frame
from portable.data.tokens.tokenize import TokenizeJob
from portable.data.tokens.tokenizer import Vocabulary, train_tokenizer
from portable.errors import RunError, UserError
from tests.converters.compare import tree
from tests.portable.data_support import corpus, kill_build, settings_of, source, texts, write_jsonl


class Given(DataSource):
    """Documents in memory, which counts how often they are read."""

    def __init__(self, documents: list[Document], task: str = "causal-lm", **data: Any) -> None:
        if "label_field" in data:
            task = "sequence-classification"
        super().__init__("given", settings_of(task=task, **data))
        self.given = documents
        self.reads = 0

    def compute_digest(self) -> str:
        return repr(self.given)

    def iter_documents(self) -> Iterator[Document]:
        self.reads += 1
        return iter(self.given)


class GivenTokens(TokenSource):
    """Arrays of tokens, some of which end within a document.

    Args:
        stop: Number of the array at which a person presses Ctrl-C.
        size: Number of tokens that are yielded at a time.
    """

    def __init__(self, stop: int | None = None, size: int = 40) -> None:
        super().__init__("given", settings_of(task="causal-lm"))
        self._stop = stop
        self._size = size

    def compute_digest(self) -> str:
        return "80 arrays"

    def iter_shards(self, part_bytes: int) -> Iterator[SourceShard]:
        raise NotImplementedError

    def _read_token_chunks(self, vocab_size: int, end: int | None) -> Iterator[TokenChunk]:
        tokens = np.random.default_rng(0).integers(0, vocab_size, 80 * 40)
        ends = np.flatnonzero(tokens % 13 == 0)
        for start in range(0, len(tokens), self._size):
            if self._stop is not None and start >= 40 * self._stop:
                raise KeyboardInterrupt
            within = ends[(ends > start) & (ends <= start + self._size)] - start
            if start + self._size >= len(tokens):
                within = np.append(within[within < len(tokens) - start], len(tokens) - start)
            yield TokenChunk(tokens[start : start + self._size], np.diff(within, prepend=0).tolist())


class Interrupted(Given):
    """The same documents, up to the one at which a person presses Ctrl-C."""

    def __init__(self, given: Given, number: int) -> None:
        self.__dict__.update(given.__dict__)
        self.number = number

    def iter_documents(self) -> Iterator[Document]:
        yield from self.given[: self.number]
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer(source(str(corpus(folder))), 300, folder)


def build(given: DataSource, tokenizer: Any, cache: Path) -> TokenCache:
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    frame = build_special_token_frame(given.settings.task, vocabulary)
    return TokenizeJob(given.settings, tokenizer, vocabulary, frame, cache).tokenize_source(given)


def test_token_cache_does_not_depend_on_batches_and_pieces(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [Document("".join(f"line {i}\n" for i in range(n))) for n in (3, 40, 1, 200)]
    whole = build(Given(documents), tokenizer, tmp_path / "whole")
    monkeypatch.setattr(tokenizing, "_BATCH_DOCUMENTS", 3)
    monkeypatch.setattr(tokenizing, "_BATCH_CHARS", 100)
    monkeypatch.setattr(tokenizing, "PIECE_CHARS", 100)
    assert len(list(tokenizing._iter_pieces(iter(documents)))) > 12
    cut = build(Given(documents), tokenizer, tmp_path / "cut")
    assert cut.num_documents == 4
    for number, document in enumerate(documents):
        assert tokenizer.decode(cut.read_document("text", number)) == document.text + tokenizer.eos_token
    # A token may differ only at the end of a piece. No token spans the end of these lines.
    assert cut.fingerprint == whole.fingerprint


KINDS: dict[str, tuple[str, dict[str, Any], Callable[[int], Document]]] = {
    "texts in pieces": (
        "causal-lm",
        {},
        lambda n: Document(texts(20)[n % 20] + "\n" + "line\n" * (n % 7 * 9)),
    ),
    "classes": (
        "sequence-classification",
        {"label_field": "label"},
        lambda n: Document(texts(20)[n % 20], label=("b", "a", "c")[n % 3]),
    ),
    "cells of numbers": (
        "sequence-classification",
        {"label_field": "label", "text_pair_field": "pair"},
        lambda n: Document(
            texts(20)[n % 20], label=CsvCell(f"{n}" if n < 30 else f"{n}.5"), pair_text=f"pair {n}"
        ),
    ),
    "targets": (
        "seq2seq-lm",
        {"target_field": "target"},
        lambda n: Document(f"a {n}", target="b " * (n % 9 + 1)),
    ),
    "columns": (
        "causal-lm",
        {"columns": ["weight"]},
        lambda n: Document(texts(20)[n % 20], extra_columns=(n if n < 40 else 0.5,)),
    ),
    "tokens": ("causal-lm", {}, lambda n: Document("")),  # see GivenTokens
}


IN_PROCESSES = {"texts in pieces", "cells of numbers"}
"""Kinds that are also tried with several processes, which take seconds to start."""


@pytest.mark.parametrize("kind", KINDS)
def test_token_cache_does_not_depend_on_processes_and_kills(
    kind: str,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The files equal the files of one uninterrupted process, byte for byte."""
    task, data, document = KINDS[kind]
    texts_in_memory = Given([document(n) for n in range(80)], task, **data)
    in_memory: DataSource = texts_in_memory
    interrupted: DataSource = Interrupted(texts_in_memory, 60)
    if kind == "tokens":  # read again in longer arrays, as another version may do
        in_memory, interrupted = GivenTokens(size=56), GivenTokens(stop=60)
    monkeypatch.setattr(tokenizing, "PIECE_CHARS", 60)
    monkeypatch.setattr(tokenizing, "_BATCH_CHARS", 500)
    whole = tree(build(in_memory, tokenizer, tmp_path / "whole").folder)
    assert not capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(tokenizing, "_SAVE_SECONDS", 0)
        for number in (0, 3, 1, 2):
            kill_build(number, partial(build, in_memory, tokenizer, tmp_path / "killed"))
        with pytest.raises(KeyboardInterrupt):
            build(interrupted, tokenizer, tmp_path / "killed")
        (draft,) = (tmp_path / "killed" / "tokens").glob("*.draft")
        documents = json.loads((draft / "progress.json").read_text())["documents"]
        assert documents > 5
        capsys.readouterr()
        assert tree(build(in_memory, tokenizer, tmp_path / "killed").folder) == whole
        assert f"continuing after the {documents:,} documents" in capsys.readouterr().err
        kill_build(3, partial(build, in_memory, tokenizer, tmp_path / "damaged"))
        (draft,) = (tmp_path / "damaged" / "tokens").glob("*.draft")
        _changed(draft / "text.bin", _flip)
        assert tree(build(in_memory, tokenizer, tmp_path / "damaged").folder) == whole
        assert not capsys.readouterr().err  # it began again
    if kind not in IN_PROCESSES:
        return
    monkeypatch.setattr(tokenizing, "_LOCAL_TEXT_BATCHES", 1)
    monkeypatch.setattr(tokenizing, "count_usable_cores", lambda: 2)
    assert tree(build(in_memory, tokenizer, tmp_path / "processes").folder) == whole


def test_large_source_suggests_stream(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(corpus(tmp_path))
    build(source(path), tokenizer, tmp_path / "small")
    assert not capsys.readouterr().err
    monkeypatch.setattr(tokenizing, "_LARGE_BYTES", 1000)
    build(source(path), tokenizer, tmp_path / "large")
    assert "before the first step; set data.stream: true to start immediately" in capsys.readouterr().err
    build(source(path), tokenizer, tmp_path / "large")
    assert not capsys.readouterr().err


def test_token_cache_stores_wide_vocabulary_in_four_bytes(tmp_path: Path) -> None:
    for size, dtype in ((1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)):
        folder = tmp_path / str(size)
        folder.mkdir()
        writer = TokenCacheWriter(folder, ["text"], size)
        writer.add_documents("text", [0, size - 1], [2])
        writer.write_metadata()
        cache = TokenCache.open(folder)
        assert cache.tokens["text"].dtype == dtype
        assert cache.tokens["text"].tolist() == [0, size - 1]


def _changed(path: Path, change: Callable[[bytearray], object]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def _flip(content: bytearray) -> None:
    content[len(content) // 2] ^= 1


def _flip_with_checksum(path: Path) -> None:
    """Flip a bit and update the checksum, like a deliberate change. Each file is shorter than a block."""
    _changed(path, _flip)
    names = sorted(json.loads(path.with_name("meta.json").read_text())["files"])
    sums = [zlib.crc32(path.with_name(name).read_bytes()) for name in names]
    path.with_name("blocks.crc").write_bytes(np.array(sums, "<u4").tobytes())


def _rewritten(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "one bit": lambda path: _changed(path, _flip),
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "one bit, and its checksum with it": _flip_with_checksum,
    # The fingerprint protects resumed runs: with a changed fingerprint, other text would be accepted.
    "another fingerprint": lambda path: _rewritten(path, fingerprint="0" * 32),
    "another format": lambda path: _rewritten(path, format=0),
    "another nesting": lambda path: path.write_text("[" * 100_000),
}
DAMAGED = [
    *((name, "one bit") for name in ("meta.json", "blocks.crc", "text.bin", "text.idx", "labels.bin")),
    *(
        ("meta.json" if "another" in damage else "text.bin", damage)
        for damage in DAMAGES
        if damage != "one bit"
    ),
]


@pytest.mark.parametrize(("name", "damage"), DAMAGED)
def test_damaged_token_cache_is_built_again(tokenizer: Any, tmp_path: Path, name: str, damage: str) -> None:
    given = Given([Document(text, label=n) for n, text in enumerate(texts(5))], label_field="label")
    whole = build(given, tokenizer, tmp_path)
    DAMAGES[damage](whole.folder / name)
    with pytest.raises(CacheDamagedError):
        TokenCache.open(whole.folder)
    again = build(given, tokenizer, tmp_path)
    assert (again.fingerprint, given.reads) == (whole.fingerprint, 2)


def test_large_token_cache_checks_blocks_on_first_read(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = Given([Document(text) for text in texts(50)])
    monkeypatch.setattr(caching, "MAX_FULLY_CHECKED_BYTES", 0)
    monkeypatch.setattr(caching, "BLOCK_BYTES", 256)
    whole = build(given, tokenizer, tmp_path)
    tokens = whole.tokens["text"].tolist()
    _changed(whole.folder / "text.bin", lambda content: content.__setitem__(600, content[600] ^ 1))
    cache = TokenCache.open(whole.folder)
    assert cache.tokens["text"][:256].tolist() == tokens[:256]
    assert cache.tokens["text"][-1] == tokens[-1]
    with pytest.raises(RunError, match=r"text\.bin: is damaged at byte 512; run"):
        cache.tokens["text"][250:300]
    again = build(given, tokenizer, tmp_path)  # as the next leg does
    assert again.tokens["text"].tolist() == tokens
    assert "warning: data.cache_dir" in capsys.readouterr().err


def test_large_token_cache_checks_checksums_per_block(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank does not read the checksums of all blocks to open a large cache."""
    monkeypatch.setattr(caching, "MAX_FULLY_CHECKED_BYTES", 0)
    monkeypatch.setattr(caching, "_MAX_CHECKED_SUMS_BYTES", 0)
    monkeypatch.setattr(caching, "BLOCK_BYTES", 256)
    cache = build(Given([Document(text) for text in texts(50)]), tokenizer, tmp_path)
    _changed(cache.folder / "blocks.crc", lambda content: content.__setitem__(9, content[9] ^ 1))
    opened = TokenCache.open(cache.folder)
    assert opened.tokens["text"][:256].tolist() == cache.tokens["text"][:256].tolist()
    with pytest.raises(RunError, match=r"text\.bin: is damaged at byte 512; run"):
        opened.tokens["text"][256:300]


def test_failed_token_cache_build_leaves_nothing(tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * 5000 + [{"body": "b"}])
    with pytest.raises(UserError, match=r"a\.jsonl:5001: there is no field 'text'"):
        build(source(str(path)), tokenizer, tmp_path / "cache")
    assert not [entry for entry in (tmp_path / "cache" / "tokens").iterdir() if entry.is_dir()]
    with pytest.raises(UserError, match="contains no text"):
        build(Given([]), tokenizer, tmp_path / "cache")


BUILDER = """
import sys, types
from pathlib import Path
import portable
# The package itself would import torch, which takes longer than all the rest here.
package = sys.modules["portable.data"] = types.ModuleType("portable.data")
package.__path__ = [portable.__path__[0] + "/data"]
import time
from portable.temporary_folder import open_or_build_cache_folder
from portable.data.tokens.cache import TokenCache, TokenCacheWriter
folder, log, delay = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
def write(draft):
    with log.open("a") as file:
        file.write("built\\n")
    writer = TokenCacheWriter(draft, ["text"], 100)
    writer.add_documents("text", [1, 2], [])
    time.sleep(delay)
    writer.add_documents("text", [3], [1])
    writer.write_metadata()
print(open_or_build_cache_folder(folder, TokenCache.open_if_intact, write).tokens["text"].tolist())
"""


def _builder(folder: Path, log: Path, delay: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(folder), str(log), str(delay)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_killed_builder_releases_lock(tmp_path: Path) -> None:
    folder, log = tmp_path / "entry", tmp_path / "log"
    killed, second = _builder(folder, log, 600), None
    deadline = time.monotonic() + 60
    try:
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        second = _builder(folder, log, 0)
        with pytest.raises(subprocess.TimeoutExpired):
            second.communicate(timeout=0.5)
        assert not folder.exists()
    finally:
        killed.kill()
        killed.communicate(timeout=60)
    assert second.communicate(timeout=60)[0] == "[1, 2, 3]\n"
    assert log.read_text() == "built\nbuilt\n"


def test_token_cache_build_streams_documents(tokenizer: Any, tmp_path: Path) -> None:
    """When the last document is read, the first ones are already on disk."""
    held = 0

    class Counted(Given):
        def iter_documents(self) -> Iterator[Document]:
            nonlocal held
            for number in range(10_000):
                if number == 9_999:
                    (draft,) = (tmp_path / "tokens").glob("*.draft")
                    held = (draft / "text.bin").stat().st_size
                yield Document(f"a document with the number {number}")

    cache = build(Counted([]), tokenizer, tmp_path)
    assert held > 0.7 * 2 * cache.num_tokens
