"""Every private or experimental name of torch_tpu; its device is registered by hand, to do it once."""

from __future__ import annotations

import os
import warnings
from contextlib import redirect_stderr
from io import StringIO

from portable.private import Package

PACKAGE = Package("torch-tpu", "0.2.0")
_FEATURE = "backend: tpu"
_SAID_AT_LOADING = r"<TorchTpu/Performance/TcMalloc/>"


@PACKAGE.needed_for(_FEATURE)
def load() -> None:
    """Import torch_tpu and register torch's device ``tpu``. Opens no chip."""
    os.environ.setdefault("ABSL_MIN_LOG_LEVEL", "2")
    with warnings.catch_warnings(), redirect_stderr(StringIO()):  # four lines, of what it registers
        warnings.filterwarnings("ignore", _SAID_AT_LOADING)
        from torch_tpu import _loader

        _loader._init_device("tpu")


@PACKAGE.needed_for(_FEATURE)
def launch_environment(ranks: int) -> dict[str, str]:
    """The variables that the ranks of this host must share, which name their ports and how chips connect."""
    load()
    import torch

    torch.tpu.distributed.set_tpu_launch_env(nproc_per_node=ranks)  # type: ignore[attr-defined, unused-ignore]
    return {name: value for name, value in os.environ.items() if name.startswith("TORCH_TPU_")}
