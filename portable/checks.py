"""Settings that do not go together.

Each function gives the mistakes of one part of the config, as text. Backends and engines have such functions
of their own (:meth:`portable.registry.BackendPackage.mistakes`). A resolved config with every key passes as
the short file does from which it came: values are read, and not whether the user set them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from converters.storage.path_or_url import is_url
from portable.config import keys
from portable.config.derived import HYBRID, PADDED_TASKS, ZERO, largest_divisor, warms_up, warmup_steps
from portable.config.sources import mistakes_of_sources, training_key, training_sources
from portable.config.suggest import did_you_mean
from portable.errors import UserError, one_line
from portable.optim.schedule import ZERO_ONLY, build_schedule, schedule_params, too_long_a_warmup
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
    for part in (_model, _adapter, _data, _sources, _train, _schedule, _batch, _memory, _together, _output):
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
    return (
        f"{value:g}"
        if isinstance(value, float)
        else str(value).lower()
        if value in (True, False)
        else str(value)
    )


def nvidia_only(c: RunConfig, *, late: bool) -> Mistakes:
    """Settings that only NVIDIA GPUs support, for other backends."""
    if c.precision == "tf32":
        yield "precision tf32 is a mode of NVIDIA GPUs, not of backend {backend}; use fp32 or bf16"
    if c.model.attention not in ("sdpa", "eager"):
        yield "model.attention {model.attention} needs backend cuda, not {backend}; use sdpa"
    if late and c.log.memory_snapshot:
        yield "log.memory_snapshot: torch records the allocations of GPUs only; set it to false"


def no_zero(c: RunConfig) -> Mistakes:
    """ZeRO, for backends that DeepSpeed does not run on."""
    if c.strategy in ZERO:
        yield "strategy {strategy} is DeepSpeed's, which does not run on backend {backend}; use full_shard"


def _given(c: RunConfig, key: str) -> bool:
    """Whether ``key`` has another value than its default."""
    return bool(c.get(key) != keys.settings(type(c))[key].default)


def _model(c: RunConfig) -> Mistakes:
    config, path = c.model.config, c.model.name_or_path
    for key in ("model.name_or_path", "data.tokenizer"):
        if is_url(c.get(key)):
            yield f"{key} must be a hub id or a local folder, not a URL; copy it here"
    if path is not None and "model_type" in (config or {}):
        remedy = "or leave model_type out of model.config to change keys of the named model's config"
        yield f"model.config and model.name_or_path are both set; set one of the two, {remedy}"
    if path is None and config is None:
        yield "model.config and model.name_or_path are both null; set one of the two"
    if path is None and not isinstance((config or {}).get("model_type"), str):
        yield "model.config.model_type must name a transformers model type, such as llama or bert"


def _adapter(c: RunConfig) -> Mistakes:
    adapter, export = c.adapter, c.checkpoint.export
    if adapter.config is not None and adapter.name_or_path is not None:
        reason = "are both set, and an adapter has a config of its own; remove adapter.config"
        yield f"adapter.config and adapter.name_or_path {reason}"
    of_type = adapter.type is not None or adapter.name_or_path is not None or adapter.config is not None
    if export == "merged" and not of_type:
        yield "checkpoint.export merged has no effect without adapter.type; set it to true"
    if export == "merged" and adapter.type is not None and c.model.from_scratch:
        yield "checkpoint.export merged needs a base model with files, model.name_or_path; set it to true"
    if export == "like_base" and c.model.from_scratch:
        yield "checkpoint.export like_base needs a quantized base model, model.name_or_path; set it to true"
    names = [name for name in type(adapter).model_fields if _given(c, f"adapter.{name}")]
    if names and not of_type:
        yield f"adapter.{names[0]} has no effect without adapter.type; set adapter.type to lora"
    for name in names:
        of_all = ("type", "target_modules", "modules_to_save", "base", "name_or_path", "config")
        if adapter.type == "ia3" and name not in of_all:
            yield f"adapter.{name} is for lora, not for adapter.type ia3; remove it"
    if not adapter.target_modules and not adapter.target_parameters:
        yield "adapter.target_modules is empty, which only adapter.target_parameters allows; name modules"
    if names and c.train.freezes:
        reason = "do not work with an adapter, which freezes all other weights; use adapter.modules_to_save"
        yield f"train.trainable and train.frozen {reason} and adapter.layers"
    quantized = adapter.base in ("nf4", "int8")
    if quantized and c.strategy in ZERO:
        reason = "does not work with DeepSpeed's strategy {strategy}, which casts weights; use full_shard"
        yield f"adapter.base {{adapter.base}} {reason}"
    for key in ("adapter.use_dora", "compile"):
        if quantized and c.get(key):
            remedy = "set it to false, or adapter.base to auto"
            yield f"{key} does not work with adapter.base {{adapter.base}}; {remedy}"
    if adapter.trainable_token_indices is not None and c.strategy == "zero3":
        reason = "under which no rank has the whole table of embeddings; use full_shard"
        yield f"adapter.trainable_token_indices does not work with strategy zero3, {reason}"
    if adapter.base == "fp32" and c.strategy in ZERO and c.precision in ("bf16", "fp16"):
        reason = "which keeps frozen weights in the compute type; use full_shard"
        yield f"adapter.base fp32 does not work with strategy {{strategy}}, {reason}"


def _data(c: RunConfig) -> Mistakes:
    data, task = c.data, c.model.task
    if data.packing and task in PADDED_TASKS:
        reason = "does not work with model.task {model.task}; set data.packing to false"
        yield f"data.packing {{data.packing}} {reason}"
    if data.packing == "documents" and task == "masked-lm":
        yield "data.packing documents is for model.task causal-lm, not masked-lm; set data.packing to false"
    if data.vocab_size is not None and data.tokenizer is not None:
        reason = "is for a tokenizer trained on the source, but data.tokenizer is set; remove one of the two"
        yield f"data.vocab_size {reason}"
    for key, of_task in (
        ("data.text_pair_field", "sequence-classification"),
        ("data.source_prefix", "seq2seq-lm"),
        ("data.target_seq_len", "seq2seq-lm"),
    ):
        if _given(c, key) and task != of_task:
            yield f"{key} is for model.task {of_task}, not {{model.task}}; remove it"
    chats = ("chat_template", "chat_template_kwargs", "train_on", "roles_to_train", "split_turns")
    for name in ("format", *chats, "truncation"):
        key, value = f"data.{name}", getattr(data, name)
        if task != "causal-lm" and value and value not in ("auto", "text", "end"):
            yield f"{key} is for model.task causal-lm, not {{model.task}}; remove it"
        if data.format == "text" and name in chats and value:
            yield f"{key} is for conversations, not for data.format text; remove one of the two"
    if data.truncation != "end" and data.packing is True and data.format != "auto":
        reason = "has no effect with data.packing true, which cuts nothing; remove one of the two"
        yield f"data.truncation {{data.truncation}} {reason}"
    pairs = data.format == "preference"
    if pairs and c.train.loss is None:
        remedy = "set train.loss to dpo, ipo, simpo, orpo or one of your own"
        yield f"data.format preference needs a loss of pairs; {remedy}"
    used = {"train_on": data.train_on not in (None, "completion")}
    for name in ("packing", "split_turns", "train_on", "roles_to_train"):
        if pairs and used.get(name, getattr(data, name)):
            yield f"data.{name} {getattr(data, name)} does not work with data.format preference; remove it"
    if data.columns and data.packing:
        reason = "has a number for each record, but data.packing {data.packing} joins records; set "
        yield f"data.columns {reason}data.packing to false"
    for name in data.columns:
        if name in TAKEN:
            yield f"data.columns: {name} is an input of models; rename the column"
    if data.columns and c.train.loss is None:
        yield "data.columns is for a loss of your own; set train.loss, or remove it"
    if data.train_on == "completion" and data.split_turns:
        yield "data.train_on completion does not work with data.split_turns; set data.train_on to assistant"
    if data.train_on == "completion" and data.format in ("messages", "sharegpt"):
        reason = "does not work with data.format {data.format}; set data.train_on to assistant"
        yield f"data.train_on completion {reason}"
    if data.source is None and not data.sources and task in PADDED_TASKS:
        yield "data.source must be set for model.task {model.task}: the default source has only text"


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


def _train(c: RunConfig) -> Mistakes:
    train = c.train
    if train.steps is not None and train.epochs is not None:
        reason = "both give the length of the schedule; set one of the two"
        yield f"train.epochs {{train.epochs}} and train.steps {{train.steps}} {reason}"
    if train.steps is None and train.epochs is None:
        yield "train.steps and train.epochs are both null; give one, the length of the schedule"
    of_ratio = (None, 0, warmup_steps(train, train.steps or 0))
    if train.warmup_ratio is not None and train.warmup_steps not in of_ratio:
        values = "{train.warmup_ratio} and train.warmup_steps {train.warmup_steps}"
        yield f"train.warmup_ratio {values} both give the length of the warm-up; set one of the two"
    for epochs, steps in (
        ("train.eval_every_epochs", "train.eval_every"),
        ("checkpoint.every_epochs", "checkpoint.every_steps"),
    ):
        if c.get(epochs) is not None and c.get(steps) is not None:
            yield f"{epochs} {{{epochs}}} and {steps} {{{steps}}} are both set; set one of the two"


def _schedule(c: RunConfig) -> Mistakes:
    train, kind = c.train, c.train.schedule
    params = schedule_params(kind)
    if train.steps is not None and (reason := too_long_a_warmup(train, train.steps)) is not None:
        yield reason
    if kind in ZERO_ONLY and c.strategy not in ZERO:
        reason = "needs DeepSpeed; use strategy zero1, zero2 or zero3, or cosine, or a function of your own"
        yield f"train.schedule: {kind} {reason}"
    for name in train.schedule_params:
        if name not in params:
            hint = did_you_mean(name, params) or f"; {kind} takes {', '.join(params) or 'none'}"
            yield f"unknown key train.schedule_params.{name}{hint}"
    for name in ("train.warmup_ratio", "train.warmup_steps"):
        if c.get(name) and not warms_up(kind):
            reason = "has no effect with train.schedule {train.schedule}, which has no warm-up; set it to 0"
            yield f"{name} {{{name}}} {reason}"
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
    for key in ("train.label_smoothing", "train.z_loss"):
        if c.get(key) and train.loss is not None:
            reason = "changes the cross-entropy, which train.loss replaces; remove one of the two"
            yield f"{key} {{{key}}} {reason}"
    for key in ("train.eval_ema", "checkpoint.export_ema"):
        if c.get(key) and train.ema is None:
            yield f"{key} needs an average of the weights; set train.ema, such as 0.999"


def _memory(c: RunConfig) -> Mistakes:
    memory, zero = c.memory, c.strategy in ZERO
    if c.compile_mode != "default" and c.compile_backend != "inductor":
        reason = "is inductor's, not compile_backend {compile_backend}'s; remove one of the two"
        yield f"compile_mode {{compile_mode}} {reason}"
    if "flash" in c.model.attention and c.precision in ("fp32", "tf32"):
        reason = "computes in 16 bits, not in precision {precision}; use sdpa, or precision bf16"
        yield f"model.attention {{model.attention}} {reason}"
    offloads = ("memory.offload_optimizer", "memory.offload_params")
    on_disk = [key for key in offloads if c.get(key) == "nvme"]
    for key in on_disk:
        if memory.nvme_path is None:
            yield f"{key} nvme needs memory.nvme_path, a folder on a local disk"
    # A DeepSpeed JSON, which only the backend reads, may enable offloading.
    if memory.nvme_path is not None and not on_disk and c.deepspeed.config is None:
        remedy = "set memory.offload_optimizer or memory.offload_params to nvme, or remove it"
        yield f"memory.nvme_path is set but nothing is offloaded there; {remedy}"
    if zero and memory.loss_chunk_tokens not in ("auto", 0):
        reason = "does not work with strategy {strategy}; set it to auto"
        yield f"memory.loss_chunk_tokens {{memory.loss_chunk_tokens}} {reason}"
    if c.strategy in ("zero1", "zero2") and memory.offload_params != "none":
        reason = "needs sharded parameters, but strategy {strategy} replicates them; use zero3"
        yield f"memory.offload_params {{memory.offload_params}} {reason}"
    if c.strategy in ("zero1", "zero2") and memory.offload_optimizer == "nvme":
        yield "memory.offload_optimizer nvme needs strategy zero3, not {strategy}; use cpu, or zero3"
    # A JSON's stage overrides a default strategy; only one that was set can conflict. XLA ignores the JSON.
    unfit = c.is_set("strategy") and c.backend != "xla" and not zero and c.strategy != "no_shard"
    if c.deepspeed.config is not None and unfit:
        remedy = "use zero1, zero2 or zero3 (no_shard for stage 0), or remove deepspeed.config"
        yield f"deepspeed.config has no effect with strategy {{strategy}}; {remedy}"
    for name, value in c.fsdp:
        if zero and value is not None:
            reason = "has no effect with DeepSpeed's strategy {strategy}; remove it, or use full_shard"
            yield f"fsdp.{name} {reason}"


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
    fsdp, policy = c.fsdp, c.fsdp.auto_wrap_policy
    if fsdp.shard_group_size is not None and c.strategy not in HYBRID:
        yield "fsdp.shard_group_size needs strategy hybrid_shard or hybrid_shard_zero2, not {strategy}"
    if policy == "size_based_wrap" and fsdp.min_num_params is None:
        yield "fsdp.auto_wrap_policy needs fsdp.min_num_params where it is size_based_wrap"
    for key, of_policy in (
        ("fsdp.min_num_params", "size_based_wrap"),
        ("fsdp.transformer_layer_cls_to_wrap", "transformer_based_wrap"),
    ):
        if c.get(key) is not None and policy not in (None, of_policy):
            yield f"{key} is for {of_policy}, not for fsdp.auto_wrap_policy {policy}"


def _output(c: RunConfig) -> Mistakes:
    train, checkpoint = c.train, c.checkpoint
    for name, times in Counter(c.log.trackers).items():
        if times > 1:
            yield f"log.trackers: {name} is named {times} times; name it once"
    for key in ("checkpoint.resume_step", "checkpoint.resume_samples"):
        if c.get(key) is not None and checkpoint.resume in ("auto", "never"):
            reason = "but checkpoint.resume is {checkpoint.resume}; remove it"
            yield f"{key} {{{key}}} is for another program's checkpoint, {reason}"
    if c.hub.push is not None and not checkpoint.export:
        yield "hub.push {hub.push} uploads what checkpoint.export writes; set that to true"
    for key, other, remedy in (
        ("hub.repo", "hub.push", "set hub.push to end"),
        ("hub.private", "hub.push", "set hub.push to end"),
        ("train.early_stopping_threshold", "train.early_stopping_patience", "set it"),
    ):
        if _given(c, key) and c.get(other) is None:
            yield f"{key} has no effect without {other}; {remedy}"
    comparing = ("train.early_stopping_patience", "checkpoint.export_best", "checkpoint.keep_best")
    judges = [key for key in comparing if c.get(key)]
    for key in judges:
        if c.data.eval is None and c.data.eval_fraction == 0:
            yield f"{key} needs an evaluation, but data.eval_fraction is 0; set data.eval"
    if checkpoint.export_best and checkpoint.keep_best is None:
        yield "checkpoint.export_best needs a checkpoint that is kept; set checkpoint.keep_best to 1"
    for key in ("checkpoint.best_metric", "checkpoint.best_mode"):
        if _given(c, key) and not judges:
            reason = "has no effect without checkpoint.keep_best or train.early_stopping_patience; set one"
            yield f"{key} {reason}"
    never = train.eval_every is None and train.eval_every_epochs is None
    if train.early_stopping_patience is not None and never:
        yield "train.early_stopping_patience needs evaluations during training; set train.eval_every"
