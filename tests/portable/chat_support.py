"""Tokenizers and conversations for the tests of chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from portable.data.sources.conversations import parse_conversation
from portable.data.sources.documents import DEFAULT_TRAINED_ROLES, Document
from portable.data.tokens.special_tokens import Frame
from portable.data.tokens.tokenizer import CHATML

TEMPLATES = Path(__file__).with_name("templates")
NO_FRAME = Frame((), ())


@dataclass(frozen=True)
class Family:
    """Special tokens of a family of models, and features of its template."""

    begin: str | None
    end: str
    special: list[str]
    answer_end: str
    """The token that ends an answer."""
    plain: Sequence[str] = ()
    """Added tokens that are not special, as the family has them."""
    system: bool = True
    marked: bool = True
    """Whether TRL has a template with marks."""
    in_marks: str = ""
    """Tokens before an answer that TRL's marks include and the generation prompt has already written."""


FAMILIES = {
    name: Family(**fields)
    for name, fields in yaml.safe_load((TEMPLATES / "families.yaml").read_text("utf-8")).items()
}
GREETING = [{"role": "user", "content": "What is 2 + 3?"}, {"role": "assistant", "content": "It is 5."}]
TALK = [
    *GREETING,
    {"role": "user", "content": "  And 3 + 4?\n"},
    {"role": "assistant", "content": "7 \U0001f600 naïve\n\nand more"},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "You are welcome"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}]
_TEXT = "what is it, and more? you are welcome; the quick brown fox jumps over a dog. 0 1 2 3 4 5 6 7 8 9"


@cache
def tokenizer(name: str) -> Any:
    """Return a byte-level tokenizer with the special tokens of a family, and its template."""
    family = FAMILIES[name]
    special = list(dict.fromkeys(token for token in (family.begin, family.end, *family.special) if token))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([_TEXT], trainer)
    bpe.add_tokens(list(family.plain))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call, unused-ignore]
        tokenizer_object=bpe,
        bos_token=family.begin,
        eos_token=family.end,
        pad_token=family.end,
        extra_special_tokens=special,
        clean_up_tokenization_spaces=False,
        chat_template=template(name),
    )


def template(name: str) -> str:
    """Return the template of a family; with ``_training``, TRL's template with marks."""
    return CHATML if name == "chatml" else (TEMPLATES / f"{name}.jinja").read_text("utf-8")


def record(
    row: dict[str, Any], kind: Any = "messages", roles: frozenset[str] = DEFAULT_TRAINED_ROLES
) -> Document:
    """Return the document of a record."""
    read = parse_conversation(row, kind, "chat.jsonl:1", roles)
    return Document("", conversation=read)  # type: ignore[arg-type]


def plain_chatml() -> str:
    """Return ChatML without marks."""
    return CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")
