"""What the planner says a device keeps, against the shards that live XLA devices hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from portable import model as models
from portable.backend import backend_room
from portable.planner.footprint import Cluster
from portable.run import Prepared, resolve
from tests.runs import TINY_MODEL, configured
from tpu.footprint import footprint

if TYPE_CHECKING:
    from pathlib import Path

    from portable.config import RunConfig
    from tests.xla import XlaPool


def kept(config: RunConfig) -> tuple[int, int]:
    """Bytes of parameters and of optimizer state on the first device."""
    backend = backend_room("xla").create("xla")
    config = resolve(config, backend)
    backend.start()
    try:
        engine: Any = Prepared(config, backend).engine(None)[0]
        optimizer = engine._optimizer
        state = [t for tensors in optimizer.tensors().values() for t in tensors.values()]
        return on_first_device(engine.model.parameters()), on_first_device([*state, optimizer._steps])
    finally:
        backend.stop()


def on_first_device(tensors: Any) -> int:
    from tpu.runtime import xla

    held = 0
    for tensor in tensors:
        (shards,) = xla._get_local_shards([tensor])
        values, device = shards[0]
        assert device.endswith(":0")
        held += values.nbytes
    return held


@pytest.mark.parametrize(
    ("devices", "settings"),
    [
        (4, {"strategy": "full_shard"}),
        (4, {"strategy": "hybrid_shard", "fsdp__shard_group_size": 2}),
        (2, {"strategy": "no_shard", "train__optimizer": "sgd"}),
        (4, {"strategy": "full_shard", "train__optimizer": "adafactor"}),
    ],
)
def test_what_stays_is_exact(
    devices: int, settings: dict[str, Any], tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    sizes = {"train__global_batch_size": 8, "train__micro_batch_size": 1, "model__config": TINY_MODEL}
    config = configured(tmp_path, corpus, **{**sizes, "backend": "xla", **settings})
    model = models.build_model(models.model_config(config.model), config.model)
    found = footprint(model, config, Cluster(devices, devices))
    assert (found.parameters, found.optimizer) == xla.run(devices, kept, config)
