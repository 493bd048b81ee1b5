"""Dependencies between settings: derived defaults, and conflicts.

Rules check values. They ask whether the user set a key only if a default must yield, so a resolved config
with every key passes the same rules as the short file from which it came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from converters.storage.object_store import is_url
from converters.storage.store_errors import redact
from portable.config.sources import mistakes, training_key, training_sources
from portable.config.suggest import did_you_mean
from portable.optim.schedule import (
    ZERO_ONLY,
    build_schedule,
    own_params,
    schedule_class,
    too_long_a_warmup,
    warmup_steps,
)
from portable.registry import BACKENDS, backend_package

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config.run_config import RunConfig
    from portable.config.sections import TrainConfig

ZERO = ("zero1", "zero2", "zero3")
HYBRID = ("hybrid_shard", "hybrid_shard_zero2")
TAKEN = (
    "labels",
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "decoder_input_ids",
    "position_ids",
    "source",
)
PADDED_TASKS = ("seq2seq-lm", "sequence-classification")


class ConflictError(ValueError):
    """Conflicting settings. ``keys`` are their dotted names, with the one to change first."""

    def __init__(self, keys: tuple[str, ...], message: str) -> None:
        super().__init__(message)
        self.keys = keys


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most``."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)


def derived(config: RunConfig) -> dict[str, Any]:
    """Defaults that depend on other settings, by dotted key, for keys that the user did not set."""
    model, train, checkpoint = config.model, config.train, config.checkpoint
    found: dict[str, Any] = {}
    if model.name_or_path is not None:
        found["model.config"] = None
    if model.task in PADDED_TASKS or config.data.format in ("preference", "samples"):
        found["data.packing"] = False
    elif config.data.format not in ("auto", "text") and model.task == "causal-lm":
        found["data.packing"] = "documents"
    if config.data.eval is not None or (config.data.stream and not config.data.sources):
        found["data.eval_fraction"] = 0.0
    if checkpoint.export_best:
        found["checkpoint.keep_best"] = 1
    if train.epochs is not None:
        found["train.steps"] = None
    if train.eval_every_epochs is not None:
        found["train.eval_every"] = None
    if checkpoint.every_epochs is not None:
        found["checkpoint.every_steps"] = None
    steps = train.steps if train.epochs is None or config.is_set("train.steps") else None
    if steps is not None:  # with epochs, it depends on the data
        found["train.warmup_steps"] = warmup_steps(train, steps)
    if train.micro_batch_size != "auto":
        found["train.micro_batch_size"] = largest_divisor(train.global_batch_size, train.micro_batch_size)
    default = () if train.warmup_steps is not None else ("train.warmup_steps",)  # also where null is written
    found = {key: value for key, value in found.items() if key in default or not config.is_set(key)}
    if config.backend in BACKENDS:
        found |= backend_package(config.backend).defaults(config)
    return found


def check(config: RunConfig) -> None:
    """Raise the first ``ConflictError`` among the settings."""
    for rules in (
        _model,
        _adapter,
        _data,
        _train,
        _loss,
        _average,
        _machine,
        _memory,
        _deepspeed,
        _fsdp,
        _context_parallel,
        _checkpoint,
        _evaluation,
    ):
        for conflict in rules(config):
            raise conflict


def _model(config: RunConfig) -> Iterator[ConflictError]:
    model = config.model
    for key, name in (("model.name_or_path", model.name_or_path), ("data.tokenizer", config.data.tokenizer)):
        if is_url(name):
            yield ConflictError(
                (key,),
                f"{key} must be a hub id or a local folder, not a URL; copy {redact(str(name))} here",
            )
    named = model.name_or_path is not None
    if named and model.config is not None and "model_type" in model.config:
        yield ConflictError(
            ("model.config", "model.name_or_path"),
            "model.config and model.name_or_path are both set; set one of the two, or leave model_type out "
            "of model.config to change keys of the named model's config",
        )
    if model.name_or_path is None and model.config is None:
        yield ConflictError(
            ("model.config", "model.name_or_path"),
            "model.config and model.name_or_path are both null; set one of the two",
        )
    if not named and model.config is not None and not isinstance(model.config.get("model_type"), str):
        yield ConflictError(
            ("model.config",),
            "model.config.model_type must name a transformers model type, such as llama or bert",
        )


def _adapter(config: RunConfig) -> Iterator[ConflictError]:
    adapter, fields = config.adapter, type(config.adapter).model_fields
    given = [name for name, field in fields.items() if getattr(adapter, name) != field.default]
    from_file = adapter.name_or_path is not None or adapter.config is not None
    if adapter.name_or_path is not None and adapter.config is not None:
        yield ConflictError(
            ("adapter.config", "adapter.name_or_path"),
            "adapter.config and adapter.name_or_path are both set, and an adapter has a config of its own; "
            "remove adapter.config",
        )
    if adapter.type is None and not from_file and config.checkpoint.export == "merged":
        yield ConflictError(
            ("checkpoint.export", "adapter.type"),
            "checkpoint.export merged has no effect without adapter.type; set it to true",
        )
    if adapter.type is not None and config.checkpoint.export == "merged" and config.model.from_scratch:
        yield ConflictError(
            ("checkpoint.export", "model.name_or_path"),
            "checkpoint.export merged needs a base model with files, model.name_or_path; set it to true",
        )
    if config.checkpoint.export == "like_base" and config.model.from_scratch:
        yield ConflictError(
            ("checkpoint.export", "model.name_or_path"),
            "checkpoint.export like_base needs a quantized base model, model.name_or_path; set it to true",
        )
    if not given:
        return
    if adapter.type is None and not from_file:
        yield ConflictError(
            (f"adapter.{given[0]}", "adapter.type"),
            f"adapter.{given[0]} has no effect without adapter.type; set adapter.type to lora",
        )
    if adapter.type == "ia3":
        taken = ("type", "target_modules", "modules_to_save", "base", "name_or_path", "config")
        for name in given:
            if name not in taken:
                yield ConflictError(
                    (f"adapter.{name}", "adapter.type"),
                    f"adapter.{name} is for lora, not for adapter.type ia3; remove it",
                )
    if not adapter.target_modules and not adapter.target_parameters:
        yield ConflictError(
            ("adapter.target_modules", "adapter.target_parameters"),
            "adapter.target_modules is empty, which goes beside adapter.target_parameters only; name modules",
        )
    if config.train.freezes:
        yield ConflictError(
            ("train.trainable", "adapter.type"),
            "train.trainable and train.frozen do not go with an adapter, beside which all is frozen; use "
            "adapter.modules_to_save and adapter.layers",
        )
    if adapter.base in ("nf4", "int8"):
        if config.strategy in ZERO:
            yield ConflictError(
                ("adapter.base", "strategy"),
                f"adapter.base {adapter.base} does not work with DeepSpeed's strategy {config.strategy}, "
                "which casts weights; use full_shard",
            )
        for key in ("adapter.use_dora", "compile"):
            if config.get(key):
                yield ConflictError(
                    (key, "adapter.base"),
                    f"{key} does not work with adapter.base {adapter.base}; set it to false, or "
                    "adapter.base to auto",
                )
    if adapter.trainable_token_indices is not None and config.strategy == "zero3":
        yield ConflictError(
            ("adapter.trainable_token_indices", "strategy"),
            "adapter.trainable_token_indices does not work with strategy zero3, whose tables are "
            "not whole where rows are put into them; use full_shard",
        )
    if config.strategy in ZERO and adapter.base == "fp32" and config.precision in ("bf16", "fp16"):
        yield ConflictError(
            ("adapter.base", "strategy"),
            f"adapter.base fp32 does not work with strategy {config.strategy}, which keeps frozen weights in "
            "the compute type; use full_shard",
        )


def _data(config: RunConfig) -> Iterator[ConflictError]:
    data, task = config.data, config.model.task
    packing = "true" if data.packing is True else data.packing
    if packing and task in PADDED_TASKS:
        yield ConflictError(
            ("data.packing", "model.task"),
            f"data.packing {packing} does not work with model.task {task}; set data.packing to false",
        )
    if packing == "documents" and task == "masked-lm":
        yield ConflictError(
            ("data.packing", "model.task"),
            "data.packing documents is for model.task causal-lm, not masked-lm; set data.packing to false",
        )
    if data.vocab_size is not None and data.tokenizer is not None:
        yield ConflictError(
            ("data.vocab_size", "data.tokenizer"),
            "data.vocab_size is for a tokenizer trained on the source, but data.tokenizer is set; remove one "
            "of the two",
        )
    for name, only in (
        ("text_pair_field", "sequence-classification"),
        ("source_prefix", "seq2seq-lm"),
        ("target_seq_len", "seq2seq-lm"),
    ):
        if getattr(data, name) and task != only:
            yield ConflictError(
                (f"data.{name}", "model.task"),
                f"data.{name} is for model.task {only}, not {task}; remove it",
            )
    chats = ("chat_template", "chat_template_kwargs", "train_on", "roles_to_train", "split_turns")
    for name in ("format", *chats, "truncation"):
        value = getattr(data, name)
        if task != "causal-lm" and value and value not in ("auto", "text", "end"):
            yield ConflictError(
                (f"data.{name}", "model.task"),
                f"data.{name} is for model.task causal-lm, not {task}; remove it",
            )
        if data.format == "text" and name in chats and value:
            yield ConflictError(
                (f"data.{name}", "data.format"),
                f"data.{name} is for conversations, not for data.format text; remove one of the two",
            )
    if data.truncation != "end" and data.packing is True and data.format != "auto":
        yield ConflictError(
            ("data.truncation", "data.packing"),
            f"data.truncation {data.truncation} has no effect with data.packing true, which cuts nothing; "
            "remove one of the two",
        )
    if data.format == "preference":
        yield from _preference(config)
    if data.columns:
        if packing:
            yield ConflictError(
                ("data.columns", "data.packing"),
                f"data.columns has numbers of records, but data.packing {packing} makes other samples of "
                "them; set data.packing to false",
            )
        if taken := [name for name in data.columns if name in TAKEN]:
            yield ConflictError(
                ("data.columns",), f"data.columns: {taken[0]} is an input of models; rename the column"
            )
        if config.train.loss is None:
            yield ConflictError(
                ("data.columns", "train.loss"),
                "data.columns is for a loss of your own; set train.loss, or remove it",
            )
    if data.train_on == "completion" and (data.split_turns or data.format in ("messages", "sharegpt")):
        other = "data.split_turns" if data.split_turns else f"data.format {data.format}"
        yield ConflictError(
            ("data.train_on", "data.split_turns" if data.split_turns else "data.format"),
            f"data.train_on completion does not work with {other}; set data.train_on to assistant",
        )
    if data.source is None and not data.sources and task in PADDED_TASKS:
        yield ConflictError(
            ("data.source", "model.task"),
            f"data.source must be set for model.task {task}: the default source has only text",
        )

    for key, mistake in mistakes(data):
        yield ConflictError((key, "data.eval", "data.sources"), mistake)
    sources = {training_key(name): one.settings for name, one in training_sources(data).items()}
    streams = {key: one for key, one in sources.items() if one.stream}
    if streams:
        yield from _streams(config, next(iter(streams)))
    for key, one in sources.items():
        if one.roles_to_train and one.train_on not in (None, "assistant"):
            yield ConflictError(
                (f"{key}.train_on", f"{key}.roles_to_train"),
                f"{key}.train_on {one.train_on} does not work with {key}.roles_to_train; remove one of "
                "the two",
            )
    for key, one in streams.items():
        if one.max_samples is not None:
            yield ConflictError(
                (f"{key}.max_samples", f"{key}.stream"),
                f"{key}.max_samples does not work with {key}.stream; name fewer files, or stop earlier",
            )


def _preference(config: RunConfig) -> Iterator[ConflictError]:
    data = config.data
    if config.train.loss is None:
        yield ConflictError(
            ("train.loss", "data.format"),
            "data.format preference needs a loss of pairs; set train.loss to dpo, ipo, simpo, orpo or one of "
            "your own",
        )
    for name, used in (
        ("packing", data.packing),
        ("split_turns", data.split_turns),
        ("train_on", data.train_on not in (None, "completion")),
        ("roles_to_train", data.roles_to_train),
    ):
        if used:
            yield ConflictError(
                (f"data.{name}", "data.format"),
                f"data.{name} {getattr(data, name)} does not work with data.format preference; remove it",
            )


def _streams(config: RunConfig, key: str) -> Iterator[ConflictError]:
    if config.model.task != "causal-lm":
        yield ConflictError(
            (f"{key}.stream", "model.task"),
            f"{key}.stream works with model.task causal-lm alone",
        )
    for name in ("train.epochs", "train.eval_every_epochs", "checkpoint.every_epochs"):
        if config.get(name) is not None:
            yield ConflictError(
                (name, f"{key}.stream"),
                f"{name} needs the length of the data, which {key}.stream does not know; count in steps",
            )
    if config.data.eval_fraction and not config.data.sources:
        yield ConflictError(
            ("data.eval_fraction", "data.stream"),
            "data.eval_fraction holds nothing out of a stream (data.stream); set it to 0, and data.eval",
        )


def _train(config: RunConfig) -> Iterator[ConflictError]:
    train = config.train
    if train.steps is not None and train.epochs is not None:
        yield ConflictError(
            ("train.epochs", "train.steps"),
            f"train.steps {train.steps} and train.epochs {train.epochs:g} both give the length of the "
            "schedule; set one of the two",
        )
    if train.steps is None and train.epochs is None:
        yield ConflictError(
            ("train.steps", "train.epochs"),
            "train.steps and train.epochs are both null; give one, the length of the schedule",
        )
    if train.warmup_ratio is not None and train.warmup_steps not in (
        None,
        0,
        warmup_steps(train, train.steps or 0),
    ):
        yield ConflictError(
            ("train.warmup_ratio", "train.warmup_steps"),
            f"train.warmup_ratio {train.warmup_ratio:g} and train.warmup_steps {train.warmup_steps} both "
            "give the length of the warm-up; set one of the two",
        )
    for epochs, steps in (
        ("train.eval_every_epochs", "train.eval_every"),
        ("checkpoint.every_epochs", "checkpoint.every_steps"),
    ):
        if config.get(epochs) is not None and config.get(steps) is not None:
            yield ConflictError(
                (epochs, steps),
                f"{epochs} {config.get(epochs):g} and {steps} {config.get(steps)} are both set; set one of "
                "the two",
            )
    if train.steps is not None and (reason := too_long_a_warmup(train, train.steps)) is not None:
        yield ConflictError(("train.warmup_steps", "train.steps"), reason)
    yield from _schedule(train, config.strategy)
    if train.steps is not None and train.stop_after is not None and train.stop_after > train.steps:
        yield ConflictError(
            ("train.stop_after", "train.steps"),
            f"train.stop_after {train.stop_after} exceeds train.steps {train.steps}, where the run ends; "
            "lower or remove it",
        )
    micro = train.micro_batch_size
    if micro != "auto" and train.global_batch_size % micro:
        yield ConflictError(
            ("train.micro_batch_size", "train.global_batch_size"),
            f"train.global_batch_size {train.global_batch_size} is not a multiple of train.micro_batch_size "
            f"{micro}; use {largest_divisor(train.global_batch_size, micro)} or another divisor",
        )
    if train.optimizer == "adafactor" and config.strategy in ZERO:
        yield ConflictError(
            ("train.optimizer", "strategy"),
            f"train.optimizer adafactor needs parameters with their shapes, but strategy {config.strategy} "
            "flattens them; use adamw, or strategy full_shard",
        )


def _average(config: RunConfig) -> Iterator[ConflictError]:
    for key in ("train.eval_ema", "checkpoint.export_ema"):
        if config.get(key) and config.train.ema is None:
            yield ConflictError(
                (key, "train.ema"), f"{key} needs an average of the weights; set train.ema, such as 0.999"
            )


def _loss(config: RunConfig) -> Iterator[ConflictError]:
    train = config.train
    for name in ("label_smoothing", "z_loss"):
        if getattr(train, name) and train.loss is not None:
            yield ConflictError(
                (f"train.{name}", "train.loss"),
                f"train.{name} {getattr(train, name):g} changes the cross-entropy, which train.loss "
                "replaces; remove one of the two",
            )


def _schedule(train: TrainConfig, strategy: str) -> Iterator[ConflictError]:
    kind, params = train.schedule, own_params(train.schedule)
    around = ("train.schedule_params", "train.schedule")
    if kind in ZERO_ONLY and strategy not in ZERO:
        yield ConflictError(
            ("train.schedule", "strategy"),
            f"train.schedule: {kind} needs DeepSpeed; use strategy zero1, zero2 or zero3, or cosine, or a "
            "function of your own",
        )
    for name in train.schedule_params:
        if name not in params:
            hint = did_you_mean(name, params) or f"; {kind} takes {', '.join(params) or 'none'}"
            yield ConflictError(around, f"unknown key train.schedule_params.{name}{hint}")
    for name in ("warmup_ratio", "warmup_steps"):
        if getattr(train, name) and not schedule_class(kind).warms_up:
            yield ConflictError(
                (f"train.{name}", "train.schedule"),
                f"train.{name} {getattr(train, name):g} has no effect with train.schedule {kind}, which "
                "has no warm-up; set it to 0",
            )
    try:
        schedule = build_schedule(train, train.steps or 1)
    except ValueError as error:
        yield ConflictError(around, str(error))
        return
    if getattr(schedule, "cycle_momentum", False) and train.optimizer not in ("adamw", "muon"):
        yield ConflictError(
            around,
            f"train.schedule_params.cycle_momentum changes train.betas, which optimizer {train.optimizer} "
            "does not use; set it to false",
        )


def _machine(config: RunConfig) -> Iterator[ConflictError]:
    if config.compile_mode != "default" and config.compile_backend != "inductor":
        yield ConflictError(
            ("compile_mode", "compile_backend"),
            f"compile_mode {config.compile_mode} is inductor's, not compile_backend "
            f"{config.compile_backend}'s; remove one of the two",
        )
    if config.backend in BACKENDS:  # not auto
        yield from backend_package(config.backend).conflicts(config)
    if config.model.attention == "flash_attention_2" and config.precision in ("fp32", "tf32"):
        yield ConflictError(
            ("model.attention", "precision"),
            f"model.attention flash_attention_2 computes in 16 bits, not in precision {config.precision}; "
            "use sdpa, or precision bf16",
        )


def nvidia_only(config: RunConfig) -> Iterator[ConflictError]:
    """Conflicts for settings that only NVIDIA GPUs support, for other backends."""
    if config.precision == "tf32":
        yield ConflictError(
            ("precision", "backend"),
            f"precision tf32 is a mode of NVIDIA GPUs, not of backend {config.backend}; use fp32 or bf16",
        )
    if config.model.attention == "flash_attention_2":
        yield ConflictError(
            ("model.attention", "backend"),
            f"model.attention flash_attention_2 needs backend cuda, not {config.backend}; use sdpa",
        )


def _memory(config: RunConfig) -> Iterator[ConflictError]:
    memory, strategy = config.memory, config.strategy
    on_nvme = [f"memory.{n}" for n in ("offload_optimizer", "offload_params") if getattr(memory, n) == "nvme"]
    if on_nvme and memory.nvme_path is None:
        yield ConflictError(
            (on_nvme[0], "memory.nvme_path"),
            f"{on_nvme[0]} nvme needs memory.nvme_path, a folder on a local disk",
        )
    # A DeepSpeed JSON, which only the backend reads, may enable offloading.
    if memory.nvme_path is not None and not on_nvme and config.deepspeed.config is None:
        yield ConflictError(
            ("memory.nvme_path",),
            "memory.nvme_path is set but nothing is offloaded there; set memory.offload_optimizer or "
            "memory.offload_params to nvme, or remove it",
        )
    chunk = memory.loss_chunk_tokens
    if isinstance(chunk, int) and chunk > 0 and strategy in ZERO:
        yield ConflictError(
            ("memory.loss_chunk_tokens", "strategy"),
            f"memory.loss_chunk_tokens {chunk} does not work with strategy {strategy}; set it to auto",
        )
    if strategy in ("zero1", "zero2"):
        if memory.offload_params != "none":
            yield ConflictError(
                ("memory.offload_params", "strategy"),
                f"memory.offload_params {memory.offload_params} needs sharded parameters, but strategy "
                f"{strategy} replicates them; use zero3",
            )
        if memory.offload_optimizer == "nvme":
            yield ConflictError(
                ("memory.offload_optimizer", "strategy"),
                f"memory.offload_optimizer nvme needs strategy zero3, not {strategy}; use cpu, or zero3",
            )


def _deepspeed(config: RunConfig) -> Iterator[ConflictError]:
    # The JSON's stage overrides a default strategy; only a strategy that was set can conflict.
    chosen = config.is_set("strategy") and config.backend != "xla"  # which ignores the JSON
    if config.deepspeed.config is not None and chosen and config.strategy not in (*ZERO, "no_shard"):
        yield ConflictError(
            ("deepspeed.config", "strategy"),
            f"deepspeed.config has no effect with strategy {config.strategy}; use zero1, zero2 or zero3 "
            "(no_shard for stage 0), or remove deepspeed.config",
        )


def _fsdp(config: RunConfig) -> Iterator[ConflictError]:
    fsdp, strategy = config.fsdp, config.strategy
    given = [f"fsdp.{name}" for name, value in fsdp if value is not None]
    if given and strategy in ZERO:
        yield ConflictError(
            (given[0], "strategy"),
            f"{given[0]} has no effect with DeepSpeed's strategy {strategy}; remove it, or use full_shard",
        )
    if fsdp.shard_group_size is not None and strategy not in HYBRID:
        yield ConflictError(
            ("fsdp.shard_group_size", "strategy"),
            f"fsdp.shard_group_size needs strategy hybrid_shard or hybrid_shard_zero2, not {strategy}",
        )
    yield from _wrap_policy(config)


def _context_parallel(config: RunConfig) -> Iterator[ConflictError]:
    size, key = config.context_parallel_size, "context_parallel_size"
    if size == 1:
        return
    if config.data.seq_len % size:
        yield ConflictError(
            ("data.seq_len", key),
            f"data.seq_len {config.data.seq_len} cannot be divided by {key} {size}; use a multiple of {size}",
        )
    own = [name for name in config.train.metrics or () if ":" in name]
    for name, value, allowed in (
        ("backend", config.backend, config.backend != "xla"),
        ("model.task", config.model.task, config.model.task == "causal-lm"),
        ("data.format", config.data.format, config.data.format != "samples"),
        ("train.loss", config.train.loss, config.train.loss is None),
        ("train.metrics", " ".join(own), not own),
        ("train.neftune_noise_alpha", config.train.neftune_noise_alpha, not config.train.neftune_noise_alpha),
        ("train.micro_batch_size", "auto", config.train.micro_batch_size != "auto"),
        ("deepspeed.config", config.deepspeed.config, config.deepspeed.config is None),
    ):
        if not allowed:
            yield ConflictError((name, key), f"{name} {value} needs whole sequences; set {key} to 1")


def _wrap_policy(config: RunConfig) -> Iterator[ConflictError]:
    fsdp = config.fsdp
    policy = fsdp.auto_wrap_policy
    if policy == "size_based_wrap" and fsdp.min_num_params is None:
        yield ConflictError(
            ("fsdp.auto_wrap_policy",),
            "fsdp.auto_wrap_policy size_based_wrap needs fsdp.min_num_params",
        )
    if fsdp.min_num_params is not None and policy in ("transformer_based_wrap", "no_wrap"):
        yield ConflictError(
            ("fsdp.min_num_params", "fsdp.auto_wrap_policy"),
            f"fsdp.min_num_params is for size_based_wrap, not for fsdp.auto_wrap_policy {policy}",
        )
    if fsdp.transformer_layer_cls_to_wrap is not None and policy in ("size_based_wrap", "no_wrap"):
        yield ConflictError(
            ("fsdp.transformer_layer_cls_to_wrap", "fsdp.auto_wrap_policy"),
            "fsdp.transformer_layer_cls_to_wrap is for transformer_based_wrap, not for fsdp.auto_wrap_policy "
            f"{policy}",
        )


def _checkpoint(config: RunConfig) -> Iterator[ConflictError]:
    checkpoint = config.checkpoint
    for name in ("resume_step", "resume_samples"):
        value = getattr(checkpoint, name)
        if value is not None and checkpoint.resume in ("auto", "never"):
            yield ConflictError(
                (f"checkpoint.{name}", "checkpoint.resume"),
                f"checkpoint.{name} {value} is for another program's checkpoint, but checkpoint.resume is "
                f"{checkpoint.resume}; remove it",
            )
    if config.hub.push is not None and not checkpoint.export:
        yield ConflictError(
            ("hub.push", "checkpoint.export"),
            f"hub.push {config.hub.push} uploads what checkpoint.export writes; set that to true",
        )
    for key, given in (("hub.repo", config.hub.repo is not None), ("hub.private", not config.hub.private)):
        if config.hub.push is None and given:
            yield ConflictError(
                (key, "hub.push"), f"{key} has no effect without hub.push; set hub.push to end"
            )


def _evaluation(config: RunConfig) -> Iterator[ConflictError]:
    train, checkpoint = config.train, config.checkpoint
    judging = [
        key
        for key, used in (
            ("train.early_stopping_patience", train.early_stopping_patience is not None),
            ("checkpoint.export_best", checkpoint.export_best),
            ("checkpoint.keep_best", checkpoint.keep_best is not None),
        )
        if used
    ]
    if judging and config.data.eval is None and config.data.eval_fraction == 0:
        yield ConflictError(
            (judging[0], "data.eval_fraction"),
            f"{judging[0]} needs an evaluation, but data.eval_fraction is 0; set data.eval",
        )
    if checkpoint.export_best and checkpoint.keep_best is None:
        yield ConflictError(
            ("checkpoint.keep_best", "checkpoint.export_best"),
            "checkpoint.export_best needs a checkpoint that is kept; set checkpoint.keep_best to 1",
        )
    for key, used in (
        ("checkpoint.best_metric", checkpoint.best_metric is not None),
        ("checkpoint.best_mode", checkpoint.best_mode != "auto"),
    ):
        if used and not judging:
            yield ConflictError(
                (key,),
                f"{key} has no effect without checkpoint.keep_best or train.early_stopping_patience; set one",
            )
    if train.early_stopping_threshold > 0 and train.early_stopping_patience is None:
        yield ConflictError(
            ("train.early_stopping_threshold",),
            "train.early_stopping_threshold has no effect without train.early_stopping_patience; set it",
        )
    if (
        train.early_stopping_patience is not None
        and train.eval_every is None
        and train.eval_every_epochs is None
    ):
        yield ConflictError(
            ("train.early_stopping_patience", "train.eval_every"),
            "train.early_stopping_patience needs evaluations during training; set train.eval_every",
        )
