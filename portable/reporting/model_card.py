"""The model card of an export: what it was made from, on which data, how, and how the losses went."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from portable import plugins
from portable.adapters.settings import KINDS
from portable.config import keys
from portable.config.sources import get_training_sources
from portable.config.yaml_writer import as_yaml
from portable.converters.errors import redact_credentials
from portable.converters.storage.path_or_url import is_url
from portable.converters.writers.gguf_models import MODELS
from portable.private.transformers_internals import find_causal_lm_class, list_model_types
from portable.reporting.metrics import is_evaluation

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
    "train.loss",
    "train.optimizer",
    "train.learning_rate",
    "train.schedule",
    "train.steps",
    "train.epochs",
    "train.weight_decay",
)
_HERE = "path/of/this/folder"
_OF_THE_MACHINE = ("output_dir", "log.", "hub.", "checkpoint.", "data.cache_dir", "memory.nvme_path")
_FOLDER = re.compile(r"(?<![\w.:/~])/(?:[^\s/;,:]+/)+")


def build_model_card(
    config: RunConfig,
    *,
    adapter: Adapter | None,
    architecture: str,
    model_type: str,
    data: str,
    metrics: Sequence[Mapping[str, Any]],
    copied: Sequence[str] = (),
    missing: Sequence[str] = (),
    chat: bool = False,
) -> str:
    """The text of the card.

    It has no samples of the data, and of local files the names alone: exports are made to be shared.

    Args:
        config: of the run.
        adapter: of the run, if there is one.
        architecture: the model's class.
        model_type: transformers' name of its kind.
        data: the data in words.
        metrics: the rows of ``metrics.jsonl`` up to the exported checkpoint.
        copied: Names of tensors that were copied from the base model without training.
        missing: Names of the base model's tensors that the export lacks.
        chat: Whether the model was trained on conversations, so that it is asked with messages.
    """
    name = config.model.name_or_path
    local = name is not None and (Path(name).exists() or Path(name).is_absolute())
    base = Path(name).name if name is not None and local else name
    loader, pipeline = AUTO[config.model.task]
    if config.model.task == "causal-lm" and architecture.endswith("ForConditionalGeneration"):
        loader = architecture  # AutoModelForCausalLM maps this type to another class or to none
    kind = None if adapter is None else str(config.adapter.type)
    alone, rows = is_adapter(config), None if adapter is None else adapter.rows
    on_hub = None if local or config.model.from_scratch else name
    settings = (
        [] if kind is None else [(f"adapter.{key}", getattr(config.adapter, key)) for key in KINDS[kind]]
    )
    settings += [(key, config.get(key)) for key in _SETTINGS]
    location = config.hub.repo or _HERE
    commands = list_commands(
        config, location, model_type, architecture, base=base, adapter=adapter, chat=chat
    )
    shown = [
        f"| `{key}` | {_format_value(value)} |"
        for key, value in settings
        if value is not None and value is not False
    ]
    text = "\n".join(
        [
            "---",
            _format_head(config, on_hub, pipeline, kind, alone=alone),
            "---",
            "",
            f"# {Path(config.output_dir).name}",
            "",
            _describe_origin(config, adapter, architecture, alone=alone),
            "",
            f"Trained on: {_FOLDER.sub('', data)}.",
            "",
            *_describe_untrained(copied, missing),
            *_format_usage(loader, name, rows, alone=alone),
            "```sh",
            *(f"{use}    # {purpose}" for purpose, use in commands),
            "```",
            "",
            "## Settings",
            "",
            "| setting | value |",
            "|---|---|",
            *shown,
            "",
            "## Curves",
            "",
            *_format_curve(metrics, "loss"),
            *_format_curve(metrics, "eval_loss"),
            *_format_evaluation(metrics),
            "## Command",
            "",
            "`portable-train --config run.yaml`, with this file:",
            "",
            "```yaml",
            _format_set_settings(config).rstrip("\n"),
            "```",
            "",
        ]
    )
    return redact_credentials(text)


def _format_head(
    config: RunConfig, on_hub: str | None, pipeline: str, kind: str | None, *, alone: bool
) -> str:
    from huggingface_hub import ModelCardData

    return ModelCardData(
        base_model=on_hub,
        base_model_relation=None if on_hub is None else ("adapter" if alone else "finetune"),
        datasets=_list_datasets(config) or None,
        library_name="peft" if alone else "transformers",
        pipeline_tag=pipeline,
        tags=["portable-trainer", *([] if kind is None else [kind])],
    ).to_yaml()


def _describe_origin(config: RunConfig, adapter: Adapter | None, architecture: str, *, alone: bool) -> str:
    base = "a model with random weights" if config.model.from_scratch else f"`{config.model.name_or_path}`"
    if adapter is None:
        return f"Architecture: {architecture}. Trained from {base}."
    relation = "an adapter for it" if alone else "with an adapter merged into it"
    digest = adapter.identity["base"]
    return f"Base model: {base}, {relation}." + (
        f" Fingerprint of its weights: `{digest}`." if digest else ""
    )


def _describe_untrained(copied: Sequence[str], missing: Sequence[str]) -> list[str]:
    """Describe the base model's tensors that transformers does not load, as lines of Markdown."""
    lines = []
    if copied:
        names = ", ".join(f"`{name}`" for name in copied)
        lines += [f"These tensors were copied from the base model without training: {names}.", ""]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        lines += [f"These tensors of the base model are missing: {names}.", ""]
    return lines


def _format_usage(loader: str, name: str | None, rows: int | None, *, alone: bool) -> list[str]:
    if not alone or name is None:
        return []
    grown = [] if rows is None else [f"base.resize_token_embeddings({rows})"]
    return [
        "```python",
        "from peft import PeftModel",
        f"from transformers import {loader}",
        "",
        f"base = {loader}.from_pretrained({json.dumps(name)})",
        *grown,
        f'model = PeftModel.from_pretrained(base, "{_HERE}")',
        "```",
        "",
    ]


def _list_datasets(config: RunConfig) -> list[str]:
    """The data sets of the hub that are trained on."""
    sources = [settings.source for settings in get_training_sources(config.data).values()]
    names = [
        source[0] if isinstance(source, list | tuple) and len(source) == 1 else source for source in sources
    ]
    return [
        name
        for name in names
        if isinstance(name, str)
        and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
        and not plugins.names_code(name)
        and not Path(name).exists()
    ]


def _format_curve(metrics: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """Up to ten points of one curve, as a table."""
    points = [(row["step"], row[key]) for row in metrics if isinstance(row.get(key), int | float)]
    if not points:
        return []
    stride = -(-len(points) // _ROWS)
    chosen = [*points[:-1:stride], points[-1]]
    return [f"| step | {key} |", "|---|---|", *(f"| {step} | {value:.4f} |" for step, value in chosen), ""]


def _format_evaluation(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """The last evaluation, as a table."""
    rows = [row for row in metrics if any(map(is_evaluation, row))]
    values = {
        n: v for row in rows[-1:] for n, v in row.items() if is_evaluation(n) and isinstance(v, int | float)
    }
    if len(values) < 2:  # the curve shows it
        return []
    return [
        "| last evaluation | value |",
        "|---|---|",
        *(f"| {n} | {v:.4f} |" for n, v in values.items()),
        "",
    ]


def _format_set_settings(config: RunConfig) -> str:
    """The settings that the user gave, as YAML, without what only the user's machine has."""
    settings = {
        key: _strip_folders(value)
        for key, value in config.given().items()
        if not key.startswith(_OF_THE_MACHINE)
    }
    return as_yaml(keys.to_plain(keys.nest_keys(settings)))


def _strip_folders(value: Any) -> Any:
    """``value`` with the last part of each absolute path in its place."""
    if isinstance(value, str):
        return Path(value).name if value.startswith("/") else value
    if isinstance(value, list | tuple):
        return [_strip_folders(item) for item in value]
    return {k: _strip_folders(v) for k, v in value.items()} if isinstance(value, dict) else value


def _format_value(value: Any) -> str:
    """Format a value for the table of settings, without characters that end a cell."""
    value = keys.to_plain(value)
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


class AutoClass(NamedTuple):
    """How transformers opens the models of a task.

    Attributes:
        name: Name of the auto class.
        pipeline: The hub's name of the task, and the name of its pipeline.
    """

    name: str
    pipeline: str


AUTO = {
    "causal-lm": AutoClass("AutoModelForCausalLM", "text-generation"),
    "seq2seq-lm": AutoClass("AutoModelForSeq2SeqLM", "text2text-generation"),
    "sequence-classification": AutoClass("AutoModelForSequenceClassification", "text-classification"),
    "masked-lm": AutoClass("AutoModelForMaskedLM", "fill-mask"),
}
"""The class of transformers that opens the model of a task, and the hub's name of its pipeline."""
ASKED = {
    "causal-lm": "'Once upon a time'",
    "sequence-classification": "'Once upon a time'",
    "masked-lm": "'Once upon a ' + p.tokenizer.mask_token",
}
"""What to ask the pipelines that transformers has."""
_CHAT_PROMPT = "[{'role': 'user', 'content': 'Write a short story.'}]"
"""What to ask a model that was trained on conversations, in the form of transformers' pipelines."""
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""What ``vllm serve --max-lora-rank`` takes."""


def is_adapter(config: RunConfig) -> bool:
    """Whether the run's export is an adapter alone."""
    return config.adapter.type is not None and config.checkpoint.export not in ("merged", "like_base")


class UsageCommand(NamedTuple):
    """A program or purpose, such as `vLLM`, and the shell command for an exported model."""

    purpose: str
    command: str


def list_commands(
    config: RunConfig,
    location: str,
    model_type: str,
    architecture: str,
    *,
    base: str | None = None,
    adapter: Adapter | None = None,
    chat: bool = False,
) -> list[UsageCommand]:
    """List what can be done with an exported model, with the command for each.

    Programs that cannot open the model are left out.

    Args:
        config: Config of the run.
        location: The export, as a path, a URL or a name on the hub.
        model_type: Model type in its ``config.json``.
        architecture: Class of the model.
        base: Text for the base model in the commands. None for its path or name.
        adapter: Adapter of the run.
        chat: Whether the model was trained on conversations, so that it is asked with messages.

    Returns:
        The commands, in the order in which they are shown.
    """
    task, name = config.model.task, str(config.model.name_or_path)
    quoted_base = shlex.quote(base or name)
    folder = quoted_base if Path(name).is_dir() else f'"$(hf download {quoted_base})"'
    merge = f" --merge-into {folder}" if is_adapter(config) else ""
    run = re.sub("[^A-Za-z0-9_.-]", "-", Path(config.output_dir).name).lstrip("-") or "run"
    local = f"{run}-{'merged' if merge else 'model'}"
    gguf = (
        f"portable-convert {shlex.quote(location)} {local}.gguf --to gguf{merge} && llama-cli -m {local}.gguf"
    )
    grown = adapter is not None and adapter.rows is not None  # vLLM and lm_eval do not resize embeddings
    peft = merge and config.adapter.type == "lora" and not (grown or is_url(location))
    peft = peft and not (config.adapter.use_dora or config.adapter.modules_to_save)
    commands: list[UsageCommand] = []
    model, loaded = shlex.quote(location), location  # as a word of the shell, and as it is
    if (merge and not peft) or is_url(location):
        purpose = "merge" if merge else "fetch"
        commands.append(UsageCommand(purpose, f"portable-convert {model} {local}{merge}"))
        model = loaded = local
    loader, kind = AUTO[task]
    custom = model_type not in list_model_types()
    trust = custom and config.model.trust_remote_code
    option = ", trust_remote_code=True" if trust else ""
    opens = task in ASKED
    if task == "causal-lm" and not custom and find_causal_lm_class(model_type) != architecture:
        opens, loader = False, architecture  # a composite model, which the pipeline does not open
    if opens:
        prompt = _CHAT_PROMPT if chat and task == "causal-lm" else ASKED[task]
        constructor = f"pipeline('{kind}', {loaded!r}{option})"
        code = f"from transformers import pipeline; p = {constructor}; print(p({prompt}, max_new_tokens=40))"
    else:
        code = f"from transformers import {loader} as M; print(M.from_pretrained({loaded!r}{option}))"
    registered = custom and not trust
    if registered:  # importing its module registers the type
        module = str(config.model.function or "").partition(":")[0]
        if not all(map(str.isidentifier, module.split("."))):
            return commands
        code = f"import {module}; {code}"
    commands.append(UsageCommand("transformers", f"python -c {_double_quote(code)}"))
    if task != "causal-lm" or registered:
        return commands
    serve, scored = f"vllm serve {model}", f"pretrained={model}"
    if trust:
        serve, scored = f"{serve} --trust-remote-code", f"{scored},trust_remote_code=True"
    if peft:
        largest = config.adapter.r if adapter is None else adapter.largest_rank
        rank = next((rank for rank in _RANKS if rank >= largest), _RANKS[-1])
        serve, lora_module = (
            f"vllm serve {quoted_base} --enable-lora --max-lora-rank {rank}",
            f"{run}={location}",
        )
        if adapter is not None and adapter.has_stacked_experts:
            serve = f"{serve} --enable-mixed-moe-lora-format"
            lora_module = json.dumps({"name": run, "path": location, "is_3d_lora_weight": True})
        serve = f"{serve} --lora-modules {shlex.quote(lora_module)}"
        scored = f"pretrained={quoted_base},peft={model}"
    if not trust:
        commands.insert(0, UsageCommand("chat", f"portable-chat {model}"))
    commands.append(UsageCommand("vLLM", serve))
    if model_type in MODELS:
        commands.append(UsageCommand("llama.cpp", gguf))
    commands.append(
        UsageCommand("lm_eval", f"lm_eval run --model hf --model_args {scored} --tasks hellaswag")
    )
    return commands


def _double_quote(code: str) -> str:
    return '"' + code.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`") + '"'
