"""Switches of a DeepSpeed JSON without a setting of the run: each works, or the error gives the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

from portable.config import RunConfig
from tests.gpu.test_parity import STEPS, Losses, assert_close, our_losses
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured


def zero_config(folder: Path, corpus: Path, **settings: Any) -> RunConfig:
    """Build a config with two micro-batches per step on each of two ranks."""
    sizes = {"train__global_batch_size": 4, "train__micro_batch_size": 1}
    return configured(folder, corpus, **{**sizes, **settings})


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Losses:
    settings = {"strategy": "no_shard", "train__micro_batch_size": 4}
    return our_losses(zero_config(tmp_path_factory.mktemp("truth"), corpus, **settings))


def with_json(folder: Path, corpus: Path, stage: int, document: dict[str, Any], **settings: Any) -> RunConfig:
    zero = {"stage": stage, **document.get("zero_optimization", {})}
    document = {**document, "zero_optimization": zero}
    return zero_config(folder, corpus, deepspeed__config=document, **settings)


def test_deepspeed_cpu_checkpointing_moves_inputs_to_host(
    truth: Losses, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    document = {"activation_checkpointing": {"cpu_checkpointing": True}}
    config = with_json(tmp_path, corpus, 2, document, memory__activation_checkpointing="full")
    assert_close(ranks.run(2, losses_with_inputs_on_host, config), truth, 1e-5)


def losses_with_inputs_on_host(config: RunConfig) -> Losses:
    """Return the losses, after a check that the inputs of each layer are moved to the host."""
    from torch.autograd.graph import save_on_cpu

    with patch("portable.model.activation_checkpointing.save_on_cpu", side_effect=save_on_cpu) as saved:
        losses = our_losses(config)
    micro_batches = STEPS * 2  # 4 samples on 2 ranks, one at a time
    assert saved.call_count == TINY_MODEL["num_hidden_layers"] * micro_batches
    return losses


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize(
    ("stage", "precision", "asked", "used"),
    [
        (1, "fp32", "fp16", "fp16"),
        (2, "fp32", "bf16", "bf16"),
        (2, "bf16", None, "fp32"),
        (3, "bf16", "bf16", "bf16"),
    ],
)
def test_deepspeed_communication_data_type_is_used(
    stage: int,
    precision: str,
    asked: str | None,
    used: str,
    truth: Losses,
    tmp_path: Path,
    corpus: Path,
    ranks: RankPool,
) -> None:
    document = {} if asked is None else {"communication_data_type": asked}
    config = with_json(tmp_path, corpus, stage, document, precision=precision)
    losses, dtypes = ranks.run(2, losses_and_reduced_types, config)
    assert dtypes == {DTYPES[used]}
    assert_close(losses, truth, 1e-2)


def losses_and_reduced_types(config: RunConfig) -> tuple[Losses, set[torch.dtype]]:
    """Return the losses, and the dtypes that DeepSpeed sums over the ranks, without norms and flags."""
    from deepspeed.comm.torch import TorchBackend

    with ExitStack() as patches:
        spies = [
            patches.enter_context(
                patch.object(TorchBackend, name, autospec=True, side_effect=getattr(TorchBackend, name))
            )
            for name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
        ]
        losses = our_losses(config)
    calls = [call for spy in spies for call in spy.call_args_list]
    given = [value for call in calls for value in (*call.args, *call.kwargs.values())]
    return losses, {one.dtype for one in given if isinstance(one, torch.Tensor) and one.numel() > 32}
