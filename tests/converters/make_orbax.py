"""Checkpoints that Orbax writes: `orbax_samples/`, made once, and again where Orbax is installed.

    pip install --target FOLDER jax orbax-checkpoint flax optax
    PYTHONPATH=.:FOLDER python -m tests.converters.make_orbax tests/converters/orbax_samples

`maxtext` is a `TrainState` as MaxText saves it, by two processes with two devices each; the others are a tree
of odd arrays on four devices. The values follow from the names (`orbax_values.py`); a test needs no JAX.

Programs with arrays of TensorStore's own, each beside what it needs (with `--no-deps`):

    PYTHONPATH=.:FOLDER python -m tests.converters.make_orbax OUT levanter NAME
    PYTHONPATH=.:FOLDER python -m tests.converters.make_orbax OUT easydel

`levanter.zip` is of marin-levanter 0.2.20, `levanter_zarr.zip` of levanter 1.2.dev1644: a Llama of Levanter's
own as its trainer saves it. `easydel.zip` is written by eformer 0.0.99.12 with the names of EasyDeL's Llama.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.converters.orbax_values import LLAMA, ODD, STEP, easydel_llama, maxtext_llama, pattern

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
    """Remove what differs from run to run and is not read."""
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
    """A tree with a list, numbers, a string and None; two-dimensional, padded and unsharded arrays."""
    import orbax.checkpoint as ocp

    tree: dict[str, Any] = {"layers": [{}, {}], "count": 3, "rate": 0.5, "name": "odd", "nothing": None}
    for name, (dtype, shape, axes) in ODD.items():
        _, number, key = name.split(".")
        tree["layers"][int(number)][key] = _sharded(pattern(name, dtype, shape), *axes)
    for name, (ocdbt, zarr3) in RUNS.items():
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
        ocp.Checkpointer(handler).save((out / name).absolute(), args=ocp.args.PyTreeSave(tree))


def _zipped(folder: Path) -> None:
    shutil.make_archive(str(folder), "zip", folder)
    shutil.rmtree(folder)


def levanter(out: Path, name: str) -> None:
    """The state of a trainer with AdamW; Levanter's own exporter must agree with what a test expects."""
    import dataclasses

    import haliax.state_dict
    import jax
    import numpy as np
    from haliax import Axis
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from levanter.checkpoint import save_checkpoint
    from levanter.models.llama import LlamaConfig
    from levanter.optim import AdamConfig
    from levanter.trainer_state import TrainerState
    from levanter.utils.jax_utils import leaf_key_paths

    hidden, inner, layers, heads, keys, head = (
        LLAMA[key]
        for key in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
        )
    )
    config = LlamaConfig(
        seq_len=32,
        hidden_dim=hidden,
        intermediate_dim=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=keys,
        head_dim=head,
    )
    key = jax.random.PRNGKey(0)
    model = config.build(Axis("vocab", 12), key=key)
    state = TrainerState.init(AdamConfig().build(10), model, key=key, is_trainable=True)
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",))

    def leaf(path: str, value: Any) -> Any:
        if not hasattr(value, "shape") or path == "training_key":
            return value
        if not value.shape:
            return jax.numpy.array(STEP, value.dtype) if value.dtype.kind == "i" else value
        axes = [None] * (value.ndim - 1) + ["fsdp"]
        if name != "levanter" or value.shape[-1] % 2:
            axes = []
        wanted = pattern(path, value.dtype.name, value.shape)
        sharding = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.make_array_from_callback(value.shape, sharding, lambda index: wanted[index])

    def is_named(value: object) -> bool:
        return isinstance(value, haliax.NamedArray)

    def filled(path: str, value: Any) -> Any:
        return (
            dataclasses.replace(value, array=leaf(path, value.array))
            if is_named(value)
            else leaf(path, value)
        )

    state = jax.tree.map(filled, leaf_key_paths(state, is_leaf=is_named), state, is_leaf=is_named)
    exported = haliax.state_dict.to_torch_compatible_state_dict(state.model)
    step = out / name / f"step-{STEP}"
    save_checkpoint(state.saveable_state, STEP, str(step), is_temporary=False)
    while not (step / "metadata.json").exists():  # written in the background
        pass
    values: dict[str, Any] = {key: np.asarray(value) for key, value in exported.items()}
    np.savez(out / name / "exported.npz", **values)
    _zipped(out / name)


def easydel(out: Path) -> None:
    """`model` and the optimizer's `tx`, whose leaves are variables of flax, by EasyDeL's own serializer."""
    import jax.numpy as jnp
    from eformer.serialization import Checkpointer

    saver = Checkpointer(base_path=str(out / "easydel"), save_interval=None, step_policies=[])

    def tree(what: str, *below: str) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, shape in easydel_llama().items():
            node = made
            *above, last = (*name.split("."), *below)
            for key in above:
                node = node.setdefault(key, {})
            kind = "bfloat16" if what == "model" else "float32"
            node[last] = jnp.asarray(pattern(f"{what}.{name}", kind, shape))
        return made

    moments = {what: tree(what, "value") for what in ("mu", "nu")}
    adam = [(), [{"count": jnp.array(STEP, jnp.int32), **moments}, (), {"count": jnp.array(STEP, jnp.int32)}]]
    saver.save_pytree(tree=tree("model"), prefix="model")
    saver.save_pytree(tree=adam, prefix="tx")
    _zipped(out / "easydel")


def maxtext(out: Path, rank: int, processes: int) -> None:
    """`<step>/items` of a Llama with scanned layers, after MaxText's checkpointing.py."""
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
    elif more[0] == "levanter":
        levanter(Path(folder).absolute(), more[1])
    elif more == ["easydel"]:
        easydel(Path(folder).absolute())
    else:
        maxtext(Path(folder), *map(int, more))
