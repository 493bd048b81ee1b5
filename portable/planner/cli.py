"""Command-line interface of ``portable-plan``."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from portable.checks import check_config
from portable.command_line import CommandOptions, PositiveCount, parse_command_line
from portable.config.field_types import Flag  # noqa: TC001  (pydantic reads it)
from portable.converters.commands import DONE, FAILED, REFUSED, exit_without_traceback, format_exit_codes
from portable.converters.console import print_line
from portable.errors import RunError, UserError, print_error_lines, require
from portable.formatting import format_table
from portable.planner import compiler_report as compiled_report
from portable.planner import device_lookup as devices
from portable.planner.build_plan import build_plan, resolve_target
from portable.planner.memory_model import StrategySetting
from portable.planner.plan import Planner
from portable.planner.plan_tables import describe_next_reductions, format_plan, plan_to_json
from portable.planner.preparation import build_model_and_work, resolve_data_dependent_defaults
from portable.planner.run_time import estimate_run_hours, fetch_sky_prices, parse_prices
from portable.registry import CompileTarget, load_backend_package
from portable.terminal import print_status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.config import RunConfig
    from portable.planner.compiled_graph import CompiledRun
    from portable.planner.plan import ConfigAndTarget
    from portable.planner.preparation import ModelAndWork

USAGE = f"""\
usage: portable-plan [--config FILE.yaml] [--device NAME] [--devices N]
                     [--compile] [--json] [--KEY VALUE ...]

Show what a config needs before a machine is rented: memory of devices and hosts
under each strategy, the size of a checkpoint, bytes sent in a step, the
recommended setting, the hours and their price. Loads no weights.

examples:
  portable-plan --config run.yaml --device h100 --devices 8
  portable-plan --model.name_or_path org/model --device v5e --devices 16
  portable-plan --config run.yaml --device-memory 24GB --json
  portable-plan --config run.yaml --device v5e --devices 16 --compile
  portable-plan --config run.yaml --budget 50 --price-per-hour h100=2.50,l4=0.70

{format_exit_codes(DONE, FAILED, REFUSED)}
"""


class PlanOptions(CommandOptions):
    """Options of ``portable-plan``."""

    device: str = ""
    """Accelerator to plan for: h100, h200, a100-80, l4, v5e, v5p, v6e ..."""
    device_memory: str = ""
    """Memory of a device, such as 80GB, instead of --device or to override it."""
    devices: PositiveCount = 1
    """Number of devices; default: 1."""
    host_memory: str = ""
    """Host memory of a node, such as 512GB, which limits offloading."""
    compile: Flag = False
    """Also compile the run's graphs with the compiler of the device, a TPU (v4, v5e, v5p, v6e), and compare
    the plan with the compiler's report. Takes minutes, but does not need a TPU."""
    only_memory: Flag = False
    """With --compile: stop as soon as memory is assigned and collectives are scheduled, before code is
    generated. Takes seconds instead of minutes."""
    topology: str = ""
    """With --compile: number of chips along each axis of the slice, such as 4x4."""
    price_per_hour: str = ""
    """Price of one device for an hour, such as 2.50, or prices by name: h100=2.50,a100-80=1.30. If it is not
    set, --budget takes the prices from SkyPilot's catalog, if SkyPilot is installed."""
    budget: str = ""
    """Sort machines by the cost of the run, and mark costs above this sum."""
    wide: Flag = False
    """Show the composition of each option's device memory."""
    json_: Flag = Field(default=False, alias="json")
    """Print the plan as JSON."""


@exit_without_traceback
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``portable-plan``.

    Args:
        argv: Command-line arguments. None for the arguments of the process.

    Returns:
        One of :data:`portable.converters.commands.EXIT_CODES`. UserErrors and RunErrors are printed, not
        raised.
    """
    if argv is None:
        argv = sys.argv[1:]
        # Prevent transformers from importing torch_xla, because the import takes seconds and a plan does not
        # need it.
        os.environ.setdefault("USE_TORCH_XLA", "0")
        gc.disable()  # because the process only runs for seconds
    try:
        return run_command(argv)
    except UserError as error:
        print_error_lines(error)
        return REFUSED
    except RunError as error:
        print_error_lines(error)
        return FAILED


def run_command(argv: Sequence[str]) -> int:
    """Compute and print the plan for the command-line arguments.

    With ``--budget``, a table of machines and their costs is printed instead.

    Returns:
        The exit code 0. Failures raise an exception.

    Raises:
        UserError: If an option or the config is not valid, if the run is not possible on the
            target, or if ``--compile`` fails.
        RunError: If the data is in an object store that cannot be reached.
        SystemExit: After ``--help`` or ``--version``.
    """
    config, options = parse_command_line(argv, PlanOptions, USAGE)
    check_config(config)
    _check_compile_options(options)
    prices = parse_prices(options.get("price_per_hour"), options.get("device"))
    if "budget" in options:
        return _print_cost_table(config, options, prices)
    config, target = _resolve_target(config, options)
    plan = build_plan(config, target, prices)
    compiled = _compile_if_requested(plan.planner, options)
    if options.get("json"):
        answer = plan_to_json(plan)
        if compiled is not None:
            answer["compiled"] = compiled_report.to_json_values(*compiled)
        print_line(json.dumps(answer, indent=1))
    else:
        width = min(max(60, shutil.get_terminal_size((100, 24)).columns), 110)
        print_line(format_plan(plan, wide=bool(options.get("wide")), width=width))
        if compiled is not None:
            print_line("\n" + compiled_report.format_report(*compiled))
    return 0


_DEVICE_COUNTS = (1, 2, 4, 8)


def _print_cost_table(config: RunConfig, options: dict[str, Any], prices: dict[str, float]) -> int:
    """Print the machines on which the run fits, sorted by the cost of the run.

    For each device type with a price, the table shows the smallest number of devices (1, 2, 4 or 8)
    on which the run fits without offloading. More devices would finish sooner, but cost about the
    same. Machines whose cost may exceed the budget are marked, not removed. Device types are omitted
    if the run does not fit or is not supported. A note lists the device types that are omitted
    because their peak FLOP/s are unknown.

    Args:
        config: Config of the run.
        options: Command-line options, keyed by name. ``budget`` is set. If ``device`` is set, the
            table contains only this device type. If ``json`` is set, the table is printed as JSON.
        prices: Price per device and hour, keyed by device name. If empty, prices are read from
            SkyPilot's catalog.

    Returns:
        The exit code 0, even if every machine exceeds the budget.

    Raises:
        UserError: If an option is invalid or has no effect, if prices or the number of tokens are
            unknown, or if all device types are omitted.
    """
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,6})?)\s*", options["budget"])
    require(
        match is not None,
        f"--budget: {options['budget']!r} is not an amount of money; use a number, such as 50",
    )
    assert match is not None
    budget = float(match[1])
    require(budget > 0, f"--budget: {options['budget']!r} is not greater than 0; use a number, such as 50")
    for name in ("devices", "device_memory", "host_memory", "compile", "wide"):
        flag = f"--{name.replace('_', '-')}"
        require(not options.get(name), f"{flag}: has no effect with --budget; remove {flag} or --budget")
    prices = prices or fetch_sky_prices()
    if "device" in options:
        only = devices.find_device(options["device"]).name
        prices = {name: price for name, price in prices.items() if name == only}
    require(
        bool(prices),
        "--budget: the prices of the devices are unknown; add prices such as --price-per-hour "
        "h100=2.50,l4=0.70, or run: pip install skypilot",
    )
    config = resolve_data_dependent_defaults(config)
    models: dict[tuple[str, str], ModelAndWork] = {}
    untimed: dict[str, str] = {}
    refusal: UserError | None = None
    rows: list[dict[str, Any]] = []
    for name, price in prices.items():
        for count in _DEVICE_COUNTS:
            try:
                device_config, target = _resolve_target(
                    config, {"device": name, "devices": count}, notes=False
                )
            except UserError as error:  # The batch cannot be divided, or the backend differs.
                refusal = error
                continue
            key = target.backend, device_config.precision
            if key not in models:
                models[key] = build_model_and_work(device_config)
            model, work = models[key]
            if work is None:
                raise UserError(
                    "--budget: the number of tokens is unknown; set train.steps, or tokenize the "
                    "data on this machine"
                )
            planner = Planner(device_config, model, target)
            best = planner.find_best_option(planner.build_options())
            if best is None or best.setting.offload_targets:
                continue
            if (hours := estimate_run_hours(planner, best, work)) is None:
                untimed[name] = device_config.precision
            else:
                cost = hours.compute_cost(price * count)
                kind = {"device": name, "devices": count, "strategy": best.setting.strategy}
                rows.append({**kind, "hours": hours, "cost": cost, "within_budget": cost.most <= budget})
            break
    if untimed:
        names = ", ".join(f"{name} in {precision}" for name, precision in untimed.items())
        message = f"the speed of {names} is unknown, so the hours of the run cannot be estimated"
        require(
            bool(rows),
            f"--budget: {message}; set another precision, or add another device to --price-per-hour",
        )
        print_status(f"note: --budget: {message}")
    if refusal is not None and not models:
        raise refusal
    require(
        bool(rows),
        f"--budget: without offloading, the run does not fit on up to {_DEVICE_COUNTS[-1]} devices of any of "
        f"these types: {', '.join(prices)}; choose a type with more memory in --price-per-hour (and in "
        "--device, if set)",
    )
    rows.sort(key=lambda row: float(row["cost"].likely))
    if options.get("json"):
        print_line(json.dumps(rows, indent=1, default=lambda cost_range: [cost_range.least, cost_range.most]))
        return 0
    shown = []
    for row in rows:
        beyond = "" if row["within_budget"] else f"; exceeds the budget of {budget:g}"
        cost, hours = row["cost"].format_cost(), row["hours"].format_time()
        shown.append(
            (f"{row['devices']} x {row['device']}", f"{cost} for {hours}, {row['strategy']}{beyond}")
        )
    print_line(format_table(shown))
    return 0


def _check_compile_options(options: dict[str, Any]) -> None:
    """Raise UserError if a compiler option is set without ``--compile``."""
    compiles = options.get("compile")
    require(
        compiles or "topology" not in options,
        "--topology: has an effect only with --compile; add --compile, or remove --topology",
    )
    require(
        compiles or not options.get("only_memory"),
        "--only-memory: has an effect only with --compile; add --compile, or remove --only-memory",
    )


class _CompilerResult(NamedTuple):
    """Statistics of a run's compiled graphs, and their comparison with the plan."""

    compiled: CompiledRun
    comparisons: list[compiled_report.Comparison]


def _compile_if_requested(planner: Planner, options: dict[str, Any]) -> _CompilerResult | None:
    """Compile the run for the target device if ``--compile`` is set. This can take minutes.

    The run is compiled with the strategy and the micro-batch size in its config, even if the
    planner recommends other values. If the run does not fit, settings that reduce the memory are
    appended to the problems in the result.

    Returns:
        The statistics of the graphs, and their comparison with the plan. None if ``--compile`` is
        not set.

    Raises:
        UserError: If the backend cannot compile for the device, or if a graph does not compile.
    """
    if not options.get("compile"):
        return None
    option = planner.build_option(StrategySetting.from_config(planner.config))
    target = planner.target
    wanted = CompileTarget(
        device=None if target.device is None else target.device.name,
        num_devices=target.cluster.devices,
        topology=options.get("topology"),
        # List values that have at least as many elements as the logits.
        min_listed_elements=planner.micro_batch * planner.config.data.seq_len * planner.model.vocab_size,
        stops_after_memory_report=bool(options.get("only_memory")),
    )
    compiled = load_backend_package(target.backend).compile_graphs(planner.config, wanted)
    compiled = compiled_report.add_remedy_to_problems(compiled, describe_next_reductions(planner, option))
    comparisons = compiled_report.compare_with_plan(
        compiled, option, planner.batch_per_group // planner.micro_batch
    )
    return _CompilerResult(compiled, comparisons)


def _resolve_target(config: RunConfig, options: dict[str, Any], *, notes: bool = True) -> ConfigAndTarget:
    """Determine the backend and the devices of the plan, and resolve the config for them.

    See :func:`resolve_target`.

    Args:
        config: Config of the run.
        options: All command-line options, keyed by name. Only the options that describe the target
            are used, for example ``device`` and ``devices``.
        notes: Whether to print the backend's notes about the config.
    """
    names = ("device", "devices", "device_memory", "host_memory")
    return resolve_target(config, **{name: options[name] for name in names if name in options}, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
