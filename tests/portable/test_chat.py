"""``portable-chat``: answers equal transformers', and all errors are one line."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)

import portable.converters.cli
from portable.commands.chat import ChatModel, find_exported_model, main
from portable.converters.console import escape_control_characters
from portable.run.rank import run_rank
from tests.image_models import RED, make_image, write_image_model
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

    def answer(
        self: ChatModel, messages: list[dict[str, str]], images: list[Any], **options: Any
    ) -> list[str]:
        assert not images
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
        assert "does not exist; run the command in the folder" in read_error(str(trained / "lora"))
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


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "smolvlm"])
def test_chat_answer_about_images_equals_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torchvision")
    from PIL import Image

    folder = write_image_model(tmp_path / family, family)
    question = {
        "role": "user",
        "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Why?"}],
    }
    paths = [tmp_path / "a.png", tmp_path / "b.png"]
    for path, size in zip(paths, [(16, 16), (40, 24)], strict=True):
        path.write_bytes(make_image(RED, size))
    processor = AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template([question], add_generation_prompt=True)
    inputs = processor(text=[text], images=[[*map(Image.open, paths)]], return_tensors="pt")
    inputs = {name: values for name, values in inputs.items() if name != "row_to_image"}
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    expected = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image {paths[0]}\n/image {paths[1]}\nWhy?\n"))
    assert main([str(folder), "--max-tokens", "6", "--temperature", "0"]) == 0
    continuation = expected[0, inputs["input_ids"].shape[1] :]
    answer = processor.tokenizer.decode(continuation, skip_special_tokens=True)
    assert capsys.readouterr().out == escape_control_characters(answer) + "\n"


@pytest.mark.parametrize(
    ("typed", "error"),
    [
        (
            "/image nothing.png\nWhy?",
            "/image: cannot read 'nothing.png' (there is no regular file at this path)",
        ),
        ("/image /dev/zero", "/image: cannot read '/dev/zero' (there is no regular file at this path)"),
        ("/image text.png", "/image: cannot read 'text.png' (not a JPEG, "),
        (
            "/image a.png\n<image> or <image>?",
            "contains the image placeholder '<image>' 3 times, but the conversation has 1 image;",
        ),
    ],
)
def test_chat_rejects_bad_images(
    typed: str,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torchvision")
    monkeypatch.chdir(tmp_path)
    folder = write_image_model(tmp_path / "smolvlm", "smolvlm")
    Path("a.png").write_bytes(make_image(RED))
    Path("text.png").write_text("no image")
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    capsys.readouterr()
    assert main([str(folder)]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1 and error in lines[0]


def test_chat_rejects_images_for_text_models(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("/image a.png\n"))
    assert main([str(trained / "whole")]) == 2
    assert "has no image processor" in capsys.readouterr().err
