"""``portable-data``: tokenize the sources of a run before it starts."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING, NamedTuple

from portable.checks import check_config
from portable.command_line import CommandOptions, PositiveCount, parse_command_line
from portable.config.field_types import PathText  # noqa: TC001  (pydantic reads it)
from portable.converters.commands import DONE, FAILED, REFUSED, exit_without_traceback, format_exit_codes
from portable.converters.console import is_terminal, print_line
from portable.errors import RunError, UserError, print_error_lines
from portable.formatting import format_count
from portable.paths import parse_place_setting
from portable.terminal import show_loading_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.config import RunConfig

USAGE = f"""\
usage: portable-data --config FILE.yaml --out PLACE [--processes N]
                     [--part I/N] [--KEY VALUE ...]

Tokenize the data sources of a config in advance, so that a run can start at
once.
PLACE is a folder or a URL (s3://, gs://). To train on the tokens, set
data.source: PLACE and data.stream: true. Each source of a mixture becomes a
separate folder in PLACE. To continue after an interruption, run the command
again. No accelerator is needed.

examples:
  portable-data --config run.yaml --out tokens/
  portable-data --config run.yaml --out s3://b/tokens --processes 32
  portable-data --config run.yaml --out s3://b/tokens --part 2/8

{format_exit_codes(DONE, FAILED, REFUSED)}
"""


class DataOptions(CommandOptions):
    """Options of ``portable-data``."""

    out: PathText = ""
    """Folder to write the tokens to, or a URL in an object store."""
    processes: PositiveCount = 1
    """Number of processes that tokenize in parallel; default: one per core."""
    part: str = ""
    """Part of the shards that this machine writes, such as 2/8; default: all."""


@exit_without_traceback
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``portable-data``. UserErrors and RunErrors are printed, not raised.

    If ``argv`` is None, sets the environment variable ``USE_TORCH_XLA`` to 0 if it is not set yet,
    so that transformers does not import torch_xla.

    Args:
        argv: Command-line arguments. Defaults to ``sys.argv``.

    Returns:
        The exit code. See :data:`portable.converters.commands.EXIT_CODES`.
    """
    if argv is None:
        argv = sys.argv[1:]
        # Otherwise, transformers would import torch_xla, which takes seconds, prints warnings, and is not
        # used here.
        os.environ.setdefault("USE_TORCH_XLA", "0")
    try:
        return run_pretokenization(argv)
    except UserError as error:
        print_error_lines(error)
        return REFUSED
    except RunError as error:
        print_error_lines(error)
        return FAILED


def run_pretokenization(argv: Sequence[str]) -> int:
    """Tokenize the training sources of a config, write the token files, and print their sizes.

    Skips shards that are already complete, and shards that do not belong to ``--part``. If the
    sources have names, the tokens of each source are written to a subfolder of ``--out`` with this
    name. Evaluation sources are not tokenized.

    Args:
        argv: Arguments after ``portable-data``.

    Returns:
        Exit code 0.

    Raises:
        UserError: If a setting or an option is not valid, or if the data cannot be read.
        RunError: If the token files cannot be written.
    """
    config, options = parse_command_line(argv, DataOptions, USAGE)
    check_config(config)
    if "out" not in options:
        raise UserError("--out: is missing; specify a folder or a URL for the tokens")
    part_number, num_parts = _parse_shard_part(options.get("part", "1/1"))
    out = parse_place_setting("--out", options["out"])
    with show_loading_message():
        from portable.adapters.settings import replace_runs_by_exports
        from portable.converters.writers.parallel_jobs import count_usable_cores
        from portable.data.dataset import open_sources
        from portable.data.pretokenize import pretokenize_source
        from portable.data.sources.source_kinds import StreamSource
    config = replace_runs_by_exports(config)
    listed = tuple(mixed_source.model_copy(update={"stream": True}) for mixed_source in config.data.sources)
    data = open_sources(
        config.data.model_copy(update={"sources": listed, "stream": not listed, "eval": None}),
        config.model.task,
        model_tokenizer=config.model.name_or_path,
        model_vocab_size=_read_vocab_size_for_new_tokenizer(config),
        trust_remote_code=config.model.trust_remote_code,
        tokenize=False,
    )
    assert data.context is not None
    for name, source in data.training_sources.items():
        assert isinstance(source, StreamSource)
        output = out / name if name else out
        result = pretokenize_source(
            data.context,
            source,
            output,
            num_processes=options.get("processes", count_usable_cores()),
            machine_part=(part_number - 1, num_parts),
            progress=is_terminal(sys.stderr),
        )
        remaining = (
            f"; {format_count(result.num_shards_left, 'shard')} left to other machines"
            if result.num_shards_left
            else ""
        )
        print_line(
            f"{output}: {format_count(result.num_shards, 'shard')}, {result.num_tokens:,} tokens{remaining}"
        )
    return DONE


def _read_vocab_size_for_new_tokenizer(config: RunConfig) -> int | None:
    """Return the vocabulary size for a tokenizer that is trained on the data.

    The size is ``vocab_size`` in the model's config.

    Returns:
        The vocabulary size. None if no tokenizer is trained, because ``data.tokenizer`` or
        ``model.name_or_path`` is set. This case is fast, because transformers is not imported. Also
        None if the model's config has no ``vocab_size``.
    """
    if config.data.tokenizer or config.model.name_or_path:
        return None
    with show_loading_message():
        from portable.model.build import load_model_config
    size: int | None = getattr(load_model_config(config.model).get_text_config(), "vocab_size", None)
    return size


class ShardPart(NamedTuple):
    """The part of the shards that this machine writes, if several machines share the work.

    Attributes:
        number: Number of the part, from 1.
        num_parts: Total number of parts.
    """

    number: int
    num_parts: int


def _parse_shard_part(text: str) -> ShardPart:
    """Parse the value of ``--part``, such as ``2/8``.

    Raises:
        UserError: If the value has a different format, or if the first number is 0 or exceeds the
            second.
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(
            f"--part: {text!r} does not have the form I/N with 1 <= I <= N; specify the position of "
            "this machine and the total number of machines, such as 2/8"
        )
    return ShardPart(int(match[1]), int(match[2]))


if __name__ == "__main__":
    sys.exit(main())
