"""What a compiled pass has in memory, on passes small enough to count by hand."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from portable.planner.fused import Tape, Value, peaks
from portable.planner.passes import Compiler
from portable.private import of_torch
from tpu.xla.footprint import result

ROWS, WIDE, CLASSES = 64, 8, 1024


def of(*values: tuple[int, tuple[int, ...], str], left: tuple[int, ...] = ()) -> int:
    given = [Value(bytes_, inputs, kind) for bytes_, inputs, kind in values]  # type: ignore[arg-type]
    (peak,) = peaks(given, [len(given)], set(left))
    return peak


def test_what_is_cheap_takes_no_memory_and_keeps_what_it_reads() -> None:
    assert of((10, (), "written"), (20, (0,), "computed"), (20, (1,), "computed"), (5, (2,), "written")) == 15
    # The first is read by the last, through the second.
    assert of((10, (), "written"), (20, (0,), "computed"), (7, (), "written"), (5, (1,), "written")) == 17


def test_a_product_is_written_as_what_follows_it() -> None:
    other, product, added = (10, (), "written"), (10, (), "product"), (10, (0, 1), "computed")
    assert of(other, product, added, (1, (2,), "written"), (1, (2,), "written")) == 20
    # A result of another size, or of an operation after the next product, is computed where it is read.
    assert of((10, (), "product"), (20, (0,), "computed"), (1, (1,), "written")) == 11
    sum_later = [(10, (), "product"), (50, (), "product"), (10, (0,), "computed"), (1, (2,), "written")]
    assert of(*sum_later) == 60


def test_a_sum_of_many_is_written() -> None:
    """Three readers of a sum of three would keep all three."""
    three = [(10, (), "written")] * 3
    sums = (10, (0, 1, 2), "computed")
    readers = [(1, (3,), "written")] * 3
    assert of(*three, sums, *readers, (100, (), "written")) == 100  # nothing but the last
    assert of(*three, sums, *readers[:1], (100, (), "written"), readers[0]) == 130


def test_what_leaves_the_pass_is_gone() -> None:
    values = [(10, (), "written"), (3, (), "written"), (3, (0,), "written")]
    assert (of(*values), of(*values, left=(0,))) == (13, 10)


def test_a_loop_keeps_what_it_has_saved_until_its_end() -> None:
    saved = [(10, (), "saved"), (10, (), "saved")]
    backward = [(1, (1,), "written"), (5, (2,), "written"), (1, (0, 3), "written")]
    assert of(*saved, *backward) == 26


def test_the_loss_keeps_the_logits_once_in_their_dtype() -> None:
    """Eagerly they exist in fp32 three times."""
    with FakeTensorMode():
        head = nn.Linear(WIDE, CLASSES, bias=False, dtype=torch.bfloat16)
        hidden = torch.randn(ROWS, WIDE, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.zeros(ROWS, dtype=torch.int64)
        tape = Tape(head, Compiler(result))
        with of_torch.every_operation(tape.operation):
            loss = nn.functional.cross_entropy(head(hidden).float(), labels)
            tape.end_phase()
            loss.backward()
            tape.end_phase()
    logits, weight = 2 * ROWS * CLASSES, 2 * WIDE * CLASSES
    (forward, _), (backward, _) = tape.peaks()
    assert logits <= forward < 1.1 * logits
    assert logits + weight <= backward < 1.1 * (logits + weight)
