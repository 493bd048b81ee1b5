"""Command line program ``portable-train``."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.converters.commands import REFUSED, exit_without_traceback
from portable.errors import ReportedElsewhereError, RunError, UserError, print_error_lines
from portable.ranks.parent_death import die_with_parent
from portable.ranks.process_exit import set_process_exit_code
from portable.terminal import print_status, set_quiet, show_loading_message

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.command_line import Invocation

COMMANDS = {
    "init": "init:write_starter_config",
    "completion": "completion:print_completion_script",
    "import": "importing:print_imported_config",
    "schema": "init:print_schema",
    "chat": "chat:main",
    "--dry-run": "dry_run:print_dry_run",
    "--show-data": "show_data:print_samples",
    "--resume-info": "resume_info:print_checkpoint_info",
}
"""Subcommands in addition to training.

Each value is a module in ``portable.commands`` and a function in it.
"""


def run_command(name: str, *arguments: Any) -> int:
    """Import the module of a command, run the command, and return its exit code.

    Args:
        name: Key of :data:`COMMANDS`.
        arguments: Arguments of the function.
    """
    module, _, function = COMMANDS[name].partition(":")
    code: int = getattr(importlib.import_module(f"portable.commands.{module}"), function)(*arguments)
    return code


@exit_without_traceback
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``portable-train`` in this process.

    Args:
        argv: Command-line arguments. Defaults to ``sys.argv``.

    Returns:
        The exit code. See :data:`portable.converters.commands.EXIT_CODES`.
    """
    try:
        from portable.command_line import parse_train_args

        words = sys.argv[1:] if argv is None else argv
        if words and words[0] in COMMANDS and not words[0].startswith("-"):
            return run_command(words[0], words[1:])
        if "SLURM_PROCID" in os.environ:
            from portable.ranks.slurm import read_slurm_rank_variables

            os.environ.update(read_slurm_rank_variables(os.environ))
        return run_invocation(parse_train_args(_strip_local_rank(words)))
    except UserError as error:
        print_error_lines(error)
        return REFUSED
    except ReportedElsewhereError as error:
        error.wait_for_report()
        return error.exit_code
    except RunError as error:
        print_error_lines(error)
        return error.exit_code


def run_as_process() -> int:
    """Run :func:`main` as the entry point of this process, which a launcher may have started as a rank.

    Returns:
        The exit code. If there are several ranks, the process is also set to exit with this code
        without finalizing the interpreter. See :func:`set_process_exit_code`.
    """
    code = main()
    return code if os.environ.get("WORLD_SIZE", "1") == "1" else set_process_exit_code(code)


def _strip_local_rank(argv: Sequence[str]) -> list[str]:
    """Remove ``--local_rank=N``, which the ``deepspeed`` launcher adds to the arguments of each rank.

    Args:
        argv: Arguments of the command line.

    Returns:
        The other arguments. All arguments if this process is not a rank, so that the option is reported
        as unknown if the user has typed it.
    """
    if "LOCAL_RANK" not in os.environ:
        return list(argv)
    return [argument for argument in argv if not re.fullmatch(r"--local[_-]rank=\d+", argument)]


def run_invocation(invocation: Invocation) -> int:
    """Run a parsed command line of ``portable-train``.

    By default, launches the ranks on this machine and waits for them. If a launcher such as torchrun
    started this process, runs it as one of the launcher's ranks instead. Sets the required environment
    variables.

    Returns:
        The exit code.

    Raises:
        UserError: If the config is not valid, or if an option contradicts another option or the
            launcher.
        RunError: If the run failed in this process.
    """
    with show_loading_message():
        from portable import plugins
        from portable.checkpoint.store import open_checkpoints
        from portable.ranks import launch
        from portable.registry import load_backend_package, resolve_backend_name
        from portable.run.rank import LaunchMode, run_rank
        from portable.run.resolve import resolve_run

    config = invocation.config
    set_quiet(config.log.quiet)
    is_rank = "RANK" in os.environ or "WORLD_SIZE" in os.environ
    if is_rank:
        launch.check_rank_variables()
    if os.environ.get("RANK", "0") == "0":
        for note in invocation.notes:
            print_status(f"note: {note}")
    if invocation.gpu_ids is not None and not is_rank:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", invocation.gpu_ids)
    _check_train_options(invocation)
    if invocation.resume_info is not None:
        return run_command("--resume-info", str(invocation.resume_info), config.backend)
    name = resolve_backend_name(config.backend)
    package = load_backend_package(name)
    mode = LaunchMode(
        invocation.eval_only, invocation.profile, replay=invocation.replay, json_file=invocation.json
    )
    if is_rank:
        if invocation.nproc is not None:
            raise UserError(
                "--nproc: cannot be used in a process that a launcher has started; remove --nproc"
            )
        if invocation.dry_run:
            return (
                run_command("--dry-run", resolve_run(config, name, writes_output=False))
                if os.environ["RANK"] == "0"
                else 0
            )
        if invocation.show_data is not None:
            raise UserError("--show-data: runs in one process; run the command without a launcher")
        launch.check_rendezvous_variables()
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()
        return run_rank(name, config, mode)
    ranks = package.count_local_ranks() if invocation.nproc is None else invocation.nproc
    package.check_ranks(ranks)
    if invocation.dry_run:
        with plugins.refuse_custom_code(
            plugins.explain_foreign_module if invocation.is_from_elsewhere else None
        ):
            return run_command("--dry-run", resolve_run(config, name, ranks, writes_output=False))
    if invocation.show_data is not None:
        resolved = resolve_run(config, name, ranks, writes_output=False, may_download=True)
        return run_command("--show-data", resolved, invocation.show_data)
    resolved = resolve_run(config, name, ranks, writes_output=mode.writes_output)
    if ranks == 1 and not resolved.config.memory.has_offloading:
        return run_rank(name, resolved, mode)
    os.environ.update(package.get_launch_environment(ranks))
    # Every rank is a child process, even a single rank if it offloads to the host, because the parent
    # survives if the kernel kills a rank for lack of host memory, and can report it.
    return launch.launch_ranks(
        run_rank,
        (name, resolved, mode),
        ranks=ranks,
        memory_advice=package.get_host_memory_advice(resolved.config),
        find_checkpoint=lambda: open_checkpoints(resolved.output_place).find_latest(),
    )


def _check_train_options(invocation: Invocation) -> None:
    """Check that the options are consistent, and that ``--json`` does not overwrite another file.

    Raises:
        UserError: If a check fails.
    """
    if invocation.json is not None and not invocation.eval_only:
        raise UserError(
            "--json: writes the values of an evaluation, but this command trains; add --eval-only"
        )
    if invocation.json is not None and not Path(invocation.json).absolute().parent.is_dir():
        raise UserError(f"--json: {invocation.json}: the folder does not exist; create the folder first")
    if invocation.json is not None and Path(invocation.json).is_dir():
        raise UserError(f"--json: {invocation.json}: is a folder; specify a file, such as values.json")
    if invocation.json is not None and not _may_overwrite(Path(invocation.json)):
        raise UserError(
            f"--json: {invocation.json}: exists, but does not contain an evaluation; specify another file"
        )
    if invocation.json is not None and invocation.dry_run:
        raise UserError(
            "--json: has no effect with --dry-run, which evaluates nothing; remove one of the two"
        )
    if invocation.profile and invocation.eval_only:
        raise UserError(
            "--profile: records training steps, but --eval-only does not train; remove one of the two"
        )
    if invocation.show_data is not None and (
        invocation.profile or invocation.eval_only or invocation.dry_run or invocation.replay is not None
    ):
        raise UserError(
            "--show-data: cannot be combined with other switches, because it trains nothing; remove the "
            "other switch"
        )
    if invocation.replay is not None and (invocation.profile or invocation.eval_only):
        raise UserError(
            "--replay: cannot be combined with --profile or --eval-only, because it trains nothing; "
            "remove these switches"
        )


def _may_overwrite(path: Path) -> bool:
    """Return whether ``path`` does not exist, is empty, or contains evaluation results."""
    from portable.paths import read_json_file

    try:
        if path.is_file() and not path.stat().st_size:  # an empty file, because mktemp creates one
            return True
        values = read_json_file(path)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and "step" in values


if __name__ == "__main__":
    sys.exit(run_as_process())
