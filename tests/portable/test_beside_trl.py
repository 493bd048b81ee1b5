"""Conversations beside TRL's SFTTrainer: the same tokens and labels, and the same losses, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import transformers
from datasets import Dataset

from portable.data.samples.base import IGNORED
from portable.data.samples.order import locate
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.parity import opened
from tests.portable.chat_support import TALK, template, tokenizer
from tests.portable.data_support import write_jsonl
from tests.portable.test_beside_trainer import Ordered, arguments, page_settings
from tests.portable.test_chat_masks import MARKED, encode, talks
from tests.runs import TINY_MODEL, configured

if TYPE_CHECKING:
    from pathlib import Path

    from portable.config import RunConfig

trl: Any = pytest.importorskip("trl")


def trainer(name: str, rows: list[dict[str, Any]], folder: Path, **options: Any) -> Any:
    """An SFTTrainer, which has prepared ``rows``."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TINY_MODEL))
    settings = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "bf16": False}
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(output_dir=str(folder), **settings, **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(name),
    )


@pytest.mark.parametrize("name", MARKED)
def test_labels_of_answers(name: str, tmp_path: Path) -> None:
    """TRL finds its template with marks by the model's own; here it is given as a file."""
    conversations = list(talks(name).values())
    theirs = trainer(
        name,
        [{"messages": messages} for messages in conversations],
        tmp_path,
        assistant_only_loss=True,
        max_length=None,
    ).train_dataset
    for row, messages in zip(theirs, conversations, strict=True):
        encoded = encode(name, template(f"{name}_training"), {"messages": messages})
        assert encoded.tokens[0].tolist() == row["input_ids"]
        labels = [
            token if trained else IGNORED
            for token, trained in zip(encoded.tokens[0].tolist(), encoded.trained[0], strict=True)
        ]
        assert labels == row["labels"]


def test_labels_of_completions(tmp_path: Path) -> None:
    """Of every family at once would take a trainer each; the rule does not look at the template."""
    for name in ("mistral", "smollm2", "chatml", "deepseekv3", "qwen3"):
        row = {"prompt": TALK[:3], "completion": TALK[3:4]}
        (theirs,) = trainer(name, [row], tmp_path, max_length=None).train_dataset
        encoded = encode(name, tokenizer(name).chat_template, row, "prompt_completion")
        assert encoded.tokens[0].tolist() == theirs["input_ids"]
        assert [label != IGNORED for label in theirs["labels"]] == encoded.trained[0].tolist()


def answers(count: int) -> list[dict[str, Any]]:
    """Conversations of different lengths, some longer than a sample."""
    rows = []
    for number in range(count):
        messages = []
        for turn in range(number % 3 + 1):
            messages += [
                {"role": "user", "content": f"what is {number} and {turn}?"},
                {"role": "assistant", "content": f"{number + turn} " + "and more " * (number % 7)},
            ]
        rows.append({"messages": messages})
    return rows


class OrderedSFT(Ordered, trl.SFTTrainer):  # type: ignore[misc]
    """TRL's trainer with a given order of samples."""


def beside_trl(config: RunConfig, rows: list[dict[str, Any]], folder: Path, accumulation: int) -> list[float]:
    """TRL's loss of each step: it reads the records, renders, masks, truncates, pads and trains."""
    with opened(config) as trial:
        data, batch = trial.run.data, config.train.global_batch_size
        model = transformers.AutoModelForCausalLM.from_config(trial.run.model_config)
        model.load_state_dict(trial.engine.model.state_dict())
        places = [locate(at, len(data.train), config.seed) for at in range(trial.run.steps * batch)]
        order = [data.train.documents(index)[0] for _, index in places]
        options = {
            "assistant_only_loss": True,
            "max_length": config.data.seq_len + 1,
            "bf16": False,
            "gradient_checkpointing": False,
            "shuffle_dataset": False,
        }
        trained = OrderedSFT(
            orders=[order],
            model=model,
            args=arguments(config, folder, accumulation, trl.SFTConfig, **options),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer("llama3"),
        )
    assert len(trained.train_dataset) == len(rows)
    trained.train()
    parts = trained.step_losses
    return [sum(parts[at : at + accumulation]) for at in range(0, len(parts), accumulation)]


def test_the_losses_are_trls(tmp_path: Path) -> None:
    rows = answers(80)
    source = write_jsonl(tmp_path / "chat.jsonl", rows)
    tokenizer("llama3").save_pretrained(tmp_path / "tokenizer")
    sizes = {"train__global_batch_size": 6, "train__micro_batch_size": 3, "train__steps": 10}
    settings: dict[str, Any] = {**page_settings(), "train__learning_rate": 3e-3, **sizes}
    config = configured(
        tmp_path / "ours",
        source,
        **settings,
        model__config={**TINY_MODEL, "num_hidden_layers": 1, "vocab_size": 512},
        data__tokenizer=str(tmp_path / "tokenizer"),
        data__packing=False,
        data__seq_len=60,
        checkpoint__export=False,
    )
    theirs = beside_trl(config, rows, tmp_path / "theirs", 2)
    assert run_rank("cpu", config) == 0
    losses = [row["loss"] for row in read_metrics(tmp_path / "ours") if "loss" in row]
    assert losses == pytest.approx(theirs, rel=1e-5)
    assert len(losses) == 10
    assert losses[-1] != pytest.approx(losses[0], rel=1e-2)
