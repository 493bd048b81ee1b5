"""Resolve and check the user's config before any rank starts.

This is the first stage of a launch. It reads the files that determine settings, such as a
DeepSpeed JSON or the config of the model. The launcher then sends the result to its ranks.
Under another launcher such as torchrun, each rank resolves the config itself. The ranks
later compare digests of the settings that must be equal on all ranks.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from portable.adapters.settings import resolve_adapter_config
from portable.batch_plan import BatchPlan, compute_batch_plan
from portable.checks import check_config
from portable.config.changed_settings import find_inherited_values
from portable.data.sources.source_kinds import detect_run_format, resolve_images
from portable.model.build import apply_default_seq_len
from portable.model.document_attention import apply_default_packing
from portable.output.existing_run import ExistingRun, check_may_continue_run, read_config_of_existing_run
from portable.output.output_dir import open_output
from portable.paths import convert_storage_errors, parse_place_setting
from portable.registry import load_backend_package
from portable.reporting.trackers import check_trackers_available
from portable.run.custom_code import install_and_check_custom_code
from portable.run.stages import ResolvedRun

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.registry import World


def resolve_run(
    config: RunConfig,
    backend_name: str,
    ranks: int = 1,
    *,
    writes_output: bool = True,
    may_download: bool | None = None,
) -> ResolvedRun:
    """Resolve and check a config without opening a device.

    Custom code in the settings is imported. Records of the data are read to detect ``data.format``.
    If the launch writes output, also check that the output folder is writable, and on rank 0 that
    the hub can be accessed.

    Args:
        config: Config as the user wrote it.
        backend_name: Name of the backend, such as ``cuda``.
        ranks: Number of ranks that this process will start, or 1 if this process is a rank itself.
        writes_output: Whether the launch writes into ``output_dir``.
        may_download: Whether data may be downloaded. None to download data only if the launch
            writes.

    Returns:
        The resolved run.

    Raises:
        UserError: If a setting is not valid, or if settings do not work together or on this
            machine.
    """
    package = load_backend_package(backend_name)
    world = package.get_world(ranks)
    place = parse_place_setting("output_dir", config.output_dir)
    existing = read_config_of_existing_run(place)
    check_config(config)  # before settings are replaced, so that messages show the user's values
    config = resolve_adapter_config(package.adopt_engine_file(config, world))
    resolved_values: dict[str, Any] = {"backend": package.name}
    if config.precision == "auto":
        precision = _find_resumed_precision(config, existing) or package.choose_default_precision(
            in_rank=False
        )
        resolved_values |= {} if precision is None else {"precision": precision}
    may_download = writes_output if may_download is None else may_download
    resolved_values["data.format"] = detect_run_format(config.data, config.model.task, downloads=may_download)
    config = resolve_images(config.replaced(resolved_values), downloads=may_download)
    check_config(config)
    install_and_check_custom_code(config)
    config_as_launched, config = config, apply_default_seq_len(config)
    inherited_settings = (
        {} if existing.config is None else find_inherited_values(existing.config, config_as_launched, config)
    )
    config = apply_default_packing(config.replaced(inherited_settings))
    check_config(config, is_resolved=True)
    package.check_config(config, world)
    check_trackers_available(config.log.trackers)
    check_may_continue_run(place, existing, config)
    if writes_output:
        open_output(config).check_writable()
    plan_batches_of_rank_0(config, world)
    if writes_output and config.hub.push is not None and os.environ.get("RANK", "0") == "0":
        from portable.output.hub import HubRepository

        HubRepository(config).check_access()
    return ResolvedRun(config, place, existing, world, inherited_settings)


def resolve_precision(resolved: ResolvedRun) -> ResolvedRun:
    """Replace ``precision: auto`` with the precision for this rank's device.

    Must be called in a rank, because it may open the device.
    """
    config = resolved.config
    if config.precision != "auto":
        return resolved
    precision = load_backend_package(config.backend).choose_default_precision(in_rank=True)
    return replace(resolved, config=config.replaced({"precision": precision}))


def plan_batches_of_rank_0(config: RunConfig, world: World) -> BatchPlan:
    """Compute the batch plan of rank 0, and check that the ranks can share the global batch.

    If ``train.micro_batch_size`` is still ``auto``, the plan assumes a micro-batch of one sequence.

    Args:
        config: Config of the run.
        world: Ranks and devices of the launch.

    Raises:
        UserError: If the global batch cannot be divided among the ranks.
    """
    if config.train.micro_batch_size == "auto":
        config = config.replaced({"train.micro_batch_size": 1})
    return compute_batch_plan(config, world_size=world.ranks, rank=0, devices_per_rank=world.devices_per_rank)


def _find_resumed_precision(config: RunConfig, existing: ExistingRun) -> str | None:
    """Return the precision of the run or checkpoint to resume.

    ``precision: auto`` resolves to this value, because a run must keep its precision.

    Returns:
        The precision, for example ``bf16``. None if the run is new, or if the checkpoint was not
        written by this trainer.
    """
    if existing.config is not None:
        return existing.config.precision
    if config.checkpoint.resume in ("auto", "never"):
        return None
    from portable.checkpoint.external import read_run_state

    with convert_storage_errors("checkpoint.resume"):
        state = read_run_state(parse_place_setting("checkpoint.resume", config.checkpoint.resume))
    return None if state is None else str(state.run["precision"])
