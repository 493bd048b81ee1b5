"""The model that is planned for, looked at and run on the meta device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from portable.errors import UserError, one_line
from portable.model.flops import flops_per_token
from portable.model.layers import transformer_layers
from portable.model.parameters import embeddings, state_tensors
from portable.optim.build import decaying
from portable.planner.activations import activations
from portable.planner.inventory import Inventory, Weight
from portable.planner.memory_model import footprint_room
from portable.planner.passes import Activations, Peak

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from transformers import PreTrainedModel

    from portable.config import RunConfig
    from portable.planner.passes import Request


class Subject(Protocol):
    """What a planner asks of a model."""

    @property
    def inventory(self) -> Inventory:
        """What there is of it."""

    def activations(self, request: Request) -> Activations:
        """What passes of it take."""


class LiveSubject:
    """A model that is here.

    Args:
        model: on the meta device; left as it is.
        config: of the run, with a backend that is not ``auto``.
    """

    def __init__(self, model: PreTrainedModel, config: RunConfig) -> None:
        try:
            self.inventory = inspect(model, footprint_room(config.backend).units(model, config))
        except UserError as error:  # it matters where units are gathered, and nowhere else
            self.inventory = replace(inspect(model), no_units=str(error))
        self._model = model
        self._found: dict[Request, Activations] = {}

    def activations(self, request: Request) -> Activations:
        """See :class:`Subject`. A guess, where the model's code looks at values that nobody has computed."""
        if request not in self._found:
            try:
                self._found[request] = activations(self._model, request)
            except Exception as error:
                why = f"{type(error).__name__}: {one_line(error)}"
                self._found[request] = _guess(self.inventory, request, why)
        return self._found[request]


def inspect(module: nn.Module, units: Sequence[nn.Module] = ()) -> Inventory:
    """What there is of a transformers model.

    Args:
        module: the model, on whatever device.
        units: the modules of it that FSDP gathers as one, the outer before the inner.
    """
    model = cast("PreTrainedModel", module)
    layers = [layer for _, layer in transformer_layers(model)]
    # Of a parameter that several layers share, the first has it; of nested units the innermost.
    layer_of = {id(p): i for i, layer in reversed(list(enumerate(layers))) for p in layer.parameters()}
    unit_of = {id(p): i for i, unit in enumerate(units) for p in unit.parameters()}
    decays = decaying(model)
    tables = {id(parameter) for parameter in embeddings(model)}
    head: Any = model.get_output_embeddings()
    weights = tuple(
        Weight(
            name,
            tuple(parameter.shape),
            trained=parameter.requires_grad,
            decays=name in decays,
            table=id(parameter) in tables,
            head=head is not None and parameter is head.weight,
            layer=layer_of.get(id(parameter)),
            unit=unit_of.get(id(parameter)),
        )
        for name, parameter in model.named_parameters()
    )
    text = model.config.get_text_config()
    products = flops_per_token(model, model.config, 0)
    return Inventory(
        architecture=type(model).__name__,
        weights=weights,
        state_bytes=sum(t.numel() * t.element_size() for t in state_tensors(model).values()),
        hidden_size=int(getattr(text, "hidden_size", 1024)),
        num_layers=int(getattr(text, "num_hidden_layers", len(layers))),
        vocab_size=int(getattr(text, "vocab_size", 0)),
        products=products,
        scores=flops_per_token(model, model.config, 1) - products,
    )


def _guess(model: Inventory, request: Request, why: str) -> Activations:
    """Activations by formula, for a model that cannot be run without values.

    34 bytes a token, layer and hidden unit in 16 bits (Korthikanti et al., 2022, "Reducing Activation
    Recomputation in Large Transformer Models", without attention scores), 2 where layers are recomputed, and
    logits three times in fp32.
    """
    tokens = request.micro_batch * request.seq_len
    width = 2 if request.compute == "plain" else 1
    a_layer = 34 * tokens * model.hidden_size * width
    recomputed = 2 * tokens * model.hidden_size * width
    kept = model.num_layers * (recomputed if request.recompute == "full" else a_layer)
    logits = 12 * tokens * model.vocab_size
    copies = 2 * model.elements if request.compute == "autocast" else 0
    peak = Peak(kept + a_layer + logits, copies)
    return Activations(peak, peak, why)
