"""A visit keeps what was done, ends in time, and goes on where it stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_visit
from benchmarks.gpu_visit import CUT, FAILED, PASSED, SLOW, Part, main
from benchmarks.kills import until
from benchmarks.visit_wheels import SETS, keep_libraries, requirement

HANG = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(99)'])"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Part]:
    """Parts that take no time, in place of those that train."""
    for name, code in {
        "figures": "print('{\"rate\": 3}')",
        "fails": "raise SystemExit('no')",
        "hangs": HANG,
    }.items():
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_visit, "LEAST", 0.0)
    monkeypatch.setattr(gpu_visit, "GRACE", 0.0)
    monkeypatch.setattr(gpu_visit, "SLOWER", 1)
    monkeypatch.setattr(gpu_visit, "SHARE", 0.0)
    hangs = Part("hangs", "hangs", (), 99, alone=True)
    found = [Part("figures", "figures", ("{out}",), 9), Part("fails", "fails", (), 9), hangs]
    monkeypatch.setattr(gpu_visit, "PARTS", found)
    return found


def results(out: Path) -> dict[str, Any]:
    parts: dict[str, Any] = json.loads((out / "visit.json").read_text())["parts"]
    return parts


def test_goes_on_where_it_stopped(parts: list[Part], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["--out", str(out), "--minutes", "0.03"]) == 1
    first = results(out)
    assert {name: result["status"] for name, result in first.items()} == {
        "figures": PASSED,
        "fails": FAILED,
        "hangs": CUT,
    }
    assert first["figures"]["figures"] == {"rate": 3}
    assert first["fails"]["last"] == "no"
    assert "| figures | passed |" in (out / "visit.md").read_text()

    parts[2] = Part("hangs", "hangs", (), 0.2)
    assert main(["--out", str(out), "--again", "figures"]) == 1
    second = results(out)
    assert second["fails"] == first["fails"]  # not run again
    assert second["figures"]["seconds"] != first["figures"]["seconds"]
    assert second["hangs"]["status"] == SLOW
    assert "$ python -m hangs" in (out / "log.txt").read_text()


def test_a_part_dies_with_the_visit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "says.py").write_text(
        "import os, time; open('pid', 'w').write(f'{os.getpid()} '); time.sleep(99)"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    visit = os.fork()
    if visit == 0:
        with (tmp_path / "log").open("w") as log:
            gpu_visit._within(["says"], 99, log.fileno(), threading.Event(), threads=None)
        os._exit(1)
    said = tmp_path / "pid"
    until(lambda: said.exists() and said.read_text().endswith(" "))
    os.kill(visit, signal.SIGKILL)
    os.waitpid(visit, 0)
    asked = ["ps", "-o", "stat=", "-p", said.read_text().strip()]
    until(lambda: subprocess.run(asked, capture_output=True, check=False).stdout[:1] in (b"", b"Z"))


def test_tests_that_passed_are_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile("""
        from pathlib import Path
        def test_passes():
            with Path("ran").open("a") as file:
                file.write("1")
        def test_fails(): assert Path("mended").exists()
    """)
    given = ["-p", "benchmarks.visit_tests", "--outcomes", "outcomes.jsonl", "-p", "no:cacheprovider"]
    assert pytester.runpytest_inprocess(*given).ret == 1
    pytester.path.joinpath("mended").touch()
    assert pytester.runpytest_inprocess(*given).ret == 0
    assert pytester.runpytest_inprocess(*given).ret == 0
    assert pytester.path.joinpath("ran").read_text() == "1"
    rows = [json.loads(line) for line in pytester.path.joinpath("outcomes.jsonl").read_text().splitlines()]
    assert [row["outcome"] for row in rows] == ["passed", "failed", "passed"]
    assert "assert" in rows[1]["error"]


def test_bitsandbytes_keeps_one_library_and_its_licence(tmp_path: Path) -> None:
    wheel = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    inside = [f"bitsandbytes/libbitsandbytes_{name}.so" for name in ("cpu", "cuda126", "cuda130")]
    inside += ["bitsandbytes/__init__.py", "bitsandbytes-1.dist-info/licenses/LICENSE"]
    record = "bitsandbytes-1.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as whole:
        for name in inside:
            whole.writestr(name, name)
        whole.writestr(record, "".join(f"{name},sha256=x,1\n" for name in [*inside, record]))
    keep_libraries(wheel, ("cpu", "cuda130"))
    kept = [*(name for name in inside if "126" not in name), record]
    with zipfile.ZipFile(wheel) as small:
        assert small.namelist() == kept
        assert [line.split(",")[0] for line in small.read(record).decode().splitlines()] == kept
    assert list(tmp_path.iterdir()) == [wheel]


def test_every_wheel_has_a_version() -> None:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text("utf-8")
    assert all("==" in requirement(name, constraints) for group in SETS.values() for name in group)
    with pytest.raises(SystemExit, match="names no version of numby"):
        requirement("numby", constraints)
