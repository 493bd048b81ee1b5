"""Read the settings of a peft adapter that determine the meaning of its tensors (`adapter_config.json`)."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from portable.converters.adapters.patterns import PatternError, PatternMatcher
from portable.converters.errors import CheckpointError, CommandError, format_os_error, to_printable
from portable.converters.limits import MAX_COUNT, MAX_PATTERNS
from portable.converters.options import ADAPTER_CONFIG, VERL_CONFIG
from portable.converters.storage.path_or_url import parse_path_or_url
from portable.converters.storage.safe_open import read_small_text_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from portable.converters.storage.path_or_url import AnyPath

TYPES = ("LORA", "IA3", "TRAINABLE_TOKENS")
_BIASES = ("none", "all", "lora_only")
_USED_SETTINGS = (
    *(
        "peft_type",
        "base_model_name_or_path",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
    ),
    *("use_dora", "bias", "fan_in_fan_out", "target_parameters", "trainable_token_indices", "token_indices"),
    *("feedforward_modules", "ensure_weight_tying", "modules_to_save", "init_lora_weights", "lora_bias"),
    "target_modules",
)
"""Settings that this module reads."""
_HARMLESS_SETTINGS = (
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode"),
    *(
        "exclude_modules",
        "lora_dropout",
        "layers_to_transform",
        "layers_pattern",
        "loftq_config",
        "eva_config",
    ),
    *("corda_config", "lora_ga_config", "qalora_group_size", "runtime_config"),
    *("init_ia3_weights", "init_weights", "megatron_core"),
)
"""Settings that do not change the update of a weight.

An adapter with a setting that is neither here nor in `_USED_SETTINGS` is not merged. Examples are
aLoRA, Arrow, KaSA, QALoRA, VeLoRA, BD-LoRA, MonteCLoRA, replicated layers, and settings of later
versions of peft.
"""
SUPPORTED_SETTINGS = frozenset((*_USED_SETTINGS, *_HARMLESS_SETTINGS))
BASE_CHANGING_INITS = re.compile(r"(pissa|olora|corda|loftq|lora_ga).*", re.IGNORECASE)
"""Matches the initializations that modify the base model's weights.

The adapter then fits only the modified weights.
"""


@dataclass(frozen=True)
class StoredAdapterConfig:
    """Settings of an adapter that affect how it is merged and how its tensors are named.

    Attributes:
        path: Path of the settings file, usually `adapter_config.json`.
        type: `LORA`, `IA3` or `TRAINABLE_TOKENS`.
        r: Default rank of the LoRA factors.
        alpha: Default alpha.
        rank_pattern: Ranks that differ from the default, keyed by regular expressions that match
            module names.
        alpha_pattern: Alphas that differ from the default, keyed by regular expressions that match
            module names.
        rslora: Whether the scaling is alpha / sqrt(rank).
        dora: Whether the adapter has DoRA's magnitudes.
        bias: Biases that were trained: `none`, `all` or `lora_only`.
        fan_in_fan_out: Whether weights are stored as `[inputs, outputs]`.
        target_parameters: Names of individual parameters, such as stacks of experts, that have LoRA
            factors.
        token_indices: Trained token IDs, keyed by module. The key `""` means the input embedding.
        feedforward_modules: Names of the modules whose inputs are scaled by (IA)^3, or one regular
            expression that matches these names. None if the file does not list them.
        ties_weights: Whether the input embedding and the output head, if they are tied, share one
            pair of LoRA factors (`ensure_weight_tying`).
        values: All settings in the file.
        matcher: Matcher that compares module names with the regular expressions in the file.
    """

    path: AnyPath
    type: str
    r: int = 0
    alpha: float = 0.0
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    rslora: bool = False
    dora: bool = False
    bias: str = "none"
    fan_in_fan_out: bool = False
    target_parameters: tuple[str, ...] = ()
    token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    feedforward_modules: tuple[str, ...] | str | None = None
    ties_weights: bool = False
    values: Mapping[str, Any] = field(default_factory=dict)
    matcher: PatternMatcher = field(default_factory=PatternMatcher, compare=False, repr=False)

    @property
    def base_model(self) -> str | None:
        """Name or path of the base model, or None if the file does not record it."""
        name = self.values.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    @property
    def peft_version(self) -> tuple[int, int] | None:
        """Major and minor version of peft that wrote the adapter. None if unknown.

        Also None for a development version of 0.18, because it may use the layout of 0.18 or 0.19.
        """
        version = self.values.get("peft_version")
        match = (
            re.match(r"(\d{1,4})\.(\d{1,4})(?:\.\d{1,6})?(\.dev)?", version)
            if isinstance(version, str)
            else None
        )
        # A development version may have the layout of either release.
        if match is None or (match[3] and (int(match[1]), int(match[2])) == (0, 18)):
            return None
        return int(match[1]), int(match[2])

    @property
    def unsupported_setting(self) -> str | None:
        """Name of the first setting that is not in `SUPPORTED_SETTINGS`, or None.

        Such a setting may change the update of a weight in an unknown way, so the adapter cannot be
        merged. A setting with a false or empty value is ignored.
        """
        return next(
            (key for key, value in self.values.items() if value and key not in SUPPORTED_SETTINGS), None
        )

    def may_target_module(self, module: str) -> bool:
        """Return whether `target_modules` may include a module.

        A result of False is certain, but a result of True is not. If `target_modules` is a list of
        names, only their last components are compared, because the other components differ between
        versions of transformers. For example, the name `layers.0.q_proj` matches every `q_proj`.
        The result is always True if `target_modules` is a pattern, empty, or missing, or if
        `target_parameters` or `ensure_weight_tying` is set.
        """
        names = self.values.get("target_modules")
        if not isinstance(names, list) or not names or self.target_parameters or self.ties_weights:
            return True
        return module.rpartition(".")[2] in {str(name).rpartition(".")[2] for name in names}

    def may_target_parameter_of(self, module: str) -> bool:
        """Return whether `target_parameters` may include a parameter of a module.

        A result of False is certain, but a result of True is not, because an entry without a dot
        matches the parameters of any module.
        """
        parents = [target.rpartition(".")[0] for target in self.target_parameters]
        return any(not parent or f".{module}".endswith(f".{parent}") for parent in parents)

    def get_rank(self, name: str) -> int:
        """Return the LoRA rank of a module or parameter.

        This is the value of the first pattern in `rank_pattern` that matches the name, or the
        default rank.
        """
        return self.rank_pattern.get(self._find_pattern_key(self.rank_pattern, name), self.r)

    def compute_scaling(self, name: str) -> float:
        """Compute the scaling of a LoRA update: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
        alpha = self.alpha_pattern.get(self._find_pattern_key(self.alpha_pattern, name), self.alpha)
        rank = self.get_rank(name)
        return float(alpha / rank**0.5 if self.rslora else alpha / rank)

    def is_feedforward(self, module: str) -> bool | None:
        """Return whether (IA)^3 scales the inputs of a module rather than its outputs.

        Returns:
            True or False, or None if the adapter's settings do not list the modules with scaled
            inputs.
        """
        if self.feedforward_modules is None:
            return None
        if isinstance(self.feedforward_modules, str):
            with self._prefix_pattern_errors("feedforward_modules"):
                return self.matcher.fullmatch(self.feedforward_modules, module) is not None
        return any(module == name or module.endswith("." + name) for name in self.feedforward_modules)

    def _find_pattern_key(self, values_by_pattern: Mapping[str, Any], name: str) -> str:
        """Return the first pattern that matches the end of `name`, or `name` itself if none does."""
        with self._prefix_pattern_errors(
            "rank_pattern" if values_by_pattern is self.rank_pattern else "alpha_pattern"
        ):
            matches = (
                key for key in values_by_pattern if self.matcher.match(_anchor_pattern_at_end(key), name)
            )
            return next(matches, name)

    @contextmanager
    def _prefix_pattern_errors(self, key: str) -> Iterator[None]:
        """Convert a `PatternError` in the `with` block to a `CheckpointError`.

        The message of the `CheckpointError` begins with the path of the settings file and with
        `key`, the name of the setting that contains the pattern.
        """
        try:
            yield
        except PatternError as error:
            raise CheckpointError(f"{self.path}: {key}: {to_printable(error)}") from None


def _anchor_pattern_at_end(pattern: str) -> str:
    """Return the regular expression that peft's `get_pattern_key` uses to match the end of a name."""
    return rf"(.*\.)?({pattern})$"


def find_adapter_config_file(name_or_path: str) -> AnyPath:
    """Return the path of the adapter config that `--adapter-config` specifies.

    The argument may be the file or its folder.

    Raises:
        CommandError: If there is no such file.
    """
    path = parse_path_or_url(name_or_path)
    path = path / ADAPTER_CONFIG if path.is_dir() else path
    if not path.is_file():
        raise CommandError(
            f"--adapter-config {name_or_path}: is neither a file nor a folder that contains "
            f"{ADAPTER_CONFIG}; check the path"
        )
    return path


def read_adapter_config(path: AnyPath) -> StoredAdapterConfig:
    """Read and check an `adapter_config.json`.

    If `r` or `lora_alpha` is missing, it is 8. Settings that are not supported are not rejected
    here. See `StoredAdapterConfig.unsupported_setting`.

    Args:
        path: Path of the file. verl's `lora_train_meta.json` is also accepted. If verl's file does
            not contain a `peft_type`, the type is `LORA`.

    Raises:
        CheckpointError: If the file is damaged or cannot be read, if the type is not supported, or
            if a setting has an invalid value.
    """
    try:
        values = json.loads(read_small_text_file(path))
    except OSError as error:
        raise CheckpointError(f"{path}: {format_os_error(error)}") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: is not valid JSON; restore the file") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: is not a JSON object; restore the file")
    reader = _ConfigReader(path, values)
    kind = values.get("peft_type")
    if path.name == VERL_CONFIG and kind is None:
        kind = "LORA"
        values = {"peft_type": kind, "target_modules": None, **values}
        reader = _ConfigReader(path, values)
    if kind not in TYPES:
        shown = to_printable(kind)[:40]
        raise CheckpointError(
            f"{path}: peft_type {shown!r} is not supported (supported types: {', '.join(TYPES)}); load the "
            "adapter with peft instead"
        )
    common: dict[str, Any] = {
        "path": path,
        "type": kind,
        "fan_in_fan_out": reader.read_flag("fan_in_fan_out"),
        "values": values,
        "matcher": reader.matcher,
    }
    if kind == "IA3":
        return StoredAdapterConfig(
            **common, feedforward_modules=reader.read_names_or_pattern("feedforward_modules")
        )
    if kind == "TRAINABLE_TOKENS":
        embeddings = reader.read_names("target_modules") or ("embed_tokens",)
        indices = reader.read_indices("token_indices", values.get("token_indices"))
        return StoredAdapterConfig(**common, token_indices=dict.fromkeys(embeddings, indices))
    bias = values.get("bias") or "none"
    if bias not in _BIASES:
        raise CheckpointError(
            f"{path}: unknown bias {to_printable(bias)[:40]!r}; set bias to one of {', '.join(_BIASES)}"
        )
    return StoredAdapterConfig(
        **common,
        r=int(reader.read_number("r", values.get("r", 8), integer_only=True)),
        alpha=reader.read_number("lora_alpha", values.get("lora_alpha", 8)),
        rank_pattern={
            key: int(value) for key, value in reader.read_patterns("rank_pattern", integer_only=True).items()
        },
        alpha_pattern=reader.read_patterns("alpha_pattern"),
        rslora=reader.read_flag("use_rslora"),
        dora=reader.read_flag("use_dora"),
        bias=bias,
        target_parameters=reader.read_names("target_parameters"),
        token_indices=reader.read_token_indices("trainable_token_indices"),
        ties_weights=reader.read_flag("ensure_weight_tying"),
    )


def _format_value(value: object) -> str:
    return to_printable(repr(value))[:60]


class _ConfigReader:
    """Reader that checks the types of the settings in a file.

    Each method raises CheckpointError if a value does not have the expected type.

    Args:
        path: Path of the file, used in error messages.
        values: Content of the file.
    """

    def __init__(self, path: AnyPath, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values
        self.matcher = PatternMatcher()

    def read_flag(self, key: str) -> bool:
        """Return a boolean setting, or False if it is not set."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise CheckpointError(
                f"{self.path}: {key} is {_format_value(value)}, but must be true or false; correct the value"
            )
        return bool(value)

    def read_number(self, key: str, value: Any, *, integer_only: bool = False) -> float:
        """Check the type and the range of a number, and return it as a float.

        The number must be an int or a float whose absolute value is less than `MAX_COUNT`. Booleans
        are not accepted.

        Args:
            key: Name of the setting, used in error messages.
            value: Value of the setting.
            integer_only: Whether the value must be a positive integer.

        Raises:
            CheckpointError: If the value has another type or is outside the range.
        """
        kinds = (int,) if integer_only else (int, float)
        if type(value) not in kinds or not abs(value) < MAX_COUNT or (integer_only and value < 1):
            kind = "positive integer" if integer_only else "number"
            raise CheckpointError(
                f"{self.path}: {key} is {_format_value(value)}, but must be a {kind}; correct the value"
            )
        return float(value)

    def read_names(self, key: str) -> tuple[str, ...]:
        """Return a setting that is a name or a list of names, as a tuple.

        Empty if the setting is not set.
        """
        value = self.values.get(key)
        value = [value] if isinstance(value, str) else value if value is not None else []
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise CheckpointError(
                f"{self.path}: {key} is {_format_value(value)}, but must be a list of names; correct the "
                "value"
            )
        return tuple(value)

    def read_names_or_pattern(self, key: str) -> tuple[str, ...] | str | None:
        """Return a setting that is either a list of names or a regular expression.

        Returns:
            A tuple of names for a list, or the regular expression for a string. None if the setting is not
            set.
        """
        value = self.values.get(key)
        if value is None:
            return None
        return self.validate_pattern(key, value) if isinstance(value, str) else self.read_names(key)

    def validate_pattern(self, key: str, text: str) -> str:
        """Check that a string is a valid regular expression, and return it."""
        try:
            self.matcher.check_pattern(_anchor_pattern_at_end(text))
        except PatternError:
            raise CheckpointError(
                f"{self.path}: {key} contains {_format_value(text)}, which is not a regular expression, or "
                "is too long; correct the pattern"
            ) from None
        return text

    def read_patterns(self, key: str, *, integer_only: bool = False) -> dict[str, float]:
        """Return a setting such as `rank_pattern`, which maps regular expressions to numbers.

        The regular expressions match module names.

        Args:
            key: Name of the setting.
            integer_only: Whether the numbers must be positive integers.

        Returns:
            The numbers, keyed by regular expression. Empty if the setting is not set.

        Raises:
            CheckpointError: If the setting has another type or more than `MAX_PATTERNS` entries, or
                if a key or a number is not valid.
        """
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict) or len(value) > MAX_PATTERNS:
            raise CheckpointError(
                f"{self.path}: {key} is {_format_value(value)}, but must be an object with at most "
                f"{MAX_PATTERNS:,} numbers, keyed by module name; correct the value"
            )
        return {
            self.validate_pattern(key, name): self.read_number(
                f"{key} of {name[:60]!r}", number, integer_only=integer_only
            )
            for name, number in value.items()
        }

    def read_indices(self, key: str, value: Any) -> tuple[int, ...]:
        """Check that a list of token IDs has no negative or duplicate values, and return it as a tuple."""
        if not isinstance(value, list) or not all(
            type(index) is int and 0 <= index < 1 << 40 for index in value
        ):
            raise CheckpointError(
                f"{self.path}: {key} is {_format_value(value)}, but must be a list of token IDs; correct the "
                "value"
            )
        if len(set(value)) != len(value):
            raise CheckpointError(f"{self.path}: {key} contains a token ID twice; list each token ID once")
        return tuple(value)

    def read_token_indices(self, key: str) -> dict[str, tuple[int, ...]]:
        """Return the IDs of the trained tokens, keyed by module name.

        If the setting is a list, the IDs belong to the input embedding, and the only key is `""`.
        If the setting is missing, the result is empty.

        Args:
            key: Name of the adapter setting, such as `trainable_token_indices`.

        Raises:
            CheckpointError: If the setting does not consist of lists of distinct token IDs.
        """
        value = self.values.get(key)
        if value is None:
            return {}
        if isinstance(value, dict):
            return {
                name: self.read_indices(f"{key} of {name[:60]!r}", indices) for name, indices in value.items()
            }
        return {"": self.read_indices(key, value)}
