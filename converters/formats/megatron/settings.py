"""Check that transformers supports the model settings in a Megatron checkpoint's `args`.

`args` contains about a thousand settings of the run. Some of them change the computation, but leave
no trace in the tensors. Every setting that is not absent, False, empty or 0 must therefore meet one
of these conditions: `names.py` reads it, its value is known to be supported, it affects only
training, or it agrees with the model's `config.json`.

Source: Megatron-LM's megatron/training/arguments.py (core 0.4 to 0.19),
megatron/core/transformer/transformer_config.py,
megatron/core/models/common/embeddings/rotary_pos_embedding.py.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.containers.pickle_reader import PickledGlobal, format_untrusted_value
from portable.converters.errors import CheckpointError, UnsupportedCheckpointError
from portable.converters.options import is_unset
from portable.converters.storage.safe_open import read_json_object_or_empty

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.converters.storage.path_or_url import AnyPath

# Values that do not change the model. Settings that are absent, False or 0 are also accepted.
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "rotary_percent": (1.0,),
    "softmax_type": ("vanilla",),
    "rope_type": ("rope",),
    "export_kv_cache_quant": ("none",),
}
# Settings that `names.py` reads, that are compared below, or that the tensor shapes already determine.
_READ = re.compile(
    r"num_layers|hidden_size|num_attention_heads|group_query_attention|num_query_groups|kv_channels|swiglu"
    r"|ffn_hidden_size|normalization|position_embedding_type|(padded_)?vocab_size|max_position_embeddings"
    r"|make_vocab_size_divisible_by|untie_embeddings_and_output_weights|(layer)?norm_epsilon|rotary_base"
    r"|use_rope_scaling|rope_scaling_factor|window_size|openai_gelu|add_bias_linear|add_qkv_bias|qk_layernorm"
    r"|add_position_embedding|use_rotary_position_embeddings"
)
# Settings of training, parallelism, logging, saving and sampling. Also details of features that must be off:
# experts, multi-token prediction, latent and sparse attention, Mamba, retrieval, muP, hyper-connections.
_HARMLESS = re.compile(
    r"(adam|adaptive_muon|adlr|align|app_tag|async|batch_invariant|batch_p2p|bert|beta|biencoder|ckpt|check_for"
    r"|checkpoint|cp_comm|cpu_offloading|create|cross_entropy|cuda_graph|data|dataloader|ddp|decoupled|delay"
    r"|deprecated|dino|dist|dist_ckpt|distrib_optim|distribute|distributed|dsa|dynamic|encoder|decoder|eval|exit"
    r"|exp_avg|export_kd|fim|fine_grained|finetune|flash_attention|flight_recorder|fp4|fp8|freeze|fsdp"
    r"|fully_parallel|gdp|grad|gradient|grpo|gtp|hierarchical|ict|img|indexer|inference|inprocess|keep_fp8|kitchen"
    r"|langrl|lion|load|log|logging|logits|loss_scale|lr|main|mamba|manual_gc|mask|megatron_fsdp|memory|mhc|mla"
    r"|mlp_chunks|mmap|moe|mscale|mtp|muon|mup|nccl|non_persistent|null_tokenizer|nvtx|offload|one_logger"
    r"|optimizer|otel|overlap|override|param|params|persist|pin|pipeline|profile|pytorch_profiler|recompute|record"
    r"|reduce|relative_attention|replication|reset|retriever|rl|save|scatter_gather|sft|sgd|sharp|soap|step_batch"
    r"|straggler|te_precision|tensor_model_parallel|tensor_parallel|tensorboard|test|tiktoken|timing|tokenizer"
    r"|torch_fsdp2|tp_comm|train|valid|validation|virtual_pipeline|vision|wandb|wd|weight_decay|wgrad|wsd|yarn)"
    r"(_.*)?"
    r"|use_(checkpoint|contiguous|cpu|custom_fsdp|dist|distributed|flash|gigatoken|gloo|inference|kitchen|layer_wise"
    r"|legacy|mamba|mcore|megatron_fsdp|mp_args|nsys|one_sent|persistent|precision|pytorch|ring|sharp|te|tokenizer"
    r"|torch|tp_pp|transformer_engine)(_.*)?"
    r"|(enable|disable)_(autocast|bf16|chunked|cuda|experimental|ft|full|gloo|jit|mamba|msc|one_logger|parameter"
    r"|straggler|symmetric)(_.*)?"
    r"|(initial|min)_loss_scale|(start|end)_weight_decay|no_(load|save|op|persist|weight)_.*|retro_(?!add).*"
    r"|linear_(conv|key|num|value)_.*|(embedding_|output_layer_)?init_.*|num_(buckets|channels|classes|dataset.*"
    r"|distributed.*|experts_per.*|layers_(at|in|per)_.*|microbatches.*|virtual.*|workers)"
    r"|bias_(activation|dropout|gelu|swiglu)_fusion|apply_(query_key_layer_scaling|rope_fusion|wd_to_qk_layernorm)"
    r"|attention_(backend|dropout|softmax_in_fp32)|hidden_dropout|masked_softmax_fusion|qk_(clip.*|head_dim)"
    r"|qk_pos_emb_head_dim|(kv|q)_lora_rank|v_head_dim|rotary_scaling_factor|original_max_position_embeddings"
    r"|accumulate_allreduce_grads_in_fp32|activation_offload_fraction|auto_detect_ckpt_format|average_in_collective"
    r"|barrier_with_L1_time|(global_|micro_)?batch_size|(per_split_data_|data_)?args_path|DDP_impl|bf16|fp16"
    r"|fp16_lm_cross_entropy|fp32_residual_connection|block_data_path|bucket_size|calc_ft_timeouts"
    r"|calculate_per_token_loss|chat_template|classes_fraction|clip_grad|clone_scatter_output_in_embedding"
    r"|config_logger_dir|context_parallel_size|deallocate_pipeline_outputs|decrease_batch_size_if_needed"
    r"|defer_embedding_wgrad_compute|deterministic_mode|embedding_path|empty_unused_memory_level|eod_mask_loss"
    r"|evidence_data_path|expert_.*|export_model_type|filter_warnings|first_last_layers_bf16|flash_decode"
    r"|full_validation|gpu_sniff_test_interval|head_lr_mult|hybrid_context_parallel|hysteresis|iter_per_epoch"
    r"|iterations_to_skip|lazy_mpu_init|legacy_tokenizer|local_rank|max_tokens_to_oom|merge_file|metadata_path"
    r"|microbatch_group_size_per_vp_stage|mid_level_dataset_surplus|min_lr|min_offloaded_tensor_size|mock_data"
    r"|model_parallel_size|most_recent_k|object_storage_cache_path|onnx_safe|outer_dp_sharding_strategy"
    r"|offset_sampling_seed_by_dp_rank|pad_(buckets.*|vocab_size)|patch_dim|perform_(initialization|rl_step)"
    r"|phase_transition_iterations|preserve_fp32_weights|pretrained_checkpoint|query_in_block_prob"
    r"|rampup_batch_size|rank|refit_method|renormalize_blend_weights|rerun_mode|result_rejected_tracker_filename"
    r"|run_workload_inspector_server|runtime_time_unit|s3_cache_path|sample_rate|seed|seq_length"
    r"|sequence_parallel|short_seq_prob|skip_train|split|standalone_embedding_stage|start_eval_at_iter"
    r"|stream_ckpt_dequant|strict_fsdp_dtensor_load|suggested_communication_unit_size|swin_backbone_type"
    r"|symmetric_ar_type|te_rng_tracker|throughput_window_size|titles_data_path|tp_only_amax_red"
    r"|transformer_impl|trust_remote_code|variable_seq_lengths|verify_integrity|vocab_(extra_ids|file)|warmup"
    r"|world_size|multiple_validation_sets|allow_ambiguous_pad_tokens|account_for_.*|autocast_dtype"
    r"|check_weight_hash_.*|decode_only_cuda_graphs|delta_offload_.*|dump_param_.*|ep_overlap_.*"
    r"|error_injection_.*|external_cuda_graph|fake_process_group|(first|last)_pipeline_num_layers|ft_.*"
    r"|fused_(residual_rmsnorm|single_qkv_rope)|high_priority_.*|logit_dtype|max_seqlen_per_dp_cp_rank"
    r"|num_speculative_tokens|per_dataset_sequences_path|reuse_grad_buf_.*|set_level_for_all_loggers"
    r"|special_tokens|store_param_remainders|timers"
)
# Megatron's only type of rotary embedding scaling. Its factor is a setting of the model.
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


def check_megatron_args(args: Mapping[str, Any], config: AnyPath | None, location: str) -> None:
    """Check that transformers supports the settings of a Megatron checkpoint.

    With the accepted settings, transformers computes the same outputs as Megatron. A setting is
    accepted if it is None, empty, False or 0, if the conversion handles it, if it has no effect on
    the model, or if it agrees with `config.json`. The settings that `_pair_with_config` returns
    must agree with `config.json` in any case.

    Args:
        args: Settings of Megatron, keyed by name.
        config: Path of the model's `config.json`, or None.
        location: Path of the checkpoint, used in error messages.

    Raises:
        CheckpointError: If the outputs of transformers may differ because of a setting, or if a
            setting contradicts `config.json`.
    """
    for name, value in args.items():
        value = value.key.rpartition(".")[2] if isinstance(value, PickledGlobal) else value
        is_off = is_unset(value) or value == 0
        is_supported = _READ.fullmatch(name) or _HARMLESS.fullmatch(name) or value in _ALLOWED.get(name, ())
        if not is_off and not is_supported:
            raise UnsupportedCheckpointError(
                f"{location}: a Megatron model with {name}={format_untrusted_value(value)} is not supported"
            )
    model_config = read_json_object_or_empty(config)
    for pair in _pair_with_config(args, model_config):
        args_value, config_value = pair.comparable_values or (pair.value, pair.config_value)
        is_equal = (
            math.isclose(args_value, config_value, rel_tol=1e-6)
            if _are_numbers(args_value, config_value)
            else args_value == config_value
        )
        if not is_equal:
            config_text = (
                f"but {config} has {pair.config_key}={format_untrusted_value(pair.config_value)}"
                if model_config
                else "and there is no config.json that confirms this value"
            )
            raise CheckpointError(
                f"{location}: the checkpoint's args have {pair.name}={format_untrusted_value(pair.value)}, "
                f"{config_text}; specify the config.json of this model with --config-from"
            )


def _are_numbers(*values: Any) -> bool:
    """Return whether all values are integers or floats."""
    return all(type(value) in (int, float) for value in values)


class _SettingPair(NamedTuple):
    """Setting of Megatron, and the key of `config.json` with the same meaning.

    Attributes:
        name: Name of the setting.
        value: Value of the setting, as error messages print it.
        config_key: Key of `config.json`.
        config_value: Value of this key in `config.json`, as error messages print it.
        comparable_values: Both values, converted such that they are equal if they have the same
            meaning. For example, the value of `tie_word_embeddings` is negated, because Megatron's
            setting has the opposite meaning. None if `value` and `config_value` can be compared
            directly.
    """

    name: str
    value: Any
    config_key: str
    config_value: Any
    comparable_values: tuple[Any, Any] | None = None


def _pair_with_config(args: Mapping[str, Any], config: Mapping[str, Any]) -> list[_SettingPair]:
    """Pair each setting of Megatron with the key of `config.json` that has the same meaning.

    The compared values of a pair are equal if both files describe the same model. The scaling of the
    rotary embedding and the attention window are always paired. Other settings are omitted if only one
    of the files contains them.

    Args:
        args: Settings of Megatron.
        config: Content of the `config.json`. Empty if it is not known.
    """
    ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
    ropes = ropes if isinstance(ropes, dict) else {}
    kind = ropes.get("rope_type", ropes.get("type", "default"))
    if all(ropes.get(key) == value for key, value in _LLAMA3.items()):
        kind = f"llama3 with factor {ropes.get('factor')}"
    scaled = f"llama3 with factor {args.get('rope_scaling_factor') or 8.0}"
    window = config.get("sliding_window") if config.get("use_sliding_window") is not False else None
    attended = args.get("window_size")
    first = attended[0] if isinstance(attended, (tuple, list)) and attended else attended
    pairs = [
        _SettingPair(
            "use_rope_scaling", scaled if args.get("use_rope_scaling") else "default", "rope_scaling", kind
        ),
        _SettingPair(
            "window_size",
            str(attended) if isinstance(attended, (tuple, list)) and _are_numbers(*attended) else attended,
            "sliding_window",
            window,
            (first + 1 if type(first) is int else first, window),
        ),
    ]
    if not config:
        return pairs
    heads, hidden = args.get("num_attention_heads"), args.get("hidden_size")
    eps = args.get("norm_epsilon", args.get("layernorm_epsilon"))
    groups = args.get("num_query_groups") if args.get("group_query_attention") is True else heads
    table: list[tuple[str, Any, tuple[str, ...]]] = [
        ("hidden_size", hidden, ("hidden_size", "n_embd")),
        ("num_layers", args.get("num_layers"), ("num_hidden_layers", "n_layer")),
        ("num_attention_heads", heads, ("num_attention_heads", "n_head")),
        ("num_query_groups", groups, ("num_key_value_heads",)),
        ("kv_channels", args.get("kv_channels"), ("head_dim",)),
        ("ffn_hidden_size", args.get("ffn_hidden_size"), ("intermediate_size", "n_inner")),
        ("rotary_base", args.get("rotary_base"), ("rope_theta",)),
        ("norm_epsilon", eps, ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")),
    ]
    values = {**ropes, **config}
    for name, ours, keys in table:
        key = next((key for key in keys if values.get(key) is not None), None)
        if ours is not None and key is not None:
            pairs.append(_SettingPair(name, ours, key, values[key]))
    tied, untied = config.get("tie_word_embeddings"), args.get("untie_embeddings_and_output_weights")
    if isinstance(tied, bool) and isinstance(untied, bool):
        name = "untie_embeddings_and_output_weights"
        pairs.append(_SettingPair(name, untied, "tie_word_embeddings", tied, (untied, not tied)))
    if args.get("swiglu") is True and "hidden_act" in config:
        activation = config["hidden_act"]
        pairs.append(_SettingPair("swiglu", True, "hidden_act", activation, ("silu", activation)))
    return pairs
