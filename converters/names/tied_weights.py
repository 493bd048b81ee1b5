"""Tied weights: stored tensors that are one parameter under two names.

`save_pretrained` writes a tied parameter once, under its owner's name, and so does this package. Some writers
store both names; an alias is dropped only if its values equal the owner's bit for bit.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.errors import CheckpointError
from portable.converters.limits import MAX_TIED_PAIRS
from portable.converters.storage.safe_open import read_small_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from portable.converters.storage.path_or_url import Place
    from portable.converters.tensors.tensor import Tensor

# Input embeddings, and the heads that may share their weights.
# Alias -> possible owners, from transformers' `_tied_weights_keys`; suffixes of dotted names.
EMBEDDINGS = (
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
_PAIRS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("encoder.embed_tokens.weight", ("shared.weight",)),
    ("decoder.embed_tokens.weight", ("shared.weight",)),
    ("lm_head.weight", ("shared.weight", *EMBEDDINGS)),
    ("embed_out.weight", EMBEDDINGS),
    ("output.weight", ("tok_embeddings.weight",)),
    ("lm_head.decoder.weight", EMBEDDINGS),
    ("lm_head.decoder.bias", ("lm_head.bias",)),
    ("predictions.decoder.weight", EMBEDDINGS),
    ("predictions.decoder.bias", ("predictions.bias",)),
)
_ENDS = tuple({end for alias, owners in _PAIRS for end in (alias, *owners)})
HEADS = tuple(alias for alias, owners in _PAIRS if set(EMBEDDINGS) <= set(owners) or alias == "output.weight")
OTHER_HEAD = "the head over the vocabulary"
"""Name for the head of models whose heads have several names, such as BERT."""
_WITH_HEAD = re.compile(r".*(ForCausalLM|LMHeadModel|ForConditionalGeneration|ForMaskedLM|ForPreTraining)")
_OF_ENCODERS = ("embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight")
_OF_BOTH = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_BLOCK = 1 << 20


class TiedPair(NamedTuple):
    """Names of two tensors that may be one parameter."""

    alias: str
    owner: str


class ResolvedTies(NamedTuple):
    """The tensors of a checkpoint without aliases, and the owner of each alias."""

    tensors: dict[str, Tensor]
    owners_by_alias: dict[str, str]


def find_implied_ties(
    names: Iterable[str], aliases: Iterable[str], config: Mapping[str, Any]
) -> dict[str, str]:
    """Find the parameters that share the embedding's weights, although the files do not contain their names.

    Args:
        names: Names of the stored tensors.
        aliases: Names of the tied tensors that are not stored.
        config: The model's `config.json`.

    Returns:
        The owner of each alias.
    """
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else None
    names = list(names)
    embeddings = [name for name in names if has_ending(name, EMBEDDINGS)]
    if not isinstance(architecture, str) or len(embeddings) != 1:
        return {}
    owner = embeddings[0]
    ties = dict.fromkeys(_OF_BOTH if has_ending(owner, ("shared.weight",)) else (), owner)
    has_head = any(has_ending(name, HEADS) for name in [*names, *aliases])
    if not has_head and _WITH_HEAD.fullmatch(architecture) and config.get("tie_word_embeddings") is not False:
        ties[OTHER_HEAD if has_ending(owner, _OF_ENCODERS) else "lm_head.weight"] = owner
    return ties


def resolve_ties(
    stored: Mapping[str, Tensor], expected: Mapping[str, str], config: Place | None
) -> ResolvedTies:
    """Split the stored tensors into owners and aliases.

    Args:
        stored: every stored tensor by plain name.
        expected: aliases that the format records (alias -> owner); trusted.
        config: a `config.json`; with `tie_word_embeddings: false`, both names are kept.

    Returns:
        The tensors without aliases, and alias -> owner.
    """
    untied = _read_tie_setting(config) is False
    aliases = {alias: owner for alias, owner in expected.items() if owner in stored and alias != owner}
    if untied:
        for alias, _ in _list_tie_candidates(stored):
            aliases.pop(alias, None)
    else:
        for alias, owner in _list_tie_candidates(stored):
            if alias not in aliases and aliases.get(owner, owner) != alias:
                owner = aliases.get(owner, owner)
                if has_same_values(stored[alias], stored[owner]):
                    aliases[alias] = owner
    owners = {name: tensor for name, tensor in stored.items() if name not in aliases}
    return ResolvedTies(owners, aliases)


def find_split_ties(tensors: Mapping[str, Tensor]) -> list[TiedPair]:
    """Find output embeddings that are stored in addition to input embeddings of the same shape.

    The owner `shared.weight` is ignored, because encoder-decoder models also scale their outputs according
    to `tie_word_embeddings`.

    Args:
        tensors: Tensors without aliases, see `resolve_ties`.

    Returns:
        Names of the output and input embeddings.
    """
    return [
        pair
        for pair in _list_tie_candidates(tensors)
        if has_ending(pair.alias, HEADS)
        and has_ending(pair.owner, EMBEDDINGS)
        and not has_ending(pair.owner, ("shared.weight",))
    ]


def pick_owner(same: Mapping[str, Tensor]) -> str:
    """The owner among the names of one parameter: the first that transformers does not tie to another."""
    aliases = {alias for alias, _ in _list_tie_candidates(same)}
    return next((name for name in same if name not in aliases), next(iter(same)))


def has_same_values(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal bit for bit; reads both in step and stops at the first difference."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    blocks = zip(left.iter_blocks_then_verify(_BLOCK), right.iter_blocks_then_verify(_BLOCK), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in blocks)


def has_ending(name: str, endings: Sequence[str]) -> bool:
    """Whether a dotted name is, or ends in, one of `endings`."""
    return any(name == end or name.endswith(f".{end}") for end in endings)


def _read_tie_setting(config: Place | None) -> bool | None:
    values = read_small_table(config)
    for source in (values, values.get("text_config")):
        if isinstance(source, dict) and isinstance(source.get("tie_word_embeddings"), bool):
            return bool(source["tie_word_embeddings"])
    return None


def _list_tie_candidates(stored: Mapping[str, Tensor]) -> list[TiedPair]:
    """(alias, owner) pairs that transformers may tie, by name and shape. The caller compares their values."""
    some = [name for name in stored if name.endswith(_ENDS)]
    by_end = {end: [name for name in some if has_ending(name, (end,))] for end in _ENDS}
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
                raise CheckpointError(
                    f"damaged, {len(by_end[suffix]):,} tensors have names like {suffix!r}, and may be "
                    "tied to as many others; no model has so many"
                )
    return pairs
