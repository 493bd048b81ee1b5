"""The model that is planned for, looked at and run on the meta device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

from portable.errors import one_line
from portable.model import embeddings, state_tensors, transformer_layers
from portable.plan import flops_per_token
from portable.planner.activations import activations
from portable.planner.inventory import Inventory, Weight
from portable.planner.passes import Activations, Peak

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from transformers import PreTrainedModel

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
        units: the modules of it that FSDP gathers as one, the outer before the inner.
    """

    def __init__(self, model: PreTrainedModel, units: Sequence[nn.Module]) -> None:
        self.inventory = inspect(model, units)
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
    """What there is of a transformers model; see :class:`LiveSubject`."""
    model = cast("PreTrainedModel", module)
    # Of a parameter that several modules share, the first has it; of nested ones the innermost.
    layer_of = _holders([layer for _, layer in reversed(transformer_layers(model))])
    unit_of = _holders(units)
    tables = {id(parameter) for parameter in embeddings(model)}
    head: Any = model.get_output_embeddings()
    weights = tuple(
        Weight(
            name,
            tuple(parameter.shape),
            trained=parameter.requires_grad,
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
        num_layers=int(getattr(text, "num_hidden_layers", len(layer_of))),
        vocab_size=int(getattr(text, "vocab_size", 0)),
        products=products,
        scores=flops_per_token(model, model.config, 1) - products,
    )


def _holders(modules: Sequence[nn.Module]) -> dict[int, int]:
    """For each parameter, by identity, the index of the last of ``modules`` that has it."""
    return {id(p): index for index, module in enumerate(modules) for p in module.parameters()}


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
