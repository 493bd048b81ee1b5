"""The mutants of ``broken.py`` still match the code. ``python -m tests.broken`` runs the tests."""

from __future__ import annotations

import pytest

from tests.broken import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=list(MUTANTS))
def test_mutant_matches_code_once(mutant: Mutant) -> None:
    code = (ROOT / mutant.file).read_text("utf-8")
    assert code.count(mutant.before) == 1
    compile(code.replace(mutant.before, mutant.after), mutant.file, "exec")
    for test in mutant.tests:
        file, _, function = test.partition("[")[0].partition("::")
        assert f"def {function}(" in (ROOT / file).read_text("utf-8") if function else (ROOT / file).is_file()
