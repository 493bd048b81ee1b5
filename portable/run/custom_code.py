"""Check custom code before a run starts, and detect whether it has changed when the run resumes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from portable import plugins
from portable.errors import require

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.config import RunConfig


def install_and_check_custom_code(config: RunConfig) -> None:
    """Install the modules of a notebook in this process, and check the custom code of some settings.

    The settings are ``model.function``, ``train.loss``, ``train.optimizer``,
    ``train.schedule`` and ``train.callbacks``. Custom metrics and data sources are not
    checked here. Called in the launcher and in each rank.

    Args:
        config: Config of the run. It contains the source text of the notebook's modules.

    Raises:
        UserError: If custom code cannot be imported or does not have the required interface,
            or if the loss precomputes values and the settings of the run do not allow this.
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
            f"train.schedule: {config.train.schedule}: is an object of type {type(schedule).__name__}; use a "
            "function with the arguments step and total_steps, or a class whose method __call__ has "
            "these arguments",
        )
    if config.train.callbacks:
        from portable.run.custom_callbacks import load_custom_callbacks

        load_custom_callbacks(config.train.callbacks)


def collect_custom_code_names(config: RunConfig) -> dict[str, str]:
    """Collect the names of the custom code that training steps and evaluations call.

    The names are keyed by setting. For metrics and callbacks, the name is part of the key, as in
    ``train.metrics my_module:metric``. The result also contains ``train.loss`` if it is the name of
    a built-in loss.
    """
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

    A run compares the digests when it resumes. A digest covers the module that contains the code,
    but not other modules that this module imports. Code has no digest if it has no source text, is
    part of this project, or is in a module that cannot be imported. Custom data sources have no
    digest either, because a run compares their tokens instead.
    """
    all_digests = {
        key: plugins.compute_plugin_digest(name) for key, name in collect_custom_code_names(config).items()
    }
    return {key: value for key, value in all_digests.items() if value}


class CodeChanges(NamedTuple):
    """Changes in a run's custom code since a checkpoint was saved.

    Each field lists settings whose function or class is defined in a module that has changed.
    Changes of comments and layout do not count.
    """

    affecting_training: list[str]
    """Settings that affect the steps, such as ``train.loss``."""
    harmless: list[str]
    """Settings of metrics and callbacks, whose code does not affect the steps."""


def compare_custom_code(stored_digests: Mapping[str, str], current_digests: Mapping[str, str]) -> CodeChanges:
    """Find the custom code that has changed since a checkpoint was saved.

    Args:
        stored_digests: Result of :func:`compute_custom_code_digests` that the checkpoint contains.
        current_digests: Result of :func:`compute_custom_code_digests` in this launch.

    Returns:
        The settings whose code has changed. A setting without a stored digest counts as unchanged.
    """
    differ = [key for key, value in current_digests.items() if stored_digests.get(key, value) != value]
    harmless = [key for key in differ if key.startswith(("train.metrics", "train.callbacks"))]
    return CodeChanges([key for key in differ if key not in harmless], harmless)
