"""Read Megatron-LM checkpoints with one file per rank: `mp_rank_<tp>[_<pp>]/model_optim_rng.pt`.

The tensor-parallel shards are concatenated along the dimension that Megatron shards. Each pipeline
stage counts its layers from 0. The result numbers the layers of all stages consecutively, and has
transformers' names (`names.py`). The optimizer state is not converted, because these files do not
contain its parameter names.

Source: `get_checkpoint_name` in Megatron-LM's megatron/training/checkpointing.py,
tools/checkpoint/loader_base.py, megatron/core/tensor_parallel/layers.py.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.checkpoint import Checkpoint
from portable.converters.config_and_tokenizer_files import find_companions
from portable.converters.containers.pickle_reader import format_untrusted_value, is_safe_index
from portable.converters.containers.torchzip import StoredTensor, TorchZip
from portable.converters.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MixedCheckpointError,
    OptimizerStateError,
    UnsupportedCheckpointError,
    prefix_checkpoint_errors,
)
from portable.converters.formats.megatron import FILE, RANK, list_rank_folders
from portable.converters.formats.megatron.names import (
    MegatronShape,
    convert_to_transformers,
    get_megatron_args,
    read_model_shape,
    to_local_module_key,
)
from portable.converters.formats.torch_save.optimizer import to_lazy_tensor
from portable.converters.names.tied_weights import are_tensors_equal
from portable.converters.storage.folder_operations import map_with_prefetch
from portable.converters.tensors.tensor_ops import concat_tensors, slice_tensor

if TYPE_CHECKING:
    from portable.converters.checkpoint import Aliases, OptimizerState
    from portable.converters.formats import CheckpointPath
    from portable.converters.storage.folder import CheckpointFolder
    from portable.converters.tensors.tensor import Tensor

STANDINS = {
    "_io.BytesIO": None,
    "signal.Signals": None,
}
PREFIXES = ("megatron.",)
_SHARDED_DIMS = {
    "embedding.word_embeddings": (0, False),
    "output_layer": (0, False),
    "self_attention.linear_qkv": (0, True),
    "mlp.linear_fc1": (0, True),
    "self_attention.linear_proj": (1, False),
    "mlp.linear_fc2": (1, False),
}
"""Sharded dimension of each module's weight, and whether its bias is sharded, with tensor parallelism."""
_IN_LAYER = re.compile(r"decoder\.layers\.(\d{1,6})\.(.+)")


class RankPosition(NamedTuple):
    """Pipeline-parallel and tensor-parallel rank of a file.

    Attributes:
        pp: Pipeline-parallel rank.
        tp: Tensor-parallel rank.
    """

    pp: int
    tp: int


_FIRST_RANK = RankPosition(0, 0)


class MegatronRankFiles:
    """Files of all ranks in a folder.

    Args:
        folder: Folder that contains the ranks' folders.

    Attributes:
        folder_names: Name of the folder of each rank.
        content_by_rank: Content of the file of each rank.
        tp_size: Number of tensor-parallel ranks.
        pp_size: Number of pipeline stages.

    Raises:
        CheckpointError: If files are missing, damaged or from several runs, or if the run is not
            supported.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder
        self.location = str(folder.path)
        folder_names: dict[RankPosition, str] = {}
        for name in list_rank_folders(folder.path):
            match = RANK.fullmatch(name)
            assert match is not None
            if match["ep"]:
                raise UnsupportedCheckpointError(
                    f"{folder.path / name}: expert parallel checkpoints are not supported"
                )
            position = RankPosition(int(match["pp"] or 0), int(match["tp"]))
            if position in folder_names:
                raise DamagedCheckpointError(
                    f"{self.location}: {folder_names[position]} and {name} belong to the same rank"
                )
            folder_names[position] = name
        self.folder_names = folder_names
        first = self._load_rank_file(_FIRST_RANK)
        args = get_megatron_args(first)
        self.tp_size = self._get_parallel_size(args, "tensor_model_parallel_size")
        self.pp_size = self._get_parallel_size(args, "pipeline_model_parallel_size")
        for position in (RankPosition(pp, tp) for pp in range(self.pp_size) for tp in range(self.tp_size)):
            if position not in folder_names:
                raise DamagedCheckpointError(
                    f"{self.location}: the file of tensor rank {position.tp}, pipeline rank {position.pp} is "
                    "missing"
                )
        if len(folder_names) != self.pp_size * self.tp_size:
            raise CheckpointError(
                f"{self.location}: contains {len(folder_names)} ranks, but args has {self.tp_size} x "
                f"{self.pp_size}; remove the files of other runs"
            )
        others = sorted(folder_names.keys() - {_FIRST_RANK})
        self.content_by_rank = {
            _FIRST_RANK: first,
            **dict(zip(others, map_with_prefetch(folder.path, self._load_rank_file, others), strict=True)),
        }
        version = first.get("checkpoint_version", 0)
        if not isinstance(version, (int, float)) or version < 2:
            raise UnsupportedCheckpointError(
                f"{self.location}: was written by Megatron-LM with a checkpoint version before 2"
            )
        for position, content in self.content_by_rank.items():
            self._check_recorded_rank(position, get_megatron_args(content))
            for key in ("iteration", "checkpoint_version"):
                if content.get(key) != first.get(key):
                    raise MixedCheckpointError(
                        f"{self.folder.path / self.folder_names[position]}: {key} differs "
                        "from the value on the first rank"
                    )

    def _check_recorded_rank(self, position: RankPosition, args: Any) -> None:
        """Check that the rank recorded in a file's args matches its folder.

        Files without a recorded rank are accepted.

        Raises:
            CheckpointError: If the rank belongs to a different folder.
        """
        rank, world = (args.get(name) if isinstance(args, dict) else None for name in ("rank", "world_size"))
        if type(rank) is not int or type(world) is not int or self.tp_size * self.pp_size == 1:
            return
        pp, tp = position
        # Only the first data-parallel rank writes. Two numbers are accepted, because the data-parallel ranks
        # are within a stage or, with an option, the outermost dimension of the ranks.
        ranks_per_stage, stage_stride = (
            world // self.pp_size,
            self.tp_size * self._get_parallel_size(args, "context_parallel_size"),
        )
        if rank not in (tp + pp * ranks_per_stage, tp + pp * stage_stride):
            raise DamagedCheckpointError(
                f"{self.folder.path / self.folder_names[position]}: was written by rank {rank}, but is in "
                "the folder of another rank"
            )

    def _get_parallel_size(self, args: Any, name: str) -> int:
        """Return the number of ranks that `args` contains for one type of parallelism, 1 by default.

        Raises:
            CheckpointError: If the number is invalid or there are no args.
        """
        value = args.get(name, 1) if isinstance(args, dict) else None
        if type(value) is not int or not 0 < value < 1 << 16:
            raise UnsupportedCheckpointError(f"{self.location}: args has no {name}")
        return value

    def _load_rank_file(self, position: RankPosition) -> dict[str, Any]:
        """Load the file of one rank.

        Raises:
            CheckpointError: If the file is missing or damaged.
        """
        name = self.folder_names.get(position)
        if name is None:
            raise DamagedCheckpointError(f"{self.location}: the file of the first rank is missing")
        content = TorchZip(self.folder.get_file(f"{name}/{FILE}")).load_object(STANDINS, PREFIXES)
        if not isinstance(content, dict):
            raise DamagedCheckpointError(f"{self.folder.path / name}: is not a Megatron-LM checkpoint")
        return content

    def build_checkpoint(self, source: CheckpointPath) -> Checkpoint:
        """Build the checkpoint with transformers' names."""
        companions = find_companions(self.folder.path)
        first = self.content_by_rank[_FIRST_RANK]
        shape = read_model_shape(
            get_megatron_args(first), source.config_file or companions.get("config.json"), self.location
        )
        with prefix_checkpoint_errors(self.folder.path):
            merged = self._merge_stages_and_shards(shape)
            tensors = convert_to_transformers(merged, shape, self.location)
        step = first.get("iteration")
        optimizer = any("optimizer" in content for content in self.content_by_rank.values())
        return Checkpoint(
            format="megatron",
            root=source.path,
            tensors=tensors,
            optimizer=self._refuse_optimizer if optimizer else None,
            metadata={
                "world_size": self.tp_size * self.pp_size,
                **({"step": step} if type(step) is int else {}),
            },
            companions=companions,
        )

    def _refuse_optimizer(self, aliases: Aliases) -> OptimizerState | None:
        """Raise OptimizerStateError, because the optimizer state has no parameter names."""
        raise OptimizerStateError(
            f"{self.location}: Megatron-LM's optimizer state has no parameter names, so it cannot be "
            "converted"
        )

    def _get_model_chunks(self, position: RankPosition) -> list[dict[str, StoredTensor]]:
        """Return the tensors of one rank with Megatron-Core's names, as one dict per model chunk.

        With an interleaved pipeline schedule, a rank has several chunks.

        Raises:
            CheckpointError: If the file contains no model.
        """
        content = self.content_by_rank[position]
        location = str(self.folder.path / self.folder_names[position])
        models = [content.get("model")] if "model" in content else []
        while not models or f"model{len(models)}" in content:
            if f"model{len(models)}" not in content:
                raise DamagedCheckpointError(f"{location}: contains no model")
            models.append(content[f"model{len(models)}"])
        return [_flatten_to_core_names(chunk, location) for chunk in models]

    def _merge_stages_and_shards(self, shape: MegatronShape) -> dict[str, Tensor]:
        """Merge the tensors of all ranks, and number the layers of all stages consecutively.

        Raises:
            CheckpointError: If ranks of a stage have different tensors, or if a tensor is in two stages.
        """
        stages = [
            [self._get_model_chunks(RankPosition(pp, tp)) for tp in range(self.tp_size)]
            for pp in range(self.pp_size)
        ]
        chunks = len(stages[0][0])
        if any(len(rank) != chunks for stage in stages for rank in stage):
            raise DamagedCheckpointError(
                f"{self.location}: the number of model chunks differs between the ranks"
            )
        merged: dict[str, Tensor] = {}
        layer = 0
        for chunk in range(chunks):
            for stage in stages:
                ranks = [rank[chunk] for rank in stage]
                numbers = [int(match[1]) for key in ranks[0] if (match := _IN_LAYER.fullmatch(key))]
                for key in ranks[0]:
                    if any(key not in rank or len(rank) != len(ranks[0]) for rank in ranks):
                        raise DamagedCheckpointError(
                            f"{self.location}: the tensor parallel ranks of a stage contain different tensors"
                        )
                    match = _IN_LAYER.fullmatch(key)
                    name = f"decoder.layers.{layer + int(match[1])}.{match[2]}" if match else key
                    tensor = self._join_tensor_parallel_shards(key, [rank[key] for rank in ranks], shape)
                    if name in merged:
                        # Skip the last stage's copy of the tied embedding.
                        if match is None and name.startswith("embedding.word_embeddings"):
                            continue
                        raise DamagedCheckpointError(f"{self.location}: {name} is in two pipeline stages")
                    merged[name] = tensor
                layer += max(numbers, default=-1) + 1
        return merged

    def _join_tensor_parallel_shards(
        self, key: str, ranks: list[StoredTensor], shape: MegatronShape
    ) -> Tensor:
        """Join the tensors that the tensor-parallel ranks of a stage have for the same key.

        Shards are concatenated. If tensor parallelism does not shard the tensor, the copies of all ranks
        must be equal, and the first copy is returned.

        Args:
            key: Name of the tensor in Megatron-Core.
            ranks: Tensor of each rank.
            shape: Shape of the model.

        Raises:
            CheckpointError: If the shards do not fit each other, or if the copies differ.
        """
        match = _IN_LAYER.fullmatch(key)
        module, _, kind = (match[2] if match else key).rpartition(".")
        dim, bias = _SHARDED_DIMS.get(module, (None, False))
        tensors = [to_lazy_tensor(stored, key) for stored in ranks]
        if (
            len({tensor.dtype for tensor in tensors}) > 1
            or len({len(tensor.shape) for tensor in tensors}) > 1
        ):
            raise DamagedCheckpointError(
                f"{self.location}: the type of {key} differs between the tensor parallel ranks"
            )
        if len(tensors) == 1:
            return tensors[0]
        if dim is None or kind not in ("weight", "bias") or (kind == "bias" and not bias):
            first = tensors[0]
            if not all(are_tensors_equal(first, other) for other in tensors[1:]):
                raise DamagedCheckpointError(
                    f"{self.location}: {key} differs between the tensor parallel ranks, but must be "
                    "equal on all of them"
                )
            return first
        if any(tensor.shape != tensors[0].shape for tensor in tensors) or len(tensors[0].shape) <= dim:
            raise DamagedCheckpointError(
                f"{self.location}: the shape of {key} differs between the tensor parallel ranks"
            )
        if module == "mlp.linear_fc1" and shape.is_gated:  # each rank has gate rows, then up rows
            half = tensors[0].shape[0] // 2
            gates = [slice_tensor(tensor, 0, 0, half) for tensor in tensors]
            ups = [slice_tensor(tensor, 0, half, half) for tensor in tensors]
            return concat_tensors(key, [*gates, *ups], 0)
        return concat_tensors(key, tensors, dim)


_OLD_NAMES = (
    (re.compile(r"language_model\.(?:encoder|transformer)\.layers\.(\d+)\."), r"decoder.layers.\1."),
    (
        re.compile(r"language_model\.(?:encoder|transformer)\.final_(?:norm|layernorm)\."),
        "decoder.final_layernorm.",
    ),
    (re.compile(r"language_model\.embedding\."), "embedding."),
    (re.compile(r"language_model\.output_layer\."), "output_layer."),
    (re.compile(r"(layers\.\d+)\.input_norm\."), r"\1.input_layernorm."),
    (re.compile(r"(layers\.\d+)\.post_attention_(?:norm|layernorm)\."), r"\1.pre_mlp_layernorm."),
    (re.compile(r"\.(?:self_)?attention\.query_key_value\."), ".self_attention.linear_qkv."),
    (re.compile(r"\.(?:self_)?attention\.dense\."), ".self_attention.linear_proj."),
    (re.compile(r"\.mlp\.dense_h_to_4h\."), ".mlp.linear_fc1."),
    (re.compile(r"\.mlp\.dense_4h_to_h\."), ".mlp.linear_fc2."),
)
"""Names of Megatron-LM before Megatron-Core, and their replacements."""


def _flatten_to_core_names(model: Any, location: str) -> dict[str, StoredTensor]:
    """Flatten a pickled model to a dict of tensors with Megatron-Core's names.

    Transformer Engine's extra state is skipped.

    Raises:
        CheckpointError: If there are no tensors, or if two tensors have the same name.
    """
    tensors: dict[str, StoredTensor] = {}
    pending: list[tuple[str, Any]] = [("", model)]
    while pending:
        prefix, value = pending.pop()
        if isinstance(value, dict):
            if len(prefix) > 4096 or not all(type(key) is str or is_safe_index(key) for key in value):
                raise DamagedCheckpointError(f"{location}: damaged: the keys of the model are not strings")
            pending += [
                (f"{prefix}.{key}" if prefix else str(key), item) for key, item in reversed(value.items())
            ]
        elif isinstance(value, StoredTensor) and not prefix.endswith("_extra_state"):
            name = prefix.removeprefix("module.").removeprefix("module.")
            for old, new in _OLD_NAMES:
                name = old.sub(new, name)
            name = to_local_module_key(name)
            if name in tensors:
                raise DamagedCheckpointError(
                    f"{location}: two tensors have the name {format_untrusted_value(name)}"
                )
            tensors[name] = value
    if not tensors:
        raise DamagedCheckpointError(f"{location}: contains no model tensors")
    return tensors
