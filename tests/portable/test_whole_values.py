"""Code of the user's that reads parameters where a rank has only a part of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from portable.backend import Batch
from portable.config import RunConfig
from portable.errors import UserError
from portable.model import build as models
from portable.model.training_loss import Outputs
from portable.reporting.metrics import read_metrics
from portable.run.callbacks import Run
from portable.run.rank import run_rank
from tests.ranks import RankPool
from tests.runs import configured

HERE = __name__
_models: list[nn.Module] = []


def remembered(model: Any) -> None:
    model.register_forward_pre_hook(lambda module, _: _models.append(module))


class Decayed:
    """Takes a parameter into the loss, past the forward pass."""

    needs = ("log_probs",)

    def __call__(self, outputs: Outputs, batch: Batch) -> Any:
        model: Any = _models[-1]
        assert outputs.log_probs is not None
        valid = (batch["labels"] != -100).sum()
        weight = model.model.layers[0].mlp.up_proj.weight
        return weight.square().sum() * valid - outputs.log_probs.sum(), valid


class Norm:
    """Logs the norm of a parameter; ``gathered``: of all ranks' parts."""

    def __init__(self, gathered: bool) -> None:
        self.gathered = gathered

    def on_log(self, run: Run, values: Any) -> None:
        parameter: Any = next(run.model.parameters())
        if not self.gathered:
            run.log({"norm": float(parameter.detach().norm())})
        elif isinstance(parameter, DTensor):
            run.log({"norm": parameter.full_tensor().detach().norm()})
        else:
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                run.log({"norm": float(parameter.detach().norm())})


@pytest.fixture
def own(corpus: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """Settings of a run in which small parameters are sharded like large ones."""
    pytest.importorskip("deepspeed")
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    common: dict[str, Any] = {"train__steps": 2, "log__every_steps": 1, "train__micro_batch_size": 1}
    common |= {"checkpoint__export": False, "log__sample_tokens": 0}

    def of(strategy: str, **more: Any) -> RunConfig:
        config = {"deepspeed__config": str(path)} if strategy == "zero3" else {}
        return configured(tmp_path / strategy, corpus, **common, **config, **more, strategy=strategy)

    return of


def trained(config: RunConfig) -> str:
    try:
        run_rank(config.backend, config)
    except UserError as error:
        return str(error)
    return ""


WHERE = "reads a parameter outside of the model's forward pass, where a rank has a part of it; "


@pytest.mark.parametrize("strategy", ["full_shard", "zero3"])
def test_a_loss_that_reads_parameters_is_refused(strategy: str, own: Any, ranks: RankPool) -> None:
    config = own(strategy, model__function=f"{HERE}:remembered", train__loss=f"{HERE}:Decayed")
    remedy = "compute it in the forward pass (model.function), or use strategy no_shard"
    assert ranks.run(2, trained, config) == f"train.loss: {HERE}:Decayed: {WHERE}{remedy}"


@pytest.mark.parametrize(
    ("strategy", "remedy"),
    [
        ("full_shard", "call full_tensor() first, on all ranks"),
        ("zero3", "read it within deepspeed.zero.GatheredParameters, on all ranks"),
    ],
)
def test_a_callback_reads_whole_parameters(
    strategy: str, remedy: str, own: Any, tmp_path: Path, ranks: RankPool
) -> None:
    part, whole = (f"{HERE}:Norm(gathered={gathered})" for gathered in (False, True))
    refused = f"train.callbacks: {part}: on_log: {WHERE}{remedy}"
    assert ranks.run(2, trained, own(strategy, train__callbacks=part)) == refused
    assert trained(own("no_shard", train__callbacks=part)) == ""
    assert ranks.run(2, trained, own(strategy, train__callbacks=whole)) == ""
    found, truth = (
        [row["norm"] for row in read_metrics(tmp_path / name) if "norm" in row]
        for name in (strategy, "no_shard")
    )
    assert found == pytest.approx(truth, rel=1e-5) and len(found) == 2


def with_scalar(model: Any) -> None:
    model.gain = nn.Parameter(torch.ones(()))


def test_a_scalar_parameter_is_refused(corpus: Path, tmp_path: Path) -> None:
    config = configured(tmp_path, corpus, model__function=f"{HERE}:with_scalar")
    with pytest.raises(UserError, match=r"with_scalar: the parameter gain is a scalar, .* torch\.ones\(1\)"):
        models.training_model(models.model_config(config.model), config)
