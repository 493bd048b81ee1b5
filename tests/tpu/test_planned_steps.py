"""The plan of a step beside what a TPU's compiler takes, as ``python -m benchmarks.tpu_compile --json
tests/tpu/compiled_steps.json`` has recorded it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tpu_compile import case_of, plan

RECORDED = list(json.loads(Path(__file__).with_name("compiled_steps.json").read_text("utf-8")).values())
VECTOR_MEMORY = {"v5e": 128 << 20, "v5p": 128 << 20}
"""What fits into it need not lie in a chip's main memory. It is little beside the values of large models."""


LOOPS = {"full": (0.85, 1.05), "none": (0.65, 1.05)}
"""libtpu gives loops more memory than its own schedule has alive at once: by a fifth, and by a third where
they hand what autograd saves to the backward loop. The plan counts what is alive."""


@pytest.mark.parametrize("row", RECORDED, ids=[case_of(row).name for row in RECORDED])
def test_a_plan_is_what_the_compiler_takes(row: dict[str, Any], tmp_path: Path) -> None:
    case = case_of(row)
    planned = plan(case, str(tmp_path))[0].device_bytes
    needed = row["state_bytes"] + row["working_bytes"]
    state = planned.parameters + planned.optimizer + planned.gradients
    assert state == pytest.approx(row["state_bytes"], rel=0.01)
    least, most = LOOPS[case.recompute] if case.scan_layers else (0.95, 1.05)
    assert least * needed <= planned.total <= most * needed + VECTOR_MEMORY[case.device]


def test_the_record_has_large_values() -> None:
    """For which vector memory is no excuse."""
    large = [row for row in RECORDED if row["working_bytes"] > 10 * VECTOR_MEMORY[row["device"]]]
    assert {row["recompute"] for row in large} == {"full", "none"}
    assert {row["scan_layers"] for row in large} == {True, False}
