"""Search for settings that make a run fit on a device, for ``portable-train init --device``.

:class:`RecipeSearch` builds a list of candidates. Each candidate is a combination of settings. The
most preferred candidate is first, and the candidate that needs the least memory is last. The
planner computes the memory of each candidate, as in ``portable-plan``, and the first candidate that
fits is written into the config.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.config.derived_defaults import DEFAULTS_BY_TRAINING_KIND, find_largest_divisor
from portable.data.images import build_image_reader
from portable.data.sources.source_kinds import build_training_settings, detect_run_format, open_source
from portable.errors import UserError
from portable.formatting import format_bytes
from portable.model.build import get_max_positions, limit_seq_len, load_model_config
from portable.model.document_attention import (
    can_separate_states,
    explain_document_mixing,
    explain_image_mixing,
)
from portable.planner.device_lookup import list_known_devices
from portable.planner.plan import Planner, PlanOption
from portable.planner.preparation import build_model_and_work, choose_target
from portable.planner.run_time import EstimateRange, TrainingWork, estimate_run_hours
from portable.run.length import MIN_USEFUL_STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from portable.config import RunConfig
    from portable.data.images import ImageReader
    from portable.data.sources.documents import ImageReference
    from portable.data.tokens.image_processing import ImageProcessor
    from portable.planner.device import Device
    from portable.planner.meta_model import MetaModel

_LONGEST_SEQUENCE, _SHORTEST_SEQUENCE = DEFAULTS_BY_TRAINING_KIND["data.seq_len"].finetuning, 1024
"""Longest and shortest sequence length of a candidate, in tokens.

Longer sequences are rarely needed. Shorter sequences would truncate too much of the data."""
_MICRO_BATCH_TOKENS = 8192
"""Maximum number of tokens in a micro-batch, because it is sufficient to keep an accelerator busy."""
_MAX_RECORDS_READ = 5000
"""Maximum number of records that are read to estimate the size of the data."""
_BYTES_PER_TOKEN = 4
"""Average number of bytes of English text per token."""
_ASSUMED_TOKENS_PER_IMAGE = 1024
"""Assumed number of tokens of an image if the image or the processor of the model is not on this machine."""
_MAX_IMAGES_READ = 100
"""Maximum number of images whose tokens are counted."""
_MIN_LARGER_DEVICE_RATIO = 1.2
"""Factor by which the memory of a suggested device must exceed the memory of the device that is too small."""
_MAX_SUGGESTED_DEVICES = {"cuda": 8, "cpu": 1}
"""Maximum number of devices that an error message suggests, by backend. 64 for other backends."""


@dataclass(frozen=True)
class DatasetEstimate:
    """Estimated size of the training data.

    Attributes:
        num_records: Estimated number of records.
        num_tokens: Estimated number of tokens in all records together.
        longest_record_tokens: Estimated number of tokens in the longest record.
        num_image_tokens: Estimated number of tokens of images among them.
        is_measured: Whether the estimates are based on records that have been read. If not, they are
            assumptions.
    """

    num_records: int
    num_tokens: int
    longest_record_tokens: int
    num_image_tokens: int = 0
    is_measured: bool = True


_ASSUMED_HUB_DATASET = DatasetEstimate(10_000, 5_000_000, _LONGEST_SEQUENCE, is_measured=False)
"""Assumed size of a dataset that would have to be downloaded."""


class RejectedCandidate(NamedTuple):
    """A candidate that does not fit on the devices.

    Attributes:
        settings: Settings of the candidate, keyed by dotted key.
        needed_bytes: Minimum memory per device that a run with these settings needs, in bytes.
    """

    settings: dict[str, Any]
    needed_bytes: int


class CandidatePlanner(NamedTuple):
    """Planner for a candidate, and the amount of work in the run.

    Attributes:
        planner: Planner for the config with the candidate's settings.
        work: Number of steps and tokens of the run. None if it is unknown.
    """

    planner: Planner
    work: TrainingWork | None


@dataclass(frozen=True)
class Recipe:
    """Settings with which a run fits on the devices, and the resulting plan.

    Attributes:
        settings: Settings to write into the config, keyed by dotted key.
        planner: Planner for the config with these settings.
        option: Memory plan for these settings.
        work: Number of steps and tokens of the run. None if it is unknown.
        rejected: The most preferred candidate, if it does not fit. None if it fits; it is then the
            recipe.
    """

    settings: dict[str, Any]
    planner: Planner
    option: PlanOption
    work: TrainingWork | None
    rejected: RejectedCandidate | None

    @property
    def memory_summary(self) -> str:
        """Planned and total memory per device, such as ``about 18.4 GiB of 24.0 GiB``."""
        device, devices = self.planner.target.device, self.planner.target.cluster.devices
        assert device is not None
        on_each = "" if devices == 1 else " on each"
        planned = format_bytes(self.option.device_bytes.total)
        return f"about {planned} of {format_bytes(device.memory_bytes)}{on_each}"

    @property
    def estimated_hours(self) -> EstimateRange | None:
        """Estimated duration of the run. None if the amount of work or the device's speed is unknown."""
        return estimate_run_hours(self.planner, self.option, self.work) if self.work is not None else None


class _ImageTokenEstimator:
    """Estimates the number of tokens of images from the first images of the data.

    Args:
        config: Starter config with the user's model and data.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._counts: list[int] = []

    @cached_property
    def _processor(self) -> ImageProcessor | None:
        """Processor of the model. None if it cannot be loaded, because a run reports the error."""
        from portable.data.tokens.image_processing import load_image_processor

        model = self._config.model
        if model.name_or_path is None:
            return None
        with suppress(UserError):
            return load_image_processor(model.name_or_path, trust_remote_code=model.trust_remote_code)
        return None

    def estimate_tokens(self, images: Sequence[ImageReference], reader: ImageReader, location: str) -> int:
        """Estimate the number of tokens of the images of a record.

        Args:
            images: References of the record.
            reader: Reader of the images of its source. URLs are not downloaded.
            location: Location of the record in its source.
        """
        return sum(self._estimate_image_tokens(image, reader, location) for image in images)

    def _estimate_image_tokens(self, image: ImageReference, reader: ImageReader, location: str) -> int:
        if image.url is None and len(self._counts) < _MAX_IMAGES_READ and self._processor is not None:
            with suppress(Exception):  # a run reports images that cannot be read or processed
                self._counts.append(self._processor.count_tokens([reader.load_image(image, location).size]))
                return self._counts[-1]
        return round(sum(self._counts) / len(self._counts)) if self._counts else _ASSUMED_TOKENS_PER_IMAGE


def estimate_dataset_size(config: RunConfig) -> DatasetEstimate:
    """Estimate the size of the training data from its first records.

    Returns:
        The estimate, or :data:`_ASSUMED_HUB_DATASET` if a source would have to be downloaded.

    Raises:
        UserError: If the data cannot be read.
    """
    data = config.data.model_copy(
        update={"format": detect_run_format(config.data, config.model.task, downloads=False)}
    )
    count = read_bytes = file_bytes = longest_bytes = image_tokens = 0
    total_bytes: int | None = 0
    estimator = _ImageTokenEstimator(config)
    for settings in build_training_settings(data, config.model.task, offline=True).values():
        source = open_source(settings)
        if source.downloads_to_read:
            return _ASSUMED_HUB_DATASET
        reader = replace(build_image_reader(settings.data), allow_urls=False)
        for document in islice(source.iter_documents(), _MAX_RECORDS_READ):
            length = len(f"{document.text}{document.target or ''}{document.pair_text or ''}".encode())
            file_bytes += length
            if (conversation := document.conversation) is not None:
                file_bytes += sum(len(image.data or b"") for image in conversation.images)
                tokens = estimator.estimate_tokens(conversation.images, reader, conversation.location)
                length, image_tokens = length + _BYTES_PER_TOKEN * tokens, image_tokens + tokens
            count, read_bytes, longest_bytes = count + 1, read_bytes + length, max(longest_bytes, length)
        source_bytes = source.size_bytes
        total_bytes = None if total_bytes is None or source_bytes is None else total_bytes + source_bytes
    if (
        count >= _MAX_RECORDS_READ and total_bytes is not None and file_bytes
    ):  # Extrapolate, because not all records have been read. Assume that all have the same average length.
        factor = max(1.0, total_bytes / file_bytes)
        count, read_bytes, image_tokens = (round(n * factor) for n in (count, read_bytes, image_tokens))
    # Increase the length of the longest record, because it may have more tokens per byte than English text,
    # and the chat template adds tokens.
    return DatasetEstimate(
        count,
        max(1, read_bytes // _BYTES_PER_TOKEN),
        longest_bytes // (_BYTES_PER_TOKEN - 1) + 64,
        image_tokens,
    )


class RecipeSearch:
    """Search for settings that make a run fit on a device.

    Args:
        config: Starter config with the user's model and data.
        dataset_estimate: Size of the data. None if the user has not specified any data.
    """

    def __init__(self, config: RunConfig, dataset_estimate: DatasetEstimate | None) -> None:
        """Store the arguments, and load the config of the model. It may be downloaded from the Hub."""
        self.config = config
        self.dataset_estimate = dataset_estimate
        self._model_config = load_model_config(config.model)
        self._models: dict[tuple[object, ...], tuple[MetaModel, TrainingWork | None]] = {}

    def find_recipe(self, device: Device, num_devices: int) -> Recipe | None:
        """Find the first candidate that fits on the devices without offloading.

        Args:
            device: Type of device.
            num_devices: Number of devices.

        Returns:
            The candidate's settings and the values that the planner has chosen. None if no candidate fits.
        """
        rejected = None
        for settings in self.build_candidates(device, num_devices):
            planner, work = self._build_candidate_planner(settings, device, num_devices)
            option = planner.find_best_option(planner.build_options(offloading=False))
            if option is None:
                rejected = rejected or RejectedCandidate(settings, planner.compute_min_device_bytes())
                continue
            planned = {
                "train.micro_batch_size": option.micro_batch,
                "memory.activation_checkpointing": option.recompute,
            }
            if option.setting.strategy != self.config.strategy:
                planned["strategy"] = option.setting.strategy
            return Recipe(
                settings | planned, planner, option, self._estimate_work(settings) or work, rejected
            )
        return None

    def build_candidates(self, device: Device, num_devices: int) -> list[dict[str, Any]]:
        """Build the candidates, in the order in which they are tried.

        The first candidate keeps the starter's base model, usually in 16 bits. For a LoRA adapter, a
        candidate with a quantized base model is next; it is slower and less exact. Candidates with shorter
        sequences are last, because they truncate the data.

        The planner chooses the strategy, a smaller micro-batch size and activation checkpointing, so these
        are not part of a candidate.

        Returns:
            Settings of each candidate, keyed by dotted key.
        """
        adapter, data = self.config.adapter, self.config.data
        bases = [adapter.base]
        if adapter.type is not None and adapter.base == "auto" and "xla" not in device.backends:
            bases.append("nf4")  # XLA has no kernels for quantized bases
        longest = _LONGEST_SEQUENCE if self._is_packable else data.seq_len
        lengths = [limit_seq_len(longest, get_max_positions(self._model_config))]
        while lengths[-1] // 2 >= _SHORTEST_SEQUENCE:
            lengths.append(lengths[-1] // 2)
        # Disable activation checkpointing in all candidates, because the planner enables it if necessary.
        common: dict[str, Any] = {"memory.activation_checkpointing": "none"}
        if not device.bf16 and "cuda" in device.backends:
            common["precision"] = "fp16"
        if device.backends == ("cpu",):
            common["backend"] = "cpu"
        candidates = []
        for length in lengths:
            batch = self._choose_batch_settings(device, length, num_devices)
            for base in bases:
                quantized = {} if base == adapter.base else {"adapter.base": base}
                candidates.append({**common, **quantized, **batch})
        return candidates

    def iter_device_suggestions(self, device: Device, num_devices: int) -> Iterator[str]:
        """Yield at most two values of ``--device`` that are sufficient for the run.

        The first value has the same type of device, and the smallest sufficient number of devices. The
        second value has the device of the same backend with the smallest sufficient memory. A value is
        omitted if no such device is known.

        Args:
            device: Type of device on which the run does not fit.
            num_devices: Number of these devices.
        """
        limit = min(_MAX_SUGGESTED_DEVICES.get(device.backends[0], 64), device.devices_per_node)
        counts = [2**power for power in range(1, 7) if num_devices < 2**power <= limit]
        larger = sorted(
            (
                other
                for other in list_known_devices().values()
                if other.backends[0] == device.backends[0]
                and other.memory_bytes > _MIN_LARGER_DEVICE_RATIO * device.memory_bytes
            ),
            key=lambda other: other.memory_bytes,
        )
        more_devices = ((device, count) for count in counts)
        larger_devices = ((other, num_devices) for other in larger)
        for choices in (more_devices, larger_devices):
            for other, count in choices:
                if self._fits_cheapest_candidate(other, count):
                    yield f"--device {other.name}" + (f":{count}" if count > 1 else "")
                    break

    def describe_least_memory(self, device: Device, num_devices: int) -> str:
        """Describe the minimum memory that the run needs and the usable memory. Used in error messages."""
        planner, _ = self._build_candidate_planner(
            self.build_candidates(device, num_devices)[-1], device, num_devices
        )
        least, usable = (
            format_bytes(planner.compute_min_device_bytes()),
            format_bytes(device.compute_usable_bytes(num_devices)),
        )
        on_each = "" if num_devices == 1 else " on each"
        return f"at least {least}{on_each}, and a run can use {usable}"

    def _fits_cheapest_candidate(self, device: Device, num_devices: int) -> bool:
        """Return whether the run fits with the last candidate, which needs the least memory."""
        planner, _ = self._build_candidate_planner(
            self.build_candidates(device, num_devices)[-1], device, num_devices
        )
        return planner.find_best_option(planner.build_options(offloading=False)) is not None

    @property
    def _is_packable(self) -> bool:
        """Whether the task and the data format allow packing several records into one sequence."""
        config = self.config
        return config.model.task == "causal-lm" and config.data.format in ("auto", "text", "messages")

    def _choose_batch_settings(self, device: Device, seq_len: int, num_devices: int) -> dict[str, Any]:
        """Choose the sequence length, packing and batch sizes for a candidate.

        The batch size of the starter config counts records. If there are enough records, they are packed,
        and the batch size is divided by the average number of records per sequence. Otherwise, they are
        padded, and the sequence length is reduced to fit the longest record.

        Args:
            device: Type of the devices.
            seq_len: Maximum sequence length, in tokens.
            num_devices: Number of devices. The chosen global batch size is a multiple of this number.

        Returns:
            Settings, keyed by dotted key.
        """
        records, train = self.dataset_estimate, self.config.train
        batch = train.global_batch_size
        settings: dict[str, Any] = {}
        if self.config.data.packing is not True and records is not None:
            records_per_sequence = max(1.0, seq_len * records.num_records / records.num_tokens)
            steps = records.num_records * (train.epochs or 1) / max(batch, records_per_sequence * num_devices)
            config = self.config.replaced({"backend": device.backends[0]})
            mixing = explain_document_mixing(
                self._model_config, seq_len, separates_states=can_separate_states(config)
            )
            if mixing is None and config.data.images:
                mixing = explain_image_mixing(self._model_config.model_type)
            if self._is_packable and steps >= MIN_USEFUL_STEPS and mixing is None:
                batch = max(1, round(batch / records_per_sequence))
                settings["data.packing"] = "documents"
            else:
                shortest = self.config.data.seq_len if config.data.images else 128
                seq_len = min(seq_len, max(shortest, math.ceil(records.longest_record_tokens / 128) * 128))
                if self._is_packable:
                    settings["data.packing"] = False
        elif records is not None:
            batch = max(
                1, min(batch, int(records.num_tokens / seq_len * (train.epochs or 1) / MIN_USEFUL_STEPS))
            )
        batch = math.ceil(batch / num_devices) * num_devices
        sequences_per_record = 2 if self.config.data.format == "preference" else 1
        largest_micro_batch = max(1, _MICRO_BATCH_TOKENS // (seq_len * sequences_per_record))
        return {
            "data.seq_len": seq_len,
            **settings,
            "train.global_batch_size": batch,
            "train.micro_batch_size": find_largest_divisor(batch // num_devices, largest_micro_batch),
        }

    def _build_candidate_planner(
        self, settings: Mapping[str, Any], device: Device, num_devices: int
    ) -> CandidatePlanner:
        """Build the planner for a candidate.

        Models on the meta device are cached and shared by candidates with the same backend, precision, base
        model and sequence length.

        Args:
            settings: Settings of the candidate, keyed by dotted key.
            device: Type of device.
            num_devices: Number of devices.
        """
        config, target = choose_target(self.config.replaced(dict(settings)), device, num_devices, notes=False)
        key = config.backend, config.precision, config.adapter.base, config.data.seq_len
        if key not in self._models:
            self._models[key] = build_model_and_work(config, with_data=False)
        model, work = self._models[key]
        return CandidatePlanner(Planner(config, model, target), work)

    def _estimate_work(self, settings: Mapping[str, Any]) -> TrainingWork | None:
        """Estimate the number of steps and tokens of a run with the settings of a candidate.

        Returns None if no records have been read, or if the length of the run is not set in epochs.
        """
        records, epochs = self.dataset_estimate, self.config.train.epochs
        if records is None or not records.is_measured or epochs is None:
            return None
        length, batch = settings["data.seq_len"], settings["train.global_batch_size"]
        packed = settings.get("data.packing", self.config.data.packing)
        sequences = records.num_tokens / length if packed else records.num_records
        steps = max(1, math.ceil(sequences / batch)) * math.ceil(epochs)
        image_tokens = steps * batch * records.num_image_tokens / (sequences or 1)
        return TrainingWork(steps, steps * batch * length, round(image_tokens))


def find_recipe(
    config: RunConfig,
    device: Device,
    num_devices: int,
    dataset_estimate: DatasetEstimate | None,
    cheaper_configs: Mapping[str, RunConfig],
) -> Recipe:
    """Find settings that make a run fit on the given devices.

    Args:
        config: Starter config of a task, with the user's model and data.
        device: Type of device.
        num_devices: Number of devices.
        dataset_estimate: Size of the data. None if the user has not specified any data.
        cheaper_configs: Starter configs of other tasks that need less memory, keyed by the flag that
            selects them.

    Raises:
        UserError: If no candidate fits. The message suggests a cheaper task, more devices, or a larger
            device.
    """
    search = RecipeSearch(config, dataset_estimate)
    recipe = search.find_recipe(device, num_devices)
    if recipe is not None:
        return recipe
    changes = [
        flag
        for flag, other in cheaper_configs.items()
        if RecipeSearch(other, dataset_estimate).find_recipe(device, num_devices) is not None
    ]
    changes += search.iter_device_suggestions(device, num_devices)
    count = f"{num_devices} x {device.name}"
    remedy = f"use {' or '.join(changes)}" if changes else "use a smaller model"
    name = config.model.name_or_path or "the model"
    needed = search.describe_least_memory(device, num_devices)
    raise UserError(f"--device: {name} does not fit on {count}: the run needs {needed}; {remedy}")


def describe_recipe(recipe: Recipe) -> list[str]:
    """Describe a recipe and its plan in sentences, which are written as comments into the config."""
    planner, option = recipe.planner, recipe.option
    device, devices = planner.target.device, planner.target.cluster.devices
    assert device is not None
    device_bytes = option.device_bytes
    parts = {
        "parameters": device_bytes.parameters,
        "gathered parameters": device_bytes.gathered,
        "gradients": device_bytes.gradients,
        "optimizer": device_bytes.optimizer,
        "activations": device_bytes.activations,
    }
    part_list = ", ".join(f"{name} {format_bytes(part)}" for name, part in parts.items() if part >= 1 << 20)
    lines = [
        f"Sized by portable-plan for {devices} x {device.name}: {recipe.memory_summary} ({part_list}).",
        f"A run can use {format_bytes(device.compute_usable_bytes(devices))}. The rest stays free, because "
        "activations may need a tenth more memory than planned.",
    ]
    if recipe.rejected is not None:
        settings, needed = recipe.rejected
        base = "a 16-bit base" if "adapter.base" not in settings and "adapter.base" in recipe.settings else ""
        shorter = settings["data.seq_len"] != recipe.settings["data.seq_len"]
        tokens = f"sequences of {settings['data.seq_len']} tokens" if shorter else ""
        reasons = " and ".join(filter(None, (base, tokens)))
        lines.append(f"With {reasons}, the run would need at least {format_bytes(needed)}.")
    if recipe.estimated_hours is not None and recipe.work is not None:
        low, high = device.reached.mfu_range
        duration = recipe.estimated_hours.format_time("about ")
        lines.append(
            f"Estimated time: {duration} for {recipe.work.steps:,} steps, at {low:.0%} to {high:.0%} of the "
            f"device's peak ({device.reached.source})."
        )
    return lines
