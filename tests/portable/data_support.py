"""Small datasets and settings for the tests of the data path."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from portable.batch import Batch
from portable.config.sections import DataConfig
from portable.data.samples.base import Samples
from portable.data.samples.order import EpochIndex
from portable.data.sources.source import DataSource, SourceSettings
from portable.data.sources.source_kinds import open_source
from portable.data.tokens import tokenizer as tokenizer_module
from portable.data.tokens.cache import TokenCache, TokenCacheWriter


class Settings(DataConfig):
    """The ``data`` section with small defaults and without the schema's bounds."""

    source: Any = None
    tokenizer: str | None = None
    max_samples: int | None = None
    vocab_size: int | None = 300
    seq_len: int = 16
    eval_fraction: float = 0.1
    cache_dir: Any = None


def replace(settings: Settings, **values: Any) -> Settings:
    """Return a copy with other values."""
    return settings.model_copy(update=values)


def read_sample(samples: Samples, index: int) -> Batch:
    """Read a sample of the first epoch, without a batch dimension."""
    return {name: values[0] for name, values in samples.build_batch([EpochIndex(0, index)]).items()}


def settings_of(name: Any = None, task: str = "causal-lm", **data: Any) -> SourceSettings:
    """Build the settings that a source is opened with. The default format is text."""
    return SourceSettings(Settings(**({"source": name, "format": "text"} | data)), task)


def source(name: Any, task: str = "causal-lm", **data: Any) -> DataSource:
    """Open a single source."""
    return open_source(settings_of(name, task, **data))


def texts(number: int) -> list[str]:
    """Return different documents of different lengths."""
    return [f"document {i}: " + " ".join(f"w{i * j % 97}" for j in range(i % 23 + 1)) for i in range(number)]


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def kill_build(number: int, build: Callable[[], object]) -> None:
    """Kill a process that builds a token cache after a number of additions.

    Args:
        number: Number of calls of ``TokenCacheWriter.add_documents`` before the kill. The kill also loses the
            contents of file buffers.
        build: Function that builds the cache.
    """
    child = os.fork()
    if child == 0:
        # The threads of the tokenizers library do not exist in a fork.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        tokenizer_module._parallelism_is_ours = False
        calls = count()
        add = TokenCacheWriter.add_documents

        def add_or_die(*arguments: Any) -> None:
            add(*arguments)
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        try:
            with patch.object(TokenCacheWriter, "add_documents", add_or_die):
                build()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def corpus(folder: Path, number: int = 60) -> Path:
    return write_jsonl(folder / "corpus.jsonl", ({"text": text} for text in texts(number)))


def token_cache(
    folder: Path, documents: Sequence[Sequence[int]], *, labels: Sequence[int | str] | None = None
) -> TokenCache:
    """Write a cache of documents given as tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = TokenCacheWriter(folder, ["text"], vocab_size=1000, labels=labels is not None)
    writer.add_documents(
        "text", np.array([token for tokens in documents for token in tokens]), [*map(len, documents)]
    )
    writer.add_labels(labels or ())
    writer.write_metadata()
    writer.close()
    return TokenCache.open(folder)


def word_level(names: Sequence[str], single: str = "", pair: str | None = None, **options: Any) -> Any:
    """Build a tokenizer of words that frames a text and a pair of texts by the given templates."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {name: number for number, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(ids, unk_token=options.get("unk_token", names[0])))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if single:
        named = [one for one in ids.items() if one[0] in (pair or single)]
        words.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=named)
    return PreTrainedTokenizerFast(tokenizer_object=words, **options)  # type: ignore[no-untyped-call, unused-ignore]
