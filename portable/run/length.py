"""Describe the length of a run for the user: steps, epochs, warmup, sequence length, and checkpoints."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from portable.batch_plan import compute_total_steps
from portable.config.derived_defaults import (
    DEFAULTS_BY_TRAINING_KIND,
    classify_training_kind,
    compute_warmup_steps,
)
from portable.formatting import format_count

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.registry import World
    from portable.run.stages import ResolvedRun

SEQ_LEN_KEY = "data.seq_len"
"""Setting of the sequence length."""
MIN_USEFUL_STEPS = 30
"""Number of optimizer steps below which a run over all data hardly changes a model."""
MAX_STEPS_BETWEEN_CHECKPOINTS = 1000
"""Number of steps between checkpoints above which a run prints a warning.

A crash loses the steps since the last checkpoint.
"""


def describe_warmup(config: RunConfig, steps: int) -> str:
    """Describe the warmup of the learning rate, such as ``6 steps, train.warmup_ratio 0.03``.

    Args:
        config: Config of the run.
        steps: Number of optimizer steps of the run.
    """
    train = config.train
    ratio = "" if train.warmup_ratio is None else f", train.warmup_ratio {train.warmup_ratio:g}"
    return f"{format_count(compute_warmup_steps(train, steps), 'step')}{ratio}"


def explain_chosen_seq_len(resolved: ResolvedRun, max_positions: int | None) -> str | None:
    """Explain the value of ``data.seq_len`` if it was derived from the model.

    Args:
        resolved: The resolved run.
        max_positions: Number of positions of the model, or None if it is not limited.

    Returns:
        The text of a note. None if the user has set the value, if it is inherited from the
        existing run, or if the default for the run does not depend on the model.
    """
    config = resolved.config
    is_chosen = (
        config.is_set_or_put(SEQ_LEN_KEY)
        and not config.is_set(SEQ_LEN_KEY)
        and SEQ_LEN_KEY not in resolved.inherited_settings
    )
    if not is_chosen:
        return None
    length, longest = (
        config.data.seq_len,
        DEFAULTS_BY_TRAINING_KIND[SEQ_LEN_KEY].get_default(classify_training_kind(config)),
    )
    bound = "has no maximum length" if max_positions is None else f"has {max_positions:,} positions"
    padded = "" if config.data.packing else "; every sample is padded to this length"
    return (
        f"{SEQ_LEN_KEY} is {length:,}, because the model {bound}, and the default is at most "
        f"{longest:,}{padded}"
    )


def format_run_length(config: RunConfig, steps: int, samples: int | None) -> str:
    """Format the number of steps of a run, and the epochs that these steps cover.

    For example, the text for 87 steps is ``87: 3 epochs of 464 samples``.

    Args:
        config: Config of the run.
        steps: Number of optimizer steps.
        samples: Number of samples in an epoch. None if it is unknown, for example for a stream. The
            epochs are then omitted.
    """
    if not samples:
        return f"{steps:,}"
    epochs = config.train.epochs or steps * config.train.global_batch_size / samples
    return f"{steps:,}: {_describe_epochs(epochs, samples)}"


def build_few_steps_warning(config: RunConfig, samples: int | None, world: World) -> str | None:
    """Return a warning if ``train.epochs`` results in fewer than :data:`MIN_USEFUL_STEPS` steps.

    A small ``train.steps`` causes no warning, because the user has chosen it directly.

    Args:
        config: Config of the run.
        samples: Number of samples in an epoch, or None if it is unknown.
        world: Ranks and devices of the launch, among which a global batch is divided.

    Returns:
        The warning. None if there are enough steps or their number is unknown.
    """
    epochs, batch = config.train.epochs, config.train.global_batch_size
    if epochs is None or not samples or (steps := compute_total_steps(config, samples)) >= MIN_USEFUL_STEPS:
        return None
    devices = max(1, world.devices // config.ranks_together)
    remedies = [f"raise train.epochs to {math.ceil(MIN_USEFUL_STEPS * batch / samples)}"]
    smaller = int(epochs * samples / MIN_USEFUL_STEPS) // devices * devices
    if 0 < smaller < batch:
        remedies.insert(0, f"lower train.global_batch_size to {smaller}")
    return (
        f"train.epochs: {_describe_epochs(epochs, samples)} are only {format_count(steps, 'step')} of "
        f"{batch} samples, which hardly change the model; {', or '.join(remedies)}"
    )


def build_rare_checkpoints_warning(config: RunConfig, samples: int | None) -> str | None:
    """Return a warning if the default for ``checkpoint.every_epochs`` saves too rarely.

    Args:
        config: Config of the run.
        samples: Number of samples in an epoch, or None if it is unknown.

    Returns:
        The warning. None in each of these cases: the user has set ``checkpoint.every_epochs``, the
        number of samples is unknown, or at most :data:`MAX_STEPS_BETWEEN_CHECKPOINTS` steps are
        between two checkpoints or in the complete run.
    """
    epochs = config.checkpoint.every_epochs
    if epochs is None or not samples or config.is_set_or_put("checkpoint.every_epochs"):
        return None
    steps = int(epochs * samples / config.train.global_batch_size)
    if (
        steps <= MAX_STEPS_BETWEEN_CHECKPOINTS
        or compute_total_steps(config, samples) <= MAX_STEPS_BETWEEN_CHECKPOINTS
    ):
        return None
    return (
        f"checkpoint.every_epochs: a checkpoint is saved only every {steps:,} steps, and a crash loses the "
        "steps since the last checkpoint; set checkpoint.every_steps, for example to 500"
    )


def _describe_epochs(epochs: float, samples: int) -> str:
    return f"{epochs:.3g} {'epoch' if epochs == 1 else 'epochs'} of {format_count(samples, 'sample')}"
