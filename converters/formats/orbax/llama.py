"""Levanter's and EasyDeL's Llama-shaped models with the names and the rows of transformers.

Both keep transformers' order of rows. Levanter's linear layers are [out, in] with the heads as dimensions of
their own, and scanned layers are stacked along the first; EasyDeL's kernels are [in, out]. Which model it is
and how many of the vocabulary's rows are padding is in config.json.

Source: levanter/models/llama.py, layers/attention.py, their `to_state_dict`; EasyDeL's modules/llama,
utils/parameters_transformation.py (`easydel_to_torch`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from converters.containers.pickle_reader import shown
from converters.errors import CheckpointError
from converters.formats.orbax.maxtext import Layout, Place
from converters.names.model_config import sizes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from converters.tensors.tensor import Shape

Path = tuple[str, ...]

_TYPES = ("llama", "mistral", "qwen2", "qwen3")
# Their norms of the query and the key; their biases of query, key and value.
_QUERY_NORMS, _BIASES = ("qwen3",), ("qwen2",)
# The sizes of a weight: the width, query and key heads and their size, the inner width, the vocabulary.
_LINEAR = {
    "self_attn.q_proj": ("HD", "E"),
    "self_attn.k_proj": ("KD", "E"),
    "self_attn.v_proj": ("KD", "E"),
    "self_attn.o_proj": ("E", "HD"),
    "mlp.gate_proj": ("M", "E"),
    "mlp.up_proj": ("M", "E"),
    "mlp.down_proj": ("E", "M"),
}
_NORMS = {"input_layernorm": "E", "post_attention_layernorm": "E"}
_HEAD_NORMS = {"self_attn.q_norm": "D", "self_attn.k_norm": "D"}
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"

_LEVANTER = {
    "embeddings.token_embeddings.weight": _EMBEDDING,
    "transformer.norm.weight": "model.norm.weight",
    "lm_head.weight": _HEAD,
}
_LEVANTER_LAYER = re.compile(r"transformer\.layers\.(?:stacked|blocks\.(\d{1,6}))\.(.+)")


def levanter_layout(shapes: Mapping[Path, Shape], config: Mapping[str, Any], where: str) -> Layout | None:
    """The layout of Levanter's parameters; None where the tree is another program's, or has no config.json.

    Args:
        shapes: of the arrays that are no optimizer state, by their path in the tree.
        config: the content of the model's config.json; empty where it is unknown.

    Raises:
        CheckpointError: a model that is not read, or one that does not fit config.json.
    """
    if ("model", "embeddings", "token_embeddings", "weight") not in shapes or not config:
        return None
    model = _Model(config, where, "Levanter", "without config.json to keep Levanter's names")
    if model.sizes["M"] == model.sizes["E"]:
        raise CheckpointError(
            f"{where}: its config.json has equal intermediate_size and hidden_size, so that Levanter's "
            f"matrices could be transposed; {model.remedy}"
        )

    def place(name: str, shape: Shape) -> Place | None:
        match = _LEVANTER_LAYER.fullmatch(name)
        if match is None:
            return None if name not in _LEVANTER else Place((_LEVANTER[name],))
        names = model.in_layers(match[2], match[1])
        return Place(names, stack=0 if match[1] is None else None)

    return model.layout(shapes, place, apart=True)


def easydel_layout(shapes: Mapping[Path, Shape], config: Mapping[str, Any], where: str) -> Layout | None:
    """The same for EasyDeL's parameters."""
    if ("model", "model", "embed_tokens", "embedding") not in shapes or not config:
        return None
    model = _Model(config, where, "EasyDeL", "it there with model.to_torch().save_pretrained(...)")

    def place(name: str, shape: Shape) -> Place | None:
        above, _, last = name.rpartition(".")
        if last not in ("kernel", "embedding", "scale", "bias"):
            return None
        names = (f"{above}.{'bias' if last == 'bias' else 'weight'}",)
        return Place(names, kernel=last == "kernel" and len(shape) == 2)

    return model.layout(shapes, place, apart=False)


class _Model:
    """A Llama-shaped model by its config.json."""

    def __init__(self, config: Mapping[str, Any], where: str, program: str, remedy: str) -> None:
        self.config = config
        self.where = where
        self.program = program
        self.remedy = f"convert {remedy}"
        self.kind = config.get("model_type")
        if self.kind not in _TYPES:
            raise CheckpointError(
                f"{where}: {program}'s model of type {shown(self.kind)} is not read; {self.remedy}"
            )
        self.sizes = sizes_of(config, where)
        self.layers = self.sizes["L"]
        self.shapes = self._shapes()

    def _shapes(self) -> dict[str, tuple[str, ...]]:
        """The parameters of a layer and their sizes."""
        modules = {**_NORMS, **(_HEAD_NORMS if self.kind in _QUERY_NORMS else {})}
        made: dict[str, tuple[str, ...]] = {f"{name}.weight": (size,) for name, size in modules.items()}
        for name, sizes in _LINEAR.items():
            made[f"{name}.weight"] = sizes
            attention = name.startswith("self_attn")
            biased = self.config.get("attention_bias" if attention else "mlp_bias") is True
            if biased or (self.kind in _BIASES and attention and not name.endswith("o_proj")):
                made[f"{name}.bias"] = sizes[:1]
        return made

    def in_layers(self, name: str, number: str | None) -> tuple[str, ...]:
        layers = range(self.layers) if number is None else (int(number),)
        return tuple(f"model.layers.{layer}.{name}" for layer in layers)

    def layout(
        self, shapes: Mapping[Path, Shape], place: Callable[[str, Shape], Place | None], *, apart: bool
    ) -> Layout:
        """The places of all parameters below `model`; with `apart`, heads are dimensions of their own."""
        made = Layout()
        wanted = {_EMBEDDING: ("V", "E"), "model.norm.weight": ("E",)}
        if self.config.get("tie_word_embeddings") is not True:
            wanted[_HEAD] = ("V", "E")
        for layer in range(self.layers):
            wanted |= {f"model.layers.{layer}.{name}": sizes for name, sizes in self.shapes.items()}
        found: set[str] = set()
        for path, shape in shapes.items():
            name = ".".join(path[1:])
            at = place(name, shape) if path[0] == "model" else None
            if at is None or (at.names[0] not in wanted and at.names != (_HEAD,)):
                raise CheckpointError(
                    f"{self.where}: {shown('.'.join(path))} has no place in a model of type {self.kind} by "
                    f"config.json; {self.remedy}"
                )
            sizes = wanted.get(at.names[0], ("V", "E"))
            made.places[path] = self._checked(path, shape, at, sizes, apart=apart)
            if not found.isdisjoint(at.names):
                raise CheckpointError(f"{self.where}: damaged, {at.names[0]} is there twice")
            found.update(at.names)
        lost = next((name for name in wanted if name not in found), None)
        if lost is not None:
            raise CheckpointError(
                f"{self.where}: holds no {lost}, which a model of type {self.kind} has by config.json; "
                "give the config.json of this model"
            )
        return made

    def _checked(self, path: Path, shape: Shape, at: Place, sizes: tuple[str, ...], *, apart: bool) -> Place:
        """`at` with the shape of the result, if a stored array of `shape` is such a parameter."""
        inner = shape if at.stack is None else shape[1:]
        number = {size: prod(self.sizes[letter] for letter in size) for size in sizes}
        rows = None
        if sizes[0] == "V" and len(inner) == 2:
            rows = number["V"]
            dim = 1 if at.kernel else 0
            if inner[dim] >= rows:
                number["V"] = inner[dim]
        wanted = tuple(number[size] for size in sizes)
        choices = [wanted[::-1] if at.kernel else wanted]
        if apart:
            choices += self._apart(sizes)
        if inner not in choices or (at.stack is not None and shape[:1] != (self.layers,)):
            whole = [*([self.layers] if at.stack is not None else []), *choices[-1]]
            raise CheckpointError(
                f"{self.where}: {'.'.join(path)} is {list(shape)}, by config.json it would be {whole}; "
                "give the config.json of this model"
            )
        return replace(at, shape=wanted, rows=rows)

    def _apart(self, sizes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """The shapes of a parameter whose heads are dimensions, query heads also in groups for each key."""
        by = self.sizes
        heads: dict[str, list[tuple[int, ...]]] = {
            "HD": [(by["H"], by["D"]), (by["K"], by["H"] // by["K"], by["D"])],
            "KD": [(by["K"], by["D"])],
        }
        made: list[tuple[int, ...]] = [()]
        for size in sizes:
            made = [(*start, *end) for start in made for end in heads.get(size, [(by[size[0]],)])]
        return made
