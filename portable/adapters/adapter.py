"""Inject the adapter of a run into a model on the meta device, and convert its tensor names.

:func:`inject_adapter` adds peft's modules to the model and returns an :class:`Adapter`. The
:class:`Adapter` converts tensor names between three naming schemes: the base model before the
injection, the model with the adapter, and peft's files.
"""

from __future__ import annotations

import json
import re
import warnings
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from transformers import Conv1D

from portable.adapters.initial import ADAPTER_NAME, TrainedTokenRows, build_initial_values
from portable.adapters.settings import (
    CONFIG_FILE,
    WEIGHTS_FILES,
    build_peft_config,
    find_adapter_weights,
    resolve_adapter_folder,
    to_peft_document,
)
from portable.converters import (
    Checkpoint,
    OptimizerState,
    compute_fingerprint,
    find_adapter,
    open_checkpoint,
)
from portable.converters.adapters.names import PEFT_PREFIX, parse_adapter_name, parse_replaced_name
from portable.converters.adapters.patterns import PatternError, PatternMatcher
from portable.converters.errors import to_printable
from portable.converters.similar_names import find_similar_names
from portable.errors import UserError, require, to_one_line
from portable.model import build as models
from portable.model.freezing import COMPUTE_DTYPES, freeze_parameters, list_frozen_names
from portable.model.initialize import InitialWeights
from portable.model.parameters import get_state_tensors, map_tied_names
from portable.model.pretrained import open_pretrained_checkpoint
from portable.model.quantized_linear import (
    QUANTIZATION_KINDS,
    QuantizedLinear,
    build_lazy_quantized_weight,
    quantize_linear_layers,
)
from portable.model.unused_parameters import (
    get_unreached_names,
    record_unreached_names,
    summarize_as_outermost_modules,
)
from portable.model.weight_sources import to_torch
from portable.paths import convert_checkpoint_errors, write_durably
from portable.private import transformers_internals
from portable.private.bitsandbytes_internals import import_bitsandbytes

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel

    from portable.config import RunConfig
    from portable.converters import Tensor as StoredTensor
    from portable.converters.adapters.adapter import StoredAdapter as StoredAdapter
    from portable.model.weight_sources import ReadableTensor

_TRAINED_COPY, _ORIGINAL = f".modules_to_save.{ADAPTER_NAME}.", ".original_module."
_MAX_SHOWN, _COMPARED_ROWS = 8, 1024
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


class _SourceAdapter(NamedTuple):
    """Existing adapter in ``adapter.name_or_path``, whose values are the run's initial values.

    Attributes:
        folder: Local folder of the adapter.
        adapter: The adapter in the folder, read lazily.
        base_keys: Keys of base model tensors in the same file. peft sometimes saves an unchanged
            embedding or head together with the adapter.
    """

    folder: Path
    adapter: StoredAdapter
    base_keys: list[str]


class Adapter:
    """Adapter of a run.

    It translates tensor names between the model, its base model and peft's files, and provides the
    initial values of the adapter. Created by :func:`inject_adapter`.

    Args:
        run: Config of the run.
        config: peft's config of the adapter.
        blueprint: Initial weights of the base model.
        model: The model with the adapter, on the meta device.
        names: Mapping from the name of a tensor in ``model`` to its name in the base model, before
            peft changed the model. Contains only the tensors whose values come from the base model.
        grown: Whether ``data.added_tokens`` enlarged the vocabulary of the base model.

    Attributes:
        config: peft's config of the adapter.
        blueprint: Initial weights of the base model, recorded on the meta device before peft
            changed the model.
        has_stacked_experts: Whether the adapter changes a parameter with three dimensions, such as the
            stacked weights of all experts of a layer.
        grown_vocab_size: Vocabulary size after tokens were added, or None if none were added.
        notes: Notes for the user, one line each. A note explains why modules were excluded from
            ``all-linear``, or states that peft cannot load the adapter.
    """

    def __init__(
        self,
        run: RunConfig,
        config: Any,
        blueprint: InitialWeights,
        model: PreTrainedModel,
        names: dict[str, str],
        *,
        grown: bool,
    ) -> None:
        from portable.private.peft_internals import is_stack_wrapper

        self.config = config
        self.blueprint = blueprint
        self.notes: list[str] = []
        self.grown_vocab_size = int(model.config.get_text_config().vocab_size) if grown else None
        self._run = run
        self._base_names = names
        self._quantized_layers: dict[str, QuantizedLinear] = {}
        self._initial, self._base_dependent = build_initial_values(model, config, run.seed, names)
        self._saved_names = _map_saved_names(model)
        self._unsaved_patterns = list(transformers_internals.get_unsaved_tensor_names(model) or ())
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self.has_stacked_experts = any(is_stack_wrapper(module) for module in model.modules())

    def quantize_frozen_layers(self, model: PreTrainedModel) -> None:
        """Replace the frozen linear layers of a model with quantized layers.

        ``adapter.base`` sets the format. Only layers of class :class:`torch.nn.Linear` are
        replaced, except the output head, tied layers, and layers whose weights do not have the
        compute dtype. The parameter ``bits`` of a quantized layer replaces the parameter
        ``weight``. Afterwards, :meth:`map_base_weights` returns quantized weights for the quantized
        layers.

        Args:
            model: The model with the adapter, on the meta device. It is changed in place.

        Raises:
            UserError: If no layer can be replaced, or if bitsandbytes is not installed.
        """
        import_bitsandbytes()
        kind, compute = self._run.adapter.base, COMPUTE_DTYPES.get(self._run.precision, torch.float32)
        for name, layer in quantize_linear_layers(model, kind, compute).items():
            self._base_names[f"{name}.bits"] = self._base_names.pop(f"{name}.weight")
            self._quantized_layers[f"{name}.bits"] = layer
        require(
            bool(self._quantized_layers),
            f"adapter.base: {type(model).__name__} has no frozen linear layer that could be "
            f"quantized to {kind}; set adapter.base to auto",
        )

    def map_base_weights(self, weights: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        """Map the base model's weights to their names in the model with the adapter.

        If ``modules_to_save`` contains a module, its trained copy gets the same values as the
        original. The result also contains the adapter tensors that are computed from base weights
        (DoRA's magnitudes and the trainable token rows), unless the run starts from another
        adapter.

        Args:
            weights: Weights of the base model, keyed by their names in the base model. Weights may
                be missing. The weights are read lazily, except the rows of the trainable tokens,
                which are read immediately.

        Returns:
            Weights keyed by their names in the model with the adapter. Tensors whose base weight is
            missing are not included.
        """
        base_weights = {name: weights[base] for name, base in self._base_names.items() if base in weights}
        for name, layer in self._quantized_layers.items():
            if name in base_weights:
                base_weights[name] = build_lazy_quantized_weight(base_weights[name], layer)
        if self._run.adapter.name_or_path is None:
            for name, (lengths, base) in self._base_dependent.items():
                if base in weights:
                    base_weights[name] = lengths.build_tensor(weights[base])
        return base_weights

    def check_missing_base_weights(self, missing: Sequence[str]) -> None:
        """Check that the adapter saves each weight that is missing in the base model's files.

        Missing weights are initialized randomly. If the adapter did not save such a weight, it
        would get different random values each time the adapter is loaded. Weights that transformers
        never saves, such as a table of fixed positions, are not checked.

        Args:
            missing: Names of the missing weights in the base model.

        Raises:
            UserError: If the adapter would not save one of the weights.
        """
        stored_names = {base for name, base in self._base_names.items() if name in self._saved_names}
        lost_names = [
            name
            for name in missing
            if name not in stored_names and not any(re.search(key, name) for key in self._unsaved_patterns)
        ]
        if lost_names:
            module = find_outermost_module(lost_names[0], set(self._base_names.values()) - set(missing))
            remedy = (
                f"add {module} to adapter.modules_to_save"
                if module
                else "move the parameter into a module that adapter.modules_to_save contains"
            )
            raise UserError(
                f"adapter: the base model {self._run.model.name_or_path} does not contain {lost_names[0]}, "
                "so this weight would be initialized randomly, but the adapter would not save it; "
                f"{remedy}, or use another base model"
            )

    def get_initial_values(self, base_weights: Mapping[str, ReadableTensor]) -> Mapping[str, ReadableTensor]:
        """Return the initial values of the tensors that the adapter adds, by parameter name.

        If ``adapter.name_or_path`` is set, the values are read from its files, and all values are
        read once in advance to check them. Otherwise, peft initializes each layer when the values
        of the layer are read. For LoRA, ``adapter.init`` selects the initialization. The seed of a
        layer depends on the seed of the run and the name of the layer. Values that are computed
        from base weights are not included; :meth:`map_base_weights` returns them.

        Args:
            base_weights: Weights in the files of the base model, keyed by name. If the files of
                ``adapter.name_or_path`` contain copies of base weights, the copies are compared
                with these weights.

        Raises:
            UserError: If the adapter ``adapter.name_or_path`` cannot be read or does not fit the
                model.
        """
        return (
            self._initial
            if self._run.adapter.name_or_path is None
            else self._read_initial_values(base_weights)
        )

    @cached_property
    def _source_adapter(self) -> _SourceAdapter:
        """The adapter in ``adapter.name_or_path``. The first access downloads it and reads its headers.

        Raises:
            UserError: If the folder does not contain an adapter, or if its tensors do not match the model.
        """
        folder = resolve_adapter_folder(str(self._run.adapter.name_or_path))
        with convert_checkpoint_errors("adapter.name_or_path"):
            stored_adapter = find_adapter(open_checkpoint(find_adapter_weights(folder)))
        require(
            stored_adapter is not None,
            f"adapter.name_or_path: {folder} contains no adapter; use a folder that contains {CONFIG_FILE} "
            f"and {WEIGHTS_FILES[0]}",
        )
        assert stored_adapter is not None
        tensors = stored_adapter.checkpoint.tensors
        missing_keys = sorted(self._saved_names.values() - tensors.keys())
        unknown_keys = sorted(tensors.keys() - self._saved_names.values())
        # peft also saves the base weight of an adapted embedding or head, because the vocabulary may have
        # been resized.
        of_base = [
            key for key in unknown_keys if parse_replaced_name(key).replaced_name in self._base_names.values()
        ]
        unknown_keys = [to_printable(key) for key in unknown_keys if key not in of_base]
        if missing_keys:
            raise UserError(
                f"adapter.name_or_path: {folder} does not contain the tensor {missing_keys[0]}, which an "
                "adapter of this model needs; use an adapter that was trained on this model"
            )
        if unknown_keys:
            raise UserError(
                f"adapter.name_or_path: {folder} contains the tensor {unknown_keys[0]}, which does not "
                "belong to an adapter of this model; use an adapter that was trained on this model"
            )
        for name, key in self._saved_names.items():
            require(
                tuple(tensors[key].shape) == self._shapes[name] and tensors[key].dtype in _FLOAT_DTYPES,
                f"adapter.name_or_path: {folder}: {key} has shape {list(tensors[key].shape)} and dtype "
                f"{tensors[key].dtype}, but the model needs floating-point values of shape "
                f"{list(self._shapes[name])}; use an adapter that was trained on this model",
            )
        return _SourceAdapter(folder, stored_adapter, of_base)

    def check_source_adapter(self) -> None:
        """Check the headers of the source adapter. Does nothing if ``adapter.name_or_path`` is not set.

        Call this before memory is allocated, so that errors are reported early.

        Raises:
            UserError: If the adapter cannot be read or does not fit the model.
        """
        if self._run.adapter.name_or_path is not None:
            self._source_adapter  # noqa: B018  (not an assert, which python -O would remove)

    def _read_initial_values(self, base_weights: Mapping[str, ReadableTensor]) -> dict[str, ReadableTensor]:
        """Check the adapter in ``adapter.name_or_path``, and return its tensors.

        The check reads all values, which must be finite. If the files of this adapter also contain
        copies of base model tensors, the copies must equal ``base_weights``.

        Returns:
            The tensors of the adapter, keyed by parameter name.

        Raises:
            UserError: If the check fails.
        """
        folder, stored_adapter, of_base = self._source_adapter
        with convert_checkpoint_errors("adapter.name_or_path"):
            stored_adapter.digest  # noqa: B018  (refuses NaN and infinity, and what is damaged)
        tensors = stored_adapter.checkpoint.tensors
        for key in of_base:
            name, model = parse_replaced_name(key).replaced_name, self._run.model.name_or_path
            require(
                _have_equal_values(base_weights.get(name), tensors[key]),
                f"adapter.name_or_path: {folder} contains a copy of {name} that differs from {name} in the "
                f"base model {model}; merge the adapter with portable-convert {folder} OUT --merge-into "
                f"{model}, remove adapter.name_or_path, and set model.name_or_path to OUT",
            )
        return {name: tensors[key] for name, key in self._saved_names.items()}

    @property
    def saved_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trained tensors, keyed by their names in peft's files."""
        return {saved: tuple(self._shapes[name]) for name, saved in self._saved_names.items()}

    @property
    def saved_names(self) -> list[str]:
        """Names of the trained tensors in the adapter files that peft writes, in model order."""
        return list(self._saved_names.values())

    @property
    def largest_rank(self) -> int:
        """Largest LoRA rank in peft's config: ``r``, or a larger value in ``rank_pattern``.

        peft uses twice the rank for some modules, such as a stacked gate and up projection, and lists their
        rank in ``rank_pattern``.
        """
        ranks: list[int] = [self.config.r, *self.config.rank_pattern.values()]
        return max(ranks)

    @property
    def has_nested_wrappers(self) -> bool:
        """Whether the adapter changes several parameters of a module.

        peft wraps such a module in nested layers, one for each parameter. For example, the experts
        of a mixture-of-experts layer are stacked in two parameters of one module. False if the
        adapter changes only one parameter of each module.
        """
        return any(".base_layer.lora_" in name for name in self.saved_names)

    def map_foreign_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint:
        """Rename the adapter tensors in another trainer's checkpoint to names in the model.

        Args:
            checkpoint: Checkpoint in any supported format, for example a checkpoint of TRL's
                trainer.

        Returns:
            A checkpoint that contains only the adapter's tensors and optimizer state, read lazily.

        Raises:
            UserError: If the checkpoint does not contain an adapter. For LoRA, also if the names or
                shapes of its LoRA tensors differ from this run, or if ``lora_alpha``,
                ``use_rslora``, ``use_dora``, ``rank_pattern`` or ``alpha_pattern`` differs. Other
                settings are not compared.
            RunError: If the object store is unavailable.
        """
        with convert_checkpoint_errors("checkpoint.resume"):
            stored_adapter = find_adapter(checkpoint)
        if stored_adapter is None:
            raise UserError(
                f"checkpoint.resume: {checkpoint.root} contains no adapter; use a checkpoint that "
                "contains an adapter, or remove adapter.type to train all weights"
            )
        ours = {"alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
        ours |= {name: name for name in ("rank_pattern", "alpha_pattern")}
        for theirs, name in ours.items() if self._run.adapter.type == "lora" else ():
            saved_value, run_value = getattr(stored_adapter.config, theirs), getattr(self.config, name)
            require(
                saved_value == run_value,
                f"checkpoint.resume: {checkpoint.root} was trained with {name}: {saved_value}, but this run "
                f"has {name}: {run_value}; set adapter.config to the adapter_config.json of the checkpoint",
            )
        live_names = {saved: name for name, saved in self._saved_names.items()}
        adapter = stored_adapter.checkpoint
        shapes = {name: tuple(tensor.shape) for name, tensor in adapter.tensors.items()}
        mismatched_names = sorted(
            name for name, shape in {*shapes.items()} ^ {*self.saved_shapes.items()} if ".lora_" in name
        )
        mismatched_name = to_printable(next(iter(mismatched_names), ""))
        require(
            not mismatched_names,
            f"checkpoint.resume: {checkpoint.root} was trained with different target_modules or a different "
            f"r from this run ({mismatched_name} differs); set adapter.config to the adapter_config.json of "
            "the checkpoint",
        )

        def open_optimizer(_: Any) -> OptimizerState | None:
            state = adapter.optimizer
            if state is None:
                return None
            groups = [
                {**group, "params": [live_names.get(name, name) for name in group["params"]]}
                for group in state.param_groups
            ]
            return OptimizerState({live_names.get(name, name): v for name, v in state.state.items()}, groups)

        return Checkpoint(
            format=adapter.format,
            root=adapter.root,
            tensors={live_names.get(saved, saved): tensor for saved, tensor in adapter.tensors.items()},
            optimizer=open_optimizer,
            metadata=adapter.metadata,
            companions=adapter.companions,
            counters=lambda: checkpoint.counters,
        )

    @cached_property
    def identity(self) -> dict[str, Any]:
        """JSON-serializable settings of the adapter, with a fingerprint of the base model.

        The settings do not include the path and revision of the base model, so the base model can
        be moved. The fingerprint is None if the base model has random weights. Each checkpoint
        records this identity, and :meth:`check_stored_identity` compares it when a run resumes.
        """
        values = to_peft_document(self.config)
        for name in ("base_model_name_or_path", "revision", "peft_version", "inference_mode"):
            values.pop(name, None)
        base = self.base_checkpoint
        return {"config": values, "base": None if base is None else compute_fingerprint(base)}

    @cached_property
    def base_checkpoint(self) -> Checkpoint | None:
        """Checkpoint of the base model. Quantized weights are dequantized to bfloat16.

        None if the base model has random weights. Random weights depend only on the seed, so there
        are no files to open.

        Raises:
            UserError: If the files cannot be read.
        """
        settings = self._run.model
        if settings.from_scratch:
            return None
        return open_pretrained_checkpoint(settings, "bfloat16")

    def write_config(self, folder: Path) -> None:
        """Write ``adapter_config.json`` to ``folder`` in peft's format."""
        text = json.dumps(to_peft_document(self.config), indent=2, sort_keys=True)
        write_durably(folder / CONFIG_FILE, text + "\n")

    def check_stored_identity(self, stored_identity: Any, source: object) -> None:
        """Check that a checkpoint belongs to this adapter and its base model.

        Settings that the checkpoint did not record are not compared.

        Args:
            stored_identity: The :attr:`identity` that the checkpoint recorded.
            source: Path of the checkpoint, used in error messages.

        Raises:
            UserError: If the checkpoint does not contain an adapter, or if the base model or a
                setting differs.
        """
        require(
            isinstance(stored_identity, dict),
            f"checkpoint.resume: {source} contains no adapter, but adapter.type is set; remove adapter.type "
            "to resume, or choose another output_dir to train an adapter",
        )
        require(
            stored_identity.get("base") == self.identity["base"],
            f"checkpoint.resume: the adapter in {source} was trained on a base model with different weights; "
            "set model.name_or_path to the base model that the adapter was trained on",
        )
        stored_config, run_config = stored_identity.get("config"), self.identity["config"]
        stored_config = stored_config if isinstance(stored_config, dict) else {}
        changed = [
            name for name in run_config if run_config[name] != stored_config.get(name, run_config[name])
        ]
        base = self._run.model.name_or_path
        remedy = "restore the values, or choose another output_dir"
        if base is not None and {"target_modules", "exclude_modules"}.intersection(changed):
            remedy += (
                f"; to continue from these weights, merge the adapter with portable-convert {source} OUT "
                f"--merge-into {base}, and set model.name_or_path to OUT"
            )
        require(
            not changed,
            f"checkpoint.resume: {source} was trained with different values of these adapter settings: "
            f"{', '.join(changed)}; {remedy}",
        )


def build_training_model(model_config: PretrainedConfig, config: RunConfig) -> PreTrainedModel:
    """Build the run's model on the meta device, and inject the adapter if there is one.

    The vocabulary size is the value in ``model_config``. Unlike
    :func:`portable.adapters.assemble.assemble_model`, this function does not enlarge the vocabulary
    for ``data.added_tokens``, and does not check the settings of the data and of the parallelism.

    Args:
        model_config: Transformers config of the model. ``model.function`` may change it in place.
        config: Config of the run.

    Raises:
        UserError: If the model cannot be built, or if it does not support the adapter.
    """
    model = models.build_and_freeze_model(model_config, config)
    if config.adapter.type is not None:
        inject_adapter(model, model_config, config)
    return model


def inject_adapter(
    model: PreTrainedModel,
    model_config: PretrainedConfig,
    config: RunConfig,
    grown_from: int | None = None,
) -> Adapter:
    """Inject the run's adapter into a model on the meta device, and freeze the other weights.

    peft replaces the adapted modules with its own layers; the class of the model does not change.
    Trained weights are fp32. Frozen weights are cast to the dtype ``adapter.base``, except weights that
    transformers keeps in fp32. If ``adapter.base`` is a quantized format, the frozen linear layers are
    quantized.

    Args:
        model: The base model on the meta device. It is changed in place.
        model_config: Transformers config of the base model.
        config: Config of the run.
        grown_from: Vocabulary size before ``data.added_tokens`` enlarged it. None if it did not change.

    Returns:
        The adapter, which converts names and provides initial values.

    Raises:
        UserError: If a setting of the section ``adapter`` does not fit the model.
    """
    from portable.private.peft_internals import is_dora_magnitude_layer, peft, use_pattern_matcher

    heads = _list_head_modules(model) if config.model.task == "sequence-classification" else []
    settings = build_peft_config(config, transformers_internals.get_commit_hash(model_config), heads)
    matcher = PatternMatcher()
    notes = _exclude_from_all_linear(model, settings, config)
    _resolve_target_names(model, settings, config, matcher)
    _check_tied_modules(model, settings, matcher)
    tied = any(map_tied_names(model).values())
    blueprint = InitialWeights.from_model(model, config.model.function)
    base_names_by_id = {id(tensor): name for name, tensor in get_state_tensors(model).items()}
    try:
        # Create the tensors on the meta device. Otherwise peft would first allocate them on the CPU.
        with _ignore_peft_warnings(), use_pattern_matcher(matcher), torch.device("meta"):
            peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER_NAME, low_cpu_mem_usage=True)
    except (ValueError, TypeError, NotImplementedError, AttributeError) as error:
        reason = to_one_line(error).rstrip(".")
        raise UserError(
            f"adapter: peft cannot add the adapter to {type(model).__name__} ({reason}); change the settings "
            "in the adapter section"
        ) from error
    _prepare_trained_tokens(model, tied, grown_from)
    transformers_internals.require_reformer_input_gradients(model)
    names = _map_base_names(model, base_names_by_id)
    _mark_unreached_with_adapters(model, names)
    adapter = Adapter(config, settings, blueprint, model, names, grown=grown_from is not None)
    adapter.notes = notes
    _cast_frozen_weights(model, names, _choose_frozen_dtype(config))
    if config.adapter.base in QUANTIZATION_KINDS:
        adapter.quantize_frozen_layers(model)
    for module in model.modules():
        if is_dora_magnitude_layer(module):
            module.get_lora_weight = _compute_lora_update
    for name, (lengths, _) in adapter._base_dependent.items():
        if isinstance(lengths, TrainedTokenRows):
            continue
        lengths.dtype = model.get_submodule(name.partition(".lora_magnitude_vector.")[0]).weight.dtype
    return adapter


def _have_equal_values(base_weight: ReadableTensor | None, stored: StoredTensor) -> bool:
    """Return whether a stored tensor has the same shape and values as a base weight.

    Compares 1024 rows at a time, converted to fp32, so the dtypes may differ. Returns False if
    there is no base weight, or if the stored tensor is not a float tensor.
    """
    if (
        base_weight is None
        or tuple(base_weight.shape) != tuple(stored.shape)
        or stored.dtype not in _FLOAT_DTYPES
    ):
        return False
    rest = tuple(slice(0, size) for size in base_weight.shape[1:])
    parts = [
        (slice(start, min(start + _COMPARED_ROWS, base_weight.shape[0])), *rest)
        for start in range(0, base_weight.shape[0], _COMPARED_ROWS)
    ]
    return all(
        torch.equal(to_torch(base_weight.read(p)).float(), to_torch(stored.read(p)).float()) for p in parts
    )


def _compute_lora_update(**layers: Any) -> Tensor:
    """Compute ``lora_B @ lora_A``, the update that DoRA adds to a weight.

    Replaces the method ``get_lora_weight`` of peft's ``DoraLinearLayer``. So that FSDP1's hooks
    run, the original method passes an identity matrix ``[inputs, inputs]`` through ``lora_A`` and
    ``lora_B``. The identity matrix can be larger than the layer itself.

    Args:
        layers: The modules ``lora_A`` and ``lora_B``, passed by name. Other arguments are ignored.
    """
    product: Tensor = layers["lora_B"].weight @ layers["lora_A"].weight
    return product


@contextmanager
def _ignore_peft_warnings() -> Iterator[None]:
    """Suppress all Python warnings in this context.

    peft warns about problems that this module handles itself.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- adapted modules -----------------------------------------------------------------------------------------


def _list_head_modules(model: PreTrainedModel) -> list[str]:
    """List the modules outside the base model, such as the head of a classifier.

    These modules are trained in full, because a checkpoint of the base model may lack their weights.
    The list is empty if the model has no separate base model.
    """
    names = [
        name
        for name, module in model.named_children()
        if name != model.base_model_prefix and next(module.parameters(), None) is not None
    ]
    return names if model.base_model_prefix in dict(model.named_children()) else []


def _exclude_from_all_linear(model: PreTrainedModel, settings: Any, config: RunConfig) -> list[str]:
    """Exclude from ``all-linear`` the modules that cannot be adapted or do not process text.

    An adapter cannot change tied modules, modules whose output is not linear, and modules that peft
    does not support. Modules are also excluded if peft cannot load their adapter tensors, because
    it renames the tensors. If this would exclude all remaining modules, they are kept, and a note
    warns the user. Modifies ``target_modules`` and ``exclude_modules`` of ``settings`` in place.
    Does nothing if ``target_modules`` is not ``all-linear`` or if the adapter is defined by a file
    in peft's format.

    Args:
        model: The model on the meta device.
        settings: peft's config.
        config: Config of the run.

    Returns:
        Notes for the user about the excluded modules, and about an adapter that peft cannot load.

    Raises:
        UserError: If no module is left to adapt.
    """
    from portable.private.peft_internals import find_renamed_tensors, is_target_module_rejected

    in_peft_format = config.adapter.name_or_path is not None or config.adapter.config is not None
    targets = settings.target_modules
    if in_peft_format or not isinstance(targets, str) or targets.lower() != "all-linear":
        return []
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    unreached = get_unreached_names(model)
    unreached_weights = [f"{name}.weight" for name in linear if f"{name}.weight" in unreached]
    rejected = sorted(
        {last for last in _list_last_components(linear) if is_target_module_rejected(settings, model, last)}
    )
    patterns, notes = [], []
    if unreached_weights:
        parts = [
            part
            for part in summarize_as_outermost_modules(model, unreached, keep_base_prefix=True)
            if _contains_any(part, unreached_weights)
        ]
        patterns += [_build_name_pattern(part) + r"(\..*)?" for part in parts]
        shown = ", ".join(part.removeprefix(f"{model.base_model_prefix}.") for part in parts)
        notes.append(
            f"adapter.target_modules: all-linear excludes {shown}, because these modules do not "
            "process text; list module names in adapter.target_modules to adapt them"
        )
    head = model.get_output_embeddings()  # peft excludes the head from all-linear
    candidates = [
        name for name in linear if f"{name}.weight" not in unreached and model.get_submodule(name) is not head
    ]
    tied = _find_tied_weights(model)
    shared = [name for name in candidates if f"{name}.weight" in tied]
    if shared:
        patterns += [re.escape(name) for name in shared]
        notes.append(
            f"adapter.target_modules: all-linear excludes {', '.join(_list_last_components(shared))}, "
            "because their weights are tied to other modules, which an adapter would leave unchanged"
        )
        candidates = [name for name in candidates if name not in shared]
    custom = _list_last_components(
        [name for name in candidates if not _has_linear_output(model.get_submodule(name))]
    )
    if custom:
        patterns += [rf"(.*\.)?{re.escape(name)}" for name in custom]
        notes.append(
            f"adapter.target_modules: all-linear excludes {', '.join(custom)}, because LoRA cannot adapt "
            "these modules: their output differs from the output of a linear layer"
        )
    adaptable = [name for name in candidates if name.rpartition(".")[2] not in (*custom, *rejected)]
    files = {f"{PEFT_PREFIX}{name}.lora_A.weight": name for name in adaptable}
    renamed = [files[key] for key in find_renamed_tensors(settings, model, files)]
    if len(renamed) < len(adaptable):
        patterns += [re.escape(name) for name in renamed]
        excluded = ", ".join(sorted({".".join(name.split(".")[-2:]) for name in renamed}))
        notes += renamed and [
            f"adapter.target_modules: all-linear excludes {excluded}, because peft cannot load adapters of "
            f"these modules into models of type {model.config.model_type}"
        ]
    else:
        notes += renamed and [
            f"adapter: peft cannot load adapters into models of type {model.config.model_type}, because peft "
            "renames the modules of these models; set checkpoint.export: merged to export the merged model"
        ]
    if rejected:
        patterns += [rf"(.*\.)?{re.escape(name)}" for name in rejected]
        notes.append(
            f"adapter.target_modules: all-linear excludes {', '.join(rejected)}, because peft does not "
            f"support these modules in models of type {model.config.model_type}"
        )
    saved = tuple(settings.modules_to_save or ())
    adapted = [name for name in candidates if not any(f".{module}." in f".{name}." for module in saved)]
    if (
        not set(_list_last_components(adapted)).difference(custom, rejected)
        and not settings.target_parameters
    ):
        raise UserError(
            f"adapter.target_modules: all-linear matches no module of {type(model).__name__}; list the "
            "names of the modules to adapt, or remove adapter.type to train the complete model"
        )
    if patterns:
        settings.exclude_modules = "|".join(patterns)
    if any(name.rpartition(".")[2].isdigit() for name in linear) and config.adapter.layers is None:
        # List the full names of the modules. Otherwise, peft would adapt every module with the same last
        # component, which is only a layer index here.
        excludes = re.compile(settings.exclude_modules or "$^").fullmatch
        settings.target_modules = {
            name for name in linear if not excludes(name) and model.get_submodule(name) is not head
        }
        settings.exclude_modules = None
    return notes


def _has_linear_output(module: Any) -> bool:
    """Return whether a linear module returns a tensor ``[..., out_features]``, as LoRA requires.

    Runs modules with a custom ``forward`` on the meta device, and returns False if that fails.
    """
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    inputs = torch.empty(1, 2, module.in_features, device="meta", dtype=module.weight.dtype)
    try:
        with torch.no_grad():
            output = module(inputs)
    except Exception:  # an unknown module may raise any exception
        return False
    return isinstance(output, torch.Tensor) and output.shape == (1, 2, module.out_features)


def _find_tied_weights(model: PreTrainedModel) -> set[str]:
    """Find the names of weights that modules of different kinds share, such as embedding and head.

    An adapter for such a weight would change only one of the modules, so the modules would no
    longer have equal weights.

    A weight is not included if all modules that share it have the same name except for numbers,
    such as the layer number. For example, Zamba uses the weights of one layer at several depths.
    Each of these layers gets its own adapter.
    """
    groups = [{first, *others} for first, others in map_tied_names(model).items() if others]
    return {
        name for group in groups if len({re.sub(r"\d+", "*", name) for name in group}) > 1 for name in group
    }


def _build_name_pattern(part: str) -> str:
    """Convert a name returned by :func:`summarize_as_outermost_modules` to a regular expression.

    The ``*`` in the name matches any layer number.
    """
    return re.escape(part).replace(r"\*", r"\d+")


def _contains_any(part: str, names: list[str]) -> bool:
    """Return whether a module contains one of the given parameters.

    Args:
        part: Module name returned by :func:`summarize_as_outermost_modules`. ``*`` matches any layer
            number.
        names: Names of parameters.
    """
    pattern = re.compile(_build_name_pattern(part) + r"(\..*)?")
    return any(pattern.fullmatch(name) for name in names)


def _mark_unreached_with_adapters(model: PreTrainedModel, base_names: Mapping[str, str]) -> None:
    """Update the record of the parameters that never receive a gradient.

    This is necessary after an adapter is injected, because the injection renames parameters and
    adds new ones. If a module never runs, its adapter receives no gradient either. See
    :func:`record_unreached_names`.

    Args:
        model: The model with the adapter.
        base_names: Tensor names in the base model before the injection, keyed by the names in
            ``model``.
    """
    before = get_unreached_names(model)
    unreached = {name for name, base in base_names.items() if base in before}
    wrapped_modules = {name.partition(".base_layer.")[0] for name in unreached if ".base_layer." in name}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and any(name.startswith(f"{prefix}.") for prefix in wrapped_modules):
            unreached.add(name)
    record_unreached_names(model, frozenset(unreached))


def _resolve_target_names(
    model: PreTrainedModel, settings: Any, run_config: RunConfig, matcher: PatternMatcher
) -> None:
    """Check that the names in ``settings`` exist, and apply ``adapter.layers``.

    peft accepts layer numbers only with a list of module names. Therefore, if both ``all-linear``
    and ``adapter.layers`` are set, this function sets ``target_modules`` to the linear modules in
    these layers, and ``exclude_modules`` to None.

    A file in peft's format is often written for several models. If such a file defines the adapter,
    a list of target names is accepted if one name exists, and ``modules_to_save`` is not checked.

    Args:
        model: The base model on the meta device.
        settings: peft's config.
        run_config: Config of the run.
        matcher: Matcher for a regular expression in ``target_modules``.

    Raises:
        UserError: If a name or a regular expression does not match any module or parameter of the
            model, or if ``adapter.layers`` cannot be applied. Also raised if ``adapter.init`` is
            ``orthogonal`` and ``adapter.target_parameters`` is set.
    """
    layers = run_config.adapter.layers
    in_peft_format = run_config.adapter.name_or_path is not None or run_config.adapter.config is not None
    modules = [name for name, _ in model.named_modules() if name]
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)]
    targets = settings.target_modules
    if isinstance(targets, str) and targets.lower() == "all-linear":
        if layers is not None:  # peft accepts layer numbers only together with a list of names
            excluded = re.compile(settings.exclude_modules or "$^")
            settings.target_modules = {
                name for name in linear if _parse_layer_index(name) in layers and not excluded.fullmatch(name)
            }
            settings.exclude_modules = None
            require(
                bool(settings.target_modules),
                f"adapter.layers: the layers {list(layers)} have no linear modules; use the indices of "
                "existing layers, counted from 0",
            )
    elif isinstance(targets, str):
        require(
            layers is None,
            "adapter.layers: does not work with a regular expression in adapter.target_modules; remove "
            "adapter.layers, and make the regular expression match only the modules of these layers",
        )
        try:
            matches = [name for name in modules if matcher.fullmatch(targets, name)]
        except PatternError as error:
            raise UserError(f"adapter.target_modules: {to_one_line(error)}") from error
        names = [name.strip() for name in targets.split(",")]
        if targets == "all":
            remedy = "set adapter.target_modules: all-linear to adapt every linear module"
        elif set(names) <= set(_list_last_components(linear)):
            remedy = f"write the names as a list: [{', '.join(names)}]"
        else:
            remedy = (
                f"use a list of names, such as [{_list_last_components(linear)[0] if linear else 'q_proj'}]"
            )
        require(
            bool(matches) or bool(getattr(settings, "target_parameters", None)),
            f"adapter.target_modules: the regular expression {targets!r} matches no complete module name; "
            f"the linear modules are {_format_last_components(linear)}; {remedy}",
        )
    else:
        _check_names_exist(
            "target_modules", targets or (), modules, linear, any_match_suffices=in_peft_format
        )
    if not in_peft_format:
        _check_names_exist("modules_to_save", settings.modules_to_save or (), modules, modules)
    parameters = [name for name, p in model.named_parameters() if p.dim() in (2, 3)]
    chosen = getattr(settings, "target_parameters", None) or ()
    _check_names_exist("target_parameters", chosen, parameters, parameters, any_match_suffices=in_peft_format)
    if chosen and layers is not None:
        raise UserError(
            "adapter.layers: does not work with adapter.target_parameters; remove adapter.layers or "
            "adapter.target_parameters"
        )
    if chosen and getattr(settings, "init_lora_weights", None) == "orthogonal":
        raise UserError(
            "adapter.init: orthogonal does not work with adapter.target_parameters; remove adapter.init or "
            "adapter.target_parameters"
        )


def _parse_layer_index(name: str) -> int | None:
    """Parse the layer index in a module name, such as 3 in ``model.layers.3.mlp``. None if there is none."""
    match = re.match(r".*?\.[^.]*\.(\d+)\.", f".{name}")
    return None if match is None else int(match[1])


def _check_names_exist(
    key: str,
    requested_names: Any,
    module_names: list[str],
    suggested: list[str],
    *,
    any_match_suffices: bool = False,
) -> None:
    """Check that each requested name exists in the model. Raises UserError otherwise.

    A requested name exists if it is a full name or the last components of a full name. For example,
    ``q_proj`` and ``self_attn.q_proj`` match ``model.layers.0.self_attn.q_proj``, but ``proj`` does
    not.

    Args:
        key: Setting in the section ``adapter`` that contains the names, used in error messages.
        requested_names: Names to check.
        module_names: Full names of the modules or parameters in the model.
        suggested: Full names from which the message suggests alternatives.
        any_match_suffices: Whether one matching name is sufficient.
    """
    missing_names = [
        name
        for name in sorted(requested_names)
        if not any(candidate == name or candidate.endswith(f".{name}") for candidate in module_names)
    ]
    if not any_match_suffices or len(missing_names) == len(requested_names):
        for name in missing_names:
            tails = {".".join(candidate.split(".")[-depth:]) for candidate in suggested for depth in (1, 2)}
            tails = {tail for tail in tails if not tail.isdigit()}
            similar_names = find_similar_names(name, sorted(tails), max_results=3)
            kind = "parameter" if key == "target_parameters" else "module"
            named = [candidate for candidate in suggested if not candidate.rpartition(".")[2].isdigit()]
            valid_names = ", ".join(similar_names) or _format_last_components(named)
            raise UserError(
                f"adapter.{key}: the model has no {kind} named {name}; use a valid name, such as "
                f"{valid_names}"
            )


def _list_last_components(names: list[str]) -> list[str]:
    """Return the distinct last components of module names, such as ``q_proj``, sorted."""
    return sorted({name.rpartition(".")[2] for name in names})


def _format_last_components(names: list[str]) -> str:
    """Format the distinct last components of module names for an error message. Shows at most eight."""
    tails = _list_last_components(names)
    more = f" and {len(tails) - _MAX_SHOWN} more" if len(tails) > _MAX_SHOWN else ""
    return ", ".join(tails[:_MAX_SHOWN]) + more


def _check_tied_modules(model: PreTrainedModel, settings: Any, matcher: PatternMatcher) -> None:
    """Raise UserError if the adapter contains a tied module that it cannot train.

    ``modules_to_save`` must not contain a tied module, and ``target_modules`` must not contain an
    output head that is tied to the embedding. The tied embedding itself is accepted in
    ``target_modules``.

    Args:
        model: The base model on the meta device.
        settings: peft's config.
        matcher: Matcher for a regular expression in ``target_modules``.
    """
    tied = {name: others for name, others in map_tied_names(model).items() if others}
    tied_modules = {n.rpartition(".")[0] for first, others in tied.items() for n in (first, *others)}
    for name in sorted(settings.modules_to_save or ()):
        for tied_module in tied_modules:
            if tied_module == name or f".{tied_module}.".find(f".{name}.") >= 0:
                raise UserError(
                    f"adapter.modules_to_save: the weights of {name} are tied to another module, but the "
                    f"trained copy would not be tied; remove {name} from adapter.modules_to_save, and train "
                    "rows of both modules with adapter.trainable_token_indices"
                )
    targets = settings.target_modules
    head: Any = model.get_output_embeddings()
    for name in sorted(tied_modules):
        module = model.get_submodule(name)
        if module is not head or not isinstance(module, nn.Linear):
            continue
        is_targeted = (
            targets.lower() != "all-linear" and matcher.fullmatch(targets, name)
            if isinstance(targets, str)
            else any(name == target or name.endswith(f".{target}") for target in targets or ())
        )
        if is_targeted:
            raise UserError(
                f"adapter.target_modules: the weights of {name} are tied to the embedding; remove {name} "
                "from adapter.target_modules, or use a model with tie_word_embeddings: false"
            )


def _prepare_trained_tokens(model: PreTrainedModel, tied: bool, num_base_rows: int | None) -> None:
    """Check ``trainable_token_indices``, and speed up peft's lookup of the trained rows.

    peft copies the row indices to the device in each forward pass, and this causes a host sync.
    Therefore, :class:`_TableWithTrainedRows` replaces the method ``get_merged_weights``. peft's
    copy of the original rows (``trainable_tokens_original``) is dropped.

    Args:
        model: The model with the adapter.
        tied: Whether the base model has tied weights, which determines the advice in an error
            message.
        num_base_rows: Vocabulary size before ``data.added_tokens``, or None if no tokens were
            added.

    Raises:
        UserError: If a token is not in the vocabulary or is listed twice, or if the adapter would
            not save the rows of added tokens.
    """
    trained: dict[str, list[int]] = {}
    layers: list[tuple[str, Any]] = [*model.named_modules()]
    for name, layer in layers:
        if hasattr(layer, "trainable_tokens_delta"):
            layer.trainable_tokens_original = nn.ParameterDict()  # drop peft's second copy of the rows
            layer.get_merged_weights = _TableWithTrainedRows(layer)
            table, count = name.removesuffix(".token_adapter"), layer.base_layer.weight.shape[0]
            trained[table] = tokens = layer.token_indices[ADAPTER_NAME]
            require(
                max(tokens) < count and len(set(tokens)) == len(tokens),
                f"adapter.trainable_token_indices: the token ids for {table} are {tokens}, but each id must "
                f"occur once and be at most {count - 1}; correct the ids",
            )
    if num_base_rows is None:
        return
    new = list(range(num_base_rows, model.config.get_text_config().vocab_size))
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {name: layer for name, layer in layers if any(layer is table for table in tables)}
    lost_tables = [
        name
        for name, layer in names.items()
        if not (hasattr(layer, "modules_to_save") or {*new} <= {*trained.get(name, ())})
    ]
    modules_to_save = ", ".join(name.rpartition(".")[2] for name in names)
    remedy = (
        f"set adapter.trainable_token_indices: {new}"
        if tied
        else f"set adapter.modules_to_save: [{modules_to_save}]"
    )
    require(
        not lost_tables,
        f"data.added_tokens: adds rows to {' and '.join(names)}, but the adapter would not save these rows; "
        f"{remedy}",
    )


class _TableWithTrainedRows:
    """Callable that returns a peft layer's embedding table, with the trained rows inserted.

    It replaces the layer's method ``get_merged_weights``, which copies the row indices to the device in
    each forward pass. This class keeps the indices on the device.

    Args:
        module: Layer of peft with ``trainable_tokens_delta``.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._row_indices: dict[torch.device, Tensor] = {}

    def __call__(self, active: Sequence[str]) -> Tensor:
        table: Tensor = self._module.base_layer.weight
        for name in active:
            if table.device not in self._row_indices:
                self._row_indices[table.device] = torch.tensor(
                    self._module.token_indices[name], device=table.device
                )
            rows = self._module.trainable_tokens_delta[name].to(table.dtype)
            table = table.index_copy(0, self._row_indices[table.device], rows)
        return table


# -- names ---------------------------------------------------------------------------------------------------


def find_outermost_module(name: str, other_names: Collection[str]) -> str:
    """Find the outermost module that contains a parameter but none of the parameters to exclude.

    Args:
        name: Name of the parameter.
        other_names: Names of the parameters to exclude.

    Returns:
        Name of the module. Empty if each module that contains the parameter also contains one of
        ``other_names``.
    """
    components = name.split(".")[:-1]
    for depth in range(1, len(components) + 1):
        module = ".".join(components[:depth])
        if not any(other.startswith(f"{module}.") for other in other_names):
            return module
    return ""


def _map_base_names(model: PreTrainedModel, base_names_by_id: Mapping[int, str]) -> dict[str, str]:
    """Map tensors of a model with an adapter to the base tensors that provide their values.

    The trained copy of a module in ``modules_to_save`` is mapped to the original module's tensors.
    Other tensors that the adapter adds are not included.

    Args:
        model: The model with the adapter. It still contains the tensor objects of the base model.
        base_names_by_id: Tensor names in the base model before the injection, keyed by the tensor's
            ``id``.

    Returns:
        Names in the base model, keyed by the names in ``model``.
    """
    live = get_state_tensors(model)
    base_names = {
        name: base_names_by_id[id(tensor)] for name, tensor in live.items() if id(tensor) in base_names_by_id
    }
    assert len(base_names) == len(base_names_by_id)
    for name in live:
        if name.replace(_TRAINED_COPY, _ORIGINAL) in base_names:
            base_names[name] = base_names[name.replace(_TRAINED_COPY, _ORIGINAL)]
    return base_names


def _map_saved_names(model: PreTrainedModel) -> dict[str, str]:
    """Map the name of each trained parameter in the model to its name in peft's files."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return {name: (parse_adapter_name(name) or parse_replaced_name(name)).saved_name for name in trained}


# -- frozen weights ------------------------------------------------------------------------------------------


def _choose_frozen_dtype(config: RunConfig) -> torch.dtype:
    """Choose the dtype of the frozen weights from ``adapter.base`` and ``precision``.

    If ``adapter.base`` is a quantized format, return the compute dtype, which is used for the weights
    that are not quantized.

    Raises:
        UserError: If the dtype is neither the compute dtype nor fp32.
    """
    compute = COMPUTE_DTYPES.get(config.precision, torch.float32)
    dtype = {"auto": compute, **dict.fromkeys(QUANTIZATION_KINDS, compute), **COMPUTE_DTYPES}.get(
        config.adapter.base, torch.float32
    )
    require(
        dtype in (compute, torch.float32),
        f"adapter.base: {config.adapter.base} is neither fp32 nor the compute dtype of precision: "
        f"{config.precision}; set adapter.base to auto or fp32",
    )
    return dtype


def _cast_frozen_weights(model: PreTrainedModel, base_names: Mapping[str, str], dtype: torch.dtype) -> None:
    """Cast the frozen weights to ``dtype``, except weights that transformers keeps in fp32.

    Args:
        model: The model with the adapter, on the meta device. It is changed in place.
        base_names: Tensor names in the base model before the adapter was added, keyed by the names
            in ``model``.
        dtype: Dtype of the frozen weights.
    """
    fp32_names = transformers_internals.list_fp32_name_parts(model, fp16=dtype == torch.float16)
    pattern = re.compile("|".join(rf"(^|\.){re.escape(name)}($|\.)" for name in fp32_names) or "$^")
    fp32_weights = {name for name in list_frozen_names(model) if pattern.search(base_names[name])}
    freeze_parameters(model, [name for name in list_frozen_names(model) if name not in fp32_weights], dtype)
