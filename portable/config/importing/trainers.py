"""The keys of the Trainer, TRL, axolotl, LLaMA-Factory and torchtune, and their words for values.

The hints for unknown keys of this program's own files come from here, too.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from portable.config.importing.accelerate import ROWS as ACCELERATE
from portable.config.importing.rows import NoCounterpart, NoEffect, Row, free, named, nothing, refused
from portable.config.origins import shown
from portable.config.types import truth

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from portable.config.importing.rows import File, Rows

_BETA = "an argument of the loss: train.loss: dpo(beta=0.1)"
_ADAPTER = "set adapter.type to lora; r, alpha, dropout and target_modules are in the section adapter"
_NF4 = "set adapter.base to nf4, and adapter.type to lora"
_HUB = "set hub.push to end or checkpoints, hub.repo and hub.private"
_EVALUATION = "set train.eval_every (steps) or train.eval_every_epochs; null: only at the end"
_VALIDATION = "set data.eval, such as {source: test.jsonl}; data.eval_fraction holds some out"
_FSDP = "set strategy and the section fsdp, or use --accelerate-config with the file of accelerate config"
_LOSSES = "set train.loss to dpo, ipo, simpo or orpo"
_DOCUMENTS = "set data.packing to documents"
_NO_REWARDS = "training on rewards of generated answers is not supported; leave it out"
_LIGER = "Liger kernels are not used; leave it out (memory.loss_chunk_tokens saves the logits' memory)"

WORDS: dict[str, dict[str, str]] = {
    "adapter": {"qlora": "{type: lora, base: nf4}"},
    "log.trackers": {"none": "[], which is none", "all": "a list of those to use"},
    "memory.activation_checkpointing": {"true": "full", "block": "full", "offload": "full"},
    "model.attention": dict.fromkeys(("fa2", "flash_attn", "flash_attention"), "flash_attention_2"),
    "backend": {"gpu": "cuda", "rocm": "cuda", "nvidia": "cuda"},
    "precision": {
        "bfloat16": "bf16",
        "float16": "fp16",
        "float32": "fp32",
        "half": "fp16",
        "no": "fp32",
    },
    "strategy": {
        "ddp": "no_shard",
        "deepspeed": "zero1, zero2 or zero3",
        "fsdp": "full_shard",
        "full_shard auto_wrap": "full_shard, which wraps layers by itself",
        "hybrid_shard auto_wrap": "hybrid_shard, which wraps layers by itself",
        "shard_grad_op auto_wrap": "shard_grad_op, which wraps layers by itself",
    },
    "train.optimizer": {
        **dict.fromkeys(
            ("adam", "adamw_hf", "adamw_torch", "adamw_torch_fused", "adamw_apex_fused"), "adamw"
        ),
        **dict.fromkeys(("fused_adam", "paged_adamw", "paged_adamw_32bit", "pagedadamw"), "adamw"),
        **dict.fromkeys(("adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw_8bit"),
        **dict.fromkeys(("adamw8bit", "pagedadamw8bit", "adamw8bitao"), "adamw_8bit"),
    },
    "train.schedule": {
        "constant_with_warmup": "constant, which warms up over train.warmup_steps",
        "cosine_with_min_lr": "cosine, with train.min_learning_rate_ratio",
        "linear_with_warmup": "linear, which warms up over train.warmup_steps",
        "warmup_stable_decay": "wsd",
        "cosine_with_warmup": "cosine, which warms up over train.warmup_steps",
    },
}
"""Other trainers' words for values, by setting or section."""


TAKEN = {
    "output_dir": "output_dir",
    "seed": "seed data_seed",
    "strategy": "sharding_strategy",
    "context_parallel_size": "context_parallel_size sequence_parallel_degree",
    "tensor_parallel_size": "tensor_parallel_size",
    "compile": "torch_compile",
    "compile_backend": "torch_compile_backend",
    "compile_mode": "torch_compile_mode",
    "model.name_or_path": "model_name_or_path base_model model_name",
    "model.config": "config_overrides",
    "model.trust_remote_code": "trust_remote_code",
    "adapter.name_or_path": "lora_model_dir adapter_name_or_path",
    "adapter.r": "lora_r lora_rank",
    "adapter.alpha": "lora_alpha",
    "adapter.dropout": "lora_dropout",
    "adapter.use_dora": "use_dora peft_use_dora",
    "adapter.use_rslora": "use_rslora peft_use_rslora",
    "data.source": "dataset_name train_file train_dataset",
    "data.config_name": "dataset_config_name dataset_config",
    "data.split": "dataset_train_split",
    "data.max_samples": "max_samples max_train_samples",
    "data.seq_len": "block_size max_seq_len max_seq_length max_source_length model_max_length",
    "data.target_seq_len": "max_target_length",
    "data.source_prefix": "source_prefix",
    "data.text_field": "dataset_text_field text_column text_column_name",
    "data.target_field": "summary_column",
    "data.source_language": "source_lang",
    "data.target_language": "target_lang",
    "data.tokenizer": "tokenizer_name tokenizer_config",
    "data.chat_template": "chat_template_path chat_template_jinja",
    "data.roles_to_train": "roles_to_train",
    "data.num_workers": "dataloader_num_workers",
    "data.stream": "dataset_streaming",
    "train.learning_rate": "learning_rate lr",
    "train.weight_decay": "weight_decay",
    "train.warmup_ratio": "warmup_ratio",
    "train.eps": "adam_epsilon",
    "train.steps": "max_steps",
    "train.stop_after": "early_stop",
    "train.epochs": "num_train_epochs num_epochs",
    "train.ema": "ema_decay",
    "train.global_batch_size": "batch_size train_batch_size",
    "train.micro_batch_size": "per_device_train_batch_size micro_batch_size",
    "train.max_grad_norm": "max_grad_norm gradient_clipping",
    "train.label_smoothing": "label_smoothing_factor",
    "train.neftune_noise_alpha": "neftune_noise_alpha",
    "train.trainable": "unfrozen_parameters",
    "train.early_stopping_patience": "early_stopping_patience",
    "train.early_stopping_threshold": "early_stopping_threshold",
    "train.eval_batches": "max_eval_samples",
    "train.min_learning_rate_ratio": "cosine_min_lr_ratio",
    "checkpoint.keep": "save_total_limit",
    "checkpoint.resume": "resume_from_checkpoint",
    "checkpoint.resume_samples": "ignore_data_skip",
    "checkpoint.best_metric": "metric_for_best_model",
    "checkpoint.export_best": "load_best_model_at_end",
    "fsdp.transformer_layer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "deepspeed.config": "deepspeed",
    "log.name": "run_name wandb_name wandb_run_id",
    "log.project": "project",
}
"""Settings, and the names under which they are taken as they are."""
WORDED = {
    "model.attention": "attn_implementation flash_attn",
    "precision": "mixed_precision dtype torch_dtype",
    "train.optimizer": "optim optimizer optim_args",
    "train.schedule": "lr_scheduler_type lr_scheduler",
}
"""The same, where words have a meaning in ``WORDS``."""
SWITCHES: dict[str, dict[str, Any]] = {
    "auto_find_batch_size": {"train.micro_batch_size": "auto"},
    "bf16 pure_bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "no_cuda use_cpu": {"backend": "cpu"},
    "flash_attention use_flash_attn": {"model.attention": "flash_attention_2"},
    "sdp_attention xformers_attention": {"model.attention": "sdpa"},
    "load_in_4bit": {"adapter.base": "nf4", "adapter.type": "lora"},
    "load_in_8bit": {"adapter.base": "int8", "adapter.type": "lora"},
    "lora_target_linear": {"adapter.target_modules": "all-linear"},
    "mask_history": {"data.train_on": "last_assistant"},
    "neat_packing sample_packing": {"data.packing": "documents"},
    "train_on_prompt": {"data.train_on": "all"},
    "use_muon": {"train.optimizer": "muon"},
}
"""Names that are true or false, and what they set where they are true."""
FREE = {
    "that is automatic; leave it out": "dataloader_drop_last dataloader_pin_memory disable_tqdm log_level "
    "low_cpu_mem_usage precompute_ref_log_probs save_safetensors strict use_fast_tokenizer gpu_memory_limit",
    "texts are tokenized once, on all cores, and cached in data.cache_dir; leave it out": "dataset_kwargs "
    "dataset_num_proc dataset_processes overwrite_cache preprocessing_num_workers skip_prepare_dataset",
    "set data.eval_fraction and train.eval_every; --eval-only evaluates and trains nothing": "do_eval "
    "do_predict",
    "training is the default; leave it out": "do_train",
    "evaluation takes train.micro_batch_size; leave it out": "eval_batch_size per_device_eval_batch_size",
    "sequences have one length; set data.packing so that none is padding": "group_by_length "
    "max_packed_sequence_len",
    "the launcher sets each process's rank; leave it out": "local_rank",
    "logs are written to output_dir; leave it out": "logging_dir",
    "a run resumes by default (checkpoint.resume); choose another output_dir": "overwrite_output_dir",
    "set data.packing; if it is false, sequences are padded to data.seq_len": "pad_to_max_length "
    "pad_to_sequence_len",
    "only the fields in data.text_field etc. are read; leave it out": "remove_unused_columns",
    "set checkpoint.export; checkpoints always contain the optimizer": "save_only_model",
    "set data.train_on to assistant, the default for conversations": "assistant_only_loss",
    "set data.train_on to completion, the default for records with a prompt": "completion_only_loss",
    "set data.packing to documents, as bfd does, or to true, as wrapped does": "packing_strategy",
    "set data.packing to documents, which leaves hardly any padding": "padding_free",
    _DOCUMENTS: "eval_sample_packing eval_packing",
    "the token that ends an answer is found in the data; leave it out": "eot_tokens",
    "the model's config defines its class; leave it out, or set model.config for a new model": "model_type",
    "those of the tokenizer are used; set data.added_tokens for more": "special_tokens",
    "report.html always has it; leave it out": "plot_loss include_num_input_tokens_seen",
    "dropout is off with losses of pairs; train.dropout: true switches it on": "disable_dropout",
    "the run stops at a loss that is not finite; leave it out": "loss_watchdog_threshold "
    "loss_watchdog_patience",
    _LIGER: "lora_mlp_kernel lora_qkv_kernel lora_o_kernel use_kernels enable_liger_kernel use_v1_kernels",
    "": "torchdistx_path gptq_groupsize gptq_model_v1 push_dataset_to_hub ddp_find_unused_parameters "
    "lora_fan_in_fan_out dp_shard_size fsdp_version double_quantization quantization_method save_first_step "
    "base_model_config dataloader_persistent_workers dataloader_prefetch_factor ddp_bucket_cap_mb "
    "ddp_broadcast_buffers eval_accumulation_steps eval_do_concat_batches logging_nan_inf_filter "
    "log_on_each_node pad_to_multiple_of skip_memory_metrics torch_empty_cache_steps use_cache",
}
"""Reasons why names have no effect here, or what does the same."""
REFUSED = {
    "set train.early_stopping_patience, and train.early_stopping_threshold": "early_stopping",
    _EVALUATION: "eval_delay",
    _FSDP: "fsdp fsdp_config",
    _VALIDATION: "validation_file test_datasets eval_dataset dataset_test_split",
    "set data.eval_fraction, a share of 1": "validation_split_percentage",
    "set router_aux_loss_coef and output_router_logits in model.config": "router_aux_loss_coef",
    "the newest revision is taken; name a local folder in model.name_or_path for another": "model_revision",
    "that of the tokenizer is used; change it in the folder of data.tokenizer": "eos_token",
    "set data.format to messages or sharegpt, whose keys are recognized; write other records "
    "so": "formatting_func field_messages message_field_role roles",
    "no argument of the losses of pairs here; leave it out, or set train.loss to a class of your "
    "own": "ld_alpha",
    "an argument of the loss: train.loss: dpo(reference='folder')": "ref_model",
    _NO_REWARDS: "max_completion_length missing_eos_penalty num_generations reward_funcs reward_model_path "
    "temperature",
    "only text models are supported; leave it out": "processor_type video_max_pixels image_max_pixels "
    "image_size "
    "freeze_vision_tower freeze_multi_modal_projector",
    "code of your own goes into train.loss, train.callbacks or model.function; leave it out": "plugins",
    "set train.parameter_groups to [{pattern: lora_B, learning_rate: 1.6e-3}]": "loraplus_lr_ratio",
    "put a system message into each record": "default_system",
    "set adapter.config to a file, or the section adapter": "peft_config",
    "ranks shard by FSDP and ZeRO, and share sequences or layers; leave it out": "expert_parallel_size "
    "tensor_model_parallel_size pipeline_model_parallel_size",
    "weights are trained in 16 or 32 bits only; leave it out": "qat fp8 fp8_backend quantize_moe_experts",
    "train.optimizer takes any by its import path, package.module:name; leave it out": "use_galore "
    "use_apollo use_badam use_adam_mini",
    "set train.trainable to a pattern of the layers that it means": "freeze_trainable_layers",
}
"""What to do instead of names that have no counterpart."""
SILENT: dict[str, tuple[Any, ...]] = {
    "do_eval": (True,),
    "do_train": (True,),
    "overwrite_output_dir": (True,),
    "plot_loss": (True,),
    "local_rank": (-1,),
    "log_level": ("info",),
    "remove_unused_columns": (True,),
    "assistant_only_loss": (True,),
    "completion_only_loss": (True,),
    "model_revision": ("main",),
    "expert_parallel_size": (1,),
    "tensor_model_parallel_size": (1,),
    "pipeline_model_parallel_size": (1,),
    "disable_dropout": (True,),
    "fsdp": (["full_shard", "auto_wrap"], ["auto_wrap", "full_shard"]),
    "model_type": ("AutoModelForCausalLM", "LlamaForCausalLM", "MistralForCausalLM"),
}
"""Values of these that ask for nothing that is not so anyway."""
FAMILIES = {
    "bnb_4bit_": free(_NF4),
    "hub_": refused(_HUB),
    "liger_": free(_LIGER),
    "lora_": refused(_ADAPTER),
    "push_to_hub": refused(_HUB),
    "use_liger_": free(_LIGER),
    "vllm_": refused(_NO_REWARDS),
    "wandb_": free("set log.trackers; a tracker's other settings are its environment variables"),
}
"""The same for prefixes of names."""


def _take(value: Any, _: File) -> Any:
    negative = isinstance(value, int | float) and not isinstance(value, bool) and value < 0
    return None if nothing(value) or negative or value == "auto" else value


def _positions(value: Any, file: File) -> dict[str, Any]:
    """Their length of a text counts its last token, which is only a label."""
    length = _take(value, file)
    parts = ("context_parallel_size", "sequence_parallel_degree", "context_parallel_dim")
    # Not where it is divided into equal parts, or is that of blocks of one long text.
    whole = file.get("stage") == "pt" or any(file.get(name, 1) != 1 for name in parts)
    counted = type(length) is int and length > 1 and not whole
    return {} if length is None else {"data.seq_len": length - 1 if counted else length}


def _word(key: str, last: Callable[[Any], Any] = lambda value: value) -> Row:
    def take(value: Any, file: File) -> Any:
        value = last(value)
        if value == "adafactor":
            file.put(file.path, "train.adafactor_rule", "transformers")
        if nothing(value) or isinstance(truth(value), bool) or value == "auto":
            return None
        return WORDS[key].get(str(value).lower(), str(value)).split(",")[0]

    return Row(key, take)


def _switch(settings: dict[str, Any]) -> Row:
    words = {True: settings, "auto": settings, "full": settings, False: {}, None: {}}
    return Row(how=words, why="set " + ", and ".join(f"{key} to {value}" for key, value in settings.items()))


def _quiet(why: str) -> Row:
    """A key that others, or :func:`finish`, read."""
    return Row(how=lambda value, file: None, why=why)


def _names(value: Any, _: File) -> Any:
    names = [str(name).strip() for name in (value.split(",") if isinstance(value, str) else value or ())]
    return "all-linear" if names in (["all"], ["all-linear"]) else names or None


def _betas(value: Any, file: File) -> list[Any]:
    return [file.get("adam_beta1", 0.9), file.get("adam_beta2", 0.999)]


def _when(steps: str, epochs: str, why: str) -> Row:
    return Row(how={"no": {steps: None}, None: {}, "epoch": {epochs: 1}, "steps": {}}, why=why)


def _every(steps: str, epochs: str, switch: str) -> Row:
    """Steps between two events, or a share of all; where a switch says that steps count."""

    def take(value: Any, file: File) -> dict[str, Any]:
        word = truth(file.get(switch, file.get("evaluation_strategy", "steps")))
        if nothing(value) or word not in ("steps", True):
            return {}
        if value >= 1:
            return {steps: int(value)}
        length = file.get("max_steps", -1)
        return (
            {steps: max(1, int(value * length))}
            if length > 0
            else {epochs: value * file.get("num_train_epochs", 3)}
        )

    return Row(how=take, why=steps)


def _per_epoch(key: str) -> Row:
    return Row(key, lambda value, _: 1 / value if value else None, f"set {key} to one divided by it")


def _schedule_more(value: Any, file: File) -> dict[str, Any]:
    left = dict(value or {})
    ratio, lowest = left.pop("min_lr_rate", None), left.pop("min_lr", None)
    ratio = lowest / file.get("learning_rate", 5e-5) if lowest else ratio
    if left:
        raise NoCounterpart(f"{shown(left)} has no counterpart: set train.schedule_params")
    return {} if ratio is None else {"train.min_learning_rate_ratio": ratio}


def _share(value: Any, _: File) -> Any:
    if value and value >= 1:
        raise NoCounterpart(f"{shown(value)} is a number of records; set data.eval_fraction to a share of 1")
    return value or 0.0


def _trackers(value: Any, _: File) -> list[str] | None:
    names = [str(one) for one in (value if isinstance(value, list) else [value]) if not nothing(one)]
    return None if "all" in names else [name for name in names if name != "none"]


def _mixture(value: Any, file: File) -> dict[str, Any]:
    """TRL's ``dataset_mixture``, and ``dataset_mixer`` of older recipes: names with a share."""
    value = value or {}
    if value.get("test_split_size"):
        file.note(file.path, f"test_split_size has no effect: {_VALIDATION}")
    listed = value.get("datasets") or [{"id": name, "weight": share} for name, share in value.items()]
    return sources(
        [
            {
                "source": one.get("id") or one.get("path"),
                "config_name": None
                if one.get("config") == "default"
                else one.get("config") or one.get("name"),
                "split": _part(one.get("split") or "train", one.get("weight")),
            }
            for one in listed
        ]
    )


def _part(split: str, share: Any) -> str:
    return split if not isinstance(share, int | float) or share >= 1 else f"{split}[:{share * 100:g}%]"


def sources(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Settings for one source, or a mixture in which each is read once in an epoch."""
    found = [{key: value for key, value in one.items() if value is not None} for one in found]
    if len(found) == 1:
        return {f"data.{key}": value for key, value in found[0].items()}
    names: list[str] = []
    for one in found:
        last = str(one.get("source")).rpartition("/")[2]
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", last).strip("-_") or "source"
        names.append(name if name not in names else f"{name}-{len(names)}")
    return {"data.sources": [{"name": name, **one} for name, one in zip(names, found, strict=True)]}


_RL = ("dpo", "ipo", "orpo", "simpo")
_KINDS = {
    "alpaca": "alpaca",
    "chat_template": "messages",
    "sharegpt": "sharegpt",
    "completion": "text",
    "pretrain": "text",
    "None": "auto",
}
"""axolotl's types of records."""


def _axolotl_sources(value: Any, file: File) -> dict[str, Any]:
    found = []
    for one in value if isinstance(value, list) else []:
        if not isinstance(one, dict) or not one.get("path"):
            raise NoCounterpart(f"{shown(one)} has no counterpart: name a file or hub dataset in data.source")
        kind = str(one.get("type")).partition(".")[0]
        field, role = one.get("field_messages", "messages"), one.get("message_field_role")
        kind = "sharegpt" if kind == "chat_template" and field == "conversations" and role == "from" else kind
        plain = field in ("messages", "conversations") and kind in _KINDS
        if not plain and file.get("rl") not in _RL:
            reason = "records of this kind are not read; write them as messages, alpaca or text"
            raise NoCounterpart(f"{one['path']}: type {shown(one.get('type'))} has no counterpart: {reason}")
        found.append(
            {
                "source": one.get("data_files") or one["path"],
                "config_name": one.get("name"),
                "split": str(one.get("split") or "train"),
                "format": "preference" if file.get("rl") in _RL else _KINDS[kind],
                "text_field": one.get("field") or one.get("text_column"),
            }
        )
    return sources(found)


def _loss(kind: Any, beta: Any, sft: Any = None) -> str:
    """``train.loss`` for a formula, by the names that its programs share."""
    if kind in ("orpo", "simpo"):
        return kind if beta is None or kind == "orpo" else f"{kind}(beta={beta})"
    name = "ipo" if kind == "ipo" else "dpo"
    more = "" if kind in (None, "sigmoid", name) else f", loss_type={kind!r}"
    return f"{name}(beta={0.1 if beta is None else beta}{more}{f', sft={sft}' if sft else ''})"


def _rl(value: Any, file: File) -> dict[str, Any]:
    if nothing(value):
        return {}
    if value not in _RL:
        raise NoCounterpart(f"{shown(value)} has no counterpart: {_LOSSES}")
    return {"train.loss": _loss(value, file.get("rl_beta", file.get("dpo_beta")))}


def _lf_names(value: Any, file: File) -> dict[str, Any]:
    names = value if isinstance(value, list) else [name.strip() for name in str(value).split(",")]
    if file.get("dataset_dir", "ONLINE") == "ONLINE" and all("/" in name for name in names):
        return sources([{"source": name} for name in names])
    raise NoCounterpart(
        f"{shown(value)} has no counterpart: these are names of LLaMA-Factory's dataset_info.json; set "
        "data.source to their files or hub datasets"
    )


def _lf_stage(value: Any, file: File) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {"sft": {}, "pt": {"data.format": "text", "data.packing": True}}
    if value == "dpo":
        loss = _loss(file.get("pref_loss"), file.get("pref_beta", 0.1), file.get("pref_ftx"))
        kinds["dpo"] = {"train.loss": loss}
    if value not in kinds:
        raise NoCounterpart(f"{shown(value)} has no counterpart: {_LOSSES}")
    return kinds[value]


def _template(value: Any, _: File) -> str | None:
    """Programs bring templates along under names of their own, and recipes write them out."""
    if nothing(value) or value in ("chatml", "tokenizer_default"):
        return "chatml" if value == "chatml" else None
    raise NoEffect(
        "has no effect: the tokenizer's own template is used; write another into a .jinja file, and name "
        "it in data.chat_template"
    )


def _pushed(key: str, of: Callable[[Any, File], Any]) -> Row:
    return Row(key, lambda value, file: of(value, file) if file.get("push_to_hub") is True else None, _HUB)


def _table(
    *, taken: Mapping[str, str], refused_: Mapping[str, str], free_: Mapping[str, str]
) -> dict[str, Row]:
    found = {name: Row(key, _take) for key, names in taken.items() for name in names.split()}
    for groups, kind in ((refused_, refused), (free_, free)):
        for why, names in groups.items():
            for name in names.split():
                found[name] = kind(why, *SILENT.get(name, ()))
    return found


_POSITIONS = Row(how=_positions, why="data.seq_len")
_SHARDING = {
    name.rpartition(".")[2]: row for name, row in ACCELERATE.items() if name.startswith("fsdp_config.")
}
_TRAINERS: Rows = {
    **_table(taken=TAKEN, refused_=REFUSED, free_=FREE),
    **{names: _word(key) for key, names in WORDED.items()},
    **{names: _switch(settings) for names, settings in SWITCHES.items()},
    "adam_beta1 adam_beta2": Row("train.betas", _betas, "set train.betas, a list of both"),
    "lora_target lora_target_modules": Row("adapter.target_modules", _names),
    "lora_target_parameters": Row("adapter.target_parameters", _names),
    "lora_modules_to_save": Row("adapter.modules_to_save", _names),
    "use_peft": Row(how={True: {"adapter.type": "lora"}, False: {}}, why=_ADAPTER),
    "finetuning_type": Row(how={"full": {}, "lora": {"adapter.type": "lora"}}, why=_ADAPTER),
    "adapter": Row(
        how={
            "lora": {"adapter.type": "lora"},
            "qlora": {"adapter.type": "lora", "adapter.base": "nf4"},
            None: {},
        },
        why=_ADAPTER,
    ),
    "quantization_bit": Row(
        how={4: {"adapter.base": "nf4"}, 8: {"adapter.base": "int8"}, None: {}},
        why="set adapter.base to nf4 for 4 bits, to int8 for 8, and adapter.type to lora",
    ),
    "eval_steps": _every("train.eval_every", "train.eval_every_epochs", "eval_strategy"),
    "save_steps": _every("checkpoint.every_steps", "checkpoint.every_epochs", "save_strategy"),
    "eval_strategy evaluation_strategy": _when("train.eval_every", "train.eval_every_epochs", _EVALUATION),
    "save_strategy": _when(
        "checkpoint.every_steps",
        "checkpoint.every_epochs",
        "set checkpoint.every_steps or checkpoint.every_epochs",
    ),
    "evals_per_epoch": _per_epoch("train.eval_every_epochs"),
    "saves_per_epoch": _per_epoch("checkpoint.every_epochs"),
    "logging_steps": Row("log.every_steps", lambda value, _: max(1, int(value))),
    "gradient_checkpointing activation_checkpointing": Row(  # the second since transformers 5.23
        "memory.activation_checkpointing",
        {True: "full", "unsloth": "full", "offload": "full", False: "none", None: None},
        "set memory.activation_checkpointing to full or selective",
    ),
    "disable_gradient_checkpointing": Row(
        "memory.activation_checkpointing", {True: "none", False: "full", None: "full"}
    ),
    "greater_is_better": Row(
        "checkpoint.best_mode",
        {True: "max", False: "min", None: None},
        "set checkpoint.best_mode: max where greater is better, min where not",
    ),
    "tf32": Row(
        "precision",
        lambda value, file: "tf32" if truth(value) is True and not file.get("bf16") else None,
        "set precision to tf32; bf16 is faster if its precision suffices",
    ),
    "lr_scheduler_kwargs": Row(
        how=_schedule_more, why="set train.min_learning_rate_ratio or train.schedule_params"
    ),
    "warmup_steps": Row(
        how=lambda value, _: (
            {} if value is None else {"train.warmup_ratio" if 0 < value < 1 else "train.warmup_steps": value}
        ),
        why="train.warmup_steps",
    ),
    "val_set_size val_size": Row("data.eval_fraction", _share),
    "packing": Row("data.packing", {True: "documents", False: False, None: None}),
    "train_on_inputs": Row(
        "data.train_on",
        {True: "all", False: None, None: None},
        "set data.train_on to all if it is true; false is the default for conversations",
    ),
    "report_to": Row("log.trackers", _trackers),
    "wandb_project": Row(
        how=lambda value, _: {"log.project": value, "log.trackers": ["wandb"]} if value else {},
        why="log.project",
    ),
    "dataset_mixer dataset_mixture": Row(how=_mixture, why="data.source"),
    "datasets pretraining_dataset": Row(how=_axolotl_sources, why="data.source"),
    "dataset": Row(how=_lf_names, why="data.source"),
    "rl": Row(how=_rl, why=_LOSSES),
    "stage": Row(
        how=_lf_stage,
        why="leave it out for sft and pt; set train.loss for dpo, model.task for a classifier",
    ),
    "cutoff_len max_length sequence_len": _POSITIONS,
    "truncation_mode": Row("data.truncation", {"keep_start": "end", "keep_end": "start", None: None}),
    "excess_length_strategy": Row("data.truncation", {"drop": "drop", "truncate": "end", None: None}),
    "chat_template template": Row("data.chat_template", _template),
    "push_to_hub": _pushed(
        "hub.push",
        lambda _, file: "end" if file.get("hub_strategy", "every_save") == "end" else "checkpoints",
    ),
    "hub_model_id": _pushed("hub.repo", _take),
    "hub_private_repo": _pushed("hub.private", lambda value, _: value),
    "hub_strategy": _quiet(_HUB),
    "gradient_accumulation_steps": _quiet(
        "set train.global_batch_size to the product of micro-batch, devices and accumulation steps; how "
        "often to accumulate follows from it"
    ),
    "beta pref_beta rl_beta dpo_beta": _quiet(_BETA),
    "pref_loss": _quiet(_LOSSES),
    "loss_type": _quiet("an argument of the loss: train.loss: dpo(loss_type='hinge'); or ipo, simpo, orpo"),
    "pref_ftx rpo_alpha loss_weights": _quiet("an argument of the loss: train.loss: dpo(sft=1.0)"),
    "max_prompt_length": _quiet("data.seq_len and data.truncation"),
    "dataset_dir": _quiet("data.source"),
    "dataset_prepared_path tokenized_path": _quiet("data.cache_dir"),
    "tokenizer_type": _quiet("data.tokenizer"),
    "ddp_timeout": _quiet("log.hang_timeout"),
    "logging_first_step logging_strategy": _quiet("log.every_steps"),
    "gradient_checkpointing_kwargs activation_checkpointing_kwargs": _quiet(
        "memory.activation_checkpointing"
    ),
    **named(_SHARDING, "fsdp_config."),
    **{f"fsdp_config.{name.removeprefix('fsdp_')}": row for name, row in _SHARDING.items()},
    "fsdp_config.fsdp_limit_all_gathers fsdp_config.limit_all_gathers": free(),
}
TRAINERS = named(_TRAINERS)


_TUNE_DATA: dict[str, dict[str, Any]] = {
    "alpaca_dataset": {"source": "tatsu-lab/alpaca", "format": "alpaca"},
    "alpaca_cleaned_dataset": {"source": "yahma/alpaca-cleaned", "format": "alpaca"},
    "slimorca_dataset": {"source": "Open-Orca/SlimOrca-Dedup", "format": "sharegpt"},
    "stack_exchange_paired_dataset": {"source": "lvwerra/stack-exchange-paired", "format": "preference"},
    "text_completion_dataset": {"format": "text"},
    "chat_dataset": {"format": "messages"},
    "instruct_dataset": {"format": "alpaca"},
    "preference_dataset": {"format": "preference"},
}


def _last(value: Any) -> str:
    return str(value).rpartition(".")[2]


def _tune_model(value: Any, file: File) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {
        "lora": {},
        "dora": {"adapter.use_dora": True},
        "qlora": {"adapter.base": "nf4"},
    }
    kind, _, rest = _last(value).partition("_")
    return {"adapter.type": "lora"} | kinds[kind] if rest and kind in kinds else {}


def _tune_targets(value: Any, file: File) -> list[str]:
    names = ["o_proj" if name == "output_proj" else name for name in value or ()]
    return names + ["gate_proj", "up_proj", "down_proj"] * (file.get("model.apply_lora_to_mlp") is True)


def _tune_data(value: Any, file: File) -> dict[str, Any]:
    name, around = _last(value), file.get("dataset")
    if name not in _TUNE_DATA:
        raise NoCounterpart(f"{shown(name)} has no counterpart: set data.source and data.format")
    found = {**_TUNE_DATA[name], "split": around.get("split"), "config_name": around.get("name")}
    found |= {"source": source} if (source := around.get("data_files") or around.get("source")) else {}
    found |= {"format": "sharegpt"} if around.get("conversation_style") == "sharegpt" else {}
    if found["format"] == "text":
        return sources([found | {"text_field": around.get("column")}])
    # Its datasets train on the prompt, unless they say otherwise.
    trains = around.get("train_on_input", name.startswith("alpaca"))
    return sources([found | ({"train_on": "all"} if trains else {})])


def _tune_files(value: Any, _: File) -> None:
    if "Meta" in str(value):
        raise NoCounterpart("reads Meta's own files; set model.name_or_path to a folder of transformers'")


_TUNE_LOSSES = {"DPOLoss": "dpo", "RSOLoss": "dpo(loss_type='hinge')", "IPOLoss": "ipo", "SimPOLoss": "simpo"}
TORCHTUNE: Rows = {
    **_table(
        taken={
            "output_dir": "output_dir",
            "seed": "seed",
            "model.name_or_path": "checkpointer.checkpoint_dir",
            "adapter.r": "model.lora_rank",
            "adapter.alpha": "model.lora_alpha",
            "adapter.dropout": "model.lora_dropout",
            "adapter.use_dora": "model.use_dora",
            "context_parallel_size": "context_parallel_dim",
            "tensor_parallel_size": "tensor_parallel_dim",
            "train.micro_batch_size": "batch_size",
            "train.epochs": "epochs",
            "train.learning_rate": "optimizer.lr",
            "train.weight_decay": "optimizer.weight_decay",
            "train.betas": "optimizer.betas",
            "train.eps": "optimizer.eps",
            "train.warmup_steps": "lr_scheduler.num_warmup_steps",
            "train.max_grad_norm": "clip_grad_norm",
            "train.eval_every": "run_val_every_n_steps",
            "log.every_steps": "log_every_n_steps",
            "log.project": "metric_logger.project",
        },
        refused_={
            "the head gets no adapter; name it in adapter.target_modules": "model.apply_lora_to_output",
            "only text models are supported": "model.decoder_trainable model.encoder_trainable "
            "model.fusion_trainable model.image_size tokenizer.image_size",
            _VALIDATION: "dataset_val",
            "set train.steps, or train.stop_after": "max_steps_per_epoch",
            "stored activations stay on the device; leave it out": "enable_activation_offloading",
            "the plan of transformers for the model is taken; leave it out": "tensor_parallel_plan",
            "weights are trained in 16 or 32 bits only": "quantizer fp8_recipe_name enable_fp8_training",
            "distillation needs a train.loss of your own": "teacher_model teacher_checkpointer kd_loss "
            "kd_ratio",
            "the file trains nothing; name another": "tasks prompt max_new_tokens top_k limit "
            "enable_kv_cache",
            _NO_REWARDS: "grpo_samples reward_and_value_model ppo_epochs temperature orchestration",
        },
        free_={
            "": "tokenizer._component_ tokenizer.path tokenizer.merges_file tokenizer.merges_path "
            "tokenizer.vocab_path tokenizer.prompt_template checkpointer.checkpoint_files "
            "checkpointer.recipe_checkpoint checkpointer.output_dir checkpointer.model_type "
            "checkpointer.safe_serialization checkpointer.adapter_checkpoint optimizer.fused profiler name "
            "loss.num_output_chunks metric_logger.log_dir metric_logger.output_dir metric_logger.name "
            "log_peak_memory_stats log_level custom_sharded_layers low_cpu_ram collate_fn loss.beta "
            "enable_async_checkpointing save_adapter_weights_only keep_last_n_checkpoints "
            "model.apply_lora_to_mlp dataset.source dataset.data_files dataset.split dataset.name "
            "dataset.column dataset.conversation_style dataset.train_on_input dataset.conversation_column "
            "gradient_accumulation_steps batch_size_val",
            "a run resumes by default (checkpoint.resume)": "resume_from_checkpoint",
            "memory.offload_optimizer saves memory, too": "optimizer_in_bwd",
        },
    ),
    "shuffle": free("samples are always shuffled", True, None),
    "tokenizer.max_seq_len": _POSITIONS,
    "checkpointer._component_": Row(how=_tune_files, why="model.name_or_path"),
    "model._component_": Row(how=_tune_model, why="adapter.type"),
    "model.lora_attn_modules": Row("adapter.target_modules", _tune_targets),
    "model.quantize_base": Row(how={True: {"adapter.base": "nf4"}, False: {}}, why="adapter.base"),
    "dataset._component_": Row(how=_tune_data, why="data.source, data.format"),
    "dataset.packed": Row("data.packing", {True: "documents", False: False, None: None}),
    "optimizer._component_": _word("train.optimizer", lambda value: _last(value).lower()),
    "lr_scheduler._component_": Row(
        "train.schedule",
        lambda value, _: "cosine" if _last(value) == "get_cosine_schedule_with_warmup" else _last(value),
    ),
    "loss._component_": Row("train.loss", lambda value, _: _TUNE_LOSSES.get(_last(value))),
    "compile": Row("compile", lambda value, _: bool(value)),
    "device": Row(
        "backend", {"cuda": "cuda", "cpu": "cpu", "mps": None, "xpu": None, "npu": None, None: None}
    ),
    "dtype": Row("precision", {"bf16": "bf16", "fp32": "fp32", "fp16": "fp16", None: None}),
    "enable_activation_checkpointing": Row("memory.activation_checkpointing", {True: "full", False: "none"}),
    "fsdp_cpu_offload": Row("memory.offload_params", {True: "cpu", False: None, None: None}),
    "fsdp_sharding_strategy": Row("strategy", lambda value, _: str(value).lower()),
    "fsdp_reshard_after_forward": Row("strategy", {True: "full_shard", False: "shard_grad_op"}),
    "metric_logger._component_": Row(
        how=lambda value, _: {"log.trackers": ["wandb"]} if "WandB" in str(value) else {}, why="log.trackers"
    ),
}

_TRAINER = {
    "seed": 42,
    "train.epochs": 3,
    "train.micro_batch_size": 8,
    "train.learning_rate": 5e-5,
    "train.schedule": "linear",
    "train.warmup_steps": 0,
    "train.betas": [0.9, 0.999],
    "train.weight_decay": 0.0,
    "data.eval_fraction": 0.0,
    "data.packing": False,
    "data.seq_len": 1024,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "TRL": _TRAINER | {"train.learning_rate": 2e-5, "adapter.dropout": 0.05},
    "axolotl": _TRAINER
    | {
        "train.epochs": 1,
        "train.micro_batch_size": 1,
        "train.schedule": "cosine",
        "train.warmup_ratio": 0.03,
        "data.seq_len": 512,
        "adapter.r": 8,
        "adapter.alpha": 16,
        "adapter.dropout": 0.05,
    },
    "LLaMA-Factory": _TRAINER | {"data.seq_len": 2048, "adapter.r": 8},
    "torchtune": _TRAINER
    | {
        "train.micro_batch_size": 1,
        "train.schedule": "constant",
        "train.weight_decay": 0.01,
        "train.max_grad_norm": None,
        "data.seq_len": 2048,
    },
}
"""What a program does where its file says nothing, and this one would do another thing."""
_INSTEAD = {
    "train.steps": "train.epochs",
    "train.eval_every_epochs": "train.eval_every",
    "checkpoint.every_epochs": "checkpoint.every_steps",
    "train.warmup_ratio": "train.warmup_steps",
}


def finish(file: File, devices: int) -> None:
    """What several keys say together: the batch, the loss of pairs, the defaults of the program.

    Args:
        file: whose keys were taken over.
        devices: that the batch is spread over.
    """
    found, program = file.result.values, file.program
    _preferences(file)
    lora = found.get("adapter.type") is not None
    for key in [key for key in found if key.startswith("adapter.") and not lora]:
        del found[key]
    if lora and program == "LLaMA-Factory":
        file.default("adapter.alpha", 2 * found.get("adapter.r", 8), "default of LLaMA-Factory")
    of_warmup = found.keys() & {"train.warmup_ratio", "train.warmup_steps"}
    for key, value in DEFAULTS[program].items():
        spared = (key.startswith("train.warmup") and of_warmup) or (key.startswith("adapter.") and not lora)
        if not spared and not (key == "train.epochs" and "train.steps" in found):
            settings = _positions(value, file) if key == "data.seq_len" else {key: value}
            for name, item in settings.items():
                file.default(name, item, f"default of {program}")
    for one, other in _INSTEAD.items():
        if found.get(one) is not None:
            found.pop(other, None)
    file.batch(devices)
    if found.get("data.eval_fraction") == 0:
        for key in ("train.eval_every", "train.eval_every_epochs"):
            found.pop(key, None)


def _preferences(file: File) -> None:
    """TRL's losses of pairs, whose files do not name their trainer."""
    found, of_dpo = file.result.values, ("beta", "max_prompt_length", "loss_weights")
    if file.program == "TRL" and (told_by := [name for name in of_dpo if file.get(name) is not None]):
        kinds, weights = file.get("loss_type", "sigmoid"), file.get("loss_weights")
        kinds = [str(kind) for kind in (kinds if isinstance(kinds, list) else [kinds])]
        weights = [1] * len(kinds) if weights is None else weights
        fits = isinstance(weights, list) and len(weights) == len(kinds)
        shares = dict(zip(kinds, weights, strict=True)) if fits else {}
        sft = shares.pop("sft", file.get("rpo_alpha"))
        if [*shares.values()] == [1]:
            loss = _loss(next(iter(shares)), file.get("beta"), sft)
            file.put((told_by[0],), "train.loss", loss)
        else:
            told = "has no counterpart: one formula with the weight 1 is trained, and sft beside it"
            file.refuse(("loss_type",), f"{shown(kinds)} {told}; set train.loss to dpo")
        file.default("train.learning_rate", 1e-6, "default of TRL's DPO")
        file.note(
            (told_by[0],), "read as TRL's DPO; of another of its trainers, such as ORPO, change train.loss"
        )
    if "train.loss" in found:
        file.default("data.format", "preference", "a loss of pairs")
        found.pop("data.packing", None)
