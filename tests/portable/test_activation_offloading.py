"""Offloading of activations (``memory.offload_activations``) does not change a bit of losses and weights."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from portable.config import RunConfig
from portable.model import activation_offloading
from portable.model.activation_offloading import ActivationOffloader, StreamCopier
from tests.parity import opened
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured
from tests.views import assert_same_bits, view

STEPS = 3
GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}
EXPERTS = {**TINY_MODEL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16": (1, {"precision": "bf16"}),
    "recomputed layers": (1, {"memory__activation_checkpointing": "full"}),
    "selective": (1, {"memory__activation_checkpointing": "selective"}),
    "adapter": (1, {"adapter__type": "lora", "precision": "bf16"}),
    "dropout": (1, {"model__config": GPT2}),
    "documents": (1, {"data__packing": "documents"}),
    "experts": (1, {"model__config": EXPERTS}),
    "fused backward": (
        1,
        {"train__fused_backward": True, "train__max_grad_norm": None, "train__micro_batch_size": 6},
    ),
    "compiled recomputed layers": (
        1,
        {"memory__activation_checkpointing": "full", "compile": True, "compile_backend": "aot_eager"},
    ),
    "no_shard": (2, {"strategy": "no_shard"}),
    "full_shard": (2, {"strategy": "full_shard", "precision": "bf16"}),
    "zero2, recomputed layers": (2, {"strategy": "zero2", "memory__activation_checkpointing": "full"}),
}
"""Number of ranks and settings."""


class CountingCopier(StreamCopier):
    """Copier that counts the bytes of its copies, and the largest number of layers on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.host_bytes = 0

    def copy_to_host(self, tensor: torch.Tensor) -> Any:
        self.host_bytes += tensor.nbytes
        return super().copy_to_host(tensor)


def train(config: RunConfig, folder: Path) -> tuple[list[float], list[float], int]:
    """Train and save on a rank. Returns losses, gradient norms, and the number of offloaded bytes."""
    copier = CountingCopier()
    with patch.object(activation_offloading, "StreamCopier", lambda: copier), opened(config) as trial:
        results = [trial.step() for _ in range(STEPS)]
        losses = trial.backend.read_to_host([result.loss for result in results])
        norms = trial.backend.read_to_host([result.grad_norm for result in results])
        folder.mkdir(parents=True, exist_ok=True)
        trial.engine.save_shards(folder, background=False).wait()
    return losses, norms, copier.host_bytes


@pytest.mark.parametrize("name", CASES)
def test_offloading_activations_changes_no_bit(
    name: str, tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    count, settings = CASES[name]
    if name.startswith("zero"):
        pytest.importorskip("deepspeed")
    results = []
    for offloads in (False, True):
        config = configured(
            tmp_path / f"run-{offloads}", corpus, memory__offload_activations=offloads, **settings
        )
        results.append(ranks.run(count, train, config, tmp_path / f"saved-{offloads}"))
    (losses, norms, resident), (offloaded_losses, offloaded_norms, host_bytes) = results
    assert offloaded_losses == losses
    assert offloaded_norms == norms
    assert resident == 0 < host_bytes
    assert_same_bits(view(tmp_path / "saved-True"), view(tmp_path / "saved-False"))


class Block(nn.Module):
    """Layer that saves its input and an activation, which it changes in place and saves again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64)
        self.down = nn.Linear(64, 64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = hidden + self.down(self.up(hidden).relu_()).exp_()
        return result


class EventCopier:
    """Copier that records its calls, and checks that no tensor is used before its copy is complete."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.copies = 0

    def copy_to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def copy_to_device(self, copies: list[torch.Tensor]) -> list[torch.Tensor]:
        self.calls.append("load")
        return [host_copy.clone() for host_copy in copies]

    def record_copies(self) -> int:
        self.copies += 1
        return self.copies

    def wait_for_copies(self, event: int | None) -> None:
        self.calls.append(f"wait {event}")


def run_blocks(blocks: nn.ModuleList, offloader: ActivationOffloader | None) -> list[torch.Tensor]:
    """Run a forward and backward pass, and return the gradients."""
    hidden = torch.linspace(-1, 1, 32 * 64).view(32, 64)
    for block in blocks:
        if offloader is None:
            hidden = block(hidden)
        else:
            hidden = offloader.run_layer(partial(block, hidden), block.parameters())
    hidden.sum().backward()
    gradients = [parameter.grad for parameter in blocks.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [gradient for gradient in gradients if gradient is not None]


def test_layers_are_loaded_before_their_backward_pass() -> None:
    """Copies of a layer to the device start while the layer after it computes gradients."""
    torch.manual_seed(0)
    blocks = nn.ModuleList([Block() for _ in range(4)])
    copier = EventCopier()
    offloader = ActivationOffloader(copier)
    offloaded = run_blocks(copy.deepcopy(blocks), offloader)
    # Layers 1 and 2 are released in the forward pass. Layers 3 and 4 are still on the device.
    assert copier.calls[:2] == ["wait 1", "wait 2"]
    backward = copier.calls[2:]
    assert backward[:2] == ["wait 3", "wait 4"]
    assert [call for call in backward if call == "load"] == ["load", "load"]
    # The last layer needs no copies, layer 3 loads layer 2, and layer 2 loads layer 1.
    assert backward[2:] == ["wait None", "wait None", "load", "wait 5", "load", "wait 6"]
    for gradient, expected in zip(offloaded, run_blocks(blocks, None), strict=True):
        assert torch.equal(gradient, expected)


def test_tensor_that_is_saved_twice_is_copied_once() -> None:
    """A tensor that was changed in place is another tensor."""
    copier = CountingCopier()
    hidden = torch.ones(32, 64, requires_grad=True)

    def square_and_change() -> torch.Tensor:
        scaled = hidden * 2
        product = scaled.sin() + scaled.cos()  # both save the same tensor
        return product.exp_().exp()

    ActivationOffloader(copier).run_layer(square_and_change, [hidden]).sum().backward()
    assert copier.host_bytes == 3 * hidden.nbytes  # scaled, and both results of exp


def test_evaluation_offloads_nothing() -> None:
    copier = CountingCopier()
    with torch.no_grad():
        ActivationOffloader(copier).run_layer(lambda: Block()(torch.ones(32, 64)), ())
    assert copier.host_bytes == 0
