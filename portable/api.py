"""Python API: training and planning from a script or a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable import plugins
from portable.checkpoint.store import open_checkpoints
from portable.data.sources.custom_records import write_records_file
from portable.errors import RunError
from portable.paths import REPORT_FILE, get_default_cache_dir, parse_place_setting
from portable.reporting.metrics import read_metrics

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.converters.storage.path_or_url import AnyPath
    from portable.planner.plan_tables import Plan


@dataclass(frozen=True)
class Result:
    """Result of :func:`train`. A notebook displays it as the report of the run.

    Attributes:
        folder: Output folder of the run, or its URL.
        stopped: Whether a signal (Ctrl-C, the stop button of a notebook) stopped the run early. In
            this case, the run has saved a checkpoint. To resume from it, call :func:`train` again
            with the same arguments.
    """

    folder: AnyPath
    stopped: bool

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Rows of ``metrics.jsonl`` as dictionaries, for example for ``pandas.DataFrame``.

        The file is read again at each access.
        """
        return read_metrics(self.folder)

    @property
    def checkpoint(self) -> AnyPath | None:
        """Newest complete checkpoint, or None if there is none."""
        newest: AnyPath | None = open_checkpoints(self.folder).find_latest()
        return newest

    @property
    def final(self) -> AnyPath | None:
        """Folder of the exported model, for ``from_pretrained``. None if there is no export yet."""
        folder = self.folder / "final"
        return folder if folder.is_dir() else None

    def _repr_html_(self) -> str | None:
        """Return the run's report as an iframe, which isolates its styles and script from the notebook.

        Returns None if there is no report. The notebook then falls back to the plain representation.
        """
        path = self.folder / REPORT_FILE
        if not path.exists():
            return None
        page = html.escape(path.read_bytes().decode())
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 40em; border: 0"></iframe>'


def replace_settings_with_objects(
    config: RunConfig,
    *,
    loss: Any = None,
    metrics: Sequence[Any] = (),
    callbacks: Sequence[Any] = (),
    data: Any = None,
    model: Any = None,
    schedule: Any = None,
    optimizer: Any = None,
) -> RunConfig:
    """Register the objects passed to :func:`train`, and return a config whose settings refer to them.

    Each object is registered under a name, and its setting is set to this name. The names of
    metrics and callbacks are appended to their settings. Ranks receive only the config, so they
    import each object by its name. If an object is defined in a script, a notebook or a function,
    ranks cannot import it, and the config also stores its source code. A list of records is instead
    written to a file in the cache folder, and ``data.source`` is set to that file.

    Args:
        config: Config of the run, which is not changed.
        loss: See :func:`train`.
        metrics: See :func:`train`.
        callbacks: See :func:`train`.
        data: See :func:`train`.
        model: See :func:`train`.
        schedule: See :func:`train`.
        optimizer: See :func:`train`.

    Returns:
        The new config, or ``config`` itself if no object was passed.

    Raises:
        UserError: If ranks cannot create an object.
    """
    sources: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name, key, value in (
        ("loss", "train.loss", loss),
        ("data", "data.source", data),
        ("model", "model.function", model),
        ("schedule", "train.schedule", schedule),
        ("optimizer", "train.optimizer", optimizer),
    ):
        if name == "data" and isinstance(value, Sequence) and not isinstance(value, str):
            folder = config.data.cache_dir
            cache = get_default_cache_dir() if folder is None else Path(folder)
            values[key] = str(write_records_file(value, cache / "records"))
        elif value is not None:
            values[key] = plugins.register_object(
                name, value, sources, instantiates_class=name != "optimizer"
            )
    for key, objects in (("metrics", metrics), ("callbacks", callbacks)):
        if objects:
            names = tuple(plugins.register_object(key, value, sources) for value in objects)
            values[f"train.{key}"] = (*(config.get(f"train.{key}") or ()), *names)
    if not values:
        return config
    return config.with_document(plugins.SOURCES_KEY, sources).replaced(values)


def train(
    config: RunConfig,
    *,
    nproc: int | None = None,
    loss: Any = None,
    metrics: Sequence[Any] = (),
    callbacks: Sequence[Any] = (),
    data: Any = None,
    model: Any = None,
    schedule: Any = None,
    optimizer: Any = None,
) -> Result:
    """Train a model, or resume the run in ``config.output_dir``, as ``portable-train`` does.

    Some settings can also be passed as Python objects: a function, a class, or a
    ``functools.partial`` of one. The arguments of a partial must be plain values. A dataclass
    instance is also accepted if its fields are plain values. Training runs in this process and uses
    the objects directly if there is a single rank without offloading, or if a launcher such as
    torchrun has started this process. Otherwise, each rank is a child process and creates its own
    copy: it imports the object, or executes its source text if it is defined in the script or
    notebook itself.

    Example:
        >>> from portable import load_config, train
        >>> config = load_config("run.yaml", {"train.steps": 4})
        >>> result = train(config)
        >>> [row["step"] for row in result.metrics if "loss" in row]
        [1, 2, 3, 4]
        >>> result.final.name
        'final'

    Args:
        config: Config of the run, from :func:`portable.load_config`.
        nproc: Number of processes to start. Default: one for each GPU, or only this process on a
            CPU. XLA always runs in this process.
        loss: Replaces ``train.loss``.
        metrics: Metrics in addition to ``train.metrics``.
        callbacks: Callbacks in addition to ``train.callbacks``.
        data: Replaces ``data.source``: a function or class that returns records, or a list of
            records.
        model: Replaces ``model.function``.
        schedule: Replaces ``train.schedule``: a function that receives the step and the total
            number of steps, and returns the factor by which the learning rate is multiplied.
        optimizer: Replaces ``train.optimizer``: an optimizer class, a partial of one, or a function
            that creates one.

    Returns:
        The folder of the run, its metrics, and whether a signal stopped it early.

    Raises:
        UserError: If the config or an object is not valid. Also raised if an object fails during
            training, or if the device memory is not sufficient.
        RunError: If the run failed.
    """
    from portable.cli import run_invocation

    config = replace_settings_with_objects(
        config,
        loss=loss,
        metrics=metrics,
        callbacks=callbacks,
        data=data,
        model=model,
        schedule=schedule,
        optimizer=optimizer,
    )
    from portable.command_line import Invocation
    from portable.run.train import EXIT_DONE, EXIT_STOPPED

    code = run_invocation(Invocation(config, nproc=nproc))
    if code not in (EXIT_DONE, EXIT_STOPPED):
        raise RunError(
            f"{config.output_dir}: the run ended with exit code {code}; see the error message above"
        )
    return Result(parse_place_setting("output_dir", config.output_dir), stopped=code == EXIT_STOPPED)


def plan(
    config: RunConfig,
    *,
    device: str | None = None,
    devices: int = 1,
    device_memory: str | None = None,
    host_memory: str | None = None,
    price_per_hour: float | None = None,
) -> Plan:
    """Compute the memory, strategy and time that a run needs, as ``portable-plan`` does.

    The devices do not have to exist on this machine, and no weights are loaded.

    Example:
        >>> from portable import load_config, plan
        >>> run_plan = plan(load_config("run.yaml"), device="h100", devices=2)
        >>> run_plan.best.fits
        True

    Args:
        config: Config of the run, from :func:`portable.load_config`.
        device: Name of the accelerator, for example ``h100``, ``a100-80``, or ``v5e``. If None, the
            device is unknown, and the plan shows the memory that each strategy needs instead of
            what fits.
        devices: Number of devices.
        device_memory: Memory of a device, for example ``80GB``. Overrides the memory of ``device``,
            which is then optional.
        host_memory: Memory of a node, for example ``512GB``. It limits offloading.
        price_per_hour: Price of one device for an hour. Requires ``device``.

    Returns:
        The plan. ``print(plan)`` shows it as ``portable-plan`` does. ``plan.best`` is the
        recommended option, or None if nothing fits or the device memory is unknown.
        ``plan.options`` contains all options with their memory in bytes, and ``plan.to_dict()``
        returns plain values.

    Raises:
        UserError: If the config is not valid, the device is unknown, or a memory size cannot be
            parsed.
    """
    from portable.checks import check_config
    from portable.errors import require
    from portable.planner.build_plan import build_plan, resolve_target

    check_config(config)
    require(
        price_per_hour is None or device is not None,
        "price_per_hour: has no effect without device; set device, for example to h100",
    )
    config, target = resolve_target(
        config, device=device, devices=devices, device_memory=device_memory, host_memory=host_memory
    )
    prices = None
    if price_per_hour is not None and target.device is not None:
        prices = {target.device.name: price_per_hour}
    return build_plan(config, target, prices)
