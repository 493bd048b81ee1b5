"""Write the model card of an export: its base model, data, settings, and losses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from portable import plugins
from portable.adapters.settings import PEFT_KEYS
from portable.config import keys
from portable.config.sources import get_training_sources
from portable.config.yaml_writer import format_yaml
from portable.converters.errors import redact_credentials
from portable.converters.storage.path_or_url import is_url
from portable.converters.writers.gguf_models import MODEL_TYPES
from portable.private.transformers_internals import find_causal_lm_class, list_model_types
from portable.reporting.metrics import is_evaluation_metric, is_evaluation_row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portable.adapters.adapter import Adapter
    from portable.config import RunConfig

MODEL_CARD_FILE = "README.md"
_MAX_CURVE_ROWS = 10
_SHOWN_SETTINGS = (
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
_PATH_PLACEHOLDER = "path/of/this/folder"
_MACHINE_SETTINGS = ("output_dir", "log.", "hub.", "checkpoint.", "data.cache_dir", "memory.nvme_path")
_FOLDER_IN_PATH = re.compile(r"(?<![\w.:/~])/(?:[^\s/;,:]+/)+")


def build_model_card(
    config: RunConfig,
    *,
    adapter: Adapter | None,
    architecture: str,
    model_type: str,
    data_description: str,
    metrics: Sequence[Mapping[str, Any]],
    copied_names: Sequence[str] = (),
    missing_names: Sequence[str] = (),
    is_chat_model: bool = False,
) -> str:
    """Build the model card in Markdown.

    Exports are made to be shared. The card therefore contains no samples of the data, and names local
    files and folders, such as the base model, without their parent folders.

    Args:
        config: Config of the run.
        adapter: Adapter of the run. None if the run did not train an adapter.
        architecture: Class of the model in transformers.
        model_type: Model type in transformers, such as ``llama``.
        data_description: Description of the training data.
        metrics: Rows of ``metrics.jsonl`` up to the exported checkpoint.
        copied_names: Names of tensors that were copied from the base model without training.
        missing_names: Names of the base model's tensors that the export lacks.
        is_chat_model: Whether the model was trained on conversations, so that prompts are lists of
            messages.

    Returns:
        The text. Credentials are replaced by ``***``.
    """
    name = config.model.name_or_path
    local = name is not None and (Path(name).exists() or Path(name).is_absolute())
    base = Path(name).name if name is not None and local else name
    loader, pipeline = AUTO_CLASSES[config.model.task]
    if config.model.task == "causal-lm" and architecture.endswith("ForConditionalGeneration"):
        loader = architecture  # AutoModelForCausalLM has another class for this model type, or none
    kind = None if adapter is None else str(config.adapter.type)
    is_adapter_export, rows = exports_adapter(config), None if adapter is None else adapter.grown_vocab_size
    on_hub = None if local or config.model.from_scratch else name
    settings = (
        [] if kind is None else [(f"adapter.{key}", getattr(config.adapter, key)) for key in PEFT_KEYS[kind]]
    )
    settings += [(key, config.get(key)) for key in _SHOWN_SETTINGS]
    location = config.hub.repo or _PATH_PLACEHOLDER
    commands = list_usage_commands(
        config,
        location,
        model_type,
        architecture,
        base_text=base,
        adapter=adapter,
        is_chat_model=is_chat_model,
    )
    setting_rows = [
        f"| `{key}` | {_format_table_cell(value)} |"
        for key, value in settings
        if value is not None and value is not False
    ]
    text = "\n".join(
        [
            "---",
            _format_front_matter(config, on_hub, pipeline, kind, is_adapter_export=is_adapter_export),
            "---",
            "",
            f"# {Path(config.output_dir).name}",
            "",
            _describe_origin(
                None if config.model.from_scratch else base,
                adapter,
                architecture,
                is_adapter_export=is_adapter_export,
            ),
            "",
            f"Trained on: {_FOLDER_IN_PATH.sub('', data_description)}.",
            "",
            *_format_untrained_tensors(copied_names, missing_names),
            *_format_adapter_usage(
                loader, base, rows, is_local_base=local, is_adapter_export=is_adapter_export
            ),
            "```sh",
            *(f"{use}    # {purpose}" for purpose, use in commands),
            "```",
            "",
            "## Settings",
            "",
            "| setting | value |",
            "|---|---|",
            *setting_rows,
            "",
            "## Curves",
            "",
            *_format_curve_table(metrics, "loss"),
            *_format_curve_table(metrics, "eval_loss"),
            *_format_evaluation_table(metrics),
            "## Command",
            "",
            "`portable-train --config run.yaml`, with this file:",
            "",
            "```yaml",
            _format_user_settings(config).rstrip("\n"),
            "```",
            "",
        ]
    )
    return redact_credentials(text)


def _format_front_matter(
    config: RunConfig,
    base_hub_id: str | None,
    pipeline: str,
    adapter_type: str | None,
    *,
    is_adapter_export: bool,
) -> str:
    """Format the YAML metadata at the start of a model card, which the hub reads.

    Args:
        config: Config of the run.
        base_hub_id: Name of the base model on the hub. None if it is local or has random weights.
        pipeline: Name of the task on the hub, such as ``text-generation``.
        adapter_type: Type of the adapter. None if the run did not train an adapter.
        is_adapter_export: Whether the export is an adapter instead of a complete model.
    """
    from huggingface_hub import ModelCardData

    return ModelCardData(
        base_model=base_hub_id,
        base_model_relation=None if base_hub_id is None else ("adapter" if is_adapter_export else "finetune"),
        datasets=_list_hub_datasets(config) or None,
        library_name="peft" if is_adapter_export else "transformers",
        pipeline_tag=pipeline,
        tags=["portable-trainer", *([] if adapter_type is None else [adapter_type])],
    ).to_yaml()


def _describe_origin(
    base_name: str | None, adapter: Adapter | None, architecture: str, *, is_adapter_export: bool
) -> str:
    """Describe the base model, and whether the export is an adapter, a merged adapter or trained weights.

    ``base_name`` is None if the run has started from random weights.
    """
    base = "a model with random weights" if base_name is None else f"`{base_name}`"
    if adapter is None:
        return f"Architecture: {architecture}. Trained from {base}."
    relation = (
        "This is an adapter for the base model."
        if is_adapter_export
        else "The weights of an adapter are merged into the base model."
    )
    digest = adapter.identity["base"]
    return f"Base model: {base}. {relation}" + (
        f" Fingerprint of the base weights: `{digest}`." if digest else ""
    )


def _format_untrained_tensors(copied: Sequence[str], missing: Sequence[str]) -> list[str]:
    """Format the names of the base model's tensors that transformers does not load, as lines of Markdown.

    These tensors are not trained. Some are copied to the export, and the others are missing from the
    export.
    """
    lines = []
    if copied:
        names = ", ".join(f"`{name}`" for name in copied)
        lines += [f"These tensors were copied from the base model without training: {names}.", ""]
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        lines += [f"These tensors of the base model are missing: {names}.", ""]
    return lines


def _format_adapter_usage(
    auto_class: str,
    base_name: str | None,
    num_embedding_rows: int | None,
    *,
    is_local_base: bool,
    is_adapter_export: bool,
) -> list[str]:
    """Format the Python code that loads an exported adapter, as lines of Markdown.

    Empty if the export is a complete model, or if the name of the base model is unknown.

    Args:
        auto_class: Name of the transformers class that loads the base model, such as
            ``AutoModelForCausalLM``.
        base_name: Name of the base model, or of its folder. None if it is unknown.
        num_embedding_rows: Number of rows to which the base model's embeddings are resized. None if
            the run did not add tokens.
        is_local_base: Whether the base model is a local folder. If so, a comment asks the reader to
            set its path.
        is_adapter_export: Whether the export is an adapter instead of a complete model.
    """
    if not is_adapter_export or base_name is None:
        return []
    comment = "  # set the path of the base model" if is_local_base else ""
    grown = [] if num_embedding_rows is None else [f"base.resize_token_embeddings({num_embedding_rows})"]
    return [
        "```python",
        "from peft import PeftModel",
        f"from transformers import {auto_class}",
        "",
        f"base = {auto_class}.from_pretrained({json.dumps(base_name)}){comment}",
        *grown,
        f'model = PeftModel.from_pretrained(base, "{_PATH_PLACEHOLDER}")',
        "```",
        "",
    ]


def _list_hub_datasets(config: RunConfig) -> list[str]:
    """List the training data sources whose names have the form of a dataset name on the hub.

    The form is ``name`` or ``organization/name``. Existing local paths, custom code, and sources
    with several names are omitted.
    """
    sources = [settings.source for settings in get_training_sources(config.data).values()]
    names = [
        source[0] if isinstance(source, list | tuple) and len(source) == 1 else source for source in sources
    ]
    return [
        name
        for name in names
        if isinstance(name, str)
        and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)
        and not plugins.is_plugin_name(name)
        and not Path(name).exists()
    ]


def _format_curve_table(metrics: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """Format up to ten points of a curve as a Markdown table. Empty if no row has a number for ``key``."""
    points = [(row["step"], row[key]) for row in metrics if isinstance(row.get(key), int | float)]
    if not points:
        return []
    stride = max(1, -(-(len(points) - 1) // (_MAX_CURVE_ROWS - 1)))
    chosen = [*points[:-1:stride], points[-1]]
    return [f"| step | {key} |", "|---|---|", *(f"| {step} | {value:.4f} |" for step, value in chosen), ""]


def _format_evaluation_table(metrics: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the metrics of the last evaluation as a Markdown table, with one row per metric.

    Returns:
        The lines of the table. Empty if ``eval_loss`` is the only metric of the evaluation, because
        the model card already shows it in its table of loss values.
    """
    rows = [row for row in metrics if is_evaluation_row(row)]
    values = {
        n: v
        for row in rows[-1:]
        for n, v in row.items()
        if is_evaluation_metric(n) and isinstance(v, int | float)
    }
    if values.keys() <= {"eval_loss"}:
        return []
    return [
        "| last evaluation | value |",
        "|---|---|",
        *(f"| {n} | {v:.4f} |" for n, v in values.items()),
        "",
    ]


def _format_user_settings(config: RunConfig) -> str:
    """Format the user's settings as YAML, without the settings in ``_MACHINE_SETTINGS``.

    The omitted settings include ``output_dir`` and all settings in the sections ``log``, ``hub``
    and ``checkpoint``. Absolute paths are reduced to their last component.
    """
    settings = {
        key: _strip_parent_folders(value)
        for key, value in config.given().items()
        if not key.startswith(_MACHINE_SETTINGS)
    }
    return format_yaml(keys.to_plain_value(keys.nest_dotted_keys(settings)))


def _strip_parent_folders(value: Any) -> Any:
    """Replace absolute paths in nested lists and mappings with their file names. Keep other values."""
    if isinstance(value, str):
        return Path(value).name if value.startswith("/") else value
    if isinstance(value, list | tuple):
        return [_strip_parent_folders(item) for item in value]
    return {k: _strip_parent_folders(v) for k, v in value.items()} if isinstance(value, dict) else value


def _format_table_cell(value: Any) -> str:
    """Format a value for a Markdown table. Characters that would end the cell are escaped or replaced."""
    value = keys.to_plain_value(value)
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


class AutoClass(NamedTuple):
    """Auto class that loads the models of a task in transformers.

    Attributes:
        name: Name of the class, such as ``AutoModelForCausalLM``.
        pipeline: Name of the task on the hub, such as ``text-generation``. If transformers has a
            pipeline for the task, the pipeline has the same name.
    """

    name: str
    pipeline: str


AUTO_CLASSES = {
    "causal-lm": AutoClass("AutoModelForCausalLM", "text-generation"),
    "seq2seq-lm": AutoClass("AutoModelForSeq2SeqLM", "text2text-generation"),
    "sequence-classification": AutoClass("AutoModelForSequenceClassification", "text-classification"),
    "masked-lm": AutoClass("AutoModelForMaskedLM", "fill-mask"),
}
"""Class of transformers that opens the models of a task, keyed by ``model.task``."""
PIPELINE_PROMPTS = {
    "causal-lm": "'Once upon a time'",
    "sequence-classification": "'Once upon a time'",
    "masked-lm": "'Once upon a ' + p.tokenizer.mask_token",
}
"""Example prompt for each task that has a pipeline in transformers, as a Python expression."""
_CHAT_PROMPT = "[{'role': 'user', 'content': 'Write a short story.'}]"
"""Example prompt for a model that was trained on conversations, as a Python expression."""
_VLLM_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that ``vllm serve --max-lora-rank`` accepts."""


def exports_adapter(config: RunConfig) -> bool:
    """Return whether the run exports only the adapter instead of a complete model.

    The result is True if ``adapter.type`` is set and ``checkpoint.export`` is neither ``merged``
    nor ``like_base``. It is therefore True even if ``checkpoint.export`` is false and nothing is
    exported.
    """
    return config.adapter.type is not None and config.checkpoint.export not in ("merged", "like_base")


class UsageCommand(NamedTuple):
    """Shell command that uses an exported model.

    Attributes:
        purpose: Name of the program, such as ``vLLM``, or of the action, such as ``merge``.
        command: Shell command.
    """

    purpose: str
    command: str


def list_usage_commands(
    config: RunConfig,
    location: str,
    model_type: str,
    architecture: str,
    *,
    base_text: str | None = None,
    adapter: Adapter | None = None,
    is_chat_model: bool = False,
) -> list[UsageCommand]:
    """Return a shell command for each program that can use an exported model.

    The programs are ``portable-chat``, transformers, vLLM, llama.cpp and lm_eval. Programs that
    cannot open the model are omitted. Only transformers is listed if ``model.task`` is not
    ``causal-lm``. If programs need a merged or local copy of the model, the result also contains a
    command that creates the copy.

    Args:
        config: Config of the run.
        location: Location of the export, as a path, a URL, or a name on the hub.
        model_type: Model type in the ``config.json`` of the export.
        architecture: Class of the model in transformers.
        base_text: Path or name of the base model to show in the commands. If None,
            ``model.name_or_path`` is shown.
        adapter: Adapter of the run. None if the run did not train an adapter.
        is_chat_model: Whether the model was trained on conversations, so that prompts are lists of
            messages.

    Returns:
        The commands, in display order.
    """
    task, name = config.model.task, str(config.model.name_or_path)
    quoted_base = shlex.quote(base_text or name)
    folder = quoted_base if Path(name).is_dir() else f'"$(hf download {quoted_base})"'
    merge = f" --merge-into {folder}" if exports_adapter(config) else ""
    run = re.sub("[^A-Za-z0-9_.-]", "-", Path(config.output_dir).name).lstrip("-") or "run"
    local = f"{run}-{'merged' if merge else 'model'}"
    gguf = (
        f"portable-convert {shlex.quote(location)} {local}.gguf --to gguf{merge} && llama-cli -m {local}.gguf"
    )
    # vLLM and lm_eval do not resize embeddings.
    has_resized_embeddings = adapter is not None and adapter.grown_vocab_size is not None
    serves_as_adapter = (
        merge and config.adapter.type == "lora" and not (has_resized_embeddings or is_url(location))
    )
    serves_as_adapter = serves_as_adapter and not (config.adapter.use_dora or config.adapter.modules_to_save)
    # vLLM requires an adapter of stacked experts to change both stacks, which peft wraps in nested layers.
    serves_as_adapter = serves_as_adapter and not (
        adapter is not None and adapter.has_stacked_experts and not adapter.has_nested_wrappers
    )
    commands: list[UsageCommand] = []
    model, loaded = shlex.quote(location), location  # with and without quotes for the shell
    if (merge and not serves_as_adapter) or is_url(location):
        purpose = "merge" if merge else "fetch"
        commands.append(UsageCommand(purpose, f"portable-convert {model} {local}{merge}"))
        model = loaded = local
    loader, kind = AUTO_CLASSES[task]
    is_custom_type = model_type not in list_model_types()
    trusts_remote_code = is_custom_type and config.model.trust_remote_code
    option = ", trust_remote_code=True" if trusts_remote_code else ""
    has_pipeline = task in PIPELINE_PROMPTS
    if task == "causal-lm" and not is_custom_type and find_causal_lm_class(model_type) != architecture:
        has_pipeline, loader = False, architecture  # the pipeline cannot open a composite model
    if has_pipeline:
        prompt = _CHAT_PROMPT if is_chat_model and task == "causal-lm" else PIPELINE_PROMPTS[task]
        constructor = f"pipeline('{kind}', {loaded!r}{option})"
        code = f"from transformers import pipeline; p = {constructor}; print(p({prompt}, max_new_tokens=40))"
    else:
        code = f"from transformers import {loader} as M; print(M.from_pretrained({loaded!r}{option}))"
    needs_module_import = is_custom_type and not trusts_remote_code
    if needs_module_import:  # importing the module of the model registers its type
        module = str(config.model.function or "").partition(":")[0]
        if not all(map(str.isidentifier, module.split("."))):
            return commands
        code = f"import {module}; {code}"
    commands.append(UsageCommand("transformers", f"python -c {_quote_for_shell(code)}"))
    if task != "causal-lm" or needs_module_import:
        return commands
    serve, lm_eval_arguments = f"vllm serve {model}", f"pretrained={model}"
    if trusts_remote_code:
        serve, lm_eval_arguments = (
            f"{serve} --trust-remote-code",
            f"{lm_eval_arguments},trust_remote_code=True",
        )
    if serves_as_adapter:
        largest = config.adapter.r if adapter is None else adapter.largest_rank
        rank = next((rank for rank in _VLLM_LORA_RANKS if rank >= largest), _VLLM_LORA_RANKS[-1])
        serve, lora_module = (
            f"vllm serve {quoted_base} --enable-lora --max-lora-rank {rank}",
            f"{run}={location}",
        )
        if adapter is not None and adapter.has_stacked_experts:
            serve = f"{serve} --enable-mixed-moe-lora-format"
            lora_module = json.dumps({"name": run, "path": location, "is_3d_lora_weight": True})
        serve = f"{serve} --lora-modules {shlex.quote(lora_module)}"
        lm_eval_arguments = f"pretrained={quoted_base},peft={model}"
    if not trusts_remote_code:
        commands.insert(len(commands) - 1, UsageCommand("chat", f"portable-chat {model}"))
    commands.append(UsageCommand("vLLM", serve))
    if model_type in MODEL_TYPES:
        commands.append(UsageCommand("llama.cpp", gguf))
    commands.append(
        UsageCommand("lm_eval", f"lm_eval run --model hf --model_args {lm_eval_arguments} --tasks hellaswag")
    )
    return commands


def _quote_for_shell(code: str) -> str:
    """Put Python code in double quotes for the shell, and escape special characters."""
    return '"' + code.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`") + '"'
