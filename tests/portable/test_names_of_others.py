"""What people paste from other programs: each name works, or the refusal says what to write in its place.

The names are those used most in the examples that the programs bring along: transformers' scripts (the
Trainer), TRL's documentation and alignment-handbook's recipes, axolotl's and LLaMA-Factory's YAML files.
"""

from __future__ import annotations

import pytest

from portable.config import RunConfig, keys, load_config, parse_args
from portable.errors import UserError

TABLE = keys.settings(RunConfig)

TRAINER = {
    "adam_beta1": "train.betas",
    "adam_beta2": "train.betas",
    "adam_epsilon": "train.eps",
    "bf16": "precision to bf16",
    "block_size": "data.seq_len",
    "data_seed": "seed",
    "dataloader_num_workers": "data.num_workers",
    "dataset_config_name": "data.config_name",
    "dataset_name": "data.source",
    "ddp_timeout": "log.hang_timeout",
    "do_eval": "--eval-only",
    "do_train": "leave it out",
    "eval_steps": "train.eval_every",
    "eval_strategy": "train.eval_every_epochs",
    "evaluation_strategy": "train.eval_every_epochs",
    "fp16": "precision to fp16",
    "fsdp": "strategy and the section fsdp",
    "fsdp_config": "--accelerate-config",
    "gradient_accumulation_steps": "train.global_batch_size to the product of",
    "gradient_checkpointing": "memory.activation_checkpointing",
    "learning_rate": "train.learning_rate",
    "load_best_model_at_end": "checkpoint.export_best",
    "logging_steps": "log.every_steps",
    "lr_scheduler_type": "train.schedule",
    "max_grad_norm": "train.max_grad_norm",
    "max_seq_length": "data.seq_len",
    "max_source_length": "data.seq_len",
    "max_steps": "train.steps",
    "max_target_length": "data.target_seq_len",
    "max_train_samples": "data.max_samples",
    "model_max_length": "data.seq_len",
    "model_name_or_path": "model.name_or_path",
    "num_train_epochs": "train.epochs",
    "optim": "train.optimizer",
    "output_dir": "",
    "overwrite_output_dir": "checkpoint.resume",
    "per_device_eval_batch_size": "train.micro_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "preprocessing_num_workers": "leave it out",
    "remove_unused_columns": "leave it out",
    "report_to": "log.trackers",
    "resume_from_checkpoint": "checkpoint.resume",
    "run_name": "log.name",
    "save_steps": "checkpoint.every_steps",
    "save_strategy": "checkpoint.every_epochs",
    "save_total_limit": "checkpoint.keep",
    "seed": "",
    "source_prefix": "data.source_prefix",
    "text_column": "data.text_field",
    "tf32": "precision to tf32",
    "tokenizer_name": "data.tokenizer",
    "torch_compile": "compile",
    "train_file": "data.source",
    "validation_file": "data.eval_fraction",
    "validation_split_percentage": "data.eval_fraction",
    "warmup_ratio": "train.warmup_ratio",
    "warmup_steps": "train.warmup_steps",
    "weight_decay": "train.weight_decay",
}
TRL = {
    "attn_implementation": "model.attention",
    "beta": "train.loss",
    "bf16": "precision to bf16",
    "chat_template": "data.chat_template",
    "dataset_mixture": "data.source",
    "dataset_name": "data.source",
    "dataset_num_proc": "leave it out",
    "dataset_test_split": "data.eval_fraction",
    "dataset_text_field": "data.text_field",
    "dataset_train_split": "data.split",
    "disable_dropout": "train.dropout: true",
    "dtype": "precision",
    "eval_steps": "train.eval_every",
    "eval_strategy": "train.eval_every",
    "formatting_func": "data.format to messages",
    "gradient_accumulation_steps": "train.global_batch_size",
    "gradient_checkpointing": "memory.activation_checkpointing",
    "gradient_checkpointing_kwargs": "memory.activation_checkpointing",
    "hub_model_id": "hub.repo",
    "hub_strategy": "hub.push",
    "bnb_4bit_quant_type": "adapter.base to nf4",
    "ld_alpha": "train.loss to a class of your own",
    "learning_rate": "train.learning_rate",
    "load_in_4bit": "adapter.base to nf4",
    "log_level": "leave it out",
    "logging_first_step": "log.every_steps",
    "logging_steps": "log.every_steps",
    "logging_strategy": "log.every_steps",
    "lora_alpha": "adapter.alpha",
    "lora_r": "adapter.r",
    "lora_target_modules": "adapter.target_modules",
    "loss_type": "train.loss",
    "lr_scheduler_type": "train.schedule",
    "max_length": "data.seq_len",
    "max_prompt_length": "data.seq_len",
    "max_steps": "train.steps",
    "missing_eos_penalty": "leave it out",
    "model_name_or_path": "model.name_or_path",
    "model_revision": "model.name_or_path",
    "num_generations": "leave it out",
    "num_train_epochs": "train.epochs",
    "packing": "data.packing",
    "per_device_train_batch_size": "train.micro_batch_size",
    "precompute_ref_log_probs": "leave it out",
    "push_to_hub": "hub.push",
    "reward_model_path": "leave it out",
    "router_aux_loss_coef": "model.config",
    "rpo_alpha": "train.loss: dpo(sft=1.0)",
    "save_strategy": "checkpoint.every_epochs",
    "torch_dtype": "precision",
    "trust_remote_code": "model.trust_remote_code",
    "use_liger_kernel": "leave it out",
    "use_peft": "adapter.type",
    "vllm_mode": "leave it out",
    "warmup_steps": "train.warmup_steps",
}
AXOLOTL = {
    "attn_implementation": "model.attention",
    "base_model": "model.name_or_path",
    "bf16": "precision to bf16",
    "chat_template": "data.chat_template",
    "dataset_prepared_path": "data.cache_dir",
    "datasets": "data.source",
    "eot_tokens": "leave it out",
    "eval_sample_packing": "set data.packing to documents",
    "evals_per_epoch": "train.eval_every_epochs to one divided by it",
    "field_messages": "data.format to messages",
    "flash_attention": "flash_attention_2",
    "fsdp_config": "strategy and the section fsdp",
    "gradient_accumulation_steps": "train.global_batch_size",
    "gradient_checkpointing": "memory.activation_checkpointing",
    "gradient_checkpointing_kwargs": "memory.activation_checkpointing",
    "learning_rate": "train.learning_rate",
    "liger_rms_norm": "leave it out",
    "load_in_4bit": "adapter.base to nf4",
    "load_in_8bit": "adapter.base to int8",
    "logging_steps": "log.every_steps",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_model_dir": "adapter.name_or_path",
    "lora_r": "adapter.r",
    "lora_target_linear": "adapter.target_modules",
    "lora_target_modules": "adapter.target_modules",
    "loraplus_lr_ratio": "train.parameter_groups",
    "lr_scheduler": "train.schedule",
    "message_field_role": "data.format to messages",
    "micro_batch_size": "train.micro_batch_size",
    "model_type": "model.config",
    "num_epochs": "train.epochs",
    "optimizer": "train.optimizer",
    "pad_to_sequence_len": "data.seq_len",
    "plugins": "leave it out",
    "resume_from_checkpoint": "checkpoint.resume",
    "roles": "data.format to messages",
    "roles_to_train": "data.roles_to_train",
    "sample_packing": "set data.packing to documents",
    "saves_per_epoch": "checkpoint.every_epochs to one divided by it",
    "sequence_len": "data.seq_len",
    "special_tokens": "data.added_tokens",
    "strict": "leave it out",
    "unfrozen_parameters": "train.trainable",
    "tf32": "precision to tf32",
    "tokenizer_type": "data.tokenizer",
    "train_on_inputs": "data.train_on",
    "val_set_size": "data.eval_fraction",
    "wandb_entity": "log.trackers",
    "wandb_project": "log.project",
    "wandb_watch": "log.trackers",
    "warmup_ratio": "train.warmup_ratio",
    "weight_decay": "train.weight_decay",
}
LLAMA_FACTORY = {
    "adapter_name_or_path": "adapter.name_or_path",
    "bf16": "precision to bf16",
    "cutoff_len": "data.seq_len",
    "dataloader_num_workers": "data.num_workers",
    "dataset": "data.source",
    "dataset_dir": "data.source",
    "ddp_timeout": "log.hang_timeout",
    "disable_gradient_checkpointing": "memory.activation_checkpointing",
    "do_train": "leave it out",
    "ema_decay": "train.ema",
    "eval_steps": "train.eval_every",
    "eval_strategy": "train.eval_every",
    "finetuning_type": "adapter.type",
    "flash_attn": "model.attention",
    "gradient_accumulation_steps": "train.global_batch_size",
    "image_max_pixels": "leave it out",
    "learning_rate": "train.learning_rate",
    "logging_steps": "log.every_steps",
    "lora_rank": "adapter.r",
    "lora_target": "adapter",
    "lr_scheduler_type": "train.schedule",
    "mask_history": "data.train_on",
    "max_samples": "data.max_samples",
    "max_steps": "train.steps",
    "model_name_or_path": "model.name_or_path",
    "num_train_epochs": "train.epochs",
    "overwrite_cache": "leave it out",
    "overwrite_output_dir": "checkpoint.resume",
    "per_device_eval_batch_size": "train.micro_batch_size",
    "per_device_train_batch_size": "train.micro_batch_size",
    "plot_loss": "leave it out",
    "pref_beta": "train.loss",
    "pref_ftx": "train.loss: dpo(sft=1.0)",
    "pref_loss": "train.loss to dpo",
    "preprocessing_num_workers": "leave it out",
    "quantization_bit": "adapter.base to nf4",
    "report_to": "log.trackers",
    "resume_from_checkpoint": "checkpoint.resume",
    "save_only_model": "checkpoint.export",
    "save_steps": "checkpoint.every_steps",
    "stage": "model.task",
    "template": "data.chat_template",
    "trust_remote_code": "model.trust_remote_code",
    "val_size": "data.eval_fraction",
    "warmup_ratio": "train.warmup_ratio",
}
LISTS = {"Trainer": TRAINER, "TRL": TRL, "axolotl": AXOLOTL, "LLaMA-Factory": LLAMA_FACTORY}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        pytest.param(name, hint, id=f"{program}-{name}")
        for program, names in LISTS.items()
        for name, hint in names.items()
    ],
)
def test_a_pasted_name_works_or_says_what_to_write(name: str, hint: str) -> None:
    if not hint:
        assert name in TABLE
        return
    with pytest.raises(UserError) as in_a_file:
        load_config({name: 1})
    with pytest.raises(UserError) as as_a_flag:
        parse_args([f"--{name}", "1"])
    for text, start in ((str(in_a_file.value), "unknown key "), (str(as_a_flag.value), "unknown flag --")):
        section = name in keys.sections(RunConfig)
        assert name in text.partition("; ")[0] if section else text.startswith(f"{start}{name}; ")
        # An exact setting, not one that begins like it.
        assert text.endswith(f"{hint}?") or hint in text.partition("; ")[2]
        assert "the top level takes" not in text
    if hint in TABLE and "did you mean" in str(in_a_file.value):
        assert str(in_a_file.value).endswith(f"did you mean {hint}?")


@pytest.mark.parametrize("names", LISTS.values(), ids=LISTS)
def test_thirty_of_each(names: dict[str, str]) -> None:
    assert len(names) >= 30


@pytest.mark.parametrize(
    ("key", "word", "hint"),
    [
        (
            "train.schedule",
            "constant_with_warmup",
            "did you mean constant, which warms up",
        ),
        ("train.optimizer", "adamw_torch", "did you mean adamw?"),
        ("train.optimizer", "adamw_torch_fused", "did you mean adamw?"),
        ("train.optimizer", "paged_adamw_8bit", "did you mean adamw_8bit?"),
        ("train.optimizer", "adamw_bnb_8bit", "did you mean adamw_8bit?"),
        ("precision", "bfloat16", "did you mean bf16?"),
        ("precision", "no", "did you mean fp32?"),
        ("strategy", "ddp", "did you mean no_shard?"),
        ("strategy", "full_shard auto_wrap", "did you mean full_shard, "),
        ("model.attention", "fa2", "did you mean flash_attention_2?"),
    ],
)
def test_a_pasted_word_says_which_was_meant(key: str, word: str, hint: str) -> None:
    with pytest.raises(UserError, match=f"^{key} must be ") as caught:
        load_config(None, {key: word})
    assert hint in str(caught.value)


def test_qlora_where_the_section_stands() -> None:
    with pytest.raises(UserError, match=r"; write adapter: {type: lora, base: nf4}"):
        load_config({"adapter": "qlora"})


def test_a_deepspeed_file_where_the_section_stands() -> None:
    with pytest.raises(UserError, match=r"^deepspeed must be .*; write deepspeed: {config: 'ds.json'}$"):
        load_config({"deepspeed": "ds.json"})
