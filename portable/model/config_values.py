"""Check that the numbers in a model config are in the range that is valid for their key.

transformers checks the types of most values, but not their ranges: a dropout of 2 fails in the
first step, and a RoPE factor of 0 makes the loss NaN. The range follows from the key, because the
keys of all model types follow the same few naming conventions.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from portable.errors import UserError, to_one_line
from portable.untrusted_settings import MAX_MODEL_LAYERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_TENSOR_SIZE = (1 << 31) - 1
_DTYPES = ("dtype", "torch_dtype")
_ROPE_TYPES = ("rope_type", "type")
_ROPE_SETTINGS = ("rope_parameters", "rope_scaling")
_ROPE_NUMBERS = (
    "rope_theta",
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "partial_rotary_factor",
)


@dataclass(frozen=True)
class _NumberRule:
    """Valid range of the numbers whose keys match a pattern.

    Attributes:
        keys: Regular expression that matches the keys.
        description: Noun phrase for the number, used in messages.
        minimum: Smallest valid value.
        maximum: Largest valid value.
        excludes_minimum: Whether ``minimum`` itself is invalid.
    """

    keys: re.Pattern[str]
    description: str
    minimum: float
    maximum: float
    excludes_minimum: bool = False

    def accepts_value(self, value: float) -> bool:
        return self.minimum <= value <= self.maximum and not (self.excludes_minimum and value == self.minimum)

    @property
    def range_text(self) -> str:
        start = (
            f"above {self.minimum:g} and at most" if self.excludes_minimum else f"from {self.minimum:g} to"
        )
        most = str(self.maximum) if isinstance(self.maximum, int) else f"{self.maximum:g}"
        return f"{start} {most}"


NUMBER_RULES = (
    # Probabilities of zeroing a value, or of skipping a layer or position.
    _NumberRule(
        re.compile(r"dropout|layerdrop|drop_?path|_pdrop$|(^|_)drop_(\w+_)?rate$|_prob$|_probability$"),
        "a probability",
        0.0,
        1.0,
    ),
    # Epsilons are added to variances of about 1. Allow 0, because ProphetNet uses it for its label smoothing.
    _NumberRule(re.compile(r"(^|_)(eps|epsilon)(_|$)"), "an epsilon", 0.0, 1.0),
    # Both must be positive, because positions are divided by the factor, and theta is raised to negative
    # powers.
    _NumberRule(re.compile(r"^factor$"), "a factor", 0.0, 1e6, excludes_minimum=True),
    _NumberRule(
        re.compile(r"^(rope_theta|rotary_embedding_base)$"),
        "a RoPE base",
        0.0,
        1e15,
        excludes_minimum=True,
    ),
    _NumberRule(re.compile(r"(^|_)factors?$"), "a factor", 0.0, 1e6),
    # Limit the deviation, because weights with a larger one overflow fp16 in the first layer.
    _NumberRule(
        re.compile(r"(^|_)(initializer_range|init_std|init_method_std)$"), "a standard deviation", 0.0, 100.0
    ),
    # Limit the number, because every layer costs milliseconds and kilobytes, even on the meta device.
    _NumberRule(re.compile(r"(^|_)(num_(\w+_)?|n_)layers?$"), "a number of layers", 0, MAX_MODEL_LAYERS),
    # These dimensions must be at least 1, because every model needs them.
    _NumberRule(
        re.compile(r"^(hidden_size|vocab_size|d_model|n_embd|num_attention_heads|n_head)$"),
        "a size",
        1,
        MAX_TENSOR_SIZE,
    ),
    # Limit sizes, because torch's kernels use 32-bit indices. Allow -1, because it is a default in several
    # classes.
    _NumberRule(
        re.compile(r"(_|^)(sizes?|dims?|heads|channels|width|rank|experts|groups|embeddings|positions)$"),
        "a size",
        -1,
        MAX_TENSOR_SIZE,
    ),
    # Other numbers only have to fit into a float, because published configs contain lengths such as 1e30,
    # which mean no limit.
    _NumberRule(re.compile(r""), "a number", -sys.float_info.max, sys.float_info.max),
)
"""Valid ranges of numbers, selected by their keys. The first rule whose pattern matches a key applies."""


def check_config_values(message_prefix: str, values: Mapping[str, Any]) -> None:
    """Check the numbers, dtypes and RoPE settings in a model config and its nested configs.

    Args:
        message_prefix: Beginning of the error message, such as "model.config".
        values: Keys and values of the config.

    Raises:
        UserError: If a number is outside the range that :data:`NUMBER_RULES` defines for its key,
            or if a dtype or a RoPE setting has the wrong type. An infinite number is valid if
            its key ends with ``_limit``.
    """
    for path, value in iter_config_values(values):
        key = path[-1]
        if key in _DTYPES and not isinstance(value, str | None):
            raise UserError(
                f"{message_prefix}: {_format_wrong_value(path, value)}; use the name of a dtype, such as "
                "bfloat16"
            )
        if _is_rope_type(path) and not isinstance(value, str):
            raise UserError(
                f"{message_prefix}: {_format_wrong_value(path, value)}; use the name of a RoPE type, such as "
                "default, linear or yarn"
            )
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if _is_rope_number(path) and not is_number and value is not None:
            raise UserError(f"{message_prefix}: {_format_wrong_value(path, value)}; use a number")
        if not is_number:
            continue
        if key.endswith("_limit") and value in (math.inf, -math.inf):  # no limit, as in Mamba-2
            continue
        rule = next(rule for rule in NUMBER_RULES if rule.keys.search(key))
        if not rule.accepts_value(value):
            raise UserError(
                f"{message_prefix}: {_format_wrong_value(path, value)}; use {rule.description} "
                f"{rule.range_text}"
            )


def _format_wrong_value(path: tuple[str, ...], value: Any) -> str:
    """Format a key path and its value for an error message, such as ``hidden_dropout is 2``."""
    text = (
        str(value)
        if not isinstance(value, int) or abs(value) < 10**30
        else "a number with more than 30 digits"
    )
    return to_one_line(f"{'.'.join(path)} is {text[:100]}")


def iter_config_values(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the key path and the value of each scalar in a model config and its nested configs.

    Lists and dicts are flattened. There are two exceptions, in which an invalid list or dict is
    yielded without flattening, so that the caller can reject it:

    - Any list or dict, if the key is a RoPE setting that must be a scalar.
    - A list, or a dict with values that are not strings, if the key is a dtype. In contrast, a dict
      of strings is valid and is flattened, because a composite model may have one dtype for each
      part.

    Args:
        values: Keys and values of the config.

    Yields:
        The keys from the outermost to the innermost config, and the value. Each element of a list
        is yielded with the path of the list.
    """
    # A dtype is only a container in a composite model, which may have one name for each part.
    pending: list[tuple[tuple[str, ...], Any]] = [((str(key),), value) for key, value in values.items()]
    while pending:
        path, value = pending.pop()
        if _is_rope_type(path) or _is_rope_number(path):
            yield path, value
        elif isinstance(value, dict) and not (path[-1] in _DTYPES and not _has_only_string_values(value)):
            pending.extend(((*path, str(key)), inner) for key, inner in value.items())
        elif isinstance(value, list | tuple) and path[-1] not in _DTYPES:
            pending.extend((path, inner) for inner in value)
        else:
            yield path, value


def _is_rope_type(path: tuple[str, ...]) -> bool:
    """Return whether a key path refers to a RoPE type, either for all layers or for one layer type."""
    return path[-1] in _ROPE_TYPES and any(key in _ROPE_SETTINGS for key in path[-3:-1])


def _is_rope_number(path: tuple[str, ...]) -> bool:
    """Return whether a key path refers to a number in ``rope_parameters`` or ``rope_scaling``.

    An example is ``rope_theta``, but not at the top level of the config. The setting may apply to
    all layers or to one layer type.
    """
    return path[-1] in _ROPE_NUMBERS and any(key in _ROPE_SETTINGS for key in path[-3:-1])


def _has_only_string_values(values: Mapping[str, Any]) -> bool:
    return all(isinstance(value, str) for value in values.values())
