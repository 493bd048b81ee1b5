"""The DeepSpeed checkpoints that the tests for all formats use; made by `make_deepspeed.py`."""

from __future__ import annotations

from tests.converters.samples import Sample

SAMPLES = [
    Sample(f"deepspeed-{name}", "deepspeed", fixture="deepspeed_written", folder=folder, needs=("deepspeed",))
    for name, folder in (
        ("zero0", "zero0-bf16-2/global_step2"),
        ("zero1", "zero1-bf16-3"),
        ("zero2", "round-robin-3"),
        ("zero3", "sub-groups-3"),
        ("fp32-accumulation", "fp32-accumulation-2"),
    )
]
