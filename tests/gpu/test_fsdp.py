"""FSDP2's settings on up to four ranks: they do not change the training.

``test_engines`` tests strategies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule

from portable.config import RunConfig
from portable.errors import UserError
from tests.gpu.test_parity import our_losses
from tests.parity import opened
from tests.ranks import RankPool
from tests.runs import configured


def units_of(config: RunConfig) -> tuple[list[str], set[str]]:
    """Return the names of the units, and the placements of the parameters."""
    with opened(config) as trial:
        model = trial.engine.model
        names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
        parameters: list[Any] = list(model.parameters())
        return names, {str(p.placements) for p in parameters}


LAYERS = ["model.layers.0", "model.layers.1"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ["", *LAYERS]),
        ({"fsdp__auto_wrap_policy": "no_wrap"}, [""]),
        (
            {"fsdp__transformer_layer_cls_to_wrap": "LlamaMLP"},
            ["", "model.layers.0.mlp", "model.layers.1.mlp"],
        ),
        # The tied embedding and the modules around it belong to the root.
        (
            {"fsdp__auto_wrap_policy": "size_based_wrap", "fsdp__min_num_params": 6000},
            ["", *(f"{layer}.{part}" for layer in LAYERS for part in ("self_attn", "mlp"))],
        ),
    ],
)
def test_fsdp_settings_select_units(
    settings: dict[str, Any], expected: list[str], tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    found = ranks.run(2, units_of, configured(tmp_path, corpus, **settings))
    assert found == (expected, {"(Shard(dim=0),)"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"fsdp__transformer_layer_cls_to_wrap": "BertLayer", "memory__offload_params": "cpu"},
            "fsdp.transformer_layer_cls_to_wrap: LlamaForCausalLM has no module of the class BertLayer; "
            "use one of LlamaDecoderLayer",
        ),
        (
            {"strategy": "no_shard", "fsdp__forward_prefetch": True},
            "fsdp.forward_prefetch: has no effect with",
        ),
    ],
)
def test_fsdp_rejects_invalid_settings(
    settings: dict[str, Any], message: str, tmp_path: Path, corpus: Path
) -> None:
    with pytest.raises(UserError) as refused:
        our_losses(configured(tmp_path, corpus, **settings))
    assert message in str(refused.value)


def _threads(config: RunConfig) -> tuple[int, int]:
    """Return the number of threads during a run, and after the end of its process group."""
    with opened(config) as trial:
        trial.step()
        during = len(list(Path("/proc/self/task").iterdir()))
    assert trial.engine.model is not None
    return during, len(list(Path("/proc/self/task").iterdir()))


def test_ddp_is_released_before_process_group(tmp_path: Path, corpus: Path, ranks: RankPool) -> None:
    """The last owner of the group waits for gloo's threads. DDP would sometimes wait forever."""
    during, after = ranks.run(2, _threads, configured(tmp_path, corpus, strategy="no_shard"))
    assert after <= during - 3
