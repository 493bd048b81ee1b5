"""Check custom code before a run starts, and detect whether it has changed when the run resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from portable import plugins
from portable.errors import require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.config import RunConfig


def install_and_check_custom_code(config: RunConfig) -> None:
    """Install the modules of a notebook in this process, and check the custom code that settings refer to.

    Called in the launcher and in each rank.

    Args:
        config: Config of the run. It contains the source text of the notebook's modules.

    Raises:
        UserError: If custom code cannot be imported or does not have the required interface.
    """
    plugins.install_notebook_modules(config.documents.get(plugins.SOURCES_KEY, {}))
    if config.model.function is not None:
        plugins.load_plugin("model.function", config.model.function)
    if config.train.loss is not None:
        from portable.model.training_loss import build_training_loss
        from portable.run.precompute import check_precompute_settings

        check_precompute_settings(config, build_training_loss(config))
    if plugins.is_plugin_name(config.train.optimizer):
        from portable.optim import custom_optimizer

        custom_optimizer.check_custom_optimizer(config)
    if plugins.is_plugin_name(config.train.schedule):
        schedule = plugins.load_plugin("train.schedule", config.train.schedule)
        require(
            callable(schedule),
            f"train.schedule: {config.train.schedule}: is a {type(schedule).__name__}; use a function of "
            "step and total_steps, or a class whose objects are such functions",
        )
    if config.train.callbacks:
        from portable.run.custom_callbacks import load_custom_callbacks

        load_custom_callbacks(config.train.callbacks)


def collect_custom_code_names(config: RunConfig) -> dict[str, str]:
    """Collect the names of the custom code that training steps and evaluations call, keyed by setting."""
    train = config.train
    optional_names = {"train.loss": train.loss, "model.function": config.model.function}
    code_by_key = {key: name for key, name in optional_names.items() if name is not None}
    for key in ("train.optimizer", "train.schedule"):
        if plugins.is_plugin_name(config.get(key)):
            code_by_key[key] = config.get(key)
    code_by_key |= {
        f"train.metrics {name}": name for name in train.metrics or () if plugins.is_plugin_name(name)
    }
    return code_by_key | {f"train.callbacks {name}": name for name in train.callbacks}


def compute_custom_code_digests(config: RunConfig) -> dict[str, str]:
    """Compute a digest of each piece of custom code, keyed by setting.

    A run compares the digests when it resumes. Custom data sources have no digest, because a run
    compares their tokens instead.
    """
    all_digests = {
        key: plugins.compute_plugin_digest(name) for key, name in collect_custom_code_names(config).items()
    }
    return {key: value for key, value in all_digests.items() if value}


class CodeChanges(NamedTuple):
    """Settings whose custom code has changed since a checkpoint."""

    affecting_training: list[str]
    """Settings that affect the steps, such as ``train.loss``."""
    harmless: list[str]
    """Settings of metrics and callbacks, whose code does not affect the steps."""


def compare_custom_code(stored_digests: Mapping[str, str], current_digests: Mapping[str, str]) -> CodeChanges:
    """Compare the custom code of this launch with the code at a checkpoint.

    Args:
        stored_digests: Result of :func:`compute_custom_code_digests` at the checkpoint.
        current_digests: Result of :func:`compute_custom_code_digests` in this launch.

    Returns:
        The settings whose code has changed.
    """
    differ = [key for key, value in current_digests.items() if stored_digests.get(key, value) != value]
    harmless = [key for key in differ if key.startswith(("train.metrics", "train.callbacks"))]
    return CodeChanges([key for key in differ if key not in harmless], harmless)
