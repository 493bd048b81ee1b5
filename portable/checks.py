"""Settings that do not go together: one table, asked when a run is resolved.

A row says for which configs it applies, and what is said of them. Backends and engines give rows of their own
(:meth:`portable.registry.BackendPackage.checks`). A resolved config with every key passes the same rows
as the short file from which it came: rows read values, and not whether the user set them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from converters.storage.path_or_url import is_url
from portable.config import keys
from portable.config.derived import HYBRID, PADDED_TASKS, ZERO, largest_divisor, warms_up, warmup_steps
from portable.config.origins import located
from portable.config.sources import mistakes, training_key, training_sources
from portable.config.suggest import did_you_mean
from portable.errors import UserError, one_line
from portable.optim.schedule import ZERO_ONLY, build_schedule, schedule_params, too_long_a_warmup
from portable.registry import BACKENDS, backend_package

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from portable.config import RunConfig

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


@dataclass(frozen=True)
class Check:
    """Settings that do not go together.

    Attributes:
        keys: dotted names, separated by spaces, the one to change first. The message begins with it.
        applies: whether a config has this mistake.
        message: the text, or what follows the first key; a key in braces stands for its value.
        late: whether it is asked only once the run is resolved, and code of the user's may run.
    """

    keys: str
    applies: Callable[[RunConfig], Any]
    message: str
    late: bool = field(default=False, kw_only=True)

    def mistakes(self, config: RunConfig) -> Iterator[tuple[tuple[str, ...], str]]:
        """The keys and the message, if it applies."""
        if self.applies(config):
            names = tuple(self.keys.split())
            start = "" if self.message[0].isalpha() else names[0]
            yield names, start + filled(self.message, config)


@dataclass(frozen=True)
class Several:
    """Mistakes that a function finds, with the keys of each."""

    find: Callable[[RunConfig], Iterable[tuple[str, str]]]
    late: bool = field(default=False, kw_only=True)

    def mistakes(self, config: RunConfig) -> Iterator[tuple[tuple[str, ...], str]]:
        """The keys and the message of each."""
        for names, message in self.find(config):
            yield tuple(names.split()), filled(message, config)


def filled(message: str, config: RunConfig) -> str:
    """``message`` with the values of keys in braces."""
    return re.sub(r"\{([a-z_.0-9]+)\}", lambda found: _text(config.get(found[1])), message)


def _text(value: Any) -> str:
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value).lower()
        if value in (True, False)
        else str(value)
    )


def given(config: RunConfig, key: str) -> bool:
    """Whether ``key`` has another value than its default."""
    return bool(config.get(key) != keys.settings(type(config))[key].default)


def no_effect(key: str, without: str, applies: Callable[[RunConfig], Any], remedy: str) -> Check:
    """A setting that only another one uses."""
    return Check(f"{key} {without}", lambda config: given(config, key) and applies(config),
                 f" has no effect without {without}; {remedy}")  # fmt: skip


def only_for(key: str, other: str, value: str) -> Check:
    """A setting of one value of another."""
    return Check(
        f"{key} {other}",
        lambda config: given(config, key) and config.get(other) != value,
        f" is for {other} {value}, not {{{other}}}; remove it",
    )


def not_with(names: str, applies: Callable[[RunConfig], Any], remedy: str) -> Check:
    """Two settings whose values do not work together."""
    key, other = names.split()
    return Check(names, applies, f" {{{key}}} does not work with {other} {{{other}}}; {remedy}")


def both(one: str, other: str, message: str) -> Check:
    """Two settings of which only one may be set."""
    return Check(f"{one} {other}", lambda c: c.get(one) is not None and c.get(other) is not None, message)


def each(names: str, other: str, applies: Callable[[RunConfig, str], Any], message: str) -> Iterator[Check]:
    """A row for each of several settings; ``{}`` in the message stands for its value."""
    for key in names.split():
        found = message.replace("{}", f"{{{key}}}")
        yield Check(f"{key} {other}", lambda config, key=key: applies(config, key), found)  # type: ignore[misc]


def check(config: RunConfig, *, late: bool = False, where: bool = True) -> None:
    """Ask every row.

    Args:
        config: of a run.
        late: whether it is resolved, so that rows that need that are asked, too.
        where: whether the message names the file and line of the setting.

    Raises:
        UserError: for the first row that applies.
    """
    rows: list[Check | Several] = [*CHECKS]
    if config.backend in BACKENDS:  # not auto
        rows += backend_package(config.backend).checks()
    for row in rows:
        if late or not row.late:
            for names, message in row.mistakes(config):
                raise UserError(one_line(located(message, names, config.origins if where else {})))


def nvidia_only() -> list[Check]:
    """Rows for settings that only NVIDIA GPUs support, for other backends."""
    return [
        Check(
            "precision backend",
            lambda c: c.precision == "tf32",
            " tf32 is a mode of NVIDIA GPUs, not of backend {backend}; use fp32 or bf16",
        ),
        Check(
            "model.attention backend",
            lambda c: c.model.attention not in ("sdpa", "eager"),
            " {model.attention} needs backend cuda, not {backend}; use sdpa",
        ),
        Check(
            "log.memory_snapshot",
            lambda c: c.log.memory_snapshot,
            ": torch records the allocations of GPUs only; set it to false",
            late=True,
        ),
    ]


NO_ZERO = Check(
    "strategy backend",
    lambda c: c.strategy in ZERO,
    " {strategy} is DeepSpeed's, which does not run on backend {backend}; use full_shard",
)


# -- what rows ask ------------------------------------------------------------------------------------------


def _from_file(c: RunConfig) -> bool:
    return c.adapter.name_or_path is not None or c.adapter.config is not None


def _has_adapter(c: RunConfig) -> bool:
    return any(given(c, f"adapter.{name}") for name in type(c.adapter).model_fields)


def _quantized(c: RunConfig) -> bool:
    return c.adapter.base in ("nf4", "int8")


def _packing(c: RunConfig) -> str | None:
    return "true" if c.data.packing is True else c.data.packing or None


def _pairs(c: RunConfig) -> bool:
    return c.data.format == "preference"


def _judging(c: RunConfig) -> str | None:
    """The setting that compares evaluations, if one does."""
    names = ("train.early_stopping_patience", "checkpoint.export_best", "checkpoint.keep_best")
    return next((name for name in names if c.get(name)), None)


def _chunked(c: RunConfig) -> bool:
    chunk = c.memory.loss_chunk_tokens
    return isinstance(chunk, int) and chunk > 0


def _on_nvme(c: RunConfig) -> str | None:
    names = ("memory.offload_optimizer", "memory.offload_params")
    return next((name for name in names if c.get(name) == "nvme"), None)


# -- rows for several settings ------------------------------------------------------------------------------


def _adapter(c: RunConfig) -> Iterator[tuple[str, str]]:
    names = [name for name in type(c.adapter).model_fields if given(c, f"adapter.{name}")]
    if names and c.adapter.type is None and not _from_file(c):
        reason = f"adapter.{names[0]} has no effect without adapter.type; set adapter.type to lora"
        yield f"adapter.{names[0]} adapter.type", reason
    of_all = ("type", "target_modules", "modules_to_save", "base", "name_or_path", "config")
    for name in names:
        if c.adapter.type == "ia3" and name not in of_all:
            yield (
                f"adapter.{name} adapter.type",
                f"adapter.{name} is for lora, not for adapter.type ia3; remove it",
            )


def _conversations(c: RunConfig) -> Iterator[tuple[str, str]]:
    chats = ("chat_template", "chat_template_kwargs", "train_on", "roles_to_train", "split_turns")
    for name in ("format", *chats, "truncation"):
        key, value = f"data.{name}", c.get(f"data.{name}")
        if c.model.task != "causal-lm" and value and value not in ("auto", "text", "end"):
            yield f"{key} model.task", f"{key} is for model.task causal-lm, not {{model.task}}; remove it"
        if c.data.format == "text" and name in chats and value:
            reason = "is for conversations, not for data.format text; remove one of the two"
            yield f"{key} data.format", f"{key} {reason}"


def _preference(c: RunConfig) -> Iterator[tuple[str, str]]:
    used = {"train_on": c.data.train_on not in (None, "completion")}
    for name in ("packing", "split_turns", "train_on", "roles_to_train"):
        if _pairs(c) and used.get(name, getattr(c.data, name)):
            reason = f"{getattr(c.data, name)} does not work with data.format preference; remove it"
            yield f"data.{name} data.format", f"data.{name} {reason}"


def _sources(c: RunConfig) -> Iterator[tuple[str, str]]:
    for key, mistake in mistakes(c.data):
        yield f"{key} data.eval data.sources", mistake
    sources = {training_key(name): one for name, one in training_sources(c.data).items()}
    streams = [key for key, one in sources.items() if one.stream]
    if streams:
        stream = f"{streams[0]}.stream"
        if c.model.task != "causal-lm":
            yield f"{stream} model.task", f"{stream} works with model.task causal-lm alone"
        for name in ("train.epochs", "train.eval_every_epochs", "checkpoint.every_epochs"):
            if c.get(name) is not None:
                reason = f"needs the length of the data, which {stream} does not know; count in steps"
                yield f"{name} {stream}", f"{name} {reason}"
        if c.data.eval_fraction and not c.data.sources:
            reason = "holds nothing out of a stream (data.stream); set it to 0, and data.eval"
            yield "data.eval_fraction data.stream", f"data.eval_fraction {reason}"
    for key, one in sources.items():
        if one.roles_to_train and one.train_on not in (None, "assistant"):
            reason = f"{one.train_on} does not work with {key}.roles_to_train; remove one of the two"
            yield f"{key}.train_on {key}.roles_to_train", f"{key}.train_on {reason}"
    for key in streams:
        if sources[key].max_samples is not None:
            reason = f"does not work with {key}.stream; name fewer files, or stop earlier"
            yield f"{key}.max_samples {key}.stream", f"{key}.max_samples {reason}"


def _schedule(c: RunConfig) -> Iterator[tuple[str, str]]:
    train, around = c.train, "train.schedule_params train.schedule"
    kind, params = train.schedule, schedule_params(train.schedule)
    if train.steps is not None and (reason := too_long_a_warmup(train, train.steps)) is not None:
        yield "train.warmup_steps train.steps", reason
    if kind in ZERO_ONLY and c.strategy not in ZERO:
        reason = "needs DeepSpeed; use strategy zero1, zero2 or zero3, or cosine, or a function of your own"
        yield "train.schedule strategy", f"train.schedule: {kind} {reason}"
    for name in train.schedule_params:
        if name not in params:
            hint = did_you_mean(name, params) or f"; {kind} takes {', '.join(params) or 'none'}"
            yield around, f"unknown key train.schedule_params.{name}{hint}"
    for name in ("train.warmup_ratio", "train.warmup_steps"):
        if c.get(name) and not warms_up(kind):
            reason = "has no effect with train.schedule {train.schedule}, which has no warm-up; set it to 0"
            yield f"{name} train.schedule", f"{name} {{{name}}} {reason}"
    try:
        schedule = build_schedule(train, train.steps or 1)
    except ValueError as error:
        yield around, str(error)
        return
    if getattr(schedule, "cycle_momentum", False) and train.optimizer not in ("adamw", "muon"):
        reason = "train.betas, which optimizer {train.optimizer} does not use; set it to false"
        yield around, f"train.schedule_params.cycle_momentum changes {reason}"


def _fsdp(c: RunConfig) -> Iterator[tuple[str, str]]:
    if c.strategy in ZERO:
        for name, value in c.fsdp:
            if value is not None:
                reason = "has no effect with DeepSpeed's strategy {strategy}; remove it, or use full_shard"
                yield f"fsdp.{name} strategy", f"fsdp.{name} {reason}"


def _together(c: RunConfig) -> Iterator[tuple[str, str]]:
    size, key = c.context_parallel_size, "context_parallel_size"
    if c.data.seq_len % size:
        reason = f"cannot be divided by {key} {size}; use a multiple of {size}"
        yield f"data.seq_len {key}", f"data.seq_len {{data.seq_len}} {reason}"
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
                yield f"{name} {key}", f"{name} {{{name}}} {why}; set {key} to 1"


CHECKS: tuple[Check | Several, ...] = (
    *each(
        "model.name_or_path data.tokenizer",
        "",
        lambda c, key: is_url(c.get(key)),
        " must be a hub id or a local folder, not a URL; copy it here",
    ),
    Check(
        "model.config model.name_or_path",
        lambda c: c.model.name_or_path is not None and "model_type" in (c.model.config or {}),
        " and model.name_or_path are both set; set one of the two, or leave model_type out of "
        "model.config to "
        "change keys of the named model's config",
    ),
    Check(
        "model.config model.name_or_path",
        lambda c: c.model.name_or_path is None and c.model.config is None,
        " and model.name_or_path are both null; set one of the two",
    ),
    Check(
        "model.config",
        lambda c: (
            c.model.name_or_path is None and not isinstance((c.model.config or {}).get("model_type"), str)
        ),
        ".model_type must name a transformers model type, such as llama or bert",
    ),
    both(
        "adapter.config",
        "adapter.name_or_path",
        " and adapter.name_or_path are both set, and an adapter has a config of its own; remove "
        "adapter.config",
    ),
    Check(
        "checkpoint.export adapter.type",
        lambda c: c.adapter.type is None and not _from_file(c) and c.checkpoint.export == "merged",
        " merged has no effect without adapter.type; set it to true",
    ),
    Check(
        "checkpoint.export model.name_or_path",
        lambda c: c.adapter.type is not None and c.checkpoint.export == "merged" and c.model.from_scratch,
        " merged needs a base model with files, model.name_or_path; set it to true",
    ),
    Check(
        "checkpoint.export model.name_or_path",
        lambda c: c.checkpoint.export == "like_base" and c.model.from_scratch,
        " like_base needs a quantized base model, model.name_or_path; set it to true",
    ),
    Several(_adapter),
    Check(
        "adapter.target_modules adapter.target_parameters",
        lambda c: not c.adapter.target_modules and not c.adapter.target_parameters,
        " is empty, which only adapter.target_parameters allows; name modules",
    ),
    Check(
        "train.trainable adapter.type",
        lambda c: _has_adapter(c) and c.train.freezes,
        " and train.frozen do not work with an adapter, which freezes all other weights; use "
        "adapter.modules_to_save and adapter.layers",
    ),
    Check(
        "adapter.base strategy",
        lambda c: _quantized(c) and c.strategy in ZERO,
        " {adapter.base} does not work with DeepSpeed's strategy {strategy}, which casts weights; use "
        "full_shard",
    ),
    *each(
        "adapter.use_dora compile",
        "adapter.base",
        lambda c, key: _quantized(c) and c.get(key),
        " does not work with adapter.base {adapter.base}; set it to false, or adapter.base to auto",
    ),
    Check(
        "adapter.trainable_token_indices strategy",
        lambda c: c.adapter.trainable_token_indices is not None and c.strategy == "zero3",
        " does not work with strategy zero3, under which no rank has the whole table of embeddings; use "
        "full_shard",
    ),
    Check(
        "adapter.base strategy",
        lambda c: c.strategy in ZERO and c.adapter.base == "fp32" and c.precision in ("bf16", "fp16"),
        " fp32 does not work with strategy {strategy}, which keeps frozen weights in the compute type; use "
        "full_shard",
    ),
    not_with(
        "data.packing model.task",
        lambda c: _packing(c) and c.model.task in PADDED_TASKS,
        "set data.packing to false",
    ),
    Check(
        "data.packing model.task",
        lambda c: c.data.packing == "documents" and c.model.task == "masked-lm",
        " documents is for model.task causal-lm, not masked-lm; set data.packing to false",
    ),
    both(
        "data.vocab_size",
        "data.tokenizer",
        " is for a tokenizer trained on the source, but data.tokenizer is set; remove one of the two",
    ),
    only_for("data.text_pair_field", "model.task", "sequence-classification"),
    only_for("data.source_prefix", "model.task", "seq2seq-lm"),
    only_for("data.target_seq_len", "model.task", "seq2seq-lm"),
    Several(_conversations),
    Check(
        "data.truncation data.packing",
        lambda c: c.data.truncation != "end" and c.data.packing is True and c.data.format != "auto",
        " {data.truncation} has no effect with data.packing true, which cuts nothing; remove one of the two",
    ),
    Check(
        "train.loss data.format",
        lambda c: _pairs(c) and c.train.loss is None,
        "data.format preference needs a loss of pairs; set train.loss to dpo, ipo, simpo, orpo or one "
        "of your own",
    ),
    Several(_preference),
    Check(
        "data.columns data.packing",
        lambda c: c.data.columns and c.data.packing,
        " has a number for each record, but data.packing {data.packing} joins records; set "
        "data.packing to false",
    ),
    Several(
        lambda c: [
            ("data.columns", f"data.columns: {name} is an input of models; rename the column")
            for name in c.data.columns
            if name in TAKEN
        ]
    ),
    Check(
        "data.columns train.loss",
        lambda c: c.data.columns and c.train.loss is None,
        " is for a loss of your own; set train.loss, or remove it",
    ),
    Check(
        "data.train_on data.split_turns",
        lambda c: c.data.train_on == "completion" and c.data.split_turns,
        " completion does not work with data.split_turns; set data.train_on to assistant",
    ),
    not_with(
        "data.train_on data.format",
        lambda c: c.data.train_on == "completion" and c.data.format in ("messages", "sharegpt"),
        "set data.train_on to assistant",
    ),
    Check(
        "data.source model.task",
        lambda c: c.data.source is None and not c.data.sources and c.model.task in PADDED_TASKS,
        " must be set for model.task {model.task}: the default source has only text",
    ),
    Several(_sources),
    Check(
        "train.epochs train.steps",
        lambda c: c.train.steps is not None and c.train.epochs is not None,
        "train.steps {train.steps} and train.epochs {train.epochs} both give the length of the schedule; set "
        "one of the two",
    ),
    Check(
        "train.steps train.epochs",
        lambda c: c.train.steps is None and c.train.epochs is None,
        " and train.epochs are both null; give one, the length of the schedule",
    ),
    Check(
        "train.warmup_ratio train.warmup_steps",
        lambda c: (
            c.train.warmup_ratio is not None
            and c.train.warmup_steps not in (None, 0, warmup_steps(c.train, c.train.steps or 0))
        ),
        " {train.warmup_ratio} and train.warmup_steps {train.warmup_steps} both give the length of the "
        "warm-up; "
        "set one of the two",
    ),
    *(
        both(epochs, steps, f" {{{epochs}}} and {steps} {{{steps}}} are both set; set one of the two")
        for epochs, steps in (
            ("train.eval_every_epochs", "train.eval_every"),
            ("checkpoint.every_epochs", "checkpoint.every_steps"),
        )
    ),
    Several(_schedule),
    Check(
        "train.stop_after train.steps",
        lambda c: c.train.steps is not None and (c.train.stop_after or 0) > c.train.steps,
        " {train.stop_after} exceeds train.steps {train.steps}, where the run ends; lower or remove it",
    ),
    Several(
        lambda c: [
            (
                "train.micro_batch_size train.global_batch_size",
                "train.global_batch_size {train.global_batch_size} is not a multiple of "
                "train.micro_batch_size "
                f"{micro}; use {largest_divisor(c.train.global_batch_size, micro)} or another divisor",
            )
            for micro in [c.train.micro_batch_size]
            if micro != "auto" and c.train.global_batch_size % micro
        ]
    ),
    Check(
        "train.optimizer strategy",
        lambda c: c.train.optimizer == "adafactor" and c.strategy in ZERO,
        " adafactor needs parameters with their shapes, but strategy {strategy} flattens them; use adamw, or "
        "strategy full_shard",
    ),
    *each(
        "train.label_smoothing train.z_loss",
        "train.loss",
        lambda c, key: c.get(key) and c.train.loss is not None,
        " {} changes the cross-entropy, which train.loss replaces; remove one of the two",
    ),
    *each(
        "train.eval_ema checkpoint.export_ema",
        "train.ema",
        lambda c, key: c.get(key) and c.train.ema is None,
        " needs an average of the weights; set train.ema, such as 0.999",
    ),
    Check(
        "compile_mode compile_backend",
        lambda c: c.compile_mode != "default" and c.compile_backend != "inductor",
        " {compile_mode} is inductor's, not compile_backend {compile_backend}'s; remove one of the two",
    ),
    Check(
        "model.attention precision",
        lambda c: "flash" in c.model.attention and c.precision in ("fp32", "tf32"),
        " {model.attention} computes in 16 bits, not in precision {precision}; use sdpa, or precision bf16",
    ),
    *each(
        "memory.offload_optimizer memory.offload_params",
        "memory.nvme_path",
        lambda c, key: c.get(key) == "nvme" and c.memory.nvme_path is None,
        " nvme needs memory.nvme_path, a folder on a local disk",
    ),
    # A DeepSpeed JSON, which only the backend reads, may enable offloading.
    Check(
        "memory.nvme_path",
        lambda c: c.memory.nvme_path is not None and not _on_nvme(c) and c.deepspeed.config is None,
        " is set but nothing is offloaded there; set memory.offload_optimizer or memory.offload_params "
        "to nvme, "
        "or remove it",
    ),
    not_with(
        "memory.loss_chunk_tokens strategy", lambda c: _chunked(c) and c.strategy in ZERO, "set it to auto"
    ),
    Check(
        "memory.offload_params strategy",
        lambda c: c.strategy in ("zero1", "zero2") and c.memory.offload_params != "none",
        " {memory.offload_params} needs sharded parameters, but strategy {strategy} replicates them; "
        "use zero3",
    ),
    Check(
        "memory.offload_optimizer strategy",
        lambda c: c.strategy in ("zero1", "zero2") and c.memory.offload_optimizer == "nvme",
        " nvme needs strategy zero3, not {strategy}; use cpu, or zero3",
    ),
    # The JSON's stage overrides a default strategy; only a strategy that was set can conflict.
    Check(
        "deepspeed.config strategy",
        lambda c: (
            c.deepspeed.config is not None
            and c.is_set("strategy")
            and c.backend != "xla"  # which ignores the JSON
            and c.strategy not in (*ZERO, "no_shard")
        ),
        " has no effect with strategy {strategy}; use zero1, zero2 or zero3 (no_shard for stage 0), or "
        "remove "
        "deepspeed.config",
    ),
    Several(_fsdp),
    Several(_together),
    Check(
        "fsdp.shard_group_size strategy",
        lambda c: c.fsdp.shard_group_size is not None and c.strategy not in HYBRID,
        " needs strategy hybrid_shard or hybrid_shard_zero2, not {strategy}",
    ),
    Check(
        "fsdp.auto_wrap_policy fsdp.min_num_params",
        lambda c: c.fsdp.auto_wrap_policy == "size_based_wrap" and c.fsdp.min_num_params is None,
        " needs fsdp.min_num_params where it is size_based_wrap",
    ),
    Check(
        "fsdp.min_num_params fsdp.auto_wrap_policy",
        lambda c: (
            c.fsdp.min_num_params is not None
            and c.fsdp.auto_wrap_policy in ("transformer_based_wrap", "no_wrap")
        ),
        " is for size_based_wrap, not for fsdp.auto_wrap_policy {fsdp.auto_wrap_policy}",
    ),
    Check(
        "fsdp.transformer_layer_cls_to_wrap fsdp.auto_wrap_policy",
        lambda c: (
            c.fsdp.transformer_layer_cls_to_wrap is not None
            and c.fsdp.auto_wrap_policy in ("size_based_wrap", "no_wrap")
        ),
        " is for transformer_based_wrap, not for fsdp.auto_wrap_policy {fsdp.auto_wrap_policy}",
    ),
    Several(
        lambda c: [
            ("log.trackers", f"log.trackers: {name} is named {times} times; name it once")
            for name, times in Counter(c.log.trackers).items()
            if times > 1
        ]
    ),
    *each(
        "checkpoint.resume_step checkpoint.resume_samples",
        "checkpoint.resume",
        lambda c, key: c.get(key) is not None and c.checkpoint.resume in ("auto", "never"),
        " {} is for another program's checkpoint, but checkpoint.resume is {checkpoint.resume}; remove it",
    ),
    Check(
        "hub.push checkpoint.export",
        lambda c: c.hub.push is not None and not c.checkpoint.export,
        " {hub.push} uploads what checkpoint.export writes; set that to true",
    ),
    *(
        no_effect(key, "hub.push", lambda c: c.hub.push is None, "set hub.push to end")
        for key in ("hub.repo", "hub.private")
    ),
    Several(
        lambda c: [
            (
                f"{key} data.eval_fraction",
                f"{key} needs an evaluation, but data.eval_fraction is 0; set data.eval",
            )
            for key in [_judging(c)]
            if key is not None and c.data.eval is None and c.data.eval_fraction == 0
        ]
    ),
    Check(
        "checkpoint.export_best checkpoint.keep_best",
        lambda c: c.checkpoint.export_best and c.checkpoint.keep_best is None,
        " needs a checkpoint that is kept; set checkpoint.keep_best to 1",
    ),
    *each(
        "checkpoint.best_metric checkpoint.best_mode",
        "",
        lambda c, key: given(c, key) and _judging(c) is None,
        " has no effect without checkpoint.keep_best or train.early_stopping_patience; set one",
    ),
    no_effect(
        "train.early_stopping_threshold",
        "train.early_stopping_patience",
        lambda c: c.train.early_stopping_patience is None,
        "set it",
    ),
    Check(
        "train.early_stopping_patience train.eval_every",
        lambda c: (
            c.train.early_stopping_patience is not None
            and c.train.eval_every is None
            and c.train.eval_every_epochs is None
        ),
        " needs evaluations during training; set train.eval_every",
    ),
)
"""In the order in which they are asked; rows of the backend follow."""
