"""A run, --dry-run, --show-data and portable-plan use the same code: they reject the same settings.

A dry run prints all notes that a run prints before its first step. The commands that a run prints at its end
and in its model card are executed here if their programs are installed.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import portable.converters.cli
from portable.adapters.adapter import inject_adapter
from portable.cli import main
from portable.commands import chat
from portable.config import load_config
from portable.converters.cli import main as convert
from portable.model.build import build_and_freeze_model, load_model_config
from portable.planner.cli import main as plan
from portable.reporting.model_card import MODEL_CARD_FILE, list_usage_commands
from tests.runs import configured, flags, tiny, write_conversations, write_labelled, write_pretrained
from tests.tiny_models import tiny_config

CHATML = ["<|im_start|>", "<|im_end|>"]
TARGETS = {"adapter__type": "lora", "adapter__r": 2}
HEADS = {"adapter__modules_to_save": ["embed_tokens", "lm_head"]}
TOLD = ("note:", "warning:", "hint:", "newly initialized", "in the checkpoint but not used")


@pytest.fixture(scope="module")
def model(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with as many rows as its tokenizer has tokens. The tokenizer has no chat template."""
    return write_pretrained(tmp_path_factory.mktemp("model"), corpus)


@pytest.fixture(scope="module")
def larger(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the same tokenizer with two more tokens."""
    folder = tmp_path_factory.mktemp("larger")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(CHATML, special_tokens=True)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"data__added_tokens": CHATML, "data__max_samples": 4, "log__sample_tokens": 0}, None),
        ({"data__added_tokens": CHATML, **TARGETS, **HEADS}, None),
        ({"data__added_tokens": CHATML, **TARGETS}, "data.added_tokens: adds rows to"),
        ({}, 'set data.added_tokens to ["<|im_start|>", "<|im_end|>"]'),
        (
            {"data__tokenizer": "LARGER"},
            "list the last 2 tokens of the tokenizer in data.added_tokens, or",
        ),
        ({"data__added_tokens": CHATML, "data__eval": {"source": "BROKEN"}}, "data.eval.source: "),
        ({"data__added_tokens": CHATML, "train__loss": "no.such:loss"}, "train.loss"),
    ],
)
def test_run_dry_run_show_data_and_plan_reject_same_settings(
    given: dict[str, Any],
    refused: str | None,
    model: Path,
    larger: Path,
    conversations: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    brief_runs: None,
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text(json.dumps({"messages": [{"role": "user", "content": "Only asked?"}]}) + "\n")
    text = json.dumps(given).replace("LARGER", str(larger)).replace("BROKEN", str(broken))
    settings = tiny(
        tmp_path / "run",
        conversations,
        model__name_or_path=str(model),
        data__chat_template="chatml",
        data__seq_len=48,
        data__cache_dir=str(tmp_path / "cache"),
        data__eval_fraction=0.0,
        train__steps=1,
        checkpoint__every_steps=None,
        **json.loads(text),
    )
    del settings["model.config"]
    accelerate = tmp_path / "accelerate.yaml"
    accelerate.write_text("{compute_environment: LOCAL_MACHINE, debug: true, num_processes: 1}\n")
    said, notes, file = {}, {}, ["--accelerate-config", str(accelerate)]
    for name, command, more in (
        ("show", main, [*file, "--show-data", "1"]),  # so that the samples are counted
        ("dry run", main, [*file, "--dry-run"]),
        ("plan", plan, []),
        ("run", main, file),
    ):
        code = command([*flags(settings), *more])
        lines = capsys.readouterr().err.splitlines()
        told = [line for line in lines if line.startswith("error: ")]
        said[name], notes[name] = (code, told), sorted(line for line in lines if line.startswith(TOLD))
    assert len({str(one) for one in said.values()}) == 1, said
    code, told = said["run"]
    assert code == (0 if refused is None else 2), said
    assert refused is None or (len(told) == 1 and refused in told[0])
    if "data__max_samples" in given:
        assert notes["dry run"] == notes["run"]
        for words in ("debug", "a step takes 6 samples, but the data has 4"):
            assert any(words in line for line in notes["run"])


def test_dry_run_resolves_defaults_from_data_and_model(
    model: Path, conversations: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The format is recognized by the first record; the model has 64 positions."""
    shared: dict[str, Any] = {
        "backend": "cpu",
        "output_dir": str(tmp_path / "run"),
        "data.cache_dir": str(tmp_path / "cache"),
    }
    shared |= {"model.name_or_path": str(model), "train.epochs": 2, "data.chat_template": "chatml"}
    shared |= {"data.added_tokens": CHATML, "log.trackers": [], "log.sample_tokens": 0}
    chats = flags(shared | {"data.source": str(conversations)})
    assert main([*chats, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "data.seq_len is 64, because the model has 64 positions, and the default is at most" in said.err
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    assert {"betas: [0.9, 0.999]", "seq_len: 64", "eval_every_epochs: 1.0"} <= set(lines)
    assert {f"{key} default for fine-tuning" for key in ("train.betas", "data.seq_len")} <= set(lines)
    assert "model transforms chunked loss, document attention, loss parts" in lines
    assert main([*chats, "--data.seq_len", "32", "--train.betas", "0.8", "0.9", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "data.seq_len is" not in said.err
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    assert {"betas: [0.8, 0.9]", "seq_len: 32", "train.betas --train.betas"} <= set(lines)
    assert "train.betas default for fine-tuning" not in lines
    del shared["data.chat_template"]
    texts = flags(shared | {"data.source": str(corpus)})
    assert main([*texts, "--dry-run"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"betas: [0.9, 0.95]", "seq_len: 64", "eval_every: 100"} <= set(lines)
    assert "train.betas default for continued pretraining" in lines
    assert plan([*texts, "--device", "h100"]) == 0
    assert "micro-batches of 4 x 64 tokens" in " ".join(capsys.readouterr().out.split())


def test_model_name_may_be_folder_of_run(
    conversations: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], brief_runs: None
) -> None:
    def command(name: str, **given: Any) -> list[str]:
        settings = tiny(tmp_path / name, corpus, train__steps=1, checkpoint__every_steps=None, **given)
        return flags(
            {k: v for k, v in settings.items() if k != "model.config" or "model__name_or_path" not in given}
        )

    def refused(argv: list[str]) -> str:
        assert main([*argv, "--dry-run"]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        return line

    full, lora = tmp_path / "full", tmp_path / "lora"
    assert main(command("none", checkpoint__export=False)) == 0
    (arguments,) = re.findall(
        r"portable-convert (\S+ OUT)", refused(command("x", model__name_or_path=str(tmp_path / "none")))
    )
    out = str(tmp_path / "converted")
    assert convert(arguments.replace("OUT", out).split()) == 0
    assert main([*command("x", model__name_or_path=out), "--dry-run"]) == 0

    assert main(command("full")) == 0
    given = {"model__name_or_path": str(full), "data__tokenizer": str(full)}
    assert main(command("lora", adapter__type="lora", **given)) == 0
    assert main([*command("next", adapter__name_or_path=str(lora), **given), "--dry-run"]) == 0
    assert "name_or_path: " + str(lora / "final") in capsys.readouterr().out
    for name in (lora, lora / "final"):
        line = refused(command("x", model__name_or_path=str(name)))
        assert (
            f"set model.name_or_path to {full / 'final'} and adapter.name_or_path to {lora / 'final'};"
            in line
        )
        (merging,) = re.findall("portable-convert (.* --merge-into [^ ,]+)", line)
    assert convert(merging.replace("OUT", str(tmp_path / "merged")).split()) == 0
    assert main([*command("y", model__name_or_path=str(tmp_path / "merged")), "--dry-run"]) == 0


# -- the commands that a run ends with -------------------------------------------------------------------


CONVERT, PYTHON = "portable-convert", ["python", "-c"]


def commands_of(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the commands that a run prints at its end, keyed by program."""
    lines = capsys.readouterr().err.rstrip("\n").splitlines()
    rows = [line.split(None, 1) for line in lines[len(lines) - lines[::-1].index("") :]]
    return {row[0]: row[1] for row in rows}


def do(command: str) -> None:
    """Run a shell command if its programs are installed."""
    for part in command.split(" && "):
        words = shlex.split(part)
        if words[0] == CONVERT:
            assert portable.converters.cli.main(words[1:]) == 0, part
        elif words[0] == "portable-chat":
            assert chat.main([*words[1:], "--prompt", "a model", "--max-tokens", "2"]) == 0, part
        elif words[:2] == PYTHON:
            exec(words[2], {})
        else:
            assert words[0] == "llama-cli" and Path(words[2]).exists(), part


@pytest.mark.usefixtures("brief_runs")
@pytest.mark.parametrize("kind", ["whole", "chat", "lora", "classifier"])
def test_usage_commands_run(
    kind: str,
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"train__steps": 1}
    if kind == "lora":
        base = write_pretrained(tmp_path / "base", corpus)
        settings |= {"model__name_or_path": "base", "model__config": None, "adapter__type": "lora"}
        settings |= {"adapter__r": 4, "data__tokenizer": str(base)}
    elif kind == "chat":
        corpus = write_conversations(tmp_path)
        settings |= {"data__chat_template": "chatml", "data__added_tokens": ["<|im_start|>", "<|im_end|>"]}
    elif kind == "classifier":
        settings |= {"model__task": "sequence-classification", "data__packing": False}
        corpus = write_labelled(tmp_path, 40)
    assert main(flags(tiny("runs/mine", corpus, **settings))) == 0
    commands = commands_of(capsys)
    card = Path("runs/mine/final", MODEL_CARD_FILE).read_text()
    assert str(tmp_path) not in card.split("```sh")[1].split("```")[0]
    for what, command in commands.items():
        assert command.replace("runs/mine/final", "path/of/this/folder") in card
        if what in ("chat", "transformers", "llama.cpp", "merge"):
            do(command)
    whole = {"chat", "transformers", "vLLM", "llama.cpp", "lm_eval"}
    assert ("[{'role': 'user'" in commands["transformers"]) == (kind == "chat")
    if kind == "classifier":
        assert commands.keys() == {"transformers"}
    elif kind == "lora":
        serve = "vllm serve base --enable-lora --max-lora-rank 8 --lora-modules mine=runs/mine/final"
        assert commands["vLLM"] == serve
        assert "pretrained=base,peft=runs/mine/final" in commands["lm_eval"]
    else:
        assert commands.keys() == whole and commands["vLLM"] == "vllm serve runs/mine/final"


def test_usage_commands_merge_before_chat() -> None:
    settings = {"model.name_or_path": "org/a", "adapter.type": "lora", "adapter.use_dora": True}
    config = load_config(None, settings | {"output_dir": "runs/mine"})
    commands = list_usage_commands(config, "runs/mine/final", "llama", "LlamaForCausalLM")
    assert [command.purpose for command in commands][:3] == ["merge", "chat", "transformers"]


def test_usage_commands_quote_names() -> None:
    settings = {"model.name_or_path": "a $(b)", "adapter.type": "lora", "output_dir": "-it"}
    found = dict(list_usage_commands(load_config(None, settings), "-it/final", "llama", "LlamaForCausalLM"))
    assert shlex.split(found["vLLM"])[:3] == ["vllm", "serve", "a $(b)"]
    assert "\"$(hf download 'a $(b)')\"" in found["llama.cpp"]


def test_usage_command_of_vllm_serves_adapter_of_stacked_experts(tmp_path: Path, corpus: Path) -> None:
    """vLLM rejects such an adapter without these options, and peft doubles the rank of `gate_up_proj`."""
    settings = {"adapter__type": "lora", "adapter__r": 12, "model__config": tiny_config("qwen3_moe")}
    config = configured(tmp_path, corpus, **settings)
    model = build_and_freeze_model(load_model_config(config.model), config)
    adapter = inject_adapter(model, load_model_config(config.model), config)
    run = load_config(None, {"model.name_or_path": "base", "adapter.type": "lora", "output_dir": "mine"})
    commands = dict(
        list_usage_commands(run, "mine/final", "qwen3_moe", "Qwen3MoeForCausalLM", adapter=adapter)
    )
    *command, module = shlex.split(commands["vLLM"])
    options = "--enable-lora --max-lora-rank 32 --enable-mixed-moe-lora-format --lora-modules"
    assert command == ["vllm", "serve", "base", *options.split()]
    assert json.loads(module) == {"name": "mine", "path": "mine/final", "is_3d_lora_weight": True}


def test_usage_command_of_vllm_serves_merged_model_for_adapter_of_one_stack(
    tmp_path: Path, corpus: Path
) -> None:
    """vLLM requires that the adapter changes both stacks of experts."""
    stack = {"adapter__target_modules": [], "adapter__target_parameters": ["mlp.experts.gate_up_proj"]}
    settings = {"adapter__type": "lora", "model__config": tiny_config("qwen3_moe"), **stack}
    config = configured(tmp_path, corpus, **settings)
    model = build_and_freeze_model(load_model_config(config.model), config)
    adapter = inject_adapter(model, load_model_config(config.model), config)
    run = load_config(None, {"model.name_or_path": "base", "adapter.type": "lora", "output_dir": "mine"})
    commands = dict(
        list_usage_commands(run, "mine/final", "qwen3_moe", "Qwen3MoeForCausalLM", adapter=adapter)
    )
    assert commands["vLLM"] == "vllm serve mine-merged"
    assert "--merge-into" in commands["merge"]


@pytest.mark.parametrize(
    ("model_type", "architecture", "settings", "command", "programs"),
    [
        ("llama", "LlamaForCausalLM", {}, "p = pipeline('text-generation', 'final')", 5),
        ("gemma3", "Gemma3ForConditionalGeneration", {}, "p = pipeline('text-generation', 'final')", 4),
        ("llava", "LlavaForConditionalGeneration", {}, "import LlavaForConditionalGeneration as M;", 4),
        (
            "tinygpt",
            "TinyGpt",
            {"model.function": "mine.tiny:build"},
            "import mine.tiny; from transformers",
            1,
        ),
        ("tinygpt", "TinyGpt", {"model.trust_remote_code": True}, "'final', trust_remote_code=True)", 3),
    ],
)
def test_usage_commands_fit_model(
    model_type: str, architecture: str, settings: dict[str, Any], command: str, programs: int
) -> None:
    commands = dict(list_usage_commands(load_config(None, settings), "final", model_type, architecture))
    assert command in commands["transformers"]
    assert len(commands) == programs
    if programs > 1:
        assert ("--trust-remote-code" in commands["vLLM"]) == ("model.trust_remote_code" in settings)
