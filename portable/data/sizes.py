"""The size of the data, as a plan and the first lines of a run show it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from portable.config.sources import ALONE, eval_key
from portable.data.samples.truncation import merged
from portable.data.sources.source import CAUSAL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from portable.data.samples.truncation import Truncated
    from portable.data.sources.source import Source, SourceSettings
    from portable.data.tokenization import TokenizedSource
    from portable.data.tokens.cache import TokenCache
    from portable.data.tokens.tokenize import Frame

_COMPRESSED = r"\.(parquet|arrow|gz|zst)\b"
MAX_CUT = 0.05  # a larger share of truncated tokens causes a warning


@dataclass(frozen=True)
class DataSizes:
    """The size of the data; ``None`` for values that are unknown until it is tokenized."""

    source: str
    tokenizer: str
    vocab_size: int | None
    """One more than the tokenizer's largest id."""
    seq_len: int
    packing: bool | Literal["documents"]
    documents: int | None = None
    tokens: int | None = None
    train_samples: int | None = None
    eval_samples: int | None = None
    cut: float = 0.0
    """The share of truncated tokens in documents longer than ``seq_len``."""
    waste: float | None = None
    """With packed documents, the share of positions to train on that are padding."""
    truncated: Truncated | None = None
    """What truncation does to conversations, or to texts where it does not only cut their ends."""
    trained: float | None = None
    """The share of a conversation's tokens that is trained."""
    notes: tuple[str, ...] = ()
    """What the chat template does that may surprise."""
    size_bytes: int | None = None
    """Of files of plain text or JSON."""
    cached: Path | None = None
    """The token cache, if it exists."""
    of_sources: Mapping[str, int] = field(default_factory=dict)
    """For a mixture, the samples to train on of each source, by name."""
    evals: Mapping[str, tuple[str, int | None]] = field(default_factory=dict)
    """Source and samples of each of ``data.eval``, by name."""
    trained_on: tuple[str, ...] = ()
    """The names of those that have files of the training data."""
    opened: Any = field(default=None, compare=False, repr=False)
    """The tokenizer, if it is available locally."""
    end_of_turn: int | None = field(default=None, compare=False, repr=False)
    """For conversations, the token that ends an answer, as far as it is known."""
    target_frame: Frame | None = field(default=None, compare=False, repr=False)
    """The special tokens around a target text, if the tokenizer is available."""

    def __str__(self) -> str:
        vocabulary = "" if self.vocab_size is None else f" ({self.vocab_size:,} tokens)"
        packed = "whole documents packed" if self.packing == "documents" else "packed"
        made = f"samples of {self.seq_len} tokens, {packed if self.packing else 'padded'}"
        how = f"{self.tokenizer}{vocabulary}; {made}"
        own = "".join(
            f"; evaluation{f' {name}' if name else ''}: {source}"
            + ("" if samples is None else f", {samples:,} samples")
            for name, (source, samples) in self.evals.items()
        )
        if self.cached is None:
            return f"{self.source}: sizes are known after tokenizing by {how}{own}"
        held_out = f", {self.eval_samples:,} to evaluate" if self.eval_samples or not self.evals else ""
        text = (
            f"{self.source}: {self.documents:,} documents, {self.tokens:,} tokens by {how}: "
            f"{self.train_samples:,} to train{held_out}{own}"
        )
        text += "".join(f"; {name}: {samples:,} samples" for name, samples in self.of_sources.items())
        text += "" if self.trained is None else f"; {self.trained:.1%} of the tokens are trained"
        if self.waste is not None:
            text += f"; {self.waste:.2%} of the positions are padding"
        return text if self.cut <= MAX_CUT else f"{text}; {self.cut:.0%} of the tokens are cut off"

    @property
    def warnings(self) -> list[str]:
        """What may surprise the user about the data, a line each."""
        found = []
        if self.truncated is not None and (lost := str(self.truncated)):
            found.append(f"data.truncation: of the samples, {lost}")
        elif self.cut > MAX_CUT:
            found.append(self._cut_warning)
        found += [f"{eval_key(name)}: the run is trained on files of it, too" for name in self.trained_on]
        return [*found, *self.notes]

    @property
    def _cut_warning(self) -> str:
        return (
            f"data.seq_len: {self.cut:.0%} of the tokens are cut off, because documents are truncated to "
            f"{self.seq_len} tokens; raise it, set data.packing to true (language models), or for .txt files "
            "set data.text_split to paragraph or line"
        )


def sizes_of(
    source: Source, tokenizer: str | None, vocab_size: int | None, tokenized: TokenizedSource | None
) -> DataSizes:
    """The sizes of one source; ``tokenized`` is None while its tokens are not known."""
    settings = source.settings
    found = DataSizes(
        source=source.described,
        tokenizer=tokenizer or "a byte-pair encoding trained on it",
        vocab_size=vocab_size,
        seq_len=settings.data.seq_len,
        packing=settings.packing,
        size_bytes=None if re.search(_COMPRESSED, source.described) else source.size_bytes,
    )
    if tokenized is None:
        return found
    tokens = tokenized.tokens
    train, held_out, waste = tokenized.counts()
    trained = tokens.meta.get("trained_tokens")
    return replace(
        found,
        documents=tokens.documents,
        tokens=tokens.total_tokens,
        train_samples=train,
        eval_samples=held_out,
        cut=0.0 if settings.packing is True else _cut_share(tokens, settings),
        waste=waste,
        truncated=tokenized.truncated,
        trained=None if trained is None else trained / max(1, tokens.total_tokens),
        notes=tuple(tokens.meta.get("notes", ())),
        cached=tokens.folder,
    )


def _cut_share(tokens: TokenCache, settings: SourceSettings) -> float:
    """The share of tokens that are cut off their document or pair of texts."""
    longest = settings.data.seq_len + (settings.task == CAUSAL)
    longest_target = settings.data.target_seq_len or settings.data.seq_len
    cut = 0
    count = tokens.documents
    together = [["text", "pair"]] if "pair" in tokens.offsets else [[name] for name in tokens.offsets]
    for names in together:
        most = longest_target if names == ["target"] else longest
        for start in range(0, count, 1 << 20):
            stop = min(count, start + (1 << 20)) + 1
            lengths = sum(np.diff(tokens.offsets[name][start:stop].astype(np.int64)) for name in names)
            cut += int(np.maximum(lengths - most, 0).sum())
    return cut / max(1, tokens.total_tokens)


def combined(sizes: Mapping[str, DataSizes]) -> DataSizes:
    """The sizes of all sources of a run together, by name; of the only one as they are."""
    if ALONE in sizes:
        return sizes[ALONE]
    parts = list(sizes.values())
    first = parts[0]
    source = ", ".join(f"{name} ({one.source})" for name, one in sizes.items())
    held = [one.size_bytes for one in parts]
    size_bytes = None if None in held else sum(size or 0 for size in held)
    if any(one.cached is None for one in parts):
        return replace(
            first,
            source=source,
            size_bytes=size_bytes,
            cached=None,
            documents=None,
            tokens=None,
            truncated=None,
            waste=None,
        )
    tokens = [one.tokens or 0 for one in parts]
    samples = [one.train_samples or 0 for one in parts]

    def mean(values: Sequence[float | None], weights: Sequence[int], missing: float) -> float | None:
        if all(value is None for value in values):
            return None
        pairs = zip(values, weights, strict=True)
        return sum((missing if value is None else value) * n for value, n in pairs) / max(1, sum(weights))

    truncated = [one.truncated for one in parts if one.truncated is not None]
    return replace(
        first,
        source=source,
        size_bytes=size_bytes,
        documents=sum(one.documents or 0 for one in parts),
        tokens=sum(tokens),
        train_samples=sum(samples),
        eval_samples=sum(one.eval_samples or 0 for one in parts),
        cut=mean([one.cut for one in parts], tokens, 0.0) or 0.0,
        waste=mean([one.waste for one in parts], samples, 0.0),
        trained=mean([one.trained for one in parts], tokens, 1.0),
        truncated=merged(truncated) if truncated else None,
        notes=tuple(dict.fromkeys(note for one in parts for note in one.notes)),
        of_sources={name: one.train_samples or 0 for name, one in sizes.items()},
    )
