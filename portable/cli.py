"""Run the command-line program ``portable-train``."""

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

Each value has the form ``module:function``, where the module is in ``portable.commands``.
"""


def run_command(name: str, *arguments: Any) -> int:
    """Import the module of a command, run the command, and return its exit code.

    Args:
        name: Key of :data:`COMMANDS`.
        arguments: Arguments of the command's function.
    """
    module, _, function = COMMANDS[name].partition(":")
    code: int = getattr(importlib.import_module(f"portable.commands.{module}"), function)(*arguments)
    return code


@exit_without_traceback
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``portable-train`` or one of its subcommands.

    A UserError or RunError is printed, not raised. If ``srun`` started this process as one of
    several tasks and ``RANK`` is not set, this function adds to ``os.environ``
    the rank variables that torchrun would set.

    Args:
        argv: Command-line arguments. Defaults to ``sys.argv``.

    Returns:
        The exit code. See :data:`portable.converters.commands.EXIT_CODES`.

    Raises:
        SystemExit: After ``--help`` or ``--version``, which print and exit.
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
    """Run :func:`main` as the entry point of this process.

    A launcher may have started the process as one of several ranks.

    Returns:
        The exit code. If there are several ranks, :func:`set_process_exit_code` also arranges that
        the process exits with this code without finalizing the interpreter.
    """
    code = main()
    return code if os.environ.get("WORLD_SIZE", "1") == "1" else set_process_exit_code(code)


def _strip_local_rank(argv: Sequence[str]) -> list[str]:
    """Remove ``--local_rank=N``, which the ``deepspeed`` launcher adds to the arguments of each rank.

    Args:
        argv: Arguments of the command line.

    Returns:
        The remaining arguments. If this process is not a rank, nothing is removed, so that an option
        typed by the user is reported as unknown.
    """
    if "LOCAL_RANK" not in os.environ:
        return list(argv)
    return [argument for argument in argv if not re.fullmatch(r"--local[_-]rank=\d+", argument)]


def run_invocation(invocation: Invocation) -> int:
    """Run a parsed command line of ``portable-train``.

    By default, launches the ranks on this machine in child processes, and waits for them. A single
    rank without offloading runs in this process. If a launcher such as torchrun started this
    process, runs it as one of the launcher's ranks instead. With ``--dry-run``, ``--show-data`` or
    ``--resume-info``, this function only prints information, and does not train.

    Before launching child processes, sets the environment variables that the backend requires. If
    an Accelerate config file selects GPUs, ``CUDA_VISIBLE_DEVICES`` is also set, unless this
    process is a rank of a launcher or the variable already exists.

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
            raise UserError("--show-data: works only in a single process; run the command without a launcher")
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
    # Run every rank in a child process, even a single rank that offloads to the host. If the kernel kills a
    # rank for lack of host memory, the parent process survives and can report it.
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
            "--json: writes the values of an evaluation, so it needs --eval-only; add --eval-only"
        )
    if invocation.json is not None and not Path(invocation.json).absolute().parent.is_dir():
        raise UserError(f"--json: {invocation.json}: the folder does not exist; create the folder first")
    if invocation.json is not None and Path(invocation.json).is_dir():
        raise UserError(f"--json: {invocation.json}: is a folder; specify a file, such as values.json")
    if invocation.json is not None and not _may_overwrite(Path(invocation.json)):
        raise UserError(
            f"--json: {invocation.json}: already exists and does not contain evaluation results; specify "
            "another file"
        )
    if invocation.json is not None and invocation.dry_run:
        raise UserError(
            "--json: has no effect with --dry-run, which evaluates nothing; remove --json or --dry-run"
        )
    if invocation.profile and invocation.eval_only:
        raise UserError(
            "--profile: records training steps, but --eval-only does not train; remove --profile or "
            "--eval-only"
        )
    if invocation.show_data is not None and (
        invocation.profile or invocation.eval_only or invocation.dry_run or invocation.replay is not None
    ):
        raise UserError(
            "--show-data: cannot be combined with --dry-run, --eval-only, --profile or --replay; remove the "
            "other options"
        )
    if invocation.replay is not None and (invocation.profile or invocation.eval_only):
        raise UserError(
            "--replay: cannot be combined with --eval-only or --profile; remove the other options"
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
