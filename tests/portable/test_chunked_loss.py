"""The loss in chunks: the same numbers and gradients, and never all of the logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from portable.config import load_config
from portable.model.build import build_model_on_meta, load_model_config
from portable.model.chunked_loss import ChunkedHead, install_chunked_head
from portable.model.initialize import InitialWeights
from portable.model.loss import compute_summed_cross_entropy
from portable.model.parameters import materialize_model
from tests.gpu.test_parity import Losses, assert_close, our_losses
from tests.promises import record
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured
from tests.tiny_models import tiny_config

FOUR: dict[str, Any] = {"train__global_batch_size": 8, "train__micro_batch_size": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("causal-lm", {**TINY_MODEL, "vocab_size": 301}),
    "llama": ("causal-lm", {**TINY_MODEL, "vocab_size": 301, "tie_word_embeddings": False}),
    "gpt2": ("causal-lm", {**tiny_config("gpt2"), "vocab_size": 301}),
    "bert, with a bias": ("masked-lm", {**tiny_config("bert"), "vocab_size": 301}),
    "t5": ("seq2seq-lm", {**tiny_config("t5"), "vocab_size": 301}),
}


def built(task: str, config: dict[str, Any], chunk: int | str) -> tuple[nn.Module, ChunkedHead | None]:
    settings: dict[str, Any] = {"model.config": config, "model.task": task, "memory.loss_chunk_tokens": chunk}
    run = load_config(None, {**settings, "data.source": "texts.jsonl", "precision": "fp32"})
    model = build_model_on_meta(load_model_config(run.model), run.model)
    blueprint = InitialWeights.from_model(model)
    head = install_chunked_head(model, run.memory.loss_chunk_tokens)
    materialize_model(model, torch.device("cpu"))
    for name, value in blueprint.build_lazy_weights(0).items():
        model.get_parameter(name).data.copy_(torch.from_numpy(value.read()))
    return model.eval(), head


def batch(task: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(5, 301, (2, 3, 17), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    inputs = {"input_ids": tokens, "labels": labels}
    return inputs | ({"decoder_input_ids": tokens.flip(0)} if task == "seq2seq-lm" else {})


def loss_and_gradients(model: nn.Module, head: ChunkedHead | None, task: str) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    loss = compute_summed_cross_entropy(model, batch(task), head) / 7
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("chunk", "compiled"), [(1, False), (10, False), (10, True)])
@pytest.mark.parametrize("name", MODELS)
def test_chunked_loss_equals_loss_of_all_logits(name: str, chunk: int, compiled: bool) -> None:
    task, config = MODELS[name]
    model, head = built(task, config, chunk)
    assert head is not None
    if compiled:
        head.compile(backend="aot_eager")
    whole, expected = loss_and_gradients(model, None, task)
    loss, gradients = loss_and_gradients(model, head, task)
    assert float(loss) == pytest.approx(float(whole), rel=1e-6)
    record([float(loss)], [float(whole)], 1e-6)
    assert len(gradients) == len(expected)
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def test_chunked_loss_equals_loss_of_all_logits_under_autocast() -> None:
    model, head = built(*MODELS["llama, tied"], 10)
    with torch.autocast("cpu", torch.bfloat16):
        whole, expected = loss_and_gradients(model, None, "causal-lm")
        loss, gradients = loss_and_gradients(model, head, "causal-lm")
    assert float(loss) == pytest.approx(float(whole), rel=1e-5)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours - theirs).norm() <= 0.01 * theirs.norm()


def test_chunked_loss_never_holds_all_logits() -> None:
    wide = TINY_MODEL | {"vocab_size": 30_000, "hidden_size": 8, "tie_word_embeddings": False}
    model, head = built("causal-lm", wide, 2)
    with LargestTensor() as chunked:
        loss_and_gradients(model, head, "causal-lm")
    with LargestTensor() as whole:
        loss_and_gradients(model, None, "causal-lm")
    assert whole.elements == 51 * 30_000
    assert chunked.elements == 8 * 30_000  # the head's own gradient; the logits of two tokens are fewer


def test_chunked_loss_is_off_for_capped_logits() -> None:
    assert built("causal-lm", tiny_config("gemma2"), "auto")[1] is None


def model_of(tied: bool) -> dict[str, Any]:
    return {"model__config": TINY_MODEL | {"tie_word_embeddings": tied}}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[bool, Losses]:
    """Return the losses of one rank that computes all logits, with tied and untied embeddings."""
    folder = tmp_path_factory.mktemp("plain")
    return {
        tied: our_losses(configured(folder, corpus, memory__loss_chunk_tokens=0, **model_of(tied), **FOUR))
        for tied in (True, False)
    }


WRAPPED: dict[str, Any] = {"fsdp__auto_wrap_policy": "size_based_wrap", "fsdp__min_num_params": 3000}
RECOMPUTED: dict[str, Any] = {"memory__offload_params": "cpu", "memory__activation_checkpointing": "full"}


# An untied head is sharded with the root, or is a unit; other settings shard it as these do.
@pytest.mark.parametrize(("tied", "settings"), [(True, WRAPPED), (False, WRAPPED), (True, RECOMPUTED)])
def test_chunked_loss_matches_on_two_ranks(
    tied: bool, settings: Any, plain: dict[bool, Losses], tmp_path: Path, corpus: Path, ranks: RankPool
) -> None:
    chunked = configured(tmp_path, corpus, memory__loss_chunk_tokens=9, **model_of(tied), **FOUR, **settings)
    assert_close(ranks.run(2, our_losses, chunked), plain[tied], 1e-5)
