"""Read DeepSpeed universal checkpoints, written by `ds_to_universal` with one folder per parameter.

`zero/<parameter>/` contains the fp32 master weight and each moment in a separate file. If the model
was trained with ZeRO stage 1 or 2, these tensors have the shapes of their parameters. With stage 3,
they are flat. `zero/optimizer_state.pt` contains the optimizer's parameter groups. The model
states, which are next to the folder `zero`, contain shapes, ties and buffers.

If the checkpoint contains a second copy of the parameters, each parameter's files are compared with
it. With stage 1 or 2, the weights in the model states are this copy, rounded to the compute dtype.
With stage 3, the copy is in the flat buffers of rank 0 in `zero/optimizer_state.pt`.

Source: deepspeed/checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.checkpoint import OptimizerState, Scalar
from portable.converters.containers.pickle_reader import format_untrusted_value
from portable.converters.containers.shard_index import check_rank_files_complete
from portable.converters.containers.torchzip import StoredTensor, TorchZip
from portable.converters.errors import (
    CheckpointError,
    DamagedCheckpointError,
    MixedCheckpointError,
    UnsupportedCheckpointError,
)
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.deepspeed.checks import sample_rounds_to_weight
from portable.converters.formats.deepspeed.flat_layout import Stage3GroupLayout, to_flat_piece
from portable.converters.formats.deepspeed.optimizer import build_named_group
from portable.converters.formats.deepspeed.rank_files import (
    PREFIXES,
    STANDINS,
    build_deepspeed_checkpoint,
    combine_with_model_states,
    find_rank_files,
    find_tag_folder,
    get_partition_counts,
    read_model_file,
    read_model_files,
    read_tag_file,
    require_contiguous,
)
from portable.converters.formats.torch_save.optimizer import to_lazy_tensor
from portable.converters.limits import MAX_COUNT
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.storage.folder_operations import map_with_prefetch
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from portable.converters.checkpoint import Checkpoint
    from portable.converters.formats.deepspeed.flat_layout import ParameterShapes
    from portable.converters.storage.path_or_url import AnyPath

LATEST = "latest_universal"
_DEEPSPEED_LATEST = "latest"
ZERO, COMMON = "zero", "zero/optimizer_state.pt"
MASTER, _STEP, _SUFFIX = "fp32", "step", ".pt"
NAME = "parameter"
"""Key under which `portable.converters.writers.universal_writer` stores a parameter's name in its
files.
"""
_SAMPLE = 64


def _is_universal(path: AnyPath) -> bool:
    """Return whether a folder contains a universal checkpoint.

    The folder is recognized by the file `zero/optimizer_state.pt`.
    """
    return (path / COMMON).is_file()


def _find_universal_folder(source: CheckpointPath) -> AnyPath | None:
    """Find the folder of the universal checkpoint at a path.

    Args:
        source: Path of the folder, of a file of model states in it, or of its parent folder. In a
            parent folder, `source.tag` or the file `latest_universal` selects the checkpoint.

    Returns:
        The folder, or None if the path does not contain a universal checkpoint. The result is also
        None if no tag is given and the parent folder contains the file `latest`. This file refers
        to the ZeRO checkpoint from which the universal checkpoint was converted. The ZeRO
        checkpoint is preferred, because it is more complete.
    """
    path = source.path
    if path.is_file():
        inside = path.name.endswith("_model_states.pt") and _is_universal(path.parent)
        return path.parent if inside else None
    if source.tag is not None:
        return find_tag_folder(path, source.tag, _is_universal)
    if _is_universal(path):
        return path
    if (path / _DEEPSPEED_LATEST).exists():
        return None  # prefer the complete run that it was converted from
    return find_tag_folder(path, read_tag_file(path / LATEST), _is_universal)


def _explain_incomplete(source: CheckpointPath) -> str | None:
    """Explain why a folder that resembles a universal checkpoint cannot be opened.

    Either the conversion by `ds_to_universal` did not finish, or the file `latest_universal` names
    a folder that is not a universal checkpoint.

    Returns:
        The reason as one line. None if the path does not look like a universal checkpoint.
    """
    if (source.path / ZERO).is_dir():
        return (
            f"{source.path / COMMON}: is missing, because ds_to_universal did not finish; run "
            "ds_to_universal again"
        )
    if tag := read_tag_file(source.path / LATEST):
        return (
            f"{source.path / LATEST}: refers to {format_untrusted_value(tag)}, which is not a universal "
            "checkpoint; specify the folder of a universal checkpoint"
        )
    return None


def _open_universal_checkpoint(source: CheckpointPath, universal_folder: AnyPath) -> Checkpoint:
    """Open the DeepSpeed universal checkpoint in the folder `universal_folder`.

    Args:
        source: Requested path. It becomes the root of the `Checkpoint`, and may be a parent of
            `universal_folder`.
        universal_folder: Folder that contains the files of the universal checkpoint.
    """
    return _UniversalFiles(CheckpointFolder(universal_folder)).build_checkpoint(source.path)


def load_zero_file(folder: CheckpointFolder, name: str) -> Any:
    """Load one file of the folder `zero/` without running code.

    Raises:
        CheckpointError: If the file is damaged, or if it was renamed after torch.save wrote it.
    """
    archive = TorchZip(folder.get_file(name))
    archive.check_not_renamed()
    return archive.load_object(STANDINS, PREFIXES)


class _FlatCopy(NamedTuple):
    """Position of rank 0's part of a parameter or optimizer state in a flat buffer.

    Attributes:
        flat_group: The flat buffer. It contains rank 0's parts of all parameters in a sub-group, a
            set of parameters that ZeRO stage 3 stores together.
        start: Index of the part's first element in the buffer.
        numel: Number of elements in the part.
    """

    flat_group: StoredTensor
    start: int
    numel: int


class _UniversalFiles:
    """Files of a universal checkpoint.

    The constructor reads the model states and `zero/optimizer_state.pt`, and lists the files in the
    parameters' folders. It checks that these files are from the same run. The parameters' files
    are read later, and are then checked too.

    Args:
        folder: Folder of the checkpoint.

    Raises:
        CheckpointError: If files are missing, damaged or from a different run, or if the run used a
            feature that is not supported, such as tensor parallelism.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        self.folder = folder
        self.location = str(folder.path)
        self.common_state = self._read_common_state()
        stage = self.common_state.get("zero_stage", 1)
        if type(stage) is not int or stage not in (1, 2, 3):
            raise UnsupportedCheckpointError(
                f"{folder.path / COMMON}: the ZeRO stage is {format_untrusted_value(stage)}, but only "
                "stages 1, 2 and 3 are supported"
            )
        self.stage: int = stage
        names = find_rank_files(folder.path)
        if names is None or not names.model:
            raise DamagedCheckpointError(f"{self.location}: the model states are missing")
        parallel_files = [
            files
            for names_by_rank in (names.optim, names.model)
            for rank, files in names_by_rank.items()
            if rank
        ]
        parallel = [
            *names.experts,
            *names.layers,
            *(name for files in parallel_files for name in files.values()),
        ]
        if parallel:
            raise UnsupportedCheckpointError(
                f"{folder.path / parallel[0]}: universal checkpoints of runs with tensor, pipeline or expert "
                "parallelism are not supported"
            )
        ranks = names.model[0]
        if names.optim or names.has_model_per_rank != (self.stage == 3):
            raise CheckpointError(
                f"{self.location}: contains files that do not belong to a universal checkpoint of ZeRO stage "
                f"{self.stage}; remove the rank files of other checkpoints"
            )
        self.world_size = self._get_world_size()
        check_rank_files_complete(folder.path, ranks, self.world_size if self.stage == 3 else 1, "model")
        first, *others = ranks.values()
        self.model = read_model_file(folder, first)
        if self.model.group_shapes is None:
            raise DamagedCheckpointError(f"{self.model.location}: param_shapes is missing")
        self.models = read_model_files(folder, self.model, others)
        self.group_shapes: list[ParameterShapes] = self.model.group_shapes
        self.shapes: ParameterShapes = {
            name: shape for group in self.group_shapes for name, shape in group.items()
        }
        if len(self.shapes) != sum(map(len, self.group_shapes)):
            raise DamagedCheckpointError(f"{self.model.location}: a parameter is in two parameter groups")
        self.state_names = self._list_state_names_by_parameter()
        self.rank0_copies = self._locate_rank0_copies() if self.stage == 3 else {}

    def _read_common_state(self) -> dict[str, Any]:
        """Read `zero/optimizer_state.pt`.

        Raises:
            CheckpointError: If the file is damaged or was renamed, or if it is from an expert-parallel run
                that records `ds_zero_partition_groups`.
        """
        common = load_zero_file(self.folder, COMMON)
        if not isinstance(common, dict):
            raise DamagedCheckpointError(
                f"{self.folder.path / COMMON}: is not the optimizer state of a universal checkpoint, because "
                "the file does not contain a dict"
            )
        if "ds_zero_partition_groups" in common:
            raise UnsupportedCheckpointError(
                f"{self.folder.path / COMMON}: expert-parallel checkpoints with ds_zero_partition_groups are "
                "not supported"
            )
        return common

    def _get_world_size(self) -> int:
        """Return the number of data-parallel ranks of the run.

        Raises:
            CheckpointError: If the number is missing, is too large, or differs between the
                optimizer's parameter groups.
        """
        counts = get_partition_counts(self.common_state, str(self.folder.path / COMMON))
        if counts[0] >= MAX_COUNT or any(count != counts[0] for count in counts):
            raise DamagedCheckpointError(
                f"{self.folder.path / COMMON}: damaged: partition_count is too large or differs between "
                "parameter groups"
            )
        return counts[0]

    def _list_state_names_by_parameter(self) -> dict[str, list[str]]:
        """List the names of each parameter's states, such as `fp32` and `exp_avg`.

        The names come from the files in the parameter's folder, `zero/<parameter>/`. The state
        `fp32` is the master weight.

        Raises:
            CheckpointError: If a folder does not belong to a parameter or contains an unexpected
                file, or if a parameter has no `fp32` file.
        """
        root = self.folder.path / ZERO
        files_by_name: dict[str, list[str]] = {}
        children: list[AnyPath] = list(root.iterdir())
        for path in sorted(children, key=lambda path: path.name):
            if path.is_dir():
                files = sorted(entry.name for entry in path.iterdir())
                unexpected_files = [name for name in files if not name.endswith(_SUFFIX)]
                if unexpected_files or (path.name not in self.shapes and path.name not in self.model.module):
                    raise CheckpointError(
                        f"{path / unexpected_files[0] if unexpected_files else path}: does not "
                        "belong to a parameter of the model; remove the files of other runs"
                    )
                files_by_name[path.name] = [name.removesuffix(_SUFFIX) for name in files]
        for name in self.shapes:
            if MASTER not in files_by_name.get(name, ()):
                raise DamagedCheckpointError(
                    f"{root / name / (MASTER + _SUFFIX)}: the file with the fp32 weight is missing"
                )
        return files_by_name

    def _locate_rank0_copies(self) -> dict[str, dict[str, _FlatCopy]]:
        """Locate rank 0's copies of the parameters and states in `zero/optimizer_state.pt`.

        Only ZeRO stage 3 stores these copies.

        Returns:
            Copies, keyed by the name of the parameter and then by the name of the state. The state
            name of an fp32 master weight is `fp32`. States without a nonempty flat buffer are
            omitted.

        Raises:
            CheckpointError: If the optimizer's state is missing, if a flat buffer is not
                contiguous, or if its size does not match the shapes of its parameters.
        """
        location = str(self.folder.path / COMMON)
        masters, states = (
            self.common_state.get("fp32_flat_groups"),
            _get_rank0_states(self.common_state, location),
        )
        copies: dict[str, dict[str, _FlatCopy]] = {}
        for index, shapes in enumerate(self.group_shapes):
            layout = Stage3GroupLayout(shapes, self.world_size, location)
            state = states.get(index)
            flat_tensors = dict(state) if isinstance(state, dict) else {}
            if isinstance(masters, list) and index < len(masters):
                flat_tensors[MASTER] = masters[index]
            for state_name, value in flat_tensors.items():
                if not isinstance(value, StoredTensor) or value.shape in ((), (0,)):
                    continue
                if require_contiguous(value, f"{location}: {state_name}").shape != (layout.rank_numel,):
                    raise DamagedCheckpointError(
                        f"{location}: damaged: the size of {state_name!r} does not match param_shapes"
                    )
                for name, shape in shapes.items():
                    count = min(layout.count_elements_per_rank(shape), prod(shape))
                    copies.setdefault(name, {})[str(state_name)] = _FlatCopy(
                        value, layout.rank_starts[name], count
                    )
        return copies

    def _read_parameter_file(self, name: str, state_name: str) -> Tensor:
        """Read the file of a parameter's master weight, or of one of its optimizer states.

        If the checkpoint contains a second copy of the tensor, a few values are compared with this
        copy. See `_check_against_second_copy`. The comparison is skipped if the file records the
        parameter's name and the model states do not contain the weight. `universal_writer` writes
        such files.

        Args:
            name: Name of the parameter.
            state_name: Name of the optimizer state, or `fp32` for the fp32 master weight.

        Returns:
            Lazy tensor with the shape of the parameter.

        Raises:
            CheckpointError: If the file belongs to a different parameter, to a different ZeRO
                stage, or to a run with tensor parallelism. Also raised if its shape differs from
                the recorded shape, or if its values differ from the second copy.
        """
        shape, file = self.shapes[name], f"{ZERO}/{name}/{state_name}{_SUFFIX}"
        location = str(self.folder.path / file)
        content = load_zero_file(self.folder, file)
        value = content.get("param") if isinstance(content, dict) else content
        recorded_name = content.get(NAME) if isinstance(content, dict) else None
        if recorded_name is not None and recorded_name != name:
            raise DamagedCheckpointError(
                f"{location}: contains the parameter {format_untrusted_value(recorded_name)} instead of "
                f"{name!r}"
            )
        allowed_keys = ("param", "cat_dim", NAME)
        extra = [key for key in content if key not in allowed_keys] if isinstance(content, dict) else []
        if extra:
            raise UnsupportedCheckpointError(
                f"{location}: the key {extra[0]!r} shows that the run used tensor parallelism, which is not "
                "supported"
            )
        stored = require_contiguous(value, location, any_shape=True)
        if stored.shape != (shape if isinstance(content, dict) else (prod(shape),)):
            raise DamagedCheckpointError(
                f"{location}: has shape {list(stored.shape)}, but the model states record {list(shape)}"
            )
        if isinstance(content, dict) == (self.stage == 3):
            raise DamagedCheckpointError(
                f"{location}: damaged: the file was not written by a run with ZeRO stage {self.stage}"
            )
        if recorded_name is None or name in self.model.module:
            self._check_against_second_copy(name, state_name, stored, location)
        suffix = "" if state_name == MASTER else f".{state_name}"
        if not prod(shape):
            return to_lazy_tensor(stored, name + suffix)
        view = stored.to_byte_view()
        return Tensor.from_source(name + suffix, stored.dtype, shape, view.source, view.offset)

    def _check_against_second_copy(
        self, name: str, state_name: str, stored: StoredTensor, location: str
    ) -> None:
        """Compare a few values of a tensor with its second copy in the checkpoint, if any.

        Up to three samples are compared, at the start, in the middle and at the end. Each sample
        has at most 64 values. Copies that cannot be compared, for example because a weight is not
        contiguous, are accepted.

        In ZeRO stage 3, `zero/optimizer_state.pt` contains rank 0's parts of the master weights and
        optimizer states, as flat buffers. These parts are the second copy. In stages 1 and 2, only
        a master weight has a second copy: the weight in the model states, which has been rounded to
        the compute dtype.

        Args:
            name: Name of the parameter.
            state_name: Name of the optimizer state, or `fp32` for the fp32 master weight.
            stored: Tensor to check.
            location: Path of the tensor's file, used in error messages.

        Raises:
            CheckpointError: If the values differ, or if the weight is missing in the model states
                or has a different shape there.
        """
        count = prod(stored.shape)
        if state_name in self.rank0_copies.get(name, {}):
            flat_group, base, count = self.rank0_copies[name][state_name]
            pairs = [(flat_group, base + sample, stored, sample) for sample in _choose_sample_starts(count)]
            copy_description = COMMON
        elif self.stage < 3 and state_name == MASTER:
            weight = self.model.module.get(name)
            if not isinstance(weight, StoredTensor) or weight.shape != self.shapes[name]:
                raise DamagedCheckpointError(
                    f"{self.model.location}: the weight {name!r} is missing or does not have the recorded "
                    f"shape {list(self.shapes[name])}"
                )
            pairs = [(stored, sample, weight, sample) for sample in _choose_sample_starts(count)]
            copy_description = "the model states"
        else:
            return
        for master, start, copy, copy_start in pairs:
            if (
                sample_rounds_to_weight(to_flat_piece(master), start, copy, count - copy_start, copy_start)
                is False
            ):
                raise MixedCheckpointError(
                    f"{location}: the values differ from the copy in {copy_description}"
                )

    def build_checkpoint(self, root: AnyPath) -> Checkpoint:
        """Build a checkpoint from the fp32 master weights and the model states.

        The optimizer state is read only when it is needed.

        Args:
            root: Path that was opened.
        """
        read = partial(self._read_parameter_file, state_name=MASTER)
        masters = dict(zip(self.shapes, map_with_prefetch(self.folder.path, read, self.shapes), strict=True))
        weights = combine_with_model_states(
            masters, self.models, self.model.module, self.stage, self.world_size
        )
        about = {"ds_version": self.common_state.get("ds_version"), "zero_stage": self.stage}
        path = self.folder.path
        return build_deepspeed_checkpoint(
            "deepspeed-universal", root, path, self.model, weights, self._build_optimizer, about
        )

    def _read_optimizer_state(self, key: tuple[str, str]) -> Tensor | Scalar:
        """Read one optimizer state of a parameter.

        Args:
            key: Name of the parameter, and name of the state, such as `exp_avg` or `step`.

        Returns:
            Lazy tensor with the shape of the parameter. For `step`, a number or a 0-d tensor.

        Raises:
            CheckpointError: If the file is damaged, or does not fit the parameter.
        """
        name, state_name = key
        if state_name != _STEP:
            return self._read_parameter_file(name, state_name)
        file = f"{ZERO}/{name}/{state_name}{_SUFFIX}"
        return _require_scalar(
            load_zero_file(self.folder, file), f"{name}.{state_name}", str(self.folder.path / file)
        )

    def _build_optimizer(self) -> OptimizerState | None:
        """Build the optimizer state, or return None if the files do not contain it.

        The result is None if no parameter's folder contains a state other than `fp32`. Parameters
        without states are accepted, and are omitted from the state.

        Raises:
            CheckpointError: If a parameter has some, but not all, of the states of the other
                parameters. Also raised if the step counts are invalid, or if the parameter groups
                are missing.
        """
        location = str(self.folder.path / COMMON)
        state: dict[str, dict[str, Tensor | Scalar]] = {}
        state_names = [set(self.state_names[name]) - {MASTER} for name in self.shapes]
        all_state_names = set().union(*state_names)
        for name, kind in zip(self.shapes, state_names, strict=True):
            if kind and kind != all_state_names:
                missing_state = sorted(all_state_names - kind)[0]
                raise DamagedCheckpointError(
                    f"{self.folder.path / ZERO / name / (missing_state + _SUFFIX)}: the file with this "
                    "optimizer state is missing"
                )
            if kind:
                state[name] = {}
        keys = [
            (name, state_name)
            for name, kind in zip(self.shapes, state_names, strict=True)
            for state_name in sorted(kind)
        ]
        for (name, state_name), value in zip(
            keys, map_with_prefetch(self.folder.path, self._read_optimizer_state, keys), strict=True
        ):
            state[name][state_name] = value
        if not state:
            return None
        self._add_stage3_numbers_to(state, location)
        self._check_step_counts(state)
        groups = self.common_state.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise DamagedCheckpointError(
                f"{location}: damaged: param_groups of the optimizer is missing or invalid"
            )
        return OptimizerState(
            state, [build_named_group(group, self.group_shapes, location) for group in groups]
        )

    def _add_stage3_numbers_to(self, state: dict[str, dict[str, Tensor | Scalar]], location: str) -> None:
        """Add the scalars of a ZeRO-3 optimizer, such as step counts, to the optimizer state.

        Stage 3 stores scalars only in `zero/optimizer_state.pt`, once per sub-group. Each parameter
        of the sub-group receives these values, if the parameter has an entry in `state`. Below
        stage 3, this method does nothing.

        Args:
            state: Optimizer state, keyed by parameter and then by state name. Modified in place.
            location: Path of `zero/optimizer_state.pt`, used in error messages.

        Raises:
            CheckpointError: If the optimizer's state is missing, or if a value is neither a number,
                a tensor nor None.
        """
        states = _get_rank0_states(self.common_state, location) if self.stage == 3 else {}
        for index, shapes in enumerate(self.group_shapes):
            values = states.get(index)
            for state_name, value in values.items() if isinstance(values, dict) else ():
                if value is None or (isinstance(value, StoredTensor) and value.shape):
                    continue
                for name in shapes:
                    if name in state:
                        state[name][str(state_name)] = _require_scalar(
                            value, f"{name}.{state_name}", location
                        )

    def _check_step_counts(self, state: dict[str, dict[str, Tensor | Scalar]]) -> None:
        """Check that the step counts of all parameters are equal and possible.

        A step count may be lower, but not higher, than the number of steps that the engine has
        counted without the skipped steps. If the engine's count is not recorded, there is no limit.
        Parameters without a step count are ignored.

        Raises:
            CheckpointError: If a step count differs or is too large.
        """
        total, skipped = self.model.get_counter("global_steps"), self.model.get_counter("skipped_steps") or 0
        steps: dict[str, float] = {}
        for name, values in state.items():
            step = values.get(_STEP)
            if step is not None:
                steps[name] = float(step.read().item() if isinstance(step, Tensor) else step)
        first = next(iter(steps.values()), 0.0)
        for name, count in steps.items():
            if count != first or (total is not None and count > total - skipped):
                raise DamagedCheckpointError(
                    f"{self.folder.path / ZERO / name}: is at step {count:g}, but must be at the step of the "
                    f"first parameter ({first:g}), and at most at global_steps ({total}) minus "
                    f"skipped_steps ({skipped})"
                )


def _get_rank0_states(common: dict[str, Any], location: str) -> dict[Any, Any]:
    """Return rank 0's state of the base optimizer, which stage 3 stores in `zero/optimizer_state.pt`.

    Args:
        common: Content of `zero/optimizer_state.pt`.
        location: Path of the file, used in error messages.

    Returns:
        The states, keyed by sub-group index.

    Raises:
        CheckpointError: If the state is missing.
    """
    base = common.get("optimizer_state_dict")
    state = base.get("state") if isinstance(base, dict) else None
    if not isinstance(state, dict):
        raise DamagedCheckpointError(f"{location}: damaged: the state of the optimizer is missing")
    return state


def _require_scalar(value: Any, name: str, location: str) -> Tensor | Scalar:
    """Return a number unchanged, or convert a 0-d tensor to a lazy tensor.

    Raises:
        CheckpointError: If the value is neither a number nor a 0-d tensor.
    """
    if isinstance(value, StoredTensor) and value.shape == ():
        return to_lazy_tensor(value, name)
    if isinstance(value, (int, float)):
        return value
    raise DamagedCheckpointError(f"{location}: {name!r} is not a number")


def _choose_sample_starts(count: int) -> list[int]:
    """Choose the start indices of samples at the start, in the middle and at the end of a tensor.

    Args:
        count: Number of elements in the tensor.

    Returns:
        Index of the first element of each sample, sorted. Empty if `count` is 0.
    """
    return sorted({0, count // 2, max(0, count - _SAMPLE)}) if count else []


FORMAT = Format(
    "deepspeed-universal",
    _find_universal_folder,
    _open_universal_checkpoint,
    _explain_incomplete,
    selects_tag=True,
)
