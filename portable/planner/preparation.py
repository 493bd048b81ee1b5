"""Prepare a plan: choose the target devices, and build the model on the meta device."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from portable.batch_plan import compute_batch_plan
from portable.errors import UserError
from portable.planner.memory_model import Cluster
from portable.planner.plan import ConfigAndTarget, PlanTarget
from portable.planner.run_time import TrainingWork, estimate_training_work
from portable.registry import DEFAULT_PLANNED_BACKEND, load_backend_package
from portable.terminal import print_status, show_loading_message

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.planner.device import Device
    from portable.planner.meta_model import MetaModel


class ModelAndWork(NamedTuple):
    """Model on the meta device, and the number of steps and tokens of the run."""

    model: MetaModel
    work: TrainingWork | None
    """Number of steps and tokens. None if it is unknown."""


def choose_target(
    config: RunConfig,
    device: Device | None,
    devices: int,
    host_memory: int | None = None,
    *,
    notes: bool = True,
) -> ConfigAndTarget:
    """Choose the backend for a device type, and resolve the settings that depend on the backend.

    If the device is unknown, nodes of 8 devices are assumed. If, in addition, the config does not
    set a backend, the backend is CUDA. A config with ``backend: cpu`` may be planned for any
    device. If the CPU backend does not support the device, it is replaced by the device's preferred
    backend.

    Args:
        config: Config of the run.
        device: Device type. None if it is unknown.
        devices: Number of devices.
        host_memory: Host memory per node, in bytes. None if it is unknown.
        notes: Whether to print the backend's notes about the config.

    Returns:
        The resolved config, whose backend and precision are not ``auto``, and the target: the
        backend and the devices that the run is planned for.

    Raises:
        UserError: If the config specifies a backend other than ``cpu`` that does not support the
            device, if the backend rejects a setting, or if the batch cannot be divided among the
            devices.
    """
    backend: str = config.backend
    if device is not None and backend not in device.backends:
        backend = device.backends[0]
    # A config for the CPU may be planned for any device, because the CPU backend lists no devices.
    lists_devices = config.backend != "auto" and load_backend_package(config.backend).list_devices()
    if device is not None and lists_devices and config.backend != backend:
        raise UserError(
            f"--device: {device.name} needs backend: {backend}, but the config has backend: "
            f"{config.backend}; remove backend from the config, or choose another device"
        )
    backend = DEFAULT_PLANNED_BACKEND if backend == "auto" else backend
    cluster = Cluster(devices, device.devices_per_node if device is not None else 8)
    target = PlanTarget(backend, cluster, device, host_memory)
    # The result is not used. This call raises an error if the batch cannot be divided among the devices.
    smallest = config.replaced({"train.micro_batch_size": 1})
    compute_batch_plan(smallest, world_size=1, rank=0, devices_per_rank=devices)
    config = (
        load_backend_package(backend)
        .load_footprint()
        .resolve_config(config.replaced({"backend": backend}), target.cluster)
    )
    for note in load_backend_package(backend).build_notes(config) if notes else ():
        print_status(f"note: {note}")
    if config.precision == "auto":
        config = config.replaced({"precision": "fp32" if device and not device.bf16 else "bf16"})
    return ConfigAndTarget(config, target)


def resolve_data_dependent_defaults(config: RunConfig) -> RunConfig:
    """Resolve the settings that depend on the adapter, the data or the model.

    A plan needs their values, because they affect the memory of the run. Among these settings are
    ``data.seq_len`` and ``data.packing``. An adapter on the Hub is downloaded, but data is not. See
    :func:`portable.adapters.assemble.resolve_defaults`.

    Raises:
        UserError: If a run would reject the files.
    """
    with show_loading_message():
        from portable.adapters.assemble import resolve_defaults
    return resolve_defaults(config)


def build_model_and_work(config: RunConfig, *, with_data: bool = True) -> ModelAndWork:
    """Build the model on the meta device, and estimate the work of the run.

    The work is the number of steps and tokens.

    Args:
        config: Config of the run.
        with_data: Whether to read the tokenizer and the size of the data, if both are on this
            machine. If False, the settings in the section ``data`` are not resolved either.

    Returns:
        The model and the work. The work is None if ``train.steps`` is not set and the number of
        samples is neither known nor bounded. See
        :func:`~portable.planner.run_time.estimate_training_work`.

    Raises:
        UserError: If a run with this config would be rejected.
    """
    with show_loading_message():
        from portable.adapters.assemble import resolve_and_build_model
        from portable.planner.image_columns import build_largest_image_columns
        from portable.planner.meta_model import MetaModel
    config, model, sizes = resolve_and_build_model(config, with_data=with_data)
    image_columns = build_largest_image_columns(config, sizes)
    return ModelAndWork(MetaModel(model, config, image_columns), estimate_training_work(config, sizes))
