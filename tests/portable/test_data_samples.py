"""Samples against naive references: nothing lost, nothing twice, labels aligned, shapes fixed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from portable.batch import IGNORED_LABEL
from portable.data.samples.base import (
    PackedCausalSamples,
    PaddedCausalSamples,
    SampleRange,
    count_packed_samples,
    split_documents,
    split_packed_blocks,
)
from portable.data.samples.order import EpochIndex
from portable.data.samples.tasks import MaskedLMSamples
from portable.data.tokens.cache import TokenCache
from portable.data.tokens.tokenizer import Vocabulary
from portable.errors import UserError
from tests.portable.data_support import read_sample, token_cache

PAD, END, MASK = 0, 1, 2
VOCABULARY = Vocabulary(
    size=500,
    end_token=END,
    pad_token=PAD,
    mask_token=MASK,
    special_tokens=(PAD, END, MASK),
    prefix=(),
    suffix=(END,),
)
DOCUMENTS = [[*range(10 * n + 3, 10 * n + 3 + n % 9), END] for n in range(1, 40)]


@pytest.fixture
def cache(tmp_path: Path) -> TokenCache:
    return token_cache(tmp_path / "cache", DOCUMENTS)


# --- packed


@pytest.mark.parametrize("length", [1, 2, 5, 7, 16, 100])
def test_packed_samples_cover_token_stream(cache: TokenCache, length: int) -> None:
    stream = list(itertools.chain.from_iterable(DOCUMENTS))
    blocks = count_packed_samples(len(stream), length, shifted=True)
    samples = PackedCausalSamples(cache, SampleRange(0, blocks), length)
    assert len(samples) == samples.num_samples == (len(stream) - 1) // length
    assert samples.valid_labels_per_sample == length
    for index in range(blocks):
        sample = read_sample(samples, index)
        assert sample["input_ids"].tolist() == stream[index * length : (index + 1) * length]
        assert sample["labels"].tolist() == stream[index * length + 1 : (index + 1) * length + 1]
        assert sample["input_ids"].dtype == sample["labels"].dtype == torch.int64
        assert set(sample) == {"input_ids", "labels"}


def test_count_packed_samples_rejects_too_few_tokens() -> None:
    with pytest.raises(UserError, match=r"data\.seq_len: the source has 10 tokens, .* at most 9"):
        count_packed_samples(10, 10, shifted=True)
    assert count_packed_samples(10, 10, shifted=False) == 1


# --- padded


def test_padded_samples_have_one_document_each(cache: TokenCache) -> None:
    samples = PaddedCausalSamples(cache, SampleRange(0, len(DOCUMENTS)), 6, PAD)
    for index, document in enumerate(DOCUMENTS):
        sample = read_sample(samples, index)
        inputs, labels = document[:-1][:6], document[1:][:6]
        rest = 6 - len(inputs)
        assert sample["input_ids"].tolist() == inputs + [PAD] * rest
        assert sample["labels"].tolist() == labels + [IGNORED_LABEL] * rest
        assert sample["attention_mask"].tolist() == [1] * max(1, len(inputs)) + [0] * min(rest, 5)


# --- the split


@pytest.mark.parametrize("split", [split_packed_blocks, split_documents])
@pytest.mark.parametrize("count", [1, 2, 3, 50, 999])
@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.01, 0.5, 0.999])
def test_split_shares_no_sample(split: object, count: int, fraction: float) -> None:
    assert callable(split)
    train, held_out = split(count, fraction)
    chosen = [[part(i) for i in range(part.num_samples)] for part in (train, held_out)]
    assert sorted(chosen[0] + chosen[1]) == list(range(count))
    if fraction == 0 or count == 1:
        assert held_out.num_samples == 0
    else:
        assert held_out.num_samples == min(max(1, round(count * fraction)), count - 1)


@pytest.mark.parametrize("split", [split_packed_blocks, split_documents])
@pytest.mark.parametrize(
    ("count", "expected"), [(1, 0), (2, 1), (10, 2), (79, 15), (80, 16), (200, 16), (1600, 16), (5000, 50)]
)
def test_split_holds_out_sixteen_samples_by_default(split: Any, count: int, expected: int) -> None:
    train, held_out = split(count, None)
    assert (train.num_samples, held_out.num_samples) == (count - expected, expected)


def test_split_of_sorted_source_is_not_biased() -> None:
    _, held_out = split_documents(1000, 0.1)
    numbers = [held_out(i) for i in range(held_out.num_samples)]
    assert 300 < np.mean(numbers) < 700


# --- masked


def masked(cache: TokenCache, *, packed: bool, seed: int = 0, length: int = 16) -> MaskedLMSamples:
    count = cache.num_tokens // length if packed else cache.num_documents
    part = SampleRange(0, count)
    return MaskedLMSamples(
        cache, part, length, VOCABULARY, mask_token=MASK, suffix=(END,), seed=seed, is_packed=packed
    )


@pytest.mark.parametrize("packed", [True, False])
def test_masked_samples_hide_and_label_tokens(cache: TokenCache, packed: bool) -> None:
    samples = masked(cache, packed=packed)
    for index in range(len(samples)):
        sample = read_sample(samples, index)
        document = [*DOCUMENTS[index][:16]]
        plain = torch.full((16,), PAD)
        if packed:
            plain = torch.from_numpy(cache.tokens["text"][index * 16 : (index + 1) * 16].astype(np.int64))
            assert set(sample) == {"input_ids", "labels"}
        else:
            plain[: len(document)] = torch.tensor(document)
            assert sample["attention_mask"].tolist() == (torch.arange(16) < len(document)).long().tolist()
        target = sample["labels"] != IGNORED_LABEL
        assert torch.equal(sample["labels"][target], plain[target])
        assert torch.equal(sample["input_ids"][~target], plain[~target])
        assert not np.isin(plain[target], VOCABULARY.special_tokens).any()
        assert target.any() or not (plain > MASK).any()


def test_masked_samples_have_expected_shares(tmp_path: Path) -> None:
    cache = token_cache(tmp_path / "big", [[int(n) for n in range(3, 483)] for _ in range(200)])
    samples = masked(cache, packed=True, length=96)
    batch = samples.build_batch([EpochIndex(0, i) for i in range(len(samples))])
    target = batch["labels"] != IGNORED_LABEL
    assert abs(target.float().mean().item() - 0.15) < 0.01
    hidden, truth = batch["input_ids"][target], batch["labels"][target]
    assert abs((hidden == MASK).float().mean().item() - 0.8) < 0.02
    assert abs((hidden == truth).float().mean().item() - 0.1) < 0.02


def test_masked_samples_depend_on_seed_epoch_and_index(cache: TokenCache) -> None:
    samples = masked(cache, packed=True)
    places = [EpochIndex(epoch, index) for epoch in (0, 1, 2**63 - 1) for index in range(len(samples))]
    together = samples.build_batch(places)
    for row, place in enumerate(places):
        alone = masked(cache, packed=True).build_batch([place])
        assert torch.equal(alone["input_ids"][0], together["input_ids"][row])
    count = len(samples)
    assert not torch.equal(together["labels"][:count], together["labels"][count : 2 * count])
    other = masked(cache, packed=True, seed=-1).build_batch(places)
    assert not torch.equal(other["labels"], together["labels"])
