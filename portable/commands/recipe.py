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

from tqdm import tqdm

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
from portable.planner.savings import describe_saving_costs, list_memory_savings
from portable.run.length import MIN_USEFUL_STEPS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from portable.config import RunConfig
    from portable.data.images import ImageReader
    from portable.data.sources.documents import ImageReference
    from portable.data.sources.source import DataSource
    from portable.data.tokens.image_processing import ImageProcessor
    from portable.planner.device import Device
    from portable.planner.meta_model import MetaModel

_LONGEST_SEQUENCE, _SHORTEST_SEQUENCE = DEFAULTS_BY_TRAINING_KIND["data.seq_len"].finetuning, 1024
"""Longest and shortest sequence length of a candidate, in tokens.

Longer sequences are rarely needed. Shorter sequences would truncate too much of the data."""
_MICRO_BATCH_TOKENS = 8192
"""Maximum number of tokens in a micro-batch. This many tokens are sufficient to keep an accelerator busy."""
_NUM_FIRST_RECORDS = 5000
"""Number of records that are read of a large source if the rest can be extrapolated from its size."""
_LARGE_SOURCE_BYTES = 100 << 20
"""Minimum size of a source of which only the first records are read."""
_BYTES_PER_TOKEN = 4
"""Average number of bytes of English text per token."""
_ASSUMED_TOKENS_PER_IMAGE = 1024
"""Assumed number of tokens of an image if the image or the processor of the model is not on this machine."""
_MAX_IMAGES_READ = 100
"""Maximum number of images whose tokens are counted."""
_MIN_LARGER_DEVICE_RATIO = 1.2
"""Minimum ratio between the memory of a suggested device and the memory of the device that is too small."""
_MAX_SUGGESTED_DEVICES = {"cuda": 8, "cpu": 1}
"""Maximum number of devices that an error message suggests, keyed by backend. 64 for backends that are
not listed."""


@dataclass(frozen=True)
class DatasetEstimate:
    """Estimated size of the training data.

    Attributes:
        num_records: Estimated number of records.
        num_tokens: Estimated number of tokens in all records together, including image tokens.
        longest_record_tokens: Estimated number of tokens in the longest record.
        num_image_tokens: Estimated number of image tokens in all records together.
        is_measured: Whether the estimates are based on records that have been read. If not, they are
            assumptions.
    """

    num_records: int
    num_tokens: int
    longest_record_tokens: int
    num_image_tokens: int = 0
    is_measured: bool = True


_ASSUMED_DATASET = DatasetEstimate(10_000, 5_000_000, _LONGEST_SEQUENCE, is_measured=False)
"""Assumed size of a dataset that contains tokens, or that would have to be downloaded."""


class RejectedCandidate(NamedTuple):
    """Combination of settings that was tried but does not fit into the memory of the devices.

    Attributes:
        settings: The settings, keyed by dotted key.
        needed_bytes: Minimum memory per device that a run with these settings needs, in bytes.
    """

    settings: dict[str, Any]
    needed_bytes: int


class CandidatePlanner(NamedTuple):
    """Planner for a candidate, and the amount of work in the run.

    A candidate is one combination of settings that the recipe search tries.

    Attributes:
        planner: Planner for the config with the candidate's settings.
        work: Number of steps and tokens of the run. None if it is unknown.
    """

    planner: Planner
    work: TrainingWork | None


@dataclass(frozen=True)
class Recipe:
    """Settings that make a run fit on the devices, and the resulting plan.

    Attributes:
        settings: Settings to write into the config, keyed by dotted key.
        planner: Planner for the config with these settings.
        option: Memory plan for these settings.
        work: Number of steps and tokens of the run. None if it is unknown.
        rejected: Preferred combination of settings, which is tried first, if it does not fit. None
            if it fits and was chosen.
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
    """Estimator of the number of tokens per image.

    The tokens of the first images in the data are counted. Every other image is assumed to have the
    mean of these counts. If no image can be counted, a fixed number is assumed.

    Args:
        config: Starter config with the user's model and data.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._counts: list[int] = []

    @cached_property
    def _processor(self) -> ImageProcessor | None:
        """Image processor of the model. None if the model is not pretrained, or if loading fails.

        A loading error is not raised here, because the training run raises it.
        """
        from portable.data.tokens.image_processing import load_image_processor

        model = self._config.model
        if model.name_or_path is None:
            return None
        with suppress(UserError):
            return load_image_processor(model.name_or_path, trust_remote_code=model.trust_remote_code)
        return None

    def estimate_tokens(self, images: Sequence[ImageReference], reader: ImageReader, location: str) -> int:
        """Estimate the total number of tokens in the images of a record.

        The tokens of the first local images of the dataset are counted, for at most
        :data:`_MAX_IMAGES_READ` images. Each other image is assumed to have the average of the
        previous counts. This includes images at URLs, which are not downloaded, and images that
        cannot be read. If no image has been counted yet, :data:`_ASSUMED_TOKENS_PER_IMAGE` is used.

        Args:
            images: References to the images of the record.
            reader: Reader for images of the source that contains the record.
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
    """Estimate the size of the training data by reading its records.

    Only the first records of a large source are read, and the rest is extrapolated from the size of
    its files. The result may then be too high, because the files also contain keys and columns that
    are not used. If the size of the files does not indicate the length of the text, as for compressed
    and Parquet files, all records of the source are read.

    Args:
        config: Starter config with the user's data.

    Returns:
        The estimate, or :data:`_ASSUMED_DATASET` if a source would have to be downloaded, or if it
        contains tokens instead of text.

    Raises:
        UserError: If the data cannot be read.
    """
    data = config.data.model_copy(
        update={"format": detect_run_format(config.data, config.model.task, downloads=False)}
    )
    num_records = num_bytes = longest_bytes = image_tokens = 0
    estimator = _ImageTokenEstimator(config)
    for settings in build_training_settings(data, config.model.task, offline=True).values():
        source = open_source(settings)
        if source.downloads_to_read or source.has_tokens:
            return _ASSUMED_DATASET
        size = _measure_source(source, estimator)
        num_records += size.num_records
        num_bytes += size.num_bytes
        longest_bytes = max(longest_bytes, size.longest_bytes)
        image_tokens += size.num_image_tokens
    # Increase the length of the longest record, because it may have more tokens per byte than English text,
    # and the chat template adds tokens.
    return DatasetEstimate(
        num_records,
        max(1, num_bytes // _BYTES_PER_TOKEN + image_tokens),
        longest_bytes // (_BYTES_PER_TOKEN - 1) + 64,
        image_tokens,
    )


class _SourceSize(NamedTuple):
    """Size of a source.

    Attributes:
        num_records: Number of records.
        num_bytes: Size of the text in bytes.
        longest_bytes: Size of the longest record in bytes. An image counts as the bytes of a text with
            the same number of tokens.
        num_image_tokens: Number of image tokens.
    """

    num_records: int
    num_bytes: int
    longest_bytes: int
    num_image_tokens: int


def _measure_source(source: DataSource, estimator: _ImageTokenEstimator) -> _SourceSize:
    """Measure the size of a source with text, or estimate it from the first records of a large source."""
    total_bytes = source.size_bytes
    reads_all = total_bytes is None or total_bytes < _LARGE_SOURCE_BYTES
    reader = replace(build_image_reader(source.settings.data), allow_urls=False)
    count = text_bytes = image_bytes = longest_bytes = image_tokens = 0
    documents = tqdm(
        islice(source.iter_documents(), None if reads_all else _NUM_FIRST_RECORDS),
        desc=f"reading {source.name}",
        unit=" records",
        delay=1,
        leave=False,
    )
    for document in documents:
        length = len(f"{document.text}{document.target or ''}{document.pair_text or ''}".encode())
        count, text_bytes, tokens = count + 1, text_bytes + length, 0
        if (conversation := document.conversation) is not None:
            image_bytes += sum(len(image.data or b"") for image in conversation.images)
            tokens = estimator.estimate_tokens(conversation.images, reader, conversation.location)
        image_tokens += tokens
        longest_bytes = max(longest_bytes, length + _BYTES_PER_TOKEN * tokens)
    if not reads_all and total_bytes is not None and count == _NUM_FIRST_RECORDS and text_bytes + image_bytes:
        # Assume the same average length for the records that were not read.
        factor = max(1.0, total_bytes / (text_bytes + image_bytes))
        count, text_bytes, image_tokens = (round(n * factor) for n in (count, text_bytes, image_tokens))
    return _SourceSize(count, text_bytes, longest_bytes, image_tokens)


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
        """Find the first candidate that fits on the devices.

        A candidate is a set of settings to try. See :meth:`build_candidates`. A candidate may
        offload activations. Offloading of parameters and optimizer state is not considered.

        Args:
            device: Type of device.
            num_devices: Number of devices.

        Returns:
            The recipe: the candidate's settings, the values that the planner has chosen, and the
            plan. None if no candidate fits.
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
        """Build the candidates: sets of settings to try in order until one fits on the devices.

        The first candidate keeps the base model of the starter config, usually in 16 bits. Each of
        the next candidates adds settings that save memory
        (:func:`~portable.planner.savings.list_memory_savings`). If the run trains an adapter and
        ``adapter.base`` is ``auto``, candidates with a base model in 4 bits are next, except on XLA
        devices. They are slower and less exact. Candidates with shorter sequences are last, because
        they truncate the data.

        The candidates do not contain a strategy, because the planner chooses it. The planner may
        also reduce the micro-batch size of a candidate, or enable activation checkpointing.

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
                settings = {**common, **quantized, **batch}
                config = self.config.replaced({"backend": device.backends[0], **settings})
                savings = list_memory_savings(config, num_devices)
                candidates += [settings, *({**settings, **saving} for saving in savings)]
        return candidates

    def iter_device_suggestions(self, device: Device, num_devices: int) -> Iterator[str]:
        """Yield at most two ``--device`` flags that are sufficient for the run.

        The first flag, for example ``--device h100:4``, keeps the type of device and increases the
        number of devices to the smallest sufficient power of two. The number is limited to the size
        of a node or TPU slice, and to :data:`_MAX_SUGGESTED_DEVICES`. The second flag keeps the
        number of devices. It selects the device with the smallest sufficient memory among the
        devices of the same backend. Only devices with more than :data:`_MIN_LARGER_DEVICE_RATIO`
        times the memory are considered. A flag is omitted if no number or no device is sufficient.

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
        """Describe the minimum memory of the run and the usable memory, for an error message."""
        planner, _ = self._build_candidate_planner(
            self.build_candidates(device, num_devices)[-1], device, num_devices
        )
        least, usable = (
            format_bytes(planner.compute_min_device_bytes()),
            format_bytes(device.compute_usable_bytes(num_devices)),
        )
        per_device = "" if num_devices == 1 else " per device"
        return f"at least {least}{per_device}, but can use only {usable}"

    def _fits_cheapest_candidate(self, device: Device, num_devices: int) -> bool:
        """Return whether the run fits with the last of the candidates, which needs the least memory.

        A candidate is a set of settings to try. See :meth:`build_candidates`.
        """
        planner, _ = self._build_candidate_planner(
            self.build_candidates(device, num_devices)[-1], device, num_devices
        )
        return planner.find_best_option(planner.build_options(offloading=False)) is not None

    @property
    def _is_packable(self) -> bool:
        """Whether the search may pack several records into one sequence.

        Packing requires the task ``causal-lm`` and the format ``auto``, ``text`` or ``messages``.
        """
        config = self.config
        return config.model.task == "causal-lm" and config.data.format in ("auto", "text", "messages")

    def _choose_batch_settings(self, device: Device, seq_len: int, num_devices: int) -> dict[str, Any]:
        """Choose the sequence length, packing and batch sizes for the given devices.

        The global batch size of the starter config (the config template of a task) is a number of
        records. The records are packed under three conditions: packing is possible
        (:attr:`_is_packable`), it leaves at least :data:`MIN_USEFUL_STEPS` steps, and the model is
        known to keep packed records separate. The batch size is then divided by the average number
        of records per sequence. Otherwise, the records are padded, and the sequence length is
        reduced to fit the longest record. The length is not reduced below 128, or, for records with
        images, below the starter's sequence length.

        If ``data.packing`` is ``true`` in the starter config, packing and ``seq_len`` are kept, and
        the batch size is reduced if the run would otherwise have too few steps. If the size of the
        data is unknown, both ``seq_len`` and the batch size are kept. In all cases, the batch size
        is rounded up to a multiple of the number of devices.

        Args:
            device: Type of the devices.
            seq_len: Maximum sequence length, in tokens.
            num_devices: Number of devices. The chosen global batch size is a multiple of this
                number.

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
        model, dtype of the trained weights and sequence length.

        Args:
            settings: Settings of the candidate, keyed by dotted key.
            device: Type of device.
            num_devices: Number of devices.
        """
        config, target = choose_target(self.config.replaced(dict(settings)), device, num_devices, notes=False)
        key = (
            config.backend,
            config.precision,
            config.adapter.base,
            config.train.master_dtype,
            config.data.seq_len,
        )
        if key not in self._models:
            self._models[key] = build_model_and_work(config, with_data=False)
        model, work = self._models[key]
        return CandidatePlanner(Planner(config, model, target), work)

    def _estimate_work(self, settings: Mapping[str, Any]) -> TrainingWork | None:
        """Estimate the number of steps and tokens of a run with the given settings.

        Args:
            settings: Sequence length, batch size and other settings that the search tries, keyed by
                dotted key.

        Returns:
            The estimate. None if no records have been read, so that the size of the data is unknown
            or only assumed. Also None if the config gives the length of the run in steps, not in
            ``train.epochs``.
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
        shorter = settings["data.seq_len"] != recipe.settings["data.seq_len"]
        reasons = {
            "a 16-bit base": "adapter.base" not in settings and "adapter.base" in recipe.settings,
            "fp32 weights": "train.master_dtype" in recipe.settings,
            "activations on the device": "memory.offload_activations" in recipe.settings,
            "all gradients at once": "train.fused_backward" in recipe.settings,
            f"sequences of {settings['data.seq_len']} tokens": shorter,
        }
        text = " and ".join(reason for reason, applies in reasons.items() if applies)
        lines.append(f"With {text}, the run would need at least {format_bytes(needed)}.")
    lines += describe_saving_costs(recipe.settings)
    if recipe.estimated_hours is not None and recipe.work is not None:
        low, high = device.reached.mfu_range
        duration = recipe.estimated_hours.format_time("about ")
        lines.append(
            f"Estimated time: {duration} for {recipe.work.steps:,} steps, at {low:.0%} to {high:.0%} of the "
            f"device's peak ({device.reached.source})."
        )
    return lines
