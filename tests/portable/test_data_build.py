"""The complete data section: every task, the dry run, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import NllbTokenizer

from portable.data.dataset import build_data, inspect_data_sizes
from portable.data.samples.classes import ModelClasses
from portable.data.sources.hub_dataset import HubDataset
from portable.errors import UserError
from tests.portable.data_support import Settings, corpus, read_sample, replace, texts, write_jsonl


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(source=str(corpus(tmp_path)), cache_dir=tmp_path / "cache")


def snapshot(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_build_data_packs_causal_text(settings: Settings) -> None:
    data = build_data(settings)
    decoded = data.tokenizer.decode
    stream = "".join(text + data.tokenizer.eos_token for text in texts(60))
    assert data.first_eval is not None
    parts = [read_sample(data.train, i)["input_ids"] for i in range(len(data.train))]
    parts += [read_sample(data.first_eval, i)["input_ids"] for i in range(len(data.first_eval))]
    assert stream.startswith("".join(decoded(part) for part in parts))
    assert data.vocab_size == len(data.tokenizer) == 300
    assert data.sizes.documents == 60 and data.sizes.tokens is not None
    assert len(data.train) + len(data.first_eval) == (data.sizes.tokens - 1) // 16


def test_end_token_is_not_added_twice(settings: Settings, tmp_path: Path) -> None:
    """As in TRL, only an end token at the end of the text counts. In the middle of a text, it stays."""
    said = ["the dog", "the dog<|endoftext|>", "the<|endoftext|> dog<|endoftext|>"]
    path = write_jsonl(tmp_path / "ends.jsonl", [{"text": text} for text in said])
    data = build_data(replace(settings, source=str(path), packing="documents", seq_len=32, eval_fraction=0))
    (row,) = [read_sample(data.train, at) for at in range(len(data.train))]
    end = data.tokenizer.eos_token_id
    assert row["labels"].tolist().count(end) == 4


def test_inspect_data_sizes_and_second_build_write_nothing(settings: Settings, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    sizes = inspect_data_sizes(settings)
    hub = inspect_data_sizes(replace(settings, source="org/data", tokenizer=None))  # nor is it downloaded
    assert (hub.source, hub.documents, hub.vocab_size) == ("org/data", None, 300)
    assert snapshot(tmp_path) == before and (sizes.tokens, sizes.cache_folder) == (None, None)
    first = build_data(settings)
    before = snapshot(tmp_path)
    second = build_data(settings)
    padded = build_data(replace(settings, seq_len=32, packing=False, eval_fraction=0.0))
    assert snapshot(tmp_path) == before  # nor is anything tokenized again for other batches
    assert padded.first_eval is None and len(padded.train) == 60
    assert (first.fingerprint, first.sizes) == (second.fingerprint, second.sizes)
    assert inspect_data_sizes(settings) == first.sizes


def test_build_data_selects_tokenizer_by_priority(settings: Settings, tmp_path: Path) -> None:
    trained = build_data(replace(settings, vocab_size=None), model_vocab_size=280)
    assert len(trained.tokenizer) == 280
    assert len(build_data(replace(settings, vocab_size=290), model_vocab_size=280).tokenizer) == 290
    trained.tokenizer.save_pretrained(tmp_path / "own")
    named = build_data(replace(settings, tokenizer=str(tmp_path / "own")), model_tokenizer="never/asked")
    assert named.fingerprint == trained.fingerprint
    with pytest.raises(UserError, match=r"data\.tokenizer: the tokenizer has no mask_token"):
        build_data(replace(settings, tokenizer=str(tmp_path / "own")), task="masked-lm")
    models = build_data(settings, model_tokenizer=str(tmp_path / "own"))
    assert models.fingerprint == trained.fingerprint
    assert inspect_data_sizes(settings, model_tokenizer=str(tmp_path / "own")) == models.sizes


def test_target_language_must_match_tokenizer(settings: Settings, tmp_path: Path) -> None:
    rows = ({"text": text, "target": text} for text in texts(9))
    plain = replace(settings, source=str(write_jsonl(tmp_path / "p.jsonl", rows)))
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, chr(0x2581): 4}
    NllbTokenizer(vocab=vocab, merges=[]).save_pretrained(tmp_path / "own")
    several = replace(plain, tokenizer=str(tmp_path / "own"), source_language="eng_Latn")
    NllbTokenizer(vocab=vocab, merges=[], tgt_lang="deu_LatnX").save_pretrained(tmp_path / "other")
    other = replace(several, tokenizer=str(tmp_path / "other"))
    for given, language, told in (
        (several, None, "is missing"),
        (several, "deu_LatnX", ".*did you mean de"),
        (other, None, ".*not support the language 'deu_LatnX'; did you mean deu_Latn"),
        (plain, "de", "is 'de', but .* does not mark texts with their language"),
    ):
        for look in (build_data, inspect_data_sizes):
            with pytest.raises(UserError, match=rf"data\.target_language: {told}"):
                look(replace(given, target_language=language), task="seq2seq-lm")


def test_cut_text_is_reported_as_warning(settings: Settings, tmp_path: Path) -> None:
    """The warning counts the tokens that no sample contains.

    A text file is one document unless it is split.
    """
    path = tmp_path / "a.txt"
    path.write_text("\n".join(texts(40)))
    given = replace(settings, source=str(path), packing=False, seq_len=64, eval_fraction=0.0)
    data = build_data(given)
    (warning,) = data.sizes.warnings
    assert len(data.train) == 1 and "data.text_split" in warning
    assert inspect_data_sizes(given) == data.sizes
    lines = build_data(replace(given, text_split="line"))
    assert (len(lines.train), lines.sizes.warnings) == (40, [])
    assert build_data(replace(given, packing=True)).sizes.warnings == []


def test_hub_dataset_class_labels_are_used(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """The labels are numbers of named classes, in the order of the dataset, and some classes are unused."""
    from datasets import ClassLabel, Dataset, Features, Value

    names = ["world", "sports", "business"]
    labels = [(0, 2)[i % 2] for i in range(20)]
    rows = {"text": texts(20), "label": labels}
    features = Features({"text": Value("string"), "label": ClassLabel(names=names)})
    monkeypatch.setattr(
        HubDataset,
        "_datasets_by_key",
        {("org/news", None, "train"): Dataset.from_dict(rows, features=features)},
    )
    given = replace(settings, source="org/news", eval_fraction=0.0)
    data = build_data(given, task="sequence-classification")
    assert data.label_names == tuple(names)
    found = [int(read_sample(data.train, i)["labels"]) for i in range(20)]
    assert found == [labels[data.train.list_document_numbers(i)[0]] for i in range(20)]
    known = ModelClasses("model.name_or_path", ("Business", "Sports", "World"))
    data = build_data(given, task="sequence-classification", model_classes=known)
    assert data.label_names == known.names
    assert [int(read_sample(data.train, i)["labels"]) for i in range(20)] == [2 - label for label in found]
