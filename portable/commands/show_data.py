"""``--show-data``: samples of a run, with the tokens that are trained."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from portable.adapters.assemble import assemble
from portable.batch_plan import total_steps
from portable.converters.console import print_line
from portable.data.preview import build_preview, format_preview
from portable.errors import UserError
from portable.model import build as models
from portable.model.special_tokens import SpecialTokens
from portable.run.length import describe_length, warn_of_few_steps
from portable.run.prepare import open_data
from portable.terminal import tell

if TYPE_CHECKING:
    from portable.run.stages import Resolved


def print_samples(resolved: Resolved, count: int) -> int:
    """Print the first ``count`` samples; builds the token cache, and nothing else."""
    config = resolved.config
    if config.model.task != "causal-lm":
        raise UserError(f"--show-data: shows samples of causal-lm, not of {config.model.task}; remove it")
    model_config = models.load_model_config(config.model)
    models.check_length(model_config, config)
    special_tokens = SpecialTokens(model_config, config.model)
    data = open_data(config, model_config, special_tokens)
    assemble(config, model_config, special_tokens, data.tokenizer, data)  # refuses what a run refuses
    if not data.opened:
        raise UserError("--show-data: shows how texts become samples, and data.source gives finished ones")
    for warning in data.sizes.warnings:
        tell(f"warning: {warning}")
    shown = build_preview(data, count, config.seed)
    samples = None if data.streams else data.train.epoch_samples
    steps = total_steps(config, samples or 0)
    shown.facts["steps"] = describe_length(config, steps, samples)
    if data.sizes.eval_samples:
        shown.facts["held out"] = data.sizes.describe_held_out()
    if (few := warn_of_few_steps(config, samples, resolved.world)) is not None:
        tell(f"warning: {few}")
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print_line(format_preview(shown, color=color), coloured=color)
    return 0
