"""Wrap the private names of peft that this project uses, and patch some functions of peft.

Other modules import peft from this module, so that the import does not load torch's compiler.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from portable.errors import UserError
from portable.private import GuardedPackage
from portable.private.bitsandbytes_internals import import_bitsandbytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from torch import nn

    from portable.converters.adapters.patterns import PatternMatcher

# Import bitsandbytes first: if it is installed, peft imports it, and that would import the compiler.
with suppress(UserError):
    import_bitsandbytes()

import peft

__all__ = ["peft"]

_peft = GuardedPackage("peft", "0.21.2")


@_peft.explain_missing_names("adapter")
def get_default_target_modules(constant_name: str, model_type: str) -> list[str] | None:
    """Return the modules that peft adapts by default for a model type, or None if it has no default.

    Args:
        constant_name: Name of the constant in ``peft.utils.constants`` that maps model types to module
            names.
        model_type: Model type in transformers.
    """
    modules_by_type: dict[str, list[str]] = getattr(peft.utils.constants, constant_name)
    return modules_by_type.get(model_type)


@_peft.explain_missing_names("adapter.use_dora")
def is_dora_magnitude_layer(module: nn.Module) -> bool:
    """Return whether ``module`` is the peft module that contains the DoRA magnitudes of a linear layer."""
    return type(module) is peft.tuners.lora.dora.DoraLinearLayer


@_peft.explain_missing_names("adapter.target_parameters")
def is_stack_wrapper(module: nn.Module) -> bool:
    """Return whether ``module`` is peft's wrapper around stacked weights, such as experts."""
    if not isinstance(module, peft.tuners.lora.layer.ParamWrapper):
        return False
    parameter: nn.Parameter = module.get_param()  # type: ignore[no-untyped-call]
    return parameter.dim() == 3


@_peft.explain_missing_names("adapter")
def is_target_module_rejected(settings: Any, model: nn.Module, name: str) -> bool:
    """Return whether peft raises an error if the adapter targets a module.

    For example, peft rejects ``out_proj`` in Mamba layers.

    Args:
        settings: peft's config.
        model: Model to which the adapter is added.
        name: Last component of the module's name.
    """
    try:
        peft.tuners.tuners_utils._check_lora_target_modules_mamba(settings, model, name)
    except ValueError:
        return True
    return False


@_peft.explain_missing_names("adapter")
def find_renamed_tensors(settings: Any, model: nn.Module, names: Collection[str]) -> list[str]:
    """Find the tensors in an adapter's file that peft does not load, because it renames them.

    When peft loads an adapter, it applies transformers' rules that rename the tensors in the model's
    published files. Some rules also match names that are already correct, and change them by mistake.

    Args:
        settings: peft's config.
        model: Model without the adapter.
        names: Names of the adapter's tensors in the file.

    Returns:
        The names that peft changes. Empty if the rules cannot be applied.
    """
    from peft.utils import transformers_weight_conversion

    convert = transformers_weight_conversion.convert_peft_adapter_state_dict_for_transformers
    tensors = {name: torch.empty(1, 1, device="meta") for name in names}
    try:
        converted = convert(model, settings, dict(tensors))
    except Exception:  # rules for tensors of other shapes may raise anything
        return []
    return [name for name in names if name not in converted]


@contextmanager
@_peft.explain_missing_names("a reference model without the adapter")
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Disable the adapters in the layers of ``model`` within this context.

    At least one layer must have an enabled adapter, so contexts for the same model cannot be
    nested. The context changes the private attribute ``_disable_adapters`` of the layers. peft's
    own method cannot be used, because it also changes ``requires_grad`` of the parameters, and the
    engine relies on these flags.
    """
    layers: list[Any] = [
        module for module in model.modules() if getattr(module, "_disable_adapters", None) is False
    ]
    assert layers
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@_peft.explain_missing_names("adapter.trainable_token_indices")
def is_trainable_tokens_layer(module: nn.Module) -> bool:
    """Return whether ``module`` is the peft layer that trains some rows of an embedding."""
    return isinstance(module, peft.tuners.trainable_tokens.TrainableTokensLayer)


@contextmanager
@_peft.explain_missing_names("adapter")
def use_pattern_matcher(matcher: PatternMatcher) -> Iterator[None]:
    """Make peft match the patterns in adapter settings with ``matcher`` within this context.

    ``re.match`` and ``re.fullmatch`` are replaced in peft's modules.
    """
    matching: Any = peft.tuners.tuners_utils
    theirs = matching.re
    loaded = [module for name, module in [*sys.modules.items()] if name.startswith("peft.")]
    modules: list[Any] = [module for module in loaded if vars(module).get("re") is theirs]
    for module in modules:
        module.re = SimpleNamespace(
            **{**vars(theirs), "match": matcher.match, "fullmatch": matcher.fullmatch}
        )
    try:
        yield
    finally:
        for module in modules:
            module.re = theirs
