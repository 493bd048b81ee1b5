"""Configurations as DeepSpeed's and Hugging Face's documentation and examples publish them.

The same keys and values; blocks that many of them share are written once. (Those of the Hugging Face guide
are in ``test_deepspeed_json.py``.)
"""

from __future__ import annotations

import json
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("deepspeed")

from gpu.zero import config as deepspeed_json
from gpu.zero import runtime as zero_runtime
from portable.config import load_config
from portable.errors import UserError
from portable.run.settle import settle
from tests.gpu.test_parity import assert_close, our_losses
from tests.runs import configured

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool

AUTO_BATCHES: dict[str, Any] = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
SCALE: dict[str, Any] = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
AUTO_ADAMW: dict[str, Any] = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
AUTO_DECAY: dict[str, Any] = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
    },
}
AUTO_WARMUP: dict[str, Any] = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
STAGE2: dict[str, Any] = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": "auto",
    "contiguous_gradients": True,
}
STAGE3: dict[str, Any] = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": "auto",
}
HOST: dict[str, Any] = {"device": "cpu", "pin_memory": True}

# With what can run on a CPU: fp32 or bf16, and no fixed batch for a cluster.
TRAINS: dict[str, dict[str, Any]] = {
    # transformers, tests/deepspeed and the guide of the Trainer
    "transformers-zero2": {
        "fp16": {"enabled": "auto", **SCALE},
        "bf16": {"enabled": "auto"},
        "optimizer": AUTO_ADAMW,
        "scheduler": AUTO_WARMUP,
        "zero_optimization": {**STAGE2, "offload_optimizer": HOST},
        **AUTO_BATCHES,
    },
    "transformers-zero3": {
        "fp16": {"enabled": "auto", **SCALE},
        "bf16": {"enabled": "auto"},
        "optimizer": AUTO_ADAMW,
        "scheduler": AUTO_WARMUP,
        "zero_optimization": {**STAGE3, "offload_optimizer": HOST, "offload_param": HOST},
        **AUTO_BATCHES,
    },
    # accelerate, examples and tests
    "accelerate-zero2": {
        "fp16": {"enabled": "auto", **SCALE},
        "bf16": {"enabled": "auto"},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
        },
        "scheduler": AUTO_WARMUP,
        "zero_optimization": {**STAGE2, "offload_optimizer": HOST},
        **AUTO_BATCHES,
        "gradient_accumulation_steps": 1,
    },
    "accelerate-sequence-parallel": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "gradient_accumulation_steps": 1,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "seq_parallel_communication_data_type": "bf16",
    },
    # trl and open-instruct
    "trl-zero3": {
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            **STAGE3,
            "offload_optimizer": {"device": "none"},
            "offload_param": {"device": "none"},
        },
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "steps_per_print": float("inf"),
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": False,
    },
    # DeepSpeedExamples, autotuning
    "autotuning-zero1": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}},
    # DeepSpeed's pages on ZeRO and on its schedulers
    "one-cycle": {
        "zero_optimization": {"stage": 2, "contiguous_gradients": True, "overlap_comm": True},
        "optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "scheduler": {
            "type": "OneCycle",
            "params": {
                "cycle_first_step_size": 6,
                "cycle_first_stair_count": 3,
                "cycle_second_step_size": 6,
                "cycle_second_stair_count": 3,
                "decay_step_size": 3,
                "cycle_min_lr": 0.0001,
                "cycle_max_lr": 0.003,
                "decay_lr_rate": 0.001,
                "cycle_min_mom": 0.85,
                "cycle_max_mom": 0.99,
                "decay_mom_rate": 0.0,
            },
        },
        "gradient_clipping": 1.0,
    },
}

# What is written for GPUs (fp16), for a cluster's batch, or for a disk that is not here.
READ: dict[str, dict[str, Any]] = {
    "accelerate-zero1": {
        "fp16": {"enabled": True, **SCALE},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
        },
        "scheduler": AUTO_DECAY,
        "zero_optimization": {**STAGE2, "stage": 1},
        **AUTO_BATCHES,
        "gradient_accumulation_steps": 1,
    },
    "accelerate-zero3-offload": {
        "fp16": {"enabled": True, **SCALE},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        "scheduler": AUTO_DECAY,
        "zero_optimization": {**STAGE3, "offload_optimizer": HOST, "offload_param": HOST},
        **AUTO_BATCHES,
        "gradient_accumulation_steps": 1,
    },
    "hybrid-training-blog": {
        "zero_allow_untested_optimizer": True,
        "scheduler": {
            "type": "WarmupLR",
            "params": {
                "last_batch_iteration": -1,
                "warmup_min_lr": 0,
                "warmup_max_lr": 1e-4,
                "warmup_num_steps": 10000,
            },
        },
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": HOST,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "allgather_bucket_size": 2e8,
            "reduce_bucket_size": 2e8,
        },
        "fp16": {"enabled": True, **SCALE},
        "steps_per_print": 100,
        "train_micro_batch_size_per_gpu": 8,
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "number_checkpoints": False,
            "synchronize_checkpoint_boundary": False,
            "profile": False,
        },
    },
    "megatron-infinity": {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 1,
        "zero_optimization": {
            "stage": 3,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_prefetch_bucket_size": 1e7,
            "stage3_param_persistence_threshold": 1e5,
            "reduce_bucket_size": 1e7,
            "contiguous_gradients": True,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "pin_memory": False,
                "buffer_count": 6,
            },
            "offload_param": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "pin_memory": True,
                "max_in_cpu": 1e9,
                "buffer_size": 1e9,
                "buffer_count": 5,
            },
        },
        "gradient_clipping": 1.0,
        "fp16": {**SCALE, "enabled": True, "initial_scale_power": 15},
        "wall_clock_breakdown": True,
        "zero_allow_untested_optimizer": False,
        "aio": {
            "block_size": 1048576,
            "queue_depth": 16,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 2,
        },
    },
    "imagenet-zero1": {
        "train_batch_size": 256,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 50,
        "optimizer": {
            "type": "Adam",
            "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
        },
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "fp16": {"enabled": True, "auto_cast": True},
        "gradient_clipping": 0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    },
    "monitors-and-profilers": {
        "train_batch_size": 16,
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1, "round_robin_gradients": True},
        "tensorboard": {"enabled": False, "output_path": "output/ds_logs/", "job_name": "train_bert"},
        "wandb": {"enabled": False, "group": "my_group", "team": "my_team", "project": "my_project"},
        "csv_monitor": {"enabled": False, "output_path": "output/ds_logs/", "job_name": "train_bert"},
        "comms_logger": {
            "enabled": False,
            "verbose": False,
            "prof_all": True,
            "debug": False,
            "prof_ops": [],
        },
        "flops_profiler": {
            "enabled": False,
            "profile_step": 1,
            "module_depth": -1,
            "top_modules": 1,
            "detailed": True,
            "output_file": None,
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "checkpoint": {
            "tag_validation": "Warn",
            "load_universal": False,
            "use_node_local_storage": False,
            "parallel_write": {"pipeline_stage": False},
        },
        "communication_data_type": "fp32",
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "dump_state": False,
    },
    "warmup-cosine": {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.95], "eps": 1e-8}},
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": 1000, "warmup_num_steps": 100, "cos_min_ratio": 0.1},
        },
        "bf16": {"enabled": True, "immediate_grad_update": True},
        "zero_optimization": {"stage": 2},
    },
    "range-test": {
        "zero_optimization": {"stage": 1},
        "scheduler": {
            "type": "LRRangeTest",
            "params": {
                "lr_range_test_min_lr": 0.0001,
                "lr_range_test_step_size": 200,
                "lr_range_test_step_rate": 5,
                "lr_range_test_staircase": False,
            },
        },
    },
}

# Published, and out of this version's or the installed DeepSpeed's reach.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bert-onebit-lamb": (
        {
            "optimizer": {
                "type": "OneBitLamb",
                "params": {"lr": 11e-3, "max_coeff": 0.3, "freeze_step": 1000, "comm_backend_name": "nccl"},
            }
        },
        "optimizer.type OneBitLamb: DeepSpeed .* has no such optimizer",
    ),
    "pruning": ({"compression_training": {}}, "compression.*removed"),
    "layer-drop": ({"progressive_layer_drop": {"enabled": True}}, "removed"),
    "random-ltd": ({"data_efficiency": {"enabled": True}, **TRAINS["autotuning-zero1"]}, "data_efficiency"),
}


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> Any:
    return zero_runtime.import_deepspeed("cpu")


@pytest.mark.parametrize("name", TRAINS)
def test_trains_as_it_stands(name: str, tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    """Against DDP (OneCycle: ZeRO-1) with the schedule and optimizer that the JSON comes to, on one rank."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(TRAINS[name]))
    settings: dict[str, Any] = {"train__micro_batch_size": 3, "precision": "auto", "train__warmup_steps": 0}
    config = configured(tmp_path, corpus, deepspeed__config=str(file), **settings)
    taken = settle(config, "cpu", 2).config.train.model_dump()
    strategy = "zero1" if taken["schedule"] == "OneCycle" else "no_shard"
    plain = configured(tmp_path, corpus, strategy=strategy, **{f"train__{k}": v for k, v in taken.items()})
    steps = 6  # some of their schedules begin slowly
    assert_close(ranks.run(2, our_losses, config, steps), ranks.run(1, our_losses, plain, steps), 1e-2)


@pytest.mark.parametrize("name", READ)
def test_is_taken_over(name: str) -> None:
    config = load_config({"deepspeed": {"config": deepcopy(READ[name])}})
    document = deepspeed_json.read(config)
    assert document is not None
    adopted = deepspeed_json.adopt(config, document, 1)
    assert adopted.strategy == f"zero{READ[name]['zero_optimization']['stage']}"


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name(name: str) -> None:
    document, message = REFUSED[name]
    config = load_config({"deepspeed": {"config": document}})
    with pytest.raises(UserError, match=message):
        deepspeed_json.adopt(config, deepspeed_json.read(config), 1)  # type: ignore[arg-type]
