"""Find the adapter in a checkpoint of any format, and group its tensors by the module they change."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.adapters.names import (
    FINGERPRINT_KEY,
    MAGNITUDE,
    PEFT_PREFIX,
    TOKENS,
    AdapterTensorName,
    parse_adapter_name,
    split_tensor_names,
    strip_adapter_wrappers,
)
from portable.converters.checkpoint import Checkpoint, OptimizerState
from portable.converters.config_and_tokenizer_files import find_companion_file
from portable.converters.errors import CheckpointError, DamagedCheckpointError, prefix_checkpoint_errors
from portable.converters.lazy_numpy import np
from portable.converters.options import ADAPTER_CONFIG, VERL_CONFIG
from portable.converters.tensors.dtypes import CASTABLE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from portable.converters.adapters.config import StoredAdapterConfig
    from portable.converters.checkpoint import Aliases
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.tensors.tensor import Shape, Tensor

_BLOCK = 512 << 10
_PROMPT_NAME = "prompt_embeddings"
_MODEL_PREFIX = "base_model."


class LoraPair(NamedTuple):
    """The two LoRA factors of a module.

    The weight update is `up @ down`, scaled. The product is transposed for an embedding, and for
    any other weight that is stored as `[inputs, outputs]`. The factors of a stack of experts
    contain all experts, so `rank` is then the rank of one expert times the number of experts.

    Attributes:
        down: `lora_A`, `[rank, inputs]`; `[rank, inputs, ...]` for a convolution.
        up: `lora_B`, `[outputs, rank]`; `[outputs, rank, 1, ...]` for a convolution.
        is_embedding: Whether the factors belong to an embedding (`lora_embedding_A` and
            `lora_embedding_B`).
    """

    down: Tensor
    up: Tensor
    is_embedding: bool


@dataclass(frozen=True)
class AdapterModule:
    """Adapter tensors that change one module of the model.

    If an adapter targets several parameters of a module, peft nests one wrapper per parameter. The
    tensors in each wrapper are then a separate `AdapterModule` with the same `path`.

    Attributes:
        path: Name of the module in the model, without peft's wrappers.
        num_wrappers: Number of outer peft wrappers that enclose the wrapper with these tensors. 0
            for the outermost wrapper, and thus always 0 unless the adapter targets several
            parameters of the module.
        tensors: Tensors, keyed by pairs of a kind and a name, such as `("lora_A", "weight")`. The
            name is empty for a bare parameter. See `portable.converters.adapters.names`.
    """

    path: str
    num_wrappers: int
    tensors: Mapping[tuple[str, str], Tensor]

    def find_tensor(self, kind: str) -> Tensor | None:
        """Return the tensor of a kind, such as `lora_A`. None if there is none.

        The tensor is the `weight` of a layer, or a bare parameter. If both exist, the `weight` is returned.
        """
        return self.tensors.get((kind, "weight"), self.tensors.get((kind, "")))

    def get_lora_pair(self) -> LoraPair | None:
        """Return the two LoRA factors of the module, or None if it has none.

        Raises:
            CheckpointError: If one of the factors is missing.
        """
        for first, second, embedding in (
            ("lora_A", "lora_B", False),
            ("lora_embedding_A", "lora_embedding_B", True),
        ):
            first_factor, second_factor = self.find_tensor(first), self.find_tensor(second)
            if first_factor is not None and second_factor is not None:
                return LoraPair(first_factor, second_factor, embedding)
            if first_factor is not None or second_factor is not None:
                kinds = (first, second) if first_factor is not None else (second, first)
                raise DamagedCheckpointError(f"{self.path}: has {kinds[0]}, but no {kinds[1]}")
        return None


class StoredAdapter:
    """Adapter in a checkpoint. Created by `find_adapter`.

    Attributes:
        checkpoint: Checkpoint that contains only the adapter tensors, named as in peft's adapter
            file, with their optimizer state and the tokenizer.
        config: Settings of the adapter.
        names_by_saved_name: Parsed name of each tensor, keyed by the tensor's name in peft's
            adapter file.
        base_tensors: Tensors of the base model in the same checkpoint, keyed by their names in the
            model without peft's wrappers.
        trained_config: Path of the `config.json` of the trained model. None if the adapter's folder
            does not contain one.

    Raises:
        CheckpointError: If the tensors contradict the settings.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: StoredAdapterConfig,
        names_by_saved_name: Mapping[str, AdapterTensorName],
        base_tensors: Mapping[str, Tensor],
        trained_config: AnyPath | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.names_by_saved_name = names_by_saved_name
        self.base_tensors = base_tensors
        self.trained_config = trained_config
        self._check_lora_tensors()

    @property
    def root(self) -> AnyPath:
        """Folder or file from which the adapter was opened."""
        return self.checkpoint.root

    @property
    def has_complete_base(self) -> bool:
        """Whether the checkpoint contains the base model's layers, rather than only some tied tensors."""
        modules = {name.rpartition(".")[0] for name in self.base_tensors}
        return bool(modules) and all(module.path in modules for module in self.modules)

    def build_included_base(self) -> Checkpoint:
        """Build a checkpoint of the base model from its tensors in the adapter's files.

        If the adapter has trained biases or resized tables that are parameters of the base model
        itself, the checkpoint contains their trained values.

        Raises:
            CheckpointError: If the files do not contain any tensor of the base model.
        """
        if not self.base_tensors:
            raise CheckpointError(
                f"{self.root}: contains an adapter, but no base model; specify the path of the base model"
            )
        config = self.trained_config
        companions = {} if config is None else {"config.json": config}
        # Trained biases are parameters of the base model itself. A module in modules_to_save is a copy.
        trained = {
            part.replaced_name: self.checkpoint.tensors[name]
            for name, part in self.names_by_saved_name.items()
            if not part.kind and part.adapter_name is None
        }
        tensors = {**trained, **self.base_tensors}
        return Checkpoint(
            format=self.checkpoint.format, root=self.root, tensors=tensors, companions=companions
        )

    @property
    def base_fingerprint(self) -> str | None:
        """Fingerprint of the weights that the adapter was trained on. None if it is not recorded."""
        metadata = self.checkpoint.metadata
        state, header = metadata.get("trainer_state"), metadata.get("header")
        saved_metadata = state.get("metadata") if isinstance(state, dict) else None
        about = saved_metadata.get("adapter") if isinstance(saved_metadata, dict) else None
        fingerprint = about.get("base") if isinstance(about, dict) else None
        if fingerprint is None and isinstance(header, dict):
            fingerprint = header.get(FINGERPRINT_KEY)
        return fingerprint if isinstance(fingerprint, str) else None

    @cached_property
    def modules(self) -> list[AdapterModule]:
        """Modules with adapter tensors such as LoRA factors, in the order of the file.

        Tensors that replace a tensor of the base model are in `replacements` instead.
        """
        grouped: dict[str, dict[tuple[str, str], Tensor]] = {}
        for name, part in self.names_by_saved_name.items():
            if part.kind:
                tensors = grouped.setdefault(f"{part.module} {part.num_wrappers}", {})
                tensors[part.kind, part.leaf] = self.checkpoint.tensors[name]
        return [
            AdapterModule(key.rpartition(" ")[0], int(key.rpartition(" ")[2]), v)
            for key, v in grouped.items()
        ]

    @cached_property
    def replacements(self) -> dict[tuple[str, str], Tensor]:
        """Trained tensors that replace tensors of the base model or are added to it.

        An example of an added tensor is the weight of a new classification head.

        The key is a pair: the name of the module in the loaded model, and the name of the tensor in
        the module. An example is `("lm_head", "weight")`.
        """
        return {
            (part.module, part.leaf): self.checkpoint.tensors[name]
            for name, part in self.names_by_saved_name.items()
            if not part.kind
        }

    @property
    def linear_shapes(self) -> dict[str, Shape]:
        """Shapes of the linear layers that have LoRA factors, keyed by weight name.

        Each shape is `(outputs, inputs)`, even if the files store the weight as `[inputs,
        outputs]`. Embeddings and convolutions are not included.
        """
        pairs = (
            (module.path, module.find_tensor("lora_A"), module.find_tensor("lora_B"))
            for module in self.modules
        )
        return {
            f"{path}.weight": (up.shape[0], down.shape[1])
            for path, down, up in pairs
            if down is not None and up is not None and len(down.shape) == len(up.shape) == 2
        }

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the adapter's tensors and of some settings. Reads all tensors.

        The settings are the type, the ranks, the alphas, and whether the adapter uses rsLoRA or DoRA. See
        `target_settings` for other settings that determine the result of a merge.

        Raises:
            CheckpointError: If a tensor is damaged, or if an F64, F32, F16 or BF16 tensor contains NaN or
                infinity.
        """
        config = self.config
        about = [config.type, config.r, config.alpha, config.rslora, config.dora]
        patterns = [sorted(config.rank_pattern.items()), sorted(config.alpha_pattern.items())]
        digest = hashlib.sha256(json.dumps([*about, *patterns]).encode())
        for name in sorted(self.checkpoint.tensors):
            tensor = self.checkpoint.tensors[name]
            digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode("utf-8", "surrogatepass"))
            for block in tensor.iter_blocks_then_verify(_BLOCK):
                if (
                    tensor.dtype in CASTABLE_DTYPES
                    and not np.isfinite(block.astype(np.float32, copy=False)).all()
                ):
                    raise CheckpointError(
                        f"{self.root}: {name!r} contains NaN or infinity; merge the adapter of an earlier "
                        "step"
                    )
                digest.update(block.view(np.uint8).data)
        return digest.hexdigest()

    @property
    def target_settings(self) -> dict[str, Any]:
        """Settings that determine which rows and parameters the tensors change, as JSON values.

        Settings without a value are omitted. `digest` does not include these settings, because
        existing records of merged adapters contain digests without them.
        """
        settings = {
            "token_indices": {name: list(rows) for name, rows in self.config.token_indices.items()},
            "target_parameters": list(self.config.target_parameters),
        }
        return {key: value for key, value in settings.items() if value}

    def _check_lora_tensors(self) -> None:
        """Check that the tensors of each LoRA module match the settings.

        Each module must match `target_modules`. See `StoredAdapterConfig.may_target_module`. Both
        factors of a module must exist, fit each other, and have the configured rank. The rank is
        not checked if `target_parameters` may contain a parameter of the module. With
        `ensure_weight_tying`, any rank in the settings is accepted. A module must have a magnitude
        with DoRA, and must not have a magnitude without DoRA. A module with trained tokens needs no
        factors.

        Other types of adapters are not checked, and neither are adapters with an unsupported
        setting.

        Raises:
            CheckpointError: If a module is incomplete or contradicts the settings.
        """
        config = self.config
        if config.type != "LORA" or config.unsupported_setting is not None:
            return  # `merge` checks the shapes of other types, and rejects unsupported settings
        for module in self.modules:
            with prefix_checkpoint_errors(self.root):
                pair = module.get_lora_pair()
            if pair is None:
                if module.find_tensor(TOKENS) is None:
                    kind = next(iter(module.tensors))[0]
                    raise DamagedCheckpointError(
                        f"{self.root}: {module.path}: has {kind}, but neither lora_A nor lora_B"
                    )
                continue
            if not config.may_target_module(module.path):
                raise CheckpointError(
                    f"{self.root}: {module.path}: has an adapter, but does not match target_modules in "
                    f"{config.path}; replace this file with the {ADAPTER_CONFIG} that was saved with these "
                    "weights"
                )
            down, up, _ = pair
            if len(down.shape) < 2 or len(up.shape) < 2 or down.shape[0] != up.shape[1]:
                raise DamagedCheckpointError(
                    f"{self.root}: {module.path}: factor A has shape {list(down.shape)}, which does not "
                    f"match shape {list(up.shape)} of factor B"
                )
            rank = config.get_rank(module.path)
            stacked = config.may_target_parameter_of(module.path)
            # With ensure_weight_tying, the embedding and the head share their factors, but the scaling
            # depends on the rank in the settings of each module.
            tied = config.ties_weights and down.shape[0] in (config.r, *config.rank_pattern.values())
            if not down.shape[0] or (down.shape[0] != rank and not stacked and not tied):
                raise CheckpointError(
                    f"{self.root}: {module.path}: has rank {down.shape[0]}, but {config.path} has rank "
                    f"{rank}; replace this file with the {ADAPTER_CONFIG} that was saved with these weights"
                )
            has_magnitude = module.find_tensor(MAGNITUDE) is not None
            if config.dora and not has_magnitude:
                raise CheckpointError(
                    f"{self.root}: {module.path}: has no {MAGNITUDE}, but use_dora is true in {config.path}; "
                    f"replace this file with the {ADAPTER_CONFIG} that was saved with these weights"
                )
            if has_magnitude and not config.dora:
                raise CheckpointError(
                    f"{self.root}: {module.path}: has a {MAGNITUDE}, but use_dora is false in {config.path}; "
                    f"replace this file with the {ADAPTER_CONFIG} that was saved with these weights"
                )


def find_adapter(
    checkpoint: Checkpoint, *, config: AnyPath | None = None, name: str | None = None
) -> StoredAdapter | None:
    """Find the adapter in a checkpoint.

    A checkpoint contains an adapter if its tensors have peft's names and if the settings of the
    adapter are available. The settings are `config` or a file in the folder of the checkpoint:
    `adapter_config.json`, or verl's `lora_train_meta.json`. The tensors of the base model in the
    same checkpoint become `StoredAdapter.base_tensors`.

    Args:
        checkpoint: Checkpoint of any format.
        config: Path of the `adapter_config.json`, if it is not in the folder of the checkpoint.
        name: Name of the adapter, if the checkpoint contains several.

    Returns:
        The adapter, or None if the checkpoint is a model without an adapter.

    Raises:
        CheckpointError: If the settings are missing although the names begin with peft's prefix
            `base_model.model.`. Also raised if the settings are damaged or of an unsupported type,
            if a tensor is missing, or if the LoRA tensors contradict the settings. Also raised if
            the checkpoint contains several adapters and `name` is None, or if it contains no
            adapter with this name.
    """
    names = [*checkpoint.tensors, *checkpoint.aliases]
    has_peft_prefix = any(key.startswith(PEFT_PREFIX) for key in names)
    is_adapter = (
        has_peft_prefix or names == [_PROMPT_NAME] or all(key.startswith(_MODEL_PREFIX) for key in names)
    )
    if not is_adapter and all(parse_adapter_name(key) is None for key in names):
        return None
    config = config if config is not None else find_companion_file(checkpoint.root, ADAPTER_CONFIG)
    from_verl = find_companion_file(checkpoint.root, VERL_CONFIG) if config is None else None
    config = config if config is not None else from_verl
    if config is None:
        if not has_peft_prefix:
            return None
        raise CheckpointError(
            f"{checkpoint.root}: contains an adapter, but there is no {ADAPTER_CONFIG} next to it; copy "
            "this file there, or run portable-convert with --adapter-config FILE"
        )
    from portable.converters.adapters.config import read_adapter_config

    settings = read_adapter_config(config)
    parts, others = split_tensor_names(names, bias=settings.bias, adapter_name=name, location=checkpoint.root)
    if not parts:
        return None
    documents: dict[str, bytes] = {}
    if from_verl is not None:
        modules = sorted({part.module.rpartition(".")[2] for part in parts.values() if part.kind})
        text = json.dumps({**settings.values, "target_modules": modules}, indent=2)
        documents = {ADAPTER_CONFIG: f"{text}\n".encode()}
    # Tied parameters are one tensor in the checkpoint, but peft's file contains each name.
    tensors = {**checkpoint.tensors, **{a: checkpoint.tensors[o] for a, o in checkpoint.aliases.items()}}
    saved_names = {key: part.saved_name for key, part in parts.items()}
    # Leave out config.json, because a folder that contains it would be opened as a complete model.
    companions = {name: path for name, path in checkpoint.companions.items() if name != "config.json"}

    def open_optimizer(_: Aliases) -> OptimizerState | None:
        return (
            None if checkpoint.optimizer is None else checkpoint.optimizer.rename_parameters(saved_names.get)
        )

    return StoredAdapter(
        Checkpoint(
            format=checkpoint.format,
            root=checkpoint.root,
            tensors={saved_names[key]: tensors[key] for key in parts},
            optimizer=open_optimizer,
            metadata=checkpoint.metadata,
            companions=companions if documents else {**companions, ADAPTER_CONFIG: config},
            documents=documents,
            ties=False,
        ),
        settings,
        {part.saved_name: part for part in parts.values()},
        {strip_adapter_wrappers(key): tensors[key] for key in others if key in checkpoint.tensors},
        checkpoint.companions.get("config.json"),
    )
