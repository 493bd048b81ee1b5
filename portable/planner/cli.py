"""``portable-plan``."""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import Field

from portable.checks import check
from portable.command_line import CommandOptions, Count, read_command
from portable.config.field_types import Flag  # noqa: TC001  (pydantic reads it)
from portable.converters.commands import DONE, REFUSED, format_exit_codes, wrap_main
from portable.converters.console import print_line
from portable.errors import UserError, report, require
from portable.formatting import format_table
from portable.planner import compiler_report as compiled_report
from portable.planner import device_lookup as devices
from portable.planner.build_plan import build_plan, find_target
from portable.planner.memory_model import StrategySetting
from portable.planner.plan import Planner
from portable.planner.plan_tables import as_json, as_text, describe_next_reductions
from portable.planner.preparation import build_meta_model, resolve_defaults
from portable.planner.run_time import estimate_hours, fetch_sky_prices, format_estimate, parse_prices
from portable.registry import CompileTarget, load_backend_package

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.config import RunConfig
    from portable.planner.compiled_graph import Compiled
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

{format_exit_codes(DONE, REFUSED)}
"""


class PlanOptions(CommandOptions):
    """Those of ``portable-plan``."""

    device: str = ""
    """Accelerator to plan for: h100, h200, a100-80, l4, v5e, v5p, v6e ..."""
    device_memory: str = ""
    """Memory of a device, instead of its name or to override it: 80GB."""
    devices: Count = 1
    """Number of devices; default 1."""
    host_memory: str = ""
    """Host memory of a node, a limit for offloading: 512GB."""
    compile: Flag = False
    """Also compile the run's graphs for the device, a TPU (v4, v5e, v5p, v6e), with its own compiler, and
    compare the plan with it. Takes minutes, and no TPU."""
    only_memory: Flag = False
    """With --compile: end once memory is assigned and collectives are scheduled, before the compiler makes
    code: seconds in place of minutes."""
    topology: str = ""
    """With --compile: the chips along each axis of the slice, 4x4."""
    price_per_hour: str = ""
    """What an hour of one device costs: 2.50, or by names: h100=2.50,a100-80=1.30. With --budget, else
    SkyPilot's catalog, where it is installed."""
    budget: str = ""
    """Sort machines by what the run costs on them, up to this sum."""
    wide: Flag = False
    """Show what the device memory of each option consists of."""
    json_: Flag = Field(default=False, alias="json")
    """Print the plan as JSON."""


@wrap_main
def main(argv: Sequence[str] | None = None) -> int:
    """Run ``portable-plan``. Returns one of :data:`portable.converters.commands.EXIT_CODES`."""
    if argv is None:
        argv = sys.argv[1:]
        # transformers would import torch_xla, which takes seconds and is not needed here.
        os.environ.setdefault("USE_TORCH_XLA", "0")
        gc.disable()  # the process lives for seconds
    try:
        return run(argv)
    except UserError as error:
        report(error)
        return REFUSED


def run(argv: Sequence[str]) -> int:
    """Plan and print."""
    config, options = read_command(argv, PlanOptions, USAGE)
    check(config)
    _check_compile_options(options)
    prices = parse_prices(options.get("price_per_hour"), options.get("device"))
    if "budget" in options:
        return _print_costs(config, options, prices)
    config, target = _find_target(config, options)
    plan = build_plan(config, target, prices)
    compiled = _compile_if_requested(plan.planner, options)
    if options.get("json"):
        answer = as_json(plan)
        if compiled is not None:
            answer["compiled"] = compiled_report.as_json(*compiled)
        print_line(json.dumps(answer, indent=1))
    else:
        width = min(max(60, shutil.get_terminal_size((100, 24)).columns), 110)
        print_line(as_text(plan, wide=bool(options.get("wide")), width=width))
        if compiled is not None:
            print_line("\n" + compiled_report.as_text(*compiled))
    return 0


_COUNTS = (1, 2, 4, 8)


def _print_costs(config: RunConfig, options: dict[str, Any], prices: dict[str, float]) -> int:
    """Print the machines that hold the run, by what it costs on them.

    Of each kind as few devices are taken as hold it without offloading: more finish sooner at the same cost.
    """
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,6})?)\s*", options["budget"])
    require(match is not None, f"--budget: {options['budget']!r} is not an amount of money; write 50")
    assert match is not None
    budget = float(match[1])
    require(budget > 0, f"--budget: {options['budget']!r} buys nothing; write 50")
    for name in ("devices", "device_memory", "host_memory", "compile"):
        flag = f"--{name.replace('_', '-')}"
        require(not options.get(name), f"{flag}: has no effect with --budget; remove one of the two")
    prices = prices or fetch_sky_prices()
    if "device" in options:
        only = devices.find_device(options["device"]).name
        prices = {name: price for name, price in prices.items() if name == only}
    require(
        bool(prices), "--budget: no prices; give --price-per-hour h100=2.50,l4=0.70, or pip install skypilot"
    )
    config = resolve_defaults(config)
    models: dict[str, ModelAndWork] = {}
    rows: list[dict[str, Any]] = []
    for name, price in prices.items():
        for count in _COUNTS:
            try:
                here, target = _find_target(config, {"device": name, "devices": count}, notes=False)
            except UserError:  # the batch cannot be divided so, or the config names another backend
                continue
            if target.backend not in models:
                models[target.backend] = build_meta_model(here)
            model, work = models[target.backend]
            if work is None:
                raise UserError(
                    "--budget: the number of tokens is unknown; set train.steps, or tokenize the data here"
                )
            planner = Planner(here, model, target)
            best = planner.find_best(planner.list_options())
            if best is not None and (hours := estimate_hours(planner, best, work)) is not None:
                cost = hours.compute_cost(price * count)
                kind = {"device": name, "devices": count, "strategy": best.setting.strategy}
                rows.append({**kind, "hours": hours, "cost": cost, "within_budget": cost.most <= budget})
                break
    require(bool(rows), f"--budget: none of {', '.join(prices)} holds the run on up to {_COUNTS[-1]} devices")
    rows.sort(key=lambda row: float(row["cost"].likely))
    if options.get("json"):
        print_line(json.dumps(rows, indent=1, default=lambda cost_range: [cost_range.least, cost_range.most]))
        return 0
    shown = []
    for row in rows:
        costs = f"{format_estimate(row['cost'].least)} to {format_estimate(row['cost'].most)}"
        beyond = "" if row["within_budget"] else f"; more than {budget:g}"
        shown.append(
            (f"{row['devices']} x {row['device']}", f"{costs} for {row['hours']}, {row['strategy']}{beyond}")
        )
    print_line(format_table(shown))
    return 0


def _check_compile_options(options: dict[str, Any]) -> None:
    compiles = options.get("compile")
    require(
        compiles or "topology" not in options,
        "--topology: has an effect only with --compile; add it, or leave both out",
    )
    require(
        compiles or not options.get("only_memory"),
        "--only-memory: has an effect only with --compile; add it",
    )


class _CompilerResult(NamedTuple):
    """The compiled graphs of a run, and the figures of the plan next to the compiler's."""

    compiled: Compiled
    comparisons: list[compiled_report.Comparison]


def _compile_if_requested(planner: Planner, options: dict[str, Any]) -> _CompilerResult | None:
    """What the device's compiler says of the config as it is, beside the plan; None if nobody asks."""
    if not options.get("compile"):
        return None
    option = planner.build_option(StrategySetting.from_config(planner.config))
    target = planner.target
    wanted = CompileTarget(
        device=None if target.device is None else target.device.name,
        devices=target.cluster.devices,
        topology=options.get("topology"),
        large=planner.micro_batch * planner.config.data.seq_len * planner.model.vocab_size,  # as the logits
        only_memory=bool(options.get("only_memory")),
    )
    compiled = load_backend_package(target.backend).compile(planner.config, wanted)
    compiled = compiled_report.add_remedy(compiled, describe_next_reductions(planner, option))
    comparisons = compiled_report.compare(compiled, option, planner.share // planner.micro_batch)
    return _CompilerResult(compiled, comparisons)


def _find_target(config: RunConfig, options: dict[str, Any], *, notes: bool = True) -> ConfigAndTarget:
    """Choose the target that the options describe, see :func:`find_target`."""
    names = ("device", "devices", "device_memory", "host_memory")
    return find_target(config, **{name: options[name] for name in names if name in options}, notes=notes)


if __name__ == "__main__":
    sys.exit(main())
