"""Find the checkpoint that a path refers to, detect its format, and open it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.errors import CheckpointError, CommandError, format_os_error
from portable.converters.formats import CheckpointPath, DetectedFormat, detect_format, iter_formats
from portable.converters.names.canonical import is_parameter_index
from portable.converters.storage.completion_markers import INCOMPLETE_MARKER
from portable.converters.storage.folder_operations import is_incomplete_folder, resolve_path_inside
from portable.converters.storage.path_or_url import parse_path_or_url

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from portable.converters.checkpoint import Checkpoint
    from portable.converters.storage.path_or_url import AnyPath

# Names of step folders: step-000100 (this project, torchtitan), checkpoint-500 (Trainer of transformers),
# global_step7 (DeepSpeed), epoch_3-step-100, and 100 (Orbax).
_STEP_NAME = re.compile(r"(?:(?:.*[^0-9])?(?:step|checkpoint|ckpt|iter|epoch)[-_]?)?(\d+)")

_DIGITS = re.compile(r"\d+")
_GGUF_SUFFIX = ".gguf"


def open_checkpoint(
    path: str | AnyPath,
    tag: str | None = None,
    *,
    order: Sequence[str] = (),
    companions: Mapping[str, AnyPath] | None = None,
    rank: tuple[int, int] | None = None,
    build_once: Callable[[str, Callable[[Path], None]], Path | None] | None = None,
) -> Checkpoint:
    """Open a checkpoint of any supported format. Only headers are read.

    Example:
        >>> from portable import open_checkpoint
        >>> checkpoint = open_checkpoint("runs/quickstart")
        >>> checkpoint.tensors["model.embed_tokens.weight"].read((slice(0, 2),)).shape
        (2, 48)

    Args:
        path: Run folder (its newest complete step is opened), folder of a step, folder of shards,
            or file. It can be a local path or a URL (`s3://bucket/run`). Only the required byte
            ranges of objects are fetched.
        tag: Step to open in a folder of several steps: a folder name (`step-000100`) or a number
            (`100`). A number that belongs to several folders is an error.
        order: Names of the model's parameters in module order, if known. The order is needed to
            name the optimizer state if the state is keyed by index and the files do not record the
            order.
        companions: Paths of files, keyed by name, that replace the files next to the shards. An
            example is the `config.json` of the model, which determines the tensor names in some
            formats.
        rank: Rank and world size of this process, if each rank of a job opens the checkpoint to
            read only its slices. The files of other ranks are then opened only if a slice needs
            them. Missing or damaged files are therefore noticed only at that point.
        build_once: Function `build_once(key, write)`, needed only if several processes of a node
            open the checkpoint. It must call `write(path)` in one process per node, with a path of
            its choice, and return the path of the finished file in every process. `key` identifies
            the content of the file. `write` parses large metadata and writes the result to the
            file, and all processes memory-map it. If the processes cannot share files,
            `build_once` must return None, and every process parses the metadata itself.

    Returns:
        The checkpoint. Tensors are read when they are used.

    Raises:
        CheckpointError: If the checkpoint is missing, damaged, incomplete, or of an unknown format,
            or if it cannot be accessed. The message is one line that names the file.
    """
    root = opened = parse_path_or_url(path)
    try:
        if not root.exists():
            raise CommandError(f"{root}: no such file or folder; check the path")
        if not (root.is_file() or root.is_dir()):
            raise CommandError(f"{root}: is neither a file nor a folder; specify a file or folder")
        format, source, match = _detect_checkpoint(root, tag)
        opened = source.path
        config = companions.get("config.json") if companions else None
        source = replace(
            source, parameter_order=tuple(order), config_file=config, rank=rank, build_once=build_once
        )
        checkpoint = format.open(source, match)
        return checkpoint.with_companions(companions) if companions else checkpoint
    except OSError as error:
        raise CheckpointError(f"{error.filename or opened}: {format_os_error(error)}") from None
    except RecursionError:
        raise CheckpointError(
            f"{opened}: the data is nested too deeply; specify the file or folder of a checkpoint"
        ) from None


def read_pickled(path: str | AnyPath) -> Any:
    """Read a small `torch.save` file without running code.

    Args:
        path: Path or URL of the file.

    Returns:
        The content as dicts, lists, strings, numbers, booleans, and None. The keys of the dicts are
        converted to strings. Objects are replaced with the names of their classes, and tensors with
        `"StoredTensor"`. Values after the first 100,000 and values that are nested more than 50 levels
        deep are replaced with `"..."`.

    Raises:
        CheckpointError: If the file is missing or damaged, if it is not a zip file of `torch.save`, or
            if it contains a class or function that is not on the allow-list.
    """
    from portable.converters.containers.pickle_reader import to_json_value
    from portable.converters.containers.torchzip import TorchZip
    from portable.converters.storage.folder import CheckpointFolder

    path = parse_path_or_url(path)
    try:
        return to_json_value(TorchZip(CheckpointFolder(path.parent).get_file(path.name)).load_object())
    except OSError as error:
        raise CheckpointError(f"{path}: {format_os_error(error)}") from None


def _detect_checkpoint(root: AnyPath, tag: str | None) -> DetectedFormat:
    """Find the checkpoint that a path and a tag refer to, and detect its format.

    Without a tag, the path itself is selected if it is a checkpoint. Otherwise, the newest complete
    step is selected. A tag selects a step folder by its name or number. If no step folder has the
    tag, a format with `Format.selects_tag` selects the step.

    Raises:
        CheckpointError: If there is no complete checkpoint of a known format, if there is none with
            the tag or the tag matches several step folders, if the path is ambiguous because the names
            of its steps differ not only in their numbers, or if a symlink points outside the run
            folder.
        OSError: If a local file or folder cannot be accessed.
    """
    if not _is_finished_write(root):
        raise CheckpointError(_format_unfinished_write_error(root))
    source = CheckpointPath(root, tag)
    steps = _list_step_folders(root)
    if tag is not None and steps:
        matching = [step for _, step in steps if tag == step.name]
        if not matching and is_parameter_index(tag):
            matching = [step for number, step in steps if int(tag) == number]
        if len(matching) > 1:
            raise CommandError(
                f"{root}: the tag {tag!r} matches {matching[0]} and {matching[1]}; specify the path of "
                "one of these folders and leave out --tag"
            )
        if matching:
            source = CheckpointPath(_validate_inside(root, matching[0]))
            match = detect_format(source) if _is_finished_write(source.path) else None
            if match is None:
                raise CheckpointError(_describe_unknown_format(source))
            return match
    match = detect_format(source)
    if match is not None and (tag is None or match.format.selects_tag):
        return match
    if tag is not None:
        step_names = ", ".join(step.name for _, step in steps[:8])
        if not step_names:
            raise CommandError(
                f"{root}: contains no steps, so no checkpoint has the tag {tag!r}; leave out --tag"
            )
        raise CommandError(f"{root}: no checkpoint has the tag {tag!r}; specify one of {step_names}")
    chosen: dict[str, DetectedFormat] = {}
    for _, step in steps:
        kind = _DIGITS.sub("", step.name)
        if kind not in chosen:
            match = (
                detect_format(CheckpointPath(_validate_inside(root, step)))
                if _is_finished_write(step)
                else None
            )
            if match is not None:
                chosen[kind] = match
    if len(chosen) > 1:
        names = " and ".join(sorted(each.source.path.name for each in chosen.values())[:4])
        raise CommandError(
            f"{root}: contains steps with {len(chosen)} kinds of names, such as {names}; choose a step with "
            "--tag"
        )
    if chosen:
        return next(iter(chosen.values()))
    raise CheckpointError(_describe_unknown_format(CheckpointPath(steps[0].path) if steps else source))


def _validate_inside(root: AnyPath, step: AnyPath) -> AnyPath:
    """Check that no symlink in the path of a step folder points outside the run folder, and return the path.

    Raises:
        LinkError: If a symlink points outside the run folder.
    """
    resolve_path_inside(step, root)
    return step


def _is_finished_write(path: AnyPath) -> bool:
    """Return whether the folder of a path has been written completely.

    If the path is a file, the folder that contains the file is checked. A folder is incomplete if
    it contains the marker `_INCOMPLETE` but not `_COMPLETE`. Only writes to an object store create
    `_INCOMPLETE`, so a folder on a disk is incomplete only if it is a copy of such a folder.
    """
    return not is_incomplete_folder(path.parent if path.is_file() else path)


def _format_unfinished_write_error(path: AnyPath) -> str:
    return (
        f"{path}: contains {INCOMPLETE_MARKER}, but no completion marker, because the writer is still "
        "running or was killed; choose another step"
    )


class _StepFolder(NamedTuple):
    """Step folder, and the step number in its name."""

    number: int
    path: AnyPath


def _list_step_folders(root: AnyPath) -> list[_StepFolder]:
    """List the step folders of a run, highest step number first.

    `root` and its subfolders `checkpoints/` and `checkpoint/` (torchtitan) are searched. The name
    of a step folder is a number, or ends with a number after `step`, `checkpoint`, `ckpt`, `iter`,
    or `epoch`. An example is `step-000100`. Missing folders, and local folders that cannot be
    listed, are ignored.

    Raises:
        LinkError: If a symlink points outside the run folder.
        RemoteError: If the folders in an object store cannot be listed.
    """
    steps = []
    for folder in (root / "checkpoints", root / "checkpoint", root):
        try:
            resolve_path_inside(folder, root)  # raises if the folder is a symlink that points outside
            children = [child for child in folder.iterdir() if child.is_dir()]
        except OSError:
            continue
        for child in children:
            match = _STEP_NAME.fullmatch(child.name)
            if match and not child.name.startswith("."):
                steps.append(_StepFolder(int(match[1][:18]), child))
    return sorted(steps, key=lambda step: (-step.number, step.path.name))


def is_gguf_file(path: AnyPath) -> bool:
    """Return whether a path is an existing file whose name ends with `.gguf`."""
    return path.name.endswith(_GGUF_SUFFIX) and path.is_file()


def _find_gguf_file(path: AnyPath) -> AnyPath | None:
    """Return the path if it is a GGUF file, or the first GGUF file in the folder. None if there is none."""
    if not path.is_dir():
        return path if is_gguf_file(path) else None
    try:
        return min((file for file in path.iterdir() if is_gguf_file(file)), key=str, default=None)
    except OSError:
        return None


def _describe_unknown_format(source: CheckpointPath) -> str:
    if not _is_finished_write(source.path):
        return _format_unfinished_write_error(source.path)
    for format_ in iter_formats():
        reason = format_.explain_incomplete(source)
        if reason:
            return reason
    if (file := _find_gguf_file(source.path)) is not None:
        return (
            f"{file}: GGUF files can be written, but not read; list the tensors of this file with: "
            f"portable-convert inspect {file}"
        )
    names = ", ".join(format_.name for format_ in iter_formats())
    return (
        f"{source.path}: there is no checkpoint of a known format ({names}); specify the file or folder of a "
        "checkpoint"
    )
