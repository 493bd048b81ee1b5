"""What a person may write for a place: `~`, `${VAR}`, URLs."""

from __future__ import annotations

from pathlib import Path

import pytest

from converters.errors import CheckpointError
from converters.storage.path_or_url import expanded, place


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", "/home/her")
    monkeypatch.setenv("SCRATCH", "/scratch/x")
    monkeypatch.delenv("NOT_SET", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("~", "/home/her"),
        ("~/runs/x", "/home/her/runs/x"),
        ("${SCRATCH}/runs", "/scratch/x/runs"),
        ("$SCRATCH/runs", "/scratch/x/runs"),
        ("a/$SCRATCH", "a//scratch/x"),
        ("~root/x", "/root/x"),
        ("a~/b", "a~/b"),
        ("a/~", "a/~"),
        ("s3://b${SCRATCH}/c//d", "s3://b/scratch/x/c//d"),
        ("org/model-1.0", "org/model-1.0"),
        ("cost$/5$", "cost$/5$"),
        ("", ""),
        ("a\0$b/$NOT", None),
    ],
)
def test_as_a_shell_does(written: str, meant: str | None) -> None:
    if meant is None:
        with pytest.raises(CheckpointError):
            expanded(written)
    else:
        assert expanded(written) == meant
        assert expanded(expanded(written)) == meant


@pytest.mark.parametrize("written", ["${NOT_SET}/x", "$NOT_SET/x", "~nobody-of-that-name/x"])
def test_what_is_not_there_is_refused(written: str) -> None:
    with pytest.raises(CheckpointError, match=r"NOT_SET is not set|home folder of ~nobody") as caught:
        place(written)
    assert str(caught.value).startswith(written)


def test_a_file_of_that_very_name_is_meant(tmp_path: Path) -> None:
    (tmp_path / "~x").touch()
    (tmp_path / "$NOT_SET").touch()
    assert place("~x") == Path("~x")
    assert place("$NOT_SET") == Path("$NOT_SET")
