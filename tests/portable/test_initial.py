"""Initial weights beside ``from_config``: the same numbers, or by parts the same distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from portable.config import load_config
from portable.model import build as models
from portable.model.initialize import InitialWeights
from portable.model.parameters import state_tensors
from tests.architectures import TASKS, pairs
from tests.tiny_models import tiny_config

# What sets its weights in a way of its own: in a constructor, in the model above, by depth, before a tie.
ARCHITECTURES = [
    ("llama", "causal-lm"),
    ("gpt2", "causal-lm"),
    ("openai-gpt", "causal-lm"),  # a layer's matrices are drawn by its constructor
    ("apertus", "causal-lm"),  # an activation with parameters
    ("falcon_h1", "causal-lm"),  # the model's rule looks into its layers
    ("mamba2", "causal-lm"),
    ("gpt_oss", "causal-lm"),
    ("zamba2", "causal-lm"),  # layers that share weights
    ("modernbert", "masked-lm"),  # the head has another rule than the table it is tied to
    ("roberta", "masked-lm"),  # a padding row
    ("funnel", "masked-lm"),
    ("t5", "seq2seq-lm"),
    ("bart", "seq2seq-lm"),
    ("bert", "sequence-classification"),
]

LARGEST = 5_000_000  # parameters of what is swept


def blueprint(model_type: str, task: str) -> InitialWeights:
    given: dict[str, Any] = {"model": {"config": tiny_config(model_type), "task": task}}
    if task != "causal-lm":
        given["data"] = {"source": "text.jsonl"}
    settings = load_config(given).model
    return InitialWeights.of(models.build_model(models.model_config(settings), settings))


def drawn(ours: InitialWeights, **parts: int) -> dict[str, torch.Tensor]:
    """All weights by name; no part repeats one of another's."""
    weights: dict[str, torch.Tensor] = {}
    for part in ours.initial_weights(3, **parts):
        assert not weights.keys() & part.keys()
        weights.update({name: torch.from_numpy(weight.read()) for name, weight in part.items()})
    return weights


def reference(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    kind: Any = type(model)
    torch.manual_seed(3)
    return {n: t.detach() for n, t in state_tensors(kind._from_config(model.config)).items()}


def unlike(ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """How two draws differ that ought to come of one distribution, with six standard errors of tolerance."""
    if ours.shape != theirs.shape:
        return f"shape {list(ours.shape)} for {list(theirs.shape)}"
    ours, theirs, size = ours.double(), theirs.double(), max(theirs.numel(), 1)
    if size < 2 or float(theirs.std()) == 0:
        same = torch.allclose(ours, theirs, atol=0.1) if size < 2 else torch.equal(ours, theirs)
        return None if same else f"{ours.flatten()[:2].tolist()} for {theirs.flatten()[:2].tolist()}"
    if size < 16:  # too few for a spread
        return None if float(ours.std()) > 0 else "all the same"
    spread, mean = float(theirs.std()), float(theirs.mean())
    if abs(float(ours.std()) - spread) > 6 * spread / math.sqrt(size):
        return f"std {float(ours.std()):.4g} for {spread:.4g}"
    if abs(float(ours.mean()) - mean) > 6 * spread * math.sqrt(2 / size):
        return f"mean {float(ours.mean()):.4g} for {mean:.4g}"
    zeros = float((ours == 0).double().mean()), float((theirs == 0).double().mean())
    return None if abs(zeros[0] - zeros[1]) < 0.01 else f"{zeros[0]:.0%} zeros for {zeros[1]:.0%}"


def check(model_type: str, task: str) -> None:
    ours = blueprint(model_type, task)
    theirs = reference(ours.model)
    at_once = drawn(ours)
    assert at_once.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(at_once[name], theirs[name])] == []
    by_layers = drawn(ours, part_bytes=1)
    assert by_layers.keys() == theirs.keys()
    differences = {name: unlike(by_layers[name], tensor) for name, tensor in theirs.items()}
    assert {name: how for name, how in differences.items() if how} == {}


@pytest.mark.parametrize(("model_type", "task"), ARCHITECTURES)
def test_initial_weights_are_those_of_from_config(model_type: str, task: str) -> None:
    check(model_type, task)


def test_parts_are_drawn_apart_and_one_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = blueprint("gpt2", "causal-lm")
    made: list[int] = []
    build = InitialWeights._built

    def counted(self: InitialWeights, seed: int) -> PreTrainedModel:
        model = build(self, seed)
        made.append(sum(p.numel() for p in model.parameters() if not p.is_meta))
        return model

    monkeypatch.setattr(InitialWeights, "_built", counted)
    one, again = drawn(ours, part_bytes=1), drawn(ours, part_bytes=1)
    assert all(torch.equal(one[name], again[name]) for name in one)
    name = "transformer.h.{}.attn.c_attn.weight"
    assert not torch.equal(one[name.format(0)], one[name.format(1)])
    layer = sum(p.numel() for p in ours.model.transformer.h[0].parameters())
    rest = sum(p.numel() for p in ours.model.parameters()) - 2 * layer
    assert made == 2 * [0, rest, layer, layer]  # the first tells in which order layers are made


def test_what_has_no_value_at_all_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what was in that memory before, which differs from rank to rank and may be no number."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    construct = GPT2Attention.__init__

    def forgetful(module: Any, *args: Any, **kwargs: Any) -> None:
        construct(module, *args, **kwargs)
        module.forgotten = torch.nn.Parameter(torch.empty(64, 64))

    monkeypatch.setattr(GPT2Attention, "__init__", forgetful)
    ours = blueprint("gpt2", "causal-lm")
    for size in (1, 1 << 30):
        weights = drawn(ours, part_bytes=size)
        assert int(weights["transformer.h.1.attn.forgotten"].count_nonzero()) == 0
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", TASKS)
def test_initial_weights_of_every_architecture(task: str) -> None:
    """Of all whose default config becomes small by :func:`tests.tiny_models.tiny_config`."""
    wrong, compared = {}, 0
    for model_type in (pair.model_type for pair in pairs() if pair.task == task):
        try:
            model = blueprint(model_type, task).model
            small = sum(parameter.numel() for parameter in model.parameters()) < LARGEST
        except Exception:  # not a model of text alone, or of other sizes
            continue
        if not small:
            continue
        compared += 1
        try:
            check(model_type, task)
        except Exception as error:
            wrong[model_type] = str(error)
    assert compared > 15
    assert wrong == {}
