"""Entry points of the commands. Ctrl-C during the imports ends a command without a traceback."""

from __future__ import annotations

from converters.interrupts import exit_on_interrupt

exit_on_interrupt()


def train() -> int:
    """Run ``portable-train``."""
    from portable.cli import program

    return program()


def convert() -> int:
    """Run ``portable-convert``."""
    from converters.cli import main

    return main()


def report() -> int:
    """Run ``portable-report``."""
    from portable.reporting.html_report import main

    return main()


def plan() -> int:
    """Run ``portable-plan``."""
    from portable.planner.cli import main

    return main()


def data() -> int:
    """Run ``portable-data``."""
    from portable.commands.data import main

    return main()
