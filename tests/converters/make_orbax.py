"""Write checkpoints with Orbax: `orbax_samples/`, once, and again if Orbax is installed.

    pip install --target FOLDER jax orbax-checkpoint flax optax
    PYTHONPATH=.:FOLDER python -m tests.converters.make_orbax tests/converters/orbax_samples

`maxtext` is a `TrainState` as MaxText saves it, by two processes with two devices each. The others are a tree
of unusual arrays on four devices. The values follow from the names (`orbax_values.py`), so a test needs no
JAX.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.converters.orbax_values import ODD, STEP, maxtext_llama, pattern

RUNS = {"ocdbt": (True, False), "zarr": (False, False), "zarr3": (False, True)}


def main(out: Path) -> None:
    for name in [*RUNS, "maxtext"]:
        shutil.rmtree(out / name, ignore_errors=True)
    processes = 2
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    alone = environment | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-m", "tests.converters.make_orbax", str(out)]
    subprocess.run([*command, "odd"], env=alone, check=True)
    both = environment | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    ranks = [subprocess.Popen([*command, str(rank), str(processes)], env=both) for rank in range(processes)]
    codes = [rank.wait(300) for rank in ranks]
    if any(codes):
        raise SystemExit("a process failed")
    for name in [*RUNS, "maxtext"]:
        _trim(out / name)


def _trim(folder: Path) -> None:
    """Remove files that differ between runs and that are not read."""
    for name in ("_CHECKPOINT_METADATA", "_sharding", "commit_success.txt", "array_metadatas"):
        for path in folder.rglob(name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _sharded(value: Any, *axes: str | None) -> Any:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tensor"))
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def odd(out: Path) -> None:
    """Write a tree with a list, numbers, a string and None, and with 2D, padded and unsharded arrays."""
    import orbax.checkpoint as ocp

    tree: dict[str, Any] = {"layers": [{}, {}], "count": 3, "rate": 0.5, "name": "odd", "nothing": None}
    for name, (dtype, shape, axes) in ODD.items():
        _, number, key = name.split(".")
        tree["layers"][int(number)][key] = _sharded(pattern(name, dtype, shape), *axes)
    for name, (ocdbt, zarr3) in RUNS.items():
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
        ocp.Checkpointer(handler).save((out / name).absolute(), args=ocp.args.PyTreeSave(tree))


def maxtext(out: Path, rank: int, processes: int) -> None:
    """Write `<step>/items` of a Llama with scanned layers, like MaxText's checkpointing.py."""
    import jax
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from flax.training import train_state

    jax.distributed.initialize("127.0.0.1:43765", processes, rank)
    arrays = maxtext_llama()

    def tree(what: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, (dtype, shape, axes) in arrays.items():
            *above, last = name.split(".")
            node = made
            for key in above:
                node = node.setdefault(key, {})
            kind = dtype if what == "params" else "float32"
            node[last] = _sharded(pattern(f"{what}.{name}", kind, shape), *axes)
        return {"params": made}

    tx = optax.adamw(optax.linear_schedule(1e-3, 0, 10))
    params = tree("params")
    state = train_state.TrainState.create(apply_fn=None, params=params, tx=tx)
    adam, *rest = state.opt_state
    adam = adam._replace(mu=tree("mu"), nu=tree("nu"))
    steps = _sharded(np.array(STEP, np.int32))
    state = state.replace(step=steps, opt_state=(adam, *rest))
    # The counts of Adam and of the schedule.
    state = jax.tree.map(lambda leaf: leaf if leaf.shape else steps, state)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(
        (out / "maxtext" / "checkpoints").absolute(),
        item_names=("items",),
        item_handlers={"items": handler},
        options=options,
    ) as manager:
        manager.save(STEP, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)))
        manager.wait_until_finished()


if __name__ == "__main__":
    folder, *more = sys.argv[1:]
    if not more:
        main(Path(folder))
    elif more == ["odd"]:
        odd(Path(folder))
    else:
        maxtext(Path(folder), *map(int, more))
