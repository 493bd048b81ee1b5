"""What a record is made of: pairs of texts, nested fields, prefixes, and lengths of their own for targets."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from portable.data.dataset import build_data, inspect_data
from portable.errors import UserError
from tests.portable.data_support import Settings, replace, word_level, write_jsonl

WORDS = [f"w{number}" for number in range(40)]
KINDS = yaml.safe_load(Path(__file__).with_name("tokenizer_kinds.yaml").read_text("utf-8"))["pairs"]


def tokenizer_of(folder: Path, kind: str) -> Any:
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")}
    tokenizer = word_level([*special.values(), "a", "b", *WORDS], **KINDS[kind], **special)
    tokenizer.save_pretrained(folder)
    return tokenizer


def pairs(count: int) -> list[dict[str, Any]]:
    chosen = random.Random(0)

    def text(most: int) -> str:
        return " ".join(chosen.choices(WORDS, k=chosen.randint(1, most)))

    return [{"text": text(12), "other": text(12), "label": i % 12} for i in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seq_len", [6, 8, 13, 40])
def test_pairs_are_what_the_tokenizer_makes_of_them(tmp_path: Path, kind: str, seq_len: int) -> None:
    tokenizer = tokenizer_of(tmp_path / "tok", kind)
    rows = pairs(60)
    settings = Settings(
        source=str(write_jsonl(tmp_path / "pairs.jsonl", rows)),
        text_pair_field="other",
        tokenizer=str(tmp_path / "tok"),
        vocab_size=None,
        seq_len=seq_len,
        eval_fraction=0.0,
        cache_dir=tmp_path / "cache",
    )
    data = build_data(settings, task="sequence-classification", pad_left=kind == "xlnet")
    for index in range(60):
        row = rows[data.train.documents(index)[0]]
        theirs = tokenizer(
            row["text"],
            row["other"],
            truncation="longest_first",
            max_length=seq_len,
            padding="max_length",
            return_tensors="pt",
        )
        ours = data.train[index]
        assert int(ours.pop("labels")) == row["label"]
        assert set(ours) == set(theirs)
        assert all(torch.equal(ours[name], theirs[name][0]) for name in ours)
    for look in (build_data, inspect_data):
        with pytest.raises(UserError, match=r"data.seq_len: [234] tokens are too few for a pair"):
            look(replace(settings, seq_len=2), task="sequence-classification")


TRANSLATIONS = [{"translation": {"en": f"w{i % 9} w3 w4", "de": "w7 " * (1 + i % 5)}} for i in range(30)]


def translations(tmp_path: Path, **more: Any) -> Settings:
    tokenizer_of(tmp_path / "tok", "bert")
    values = {
        "source": str(write_jsonl(tmp_path / "pairs.jsonl", TRANSLATIONS)),
        "text_field": "translation.en",
        "target_field": "translation.de",
        "tokenizer": str(tmp_path / "tok"),
        "vocab_size": None,
        "packing": False,
        "eval_fraction": 0.0,
        "cache_dir": tmp_path / "cache",
    }
    return Settings(**(values | more))


def test_fields_in_fields_a_prefix_and_a_length_for_targets(tmp_path: Path) -> None:
    settings = translations(tmp_path, source_prefix="w1 w2 : ", seq_len=8, target_seq_len=4)
    data = build_data(settings, task="seq2seq-lm", decoder_start_token_id=7)
    lengths = set()
    for index in range(30):
        row = TRANSLATIONS[data.train.documents(index)[0]]["translation"]
        text, target = f"w1 w2 : {row['en']}", row["de"]
        sample = data.train[index]
        theirs = data.tokenizer(text, truncation=True, max_length=8, padding="max_length")
        assert sample["input_ids"].tolist() == theirs["input_ids"]
        theirs = data.tokenizer(target, truncation=True, max_length=4, padding="max_length")
        kept = sum(theirs["attention_mask"])
        assert sample["labels"].tolist() == theirs["input_ids"][:kept] + [-100] * (4 - kept)
        assert sample["decoder_input_ids"].shape == (4,)
        assert sample["decoder_input_ids"][:kept].tolist() == [7, *theirs["input_ids"][: kept - 1]]
        lengths.add(kept)
    assert lengths == {3, 4}


def test_a_field_with_a_dot_in_its_name_comes_first(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [{"a.b": "w1 w2 w3", "a": {"b": "w9"}}])
    settings = translations(tmp_path, source=str(source), text_field="a.b", target_field="a.b", seq_len=8)
    data = build_data(settings, task="seq2seq-lm")
    assert data.tokenizer.decode(data.train[0]["input_ids"], skip_special_tokens=True) == "w1 w2 w3"
