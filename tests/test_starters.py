"""Tests of ``portable-train init``: each starter trains, and a config for a device fits on it."""

from __future__ import annotations

import gzip
import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from portable.cli import main
from portable.commands import recipe
from portable.commands.init import read_starter_configs
from portable.commands.recipe import DatasetEstimate, RecipeSearch
from portable.config import RunConfig, load_config
from portable.config.sections import DataConfig
from portable.planner.cli import main as plan
from portable.planner.device_lookup import find_device, parse_devices
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.image_models import write_image_model, write_squares
from tests.runs import write_conversations, write_labelled, write_pretrained

TALK = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
WIDE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
"""Seven billion weights in few layers, which are quick to plan."""


def write_data(task: str, folder: Path, corpus: Path) -> dict[str, Any]:
    """Write a few hundred records for the starter of ``task``, and return the settings to use them."""
    if task in ("pretrain", "continued-pretraining"):
        return {"data.source": str(corpus)}
    if task == "classification":
        return {"data.source": str(write_labelled(folder, 200))}
    if task == "images":
        return {"data.source": str(write_squares(folder, 144))}
    (folder / "talk.jinja").write_text(TALK)
    if task != "dpo":
        return {"data.source": str(write_conversations(folder)), "data.chat_template": "talk.jinja"}
    answers = [[{"role": "assistant", "content": word}] for word in ("yes", "no")]
    pair = {"prompt": [{"role": "user", "content": "Is it?"}], "chosen": answers[0], "rejected": answers[1]}
    pairs = folder / "pairs.jsonl"
    pairs.write_text((json.dumps(pair) + "\n") * 200)
    return {"data.source": str(pairs), "data.chat_template": "talk.jinja"}


def check_final(task: str, final: Path, base: Path) -> None:
    """Load an exported model with transformers or peft, and let the model generate or classify text."""
    from peft import PeftModel
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    tokens = AutoTokenizer.from_pretrained(final)("A word", return_tensors="pt")
    if task == "classification":
        logits = AutoModelForSequenceClassification.from_pretrained(final)(**tokens).logits
        assert logits.shape == (1, 2)
        return
    if task in ("lora", "qlora", "dpo", "images"):
        auto = AutoModelForImageTextToText if task == "images" else AutoModelForCausalLM
        model: Any = PeftModel.from_pretrained(auto.from_pretrained(base), str(final))
    else:
        model = AutoModelForCausalLM.from_pretrained(final)
    assert (
        model.generate(**tokens, max_new_tokens=3, min_new_tokens=3).shape[1] == tokens.input_ids.shape[1] + 3
    )


@pytest.mark.parametrize("task", ["chat", "lora"])
def test_starter_trains_few_hundred_chats(
    task: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The overrides are the settings that a user has to change, and a shorter sequence length."""
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


@pytest.mark.parametrize("task", read_starter_configs())
def test_starter_trains_on_small_data_and_its_model_loads(
    task: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if task == "qlora":
        pytest.importorskip("bitsandbytes")
    if task == "images":
        pytest.importorskip("torchvision")
        base = write_image_model(tmp_path / "base", "smolvlm")
    else:
        base = write_pretrained(tmp_path / "base", corpus)
    flags = [] if task == "pretrain" else ["--model", str(base)]  # the model of the starter is small
    assert main(["init", "mine.yaml", "--task", task, *flags]) == 0
    first = Path("mine.yaml").read_text().splitlines()[0]
    assert json.loads(Path(first.removeprefix("# yaml-language-server: $schema=")).read_text())["properties"]
    # Shorter sequences, a larger rate for a random model, and no search for a micro-batch save time.
    overrides: dict[str, Any] = {
        "backend": "cpu",
        "train.micro_batch_size": 8,
        "train.learning_rate": 1e-2,
        "data.seq_len": 128 if task == "images" else 64,
        "data.cache_dir": str(tmp_path / "cache"),
        "log.every_steps": 1,
        "log.sample_tokens": 2,
        "log.trackers": [],
    }
    if task == "pretrain":
        overrides["train.steps"] = 30
    config = load_config(Path("mine.yaml"), overrides | write_data(task, tmp_path, corpus))
    assert run_rank("cpu", config) == 0
    run = tmp_path / "runs" / "mine"
    losses = [row["loss"] for row in read_metrics(run) if "loss" in row]
    assert len(losses) >= 20
    assert sum(losses[-5:]) < sum(losses[:5])
    check_final(task, run / "final", base)


@pytest.mark.parametrize("task", read_starter_configs())
def test_starter_comments_recommend_working_commands(
    task: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dry run replaces the training command, which another test runs."""
    monkeypatch.chdir(tmp_path)
    if task == "qlora":
        pytest.importorskip("bitsandbytes")
    if task == "images":
        pytest.importorskip("torchvision")
        base = write_image_model(tmp_path / "base", "smolvlm")
    else:
        base = write_pretrained(tmp_path / "base", corpus)
    flags = [] if task == "pretrain" else ["--model", str(base)]
    assert main(["init", "mine.yaml", "--task", task, *flags]) == 0
    comments = "\n".join(line.partition("#")[2] for line in Path("mine.yaml").read_text().splitlines())
    commands = re.findall(r"(portable-train|portable-plan)((?: (?:--)?[\w-]+(?:\.\w+)*)+)", comments)
    commands += [("portable-train", words) for words in re.findall(r"[:,] (--help \w+)", comments)]
    assert ("portable-train", " --config mine.yaml") in commands
    settings = write_data(task, tmp_path, corpus)
    length = 128 if task == "images" else 64
    settings |= {"backend": "cpu", "data.seq_len": length, "train.micro_batch_size": 2}
    overrides = [f"--{key}={value}" for key, value in settings.items()]
    for program, words in commands:
        arguments = words.split()
        if "--config" in arguments:
            arguments += overrides
        if words == " --config mine.yaml" and program == "portable-train":
            arguments.append("--dry-run")
        try:
            code: object = (main if program == "portable-train" else plan)(arguments)
        except SystemExit as finished:  # after --help
            code = finished.code
        assert code == 0, words
    for page in re.findall(r"docs/\S+?\.md", comments):
        assert (Path(__file__).parents[1] / page).is_file()


def write_wide(folder: Path, corpus: Path) -> str:
    """Write a tokenizer and the config of a model without its weights. Plans need no weights."""
    write_pretrained(folder, corpus)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(WIDE))
    return str(folder)


@pytest.mark.parametrize(
    ("task", "device", "base"),
    [
        ("lora", "RTX 4090", "auto"),
        ("lora", "t4", "nf4"),
        ("qlora", "4090", "nf4"),
        ("chat", "NVIDIA A100-SXM4-80GB:8", "auto"),
        ("chat", "a100-80", "auto"),
        ("pretrain", "v5p:4", "auto"),
    ],
)
def test_init_for_device_matches_planner(
    task: str,
    device: str,
    base: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if base == "nf4":
        pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    model = write_wide(tmp_path / "wide", corpus)
    assert main(["init", "--task", task, "--model", model, "--device", device]) == 0
    sized = re.search(r"sized for (\d+) x (\S+): about (\S+ \S+) of", capsys.readouterr().out)
    assert sized is not None
    text, config = Path("run.yaml").read_text(), load_config(Path("run.yaml"))
    assert config.model.name_or_path == model
    assert config.adapter.base == base
    assert ("With a 16-bit base" in text) == ((task, base) == ("lora", "nf4"))
    rounds = (task, device) == ("chat", "a100-80")
    assert ("train.master_dtype bf16 changes the result" in text) == ("With fp32 weights" in text) == rounds
    assert config.train.master_dtype == ("bf16" if rounds else "fp32")
    target = ["--device", sized[2], "--devices", sized[1]]
    assert plan(["--config", "run.yaml", *target, "--data.source", "org/texts", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    settings = config.strategy, config.train.micro_batch_size, config.memory.activation_checkpointing
    assert settings == (best["strategy"], best["micro_batch_size"], best["activation_checkpointing"])
    assert sized[3].split()[0] == f"{best['device_bytes']['total'] / 2**30:.1f}"
    assert f"about {sized[3]} of" in text
    assert config.data.seq_len == 4096


@pytest.mark.parametrize(
    ("count", "tokens_each", "expected"),
    [
        (200, 60, (False, 256, 16)),  # if packed, an epoch would have only three sequences
        (400, 400, ("documents", 4096, 2)),
        (6000, 200, ("documents", 4096, 1)),
        (6000, 3000, ("documents", 4096, 12)),
        (None, 0, (False, 4096, 16)),
    ],
)
def test_recipe_search_batch_depends_on_conversations(
    count: int | None, tokens_each: int, expected: tuple[object, int, int], tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(WIDE | {"num_hidden_layers": 1}))
    file = tmp_path / "run.yaml"
    assert main(["init", str(file), "--task", "lora", "--model", str(folder)]) == 0
    records = None if count is None else DatasetEstimate(count, count * tokens_each, 3 * tokens_each)
    best = RecipeSearch(load_config(file), records).build_candidates(find_device("4090"), 1)[0]
    batch = best.get("data.packing", False), best["data.seq_len"], best["train.global_batch_size"]
    assert batch == expected
    shared = RecipeSearch(load_config(file), records).build_candidates(find_device("h100"), 8)[0]
    assert shared["train.global_batch_size"] % 8 == 0


@pytest.mark.parametrize(
    ("name", "max_samples", "expected"),
    [
        ("texts.jsonl", None, 6_000),
        ("texts.jsonl", 5_500, 5_500),
        ("texts.jsonl.gz", None, 6_000),
        ("texts.parquet", None, 6_000),
    ],
)
@pytest.mark.parametrize("large", [False, True])
def test_dataset_estimate_includes_records_that_are_not_read(
    large: bool,
    name: str,
    max_samples: int | None,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The size of a compressed file does not indicate the length of its text."""
    monkeypatch.setattr(recipe, "_LARGE_SOURCE_BYTES", 0 if large else 1 << 30)
    rows = [{"text": f"text {number:5} " * 20} for number in range(6_000)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if name.endswith(".parquet"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
    elif name.endswith(".gz"):
        (tmp_path / name).write_bytes(gzip.compress(lines.encode()))
    else:
        (tmp_path / name).write_text(lines)
    config = RunConfig(data=DataConfig(source=str(tmp_path / name), max_samples=max_samples))
    estimate = recipe.estimate_dataset_size(config)
    assert estimate.is_measured
    assert estimate.num_records == pytest.approx(expected, rel=0.1 if large else 0)
    assert estimate.num_tokens == pytest.approx(expected * 55, rel=0.1 if large else 0)


def test_dataset_estimate_assumes_size_of_token_files(tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").write_bytes(bytes(64))
    config = RunConfig(data=DataConfig(source=str(tmp_path / "tokens.bin")))
    assert not recipe.estimate_dataset_size(config).is_measured


@pytest.mark.parametrize(
    ("text", "device", "count"),
    [
        ("rtx4090", "4090", 1),
        ("NVIDIA GeForce RTX 4090", "4090", 1),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", 1),
        ("NVIDIA H100 80GB HBM3:8", "h100", 8),
        ("NVIDIA H100 PCIe", "h100-pcie", 1),
        ("Tesla V100-SXM2-32GB", "v100-32", 1),
        ("tpu-v5e:8", "v5e", 8),
        ("v5litepod:4", "v5e", 4),
        ("cpu", "cpu", 1),
    ],
)
def test_parse_devices_accepts_names_of_users_and_drivers(text: str, device: str, count: int) -> None:
    parsed, devices = parse_devices(text)
    assert (parsed.name, devices) == (device, count)


def test_init_error_suggests_changes_that_fit(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"--task": "chat", "--model": write_wide(tmp_path / "wide", corpus), "--device": "a100-40"}
    capsys.readouterr()
    assert main(["init", *chain(*flags.items())]) == 2
    line = capsys.readouterr().err
    assert len(line.splitlines()) == 1
    assert not Path("run.yaml").exists()
    remedies = re.findall(r"--\w+ [\w:-]+", line.partition("; use ")[2])
    assert [remedy.split()[0] for remedy in remedies] == ["--task", "--device", "--device"]
    for number, remedy in enumerate(remedies):
        flag, value = remedy.split()
        assert main(["init", f"{number}.yaml", *chain(*(flags | {flag: value}).items())]) == 0


@pytest.mark.parametrize("task", ["dpo", "classification"])
def test_init_for_device_adds_keys_to_starter(
    task: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = write_pretrained(tmp_path / "base", corpus)
    settings = write_data(task, tmp_path, corpus)
    data = settings.pop("data.source")
    assert (
        main(["init", "mine.yaml", "--task", task, "--model", str(base), "--data", data, "--device", "t4"])
        == 0
    )
    flags = [f"--{key}={value}" for key, value in settings.items()]
    assert main(["--config", "mine.yaml", "--backend", "cpu", "--dry-run", *flags]) == 0


@pytest.mark.parametrize("name", ["1e5", "a: b", "it's #1", "yes", "{name}"])
def test_init_writes_names_as_text(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", f"{name}.yaml", "--task", "chat", "--model", name, "--data", name]) == 0
    config = load_config(Path(f"{name}.yaml"))
    assert (config.model.name_or_path, config.data.source) == (name, name)
    assert config.output_dir == f"runs/{name}"


def test_init_rejects_names_with_line_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["a\nb.yaml"], ["a.yaml", "--model", "a\u2028b"], ["a.yaml", "--data", ""]):
        assert main(["init", *words]) == 2
        assert "contains a line break" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
