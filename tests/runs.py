"""Tiny runs: a model of a few thousand parameters on a generated text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from portable.checks import check_config
from portable.config import RunConfig, load_config
from portable.reporting.metrics import read_metrics

TINY_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


SENTENCE = "the loss falls while a small model reads one line of text after another and learns"


def checked(*given: Any) -> RunConfig:
    """Load a config, and check it as a run does."""
    config = load_config(*given)
    check_config(config)
    return config


def write_corpus(folder: Path) -> Path:
    """Write 160 short texts of very different lengths, as ``.jsonl``."""
    words = SENTENCE.split()
    path = folder / "corpus.jsonl"
    with path.open("w") as file:
        for i in range(160):
            text = " ".join(words[(i * 7 + j * (i % 5 + 1)) % len(words)] for j in range(4 + (i * 13) % 40))
            file.write(json.dumps({"text": f"{i}: {text}."}) + "\n")
    return path


def write_conversations(folder: Path) -> Path:
    """Write 160 conversations of one to three answers, of very different lengths, as ``.jsonl``."""
    words = SENTENCE.split()
    path = folder / "conversations.jsonl"

    def said(i: int, count: int) -> str:
        return " ".join(words[(i * 5 + j) % len(words)] for j in range(count))

    with path.open("w") as file:
        for i in range(160):
            messages = [{"role": "system", "content": "Be brief."}] if i % 4 == 0 else []
            for turn in range(1 + i % 3):
                messages.append({"role": "user", "content": f"{said(i + turn, 1 + i % 5)}?"})
                messages.append({"role": "assistant", "content": f"{said(i * 3 + turn, 1 + (i * 7) % 9)}."})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def write_labelled(folder: Path, texts: int) -> Path:
    """Write short texts of two classes, of different lengths, with additional labels of other kinds."""
    words = SENTENCE.split()
    path = folder / "labeled.jsonl"
    lines = [
        {
            "text": " ".join(words[i % 2 : 2 + i % 11]),
            "label": ("no", "yes")[i % 2],
            "number": (3, 3.5)[i % 2],
            "numbers": [(0.5, 1.0)[i % 2], (1.0, 0.0)[i % 11 < 5], 0.25],
            "kinds": [*(["yes"] if i % 2 else []), *(["long"] if i % 11 > 5 else [])],
        }
        for i in range(texts)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write_pretrained(folder: Path, corpus: Path) -> Path:
    """Write a model in bf16 with a tokenizer. Its norms are in fp32, with values that bf16 does not have."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from portable.data.dataset import build_data

    torch.manual_seed(1)
    config = AutoConfig.for_model(**{**TINY_MODEL, "tie_word_embeddings": False, "num_hidden_layers": 3})
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    model.config.dtype = torch.bfloat16
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 1 + torch.rand(parameter.shape) / 3
    model.save_pretrained(folder)
    data = build_data(configured(folder, corpus).data, model_vocab_size=config.vocab_size)
    data.tokenizer.save_pretrained(folder)
    return folder


def tiny(folder: Path | str, corpus: Path, **overrides: Any) -> dict[str, Any]:
    """Return the settings of a tiny run in ``folder``, by dotted key.

    In ``overrides``, ``__`` means a dot.
    """
    settings: dict[str, Any] = {
        "backend": "cpu",
        "precision": "fp32",
        "output_dir": str(folder),
        "model.config": TINY_MODEL,
        "data.source": str(corpus),
        "data.cache_dir": str(corpus.parent / "cache"),
        "data.seq_len": 32,
        "data.eval_fraction": 0.1,
        "train.steps": 8,
        "train.warmup_steps": 0,
        "train.learning_rate": 3e-3,
        "train.global_batch_size": 6,
        "train.eval_every": None,
        "checkpoint.every_steps": 4,
        "log.every_steps": 1,
        "log.trackers": [],
        "log.sample_tokens": 4,
    }
    settings.update({key.replace("__", "."): value for key, value in overrides.items()})
    return settings


def configured(folder: Path | str, corpus: Path, **overrides: Any) -> RunConfig:
    return checked(None, tiny(folder, corpus, **overrides))


def leg(folder: Path | str, corpus: Path, settings: dict[str, Any]) -> int:
    """Start or continue a tiny run, as this rank of the engine that ``settings`` select."""
    from portable.run.rank import run_rank

    config = configured(folder, corpus, **settings)
    return run_rank(config.backend, config)


def losses(folder: Path) -> dict[int, float]:
    """Return the recorded loss of each step."""
    return {row["step"]: row["loss"] for row in read_metrics(folder) if "loss" in row}


def weights(folder: Path) -> bytes:
    """Return the bytes of the exported weights of a run."""
    return (folder / "final" / "model.safetensors").read_bytes()


def flags(settings: dict[str, Any]) -> list[str]:
    """Return the same settings as command-line flags."""
    return [
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()
    ]
