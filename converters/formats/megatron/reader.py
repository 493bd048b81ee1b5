"""Read Megatron-LM checkpoints with one file per rank: `mp_rank_<tp>[_<pp>]/model_optim_rng.pt`.

The tensor-parallel shards are concatenated along the dimension that Megatron shards. In the files,
each pipeline stage counts its layers from 0. In the result, the layers are numbered consecutively
over all stages, and the tensors have the names that transformers uses (see `names.py`). The
optimizer state is not converted, because these files do not contain its parameter names.

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
    split_gate_and_up,
    to_local_module_key,
)
from portable.converters.formats.torch_save.optimizer import to_lazy_tensor
from portable.converters.names.tied_weights import are_tensors_equal
from portable.converters.storage.folder_operations import map_with_prefetch
from portable.converters.tensors.tensor_ops import concat_tensors

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
"""For each module, the dimension along which tensor parallelism shards its weight, and whether its
bias is also sharded.
"""
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
    """Checkpoint files that all ranks of a Megatron run saved in one folder.

    Args:
        folder: Folder that contains the ranks' folders.

    Attributes:
        folder_names: Name of each rank's folder, keyed by `RankPosition`.
        content_by_rank: Content of each rank's file, keyed by `RankPosition`.
        tp_size: Number of tensor-parallel ranks.
        pp_size: Number of pipeline stages.

    Raises:
        CheckpointError: If files are missing, damaged or from several runs, or if the run uses an
            unsupported feature such as expert parallelism. Also raised if `checkpoint_version` is
            below 2 or missing.
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
                    f"{folder.path / name}: expert-parallel checkpoints are not supported"
                )
            position = RankPosition(int(match["pp"] or 0), int(match["tp"]))
            if position in folder_names:
                raise DamagedCheckpointError(
                    f"{self.location}: {folder_names[position]} and {name} are folders of the same rank"
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
                    f"{self.location}: the file of tensor-parallel rank {position.tp} and pipeline-parallel "
                    f"rank {position.pp} is missing"
                )
        if len(folder_names) != self.pp_size * self.tp_size:
            raise CheckpointError(
                f"{self.location}: contains folders of {len(folder_names)} ranks, but the checkpoint's args "
                f"have {self.tp_size} tensor-parallel x {self.pp_size} pipeline-parallel ranks; remove the "
                "folders of other runs"
            )
        others = sorted(folder_names.keys() - {_FIRST_RANK})
        self.content_by_rank = {
            _FIRST_RANK: first,
            **dict(zip(others, map_with_prefetch(folder.path, self._load_rank_file, others), strict=True)),
        }
        version = first.get("checkpoint_version", 0)
        if not isinstance(version, (int, float)) or version < 2:
            raise UnsupportedCheckpointError(
                f"{self.location}: has checkpoint_version {format_untrusted_value(version)}, but the oldest "
                "supported version of Megatron-LM's checkpoints is 2"
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

        Files without a recorded rank or world size are accepted. If the checkpoint has only one rank
        folder, nothing is checked.

        Raises:
            CheckpointError: If the rank belongs to a different folder, or if the recorded number of
                context-parallel ranks is invalid.
        """
        rank, world = (args.get(name) if isinstance(args, dict) else None for name in ("rank", "world_size"))
        if type(rank) is not int or type(world) is not int or self.tp_size * self.pp_size == 1:
            return
        pp, tp = position
        # Only the first data-parallel rank writes files. Its global rank depends on whether data-parallel
        # ranks are numbered within a pipeline stage or, with an option, in the outermost dimension. Accept
        # both numbers.
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
        """Return the number of ranks of one type of parallelism. Defaults to 1 if `args` lack it.

        Raises:
            CheckpointError: If the number is invalid or there are no args.
        """
        value = args.get(name, 1) if isinstance(args, dict) else None
        if type(value) is not int or not 0 < value < 1 << 16:
            raise UnsupportedCheckpointError(f"{self.location}: the checkpoint's args have no valid {name}")
        return value

    def _load_rank_file(self, position: RankPosition) -> dict[str, Any]:
        """Load the file of one rank.

        Raises:
            CheckpointError: If the file is missing or damaged.
        """
        name = self.folder_names.get(position)
        if name is None:
            raise DamagedCheckpointError(
                f"{self.location}: the folder of the first rank (mp_rank_00 or mp_rank_00_000) is missing"
            )
        content = TorchZip(self.folder.get_file(f"{name}/{FILE}")).load_object(STANDINS, PREFIXES)
        if not isinstance(content, dict):
            raise DamagedCheckpointError(
                f"{self.folder.path / name}: is not a Megatron-LM checkpoint, because {FILE} does not "
                "contain a dict"
            )
        return content

    def build_checkpoint(self, source: CheckpointPath) -> Checkpoint:
        """Build a checkpoint whose tensors have the names that transformers uses.

        Args:
            source: Path that was opened, and optionally a `config.json`. By default, the
                `config.json` in the checkpoint folder is used.

        Returns:
            The checkpoint. If a file contains optimizer state, accessing it raises
            OptimizerStateError.

        Raises:
            CheckpointError: If the model is not supported, if a layer is missing, or if tensors of
                different ranks contradict each other.
        """
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
        """Return one rank's tensors with Megatron-Core's names, as one dict per model chunk.

        A single chunk has the key `model` in the file. With an interleaved pipeline schedule, a
        rank has several chunks, with the keys `model0`, `model1` and so on.

        Raises:
            CheckpointError: If the file contains no model, or if a chunk contains no tensors,
                invalid keys, or two tensors with the same name.
        """
        content = self.content_by_rank[position]
        location = str(self.folder.path / self.folder_names[position])
        models = [content.get("model")] if "model" in content else []
        while not models or f"model{len(models)}" in content:
            if f"model{len(models)}" not in content:
                raise CheckpointError(
                    f"{location}: contains no model; specify a checkpoint that contains a model"
                )
            models.append(content[f"model{len(models)}"])
        return [_flatten_to_core_names(chunk, location) for chunk in models]

    def _merge_stages_and_shards(self, shape: MegatronShape) -> dict[str, Tensor]:
        """Merge the tensors of all ranks, and number the layers of all stages consecutively.

        The first chunks of all stages precede the second chunks. If the embedding is tied, the copy
        in the last stage is skipped, and its values are not compared.

        Raises:
            CheckpointError: If a file contains no valid model, or if the number of model chunks
                differs between the ranks. Also raised if ranks of a stage have tensors with
                different names or incompatible tensors, or if a tensor other than the tied
                embedding is in two stages.
        """
        stages = [
            [self._get_model_chunks(RankPosition(pp, tp)) for tp in range(self.tp_size)]
            for pp in range(self.pp_size)
        ]
        chunks = len(stages[0][0])
        if any(len(rank) != chunks for stage in stages for rank in stage):
            raise DamagedCheckpointError(
                f"{self.location}: the number of model chunks (virtual pipeline stages) differs between the "
                "ranks"
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
                            f"{self.location}: the tensor-parallel ranks of a pipeline stage have tensors "
                            "with different names"
                        )
                    match = _IN_LAYER.fullmatch(key)
                    name = f"decoder.layers.{layer + int(match[1])}.{match[2]}" if match else key
                    tensor = self._join_tensor_parallel_shards(key, [rank[key] for rank in ranks], shape)
                    if name in merged:
                        # Skip the last stage's copy of the tied embedding.
                        if match is None and name.startswith("embedding.word_embeddings"):
                            continue
                        raise DamagedCheckpointError(
                            f"{self.location}: {name} is stored in two pipeline stages"
                        )
                    merged[name] = tensor
                layer += max(numbers, default=-1) + 1
        return merged

    def _join_tensor_parallel_shards(
        self, key: str, ranks: list[StoredTensor], shape: MegatronShape
    ) -> Tensor:
        """Merge the tensors that the tensor-parallel ranks of a stage stored under one key.

        The ranks belong to the same pipeline stage. Shards are concatenated. If tensor parallelism
        does not shard the tensor, the copies of all ranks must be equal, and the first copy is
        returned.

        Args:
            key: Name of the tensor in Megatron-Core.
            ranks: Tensor of each rank.
            shape: Shape of the model.

        Raises:
            CheckpointError: If the dtypes or shapes of the shards differ, if the copies differ, or if the
                shards of a gated MLP have an odd number of rows.
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
                f"{self.location}: the dtype or number of dimensions of {key} differs between the "
                "tensor-parallel ranks"
            )
        if len(tensors) == 1:
            return tensors[0]
        if dim is None or kind not in ("weight", "bias") or (kind == "bias" and not bias):
            first = tensors[0]
            if not all(are_tensors_equal(first, other) for other in tensors[1:]):
                raise DamagedCheckpointError(
                    f"{self.location}: {key} differs between the tensor-parallel ranks, but must be equal "
                    "on all of them"
                )
            return first
        if len(tensors[0].shape) <= dim:
            raise DamagedCheckpointError(
                f"{self.location}: {key} has shape {list(tensors[0].shape)}, but tensor parallelism shards "
                f"dimension {dim}"
            )
        if any(tensor.shape != tensors[0].shape for tensor in tensors):
            raise DamagedCheckpointError(
                f"{self.location}: the shape of {key} differs between the tensor-parallel ranks"
            )
        if module == "mlp.linear_fc1" and shape.is_gated:  # each rank has gate rows, then up rows
            gates, ups = zip(*(split_gate_and_up(tensor, self.location) for tensor in tensors), strict=True)
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
"""Patterns of the names that Megatron-LM used before Megatron-Core, with their replacements."""


def _flatten_to_core_names(model: Any, location: str) -> dict[str, StoredTensor]:
    """Flatten a pickled model to a dict of tensors with Megatron-Core's names.

    Up to two prefixes `module.` are removed, and names from before Megatron-Core are replaced.
    Transformer Engine's extra state, and values that are neither dicts nor tensors, are skipped.

    Raises:
        CheckpointError: If there are no tensors, if two tensors have the same name, or if a key is
            too long or is neither a string nor a number.
    """
    tensors: dict[str, StoredTensor] = {}
    pending: list[tuple[str, Any]] = [("", model)]
    while pending:
        prefix, value = pending.pop()
        if isinstance(value, dict):
            if len(prefix) > 4096 or not all(type(key) is str or is_safe_index(key) for key in value):
                raise DamagedCheckpointError(
                    f"{location}: damaged: a key of the model is neither a string nor a number, or is "
                    "longer than 4,096 characters"
                )
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
        raise CheckpointError(
            f"{location}: contains no model tensors; specify a checkpoint that contains a model"
        )
    return tensors
