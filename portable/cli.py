"""``portable-train``."""

from __future__ import annotations

import os
import re
import sys
from typing import TYPE_CHECKING

from converters.commands import FAILED, REFUSED, command
from portable.errors import RunError, StoppedError, ToldElsewhereError, UserError, one_line
from portable.ranks.parent_death import die_with_parent
from portable.terminal import loading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.config import Invocation


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``portable-train`` and return its exit code, as :data:`converters.commands.EXIT_CODES` has it."""
    try:
        from portable.config import parse_args
        from portable.ranks.slurm import rank_variables

        os.environ.update(rank_variables(os.environ))
        return run(parse_args(_without_local_rank(sys.argv[1:] if argv is None else argv)))
    except UserError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return REFUSED
    except ToldElsewhereError as error:
        return error.exit_code
    except RunError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, StoppedError) else FAILED


def _without_local_rank(argv: Sequence[str]) -> list[str]:
    """``argv`` without the ``--local_rank=N`` that the ``deepspeed`` launcher adds to it."""
    if "LOCAL_RANK" not in os.environ:
        return list(argv)
    return [argument for argument in argv if not re.fullmatch(r"--local[_-]rank=\d+", argument)]


def run(invocation: Invocation) -> int:
    """Launch local ranks, or be one of a launcher's."""
    with loading():
        from portable.backend import backend_room, resolve_backend
        from portable.commands.dry_run import describe_checkpoint, dry_run
        from portable.output.existing_run import checkpoints_of
        from portable.paths import place_of
        from portable.ranks import launch
        from portable.run.leg import check_output_folder, train_leg

    config = invocation.config
    if os.environ.get("RANK", "0") == "0":
        for note in invocation.notes:
            print(f"note: {note}", file=sys.stderr)
    if invocation.gpu_ids is not None and not launch.joined():
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", invocation.gpu_ids)
    if invocation.profile and invocation.eval_only:
        raise UserError("--profile: records training steps, and --eval-only takes none; remove one")
    if invocation.replay is not None and (invocation.profile or invocation.eval_only):
        raise UserError(
            "--replay: takes one step once more and trains nothing; remove --profile or --eval-only"
        )
    if invocation.resume_info is not None:
        return describe_checkpoint(str(invocation.resume_info), config.backend)
    name = resolve_backend(config.backend)
    room = backend_room(name)
    leg = (name, config, invocation.eval_only, invocation.profile, invocation.replay)
    if launch.joined():
        if invocation.nproc is not None:
            raise UserError("--nproc: this process was started by a launcher, which has set the world size")
        if invocation.dry_run:
            first = os.environ["RANK"] == "0"
            return dry_run(name, config, int(os.environ["WORLD_SIZE"])) if first else 0
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()
        return train_leg(*leg)
    ranks = invocation.nproc if invocation.nproc is not None else room.local_devices(name)
    _check_ranks(name, ranks, room.local_devices(name))
    if invocation.dry_run:
        return dry_run(name, config, ranks)
    resolved = check_output_folder(name, config, ranks)
    if ranks == 1 and not resolved.memory.offloads:
        return train_leg(*leg)
    # A single rank, too, where host memory may run out: somebody has to be left to say so.
    return launch.launch(
        train_leg,
        leg,
        ranks=ranks,
        memory_advice=room.memory_advice(resolved),
        saved=lambda: checkpoints_of(place_of("output_dir", resolved.output_dir)).latest(),
    )


def _check_ranks(name: str, ranks: int, devices: int) -> None:
    if name == "xla" and ranks > 1:
        raise UserError("--nproc: XLA runs one process a host, which drives all its devices; leave it out")
    if name == "cuda" and ranks > devices:
        raise UserError(f"--nproc: {ranks} ranks need as many GPUs, and this machine has {devices}")
    most = 4 * (os.cpu_count() or 1)
    if name == "cpu" and ranks > most:
        raise UserError(
            f"--nproc: {ranks} ranks on {os.cpu_count()} cores would only wait for each other; "
            f"use at most {most}"
        )


if __name__ == "__main__":
    sys.exit(main())
