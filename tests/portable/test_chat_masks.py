"""Trained tokens of a conversation, for a dozen families of models."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import trl
import yaml

from portable.data.sources.conversations import parse_preference
from portable.data.sources.documents import DEFAULT_TRAINED_ROLES, Document
from portable.data.tokens.chat_template import ConversationEncoder, EncodedConversations
from portable.data.tokens.rendering import TEMPLATE_DATE, TemplateRenderer
from portable.errors import UserError
from tests.portable.chat_support import (
    FAMILIES,
    GREETING,
    NO_FRAME,
    SYSTEM,
    TALK,
    TEMPLATES,
    plain_chatml,
    record,
    template,
    tokenizer,
)

MARKED = [name for name, family in FAMILIES.items() if family.marked]
ROWS = yaml.safe_load(Path(__file__).with_name("chat_rows.yaml").read_text("utf-8"))


def talks(name: str) -> dict[str, list[dict[str, Any]]]:
    """Conversations that a family's template takes."""
    found = {"one turn": GREETING, "several turns": TALK}
    if FAMILIES[name].system:
        found["with a system message"] = SYSTEM + TALK
    return found


def encode(
    name: str, text: str, row: dict[str, Any], kind: str = "messages", **options: Any
) -> EncodedConversations:
    return ConversationEncoder(tokenizer(name), text, NO_FRAME, **options).encode_documents(
        [record(row, kind)]
    )


def theirs(name: str, messages: list[dict[str, Any]], **options: Any) -> tuple[list[int], list[int]]:
    """Return tokens and mask of transformers for TRL's template, with which TRL calls it."""
    day = Mock(now=lambda: datetime.fromisoformat(TEMPLATE_DATE))  # the template of GPT-OSS contains the date
    with patch("transformers.utils.chat_template_utils.datetime", day):
        found = tokenizer(name).apply_chat_template(
            messages,
            chat_template=template(f"{name}_training"),
            return_assistant_tokens_mask=True,
            return_dict=True,
            **options,
        )
    return found["input_ids"], found["assistant_masks"]


def trained(name: str, encoded: EncodedConversations, at: int = 0) -> str:
    text: str = tokenizer(name).decode(encoded.tokens[at][encoded.trained_masks[at]])
    return text


@pytest.mark.parametrize("name", MARKED)
def test_generation_marks_give_mask_of_transformers(name: str) -> None:
    """Tokens and mask equal the result of transformers for TRL's template, which TRL trains on."""
    cases: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [(talk, {}) for talk in talks(name).values()]
    if name in ("qwen2_5", "qwen3", "gptoss"):
        cases.append((ROWS["calls"], {"tools": ROWS["tools"]}))
    for messages, options in cases:
        tokens, mask = theirs(name, messages, **options)
        encoded = encode(name, template(f"{name}_training"), {"messages": messages, **options})
        assert encoded.tokens[0].tolist() == tokens
        assert encoded.trained_masks[0].astype(int).tolist() == mask
        assert 0 < sum(mask) < len(mask)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen3"])
def test_answers_of_unmarked_template_are_found_by_prefix(name: str) -> None:
    """The model's original template is used. TRL's marks differ only by the text of the generation prompt."""
    family = FAMILIES[name]
    text = plain_chatml() if name == "chatml" else template(name)
    for messages in talks(name).values():
        encoded = encode(name, text, {"messages": messages})
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        end = family.answer_end
        found = trained(name, encoded)
        assert found.count(end) == (1 if name == "gptoss" else len(answers))
        assert all(answer in found for answer in answers)
        assert "user" not in found and "Thanks" not in found and "Be brief" not in found
        if family.marked:
            tokens, mask = theirs(name, messages)
            assert encoded.tokens[0].tolist() == tokens
            extra = np.array(mask, dtype=bool) & ~encoded.trained_masks[0]
            assert not (encoded.trained_masks[0] & ~np.array(mask, dtype=bool)).any()
            left = tokenizer(name).decode(np.array(tokens)[extra])
            between = "<|end|>" if name == "gptoss" else ""  # which the last answer has in another form
            assert left == between.join([family.in_marks] * len(answers))


TRL_TEMPLATES = Path(trl.__file__).with_name("chat_templates")
EVERY_TEMPLATE = sorted([*TRL_TEMPLATES.glob("*.jinja"), *TEMPLATES.glob("*.jinja")])
EMPTY: tuple[dict[str, Any], ...] = (
    {"tool_calls": []},
    {"tool_calls": "", "function_call": None},
    {"reasoning_content": "", "thinking": ""},
)


def test_empty_keys_mean_missing_keys_in_every_template() -> None:
    """The templates of TRL and of the model families here write the same text."""
    assert len(EVERY_TEMPLATE) > 80
    written = 0
    for path in EVERY_TEMPLATE:
        rendering = TemplateRenderer(path.read_text("utf-8"), {"bos_token": "<s>", "eos_token": "</s>"})
        for answer in ("It is 5.", "<think>\nhm\n</think>\n\nIt is 5."):
            plain, *others = (
                [
                    {"role": "user", "content": "What is 2 + 3?", **more},
                    {"role": "assistant", "content": answer, **more},
                ]
                for more in ({}, *EMPTY)
            )
            drafts = [
                rendering.render_documents([record({"messages": talk})], collect=True)[0]
                for talk in (plain, *others)
            ]
            texts = [
                [draft.text for draft in each] if isinstance(each, list) else str(each) for each in drafts
            ]
            assert texts == texts[:1] * len(texts), path.name
            written += isinstance(texts[0], list)
    assert written > 160


def test_tool_call_without_content_renders_same_in_every_template() -> None:
    """A call has the same text if ``content`` is null, empty or missing."""
    compared = 0
    for path in EVERY_TEMPLATE:
        rendering = TemplateRenderer(path.read_text("utf-8"), {"bos_token": "<s>", "eos_token": "</s>"})
        asks, call, *rest = ROWS["calls"]
        talks = [[asks, {**call, **said}, *rest] for said in ({"content": None}, {"content": ""}, {})]
        rows = [record({"messages": talk, "tools": ROWS["tools"]}) for talk in talks]
        drafts = [rendering.render_documents([row], collect=True)[0] for row in rows]
        texts = {str([draft.text for draft in each] if isinstance(each, list) else each) for each in drafts}
        assert len(texts) == 1, (path.name, texts)
        compared += all(isinstance(each, list) for each in drafts)
    assert compared > 50


THOUGHTS = [{**one, "reasoning_content": f"hm {at}"} if at % 2 else one for at, one in enumerate(TALK)]


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_split_turns_gives_one_sample_per_answer(name: str) -> None:
    """Each sample is the prompt and the answer as at inference."""
    encoded = encode(name, template(name), {"messages": SYSTEM + TALK}, split_turns=True)
    assert len(encoded.tokens) == 3
    for number, stop in enumerate((3, 5, 7)):
        messages = (SYSTEM + TALK)[:stop]
        prompt = tokenizer(name).apply_chat_template(
            messages[:-1], return_dict=False, add_generation_prompt=True
        )
        whole = tokenizer(name).apply_chat_template(messages, return_dict=False)
        assert encoded.tokens[number].tolist() == whole
        assert np.flatnonzero(encoded.trained_masks[number]).tolist() == list(range(len(prompt), len(whole)))


@pytest.mark.parametrize("case", ROWS["rows"], ids=lambda case: case["it"])
def test_conversation_encoder_trains_or_rejects_row(case: dict[str, Any]) -> None:
    family, name = case["family"], case.get("template", case["family"])
    text = template(name) if "{" not in name else name
    row: dict[str, Any] = {
        key: case[key] for key in ("messages", "tools", "prompt", "completion") if key in case
    }
    kind = "messages" if "messages" in row else "prompt_completion"
    options: dict[str, Any] = case.get("options", {})
    chat = ConversationEncoder(tokenizer(family), text, NO_FRAME, **options)
    roles = frozenset(case.get("roles", DEFAULT_TRAINED_ROLES))
    if "refused" in case:
        with pytest.raises(UserError, match=case["refused"]):
            chat.encode_documents([record(row, kind, roles)])
        return
    encoded = chat.encode_documents([record(row, kind, roles)])
    found = [trained(family, encoded, at) for at in range(len(encoded.tokens))]
    assert found == case.get("trained", found)
    assert all(part in found[0] for part in case.get("has", ()))
    assert encoded.num_stopping == case.get("stopping", len(found))
    assert encoded.counts["lost"] == case.get("lost", 0)
    assert case.get("unstopped", "") in encoded.unstopped_example
    assert encoded.unmatched_prompt == case.get("prompt_left", encoded.unmatched_prompt)
    if case.get("tokens") != "own":
        more = {"chat_template": text, **options.get("kwargs", {})}
        whole = tokenizer(family).apply_chat_template(row["messages"], return_dict=False, **more)
        assert encoded.tokens[0].tolist() == whole


@pytest.mark.parametrize("name", FAMILIES)
def test_end_token_of_answer_is_counted(name: str) -> None:
    encoded = encode(name, tokenizer(name).chat_template, {"messages": GREETING})
    assert encoded.end_token_counts == {tokenizer(name).convert_tokens_to_ids(FAMILIES[name].answer_end): 1}
    assert (encoded.num_stopping, encoded.unstopped_example) == (1, "")


def test_preference_answers_are_trained_from_same_token() -> None:
    """Qwen3 writes an empty thought for an answer without one.

    The prompt of both answers is their common prefix.
    """
    thinks = {"role": "assistant", "content": "5", "reasoning_content": "hm"}
    row = {"prompt": GREETING[:1], "chosen": [thinks], "rejected": [GREETING[1]]}
    both = [Document("", conversation=one) for one in parse_preference(row, "x")]  # type: ignore[arg-type]
    forced = template("qwen3").replace(
        "{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n\\n' }}"
    )
    assert forced != template("qwen3")
    for text in (template("qwen3"), forced):
        encoded = ConversationEncoder(tokenizer("qwen3"), text, NO_FRAME, pairs=True).encode_documents(both)
        ask = tokenizer("qwen3").apply_chat_template(
            GREETING[:1], chat_template=text, add_generation_prompt=True, return_dict=False
        )
        common = min(
            next(at for at, (a, b) in enumerate(zip([*ask, None], one.tolist(), strict=False)) if a != b)
            for one in encoded.tokens
        )
        for mask in encoded.trained_masks:
            assert np.flatnonzero(mask).tolist() == list(range(common, len(mask)))


def test_token_shared_by_prompt_and_answer_is_trained() -> None:
    """A token that the prompt and the answer share is trained, as in TRL."""
    from tokenizers import Tokenizer

    bpe = tokenizer("chatml").backend_tokenizer.to_str()
    assert isinstance(bpe, str)
    two = Tokenizer.from_str(bpe)
    two.add_tokens(["\n\n"])
    joined = type(tokenizer("chatml"))(
        tokenizer_object=two, eos_token="<|endoftext|>", extra_special_tokens=["<|im_start|>", "<|im_end|>"]
    )
    messages = [GREETING[0], {"role": "assistant", "content": "\nIt is 5."}]
    for text in (plain_chatml(), template("chatml")):
        encoded = ConversationEncoder(joined, text, NO_FRAME).encode_documents(
            [record({"messages": messages})]
        )
        assert joined.decode(encoded.tokens[0][encoded.trained_masks[0]]) == "\n\nIt is 5.<|im_end|>\n"


def test_conversation_with_too_many_answers_is_rejected() -> None:
    many = [{"role": role, "content": "x" * 1000} for _ in range(1000) for role in ("user", "assistant")]
    with pytest.raises(UserError, match=r"1,000 answers in .* characters, which are too many to locate"):
        encode("llama3", template("llama3"), {"messages": many})
