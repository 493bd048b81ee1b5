"""Initial weights with the values or the distributions of transformers' ``from_config``."""

from __future__ import annotations

import copy
import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from portable.errors import to_one_line
from portable.model.build import apply_model_function
from portable.model.deferred_init import MIN_RECORDED_ELEMENTS, InitializationRecording
from portable.model.parameters import get_state_tensors
from portable.model.weight_sources import ComputedTensor, ReadableTensor
from portable.private.transformers_internals import build_model_from_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

MAX_WHOLE_MODEL_BYTES = 512 << 20
"""Size in bytes up to which every rank initializes the complete model, as transformers does."""


@dataclass
class InitialWeights:
    """Unsharded model on the meta device from which initial weights are computed.

    Attributes:
        model: Model of the run, without an adapter.
        model_function: Import path of ``model.function``, which has modified the model. None if
            ``model.function`` is not set.
        recording_failure: Reason why the initialization of a large model could not be recorded. None if there
            was no failure.
    """

    model: PreTrainedModel
    model_function: str | None = None
    recording_failure: str | None = None

    @classmethod
    def from_model(cls, model: PreTrainedModel, model_function: str | None = None) -> InitialWeights:
        """Build the initial weights from a copy of a model. Later changes of the model do not affect them.

        Args:
            model: The model, on the meta device.
            model_function: Import path of ``model.function``. None if ``model.function`` is not set.
        """
        return cls(copy.deepcopy(model), model_function)

    def build_lazy_weights(
        self,
        seed: int,
        *,
        max_whole_bytes: int = MAX_WHOLE_MODEL_BYTES,
        min_recorded_elements: int = MIN_RECORDED_ELEMENTS,
    ) -> dict[str, ReadableTensor]:
        """Return the weights of ``from_config``, as tensors that are computed when they are read.

        The weights depend only on the seed and the model, not on the world size or the strategy. Up to
        ``max_whole_bytes``, they equal the weights of ``from_config`` after ``torch.manual_seed``. The
        tensors of a larger model have the same distributions, and a slice can be computed without the rest of
        the tensor. If the construction of a model cannot be recorded, all of its weights are computed.

        Args:
            seed: Seed of the random numbers.
            max_whole_bytes: Size in bytes of the largest model whose weights are all computed at once.
            min_recorded_elements: Elements of the smallest tensor of a larger model that is computed in
                slices.

        Returns:
            Lazily read tensors by name.
        """
        size = sum(
            tensor.numel() * tensor.element_size() for tensor in get_state_tensors(self.model).values()
        )
        if size > max_whole_bytes:
            recording = InitializationRecording(seed, min_elements=min_recorded_elements)
            try:
                with recording.record_operations():
                    model = self._build_initialized_model(seed, recording)
                return {
                    name: recording.build_deferred_tensor(t) for name, t in get_state_tensors(model).items()
                }
            except Exception as error:  # an error of the model is raised again below
                self.recording_failure = to_one_line(error)
        return {
            name: ComputedTensor.from_tensor(t)
            for name, t in get_state_tensors(self._build_initialized_model(seed)).items()
        }

    def _build_initialized_model(
        self, seed: int, recording: InitializationRecording | None = None
    ) -> PreTrainedModel:
        """Build the model with transformers' initialization, and apply ``model.function``."""
        with torch.random.fork_rng(devices=[]), _fill_uninitialized_with_nan():
            torch.default_generator.manual_seed(seed)
            model = build_model_from_config(
                type(self.model), copy.deepcopy(self.model.config), dtype=torch.float32
            )
            if self.model_function is not None:
                model = apply_model_function(model, self.model_function)
        for parameter in model.parameters():
            if recording is None or not recording.is_recorded(parameter):
                # Replace the values that the architecture does not initialize.
                parameter.detach().nan_to_num_(nan=0.0)
        return model


@contextmanager
def _fill_uninitialized_with_nan() -> Iterator[None]:
    """Fill uninitialized memory with NaN until the context ends."""
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def derive_named_seed(seed: int, name: str) -> int:
    """Derive a seed from ``seed`` and ``name``, a signed 64-bit integer."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
