"""Write DeepSpeed universal checkpoints: real runs on CPU, put through DeepSpeed's own `ds_to_universal`.

Each `<name>/global_step2_universal` lies beside
`<name>.2.ref.pt`, as `make_deepspeed.py` gathers it from the live run.
"""

from __future__ import annotations

import argparse
import contextlib
import io

from tests.converters.make_dcp import launch
from tests.converters.make_deepspeed import prepare, start, train

from deepspeed.checkpoint import ds_to_universal  # isort: skip

from pathlib import Path


def three_ranks(rank: int, world: int, out: Path) -> None:
    start(rank, world)
    train(out, "zero1-fp32-3", 1)
    train(out, "zero2-bf16-3", 2, "bf16", split=True)
    train(out, "zero3-fp32-3", 3)
    train(out, "zero3-bf16-3", 3, "bf16", split=True, zero_optimization={"sub_group_size": 100})


def main(out: Path) -> None:
    """Write everything under `out`."""
    prepare()
    launch(3, out, three_ranks)
    for run in sorted(path for path in out.iterdir() if path.is_dir()):
        told = argparse.Namespace(
            input_folder=str(run / "global_step2"),
            output_folder=str(run / "global_step2_universal"),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        with contextlib.redirect_stdout(io.StringIO()):
            ds_to_universal.main(told)
