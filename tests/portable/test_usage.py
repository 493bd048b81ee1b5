"""The commands that a run ends with, and its model card has: what can be run here, runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import converters.cli
from portable.cli import main
from portable.config import load_config
from portable.reporting.card import ASKED, AUTO, CARD, model_card, usage
from tests.runs import flags, tiny, write_labelled, write_pretrained

CONVERT, PYTHON = "portable-convert", ["python", "-c"]


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The last lines of a run: what for, and the command."""
    lines = capsys.readouterr().err.rstrip("\n").splitlines()
    rows = [line.split(None, 1) for line in lines[len(lines) - lines[::-1].index("") :]]
    return {row[0]: row[1] for row in rows}


def run(command: str) -> None:
    """Do what a shell would do, as far as the programs are here."""
    for part in command.split(" && "):
        words = shlex.split(part)
        if words[0] == CONVERT:
            assert converters.cli.main(words[1:]) == 0, part
        elif words[:2] == PYTHON:
            exec(words[2], {})
        else:
            assert words[0] == "llama-cli" and Path(words[2]).exists(), part


@pytest.mark.usefixtures("brief_runs")
@pytest.mark.parametrize("kind", ["whole", "lora", "dora", "classifier"])
def test_each_command_runs(
    kind: str,
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"train__steps": 1}
    if kind in ("lora", "dora"):
        base = write_pretrained(tmp_path / "base", corpus)
        settings |= {"model__name_or_path": "base", "model__config": None, "adapter__type": "lora"}
        settings |= {"adapter__r": 4, "adapter__use_dora": kind == "dora", "data__tokenizer": str(base)}
    elif kind == "classifier":
        settings |= {"model__task": "sequence-classification", "data__packing": False}
        corpus = write_labelled(tmp_path, 40)
    assert main(flags(tiny("runs/mine", corpus, **settings))) == 0
    commands = told(capsys)
    card = Path("runs/mine/final", CARD).read_text()
    assert str(tmp_path) not in card.split("```sh")[1].split("```")[0]
    for what, command in commands.items():
        assert command.replace("runs/mine/final", "path/of/this/folder") in card
        if what in ("transformers", "llama.cpp", "merge"):
            run(command)
    whole = {"transformers", "vLLM", "llama.cpp", "lm_eval"}
    if kind == "classifier":
        assert commands.keys() == {"transformers"}
    elif kind == "lora":
        serve = "vllm serve base --enable-lora --max-lora-rank 8 --lora-modules mine=runs/mine/final"
        assert commands["vLLM"] == serve
        assert "pretrained=base,peft=runs/mine/final" in commands["lm_eval"]
    elif kind == "dora":  # which vLLM does not take
        assert commands.keys() == {"merge", *whole} and commands["vLLM"] == "vllm serve mine-merged"
    else:
        assert commands.keys() == whole and commands["vLLM"] == "vllm serve runs/mine/final"


PLACES: list[tuple[Mapping[str, Any], str, dict[str, str]]] = [
    (
        {"output_dir": "s3://b/mine"},
        "s3://b/mine/final",
        {"fetch": "portable-convert s3://b/mine/final mine-model", "vLLM": "vllm serve mine-model"},
    ),
    (
        {"model.name_or_path": "a $(b)", "adapter.type": "lora", "output_dir": "-it"},
        "-it/final",
        {
            "vLLM": "vllm serve 'a $(b)' --enable-lora --max-lora-rank 16 --lora-modules it=-it/final",
            "llama.cpp": "portable-convert -it/final it-merged.gguf --to gguf --merge-into "
            "\"$(hf download 'a $(b)')\" && llama-cli -m it-merged.gguf",
        },
    ),
]


@pytest.mark.parametrize(("settings", "where", "expected"), PLACES)
def test_commands_for_other_places(settings: Mapping[str, Any], where: str, expected: dict[str, str]) -> None:
    found = dict(usage(load_config(None, settings), where, "llama"))
    assert {what: found[what] for what in expected} == expected
    for command in found.values():
        shlex.split(command)


def test_commands_of_a_card_have_of_local_folders_the_names_alone(tmp_path: Path) -> None:
    base = tmp_path / "my secret" / "base"
    base.mkdir(parents=True)
    settings = {"model.config": None, "model.name_or_path": str(base), "adapter.type": "lora"}
    adapter: Any = SimpleNamespace(rows=None, identity={"base": "digest"})
    facts: dict[str, Any] = {"architecture": "Some", "model_type": "llama", "data": "texts", "metrics": []}
    card = model_card(load_config(None, settings), adapter=adapter, **facts)
    commands = card.partition("```sh\n")[2].partition("```")[0]
    assert "--merge-into base " in commands and "vllm serve base --enable-lora" in commands
    assert "secret" not in commands and f'from_pretrained("{base}")' in card


def test_pipelines_are_those_of_transformers() -> None:
    from transformers import pipelines

    assert {AUTO[task][1] for task in ASKED} <= set(pipelines.PIPELINE_REGISTRY.supported_tasks)
