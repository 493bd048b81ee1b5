"""Which tokens of a conversation are trained, for a dozen families of models."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import numpy as np
import pytest

from portable.data.tokens.chat_template import ChatTemplate, Encoded
from portable.errors import UserError
from tests.portable.chat_support import (
    FAMILIES,
    GREETING,
    NO_FRAME,
    SYSTEM,
    TALK,
    plain_chatml,
    record,
    template,
    tokenizer,
)

TODAY = {"strftime_now": datetime.now().date().isoformat()}  # GPT-OSS tells the model what day it is
MARKED = [name for name, family in FAMILIES.items() if family.marked]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "One."}},
                "required": ["a"],
            },
        },
    }
]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Add 2 and 3"},
    {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [3]}}}],
    },
    {"role": "tool", "name": "add", "content": "5"},
    {"role": "assistant", "content": "It is 5."},
]


def talks(name: str) -> dict[str, list[dict[str, Any]]]:
    """Conversations that a family's template takes."""
    found = {"one turn": GREETING, "several turns": TALK}
    if FAMILIES[name].system:
        found["with a system message"] = SYSTEM + TALK
    return found


def encode(name: str, text: str, row: dict[str, Any], kind: str = "messages", **options: Any) -> Encoded:
    options.setdefault("kwargs", TODAY)
    return ChatTemplate(tokenizer(name), text, NO_FRAME, **options).encode([record(row, kind)])


def theirs(name: str, messages: list[dict[str, Any]], **options: Any) -> tuple[list[int], list[int]]:
    """Tokens and mask of transformers, which TRL calls, with TRL's template."""
    found = tokenizer(name).apply_chat_template(
        messages,
        chat_template=template(f"{name}_training"),
        return_assistant_tokens_mask=True,
        return_dict=True,
        **options,
    )
    return found["input_ids"], found["assistant_masks"]


def trained(name: str, encoded: Encoded, at: int = 0) -> str:
    text: str = tokenizer(name).decode(encoded.tokens[at][encoded.trained[at]])
    return text


@pytest.mark.parametrize("name", MARKED)
def test_marks_of_the_template(name: str) -> None:
    """Token for token what transformers makes of TRL's template, which is what TRL trains on."""
    cases: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [(talk, {}) for talk in talks(name).values()]
    if name in ("qwen2_5", "qwen3", "gptoss"):
        cases.append((CALLS, {"tools": TOOLS}))
    for messages, options in cases:
        tokens, mask = theirs(name, messages, **options)
        encoded = encode(name, template(f"{name}_training"), {"messages": messages, **options})
        assert encoded.tokens[0].tolist() == tokens
        assert encoded.trained[0].astype(int).tolist() == mask
        assert 0 < sum(mask) < len(mask)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen3"])
def test_answers_are_found_by_their_prefixes(name: str) -> None:
    """In the model's own template. TRL's marks differ only by what the generation prompt writes itself."""
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
            extra = np.array(mask, dtype=bool) & ~encoded.trained[0]
            assert not (encoded.trained[0] & ~np.array(mask, dtype=bool)).any()
            left = tokenizer(name).decode(np.array(tokens)[extra])
            between = "<|end|>" if name == "gptoss" else ""  # which the last answer has in another form
            assert left == between.join([family.in_marks] * len(answers))


def test_the_last_answer_alone() -> None:
    for text in (template("llama3"), template("llama3_training")):
        encoded = encode("llama3", text, {"messages": TALK}, train_on="last_assistant")
        assert trained("llama3", encoded) == "You are welcome<|eot_id|>"


def test_everything() -> None:
    encoded = encode("qwen3", template("qwen3"), {"messages": TALK}, train_on="all")
    assert encoded.trained[0].all()
    assert (encoded.stopping, len(encoded.ends)) == (1, 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_completion_of_messages(name: str) -> None:
    """The rule of TRL: all that follows the tokens that prompt and whole have in common."""
    row = {"prompt": TALK[:3], "completion": TALK[3:4]}
    whole = tokenizer(name).apply_chat_template(TALK[:4], return_dict=False)
    prompt = tokenizer(name).apply_chat_template(TALK[:3], return_dict=False, add_generation_prompt=True)
    common = next(at for at, (a, b) in enumerate(zip([*prompt, None], whole, strict=False)) if a != b)
    encoded = encode(name, tokenizer(name).chat_template, row, "prompt_completion")
    assert encoded.tokens[0].tolist() == whole
    assert np.flatnonzero(encoded.trained[0]).tolist() == list(range(common, len(whole)))
    assert 0 < common < len(whole)


def test_a_completion_of_text() -> None:
    name = "llama3"
    from portable.data.sources.documents import read_row
    from portable.data.sources.opening import Fields
    from portable.data.tokens.tokenize import Frame

    row = {"prompt": "what is it", "completion": ", and more?"}
    document = read_row(row, Fields(format="prompt_completion"), "x")
    assert document is not None
    end = tokenizer(name).eos_token_id
    encoded = ChatTemplate(tokenizer(name), None, Frame((0,), (end,))).encode([document])
    assert (
        tokenizer(name).decode(encoded.tokens[0]) == "<|begin_of_text|>what is it, and more?<|end_of_text|>"
    )
    assert trained(name, encoded) == ", and more?<|end_of_text|>"
    assert encoded.ends == {end: 1}


def test_thinking_that_is_left_out_of_earlier_turns_is_refused_with_what_helps() -> None:
    with pytest.raises(UserError, match=r"chat.jsonl:1: the template shows message 2 otherwise.*split_turns"):
        encode("qwen3", template("qwen3"), {"messages": TALK})
    encoded = encode("qwen3", template("qwen3"), {"messages": TALK}, train_on="last_assistant")
    assert trained("qwen3", encoded) == "<think>\n\n</think>\n\nYou are welcome<|im_end|>\n"


@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_a_sample_of_each_answer(name: str) -> None:
    """What the model is shown and has to say at that point, as at inference."""
    encoded = encode(name, template(name), {"messages": SYSTEM + TALK}, split_turns=True)
    assert len(encoded.tokens) == 3
    for number, stop in enumerate((3, 5, 7)):
        messages = (SYSTEM + TALK)[:stop]
        prompt = tokenizer(name).apply_chat_template(
            messages[:-1], return_dict=False, add_generation_prompt=True
        )
        whole = tokenizer(name).apply_chat_template(messages, return_dict=False)
        assert encoded.tokens[number].tolist() == whole
        assert np.flatnonzero(encoded.trained[number]).tolist() == list(range(len(prompt), len(whole)))


def test_a_switched_off_thought_is_not_trained() -> None:
    """With enable_thinking false the prompt has the empty thought already."""
    encoded = encode("qwen3", template("qwen3"), {"messages": GREETING}, kwargs={"enable_thinking": False})
    assert trained("qwen3", encoded) == "It is 5.<|im_end|>\n"


def test_a_generation_prompt_that_answers_do_not_begin_with() -> None:
    encoded = encode("deepseekv3", template("deepseekv3"), {"messages": GREETING})
    assert encoded.prompt_left == "<think>\n"
    assert trained("deepseekv3", encoded) == "It is 5.<｜end▁of▁sentence｜>"
    # Here <think> is no token, so that an answer may begin as it does.
    messages = [GREETING[0], {"role": "assistant", "content": "<b>5"}]
    encoded = encode("deepseekv3", template("deepseekv3"), {"messages": messages})
    assert encoded.prompt_left == "<think>\n"
    assert trained("deepseekv3", encoded) == "<b>5<｜end▁of▁sentence｜>"


def test_arguments_of_calls_are_objects_or_text_as_the_template_needs() -> None:
    """The first takes JSON objects, the second a string of JSON; OpenAI's format has strings."""
    call = {"name": "add", "arguments": '{"a": 2}'}
    messages = [CALLS[0], {"role": "assistant", "tool_calls": [{"function": call}]}, *CALLS[2:]]
    assert '"arguments": {"a": 2}}' in trained(
        "qwen2_5", encode("qwen2_5", template("qwen2_5"), {"messages": messages})
    )
    messages[1] = {**messages[1], "content": ""}
    found = encode("deepseekv3", template("deepseekv3"), {"messages": messages}, train_on="all")
    assert '```json\n{"a": 2}\n```' in trained("deepseekv3", found)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_token_that_ends_an_answer(name: str) -> None:
    encoded = encode(name, tokenizer(name).chat_template, {"messages": GREETING})
    assert encoded.ends == {tokenizer(name).convert_tokens_to_ids(FAMILIES[name].answer_end): 1}
    assert (encoded.stopping, encoded.unstopped) == (1, "")


def test_marks_that_leave_out_the_end() -> None:
    text = template("llama3_training").replace(
        "trim + '<|eot_id|>' }}\n        {%- endgen", "trim }}\n        {%- endgen"
    )
    text = text.replace("{%- endgeneration %}", "{%- endgeneration %}{{ '<|eot_id|>' }}")
    assert text.count("<|eot_id|>") == 2
    encoded = encode("llama3", text, {"messages": GREETING})
    assert encoded.stopping == 0
    assert encoded.unstopped == "'It is 5.', and then comes '<|eot_id|>'"


def test_marks_whose_answers_end_with_another_added_token() -> None:
    """Only the token that ends the turn makes a model stop."""
    text = (
        "{% for message in messages %}<|im_start|>{{ message.role + '\n' }}{% if message.role != 'user' %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
        "<|im_end|>\n{% endfor %}"
    )
    messages = [GREETING[0], {"role": "assistant", "content": "It is 5.</think>"}]
    encoded = encode("qwen3", text, {"messages": messages})
    assert (encoded.stopping, trained("qwen3", encoded)) == (0, "It is 5.</think>")
    assert "then comes '<|im_end|>" in encoded.unstopped


@pytest.mark.parametrize(
    "messages", [[*GREETING, GREETING[0]], [GREETING[0], {**GREETING[1], "content": ""}]]
)
def test_the_end_of_an_answer_that_is_empty_or_not_the_last(messages: list[dict[str, Any]]) -> None:
    encoded = encode("llama3", template("llama3"), {"messages": messages})
    assert encoded.ends == {tokenizer("llama3").convert_tokens_to_ids("<|eot_id|>"): 1}
    assert encoded.stopping == 1


def test_an_answer_whose_beginning_cannot_be_told_is_refused() -> None:
    """Without any message this template writes no first token, so no prefix has the header."""
    with pytest.raises(UserError, match="the template shows message 1 otherwise"):
        encode("llama3", template("llama3"), {"messages": [GREETING[1], *GREETING]})


def test_arguments_are_json_wherever_the_template_writes_them() -> None:
    text = (
        "{% for message in messages %}<|im_start|>{{ message.role + '\n' + message.content }}"
        "{% for call in message.tool_calls %}{{ call.function.name + ' ' }}{{ call.function.arguments }}"
        "{% endfor %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = {"function": {"name": "add", "arguments": {"a": "é"}}}
    messages = [GREETING[0], {**GREETING[1], "tool_calls": [call]}]
    assert 'add {"a": "é"}<|im_end|>' in trained("qwen3", encode("qwen3", text, {"messages": messages}))


def test_a_newline_that_joins_the_answers_own() -> None:
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
        encoded = ChatTemplate(joined, text, NO_FRAME).encode([record({"messages": messages})])
        assert joined.decode(encoded.tokens[0][encoded.trained[0]]) == "\n\nIt is 5.<|im_end|>\n"


def test_too_much_to_render_is_refused() -> None:
    messages = [{"role": role, "content": "x" * 1000} for _ in range(1000) for role in ("user", "assistant")]
    with pytest.raises(UserError, match=r"1,000 answers in .* characters are too many to find"):
        encode("llama3", template("llama3"), {"messages": messages})


@pytest.mark.parametrize(
    ("name", "messages", "message"),
    [
        ("gemma", SYSTEM + GREETING, r"chat.jsonl:1: the template fails \(System role not supported\)"),
        ("gemma", [GREETING[0], *TALK], "the template fails .Conversation roles must alternate"),
        ("mistral_v3", SYSTEM + GREETING, "the template shows message 3 otherwise"),
    ],
)
def test_records_that_a_template_does_not_take(
    name: str, messages: list[dict[str, Any]], message: str
) -> None:
    family = "mistral" if name == "mistral_v3" else name
    with pytest.raises(UserError, match=message):
        encode(family, template(name), {"messages": messages})


def test_a_template_that_shows_only_lists_of_parts() -> None:
    """As those of models for images: a string has no parts, so they would write an empty message."""
    parts = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
        "{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    encoded = encode("chatml", parts, {"messages": TALK})
    assert (
        encoded.tokens[0].tolist() == encode("chatml", plain_chatml(), {"messages": TALK}).tokens[0].tolist()
    )
    assert trained("chatml", encoded).count("<|im_end|>") == 3
    dated = encode(
        "chatml",
        "{{ strftime_now('%Y') }}" + parts,
        {"messages": TALK},
        kwargs={"strftime_now": "2026-01-01"},
    )
    assert trained("chatml", dated) == trained("chatml", encoded)
