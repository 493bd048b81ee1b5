"""Entry points of the installed commands. Each function returns the exit code of the process.

Importing this module installs a handler for Ctrl-C. An interrupt then ends the process without a
traceback, even while a command is still being imported.
"""

from __future__ import annotations

from portable.converters.interrupts import install_exit_on_interrupt
from portable.ranks.process_exit import set_process_exit_code

install_exit_on_interrupt()


def train() -> int:
    """Run ``portable-train``."""
    from portable.cli import run_as_process

    return set_process_exit_code(run_as_process())


def convert() -> int:
    """Run ``portable-convert``."""
    from portable.converters.cli import main

    return set_process_exit_code(main())


def report() -> int:
    """Run ``portable-report``."""
    from portable.reporting.html_report import main

    return set_process_exit_code(main())


def plan() -> int:
    """Run ``portable-plan``."""
    from portable.planner.cli import main

    return set_process_exit_code(main())


def chat() -> int:
    """Run ``portable-chat``."""
    from portable.commands.chat import main

    return set_process_exit_code(main())


def data() -> int:
    """Run ``portable-data``."""
    from portable.commands.data import main

    return set_process_exit_code(main())
