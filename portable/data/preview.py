"""Samples to look at: what the model is shown, and which tokens it is trained on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from portable.batch import IGNORED
from portable.converters.console import escape_control_characters
from portable.data.samples.base import sequence
from portable.data.tokens.bounded_tokenizer import decode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from portable.data.dataset import Data

SHOWN = 3
"""Samples in a run's file, for its report."""
_BINS = 12
_CHUNK = 1 << 20
_MOST_CHARS = 20_000


@dataclass(frozen=True)
class Sample:
    """One sample of a run.

    Attributes:
        position: its place in the run, from 0.
        documents: the numbers of the source's documents in it.
        source: its name in a mixture.
        tokens: that are not padding.
        trained: labels that count.
        pieces: its text, cut where training begins and ends, each with whether it is trained.
    """

    position: int
    documents: list[int]
    tokens: int
    trained: int
    pieces: list[tuple[str, bool]]
    source: str = ""


@dataclass(frozen=True)
class Preview:
    """The data of a run in a few numbers and samples.

    Attributes:
        facts: the numbers, in words.
        lengths: how many documents have a length from the first number to below the second, which is None
            for the last.
        samples: the first of the run.
    """

    facts: dict[str, str]
    lengths: list[tuple[int, int | None, int]]
    samples: list[Sample]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def preview(data: Data, count: int, seed: int) -> Preview:
    """Look at the data of a run and at the first samples, or the first documents if they are packed.

    Args:
        data: Data of a causal language model.
        count: Number of samples or packed documents.
        seed: Seed of the run, which orders them.
    """
    length = data.sizes.seq_len
    caches = [one.tokens for one in data.opened.values()]
    total, documents = sum(one.total_tokens for one in caches), sum(one.documents for one in caches)
    lengths, taken = _lengths(data)
    used = list(islice(_iter_samples(data, seed), count))
    mean = total / max(1, documents)
    facts = {
        "source": data.sizes.source,
        "documents": f"{documents:,}",
        "samples": f"{len(data.train):,} to train, of {length:,} tokens",
        "tokens": f"{total:,}, {mean:,.1f} a document",
        "trained": "all" if data.sizes.trained is None else f"{data.sizes.trained:.1%} of the tokens",
    }
    if data.sizes.truncated is not None and (lost := str(data.sizes.truncated)):
        facts["truncated"] = lost
    padded = data.sizes.packing is False
    left_out = sum(
        0 if one.truncated is None else len(one.truncated.left_out) for one in data.opened.values()
    )
    kept = documents - left_out
    waste = 1 - taken / max(1, kept * length) if padded else data.train.waste
    facts["padding"] = f"{waste:.1%} of the positions"
    if data.end_of_turn is not None:
        facts["an answer ends with"] = decode(data.tokenizer, [data.end_of_turn])
    return Preview(facts, lengths, used)


def _lengths(data: Data) -> tuple[list[tuple[int, int | None, int]], int]:
    """The histogram of the documents' lengths, and the positions that they fill without packing."""
    length = data.sizes.seq_len
    step = max(1, -(-length // (_BINS - 4)))
    # Equal bins up to about the length of a sample; beyond, each is twice as wide as the one before.
    edges = step * np.append(np.arange(_BINS), _BINS << np.arange(32, dtype=np.int64))
    counts = np.zeros(len(edges), dtype=np.int64)
    taken = 0
    for one in data.opened.values():
        left_out = np.zeros(0, dtype=np.int64) if one.truncated is None else one.truncated.left_out
        for start in range(0, one.tokens.documents, _CHUNK):
            sizes = np.diff(one.tokens.offsets["text"][start : start + _CHUNK + 1].astype(np.int64))
            counts += np.bincount(np.searchsorted(edges, sizes, "right") - 1, minlength=len(edges))
            filled = np.clip(sizes - 1, 0, length)
            filled[left_out[(left_out >= start) & (left_out < start + len(sizes))] - start] = 0
            taken += int(filled.sum())
    used = np.flatnonzero(counts)
    bins = [
        (int(edges[at]), int(edges[at + 1]) if at + 1 < len(edges) else None, int(counts[at]))
        for at in range(int(used[0]), int(used[-1]) + 1)
    ]
    return bins, taken


def _iter_samples(data: Data, seed: int) -> Iterator[Sample]:
    """Yield the samples of a run in its order, and each document of a packed sample on its own."""
    for position in range(len(data.train)):
        epoch, index = data.train.locate(position, seed)
        arrays = data.train.arrays([(epoch, index)])
        documents = [int(number) for number in data.train.documents(index)]
        source = data.train.source_name(index)
        if "document_lengths" in arrays:
            start = 0
            for number, length in zip(documents, arrays["document_lengths"][0].tolist(), strict=False):
                part = {name: arrays[name][:, start : start + length] for name in ("input_ids", "labels")}
                yield Sample(position, [number], *_pieces(data, part), source)
                start += length
            continue
        several = data.train.sequences  # one after the other
        parts = [sequence(arrays, at) for at in range(several)] if several > 1 else [arrays]
        found = [_pieces(data, part) for part in parts]
        pieces = found[0][2]
        for _, _, more in found[1:]:
            pieces = [*pieces, ("\n", False), *more]
        tokens, trained = sum(one[0] for one in found), sum(one[1] for one in found)
        yield Sample(position, documents, tokens, trained, pieces, source)


def _pieces(data: Data, arrays: Any) -> tuple[int, int, list[tuple[str, bool]]]:
    """Return the tokens, trained labels and the text of one sequence."""
    inputs, labels = arrays["input_ids"][0].tolist(), arrays["labels"][0].tolist()
    filled = len(inputs)
    if "attention_mask" in arrays:
        filled = int(arrays["attention_mask"][0].sum())
    runs: list[tuple[list[int], bool]] = []

    def add(token: int, trained: bool) -> None:
        if not runs or runs[-1][1] != trained:
            runs.append(([], trained))
        runs[-1][0].append(token)

    for at in range(filled):
        add(inputs[at], at > 0 and labels[at - 1] == inputs[at])
        # The last token of a document is only a label.
        if labels[at] != IGNORED and (at + 1 == filled or inputs[at + 1] != labels[at]):
            add(labels[at], True)
    pieces, left = [], _MOST_CHARS
    for ids, trained in runs:
        text = decode(data.tokenizer, ids)
        pieces.append((text[:left] + ("..." if len(text) > left else ""), trained))
        left -= len(text)
        if left <= 0:
            break
    counted = sum(label != IGNORED for label in labels)
    return sum(len(ids) for ids, _ in runs), counted, pieces


def in_words(shown: Preview, *, color: bool) -> str:
    """The preview as text.

    Args:
        shown: from :func:`preview`.
        color: mark what is trained by color, else by double brackets.
    """
    from portable.formatting import table

    most = max((count for *_, count in shown.lengths), default=1) or 1
    rows = [
        (f"{low:,} to {high - 1:,}" if high is not None else f"{low:,} and more", count)
        for low, high, count in shown.lengths
    ]
    bars = [(name, f"{'#' * -(-40 * count // most):<40} {count:,}") for name, count in rows]
    parts = [table(list(shown.facts.items())), "tokens a document", table(bars)]
    for sample in shown.samples:
        which = _listed(sample.documents) + (f" of {sample.source}" if sample.source else "")
        head = (
            f"--- sample {sample.position}, of {which}: {sample.tokens:,} tokens, {sample.trained:,} trained"
        )
        parts.append(f"{head}\n{_marked(sample.pieces, color)}")
    return "\n".join(parts)


def _listed(documents: Sequence[int]) -> str:
    several = f" to {documents[-1]}" if len(documents) > 1 else ""
    return f"document{'s' if several else ''} {documents[0] if documents else '?'}{several}"


def _marked(pieces: list[tuple[str, bool]], color: bool) -> str:
    opening, closing = ("\x1b[32m", "\x1b[0m") if color else ("[[", "]]")
    return "".join(
        f"{opening}{escape_control_characters(text)}{closing}" if trained else escape_control_characters(text)
        for text, trained in pieces
    )
