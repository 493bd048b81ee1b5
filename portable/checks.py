"""Settings that do not go together.

Rules that need no code are in ``rules.yaml``. Each function here gives the mistakes of one part of the
config, as text. Backends and engines have such functions of their own
(:meth:`portable.registry.BackendPackage.mistakes`). A resolved config with every key passes as the short file
does from which it came: values are read, and not whether the user set them.
"""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.storage.path_or_url import is_url
from converters.storage.store_errors import find_repository
from portable.config import keys
from portable.config.derived import ZERO, largest_divisor, warmup_steps
from portable.config.load import parse_file
from portable.config.sources import mistakes_of_sources, number_columns, training_key, training_sources
from portable.config.suggest import did_you_mean
from portable.errors import UserError, one_line
from portable.optim.schedule import build_schedule, schedule_params, too_long_a_warmup
from portable.registry import BACKENDS, backend_package

if TYPE_CHECKING:
    from portable.config import RunConfig

Mistakes = Iterator[str]
"""What is said of each, and what to do after a semicolon. It begins with the key to change; a key in braces
stands for its value."""

TAKEN = (
    "labels",
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "decoder_input_ids",
    "position_ids",
    "source",
)
"""Names of columns that models have as inputs."""


def check(config: RunConfig, *, late: bool = False, where: bool = True) -> None:
    """Refuse settings that do not go together.

    Args:
        config: of a run.
        late: whether it is resolved, so that what needs that is asked, too, and code of the user's may run.
        where: whether the message names the file and line of the setting.

    Raises:
        UserError: for the first mistake.
    """
    for mistake in _mistakes(config, late):
        text = re.sub(r"\{([a-z_.0-9]+)\}", partial(_value, config), mistake)
        raise UserError(one_line(_located(text, mistake, config) if where else text))


def _mistakes(config: RunConfig, late: bool) -> Mistakes:
    """In the order in which they are asked."""
    for part in (_model, _adapter, _data, _sources, _schedule, _batch, _memory, _together, _output):
        yield from part(config)
    if config.backend in BACKENDS:  # not auto
        yield from backend_package(config.backend).mistakes(config, late=late)


def _located(text: str, mistake: str, config: RunConfig) -> str:
    """``text`` with the place where one of the settings was written that ``mistake`` names before the remedy.

    A flag counts before a line: what was written last is most likely what the person has just changed.
    """
    found = []
    for word in re.findall(r"[a-z_0-9]+(?:\.[\w-]+)*", mistake.partition(";")[0]):
        parts = tuple(word.split("."))
        inner = (parts[:length] for length in range(len(parts), 0, -1))
        settings = [path for path in inner if ".".join(path) not in keys.sections(type(config))]
        found += [config.origins[path] for path in settings if path in config.origins]
    first = next((origin for origin in (*(one for one in found if one.flag), *found)), None)
    return text if first is None else first.before(text)


def _value(config: RunConfig, named: re.Match[str]) -> str:
    """The value of a key in braces; braces of the user's own stay."""
    return _text(config.get(named[1])) if named[1] in keys.settings(type(config)) else named[0]


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


@cache
def _rules() -> dict[str, list[dict[str, Any]]]:
    """The rules of ``rules.yaml``, by part."""
    found: dict[str, list[dict[str, Any]]] = parse_file(Path(__file__).with_name("rules.yaml")).value
    return found


def _ruled(c: RunConfig, part: str) -> Mistakes:
    """The mistakes by the rules of a part."""
    table = keys.settings(type(c))
    for rule in _rules()[part]:
        (blamed, test), *others = rule["if"].items()
        if all(_holds(c, key, other) for key, other in others):
            for pattern in blamed.split(" | "):
                for key in fnmatch.filter(table, pattern):
                    if _holds(c, key, test):
                        value = c.get(key)
                        told = isinstance(value, str | int | float) and not isinstance(value, bool)
                        yield f"{key} {{{key}}} {rule['then']}" if told else f"{key} {rule['then']}"


def _holds(c: RunConfig, key: str, test: str) -> bool:
    """Whether the value of a setting is as ``test`` says; see ``rules.yaml``."""
    value = c.get(key)
    if test in ("set", "unset"):
        return bool(value) is (test == "set")
    if test == "changed":
        return _given(c, key)
    words = test.removeprefix("not ").split(", ")
    return any(fnmatch.fnmatchcase(_text(value), word) for word in words) is not test.startswith("not ")


def nvidia_only(c: RunConfig, *, late: bool) -> Mistakes:
    """Settings that only NVIDIA GPUs support, for other backends."""
    yield from _ruled(c, "nvidia")
    if late and c.log.memory_snapshot:
        yield "log.memory_snapshot: torch records the allocations of GPUs only; set it to false"


def no_zero(c: RunConfig) -> Mistakes:
    """ZeRO, for backends that DeepSpeed does not run on."""
    yield from _ruled(c, "zero")


def _given(c: RunConfig, key: str) -> bool:
    """Whether ``key`` has another value than its default."""
    return bool(c.get(key) != keys.settings(type(c))[key].default)


def _model(c: RunConfig) -> Mistakes:
    config, path = c.model.config, c.model.name_or_path
    for key in ("model.name_or_path", "data.tokenizer"):
        if is_url(c.get(key)):
            name = find_repository(str(c.get(key)))
            remedy = "copy the files to a local folder" if name is None else f"give the name {name}"
            yield f"{key} must be a hub id or a local folder, not a URL; {remedy}"
    for key in ("data.cache_dir", "checkpoint.staging_dir", "memory.nvme_path"):
        if is_url(c.get(key)):
            yield f"{key} must be a local folder, not a URL; name a folder on a disk of this machine"
    if path is not None and "model_type" in (config or {}):
        remedy = "or leave model_type out of model.config to change keys of the named model's config"
        yield f"model.config and model.name_or_path are both set; set one of the two, {remedy}"
    if path is None and config is None:
        yield "model.config and model.name_or_path are both null; set one of the two"
    if path is None and not isinstance((config or {}).get("model_type"), str):
        yield "model.config.model_type must name a transformers model type, such as llama or bert"


def _adapter(c: RunConfig) -> Mistakes:
    adapter = c.adapter
    of_type = adapter.type is not None or adapter.name_or_path is not None or adapter.config is not None
    names = [name for name in type(adapter).model_fields if _given(c, f"adapter.{name}")]
    if names and not of_type:
        yield f"adapter.{names[0]} has no effect without adapter.type; set adapter.type to lora"
    for name in names:
        of_all = ("type", "target_modules", "modules_to_save", "base", "name_or_path", "config")
        if adapter.type == "ia3" and name not in of_all:
            yield f"adapter.{name} is for lora, not for adapter.type ia3; remove it"
    if names and c.train.freezes:
        reason = "do not work with an adapter, which freezes all other weights; use adapter.modules_to_save"
        yield f"train.trainable and train.frozen {reason} and adapter.layers"
    yield from _ruled(c, "adapter")


def _data(c: RunConfig) -> Mistakes:
    yield from _ruled(c, "data")
    numbers = number_columns(c.data)
    if numbers and c.data.packing:
        packing = str(c.data.packing).lower()
        reason = f"but data.packing {packing} joins records; set data.packing to false"
        yield f"data.columns has a number for each record, {reason}"
    if numbers and not c.train.loss:
        yield "data.columns is for a loss of your own; set train.loss, or remove it"
    for name in numbers:
        if name in TAKEN:
            yield f"data.columns: {name} is an input of models; rename the column"


def _sources(c: RunConfig) -> Mistakes:
    yield from mistakes_of_sources(c.data)
    sources = {training_key(name): one for name, one in training_sources(c.data).items()}
    streams = [key for key, one in sources.items() if one.stream]
    if streams:
        stream = f"{streams[0]}.stream"
        if c.model.task != "causal-lm":
            yield f"{stream} works with model.task causal-lm alone"
        for name in ("train.epochs", "train.eval_every_epochs", "checkpoint.every_epochs"):
            if c.get(name) is not None:
                yield f"{name} needs the length of the data, which {stream} does not know; count in steps"
        if c.data.eval_fraction and not c.data.sources:
            yield "data.eval_fraction holds nothing out of a stream (data.stream); set it to 0, and data.eval"
    for key, one in sources.items():
        if one.roles_to_train and one.train_on not in (None, "assistant"):
            reason = f"does not work with {key}.roles_to_train; remove one of the two"
            yield f"{key}.train_on {one.train_on} {reason}"
    for key in streams:
        if sources[key].max_samples is not None:
            yield f"{key}.max_samples does not work with {key}.stream; name fewer files, or stop earlier"


def _schedule(c: RunConfig) -> Mistakes:
    yield from _ruled(c, "train")
    train, kind = c.train, c.train.schedule
    params = schedule_params(kind)
    of_ratio = (None, 0, warmup_steps(train, train.steps or 0))
    if train.warmup_ratio is not None and train.warmup_steps not in of_ratio:
        values = "{train.warmup_ratio} and train.warmup_steps {train.warmup_steps}"
        yield f"train.warmup_ratio {values} both give the length of the warmup; set one of the two"
    if train.steps is not None and (reason := too_long_a_warmup(train, train.steps)) is not None:
        yield reason
    for name in train.schedule_params:
        if name not in params:
            hint = did_you_mean(name, params) or f"; {kind} takes {', '.join(params) or 'none'}"
            yield f"unknown key train.schedule_params.{name}{hint}"
    try:
        schedule = build_schedule(train, train.steps or 1)
    except ValueError as error:
        yield str(error)
        return
    if getattr(schedule, "cycle_momentum", False) and train.optimizer not in ("adamw", "muon"):
        reason = "changes train.betas, which optimizer {train.optimizer} does not use; set it to false"
        yield f"train.schedule_params.cycle_momentum {reason}"
    if train.steps is not None and (train.stop_after or 0) > train.steps:
        reason = "exceeds train.steps {train.steps}, where the run ends; lower or remove it"
        yield f"train.stop_after {{train.stop_after}} {reason}"


def _batch(c: RunConfig) -> Mistakes:
    train, micro = c.train, c.train.micro_batch_size
    if micro != "auto" and train.global_batch_size % micro:
        fitting = largest_divisor(train.global_batch_size, micro)
        reason = f"does not divide train.global_batch_size {train.global_batch_size}"
        yield f"train.micro_batch_size {micro} {reason}; use {fitting} or another divisor"


def _memory(c: RunConfig) -> Mistakes:
    # A JSON's stage overrides a default strategy; only one that was set can conflict. XLA ignores the JSON.
    unfit = c.is_set("strategy") and c.backend != "xla" and c.strategy not in (*ZERO, "no_shard")
    if c.deepspeed.config is not None and unfit:
        remedy = "use zero1, zero2 or zero3 (no_shard for stage 0), or remove deepspeed.config"
        yield f"deepspeed.config has no effect with strategy {{strategy}}; {remedy}"
    yield from _ruled(c, "memory")


def _together(c: RunConfig) -> Mistakes:
    size = c.context_parallel_size
    if c.data.seq_len % size:
        reason = f"cannot be divided by context_parallel_size {size}; use a multiple of {size}"
        yield f"data.seq_len {{data.seq_len}} {reason}"
    of_both = (
        ("model.task", c.model.task != "causal-lm"),
        ("data.format", c.data.format == "samples"),
        ("train.loss", c.train.loss is not None),
        ("train.metrics", any(":" in name for name in c.train.metrics or ())),
        ("train.neftune_noise_alpha", c.train.neftune_noise_alpha > 0),
    )
    of_sequences = (*of_both, ("deepspeed.config", c.deepspeed.config is not None))
    of_layers = (
        ("backend", c.backend in ("xla", "tpu")),
        ("strategy", c.strategy == "no_shard" or c.strategy in ZERO),
        ("context_parallel_size", size > 1),
        ("precision", c.precision == "fp16"),
        ("compile", c.compile),
        *of_both,
        ("model.function", c.model.function is not None),
        ("adapter.base", c.adapter.base in ("nf4", "int8")),
        ("adapter.target_parameters", c.adapter.target_parameters),
        ("train.optimizer", c.train.optimizer not in ("adamw", "sgd")),
        ("train.callbacks", c.train.callbacks),
        ("train.micro_batch_size", c.train.micro_batch_size == "auto"),
    )
    for key, refused, why in (
        ("context_parallel_size", of_sequences, "needs whole sequences"),
        ("tensor_parallel_size", of_layers, "does not work with ranks that share layers"),
    ):
        for name, applies in refused if c.get(key) > 1 else ():
            if applies:
                yield f"{name} {{{name}}} {why}; set {key} to 1"


def _output(c: RunConfig) -> Mistakes:
    for name, times in Counter(c.log.trackers).items():
        if times > 1:
            yield f"log.trackers: {name} is named {times} times; name it once"
    yield from _ruled(c, "output")
