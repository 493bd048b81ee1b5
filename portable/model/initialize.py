"""Compute random initial weights with the same distributions as transformers' ``from_config``.

Small models get exactly the same values as with ``from_config``.
"""

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
"""Maximum size of a model that every rank initializes completely, as transformers does, in bytes. The
weights of a larger model are computed in slices."""


@dataclass
class InitialWeights:
    """Unsharded model on the meta device from which initial weights are computed.

    Attributes:
        model: Model of the run, without an adapter.
        model_function: Import path of the function that has modified the model, from the setting
            ``model.function``. None if this setting is not set.
        recording_failure: Error message if the operations that initialize a large model could not
            be recorded, so that its weights could not be computed lazily. None if there was no
            error.
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
        """Build the initial weights of the model as tensors that can be read in slices.

        The weights depend only on the seed and the model, not on the world size or the strategy. If
        the model has at most ``max_whole_bytes``, all weights are computed immediately and equal
        the weights that ``from_config`` creates after ``torch.manual_seed``. For a larger model,
        the weights have the same distributions but are computed when they are read. Reading a slice
        does not compute the rest of its tensor. Operations that need complete tensors, such as an
        orthogonal initialization, are an exception. If the construction of a larger model cannot
        be recorded, all weights are computed immediately, and ``recording_failure`` is set.

        Args:
            seed: Random seed.
            max_whole_bytes: Maximum size in bytes of a model whose weights are all computed
                immediately.
            min_recorded_elements: Minimum number of elements of a tensor that is computed when it
                is read. Smaller tensors are computed immediately, even in a larger model.

        Returns:
            Tensors, keyed by name.
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
        """Build the model with transformers' initialization, and apply ``model.function``.

        The model is built in fp32. Parameter values that the architecture does not initialize
        become 0. Buffers are not changed. Torch's random state on the CPU is preserved.

        Args:
            seed: Random seed.
            recording: Recording that is active during this call. The large tensors that it records
                have no values yet. None if nothing is recorded, so that all tensors have values.
        """
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
    """Fill the memory of ``torch.empty`` with NaN until the context ends, to find uninitialized parameters.

    Torch does this while deterministic algorithms are enabled. The previous setting is restored
    afterwards.
    """
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
    """Derive an independent seed for the object ``name`` from ``seed``.

    Returns:
        A signed 64-bit integer, which depends only on the arguments.
    """
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
