"""Comparison with TRL's SFTTrainer on conversations: same tokens and labels, same losses at every step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from datasets import Dataset

from portable.batch import IGNORED_LABEL
from portable.commands.importing import print_imported_config
from portable.config import load_config
from portable.data.samples.order import locate_sample
from portable.data.tokens.chat_template import ConversationEncoder
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.parity import opened
from tests.portable.chat_support import NO_FRAME, TALK, record, tokenizer
from tests.portable.data_support import write_jsonl
from tests.portable.test_chat_masks import THOUGHTS, encode
from tests.portable.test_trainer_parity import Ordered
from tests.runs import TINY_MODEL

trl: Any = pytest.importorskip("trl")


def trainer(name: str, rows: list[dict[str, Any]], folder: Path, **options: Any) -> Any:
    """Build an SFTTrainer that has prepared ``rows``."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**TINY_MODEL))
    settings = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "bf16": False}
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(output_dir=str(folder), **settings, **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(name),
    )


@pytest.mark.parametrize(
    ("name", "rewrites"),
    [
        ("gemma4_v5", False),
        ("glm4moe", False),
        ("nemotron_3_nano", False),
        ("qwen3", True),
        ("qwen3_5_think", True),
        ("qwen3_6", True),
    ],
)
def test_conversations_of_rewriting_templates_match_trl(name: str, rewrites: bool) -> None:
    """Each answer is encoded as a completion of the earlier messages, which TRL trains the same way."""
    text = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text("utf-8")
    found = tokenizer("qwen3")
    for messages in (TALK, THOUGHTS) if rewrites else (THOUGHTS,):
        document = record({"messages": messages})
        encoded = ConversationEncoder(found, text, NO_FRAME).encode_documents([document])
        assert encoded.samples_per_document == [3] and encoded.counts["lost"] == 0
        for at, (tokens, trained) in enumerate(zip(encoded.tokens, encoded.trained_masks, strict=True)):
            prompt, whole = (
                found.apply_chat_template(
                    messages[: 2 * at + more],
                    chat_template=text,
                    return_dict=False,
                    add_generation_prompt=asked,
                )
                for more, asked in ((1, True), (2, False))
            )
            begin = trl.data_utils.common_prefix_length(prompt, whole)
            assert tokens.tolist() == whole
            assert trained.nonzero()[0].tolist() == list(range(begin, len(whole)))


def test_completion_labels_match_trl(tmp_path: Path) -> None:
    """A few families suffice, because each needs a trainer and the rule does not depend on the template."""
    for name in ("mistral", "chatml", "deepseekv3", "qwen3"):
        row = {"prompt": TALK[:3], "completion": TALK[3:4]}
        (theirs,) = trainer(name, [row], tmp_path, max_length=None).train_dataset
        encoded = encode(name, tokenizer(name).chat_template, row, "prompt_completion")
        assert encoded.tokens[0].tolist() == theirs["input_ids"]
        assert [label != IGNORED_LABEL for label in theirs["labels"]] == encoded.trained_masks[0].tolist()


def answers(count: int) -> list[dict[str, Any]]:
    """Return conversations of different lengths, some longer than a sample."""
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


RUNS = yaml.safe_load(Path(__file__).with_name("imports").joinpath("trl_runs.yaml").read_text("utf-8"))


@pytest.mark.parametrize("more", RUNS["more"], ids=str)
def test_imported_trl_file_trains_like_trl(
    more: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    brief_runs: None,
) -> None:
    """TRL reads the records, renders, masks, truncates, pads and trains."""
    monkeypatch.chdir(tmp_path)
    rows = answers(24)
    write_jsonl(tmp_path / "chat.jsonl", rows)
    config = transformers.LlamaConfig(**{**TINY_MODEL, "vocab_size": 512, "max_position_embeddings": 256})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("base")
    tokenizer("llama3").save_pretrained("base")
    given = {**RUNS["common"], **more}
    Path("theirs.yaml").write_text(json.dumps(given))
    capsys.readouterr()
    assert print_imported_config(["theirs.yaml"]) == 0
    Path("run.yaml").write_text(capsys.readouterr().out)
    always = {"backend": "cpu", "precision": "fp32", "log.every_steps": 1, "log.sample_tokens": 0}
    always["data.seq_len"] = given["max_length"] - 1  # TRL's last token of a text that is cut has no label
    run = load_config("run.yaml", {**always, "data.cache_dir": "cache", "checkpoint.export": False})
    with opened(run) as trial:
        count = trial.run.steps * run.train.global_batch_size
        places = [locate_sample(at, len(trial.run.data.train), run.seed) for at in range(count)]
        order = [trial.run.data.train.list_document_numbers(index)[0] for _, index in places]
    settings = {
        key: value for key, value in given.items() if key not in ("model_name_or_path", "dataset_name")
    }
    settings |= {"bf16": False, "disable_tqdm": True, "save_strategy": "no", "shuffle_dataset": False}
    settings.setdefault("gradient_checkpointing", False)
    theirs = OrderedSFT(
        orders=[order],
        model=transformers.AutoModelForCausalLM.from_pretrained("base"),
        args=trl.SFTConfig(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer("llama3"),
    )
    theirs.train()
    steps, parts = given.get("gradient_accumulation_steps", 1), theirs.step_losses
    expected = [sum(parts[at : at + steps]) for at in range(0, len(parts), steps)]
    assert run_rank("cpu", run) == 0
    ours = [row["loss"] for row in read_metrics(tmp_path / "out") if "loss" in row]
    assert len(ours) >= 2
    assert ours == pytest.approx(expected[: len(ours)], rel=1e-5)
