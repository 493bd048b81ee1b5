"""Read, compare, and merge the files that the ranks of one ZeRO data-parallel group have saved.

Without tensor or pipeline parallelism, the group contains all ranks. Otherwise, there is one group
for each tensor-parallel rank or pipeline stage. Tensors keep the names that they have in the files.
"""

from __future__ import annotations

from functools import cached_property, partial
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from portable.converters.containers.pickle_reader import format_untrusted_value, to_json_value
from portable.converters.containers.shard_index import check_rank_files_complete
from portable.converters.errors import (
    DamagedCheckpointError,
    MixedCheckpointError,
    UnsupportedCheckpointError,
)
from portable.converters.formats.deepspeed.checks import compare_with_module_weights
from portable.converters.formats.deepspeed.deferred_files import (
    MASTERS,
    SliceLengths,
    build_deferred_model_file,
    build_deferred_optim_file,
)
from portable.converters.formats.deepspeed.flat_layout import (
    Flat,
    FlatPiece,
    GroupLayout,
    GroupOnRanks,
    Stage3GroupLayout,
    Stage12GroupLayout,
    SwapFiles,
    check_disjoint_bytes,
    require_equal_dtypes,
    to_flat_piece,
)
from portable.converters.formats.deepspeed.optimizer import build_zero_optimizer, read_step_count
from portable.converters.formats.deepspeed.rank_files import (
    TIED,
    ModelFile,
    NamedWeights,
    OptimFile,
    check_equal_records,
    combine_with_model_states,
    get_partition_counts,
    parse_fragment_address,
    read_model_files,
    read_optim_file,
    require_contiguous,
)
from portable.converters.storage.folder_operations import map_with_prefetch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from portable.converters.checkpoint import OptimizerState
    from portable.converters.formats.deepspeed.expert_files import ExpertFiles
    from portable.converters.storage.folder import CheckpointFolder
    from portable.converters.tensors.tensor import Tensor

_FP32_GROUPS = "fp32_flat_groups"


class SavedRun:
    """Files of all data-parallel ranks of a ZeRO run.

    In stages 1 and 2, a flat group is a parameter group whose parameters are concatenated into one
    buffer, which is partitioned over the ranks. In stage 3, a flat group is a sub-group. Each of
    its parameters is partitioned separately, and each rank concatenates its parts.

    Args:
        folder: Checkpoint folder.
        optim_names: Names of the files of optimizer states, keyed by data-parallel rank.
        model_names: Names of the files of model states, keyed by data-parallel rank. Below stage 3,
            only rank 0 has such a file.
        model: Content of a file of model states, already read by the caller. This is the file of
            `rank`, or the first file if `rank` is None or has no file.
        per_rank_model: Whether each data-parallel rank has a file of model states, as in stage 3.
        expert_files: Weights from the files that contain one expert each, or None if there are no
            such files.
        rank: Data-parallel rank of this process. If it is given, the files of other ranks are
            opened only when their values are needed, if the layout allows this. If None, all files
            are opened.

    Attributes:
        rank: Argument `rank`, or None if the layout requires that all files are opened.
        stage: ZeRO stage. BF16_Optimizer counts as stage 1.
        world_size: Number of data-parallel ranks.
        group_shapes: Shapes of the parameters in each flat group.
        shares: List of flat groups. Each entry also names the ranks over which the group is
            partitioned. A group of expert parameters occurs once for each set of ranks that have
            the same experts. Any other group occurs once.
        layouts: Layout of each entry of `shares`.
        flat_masters: Fp32 master weights of each entry of `shares`, as one flat buffer with a piece
            per rank.

    Raises:
        CheckpointError: If files are missing, damaged or from several runs, or if the layout is not
            supported.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        optim_names: Mapping[int, str],
        model_names: Mapping[int, str],
        model: ModelFile,
        *,
        per_rank_model: bool,
        expert_files: ExpertFiles | None = None,
        rank: int | None = None,
    ) -> None:
        self.rank = rank
        self.folder = folder
        self.location = location = str(folder.path)
        self.expert_files = expert_files
        self.first_model_file = model
        self.optim_files = self._read_optim_files(optim_names)
        first = self.optim_files[0]
        self.bf16_optimizer = "zero_stage" not in first.state and MASTERS in first.state
        stage = 1 if self.bf16_optimizer else first.state.get("zero_stage")
        if type(stage) is not int or stage not in (1, 2, 3):
            raise UnsupportedCheckpointError(
                f"{first.location}: the ZeRO stage is {format_untrusted_value(stage)}, but only stages 1, "
                "2 and 3 are supported"
            )
        self.stage: int = stage
        if expert_files is not None and stage == 3:
            raise UnsupportedCheckpointError(
                f"{location}: expert-parallel checkpoints of ZeRO-3 are not supported"
            )
        self.partition_counts = get_partition_counts(first.state, first.location)
        self.world_size = max(self.partition_counts)
        check_rank_files_complete(folder.path, optim_names, self.world_size, "optimizer")
        self._read_zero_options(first)
        if per_rank_model != (self.stage == 3):
            raise MixedCheckpointError(
                f"{location}: the optimizer states are from ZeRO stage {self.stage}, but the model states "
                "are not"
            )
        check_rank_files_complete(
            folder.path, model_names, self.world_size if self.stage == 3 else 1, "model"
        )
        self._check_files_of_one_run()
        if self.rank is None or self.stage != 3:
            self.model_files = read_model_files(
                folder, model, [name for rank, name in model_names.items() if rank]
            )
        else:
            self.model_files = [
                model if rank == self.rank else build_deferred_model_file(folder, name, model)
                for rank, name in model_names.items()
            ]
        if self.first_model_file.group_shapes is None:
            if self.first_model_file.is_pipeline:
                raise UnsupportedCheckpointError(
                    f"{self.first_model_file.location}: param_shapes is missing, and pipeline-parallel bf16 "
                    "checkpoints without ZeRO are not supported"
                )
            raise DamagedCheckpointError(f"{self.first_model_file.location}: param_shapes is missing")
        self.group_shapes = self.first_model_file.group_shapes
        self.shares = [
            share for group in range(len(self.group_shapes)) for share in self._compute_shares(group)
        ]
        self.flat_masters = self._collect_masters()
        # Only stages 1 and 2 have slices.
        self.slice_layouts = (
            []
            if self.stage == 3
            else [self._build_checked_slice_layout(*pair) for pair in self._pair_shares_with_flats()]
        )
        self.layouts: Sequence[GroupLayout] = self.slice_layouts
        if self.stage == 3:
            self.layouts = [
                Stage3GroupLayout(shapes, self.world_size, location) for shapes in self.group_shapes
            ]

    def _read_optim_files(self, names: Mapping[int, str]) -> list[OptimFile]:
        """Read the files of optimizer states.

        If `self.rank` is None, the files of all ranks are read. Otherwise, only the file of this
        rank is read. The other files are assumed to have the same structure, and each of them is
        opened when one of its values is needed. This requires ZeRO stage 3, or stage 1 or 2 with
        `param_shapes` in the model states. Otherwise, as for BF16_Optimizer, `self.rank` is set to
        None, and all files are read.

        Args:
            names: Names of the files, keyed by data-parallel rank.
        """
        if self.rank is not None:
            own_file = read_optim_file(self.folder, names[self.rank])
            stage = own_file.state.get("zero_stage")
            if stage == 3 or (stage in (1, 2) and self.first_model_file.group_shapes):
                slices = None if stage == 3 else self._build_slice_layouts(own_file)
                return [
                    own_file
                    if rank == self.rank
                    else self._build_deferred_optim_file(own_file, name, rank, slices)
                    for rank, name in names.items()
                ]
            self.rank = None
        return list(
            map_with_prefetch(self.folder.path, partial(read_optim_file, self.folder), names.values())
        )

    def _build_deferred_optim_file(
        self, template: OptimFile, name: str, rank: int, slices: list[Stage12GroupLayout] | None
    ) -> OptimFile:
        """Describe the optimizer file of another rank without opening that file.

        The file is assumed to have the same structure as this rank's file.

        Args:
            template: File of this rank.
            name: Name of the other rank's file.
            rank: The other rank.
            slices: Layout of each parameter group in ZeRO stage 1 or 2. None in stage 3.
        """
        assert self.rank is not None
        lengths = None
        if slices is not None:
            lengths = [
                SliceLengths(
                    layout.count_unpadded_elements(self.rank),
                    layout.count_unpadded_elements(rank),
                    layout.slice_numel,
                )
                for layout in slices
            ]
        return build_deferred_optim_file(self.folder, name, template, lengths)

    def _build_slice_layouts(self, optim_file: OptimFile) -> list[Stage12GroupLayout]:
        """Compute the layout of each flat parameter group of ZeRO stage 1 or 2 from one rank's file.

        Args:
            optim_file: Optimizer states of one rank. Any rank gives the same layouts.

        Raises:
            CheckpointError: If the file lacks a parameter group, or if its records do not fit the
                parameters.
        """
        slices = []
        masters = optim_file.state.get(MASTERS)
        for group, shapes in enumerate(self.first_model_file.group_shapes or ()):
            if not isinstance(masters, list) or group >= len(masters):
                raise DamagedCheckpointError(
                    f"{optim_file.location}: damaged: parameter group {group} is missing"
                )
            size = prod(
                require_contiguous(masters[group], f"{optim_file.location}: {MASTERS}").shape
            ) + optim_file.get_slice_padding(group)
            world = max(get_partition_counts(optim_file.state, optim_file.location))
            slices.append(
                Stage12GroupLayout(
                    shapes, optim_file.get_alignment_gaps(group, len(shapes)), world, size, self.location
                )
            )
        return slices

    def _compute_shares(self, group: int) -> list[GroupOnRanks]:
        """Find the sets of ranks over which a flat parameter group is partitioned.

        A group of expert parameters is partitioned separately for each set of experts, over the
        ranks that have these experts. Any other group is partitioned over all ranks.

        Args:
            group: Index of the group.

        Returns:
            One `GroupOnRanks` for each set of ranks.

        Raises:
            CheckpointError: If the number of partitions contradicts the number of ranks, or if the
                files of the experts are missing.
        """
        location, shapes = self.optim_files[0].location, self.group_shapes[group]
        if len(self.partition_counts) not in (1, len(self.group_shapes)):
            raise DamagedCheckpointError(
                f"{location}: damaged: partition_count does not match the parameter groups"
            )
        count = self.partition_counts[group if len(self.partition_counts) > 1 else 0]
        has_experts = self.expert_files is not None and self.expert_files.has_only_expert_parameters(shapes)
        if not has_experts and count != self.world_size:
            raise DamagedCheckpointError(
                f"{location}: the partition count of parameter group {group} is {count} instead of "
                f"{self.world_size}, so the group contains experts, but the files of its experts are missing"
            )
        if not has_experts:
            return [GroupOnRanks(group, tuple(range(self.world_size)), {name: name for name in shapes})]
        assert self.expert_files is not None
        if self.world_size % count:
            raise DamagedCheckpointError(
                f"{location}: damaged: parameter group {group} is sharded across {count} ranks, but the "
                f"{self.world_size} ranks cannot be divided evenly into groups of {count}"
            )
        num_sets = self.world_size // count
        # In one of DeepSpeed's topologies, neighboring ranks have the same experts. In the other topology,
        # they have different experts.
        is_contiguous = self.optim_files[0].config.get("use_data_before_expert_parallelism") is True
        return [
            GroupOnRanks(
                group,
                tuple(
                    range(index * count, (index + 1) * count)
                    if is_contiguous
                    else range(index, self.world_size, num_sets)
                ),
                self.expert_files.map_to_complete_names(
                    shapes, index, chain.from_iterable(self.group_shapes)
                ),
            )
            for index in range(num_sets)
        ]

    def _read_zero_options(self, first: OptimFile) -> None:
        """Set `zero_options` and `uses_mics` from the DeepSpeed config.

        `zero_options` is the section `zero_optimization`, or an empty dict if it is missing.
        `uses_mics` is True if `mics_shard_size` is positive.

        Args:
            first: Optimizer file that contains the config.

        Raises:
            CheckpointError: If MiCS is used without ZeRO-3, or with a shard size other than the
                number of partitions. Also raised if `zero_quantized_nontrainable_weights` is set.
        """
        options = first.config.get("zero_optimization")
        self.zero_options: dict[str, Any] = options if isinstance(options, dict) else {}
        shards = self.zero_options.get("mics_shard_size", -1)
        # With MiCS, each group of `mics_shard_size` ranks has the complete model. All groups write the same
        # files.
        self.uses_mics = type(shards) is int and shards > 0
        if self.uses_mics and (self.stage, self.world_size) != (3, shards):
            raise UnsupportedCheckpointError(
                f"{first.location}: MiCS with mics_shard_size {shards} is only supported with ZeRO-3 and "
                f"partition_count {shards}, not with ZeRO-{self.stage} and partition_count {self.world_size}"
            )
        if self.zero_options.get("zero_quantized_nontrainable_weights") is True:
            raise UnsupportedCheckpointError(
                f"{first.location}: quantized frozen weights (zero_quantized_nontrainable_weights) are not "
                "supported"
            )

    def _check_files_of_one_run(self) -> None:
        """Check that all files are from one run.

        All optimizer files must record the same values, such as the ZeRO stage and the DeepSpeed
        version. The model states must record the same DeepSpeed version and config as the optimizer
        files. They must also record the same number of data-parallel ranks or, with MiCS, a
        multiple of this number. A missing number is accepted. Files that are not open yet are
        checked when they are opened.

        Raises:
            CheckpointError: If a recorded value or the number of ranks differs.
        """
        model, first = self.first_model_file, self.optim_files[0].get_rank_independent_records()
        for rank in self.optim_files:
            for record, value in rank.get_rank_independent_records().items():
                check_equal_records(rank.location, record, value, first[record])
        for record, value in model.get_rank_independent_records().items():
            if record in ("ds_version", "ds_config"):
                check_equal_records(model.location, record, value, first[record])
        count = model.get_counter("dp_world_size")
        if count is not None and (count % self.world_size if self.uses_mics else count != self.world_size):
            raise MixedCheckpointError(
                f"{model.location}: the number of data-parallel ranks is {count:,} here, but "
                f"{self.world_size:,} in the optimizer states"
            )

    def _collect_masters(self) -> list[Flat]:
        """Collect the fp32 master weights as one flat buffer per entry of `shares`.

        An entry of `shares` is a parameter group together with the ranks that store its partitions.
        Buffers that were offloaded to NVMe are read from the swap files.

        Raises:
            CheckpointError: If a rank lacks a group, if the buffers of two groups overlap in a
                file, or if the ranks store the same buffer with different dtypes.
        """
        key = _FP32_GROUPS if self.stage == 3 else MASTERS

        def get_rank_pieces(rank: OptimFile) -> list[FlatPiece]:
            groups = rank.state.get(key)
            if not isinstance(groups, (list, tuple)) or len(groups) != len(self.group_shapes):
                count = len(groups) if isinstance(groups, (list, tuple)) else 0
                raise DamagedCheckpointError(
                    f"{rank.location}: the number of parameter groups is {count:,} here, but "
                    f"{len(self.group_shapes)} in the model states"
                )
            stored = [require_contiguous(group, f"{rank.location}: {key}") for group in groups]
            check_disjoint_bytes(stored, rank.location)
            return [to_flat_piece(group) for group in stored]

        by_rank = list(map_with_prefetch(self.folder.path, get_rank_pieces, self.optim_files))
        if self.stage == 3:
            self._replace_empty_with_swap_files(by_rank)
        return [
            require_equal_dtypes([by_rank[rank][share.group_index] for rank in share.ranks], self.location)
            for share in self.shares
        ]

    def _replace_empty_with_swap_files(self, by_rank: list[list[FlatPiece]]) -> None:
        """Replace each piece that has no data with a piece that reads the NVMe swap file.

        A piece is one rank's part of a flat buffer. It has no data if the data was offloaded to
        NVMe when the checkpoint was saved.

        Args:
            by_rank: Pieces of each rank and sub-group. Modified in place.
        """
        layouts = [Stage3GroupLayout(shapes, self.world_size, self.location) for shapes in self.group_shapes]
        for rank, pieces in enumerate(by_rank):
            for group, (piece, layout) in enumerate(zip(pieces, layouts, strict=True)):
                if not piece.numel and layout.rank_numel:
                    pieces[group] = self.swap_files.open_flat_piece(rank, layout, piece.dtype)

    @cached_property
    def swap_files(self) -> SwapFiles:
        """NVMe swap files of the run, with offloaded master weights and optimizer states."""
        buffers = {*self.first_model_file.buffers, *self.first_model_file.tied_names}
        return SwapFiles(self.folder, [name for name in self.first_model_file.module if name not in buffers])

    def _pair_shares_with_flats(self) -> list[tuple[GroupOnRanks, Flat]]:
        """Return each entry of `shares` together with its flat fp32 master weights.

        An entry is a parameter group together with the ranks that store its partitions. The pairs
        have the order of `shares`.
        """
        return list(zip(self.shares, self.flat_masters, strict=True))

    def _build_checked_slice_layout(self, share: GroupOnRanks, masters: Flat) -> Stage12GroupLayout:
        """Compute the layout of a flat group of ZeRO stage 1 or 2, and check it against all ranks.

        Args:
            share: Parameter group, and the ranks over which it is partitioned.
            masters: Flat fp32 master weights of the group.

        Raises:
            CheckpointError: If a rank records a different size, padding, or `param_slice_mappings`.
        """
        group, ranks = share.group_index, [self.optim_files[rank] for rank in share.ranks]
        sizes = [piece.numel for piece in masters]
        paddings = [rank.get_slice_padding(group) for rank in ranks]
        slice_sizes = [
            count if self.bf16_optimizer else count + padding
            for count, padding in zip(sizes, paddings, strict=True)
        ]
        if len(set(slice_sizes)) != 1:
            raise DamagedCheckpointError(
                f"{self.location}: damaged: the ranks' slices of parameter group {group} differ in size"
            )
        gaps = self.optim_files[0].get_alignment_gaps(group, len(self.group_shapes[group]))
        layout = Stage12GroupLayout(self.group_shapes[group], gaps, len(ranks), slice_sizes[0], self.location)
        total = layout.slice_numel * len(ranks) - layout.used_numel
        for index, (rank, padding) in enumerate(zip(ranks, paddings, strict=True)):
            expected = layout.count_padding_elements(index)
            if self.bf16_optimizer:  # BF16_Optimizer records all padding on the last rank
                expected = total if index == len(ranks) - 1 else 0
            if padding != expected:
                raise DamagedCheckpointError(
                    f"{rank.location}: the padding of parameter group {group} is {padding:,} instead "
                    f"of {expected:,}"
                )
        self._check_slice_mappings(share, layout)
        return layout

    def _check_slice_mappings(self, share: GroupOnRanks, layout: Stage12GroupLayout) -> None:
        """Check that `param_slice_mappings` of each rank agrees with the layout.

        Missing mappings are accepted. The check is skipped if `round_robin_gradients` is set and
        the layout has no alignment gaps, because the recorded order is then not the stored order.

        Raises:
            CheckpointError: If the mappings of a rank are damaged or contradict the layout.
        """
        group = share.group_index
        if self.zero_options.get("round_robin_gradients") is True and not any(layout.gaps):
            # With round_robin_gradients, DeepSpeed records the order before it reorders the parameters; the
            # values are compared anyway.
            return
        for number, rank in enumerate(self.optim_files[rank] for rank in share.ranks):
            mappings = rank.state.get("param_slice_mappings")
            if mappings is None:  # before DeepSpeed 0.7
                continue
            table = mappings[group] if isinstance(mappings, list) and group < len(mappings) else None
            if not isinstance(table, dict):
                raise DamagedCheckpointError(
                    f"{rank.location}: damaged: param_slice_mappings does not contain parameter group {group}"
                )
            recorded = {name: parse_fragment_address(value, rank.location) for name, value in table.items()}
            expected = layout.compute_fragments(number)
            if recorded != expected:
                name = next(
                    (name for name in {**expected, **recorded} if recorded.get(name) != expected.get(name)),
                    "",
                )
                raise DamagedCheckpointError(
                    f"{rank.location}: damaged: param_slice_mappings and param_shapes contradict each other "
                    f"about {name!r} on rank {number} of {layout.world_size}"
                )

    def build_weights(self) -> NamedWeights:
        """Build the fp32 master weights, frozen parameters, and buffers of the model.

        Below stage 3, a sample of the master weights is compared with the weights in the model
        states, to detect files from different steps. In stage 3, or if no values can be compared,
        the step counts of the optimizer and the model states are compared instead. The step counts
        are not compared if the model states contribute no tensors.

        Raises:
            CheckpointError: If the copies of a value differ, if a parameter is in two groups, or if
                the optimizer states of the ranks record different step counts. Also raised if the
                step counts of the optimizer and the model states are compared and differ.
        """
        masters: dict[str, Tensor] = {}
        for layout, (share, flat_) in zip(self.layouts, self._pair_shares_with_flats(), strict=True):
            for name, tensor in layout.split_into_parameters(flat_).items():
                name = share.complete_names[name]
                if name in masters:
                    raise DamagedCheckpointError(
                        f"{self.first_model_file.location}: {name!r} is in two parameter groups"
                    )
                masters[name] = tensor
        compared = self.stage != 3 and self._compare_with_module()
        weights = combine_with_model_states(
            masters, self.model_files, self._complete_module, self.stage, self.world_size
        )
        steps = read_step_count(self.folder.path, self.stage, self.optim_files, len(self.group_shapes))
        self._check_step_counts(steps, compared or len(weights.tensors) == len(masters))
        return weights

    def build_optimizer(self) -> OptimizerState | None:
        """Build the optimizer state and groups, or return None if the files do not contain them."""
        return build_zero_optimizer(self.stage, self.optim_files, self.layouts, self.shares, self.swap_files)

    @cached_property
    def _complete_module(self) -> dict[str, Any]:
        """State dict from the model states, completed with the weights from the expert files."""
        return {
            **self.first_model_file.module,
            **({} if self.expert_files is None else self.expert_files.tensors),
        }

    def _compare_with_module(self) -> bool:
        """Check that the master weights match the weights in the model states.

        The shapes, the positions in the flat buffers, and a sample of the values are compared. If
        `self.rank` is set, only values of this rank are compared. With ZenFlow, no values are
        compared. In stage 3, nothing is checked.

        Returns:
            Whether any values were compared.

        Raises:
            CheckpointError: If a shape, a position, or a value differs.
        """
        compared = 0
        for layout, (share, flat_) in zip(self.slice_layouts, self._pair_shares_with_flats(), strict=True):
            compared += compare_with_module_weights(
                layout,
                share,
                flat_,
                self._complete_module,
                self.first_model_file.location,
                # Tied layers have other names in the files of a pipeline, so their weights may be missing
                # here. They are compared later.
                optional_names=[
                    name
                    for name in share.complete_names
                    if self.first_model_file.is_pipeline and name.startswith(TIED)
                ],
                zenflow="zenflow" in self.zero_options,
                sampled_ranks=None if self.rank is None else [self.rank],
            )
        return compared > 0

    def _check_step_counts(self, steps: int | None, compared: bool) -> None:
        """Check that the optimizer's step count agrees with the counters in the model states.

        Args:
            steps: Number of optimizer steps. If None, nothing is checked.
            compared: Whether to skip the check, because it is not needed. This is the case if the
                master weights equal the weights in the model states, which proves that both are
                from the same step. It is also the case if the model states contribute no tensors.

        Raises:
            CheckpointError: If the step count and the counters disagree.
        """
        total, skipped = (
            self.first_model_file.get_counter("global_steps"),
            self.first_model_file.get_counter("skipped_steps") or 0,
        )
        if steps is None or total is None or compared:
            return
        if steps != total - skipped:
            raise DamagedCheckpointError(
                f"{self.first_model_file.location}: records step {total - skipped}, but the optimizer "
                f"states are at step {steps}"
            )


def check_ranks_of_one_run(runs: Sequence[SavedRun]) -> None:
    """Check that the files of all tensor-parallel ranks or pipeline stages are from one run and step.

    Args:
        runs: Files of each tensor-parallel rank or pipeline stage.

    Raises:
        CheckpointError: If a recorded value, such as the step count, the ZeRO stage or the
            DeepSpeed config, differs between them.
    """
    first = _get_rank_independent_records(runs[0])
    for run in runs[1:]:
        for record, value in _get_rank_independent_records(run).items():
            check_equal_records(run.first_model_file.location, record, value, first[record])


def _get_rank_independent_records(run: SavedRun) -> dict[str, Any]:
    """Return the values that must be equal on all tensor-parallel ranks or pipeline stages.

    Examples are the step counts, the DeepSpeed config and the ZeRO stage.

    Returns:
        The values, keyed by a description that is used in error messages.
    """
    model = run.first_model_file
    return {
        **{
            counter: model.get_counter(counter)
            for counter in ("global_steps", "skipped_steps", "global_samples")
        },
        "ds_version": run.optim_files[0].version,
        "ds_config": to_json_value(model.content.get("ds_config")),
        "ZeRO stage": run.stage,
        "world size": run.world_size,
        "parallel degrees": model.parallel_degrees,
    }
