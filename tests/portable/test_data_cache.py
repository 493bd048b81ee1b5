"""The token cache: complete or absent, built once however many want it, never trusted when damaged."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from portable.data.sources.documents import Document
from portable.data.sources.source import Source
from portable.data.tokens import cache as caching
from portable.data.tokens import tokenize as tokenizing
from portable.data.tokens.cache import CacheDamagedError, TokenCache, TokenWriter
from portable.data.tokens.frame import special_token_frame
from portable.data.tokens.tokenize import TokenizeJob
from portable.data.tokens.tokenizer import Vocabulary, train_tokenizer
from portable.errors import RunError, UserError
from tests.portable.data_support import corpus, settings_of, source, texts, write_jsonl


class Given(Source):
    """Documents in memory, which counts how often they are read."""

    def __init__(self, documents: list[Document], **data: Any) -> None:
        super().__init__(
            "given", settings_of(task="sequence-classification" if data else "causal-lm", **data)
        )
        self.given = documents
        self.reads = 0

    def digest(self) -> str:
        return repr(self.given)

    def documents(self) -> Iterator[Document]:
        self.reads += 1
        return iter(self.given)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer(source(str(corpus(folder))), 300, folder)


def build(given: Source, tokenizer: Any, cache: Path) -> TokenCache:
    vocabulary = Vocabulary.of(tokenizer)
    frame = special_token_frame("causal-lm", vocabulary)
    return TokenizeJob(given.settings, tokenizer, vocabulary, frame, cache).tokens(given)


def test_batches_and_pieces_do_not_show(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [Document("".join(f"line {i}\n" for i in range(n))) for n in (3, 40, 1, 200)]
    whole = build(Given(documents), tokenizer, tmp_path / "whole")
    monkeypatch.setattr(tokenizing, "_BATCH_DOCUMENTS", 3)
    monkeypatch.setattr(tokenizing, "_BATCH_CHARS", 100)
    monkeypatch.setattr(tokenizing, "PIECE_CHARS", 100)
    assert len(list(tokenizing._in_pieces(iter(documents)))) > 12
    cut = build(Given(documents), tokenizer, tmp_path / "cut")
    assert cut.documents == 4
    for number, document in enumerate(documents):
        assert tokenizer.decode(cut.document("text", number)) == document.text + tokenizer.eos_token
    # Only where a piece ends may a token differ; these lines begin no token that spans their end.
    assert cut.fingerprint == whole.fingerprint


def test_a_wide_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    for size, dtype in ((1 << 16, np.uint16), ((1 << 16) + 1, np.uint32)):
        folder = tmp_path / str(size)
        folder.mkdir()
        writer = TokenWriter(folder, ["text"], size)
        writer.add("text", [0, size - 1], [2])
        writer.finish()
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
    """As somebody would who wants it to pass; the files are shorter than a block each."""
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
    # The fingerprint guards resuming: a changed one would let other text pass.
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
def test_a_damaged_cache_is_built_again(tokenizer: Any, tmp_path: Path, name: str, damage: str) -> None:
    given = Given([Document(text, label=n) for n, text in enumerate(texts(5))], label_field="label")
    whole = build(given, tokenizer, tmp_path)
    DAMAGES[damage](whole.folder / name)
    with pytest.raises(CacheDamagedError):
        TokenCache.open(whole.folder)
    again = build(given, tokenizer, tmp_path)
    assert (again.fingerprint, given.reads) == (whole.fingerprint, 2)


def test_blocks_of_a_large_cache_are_checked_when_first_read(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = Given([Document(text) for text in texts(50)])
    monkeypatch.setattr(caching, "CHECKED_WHOLE", 0)
    monkeypatch.setattr(caching, "BLOCK", 256)
    whole = build(given, tokenizer, tmp_path)
    tokens = whole.tokens["text"].tolist()
    _changed(whole.folder / "text.bin", lambda content: content.__setitem__(600, content[600] ^ 1))
    cache = TokenCache.open(whole.folder)
    assert cache.tokens["text"][:256].tolist() == tokens[:256]
    assert cache.tokens["text"][-1] == tokens[-1]
    with pytest.raises(RunError, match=r"text\.bin: damaged at byte 512; run"):
        cache.tokens["text"][250:300]
    again = build(given, tokenizer, tmp_path)  # as the next leg does
    assert again.tokens["text"].tolist() == tokens
    assert "warning: data.cache_dir" in capsys.readouterr().err


def test_a_failed_build_leaves_nothing(tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * 5000 + [{"body": "b"}])
    with pytest.raises(UserError, match=r"a\.jsonl:5001: no field 'text'"):
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
from portable.temporary_folder import made_once
from portable.data.tokens.cache import TokenCache, TokenWriter
folder, log, delay = Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3])
def write(draft):
    with log.open("a") as file:
        file.write("built\\n")
    writer = TokenWriter(draft, ["text"], 100)
    writer.add("text", [1, 2], [])
    time.sleep(delay)
    writer.add("text", [3], [1])
    writer.finish()
print(made_once(folder, TokenCache.intact, write).tokens["text"].tolist())
"""


def _builder(folder: Path, log: Path, delay: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(folder), str(log), str(delay)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_a_killed_builder_holds_nobody_up(tmp_path: Path) -> None:
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


def test_memory_does_not_grow_with_the_data(tokenizer: Any, tmp_path: Path) -> None:
    """The documents stream: while the last are read, the first are on disk and gone."""
    held = 0

    class Counted(Given):
        def documents(self) -> Iterator[Document]:
            nonlocal held
            for number in range(10_000):
                if number == 9_999:
                    (draft,) = (tmp_path / "tokens").glob("*.draft")
                    held = (draft / "text.bin").stat().st_size
                yield Document(f"a document with the number {number}")

    cache = build(Counted([]), tokenizer, tmp_path)
    assert held > 0.7 * 2 * cache.total_tokens
