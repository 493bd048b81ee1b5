"""ZeRO through the one loop: the same losses as without it."""

from __future__ import annotations

from typing import Any

import pytest

from portable.checks import check
from portable.errors import UserError
from tests.gpu.test_parity import Losses, assert_close, our_losses
from tests.runs import configured

pytest.importorskip("deepspeed")

from pathlib import Path

from portable.config import RunConfig
from tests.ranks import RankPool


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Losses:
    settings = {"strategy": "no_shard", "train__micro_batch_size": 4}
    return our_losses(zero_config(tmp_path_factory.mktemp("truth"), corpus, **settings))


def zero_config(folder: Path, corpus: Path, **settings: Any) -> RunConfig:
    """Of two ranks, each takes two micro-batches a step."""
    sizes = {"train__global_batch_size": 4, "train__micro_batch_size": 1}
    return configured(folder, corpus, **{**sizes, **settings})


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_bf16_follows_fp32(
    strategy: str, truth: Losses, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    config = zero_config(tmp_path, corpus, strategy=strategy, precision="bf16")
    losses = ranks.run(2, our_losses, config)
    assert_close(losses, truth, 1e-2)
    # It did compute in bf16: ranks in fp32 agree to 1e-6.
    assert any(abs(a - b) > 1e-4 for (a, _), (b, _) in zip(losses, truth, strict=True))


def test_secondary_partitions(truth: Losses, tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    """hpZ keeps a second copy of the weights in each node, which is what a forward pass sees."""
    document = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
    config = zero_config(tmp_path, corpus, strategy="zero3", deepspeed__config=document)
    assert_close(ranks.run(4, our_losses, config), truth, 1e-5)
    alone = our_losses(zero_config(tmp_path, corpus, strategy="no_shard", train__frozen="norm"))
    frozen = config.replaced({"train.frozen": "norm"})
    assert_close(ranks.run(4, our_losses, frozen), alone, 1e-5)


def test_compiled_layers_do_not_change_the_loss(
    truth: Losses, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    config = zero_config(tmp_path, corpus, strategy="zero2", compile=True, compile_backend="aot_eager")
    assert_close(ranks.run(2, compiled_losses, config), truth, 1e-5)


def compiled_losses(config: RunConfig) -> Losses:
    """The losses, once it is certain that layers were compiled."""
    import torch

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses = our_losses(config)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    return losses


def test_compiled_layers_do_not_go_with_zero3(tmp_path: Path, corpus: Path) -> None:
    config = zero_config(tmp_path, corpus, strategy="zero3", compile=True)
    with pytest.raises(UserError, match=r"compile: not supported with strategy zero3.*gathers and frees"):
        check(config, late=True)


def test_sgd_and_padding(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    settings: dict[str, Any] = {
        "train__optimizer": "sgd",
        "train__learning_rate": 0.1,
        "data__packing": False,
        "train__global_batch_size": 6,
    }
    plain = ranks.run(1, our_losses, zero_config(tmp_path, corpus, strategy="no_shard", **settings))
    config = zero_config(tmp_path, corpus, strategy="zero3", **settings)
    assert_close(ranks.run(3, our_losses, config), plain, 1e-5)
