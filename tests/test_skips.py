"""A test may be skipped for what the system lacks, but never for a package that the extra ``test`` brings."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

NAMED = re.compile(r"""(?:importorskip|find_spec)\(\s*["'](\w+)""")
ELSEWHERE = {
    "torch_xla": "in an environment of its own, with an older torch",
    "flash_attn": "is compiled for a GPU",
    "torchao": "is only installed to look at its checkpoints, and to multiply in fp8 on a GPU",
}


def test_every_package_that_a_test_asks_for_is_here() -> None:
    files = Path(__file__).parent.rglob("*.py")
    asked = {name for path in files for name in NAMED.findall(path.read_text("utf-8"))}
    assert {"deepspeed", "bitsandbytes", "pyte"} < asked
    missing = sorted(name for name in asked - ELSEWHERE.keys() if find_spec(name) is None)
    assert not missing, "pip install -c constraints.txt -e '.[test]'"
