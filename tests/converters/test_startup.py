"""How little has to be imported before the first word is said."""

from __future__ import annotations

import subprocess
import sys

import pytest

import converters

HEAVY = ("numpy", "ml_dtypes", "torch", "safetensors", "tqdm", "obstore", "isal")


def loaded(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has imported after `code`."""
    code += f"\nimport sys; print('loaded', *[name for name in {HEAVY!r} if name in sys.modules])"
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(made.stdout.splitlines()[-1].split()[1:])


def test_help_and_mistakes_import_nothing_heavy() -> None:
    assert loaded("import time\nstart = time.process_time()\nimport converters\n"
                  "assert time.process_time() - start < 0.5") == set()  # fmt: skip
    call = "from converters.cli import main\ntry: main({})\nexcept SystemExit: pass"
    assert loaded(call.format(["--help"])) == set()
    assert loaded(call.format(["a", "b", "--dtype", "float8"])) == set()
    assert loaded(call.format(["/nowhere", "/out"])) <= {"numpy", "ml_dtypes", "isal"}


def test_every_public_name_can_be_had() -> None:
    assert all(getattr(converters, name).__name__ == name for name in converters.__all__)
    with pytest.raises(AttributeError, match="nope"):
        converters.nope  # noqa: B018
