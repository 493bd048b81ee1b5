"""A real shell completes the commands."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from portable.cli import main

BASH = """
source /dev/stdin
complete_as() {
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
    _shtab_"${1//-/_}"
    echo "${COMPREPLY[@]}"
}
complete_as portable-train --train.learning_r
complete_as portable-train --strategy zer
complete_as portable-plan --top
complete_as portable-data --part
complete_as portable-convert --dtype bfl
complete_as portable-report --o
complete_as portable-chat --te
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_completion_in_bash_offers_settings_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    done = subprocess.run(["bash", "-c", BASH], input=script, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "--train.learning_rate",
        "zero1 zero2 zero3",
        "--topology",
        "--part",
        "bfloat16",
        "--out",
        "--temperature",
    ]
    assert not done.stderr
