"""``portable-train --show-data``: print samples of a run, and mark the tokens that enter the loss."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from portable.adapters.assemble import assemble_model
from portable.batch_plan import compute_total_steps
from portable.converters.console import is_terminal, print_line
from portable.data.preview import build_preview, format_preview
from portable.errors import UserError
from portable.model import build as models
from portable.model.special_tokens import ModelSpecialTokens
from portable.run.length import build_few_steps_warning, format_run_length
from portable.run.prepare import open_run_data
from portable.terminal import print_status

if TYPE_CHECKING:
    from portable.run.stages import ResolvedRun


def print_samples(resolved: ResolvedRun, num_samples: int) -> int:
    """Print the first training samples of a run, and statistics of its data.

    The samples are printed in the order in which the run trains on them. The data is tokenized and
    cached first if necessary.

    Args:
        resolved: The resolved run.
        num_samples: Number of samples to print. If complete documents are packed, number of
            documents.

    Returns:
        Exit code 0.

    Raises:
        UserError: If a setting is not valid for the run, if the task is not causal-lm, or if the
            source's samples are already tokenized.
    """
    config = resolved.config
    if config.model.task != "causal-lm":
        raise UserError(
            f"--show-data: supports only model.task: causal-lm, not {config.model.task}; remove --show-data"
        )
    model_config = models.load_model_config(config.model)
    models.check_seq_len(model_config, config)
    special_tokens = ModelSpecialTokens(model_config, config.model)
    data = open_run_data(config, model_config, special_tokens)
    # The result is not used. This call raises an error if a setting is not valid for the run.
    assemble_model(config, model_config, special_tokens, data.tokenizer, data)
    if not data.tokenized_sources:
        raise UserError(
            "--show-data: shows how texts become samples, but data.source contains samples that are already "
            "tokenized; remove --show-data"
        )
    for warning in data.sizes.warnings:
        print_status(f"warning: {warning}")
    preview = build_preview(data, num_samples, config.seed)
    samples = None if data.stream_names else data.train.epoch_samples
    steps = compute_total_steps(config, samples or 0)
    preview.facts["steps"] = format_run_length(config, steps, samples)
    if data.sizes.eval_samples:
        preview.facts["held out"] = data.sizes.describe_held_out()
    if (few_steps_warning := build_few_steps_warning(config, samples, resolved.world)) is not None:
        print_status(f"warning: {few_steps_warning}")
    color = is_terminal(sys.stdout) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print_line(format_preview(preview, color=color), is_colored=color)
    return 0
