"""Find tied weights: parameters that have two names, such as the embedding and the output head.

`save_pretrained` writes a tied parameter only once, under one of its names. This name is the owner,
and the other name is the alias. This package does the same. Some programs write both names. The
alias is then dropped if the format records that both names refer to the same data, or if its values
equal the owner's values bit for bit.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.errors import DamagedCheckpointError
from portable.converters.limits import MAX_TIED_PAIRS
from portable.converters.storage.safe_open import read_json_object_or_empty

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.tensors.tensor import Tensor

# Name suffixes of input embeddings.
EMBEDDING_NAMES = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embeddings.word_embeddings.weight",
    "embed_in.weight",
    "embeddings.weight",
    "tok_embeddings.weight",
    "shared.weight",
    "word_embedding.weight",
)
# Suffixes of each alias and of its possible owners, from transformers' `_tied_weights_keys`.
_PAIRS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("encoder.embed_tokens.weight", ("shared.weight",)),
    ("decoder.embed_tokens.weight", ("shared.weight",)),
    ("lm_head.weight", ("shared.weight", *EMBEDDING_NAMES)),
    ("embed_out.weight", EMBEDDING_NAMES),
    ("output.weight", ("tok_embeddings.weight",)),
    ("lm_head.decoder.weight", EMBEDDING_NAMES),
    ("lm_head.decoder.bias", ("lm_head.bias",)),
    ("predictions.decoder.weight", EMBEDDING_NAMES),
    ("predictions.decoder.bias", ("predictions.bias",)),
)
_ENDS = tuple({end for alias, owners in _PAIRS for end in (alias, *owners)})
HEAD_NAMES = tuple(
    alias for alias, owners in _PAIRS if set(EMBEDDING_NAMES) <= set(owners) or alias == "output.weight"
)
UNNAMED_HEAD = "the head over the vocabulary"
"""Description that replaces the name of an output head if its name depends on the model, as in BERT."""
_CLASS_WITH_HEAD = re.compile(
    r".*(ForCausalLM|LMHeadModel|ForConditionalGeneration|ForMaskedLM|ForPreTraining)"
)
_OF_ENCODERS = ("embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight")
_OF_BOTH = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_BLOCK = 1 << 20


class TiedPair(NamedTuple):
    """Names of two tensors that may be the same parameter.

    Attributes:
        alias: Name that is omitted if the tensors are tied, such as `lm_head.weight`.
        owner: Name under which the parameter is stored, such as `model.embed_tokens.weight`.
    """

    alias: str
    owner: str


class ResolvedTies(NamedTuple):
    """Tensors of a checkpoint, except the aliases of tied tensors.

    Attributes:
        tensors: Tensors, keyed by name. Aliases are excluded.
        owners_by_alias: Name of the tensor to which each alias is tied, keyed by alias.
    """

    tensors: dict[str, Tensor]
    owners_by_alias: dict[str, str]


def find_implied_ties(
    names: Iterable[str], aliases: Iterable[str], config: Mapping[str, Any]
) -> dict[str, str]:
    """Find parameters that a checkpoint omits because they are tied to the input embedding.

    For example, `lm_head.weight` is tied to the input embedding if the model class has an output
    head, the checkpoint does not mention one, and the config does not forbid tied embeddings. If
    the input embedding is named `shared.weight`, the embeddings of the encoder and the decoder are
    always tied to it.

    Args:
        names: Names of the stored tensors.
        aliases: Names that the checkpoint records as tied to a stored tensor.
        config: Content of the model's `config.json`.

    Returns:
        Name of the input embedding, keyed by the name of the parameter that is tied to it. For
        encoders such as BERT, the name of the head depends on the model, so its key is
        `UNNAMED_HEAD`. Empty if there is not exactly one input embedding, or if the config does not
        contain `architectures`.
    """
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    names = list(names)
    embeddings = [name for name in names if ends_with_name(name, EMBEDDING_NAMES)]
    if not isinstance(architecture, str) or len(embeddings) != 1:
        return {}
    owner = embeddings[0]
    ties = dict.fromkeys(_OF_BOTH if ends_with_name(owner, ("shared.weight",)) else (), owner)
    has_head = any(ends_with_name(name, HEAD_NAMES) for name in [*names, *aliases])
    if (
        not has_head
        and _CLASS_WITH_HEAD.fullmatch(architecture)
        and config.get("tie_word_embeddings") is not False
    ):
        ties[UNNAMED_HEAD if ends_with_name(owner, _OF_ENCODERS) else "lm_head.weight"] = owner
    return ties


def resolve_ties(
    stored: Mapping[str, Tensor], recorded_aliases: Mapping[str, str], config_path: AnyPath | None
) -> ResolvedTies:
    """Split the stored tensors into owners and aliases.

    If a tied parameter is stored under two names, one name is the owner and the other is the alias.
    Two tensors are tied if the format records this. They are also tied if their values are equal,
    and their names and shapes are such that transformers might tie them. Values are only read for
    such pairs.

    Args:
        stored: All stored tensors, keyed by their canonical names.
        recorded_aliases: Owner of each alias that the format records. An alias is ignored if its
            owner is not stored.
        config_path: Path of a `config.json`, or None. If its `tie_word_embeddings` is false, the
            tensors are not compared. If transformers might tie two stored tensors, both names are
            then kept even if the format records an alias.

    Returns:
        The tensors without aliases, and the owner of each alias.

    Raises:
        CheckpointError: If there are too many pairs that might be tied, or if a tensor cannot be
            read.
    """
    untied = _read_tie_setting(config_path) is False
    aliases = {
        alias: owner for alias, owner in recorded_aliases.items() if owner in stored and alias != owner
    }
    if untied:
        for alias, _ in _list_tie_candidates(stored):
            aliases.pop(alias, None)
    else:
        for alias, owner in _list_tie_candidates(stored):
            if alias not in aliases and aliases.get(owner, owner) != alias:
                owner = aliases.get(owner, owner)
                if are_tensors_equal(stored[alias], stored[owner]):
                    aliases[alias] = owner
    owners = {name: tensor for name, tensor in stored.items() if name not in aliases}
    # A recorded owner may itself be tied to a tensor with equal values.
    return ResolvedTies(owners, {alias: aliases.get(owner, owner) for alias, owner in aliases.items()})


def find_untied_embeddings(tensors: Mapping[str, Tensor]) -> list[TiedPair]:
    """Find output embeddings that are stored separately from input embeddings of the same shape.

    An input embedding named `shared.weight` is ignored. It belongs to encoder-decoder models, where
    `tie_word_embeddings` also affects the scale of the outputs.

    Args:
        tensors: Tensors without aliases. See `resolve_ties`.

    Returns:
        Names of the output and input embeddings.

    Raises:
        CheckpointError: If there are too many pairs that might be tied.
    """
    return [
        pair
        for pair in _list_tie_candidates(tensors)
        if ends_with_name(pair.alias, HEAD_NAMES)
        and ends_with_name(pair.owner, EMBEDDING_NAMES)
        and not ends_with_name(pair.owner, ("shared.weight",))
    ]


def select_tie_owner(same: Mapping[str, Tensor]) -> str:
    """Select the owner of a tied parameter: the name under which the parameter is stored.

    The other names of the parameter are aliases.

    Args:
        same: Tied tensors, keyed by name. At least one.

    Returns:
        The first name that transformers would not treat as an alias of another of the names. If
        there is no such name, the first name.

    Raises:
        CheckpointError: If there are too many pairs of names that might be tied.
    """
    aliases = {alias for alias, _ in _list_tie_candidates(same)}
    return next((name for name in same if name not in aliases), next(iter(same)))


def are_tensors_equal(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors have the same dtype and shape, and are equal bit for bit.

    Reads both tensors block by block, and stops at the first difference. Nothing is read if the
    dtypes or shapes differ.

    Raises:
        CheckpointError: If a tensor cannot be read.
    """
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    blocks = zip(left.iter_blocks_then_verify(_BLOCK), right.iter_blocks_then_verify(_BLOCK), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in blocks)


def ends_with_name(name: str, endings: Sequence[str]) -> bool:
    """Return whether a dotted name equals one of the endings, or ends with a dot and an ending."""
    return any(name == end or name.endswith(f".{end}") for end in endings)


def _read_tie_setting(config: AnyPath | None) -> bool | None:
    """Read `tie_word_embeddings` from a config or its text config. None if neither has a boolean."""
    values = read_json_object_or_empty(config)
    for source in (values, values.get("text_config")):
        if isinstance(source, dict) and isinstance(source.get("tie_word_embeddings"), bool):
            return bool(source["tie_word_embeddings"])
    return None


def _list_tie_candidates(stored: Mapping[str, Tensor]) -> list[TiedPair]:
    """List the pairs of tensors that transformers may tie, according to their names and shapes.

    Values are not compared.

    Raises:
        CheckpointError: If there are too many pairs.
    """
    some = [name for name in stored if name.endswith(_ENDS)]
    by_end = {end: [name for name in some if ends_with_name(name, (end,))] for end in _ENDS}
    by_shape: dict[str, dict[str, list[str]]] = {}
    for owner in {owner for _, owners in _PAIRS for owner in owners}:
        shapes = by_shape[owner] = {}
        for name in by_end[owner]:
            shapes.setdefault(repr(stored[name].shape), []).append(name)
    pairs: list[TiedPair] = []
    for suffix, owners in _PAIRS:
        for alias in by_end[suffix]:
            shape = repr(stored[alias].shape)
            for owner in owners:
                pairs += [TiedPair(alias, name) for name in by_shape[owner].get(shape, ()) if name != alias]
            if len(pairs) > MAX_TIED_PAIRS:
                raise DamagedCheckpointError(
                    f"damaged: more than {MAX_TIED_PAIRS:,} pairs of tensors have the names and the shape of "
                    "tied weights, which is more than in any model"
                )
    return pairs
