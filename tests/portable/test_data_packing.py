"""Packed documents compared with a naive packing: each complete document once, little padding, one plan."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from portable.batch import IGNORED_LABEL
from portable.config import load_config
from portable.config.sections import DataConfig
from portable.data.dataset import build_data
from portable.data.samples import packing
from portable.data.samples.base import PaddedCausalSamples, SampleRange, split_documents
from portable.data.samples.packing import (
    PackedDocumentSamples,
    compute_packing_stats,
    load_or_build_packing_plan,
    pack_best_fit,
)
from portable.data.tokens.cache import TokenCache
from portable.errors import UserError
from portable.registry import create_backend
from portable.run.prepare import prepare_run
from portable.run.resolve import resolve_run
from tests.portable.data_support import read_sample, token_cache, write_jsonl
from tests.runs import configured, write_corpus

PAD = 0
LENGTH = 12
DOCUMENTS = [[100 + n, *range(3, 3 + n % 17)] for n in range(150)]  # of 1 to 17 tokens


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    return token_cache(tmp_path / "cache", DOCUMENTS)


def naive_rooms(lengths: np.ndarray, capacity: int) -> list[int]:
    """Return the room left in each bin of best fit decreasing, one item at a time."""
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(capacity)
        number = min(fitting, key=rooms.__getitem__, default=len(rooms) - 1)
        rooms[number] -= length
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(12))
def test_pack_best_fit_matches_best_fit_decreasing(seed: int) -> None:
    random = np.random.default_rng(seed)
    capacity, count = int(random.integers(1, 60)), int(random.integers(1, 150))
    spread = random.lognormal(1.5, 1, count).astype(np.int64)
    lengths = np.clip(spread, 1, capacity) if seed % 2 else random.integers(1, capacity + 1, count)
    items, counts = pack_best_fit(lengths, capacity)
    assert sorted(items) == list(range(count))
    filled = np.add.reduceat(lengths[items], np.cumsum(counts) - counts)
    assert sorted((capacity - filled).tolist()) == naive_rooms(lengths, capacity)


def test_pack_best_fit_is_fast_with_little_padding() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 1_000_000).astype(np.int64), 1, 4096)
    start = time.process_time()
    _, counts = pack_best_fit(lengths, 4096)
    assert time.process_time() - start < 5
    assert 1 - lengths.sum() / (len(counts) * 4096) < 0.001


@pytest.mark.parametrize("window", [packing.WINDOW, 40])
def test_packed_samples_have_every_document_once(
    cache: TokenCache, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "WINDOW", window)
    for part in split_documents(len(DOCUMENTS), 0.2):
        single = PaddedCausalSamples(cache, part, LENGTH, PAD)
        samples = PackedDocumentSamples(
            cache, part, LENGTH, load_or_build_packing_plan(cache, part, LENGTH), PAD
        )
        expected = []  # the inputs and labels of each unpacked document
        for index in range(len(single)):
            sample = read_sample(single, index)
            counts = sample["labels"] != IGNORED_LABEL
            expected.append((sample["input_ids"][counts].tolist(), sample["labels"][counts].tolist()))
        found, places, padding = [], [], 0
        for index in range(len(samples)):
            sample = read_sample(samples, index)
            lengths = sample["document_lengths"].tolist()
            assert {values.dtype for values in sample.values()} == {torch.int64} and sum(lengths) == LENGTH
            texts = lengths[: len(samples.list_document_numbers(index))]
            positions = [position for length in texts for position in range(length)]
            assert sample["position_ids"].tolist() == positions + [0] * (LENGTH - sum(texts))
            at = 0
            for number, length in zip(samples.list_document_numbers(index), lengths, strict=False):
                piece = slice(at, at + length)
                found.append((sample["input_ids"][piece].tolist(), sample["labels"][piece].tolist()))
                places.append(number)
                assert found[-1][0][0] == DOCUMENTS[number][0]
                at += length
            assert (sample["labels"][at:] == IGNORED_LABEL).all() and (sample["input_ids"][at:] == PAD).all()
            padding += LENGTH - at
        assert sorted(found) == sorted(one for one in expected if one[0])
        assert samples.padding_share == pytest.approx(padding / (LENGTH * len(samples)))
        each = [len(inputs) for inputs, _ in found]
        assert samples.mean_context_length == pytest.approx(sum(n * n for n in each) / sum(each))
        assert len(set(places)) == len(places)
        assert compute_packing_stats(cache, part, LENGTH).samples == len(samples)


def test_packing_plan_is_built_once(cache: TokenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    part = SampleRange(0, len(DOCUMENTS))
    without = compute_packing_stats(cache, part, LENGTH)
    samples = PackedDocumentSamples(cache, part, LENGTH, load_or_build_packing_plan(cache, part, LENGTH), PAD)
    first = [list(samples.list_document_numbers(index)) for index in range(len(samples))]
    monkeypatch.setattr(packing, "pack_best_fit", None)  # from here on it is read
    assert compute_packing_stats(cache, part, LENGTH) == without
    monkeypatch.undo()
    plan = load_or_build_packing_plan(cache, part, LENGTH)
    assert load_or_build_packing_plan(cache, part, LENGTH // 2).folder != plan.folder
    damaged = plan.folder / "documents.bin"
    damaged.write_bytes(bytes(len(damaged.read_bytes())))
    repaired = PackedDocumentSamples(
        cache, part, LENGTH, load_or_build_packing_plan(cache, part, LENGTH), PAD
    )
    assert [list(repaired.list_document_numbers(index)) for index in range(len(repaired))] == first


@pytest.mark.parametrize("truncation", ["end", "start"])
def test_packed_conversations_keep_labels(truncation: str, tmp_path: Path) -> None:
    """By default, conversations are packed. They have the same labels as unpacked ones."""
    talks = [
        {"messages": [{"role": "user", "content": "w " * n}, {"role": "assistant", "content": "v " * n}]}
        for n in range(1, 40)
    ]
    source = write_jsonl(tmp_path / "talks.jsonl", talks)
    given = {
        "data.source": str(source),
        "data.cache_dir": str(tmp_path / "cache"),
        "data.chat_template": "chatml",
        "data.seq_len": 96,
        "data.eval_fraction": 0,
        "data.truncation": truncation,
        "model.config.max_position_embeddings": 96,
        "output_dir": str(tmp_path / "run"),
    }
    config = resolve_run(load_config(None, given), "cpu").config
    assert config.data.packing == "documents"

    def answers(settings: DataConfig) -> list[list[int]]:
        """The input and the label of each position that counts, by conversation."""
        samples = build_data(settings, model_vocab_size=400).train
        found = []
        for index in range(len(samples)):
            sample = read_sample(samples, index)
            starts = torch.flatten((sample.get("position_ids", torch.zeros(1)) == 0).nonzero()).tolist()
            for start, end in pairwise([*starts, 96]):
                counts = sample["labels"][start:end] != IGNORED_LABEL
                pairs = torch.stack([sample["input_ids"][start:end], sample["labels"][start:end]])
                found.append(pairs[:, counts].flatten().tolist())
        return sorted(one for one in found if one)

    packed, padded = (answers(config.data.model_copy(update={"packing": to})) for to in ("documents", False))
    assert packed == padded and len(packed) > 30


def test_flops_count_attention_within_documents(tmp_path: Path) -> None:
    """The FLOPs per token include only the attention within documents."""
    source, flops = write_corpus(tmp_path), {}
    for how in (True, "documents"):
        config = configured(tmp_path, source, data__packing=how, data__seq_len=64)
        backend = create_backend("cpu")
        run = prepare_run(resolve_run(config, backend.name), backend)
        flops[how] = run.flops_per_token
    context = run.data.train.mean_context_length
    assert context is not None and 10 < context < 64
    # 12 for each layer, unit of the hidden size and position that a token attends to.
    assert flops[True] - flops["documents"] == pytest.approx(12 * 2 * 48 * (64 - context))


def test_packing_plan_needs_text_with_two_tokens(tmp_path: Path) -> None:
    cache = token_cache(tmp_path / "cache", [[5], [6], []])
    with pytest.raises(UserError, match=r"data\.source: every text has fewer than two tokens"):
        load_or_build_packing_plan(cache, SampleRange(0, 3), LENGTH)
    assert compute_packing_stats(cache, SampleRange(0, 3), LENGTH).samples == 0
