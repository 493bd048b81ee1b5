"""What `portable-train init` writes runs: each starter with a tiny model and data in place of its own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from portable.cli import main
from portable.commands.init import tasks
from portable.config import load_config
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.runs import write_conversations, write_labelled, write_pretrained

TALK = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("task", ["chat", "lora"])
def test_a_starter_trains_a_few_hundred_chats(
    task: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Except for the lengths of sequences, only what a user has to change is changed."""
    monkeypatch.chdir(tmp_path)
    base = write_pretrained(tmp_path / "base", corpus)
    chats = write_conversations(tmp_path)
    lines = chats.read_text().splitlines()
    chats.write_text("\n".join([*lines, *lines[:40]]) + "\n")
    (tmp_path / "talk.jinja").write_text(TALK)
    assert main(["init", "mine.yaml", "--task", task]) == 0
    own = {
        "backend": "cpu",
        "model.name_or_path": str(base),
        "data.source": str(chats),
        "data.chat_template": "talk.jinja",
        "data.seq_len": 64,
        "data.cache_dir": str(tmp_path / "cache"),
        "log.sample_tokens": 0,
        "log.trackers": [],
    }
    assert run_rank("cpu", load_config(Path("mine.yaml"), own)) == 0
    shown = capsys.readouterr().err
    assert "hardly change" not in shown
    assert re.search(r"\d to train, (\d+) to evaluate", shown)[1] == "16"  # type: ignore[index]
    run = tmp_path / "runs" / "mine"
    rows = read_metrics(run)
    assert max(row["step"] for row in rows) >= 30
    evaluated = [row["step"] for row in rows if "eval_loss" in row]
    assert len(evaluated) == 3
    saved = [f"step-{step:06}" for step in evaluated]
    assert sorted(path.name for path in (run / "checkpoints").glob("step-*")) == saved
    config = load_config(run / "config.yaml")
    assert (config.train.weight_decay, config.train.betas) == (0.0, (0.9, 0.999))


@pytest.mark.parametrize("task", tasks())
def test_a_starter_runs(task: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base = write_pretrained(tmp_path / "base", corpus)
    own: dict[str, Any] = {"model.name_or_path": str(base)}
    if task == "pretrain":
        own = {"data.source": str(corpus)}  # its own model, which is small
    elif task == "classification":
        own["data.source"] = str(write_labelled(tmp_path, 40))
    elif task == "dpo":
        pairs = tmp_path / "pairs.jsonl"
        said = [[{"role": "assistant", "content": word}] for word in ("yes", "no")]
        pair = {"prompt": [{"role": "user", "content": "Is it?"}], "chosen": said[0], "rejected": said[1]}
        pairs.write_text((json.dumps(pair) + "\n") * 12)
        (tmp_path / "talk.jinja").write_text(TALK)
        own |= {"data.source": str(pairs), "data.chat_template": "talk.jinja"}
    else:
        (tmp_path / "talk.jinja").write_text(TALK)
        own |= {"data.source": str(write_conversations(tmp_path)), "data.chat_template": "talk.jinja"}
    assert main(["init", "mine.yaml", "--task", task]) == 0
    first = Path("mine.yaml").read_text().splitlines()[0]
    assert json.loads(Path(first.removeprefix("# yaml-language-server: $schema=")).read_text())["properties"]
    config = load_config(
        Path("mine.yaml"),
        {
            "backend": "cpu",
            "train.epochs": None,
            "train.steps": 2,
            "train.global_batch_size": 4,
            "train.micro_batch_size": 2,
            "data.seq_len": 64,
            "data.cache_dir": str(tmp_path / "cache"),
            "log.every_steps": 1,
            "log.sample_tokens": 2,
            "log.trackers": [],
            **own,
        },
    )
    assert run_rank("cpu", config) == 0
    assert len([row for row in read_metrics(tmp_path / "runs" / "mine") if "loss" in row]) == 2
    name = "adapter_model.safetensors" if task in ("lora", "dpo") else "model.safetensors"
    assert (tmp_path / "runs" / "mine" / "final" / name).exists()
