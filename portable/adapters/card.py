"""The model card of an adapter: what it belongs to, what it was trained on, and how."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.adapters.settings import KINDS
from portable.config.keys import plain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portable.adapters.adapter import Adapter
    from portable.config import RunConfig

CARD = "README.md"
_ROWS = 10
_SETTINGS = (
    "seed",
    "precision",
    "data.seq_len",
    "data.packing",
    "train.global_batch_size",
    "train.optimizer",
    "train.learning_rate",
    "train.schedule",
    "train.steps",
    "train.epochs",
    "train.weight_decay",
)
_AUTO = {
    "causal-lm": ("AutoModelForCausalLM", "text-generation"),
    "seq2seq-lm": ("AutoModelForSeq2SeqLM", "text2text-generation"),
    "sequence-classification": ("AutoModelForSequenceClassification", "text-classification"),
    "masked-lm": ("AutoModelForMaskedLM", "fill-mask"),
}


def model_card(config: RunConfig, adapter: Adapter, data: str, metrics: Sequence[Mapping[str, Any]]) -> str:
    """The text of the card.

    Args:
        config: of the run.
        adapter: of the run.
        data: the data in words.
        metrics: the rows of ``metrics.jsonl``.
    """
    name = config.model.name_or_path
    loader, pipeline = _AUTO[config.model.task]
    kind = str(config.adapter.type)
    merged = config.checkpoint.export == "merged"
    head = ["library_name: peft" if not merged else "library_name: transformers", f"pipeline_tag: {pipeline}"]
    if name is not None and not Path(name).exists():  # the hub knows no local folders
        head.append(f"base_model: {name}")
    base = "a model with random weights" if config.model.from_scratch else f"`{name}`"
    settings = [(f"adapter.{key}", getattr(config.adapter, key)) for key in KINDS[kind]]
    settings += [(key, config.get(key)) for key in _SETTINGS]
    rows = [
        f"| `{key}` | {_shown(value)} |"
        for key, value in settings
        if value is not None and value is not False
    ]
    digest = adapter.identity["base"]
    what = "with an adapter merged into it" if merged else "an adapter for it"
    return "\n".join(
        [
            "---",
            *head,
            "tags:",
            f"- {kind}",
            "---",
            "",
            f"# {Path(config.output_dir).name}",
            "",
            f"Base model: {base}, {what}." + (f" Fingerprint of its weights: `{digest}`." if digest else ""),
            "",
            f"Trained on: {data}.",
            "",
            *_usage(loader, name, merged=merged),
            "## Settings",
            "",
            "| setting | value |",
            "|---|---|",
            *rows,
            "",
            "## Curves",
            "",
            *_curve(metrics, "loss"),
            *_curve(metrics, "eval_loss"),
        ]
    )


def _usage(loader: str, name: str | None, *, merged: bool) -> list[str]:
    if name is None or merged:
        return []
    return [
        "```python",
        "from peft import PeftModel",
        f"from transformers import {loader}",
        "",
        f'model = PeftModel.from_pretrained({loader}.from_pretrained("{name}"), "path/of/this/folder")',
        "```",
        "",
    ]


def _curve(metrics: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """Up to ten points of one curve, as a table."""
    points = [(row["step"], row[key]) for row in metrics if isinstance(row.get(key), int | float)]
    if not points:
        return []
    stride = -(-len(points) // _ROWS)
    chosen = [*points[:-1:stride], points[-1]]
    return [f"| step | {key} |", "|---|---|", *(f"| {step} | {value:.4f} |" for step, value in chosen), ""]


def _shown(value: Any) -> str:
    value = plain(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
