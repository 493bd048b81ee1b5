"""The trained tokenizer is saved with the model and is lossless; the config may name any other one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from tokenizers import Tokenizer, models, normalizers
from transformers import AutoTokenizer, EsmTokenizer, PreTrainedTokenizerFast

from portable.data.dataset import build_data, inspect_data_sizes
from portable.data.tokens.special_tokens import Frame, build_special_token_frame
from portable.data.tokens.tokenize import TokenizeJob
from portable.data.tokens.tokenizer import (
    Vocabulary,
    compute_tokenizer_digest,
    load_tokenizer,
    resolve_trained_vocab_size,
    train_tokenizer,
)
from portable.errors import UserError
from tests.portable.data_support import Settings, corpus, source, word_level, write_jsonl

HARD = "Def  f(x):\r\n\n\t return 'ß 漢字 🙂' \u200b\x00 # ſ  . , 's  <|end"


def word_tokenizer(template: str, **special: str) -> Any:
    """Build a tokenizer of four words that frames a text by ``template``."""
    return word_level([*dict.fromkeys(special.values()), "a", "b", "c", "d"], template, **special)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("trained")
    return train_tokenizer(source(str(corpus(folder))), 320, folder, mask=True)


def test_trained_tokenizer_survives_save(trained: Any, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(HARD)["input_ids"] == trained(HARD)["input_ids"]
    assert again.decode(again(HARD)["input_ids"]) == HARD
    assert again.all_special_ids == trained.all_special_ids
    assert (again.eos_token, again.pad_token, again.mask_token) == ("<|endoftext|>", "<|pad|>", "<|mask|>")
    assert compute_tokenizer_digest(again) == compute_tokenizer_digest(trained)


def _cut(text: str) -> str:
    return text[:40]


def _other_merges(text: str) -> str:
    """Swap two merges. The tokenizer still opens, but gives the text other tokens."""
    told = json.loads(text)
    merges = told["model"]["merges"]
    merges[0], merges[-1] = merges[-1], merges[0]
    return json.dumps(told)


@pytest.mark.parametrize(
    ("damage", "how"),
    [("tokenizer.json", _cut), ("tokenizer_config.json", _cut), ("tokenizer.json", _other_merges)],
)
def test_damaged_tokenizer_is_trained_again(tmp_path: Path, damage: str, how: Callable[[str], str]) -> None:
    given = source(str(corpus(tmp_path)))
    digest = compute_tokenizer_digest(train_tokenizer(given, 300, tmp_path))
    (path,) = (tmp_path / "tokenizers").glob(f"*/{damage}")
    before = path.read_text()
    path.write_text(how(before))
    assert path.read_text() != before
    assert compute_tokenizer_digest(train_tokenizer(given, 300, tmp_path)) == digest


def test_tokenizer_training_is_deterministic(tmp_path: Path) -> None:
    """Merges are chosen by count. Ties must not depend on the hash seed or the number of threads."""
    code = (
        "import sys; from pathlib import Path; from tests.portable.data_support import source\n"
        "from portable.data.tokens.tokenizer import *\n"
        "tokenizer = train_tokenizer(source(None, max_samples=40), 1000, Path(sys.argv[1]))\n"
        "print(compute_tokenizer_digest(tokenizer))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, str(tmp_path / "other")]
    other = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert (
        compute_tokenizer_digest(train_tokenizer(source(None, max_samples=40), 1000, tmp_path / "here"))
        == other
    )


FRAMES = yaml.safe_load(Path(__file__).with_name("tokenizer_kinds.yaml").read_text("utf-8"))["frames"]


@pytest.mark.parametrize("row", FRAMES, ids=str)
def test_build_special_token_frame_follows_template(row: dict[str, Any]) -> None:
    vocabulary = Vocabulary.from_tokenizer(word_tokenizer(row["template"], **row["special"]))
    assert build_special_token_frame(row["task"], vocabulary) == Frame(
        tuple(row["before"]), tuple(row["after"])
    )


def test_digest_of_python_tokenizer_covers_files(tmp_path: Path) -> None:
    """The class of ESM requires an argument that is optional in all others."""
    digests = set()
    for words in ("<cls>\n<pad>\n<eos>\n<unk>\nA\nB\n", "<cls>\n<pad>\n<eos>\n<unk>\nB\nA\n"):
        (tmp_path / "vocab.txt").write_text(words)
        digests.add(compute_tokenizer_digest(EsmTokenizer(str(tmp_path / "vocab.txt"))))
    assert len(digests) == 2


class TwoSides(PreTrainedTokenizerFast):  # type: ignore[misc, unused-ignore]
    """A tokenizer with different vocabularies for reading and writing, like Marian's."""

    def _switch_to_input_mode(self) -> None:
        self.backend_tokenizer.normalizer = normalizers.Sequence([])

    def _switch_to_target_mode(self) -> None:
        self.backend_tokenizer.normalizer = normalizers.Replace("a", "c")


def test_targets_use_target_vocabulary(tmp_path: Path) -> None:
    special = {"unk_token": "<unk>", "eos_token": "</s>"}
    words = word_tokenizer("$A </s>", **special).backend_tokenizer
    tokenizer = TwoSides(tokenizer_object=words, **special)  # type: ignore[no-untyped-call, unused-ignore]
    path = write_jsonl(tmp_path / "p.jsonl", [{"text": "a b", "target": "a b"}])
    vocabulary = Vocabulary.from_tokenizer(tokenizer)
    around = build_special_token_frame(
        "seq2seq-lm", vocabulary, Vocabulary.from_tokenizer(tokenizer, targets=True)
    )
    given = source(str(path), "seq2seq-lm", target_field="target")
    cache = TokenizeJob(given.settings, tokenizer, vocabulary, around, tmp_path / "cache").tokenize_source(
        given
    )
    expected = tokenizer("a b", text_target="a b")
    assert cache.read_document("text", 0).tolist() == expected["input_ids"] == [2, 3, 1]
    assert cache.read_document("target", 0).tolist() == expected["labels"] == [4, 3, 1]


def test_tokenizer_without_end_token_is_rejected_for_causal_lm(tmp_path: Path) -> None:
    endless = Vocabulary.from_tokenizer(word_tokenizer("", unk_token="<unk>"))
    assert build_special_token_frame("sequence-classification", endless) == Frame((), ())
    with pytest.raises(UserError, match="no eos_token"):
        build_special_token_frame("causal-lm", endless)
    with pytest.raises(UserError, match=r"data.vocab_size: 258 .* at least 259"):
        resolve_trained_vocab_size(258, mask=True)
    with pytest.raises(UserError, match=r"data.tokenizer: cannot load .*null to train a tokenizer"):
        load_tokenizer(str(tmp_path))
    # The size is the largest id plus one, not the number of tokens, because the embedding must have all ids.
    sparse = Tokenizer(models.WordLevel({"<unk>": 0, "a": 999}, unk_token="<unk>"))
    assert (
        Vocabulary.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=sparse, unk_token="<unk>")).size
        == 1000
    )


EVIL = """
from pathlib import Path
Path({mark!r}).touch()
from transformers import AutoTokenizer, EsmTokenizer, PreTrainedTokenizerFast

class Evil(PreTrainedTokenizerFast):
    pass
"""


def test_tokenizer_code_runs_only_if_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_tokenizer(source(str(corpus(tmp_path))), 300, tmp_path / "cache").save_pretrained(
        folder := tmp_path / "evil"
    )
    mark = tmp_path / "it ran"
    (folder / "evil.py").write_text(EVIL.format(mark=str(mark)))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    path.write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", asked := Mock(return_value="y"))
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    data = Settings(source=str(corpus(tmp_path)), cache_dir=tmp_path / "cache", tokenizer=str(folder))
    for build in (build_data, inspect_data_sizes):
        with pytest.raises(UserError, match=r"data\.tokenizer: .*evil' contains Python code"):
            build(data)
    asked.assert_not_called()
    assert not mark.exists()
    assert type(build_data(data, trust_remote_code=True).tokenizer).__name__ == "Evil"
    assert mark.exists()
