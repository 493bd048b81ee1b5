"""A rank on which nothing moves ends; what its launcher makes of it is in ``test_launch.py``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

STANDS_STILL = """
import sys, time
from pathlib import Path
from portable.ranks.watchdog import Watchdog

def a_step_that_never_ends():
    time.sleep(60)

watchdog = Watchdog(rank=3, seconds=1.5, folder=Path(sys.argv[1]), report=print)
with watchdog:
    for batch in watchdog.over(range(8)):
        time.sleep(2 if batch == 0 else 0)  # the first may take longer
        if batch == 2:
            with watchdog.paused():
                time.sleep(2)
        if batch == 5:
            print("standing still", flush=True)
            a_step_that_never_ends()
"""


def test_a_rank_that_stands_still_says_where_and_ends(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STANDS_STILL, str(tmp_path / "hang")],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert ended.returncode == 1
    first, line = ended.stdout.splitlines()
    assert first == "standing still"
    assert re.match(r"no progress for \d+ s; rank 3 was in a_step_that_never_ends \(<string>:7\)", line)
    stacks = (tmp_path / "hang" / "rank-3.txt").read_text()
    assert "line 7 in a_step_that_never_ends" in stacks
