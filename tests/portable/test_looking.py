"""A run, --dry-run, --show-data and portable-plan take one way: what one refuses the others refuse.

What a run tells a person before its first step, a dry run tells as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from converters.cli import main as convert
from portable.cli import main
from portable.planner.cli import main as plan
from tests.runs import flags, tiny, write_pretrained

CHATML = ["<|im_start|>", "<|im_end|>"]
TARGETS = {"adapter__type": "lora", "adapter__r": 2}
HEADS = {"adapter__modules_to_save": ["embed_tokens", "lm_head"]}
TOLD = ("note:", "warning:", "hint:", "newly initialized", "in the checkpoint but not used")


@pytest.fixture(scope="module")
def model(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as large as its tokenizer, which knows no chat template."""
    return write_pretrained(tmp_path_factory.mktemp("model"), corpus)


@pytest.fixture(scope="module")
def larger(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer with two tokens more."""
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
        ({"data__tokenizer": "LARGER"}, "name its last 2 in data.added_tokens, so that they get rows, or"),
        ({"data__added_tokens": CHATML, "data__eval": {"source": "BROKEN"}}, "data.eval.source: "),
        ({"data__added_tokens": CHATML, "train__loss": "no.such:loss"}, "train.loss"),
    ],
)
def test_what_one_refuses_the_others_refuse(
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
        for words in ("debug", "a step takes 6 samples and the data has 4"):
            assert any(words in line for line in notes["run"])


def test_the_folder_of_a_run_is_its_model(
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
    remedy = refused(command("x", model__name_or_path=str(tmp_path / "none"))).rpartition(": ")[2]
    out = str(tmp_path / "converted")
    assert convert(remedy.removeprefix("portable-convert ").replace("OUT", out).split()) == 0
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
        merging = line.rpartition(": ")[2].removeprefix("portable-convert ")
    assert convert(merging.replace("OUT", str(tmp_path / "merged")).split()) == 0
    assert main([*command("y", model__name_or_path=str(tmp_path / "merged")), "--dry-run"]) == 0
