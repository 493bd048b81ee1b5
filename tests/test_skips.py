"""A test may be skipped if the system lacks something, but never for a package of the extra ``test``."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

NAMED = re.compile(r"""(?:importorskip|find_spec)\(\s*["'](\w+)""")
ELSEWHERE = {
    "torch_xla": "in an environment of its own, with an older torch",
    "flash_attn": "is compiled for a GPU",
    "torchao": "is installed with the other programs, because transformers would import it in every test",
}


def test_packages_that_tests_need_are_installed() -> None:
    files = Path(__file__).parent.rglob("*.py")
    asked = {name for path in files for name in NAMED.findall(path.read_text("utf-8"))}
    assert {"deepspeed", "bitsandbytes", "pyte"} < asked
    missing = sorted(name for name in asked - ELSEWHERE.keys() if find_spec(name) is None)
    assert not missing, "pip install -c constraints.txt -e '.[test]'"
