"""Suggestions for unknown names and words."""

from __future__ import annotations

from difflib import SequenceMatcher
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_NEAR = 0.72
_LONGEST = 120
_A_SETTING = "train.steps"  # if it is a candidate, all settings are

_ADAPTER = "set adapter.type to lora; r, alpha, dropout and target_modules are in the section adapter"
_NF4 = "set adapter.base to nf4, and adapter.type to lora"
_BETA = "an argument of the loss: train.loss: dpo(beta=0.1)"
_LOSSES = "set train.loss to dpo, ipo, simpo or orpo"
_NO_VARIANT = (
    "no argument of the losses of pairs here; leave it out, or set train.loss to a class of your own"
)
_RECORDS = "set data.format to messages or sharegpt, whose keys are recognised; write other records so"
_NO_REWARDS = "training on rewards of generated answers is not supported; leave it out"
_HUB = "set hub.push to end or checkpoints, hub.repo and hub.private"
_BEST = "set checkpoint.best_mode: max where greater is better, min where not"
_BY_ITSELF = "that is automatic; leave it out"
_ACCUMULATION = (
    "set train.global_batch_size to the product of micro-batch, devices and accumulation steps; how often to "
    "accumulate follows from it"
)
_EVALUATION = "set train.eval_every (steps) or train.eval_every_epochs; null: only at the end"
_SAVING = "set checkpoint.every_steps or checkpoint.every_epochs"
_TRACKERS = "set log.trackers; a tracker's other settings are its environment variables"
_VALIDATION = "set data.eval, such as {source: test.jsonl}; data.eval_fraction holds some out"
_DATA_WORK = "texts are tokenized once, on all cores, and cached in data.cache_dir; leave it out"
_FSDP = "set strategy and the section fsdp, or use --accelerate-config with the file of accelerate config"
_LIGER = "Liger kernels are not used; leave it out (memory.loss_chunk_tokens saves the logits' memory)"

_PROGRAMS: tuple[tuple[str, set[str], set[str]], ...] = (
    ("axolotl", {"base_model"}, {"datasets", "sequence_len", "micro_batch_size", "adapter", "num_epochs"}),
    ("LLaMA-Factory", {"model_name_or_path"}, {"stage", "finetuning_type", "cutoff_len", "dataset_dir"}),
    (
        "the Trainer or TRL",
        set(),
        {"per_device_train_batch_size", "num_train_epochs", "gradient_accumulation_steps", "logging_steps"},
    ),
)
"""What tells a file of another program: keys that it has, and keys of which it has some; two at least."""

ELSEWHERE = {
    # The Trainer's, and those of transformers' example scripts.
    "adam_beta1": "set train.betas, a list of both",
    "adam_beta2": "set train.betas, a list of both",
    "adam_epsilon": "train.eps",
    "attn_implementation": "model.attention",
    "auto_find_batch_size": "set train.micro_batch_size to auto",
    "batch_size": "train.global_batch_size",
    "bf16": "set precision to bf16",
    "block_size": "data.seq_len",
    "config_overrides": "model.config",
    "data_seed": "seed",
    "dataloader_drop_last": _BY_ITSELF,
    "dataloader_num_workers": "data.num_workers",
    "dataloader_pin_memory": _BY_ITSELF,
    "dataset": "data.source",
    "dataset_config_name": "data.config_name",
    "dataset_name": "data.source",
    "ddp_timeout": "log.hang_timeout",
    "disable_tqdm": _BY_ITSELF,
    "do_eval": "set data.eval_fraction and train.eval_every; --eval-only evaluates and trains nothing",
    "do_predict": "set data.eval_fraction and train.eval_every; --eval-only evaluates and trains nothing",
    "do_train": "training is the default; leave it out",
    "dtype": "precision",
    "disable_dropout": "dropout is off with losses of pairs; train.dropout: true switches it on",
    "early_stop": "train.stop_after",
    "early_stopping": "set train.early_stopping_patience, and train.early_stopping_threshold",
    "early_stopping_patience": "train.early_stopping_patience",
    "early_stopping_threshold": "train.early_stopping_threshold",
    "eval_batch_size": "evaluation takes train.micro_batch_size; leave it out",
    "eval_delay": _EVALUATION,
    "eval_steps": "train.eval_every",
    "eval_strategy": _EVALUATION,
    "evaluation_strategy": _EVALUATION,
    "fp16": "set precision to fp16",
    "fsdp": _FSDP,
    "fsdp_config": _FSDP,
    "fsdp_transformer_layer_cls_to_wrap": "fsdp.transformer_layer_cls_to_wrap",
    "gradient_accumulation_steps": _ACCUMULATION,
    "gradient_checkpointing": "set memory.activation_checkpointing to full or selective",
    "gradient_checkpointing_kwargs": "memory.activation_checkpointing",
    "gradient_clipping": "train.max_grad_norm",
    "greater_is_better": _BEST,
    "group_by_length": "sequences have one length; set data.packing so that none is padding",
    "ignore_data_skip": "checkpoint.resume_samples",
    "label_smoothing_factor": "train.label_smoothing",
    "load_best_model_at_end": "checkpoint.export_best",
    "local_rank": "the launcher sets each process's rank; leave it out",
    "log_level": _BY_ITSELF,
    "logging_dir": "logs are written to output_dir; leave it out",
    "logging_first_step": "log.every_steps",
    "logging_steps": "log.every_steps",
    "logging_strategy": "log.every_steps",
    "low_cpu_mem_usage": _BY_ITSELF,
    "lr": "train.learning_rate",
    "lr_scheduler_kwargs": "set train.min_learning_rate_ratio or train.schedule_params",
    "lr_scheduler_type": "train.schedule",
    "max_eval_samples": "train.eval_batches",
    "max_length": "data.seq_len",
    "max_seq_len": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "max_source_length": "data.seq_len",
    "max_steps": "train.steps",
    "max_target_length": "data.target_seq_len",
    "max_train_samples": "data.max_samples",
    "metric_for_best_model": "checkpoint.best_metric",
    "mixed_precision": "precision",
    "model_max_length": "data.seq_len",
    "model_name": "model.name_or_path",
    "model_name_or_path": "model.name_or_path",
    "model_revision": "the newest revision is taken; name a local folder in model.name_or_path for another",
    "neftune_noise_alpha": "train.neftune_noise_alpha",
    "no_cuda": "set backend to cpu",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "optim": "train.optimizer",
    "optim_args": "train.optimizer",
    "overwrite_cache": _DATA_WORK,
    "overwrite_output_dir": "a run resumes by default (checkpoint.resume); choose another output_dir",
    "pad_to_max_length": "set data.packing; if it is false, sequences are padded to data.seq_len",
    "per_device_eval_batch_size": "evaluation takes train.micro_batch_size; leave it out",
    "per_device_train_batch_size": "train.micro_batch_size",
    "preprocessing_num_workers": _DATA_WORK,
    "remove_unused_columns": "only the fields in data.text_field etc. are read; leave it out",
    "report_to": "log.trackers",
    "router_aux_loss_coef": "set router_aux_loss_coef and output_router_logits in model.config",
    "resume_from_checkpoint": "checkpoint.resume",
    "run_name": "log.name",
    "wandb_project": "log.project",
    "wandb_name": "log.name",
    "save_only_model": "set checkpoint.export; checkpoints always contain the optimizer",
    "save_safetensors": _BY_ITSELF,
    "save_steps": "checkpoint.every_steps",
    "save_strategy": _SAVING,
    "save_total_limit": "checkpoint.keep",
    "sharding_strategy": "strategy",
    "source_lang": "data.source_language",
    "summary_column": "data.target_field",
    "target_lang": "data.target_language",
    "text_column": "data.text_field",
    "text_column_name": "data.text_field",
    "tf32": "set precision to tf32; bf16 is faster if its precision suffices",
    "tokenizer_name": "data.tokenizer",
    "torch_compile": "compile",
    "torch_compile_backend": "compile_backend",
    "torch_compile_mode": "compile_mode",
    "torch_dtype": "precision",
    "train_batch_size": "train.global_batch_size",
    "train_file": "data.source",
    "use_cpu": "set backend to cpu",
    "use_fast_tokenizer": _BY_ITSELF,
    "use_flash_attn": "set model.attention to flash_attention_2",
    "validation_file": _VALIDATION,
    "validation_split_percentage": "set data.eval_fraction, a share of 1",
    # TRL's.
    "chat_template_path": "data.chat_template",
    "truncation_mode": "data.truncation",
    "assistant_only_loss": "set data.train_on to assistant, the default for conversations",
    "beta": _BETA,
    "packing_strategy": "set data.packing to documents, as bfd does, or to true, as wrapped does",
    "padding_free": "set data.packing to documents, which leaves hardly any padding",
    "completion_only_loss": "set data.train_on to completion, the default for records with a prompt",
    "dataset_config": "data.config_name",
    "dataset_kwargs": _DATA_WORK,
    "dataset_mixer": "data.source",
    "dataset_mixture": "data.source",
    "dataset_num_proc": _DATA_WORK,
    "dataset_test_split": _VALIDATION,
    "dataset_text_field": "data.text_field",
    "dataset_train_split": "data.split",
    "eos_token": "that of the tokenizer is used; change it in the folder of data.tokenizer",
    "eval_packing": "data.packing",
    "loss_type": "an argument of the loss: train.loss: dpo(loss_type='hinge'); or ipo, simpo, orpo",
    "max_completion_length": _NO_REWARDS,
    "max_prompt_length": "data.seq_len and data.truncation",
    "missing_eos_penalty": _NO_REWARDS,
    "num_generations": _NO_REWARDS,
    "formatting_func": _RECORDS,
    "ld_alpha": _NO_VARIANT,
    "precompute_ref_log_probs": _BY_ITSELF,
    "pref_ftx": "an argument of the loss: train.loss: dpo(sft=1.0)",
    "rpo_alpha": "an argument of the loss: train.loss: dpo(sft=1.0)",
    "ref_model": "an argument of the loss: train.loss: dpo(reference='folder')",
    "reward_funcs": _NO_REWARDS,
    "reward_model_path": _NO_REWARDS,
    "temperature": _NO_REWARDS,
    # axolotl's.
    "base_model": "model.name_or_path",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_model_dir": "adapter.name_or_path",
    "lora_modules_to_save": "adapter.modules_to_save",
    "lora_r": "adapter.r",
    "lora_rank": "adapter.r",
    "lora_target": "adapter.target_modules",
    "lora_target_linear": "set adapter.target_modules to all-linear",
    "lora_target_modules": "adapter.target_modules",
    "chat_template": "data.chat_template",
    "dataset_prepared_path": "data.cache_dir",
    "datasets": "data.source",
    "chat_template_jinja": "data.chat_template",
    "excess_length_strategy": "data.truncation",
    "eot_tokens": "the token that ends an answer is found in the data; leave it out",
    "eval_sample_packing": "set data.packing to documents",
    "evals_per_epoch": "set train.eval_every_epochs to one divided by it",
    "flash_attention": "set model.attention to flash_attention_2",
    "field_messages": _RECORDS,
    "load_in_4bit": _NF4,
    "load_in_8bit": "set adapter.base to int8, and adapter.type to lora",
    "loraplus_lr_ratio": "set train.parameter_groups to [{pattern: lora_B, learning_rate: 1.6e-3}]",
    "message_field_role": _RECORDS,
    "lr_scheduler": "train.schedule",
    "model_type": "the model's config defines its class; leave it out, or set model.config for a new model",
    "pad_to_sequence_len": "set data.packing; if it is false, sequences are padded to data.seq_len",
    "plugins": "code of your own goes into train.loss, train.callbacks or model.function; leave it out",
    "processor_type": "only text models are supported; leave it out",
    "roles": _RECORDS,
    "roles_to_train": "data.roles_to_train",
    "sample_packing": "set data.packing to documents",
    "saves_per_epoch": "set checkpoint.every_epochs to one divided by it",
    "sdp_attention": "set model.attention to sdpa",
    "sequence_len": "data.seq_len",
    "skip_prepare_dataset": _DATA_WORK,
    "special_tokens": "those of the tokenizer are used; set data.added_tokens for more",
    "strict": _BY_ITSELF,
    "test_datasets": _VALIDATION,
    "tokenizer_type": "data.tokenizer",
    "unfrozen_parameters": "train.trainable",
    "train_on_inputs": "set data.train_on to all if it is true; false is the default for conversations",
    "val_set_size": "data.eval_fraction",
    "xformers_attention": "set model.attention to sdpa",
    # LLaMA-Factory's.
    "adapter_name_or_path": "adapter.name_or_path",
    "cutoff_len": "data.seq_len",
    "dataset_dir": "data.source",
    "disable_gradient_checkpointing": "memory.activation_checkpointing",
    "eval_dataset": _VALIDATION,
    "finetuning_type": _ADAPTER,
    "flash_attn": "model.attention",
    "default_system": "put a system message into each record",
    "mask_history": "set data.train_on to last_assistant",
    "neat_packing": "set data.packing to documents",
    "ema_decay": "train.ema",
    "peft_config": "set adapter.config to a file, or the section adapter",
    "plot_loss": "report.html always has it; leave it out",
    "pref_beta": _BETA,
    "pref_loss": _LOSSES,
    "quantization_bit": "set adapter.base to nf4 for 4 bits, to int8 for 8, and adapter.type to lora",
    "stage": "leave it out for sft and pt; set train.loss for dpo, model.task for a classifier",
    "template": "data.chat_template",
    "tokenized_path": "data.cache_dir",
    "train_dataset": "data.source",
    "train_on_prompt": "set data.train_on to all",
    "use_peft": _ADAPTER,
    "val_size": "data.eval_fraction",
    "video_max_pixels": "only text models are supported; leave it out",
    "image_max_pixels": "only text models are supported; leave it out",
}
"""Other trainers' names of settings, with our setting or a remedy."""

FAMILIES = {
    "bnb_4bit_": _NF4,
    "hub_": _HUB,
    "liger_": _LIGER,
    "lora_": _ADAPTER,
    "push_to_hub": _HUB,
    "use_liger_": _LIGER,
    "vllm_": _NO_REWARDS,
    "wandb_": _TRACKERS,
}
"""The same for prefixes of names."""

IN_PLACE_OF_A_SECTION = {"adapter": {"qlora": "{type: lora, base: nf4}"}}
WORDS = {
    "log.trackers": {"none": "[], which is none", "all": "a list of those to use"},
    "memory.activation_checkpointing": {"true": "full", "block": "full", "offload": "full"},
    "model.attention": {
        "fa2": "flash_attention_2",
        "flash_attn": "flash_attention_2",
        "flash_attention": "flash_attention_2",
        "kernels-community/flash-attn2": "flash_attention_2",
    },
    "backend": {"gpu": "cuda", "rocm": "cuda", "nvidia": "cuda", "tpu": "xla"},
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
        **dict.fromkeys(("fused_adam", "paged_adamw", "paged_adamw_32bit"), "adamw"),
        **dict.fromkeys(("adamw_bnb_8bit", "adamw_torch_8bit", "paged_adamw_8bit"), "adamw_8bit"),
    },
    "train.schedule": {
        "constant_with_warmup": "constant, which warms up over train.warmup_steps",
        "cosine_with_min_lr": "cosine, with train.min_learning_rate_ratio",
        "linear_with_warmup": "linear, which warms up over train.warmup_steps",
        "warmup_stable_decay": "wsd",
        "cosine_with_warmup": "cosine, which warms up over train.warmup_steps",
    },
}
"""Other trainers' words for values, by setting."""


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate most similar to ``name`` or its last part, or None."""
    name = name.lower().replace("-", "_")[:_LONGEST]
    leaf = name.rpartition(".")[2]
    candidates = list(candidates)
    synonym = _elsewhere(leaf)
    if synonym in candidates:
        return synonym
    best, score = None, _NEAR
    for candidate in candidates:
        # A full match outranks a match of the last part: train.step is train.steps, not log.every_steps.
        folded = candidate.lower()
        likeness = max(_ratio(name, folded), _ratio(leaf, folded.rpartition(".")[2]) - 0.05)
        if likeness >= score:
            best, score = candidate, likeness + 1e-9
    return best


def did_you_mean(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Return ``"; did you mean X?"``, a remedy, or an empty string."""
    candidates = list(candidates)
    if (remedy := what_to_do(name)) and _A_SETTING in candidates:
        return remedy
    found = nearest(name, candidates)
    return f"; did you mean {prefix}{found}?" if found else ""


def what_to_do(name: str) -> str:
    """The remedy for ``name`` as ``"; do this"``, if it is more than another name."""
    remedy = _elsewhere(name.lower().replace("-", "_").rpartition(".")[2])
    return f"; {remedy}" if remedy is not None and " " in remedy else ""


def did_you_mean_word(key: str, word: str, words: Iterable[str]) -> str:
    """The same for an invalid ``word`` of the setting ``key``; ``words`` are valid."""
    known = WORDS.get(key, {}).get(word.lower())
    return f"; did you mean {known}?" if known is not None else did_you_mean(word, words)


def _elsewhere(leaf: str) -> str | None:
    if leaf in ELSEWHERE:
        return ELSEWHERE[leaf]
    return next((remedy for prefix, remedy in FAMILIES.items() if leaf.startswith(prefix)), None)


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()


def program_of(values: Mapping[str, object]) -> str | None:
    """The program whose config file has the top-level keys ``values``, or None."""
    for program, all_of, one_of in _PROGRAMS:
        found = one_of & values.keys()
        if all_of <= values.keys() and found and len(all_of | found) > 1:
            return program
    return None
