"""Estimate the time and the price of a run, as ranges.

The time is the larger of two values: the computation time and the communication time. The
computation time is the number of FLOPs for all tokens, divided by the peak FLOP/s of the
devices and by their utilization. The lowest and the highest utilization that published runs
have reached determine the range. For a device without published runs, both utilizations are
assumptions. The communication time is the number of bytes that a device sends, divided by the
speed of its links. It is only counted if all devices are in one node. The price is the time
multiplied by the hourly price of all devices.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from portable.batch_plan import compute_total_steps
from portable.errors import UserError, require, to_one_line
from portable.planner.device_lookup import find_device, load_rental_device_names

if TYPE_CHECKING:
    from portable.config import RunConfig
    from portable.data.sizes import DataSizes
    from portable.planner.device import Device
    from portable.planner.plan import Planner, PlanOption


@dataclass(frozen=True)
class TrainingWork:
    """Number of steps and tokens of a run."""

    steps: int
    """Number of optimizer steps."""
    tokens: int
    """Number of tokens in all sequences, including padding."""
    image_tokens: int = 0
    """Number of image tokens among ``tokens``. 0 if it is unknown."""
    is_upper_bound: bool = False
    """Whether both numbers are upper bounds, because the text is not tokenized yet.

    The upper bounds are computed as if each byte of the text were a token.
    """


@dataclass(frozen=True)
class EstimateRange:
    """Estimated range of a run's duration in hours, or of its cost.

    A cost is in the currency of the prices that the user specifies with ``--price-per-hour``, or in
    US dollars if the prices come from SkyPilot's catalog.
    """

    least: float
    """Lower end of the range."""
    most: float
    """Upper end of the range."""

    @property
    def likely(self) -> float:
        """Middle of the range, used as the most likely value."""
        return (self.least + self.most) / 2

    def compute_cost(self, price_per_hour: float) -> EstimateRange:
        """Convert a range of hours to a range of costs.

        Args:
            price_per_hour: Price per hour of all devices together.
        """
        return EstimateRange(self.least * price_per_hour, self.most * price_per_hour)

    def format_time(self, prefix: str = "") -> str:
        """Format the range of hours as text, such as ``3.5 to 5 hours``.

        Minutes are used if the range ends below two hours.

        Args:
            prefix: Text before the numbers, such as ``"about "``. The result ``less than a minute``
                has no prefix.
        """
        if self.most * 60 < 1:
            return "less than a minute"
        factor, unit = (60, "minutes") if self.most < 2 else (1, "hours")
        return f"{prefix}{_format_range(self.least * factor, self.most * factor)} {unit}"

    def format_cost(self, prefix: str = "") -> str:
        """Format the range of costs as text without a currency, such as ``1.2 to 1.5``.

        Args:
            prefix: Text before the numbers, such as ``"about "``. The result ``less than 0.01`` has
                no prefix.
        """
        return "less than 0.01" if self.most < 0.01 else prefix + _format_range(self.least, self.most)


def _format_range(least: float, most: float) -> str:
    """Format a range with two significant digits, or only one number if both ends are equal.

    The ends are compared after rounding.
    """
    ends = [_format_two_digits(least), _format_two_digits(most)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def _format_two_digits(value: float) -> str:
    """Round an estimate to two significant digits, and format it as text.

    Numbers of at least 10 are formatted as integers, such as ``1,200`` for 1234.
    """
    return f"{value:.2g}" if value < 10 else f"{float(f'{value:.2g}'):,.0f}"


def estimate_training_work(config: RunConfig, sizes: DataSizes | None) -> TrainingWork | None:
    """Compute the number of steps and tokens of a run.

    If the length of the run is set in epochs and the data is not tokenized yet, the numbers are
    upper bounds that are derived from the size of the text. These bounds require packed data whose
    size in bytes is known.

    Args:
        config: Config of the run.
        sizes: Sizes of the data. None if the data is not on this machine.

    Returns:
        The numbers. None if they depend on the number of samples, and this number is neither known nor
        bounded.

    Raises:
        UserError: If the number of steps exceeds :data:`portable.batch_plan.MAX_STEPS`.
    """
    at_most, samples = False, None if sizes is None else sizes.train_samples
    if samples is None and config.train.epochs is not None:
        if sizes is None or sizes.size_bytes is None or not sizes.packing:
            return None
        at_most, samples = True, max(1, sizes.size_bytes // config.data.seq_len)
    steps = compute_total_steps(config, samples or 0)
    image_tokens = 0
    if sizes is not None and sizes.images is not None and sizes.train_samples:
        samples_with_eval = sizes.train_samples + (sizes.eval_samples or 0)
        image_tokens = steps * config.train.global_batch_size * sizes.images.tokens // samples_with_eval
    tokens = steps * config.train.global_batch_size * config.data.seq_len
    return TrainingWork(steps, tokens, min(tokens, image_tokens), is_upper_bound=at_most)


def compute_hours(
    device: Device, devices: int, precision: str, flops: float, sending_hours: float = 0.0
) -> EstimateRange | None:
    """Compute the range of hours that devices need for a number of FLOPs.

    The ends of the range assume the highest and the lowest usual MFU of the device.

    Args:
        device: Device type.
        devices: Number of devices.
        precision: Precision of the matrix products.
        flops: FLOPs of all tokens in the forward and backward pass, without recomputation.
        sending_hours: Hours that a device spends sending data. Sending overlaps with the computation,
            so this is a lower bound on the result.

    Returns:
        The range, or None if the peak FLOP/s of the device in this precision is unknown.
    """
    peak = dict(device.peak_flops_by_precision).get(precision)
    if peak is None:
        return None
    least, most = (flops / (peak * devices * share) / 3600 for share in reversed(device.reached.mfu_range))
    return EstimateRange(max(least, sending_hours), max(most, sending_hours))


def estimate_run_hours(planner: Planner, option: PlanOption, work: TrainingWork) -> EstimateRange | None:
    """Estimate how many hours a run takes with the settings of an option.

    The time for communication is ignored if the run uses several nodes, or if the bandwidth of the
    links between devices is unknown.

    Args:
        planner: Planner of the run.
        option: Option of the plan.
        work: Number of steps and tokens of the run.

    Returns:
        The range. None if the device or its peak FLOP/s are unknown, or if the option uses offloading.
    """
    device, devices = planner.target.device, planner.target.cluster.devices
    if device is None or option.setting.offload_targets:
        return None
    inside = device.link_bytes_per_second is not None and 1 < devices <= device.devices_per_node
    sending = (
        work.steps * option.communication_bytes / device.link_bytes_per_second / 3600
        if inside and device.link_bytes_per_second
        else 0.0
    )
    model = planner.meta_model
    flops = model.flops_per_token * work.tokens + model.flops_per_image_token * work.image_tokens
    return compute_hours(device, devices, planner.config.precision, flops, sending)


# -- prices ------------------------------------------------------------------------------------------------


def parse_prices(text: str | None, device: str | None) -> dict[str, float]:
    """Parse the value of ``--price-per-hour``.

    Args:
        text: Price of the device in ``--device``, such as ``2.50``, or prices of several devices, such
            as ``h100=2.50,a100-80=1.30``. None if the option is not set.
        device: Value of ``--device``, if it is set.

    Returns:
        Price per device and hour, keyed by device name. Empty if ``text`` is None.

    Raises:
        UserError: If the string cannot be parsed, if a device is unknown, or if a device has two
            prices.
    """
    prices: dict[str, float] = {}
    for part in () if text is None else text.split(","):
        name, _, price = part.rpartition("=")
        ok = re.fullmatch(r"\s*\d{1,6}(\.\d{1,6})?\s*", price) is not None and bool(name or device)
        require(
            ok and float(price) > 0,
            f"--price-per-hour: {part!r} does not specify the price of a device; use a number such as 2.50 "
            "together with --device, or NAME=PRICE such as h100=2.50,l4=0.70",
        )
        key = find_device(name or str(device), "--price-per-hour").name
        require(
            key not in prices,
            f"--price-per-hour: {text!r}: {key} has two prices; specify one price, such as {key}=2.50",
        )
        prices[key] = float(price)
    return prices


def fetch_sky_prices() -> dict[str, float]:
    """Read the lowest price of each GPU from SkyPilot's catalog. TPUs are not included.

    Returns:
        Price per device and hour, keyed by device name. Devices without an offer are missing. Empty
        if SkyPilot is not installed.

    Raises:
        UserError: If the catalog cannot be read.
    """
    if find_spec("sky") is None:
        return {}
    try:
        offers: dict[str, list[Any]] = import_module("sky.catalog").list_accelerators(gpus_only=True)
    except Exception as error:  # Fetching a catalog may raise any error.
        raise UserError(
            f"--price-per-hour: is not set, and SkyPilot's catalog cannot be read ({to_one_line(error)}); "
            "specify prices such as --price-per-hour h100=2.50,l4=0.70"
        ) from error
    prices = {}
    for key, names in load_rental_device_names().items():
        if key == "topologies" or "type" in names:
            continue
        of_device = offers.get(str(names.get("sky", key.upper())), [])
        each = [
            offer.price / offer.accelerator_count
            for offer in of_device
            if offer.price and offer.accelerator_count
        ]
        if each:
            prices[key] = min(each)
    return prices
