"""Write a checkpoint in any output format.

To add a format, write a module `converters/writers/<name>_writer.py` with a function that plans the
output files, and list the function in `portable.converters.options.WRITERS`.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from portable.converters.errors import CommandError
from portable.converters.naming import rename_to_live, rename_to_published
from portable.converters.options import FORMATS_WITH_PUBLISHED_NAMES, NAME_KINDS, WRITERS
from portable.converters.storage.path_or_url import parse_path_or_url
from portable.converters.writers.conversion import ContentOptions, Options, write_plan_atomically

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Unpack

    from portable.converters.checkpoint import Checkpoint
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.writers.plan import ConversionPlan


def get_plan_function(output_format: str) -> Callable[[Checkpoint, ContentOptions], ConversionPlan]:
    """Return the function that plans the output files for a format.

    The returned function raises a `CheckpointError` if the format does not support the checkpoint.

    Args:
        output_format: Output format, one of `portable.converters.options.WRITERS`.

    Returns:
        Function that plans the output files of a checkpoint.

    Raises:
        CheckpointError: If the format is unknown.
    """
    if output_format not in WRITERS:
        raise CommandError(f"--to: unknown format {output_format!r}; use one of {', '.join(WRITERS)}")
    module, _, function = WRITERS[output_format].partition(":")
    plan_files: Callable[[Checkpoint, ContentOptions], ConversionPlan] = getattr(
        import_module(module), function
    )
    return plan_files


def is_single_file_output(output_format: str, out: AnyPath) -> bool:
    """Return whether the output is a single file instead of a folder.

    This is the case for the format `gguf` if the name of the output ends with `.gguf`.
    """
    return output_format == "gguf" and out.name.endswith(".gguf")


class CheckpointWriterOptions(Options, total=False):
    """Keyword arguments of `write_checkpoint`."""

    dtype: str
    max_shard_size: int
    optimizer: bool
    names: str | None


def write_checkpoint(
    checkpoint: Checkpoint,
    out: str | AnyPath,
    to: str = "safetensors",
    *,
    dtype: str = ContentOptions.dtype,
    max_shard_size: int = ContentOptions.max_shard_size,
    optimizer: bool = ContentOptions.optimizer,
    names: str | None = None,
    **options: Unpack[Options],
) -> ConversionPlan:
    """Write a checkpoint in another format, as `portable-convert` does.

    Example:
        >>> from portable import open_checkpoint, write_checkpoint
        >>> checkpoint = open_checkpoint("runs/quickstart")
        >>> plan = write_checkpoint(checkpoint, "dcp", "dcp", optimizer=True)
        >>> len(plan.files)
        1

    Args:
        checkpoint: Checkpoint to write.
        out: Path or URL of the output folder. With `gguf`, a name that ends with `.gguf` is a
            single file.
        to: Output format, one of `portable.converters.options.WRITERS`.
        dtype: Target dtype of the weights. See `ContentOptions`.
        max_shard_size: Maximum size of a shard in bytes. See `ContentOptions`.
        optimizer: Whether to also write the optimizer state. See `ContentOptions`.
        names: Convention for tensor names and shapes: `published` converts to the names in
            published files, `live` converts to the names that transformers uses in memory, and
            `stored` keeps the names in the checkpoint. The default is `published` for safetensors,
            torch, and gguf, and `stored` otherwise.
        options: Additional options. See `Options`.

    Returns:
        The executed plan.

    Raises:
        CheckpointError: If `to` or `names` is unknown, if the format does not support the
            checkpoint, if `out` cannot be written or replaced, if the source is damaged, if the disk
            is full, or if the object store is unreachable. `out` is then unchanged.
        TypeError: If the name of an additional option is unknown.
    """
    names = names or ("published" if to in FORMATS_WITH_PUBLISHED_NAMES else "stored")
    if names not in (*NAME_KINDS, "stored"):
        raise CommandError(f"names: unknown value {names!r}; use one of {', '.join(NAME_KINDS)}, stored")
    if names == "published":
        checkpoint = rename_to_published(checkpoint)
    elif names == "live":
        checkpoint = rename_to_live(checkpoint)
    plan = partial(get_plan_function(to), checkpoint, ContentOptions(dtype, max_shard_size, optimizer))
    return write_plan_atomically(
        checkpoint,
        plan,
        parse_path_or_url(out),
        is_single_file=is_single_file_output(to, parse_path_or_url(out)),
        **options,
    )


def write_safetensors(
    checkpoint: Checkpoint, out: str | AnyPath, **options: Unpack[CheckpointWriterOptions]
) -> ConversionPlan:
    """Write a checkpoint as `model.safetensors`, or as numbered safetensors shards with an index.

    Args:
        checkpoint: Checkpoint to write.
        out: Path or URL of the output folder.
        options: Keyword arguments of `write_checkpoint`.

    Returns:
        The executed plan.

    Raises:
        CheckpointError: If the checkpoint cannot be written. See `write_checkpoint`.
    """
    return write_checkpoint(checkpoint, out, "safetensors", **options)


def write_dcp(
    checkpoint: Checkpoint, out: str | AnyPath, **options: Unpack[CheckpointWriterOptions]
) -> ConversionPlan:
    """Write a checkpoint in torch.distributed.checkpoint's format: `.metadata` and `__0_<i>.distcp`.

    Args:
        checkpoint: Checkpoint to write.
        out: Path or URL of the output folder.
        options: Keyword arguments of `write_checkpoint`.

    Returns:
        The executed plan.

    Raises:
        CheckpointError: If the checkpoint cannot be written. See `write_checkpoint`.
    """
    return write_checkpoint(checkpoint, out, "dcp", **options)
