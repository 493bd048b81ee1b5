"""``portable-train --resume-info``: describe a checkpoint and the strategies that can resume from it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, get_args

from portable import plugins
from portable.batch_plan import compute_batch_plan
from portable.checkpoint.external import open_external_checkpoint
from portable.checkpoint.store import resolve_to_newest_checkpoint
from portable.checkpoint.trainer_state import STATE_FILE, TrainerState
from portable.checks import check_config
from portable.config import load_config
from portable.config.run_config import Strategy
from portable.converters.console import print_line, wrap_lines
from portable.converters.storage.folder_operations import list_files_below
from portable.converters.storage.path_or_url import is_in_store
from portable.converters.storage.store_errors import RemoteError
from portable.errors import DamagedError, UserError, to_one_line
from portable.formatting import format_bytes, format_count, format_table
from portable.output.existing_run import read_config_of_existing_run
from portable.paths import CONFIG_FILE, convert_checkpoint_errors, parse_place_setting, path_exists
from portable.registry import load_backend_package, resolve_backend_name

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.converters.storage.path_or_url import AnyPath


MAX_WORLD_SIZE = 1 << 16
"""Maximum world size in the list of world sizes that can resume a run."""


def _build_checkpoint_rows(folder: AnyPath, state: TrainerState, config: RunConfig) -> list[tuple[str, str]]:
    """Build the rows of the table that describes a checkpoint of this project.

    Verifies all files of the checkpoint against its manifest. Damage is reported in the table, not
    raised.

    Args:
        folder: Folder or URL of the checkpoint.
        state: Contents of the checkpoint's ``trainer_state.json``.
        config: Config of the run.

    Returns:
        Pairs of a label and a value.

    Raises:
        RemoteError: If a request to the object store fails.
    """
    from portable.converters import CheckpointError, open_checkpoint

    try:
        checkpoint = open_checkpoint(folder)
        parameters = f"{sum(tensor.numel for tensor in checkpoint.tensors.values()):,} weights"
    except RemoteError:  # the store failed, so the error does not describe the checkpoint
        raise
    except CheckpointError as error:
        parameters = f"damaged: {to_one_line(error)}"
    files = [file.size_bytes for file in list_files_below(folder).values()]
    write_time = "in an object store"
    if not is_in_store(folder):
        write_time = time.strftime(
            "%Y-%m-%d %H:%M:%S UTC", time.gmtime((folder / STATE_FILE).stat().st_mtime)
        )
    try:
        integrity = (
            "all match the manifest"
            if state.verify_files(folder) is None
            else "not checked, because the checkpoint has no manifest"
        )
    except DamagedError as error:
        integrity = f"damaged: {to_one_line(error)}"
    skipped = f", {state.skipped_steps:,} of them skipped" if state.skipped_steps else ""
    return [
        ("checkpoint", str(folder)),
        ("step", f"{state.step} of {state.schedule['total_steps']}{skipped}"),
        ("samples", f"{state.samples:,}"),
        ("tokens", f"{state.samples * config.data.seq_len:,}"),
        ("model", f"{_get_model_name(config)}, {parameters}"),
        ("optimizer", config.train.optimizer),
        ("precision", config.precision),
        ("seed", str(state.seed)),
        ("written", write_time),
        ("written by", f"{format_count(state.world_size, 'rank')}, {state.backend}, {state.strategy}"),
        ("files", integrity),
        ("size on disk", f"{format_bytes(sum(files))} in {format_count(len(files), 'file')}"),
    ]


def _get_model_name(config: RunConfig) -> str:
    """Return the name of the pretrained model, or the model type if the weights are random."""
    return config.model.name_or_path or str((config.model.config or {}).get("model_type"))


def format_checkpoint_info(folder: AnyPath, backend_name: str) -> str:
    """Describe a checkpoint of this project, and list which strategies can resume from it.

    The config is read from the folder of the run. If the checkpoint is not in the folder of a run,
    the config consists of the settings in the checkpoint, and of defaults for all other settings.

    Args:
        folder: Folder or URL of the checkpoint.
        backend_name: Name of the backend, or ``auto``.

    Returns:
        Multi-line text.
    """
    state = TrainerState.read(folder)
    run_folder = folder.parent.parent
    is_in_run_folder = folder.parent.name == "checkpoints" and (run_folder / CONFIG_FILE).exists()
    config = (read_config_of_existing_run(run_folder).config if is_in_run_folder else None) or load_config(
        None, state.run
    )
    command = (
        f"portable-train --config {run_folder / CONFIG_FILE}"
        if is_in_run_folder
        else f"portable-train --config YOUR.yaml --checkpoint.resume {folder}"
    )
    name = resolve_backend_name(backend_name)
    lines = [
        format_table(_build_checkpoint_rows(folder, state, config)),
        f"continuing with backend {name}:",
        format_table(build_strategy_rows(config, name)),
        f"to continue: {command} --backend {name} --strategy {config.strategy} --nproc N (or with another "
        "strategy of the table)",
    ]
    return "\n".join(lines)


def build_strategy_rows(config: RunConfig, backend_name: str) -> list[tuple[str, str]]:
    """Build table rows with the world sizes at which each strategy can resume a run.

    The config, the backend and the batch plan are checked as at the start of a run, but with a
    micro-batch size of 1. World sizes that would require padding are omitted.

    Args:
        config: Config of the run.
        backend_name: Name of the backend, which must not be ``auto``.

    Returns:
        Pairs of a strategy and a text. The text contains the strategy's world sizes, such as
        ``on 1, 2, 4 ranks``, or the reason why the strategy cannot resume the run. If the check
        requires custom code inside :func:`portable.plugins.refuse_custom_code`, the text is the
        reason of the refusal.
    """
    package = load_backend_package(backend_name)
    world = package.get_world(1)
    rows = []
    for strategy in get_args(Strategy):
        try:
            settings = {"backend": backend_name, "strategy": strategy, "train.micro_batch_size": 1}
            candidate = config.replaced(settings)
            check_config(candidate, with_location=False)
            candidate = package.adopt_engine_file(candidate, world)
            check_config(candidate, is_resolved=True, with_location=False)
            package.check_config(candidate, world)
        except plugins.CodeRefusedError as error:
            rows.append((strategy, to_one_line(error)))
            continue
        except UserError as error:
            rows.append((strategy, f"no: {to_one_line(error)}"))
            continue
        devices = "ranks" if world.devices_per_rank == 1 else "devices"
        numbers = ", ".join(str(n) for n in _list_world_sizes(candidate))
        rows.append((strategy, f"on {numbers} {devices}"))
    return rows


def _list_world_sizes(config: RunConfig) -> list[int]:
    """Return the world sizes at which the global batch is divided without padding.

    The ranks of a context-parallel or tensor-parallel group process the same sequences. Therefore,
    the number of groups must divide the global batch size. World sizes above
    :data:`MAX_WORLD_SIZE`, and world sizes that :func:`compute_batch_plan` rejects, are omitted.
    """
    total, ranks_per_group = config.train.global_batch_size, config.ranks_together
    world_sizes = []
    for groups in range(1, min(total, MAX_WORLD_SIZE // ranks_per_group) + 1):
        if total % groups:
            continue
        try:
            compute_batch_plan(config, world_size=groups * ranks_per_group, rank=0)
        except UserError:
            continue
        world_sizes.append(groups * ranks_per_group)
    return world_sizes


def print_checkpoint_info(path: str, backend_name: str) -> int:
    """Print a description of a checkpoint of this project or of another trainer. Runs no custom code.

    Args:
        path: Folder or URL of a checkpoint or of a run. For a run, its newest checkpoint is
            described.
        backend_name: Backend that would resume the run, or ``auto``.

    Returns:
        Exit code 0.

    Raises:
        UserError: If there is no checkpoint, or if it cannot be read.
        RunError: If the object store is unavailable.
    """
    unknown = "cannot be checked, because --resume-info does not run custom code"
    with convert_checkpoint_errors("--resume-info"), plugins.refuse_custom_code(lambda _: unknown):
        checkpoint_or_run = parse_place_setting("--resume-info", path)
        if not path_exists(checkpoint_or_run):
            raise UserError(
                f"--resume-info: {checkpoint_or_run} does not exist; specify the folder of a run or "
                "of a checkpoint"
            )
        if (foreign := open_external_checkpoint(checkpoint_or_run)) is not None:
            print_line(format_table(foreign.build_info_rows()))
            return 0
        print_line(
            wrap_lines(
                format_checkpoint_info(resolve_to_newest_checkpoint(checkpoint_or_run), backend_name),
                sys.stdout,
            )
        )
    return 0
