"""torch.compile per layer: the same losses, and no more compilations than there are kinds of layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config

from portable.checks import check
from portable.config import RunConfig, load_config
from portable.engines.compiling import compile_layers
from portable.errors import UserError
from portable.evaluation.metrics import evaluate
from portable.registry import World, backend_package
from portable.run.batches import eval_batches
from tests.gpu.test_parity import Losses, assert_close, our_losses
from tests.parity import opened
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured

FOUR: dict[str, Any] = {"train__global_batch_size": 4}
# What is compiled does not depend on how the ranks share the work: each value once.
EAGER: dict[str, Any] = {"compile": True, "compile_backend": "eager"}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Losses:
    return our_losses(configured(tmp_path_factory.mktemp("truth"), corpus, **FOUR))


def graphs() -> int:
    """Graphs that dynamo has compiled in this process since it was reset."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compilations(config: RunConfig) -> list[int]:
    """Graphs compiled so far: after each of three steps, an evaluation, another step and evaluation."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with opened(config) as trial:

        def step() -> int:
            trial.step(1e-3)
            return graphs()

        def evaluation() -> int:
            held_out = trial.run.data.eval
            assert held_out is not None
            evaluate(trial.backend, trial.engine, eval_batches(trial.run, held_out))
            return graphs()

        return [step(), step(), step(), evaluation(), step(), evaluation()]


@pytest.mark.parametrize(
    ("world_size", "recompute"),
    [(1, "none"), (2, "full"), (1, "selective")],
)
def test_compilations_do_not_grow_with_the_layers(
    world_size: int, recompute: str, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    settings: dict[str, Any] = {
        **EAGER,
        "memory__activation_checkpointing": recompute,
        "train__global_batch_size": 2 * world_size,
        "train__micro_batch_size": 1,
    }
    few, many = (
        ranks.run(
            world_size,
            compilations,
            configured(
                tmp_path, corpus, model__config={**TINY_MODEL, "num_hidden_layers": layers}, **settings
            ),
        )
        for layers in (2, 3)
    )
    assert few == many
    assert few[0] >= 1
    assert few[0] == few[1] == few[2]  # the first step compiles what training needs
    assert few[3] == few[4] == few[5]  # and the first evaluation the rest


class Numbered(nn.Module):
    """A layer that computes with its own number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(hidden) * (self.layer_idx + 1.5)  # type: ignore[no-any-return]


@pytest.fixture
def fresh() -> Iterator[None]:
    saved = torch._dynamo.config.get_config_copy()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.config.load_config(saved)


def test_a_layers_number_is_no_reason_to_compile(fresh: None) -> None:
    # As torch_xla sets it, which transformers imports where it is installed.
    torch._dynamo.config.automatic_dynamic_shapes = False
    torch._dynamo.config.specialize_float = True
    model = nn.Module()
    model.layers = nn.ModuleList(Numbered(number) for number in range(12))
    compile_layers(model, load_config(None, EAGER))
    compiled = plain = torch.randn(2, 4)
    for layer in model.layers:
        compiled, plain = layer(compiled), layer.forward(plain)
    torch.testing.assert_close(compiled, plain)
    assert graphs() <= 3


def test_layers_that_do_differ_are_all_compiled(fresh: None) -> None:
    """By default the ninth of a kind would run uncompiled."""
    config = GPT2Config(
        vocab_size=32,
        n_embd=8,
        n_head=2,
        n_layer=10,
        scale_attn_by_inverse_layer_idx=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    compile_layers(model, load_config(None, EAGER))
    model(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    assert graphs() == 10


@pytest.mark.parametrize("world_size", [1, 2])
def test_captured_graphs_are_told_of_passes(
    world_size: int, truth: Losses, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    """A CPU has no CUDA graphs: held is that torch is told of each pass, and gradients are moved."""
    settings: dict[str, Any] = {
        "compile": True,
        "compile_mode": "reduce-overhead",
        "strategy": "no_shard",
        "train__micro_batch_size": 1,
        **FOUR,
    }
    found, passes, kept = ranks.run(world_size, captured, configured(tmp_path, corpus, **settings))
    assert_close(found, truth, 1e-5)
    assert passes == kept["passes"]
    assert kept["fresh"] == 0


def captured(config: RunConfig) -> tuple[Losses, int, dict[str, int]]:
    """Losses; passes that torch was told of; micro-batches, and gradients left where a graph put them."""
    from portable.engines.fsdp import sharding
    from portable.engines.fsdp.engine import TorchEngine

    told = 0
    kept = {"passes": 0, "fresh": 0}
    accumulate = TorchEngine.accumulate

    def tell() -> None:
        nonlocal told
        told += 1

    def watched(self: TorchEngine, batch: Any, valid: Any, *, last: bool) -> torch.Tensor:
        first = all(p.grad is None for p in self.model.parameters())
        came: dict[torch.Tensor, int] = {}

        def note(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            came[parameter] = parameter.grad.data_ptr()

        hooks = [p.register_post_accumulate_grad_hook(note) for p in self.model.parameters()]
        loss = accumulate(self, batch, valid, last=last)
        for hook in hooks:
            hook.remove()
        kept["passes"] += 1
        if first and not last:
            kept["fresh"] += sum(p.grad is None or p.grad.data_ptr() == at for p, at in came.items())
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "compile_layers", lambda *_: None)
        patch.setattr(torch.compiler, "cudagraph_mark_step_begin", tell)
        patch.setattr(TorchEngine, "accumulate", watched)
        return our_losses(config), told, kept


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile_backend": "inductr"}, "compile_backend: unknown inductr; use one of "),
        ({"compile_backend": "cpu"}, "compile_backend: unknown cpu; use one of "),
        (
            {"compile_mode": "reduce-overhead", "strategy": "zero2"},
            "compile_mode: reduce-overhead captures CUDA graphs",
        ),
        ({"strategy": "zero3"}, "compile: not supported with strategy zero3"),
    ],
)
def test_refused(settings: dict[str, Any], message: str, tmp_path: Path, corpus: Path) -> None:
    config = configured(tmp_path, corpus, compile=True, **settings)
    with pytest.raises(UserError) as refused:
        check(config, late=True)
        backend_package("cpu").check(config, World(1))
    assert message in str(refused.value)
