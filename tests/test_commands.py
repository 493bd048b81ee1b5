"""Common behavior of all commands: exit codes, the version, and an end without a traceback."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import portable.cli
import portable.commands.data
import portable.converters.cli
import portable.planner.cli
import portable.reporting.html_report
from portable.converters.commands import EXIT_CODES

COMMANDS: dict[str, Callable[..., int]] = {
    "portable.converters.cli": portable.converters.cli.main,
    "portable.cli": portable.cli.main,
    "portable.reporting.html_report": portable.reporting.html_report.main,
    "portable.planner.cli": portable.planner.cli.main,
    "portable.commands.data": portable.commands.data.main,
}


@pytest.mark.parametrize("module", COMMANDS)
def test_command_help_has_exit_codes_and_version(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        COMMANDS[module](["--help", *(["all"] if module == "portable.cli" else [])])
    assert left.value.code == 0
    said = capsys.readouterr().out
    assert "--version" in said and [line for line in said.splitlines() if len(line) > 80] == []
    lines = said.partition("exit codes:\n")[2].splitlines()
    shown = [line for line in lines if line[2:5].strip("+ ").isdigit()]
    assert len(shown) >= 2
    for line in shown:
        code, meaning = line.split(None, 1)
        told = EXIT_CODES[int(code.rstrip("+"))]
        assert meaning == (told if code != "0" or module == "portable.cli" else "done")
    if module == "portable.cli":
        assert len(shown) == len(EXIT_CODES) - 1  # without DAMAGED, which only portable-convert returns
    with pytest.raises(SystemExit) as left:
        COMMANDS[module](["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("portable-trainer ")


def test_ctrl_c_has_same_message_in_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("portable.command_line.parse_train_args", interrupted)
    monkeypatch.setattr("portable.planner.cli.parse_command_line", interrupted)
    monkeypatch.setattr("portable.commands.data.parse_command_line", interrupted)
    monkeypatch.setattr("portable.reporting.html_report.parse_place_setting", interrupted)
    monkeypatch.setattr("portable.converters.cli._run_conversion", interrupted)
    for module, main in COMMANDS.items():
        assert main(["a", "b"] if module != "portable.reporting.html_report" else ["a"]) == 130
        assert capsys.readouterr().err == "error: interrupted\n"
