"""The command line of ``portable-train``."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from portable.config import flags, help_text
from portable.config.flags import Option
from portable.config.load import assemble
from portable.config.schema import RunConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

OPTIONS = (
    Option("config", "text", "YAML file with settings; without it, the defaults: the quickstart.", "FILE"),
    Option(
        "accelerate-config",
        "text",
        "An Accelerate config file (accelerate config writes it) to take settings from.",
        "FILE",
    ),
    Option(
        "nproc",
        "count",
        "Ranks to start on this machine; by default one for each GPU, and one on the CPU. Under torchrun, "
        "accelerate launch, deepspeed or srun it joins what they started.",
        "N",
    ),
    Option("dry-run", "switch", "Check everything, print the resolved config and the plan, and stop."),
    Option("eval-only", "switch", "Evaluate the newest checkpoint, or the model as it is, and stop."),
    Option("resume-info", "text", "Say what a checkpoint holds and what a run from it would do.", "PATH"),
    Option("profile", "switch", "Write a profile of a few steps into output_dir."),
    Option("version", "switch", "Print the version and stop."),
)


@dataclass(frozen=True)
class Invocation:
    """What one call of ``portable-train`` asks for."""

    config: RunConfig
    config_file: Path | None = None
    accelerate_config: Path | None = None
    nproc: int | None = None
    """Local ranks to start; None: the backend's choice."""
    dry_run: bool = False
    eval_only: bool = False
    resume_info: str | None = None
    """Path of a checkpoint to describe."""
    profile: bool = False


def parse_args(argv: Sequence[str] | None = None) -> Invocation:
    """Read the command line (``sys.argv`` by default).

    Raises ``UserError`` for what cannot be understood. ``--help`` and ``--version`` print and exit.
    """
    parsed = flags.parse(sys.argv[1:] if argv is None else argv, RunConfig, OPTIONS)
    if parsed.help is not None:
        print(help_text.render(parsed.help, RunConfig, OPTIONS, shutil.get_terminal_size().columns))
        raise SystemExit(0)
    given = dict(parsed.options)
    if given.pop("version", False):
        from importlib.metadata import version

        print(f"portable-trainer {version('portable-trainer')}")
        raise SystemExit(0)
    config_file = given.pop("config", None)
    accelerate_config = given.pop("accelerate_config", None)
    return Invocation(
        config=assemble(config_file, parsed.overrides),
        config_file=Path(config_file) if config_file is not None else None,
        accelerate_config=Path(accelerate_config) if accelerate_config is not None else None,
        **given,
    )
