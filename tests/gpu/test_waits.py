"""No operation in a training step reads a value: on a GPU, the host would wait for all queued work.

The operations of a step are recorded on the CPU. Copies between host and device can only be tested on a GPU
(tests/gpu/test_cuda.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from portable.config.sections import ModelConfig
from portable.model.build import build_model_on_meta, load_model_config
from portable.model.parameters import replace_tensors
from portable.private.transformers_internals import skip_mask_value_checks
from tests.parity import opened
from tests.runs import configured
from tests.tiny_models import tiny_config
from tests.waits import Waits


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"precision": "fp16"},
        {"train__optimizer": "adafactor"},
        {"train__optimizer": "adamw_8bit"},
        {"memory__activation_checkpointing": "selective"},
        {"memory__loss_chunk_tokens": 7},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "adamw",
)
def test_training_step_reads_no_value(settings: dict[str, Any], tmp_path: Path, corpus: Path) -> None:
    config = configured(tmp_path, corpus, train__micro_batch_size=1, **settings)
    seen = Waits()
    with opened(config) as trial, seen.looking():
        for _ in range(2):
            for last in (False, True):
                sums = trial.engine.accumulate_gradients(
                    next(trial.batches), torch.tensor(100), is_last_micro_batch=last
                )
            trial.engine.take_optimizer_step(1e-3, 1.0, sums.values[0])
    assert not seen.found, seen.found[0]


@pytest.mark.parametrize("model_type", ["llama", "bert", "lfm2"])  # causal, in both directions, recurrent
def test_forward_pass_reads_no_mask(model_type: str) -> None:
    task = "masked-lm" if model_type == "bert" else "causal-lm"
    settings = ModelConfig.model_validate({"config": tiny_config(model_type), "task": task})
    model = build_model_on_meta(load_model_config(settings), settings)
    replace_tensors(model, lambda _, p: torch.nn.Parameter(torch.zeros(p.shape)), lambda _, b: b)
    waits, tokens = Waits(), torch.ones(2, 8, dtype=torch.int64)
    with waits.looking(), skip_mask_value_checks():
        model(input_ids=tokens, attention_mask=tokens)
    assert not waits.found
