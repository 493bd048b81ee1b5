"""``portable-chat``: answers equal transformers', and all errors are one line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import portable.converters.cli
from portable.commands.chat import ChatModel, find_exported_model, main
from portable.run.rank import run_rank
from tests.runs import configured, write_conversations, write_pretrained

pytestmark = pytest.mark.usefixtures("brief_runs")

CHAT: dict[str, Any] = {
    "data__chat_template": "chatml",
    "data__added_tokens": ["<|im_start|>", "<|im_end|>"],
    "train__steps": 2,
    "checkpoint__every_steps": None,
}
MESSAGES = [
    {"role": "user", "content": "the loss?"},
    {"role": "assistant", "content": "falls."},
    {"role": "user", "content": "a small model?"},
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """Two runs on conversations: ``whole``, and ``lora`` with its base model."""
    folder = tmp_path_factory.mktemp("chat")
    conversations = write_conversations(folder)
    assert run_rank("cpu", configured(folder / "whole", conversations, **CHAT)) == 0
    base = write_pretrained(folder / "base", corpus)
    adapter = {"model__name_or_path": str(base), "model__config": None, "adapter__type": "lora"}
    tables = {"adapter__modules_to_save": ["embed_tokens", "lm_head"]}  # the new tokens are rows of both
    settings = CHAT | adapter | tables | {"train__learning_rate": 1e-2, "train__steps": 4}
    assert run_rank("cpu", configured(folder / "lora", conversations, **settings)) == 0
    return folder


@pytest.mark.parametrize("kind", ["whole", "lora"])
def test_chat_answer_equals_transformers(kind: str, trained: Path, tmp_path: Path) -> None:
    final = find_exported_model(str(trained / kind))
    plain = final
    if kind == "lora":
        plain = tmp_path / "merged"
        convert = portable.converters.cli.main
        assert convert([str(final), str(plain), "--merge-into", str(trained / "base")]) == 0
    tokenizer = AutoTokenizer.from_pretrained(final)
    tokens = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    expected = model.generate(**tokens, max_new_tokens=12, do_sample=False, eos_token_id=[end])
    chat = ChatModel(final, "cpu")
    chat.model.float()
    assert end in chat._find_end_tokens()
    answer = "".join(chat.generate_answer(MESSAGES, max_new_tokens=12, do_sample=False))
    assert answer == tokenizer.decode(expected[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)


def test_chat_reads_conversation_from_standard_input(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[list[dict[str, str]]] = []

    def answer(self: ChatModel, messages: list[dict[str, str]], **options: Any) -> list[str]:
        seen.append(list(messages))
        assert options == {"max_new_tokens": 9, "do_sample": False}
        return ["an", " answer\x1b[2J"]

    monkeypatch.setattr(ChatModel, "generate_answer", answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n/reset\nthree\n/exit\nfour\n"))
    command = [str(trained / "whole"), "--max-tokens", "9", "--temperature", "0", "--system", "Be brief."]
    assert main(command) == 0
    assert capsys.readouterr().out == "an answer\\x1b[2J\n" * 3
    typed = [[message["content"] for message in chat if message["role"] != "assistant"] for chat in seen]
    assert typed == [
        ["Be brief.", "one"],
        ["Be brief.", "one", "two"],
        ["Be brief.", "three"],
    ]


def test_chat_prompt_prints_one_answer(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [str(trained / "whole"), "--prompt", "a model?", "--max-tokens", "4", "--temperature", "0"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert main(command) == 0
    assert capsys.readouterr().out == first


def test_chat_errors_suggest_fix(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def read_error(*words: str) -> str:
        assert main(list(words)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "has no model; specify the output_dir of a run" in read_error(str(tmp_path / "nothing"))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "portable-convert" in read_error(str(tmp_path / "run"))
    (trained / "base").rename(trained / "moved")
    try:
        assert "which does not exist; run the command in the folder" in read_error(str(trained / "lora"))
    finally:
        (trained / "moved").rename(trained / "base")
    assert "--max-tokens: 0 is out of range" in read_error(str(trained / "whole"), "--max-tokens", "0")
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "config.json").write_text((trained / "base" / "config.json").read_text())
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"x")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "pickle" / name).write_bytes((trained / "base" / name).read_bytes())
    assert "safetensors" in read_error(str(tmp_path / "pickle"))
    (tmp_path / "pickle" / "config.json").write_text("[]")
    assert read_error(str(tmp_path / "pickle")).startswith("error: RUN: cannot load")
