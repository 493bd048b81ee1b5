"""DeepSpeed universal checkpoints, written by `ds_to_universal`: one folder per parameter.

`zero/<parameter>/` holds the fp32 master and each moment in a file of its own, shaped (from stages 1 and 2)
or flat (from stage 3); `zero/optimizer_state.pt` holds the groups; the model states beside have shapes, ties
and buffers. The parameters' files are checked against the model states (the rounded weights, below stage 3)
and against rank 0's flat groups in the common file (stage 3).

Source: deepspeed/checkpoint/ds_to_universal.py.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.checkpoint import OptimizerState, Scalar
from portable.converters.containers.pickle_reader import format_value
from portable.converters.containers.shard_index import check_ranks
from portable.converters.containers.torchzip import StoredTensor, TorchZip
from portable.converters.errors import CheckpointError
from portable.converters.formats import CheckpointPath, Format
from portable.converters.formats.deepspeed.checks import rounds_to
from portable.converters.formats.deepspeed.flat_layout import WholeParameters, to_piece
from portable.converters.formats.deepspeed.optimizer import name_group_parameters
from portable.converters.formats.deepspeed.rank_files import (
    PREFIXES,
    STANDINS,
    build_checkpoint,
    find_names,
    find_tag_folder,
    partition_counts,
    read_model,
    read_models,
    read_tag,
    require_flat,
    with_model_states,
)
from portable.converters.formats.torch_save.optimizer import as_tensor
from portable.converters.limits import MAX_COUNT
from portable.converters.storage.folder import Folder
from portable.converters.storage.folder_operations import map_ahead
from portable.converters.tensors.tensor import Tensor

if TYPE_CHECKING:
    from portable.converters.checkpoint import Checkpoint
    from portable.converters.formats.deepspeed.flat_layout import Shapes
    from portable.converters.storage.path_or_url import Place

LATEST = "latest_universal"
_DEEPSPEED_LATEST = "latest"
ZERO, COMMON = "zero", "zero/optimizer_state.pt"
MASTER, _STEP, _SUFFIX = "fp32", "step", ".pt"
# The parameter's name in each of its files, which `portable.converters.writers.universal_writer` adds.
NAME = "parameter"
_SAMPLE = 64


def _is_universal(path: Place) -> bool:
    return (path / COMMON).is_file()


def _find_folder(source: CheckpointPath) -> Place | None:
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
    return find_tag_folder(path, read_tag(path / LATEST), _is_universal)


def _explain_incomplete(source: CheckpointPath) -> str | None:
    if (source.path / ZERO).is_dir():
        return f"{source.path / COMMON}: missing: ds_to_universal did not finish; run it again"
    if tag := read_tag(source.path / LATEST):
        return f"{source.path / LATEST}: names {format_value(tag)}, which is not a universal checkpoint"
    return None


def _open(source: CheckpointPath, path: Place) -> Checkpoint:
    return _Universal(Folder(path)).build_checkpoint(source.path)


def load_part(folder: Folder, name: str) -> Any:
    """One file of `zero/`, refused if renamed (torch.save stores the original name)."""
    archive = TorchZip(folder.file(name))
    archive.refuse_renamed()
    return archive.load(STANDINS, PREFIXES)


class _FlatCopy(NamedTuple):
    """Rank 0's elements of one parameter or state.

    Attributes:
        flat_group: Flat buffer of the sub-group.
        start: First element in the buffer.
        numel: Number of elements.
    """

    flat_group: StoredTensor
    start: int
    numel: int


class _Universal:
    """The files of one universal checkpoint, read and compared."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.where = str(folder.path)
        self.common = self._read_common_state()
        stage = self.common.get("zero_stage", 1)
        if type(stage) is not int or stage not in (1, 2, 3):
            raise CheckpointError(f"{folder.path / COMMON}: unknown ZeRO stage")
        self.stage: int = stage
        names = find_names(folder.path)
        if names is None or not names.model:
            raise CheckpointError(f"{self.where}: the model states are missing")
        of_ranks = [
            files
            for names_by_rank in (names.optim, names.model)
            for rank, files in names_by_rank.items()
            if rank
        ]
        parallel = [*names.experts, *names.layers, *(name for files in of_ranks for name in files.values())]
        if parallel:
            raise CheckpointError(
                f"{folder.path / parallel[0]}: universal checkpoints of tensor, pipeline or expert parallel "
                "runs are not supported"
            )
        ranks = names.model[0]
        if names.optim or names.per_rank_model != (self.stage == 3):
            raise CheckpointError(f"{self.where}: holds files from a run with another ZeRO stage")
        self.world = self._read_world_size()
        check_ranks(folder.path, ranks, self.world if self.stage == 3 else 1, "model")
        first, *others = ranks.values()
        self.model = read_model(folder, first)
        if self.model.groups is None:
            raise CheckpointError(f"{self.model.where}: has no param_shapes")
        self.models = read_models(folder, self.model, others)
        self.groups: list[Shapes] = self.model.groups
        self.shapes: Shapes = {name: shape for group in self.groups for name, shape in group.items()}
        if len(self.shapes) != sum(map(len, self.groups)):
            raise CheckpointError(f"{self.model.where}: a parameter is in two groups")
        self.folders = self._find_parameter_files()
        self.rank0 = self._locate_rank0_copies() if self.stage == 3 else {}

    def _read_common_state(self) -> dict[str, Any]:
        common = load_part(self.folder, COMMON)
        if not isinstance(common, dict):
            raise CheckpointError(
                f"{self.folder.path / COMMON}: not the optimizer state of a universal checkpoint"
            )
        if "ds_zero_partition_groups" in common:
            raise CheckpointError(
                f"{self.folder.path / COMMON}: expert parallel checkpoints are not supported"
            )
        return common

    def _read_world_size(self) -> int:
        counts = partition_counts(self.common, str(self.folder.path / COMMON))
        if counts[0] >= MAX_COUNT or any(count != counts[0] for count in counts):
            raise CheckpointError(f"{self.folder.path / COMMON}: damaged, no partition_count")
        return counts[0]

    def _find_parameter_files(self) -> dict[str, list[str]]:
        """Parameter -> its files; a folder for a name not in the model states is refused."""
        root = self.folder.path / ZERO
        files_by_name: dict[str, list[str]] = {}
        children: list[Place] = list(root.iterdir())
        for path in sorted(children, key=lambda path: path.name):
            if path.is_dir():
                files = sorted(entry.name for entry in path.iterdir())
                strange = [name for name in files if not name.endswith(_SUFFIX)]
                if strange or (path.name not in self.shapes and path.name not in self.model.module):
                    raise CheckpointError(
                        f"{path / strange[0] if strange else path}: belongs to no parameter of the model"
                    )
                files_by_name[path.name] = [name.removesuffix(_SUFFIX) for name in files]
        for name in self.shapes:
            if MASTER not in files_by_name.get(name, ()):
                raise CheckpointError(f"{root / name / (MASTER + _SUFFIX)}: missing")
        return files_by_name

    def _locate_rank0_copies(self) -> dict[str, dict[str, _FlatCopy]]:
        """Locate rank 0's copy of each parameter and state, which stage 3 keeps in the common file."""
        location = str(self.folder.path / COMMON)
        masters, states = self.common.get("fp32_flat_groups"), _get_rank0_states(self.common, location)
        copies: dict[str, dict[str, _FlatCopy]] = {}
        for index, shapes in enumerate(self.groups):
            layout = WholeParameters(shapes, self.world, location)
            state = states.get(index)
            runs = dict(state) if isinstance(state, dict) else {}
            if isinstance(masters, list) and index < len(masters):
                runs[MASTER] = masters[index]
            for state_name, value in runs.items():
                if not isinstance(value, StoredTensor) or value.shape in ((), (0,)):
                    continue
                if require_flat(value, f"{location}: {state_name}").shape != (layout.length,):
                    raise CheckpointError(
                        f"{location}: damaged, the size of a flat group does not match param_shapes"
                    )
                for name, shape in shapes.items():
                    count = min(layout.count_elements_per_rank(shape), prod(shape))
                    copies.setdefault(name, {})[str(state_name)] = _FlatCopy(value, layout.bases[name], count)
        return copies

    def _read_parameter(self, name: str, state_name: str) -> Tensor:
        """One file of a parameter, in the parameter's shape."""
        shape, file = self.shapes[name], f"{ZERO}/{name}/{state_name}{_SUFFIX}"
        location = str(self.folder.path / file)
        content = load_part(self.folder, file)
        value = content.get("param") if isinstance(content, dict) else content
        recorded_name = content.get(NAME) if isinstance(content, dict) else None
        if recorded_name is not None and recorded_name != name:
            raise CheckpointError(f"{location}: belongs to the parameter {format_value(recorded_name)}")
        allowed_keys = ("param", "cat_dim", NAME)
        extra = [key for key in content if key not in allowed_keys] if isinstance(content, dict) else []
        if extra:
            raise CheckpointError(
                f"{location}: merged from tensor parallel ranks ({extra[0]}), which is not supported"
            )
        stored = require_flat(value, location, whole=True)
        if stored.shape != (shape if isinstance(content, dict) else (prod(shape),)):
            raise CheckpointError(
                f"{location}: is {list(stored.shape)}, the model states record {list(shape)}"
            )
        if isinstance(content, dict) == (self.stage == 3):
            raise CheckpointError(f"{location}: damaged, not in the form written for ZeRO stage {self.stage}")
        if recorded_name is None or name in self.model.module:
            self._compare_with_copy(name, state_name, stored, location)
        suffix = "" if state_name == MASTER else f".{state_name}"
        if not prod(shape):
            return as_tensor(stored, name + suffix)
        view = stored.to_view()
        return Tensor.from_source(name + suffix, stored.dtype, shape, view.source, view.offset)

    def _compare_with_copy(self, name: str, state_name: str, stored: StoredTensor, location: str) -> None:
        """Compare sampled values with the second copy, if there is one."""
        count = prod(stored.shape)
        if state_name in self.rank0.get(name, {}):
            run, base, count = self.rank0[name][state_name]
            pairs = [(run, base + sample, stored, sample) for sample in _choose_samples(count)]
            other = COMMON
        elif self.stage < 3 and state_name == MASTER:
            weight = self.model.module.get(name)
            if not isinstance(weight, StoredTensor) or weight.shape != self.shapes[name]:
                raise CheckpointError(f"{self.model.where}: {name!r} is missing or not of its recorded shape")
            pairs = [(stored, sample, weight, sample) for sample in _choose_samples(count)]
            other = "the model states"
        else:
            return
        for left, start, right, within in pairs:
            if rounds_to(to_piece(left), start, right, count - within, within) is False:
                raise CheckpointError(
                    f"{location}: its values differ from {other}; a file of another parameter or step"
                )

    def build_checkpoint(self, root: Place) -> Checkpoint:
        read = partial(self._read_parameter, state_name=MASTER)
        masters = dict(zip(self.shapes, map_ahead(self.folder.path, read, self.shapes), strict=True))
        weights = with_model_states(masters, self.models, self.model.module, self.stage, self.world)
        about = {"ds_version": self.common.get("ds_version"), "zero_stage": self.stage}
        path = self.folder.path
        return build_checkpoint(
            "deepspeed-universal", root, path, self.model, weights, self._build_optimizer, about
        )

    def _read_state(self, key: tuple[str, str]) -> Tensor | Scalar:
        """Read one optimizer state of a parameter."""
        name, state_name = key
        if state_name != _STEP:
            return self._read_parameter(name, state_name)
        file = f"{ZERO}/{name}/{state_name}{_SUFFIX}"
        return _read_scalar(
            load_part(self.folder, file), f"{name}.{state_name}", str(self.folder.path / file)
        )

    def _build_optimizer(self) -> OptimizerState | None:
        location = str(self.folder.path / COMMON)
        state: dict[str, dict[str, Tensor | Scalar]] = {}
        kinds = [set(self.folders[name]) - {MASTER} for name in self.shapes]
        every = set().union(*kinds)
        for name, kind in zip(self.shapes, kinds, strict=True):
            if kind and kind != every:
                lost = sorted(every - kind)[0]
                raise CheckpointError(f"{self.folder.path / ZERO / name / (lost + _SUFFIX)}: missing")
            if kind:
                state[name] = {}
        keys = [
            (name, state_name)
            for name, kind in zip(self.shapes, kinds, strict=True)
            for state_name in sorted(kind)
        ]
        for (name, state_name), value in zip(
            keys, map_ahead(self.folder.path, self._read_state, keys), strict=True
        ):
            state[name][state_name] = value
        if not state:
            return None
        self._add_stage3_steps(state, location)
        self._check_steps(state)
        groups = self.common.get("param_groups")
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise CheckpointError(f"{location}: damaged, it has no param_groups")
        return OptimizerState(
            state, [name_group_parameters(group, self.groups, location) for group in groups]
        )

    def _add_stage3_steps(self, state: dict[str, dict[str, Tensor | Scalar]], location: str) -> None:
        """Stage 3 keeps its steps (and other numbers) in the common file, per sub-group."""
        states = _get_rank0_states(self.common, location) if self.stage == 3 else {}
        for index, shapes in enumerate(self.groups):
            values = states.get(index)
            for state_name, value in values.items() if isinstance(values, dict) else ():
                if value is None or (isinstance(value, StoredTensor) and value.shape):
                    continue
                for name in shapes:
                    if name in state:
                        state[name][str(state_name)] = _read_scalar(value, f"{name}.{state_name}", location)

    def _check_steps(self, state: dict[str, dict[str, Tensor | Scalar]]) -> None:
        """All parameters must be at one step, consistent with the engine's counters."""
        total, skipped = self.model.get_counter("global_steps"), self.model.get_counter("skipped_steps") or 0
        steps: dict[str, float] = {}
        for name, values in state.items():
            step = values.get(_STEP)
            if step is not None:
                steps[name] = float(step.read().item() if isinstance(step, Tensor) else step)
        first = next(iter(steps.values()), 0.0)
        for name, count in steps.items():
            if count != first or (total is not None and count > total - skipped):
                raise CheckpointError(
                    f"{self.folder.path / ZERO / name}: is at step {count:g}, the first parameter at "
                    f"{first:g}; the engine counted {total}"
                )


def _get_rank0_states(common: dict[str, Any], location: str) -> dict[Any, Any]:
    """The base optimizer's state by sub-group, which stage 3 keeps for rank 0."""
    base = common.get("optimizer_state_dict")
    state = base.get("state") if isinstance(base, dict) else None
    if not isinstance(state, dict):
        raise CheckpointError(f"{location}: damaged, the optimizer has no state")
    return state


def _read_scalar(value: Any, name: str, location: str) -> Tensor | Scalar:
    if isinstance(value, StoredTensor) and value.shape == ():
        return as_tensor(value, name)
    if isinstance(value, (int, float)):
        return value
    raise CheckpointError(f"{location}: {name!r} is not a number")


def _choose_samples(count: int) -> list[int]:
    """The positions to sample: start, middle and end."""
    return sorted({0, count // 2, max(0, count - _SAMPLE)}) if count else []


FORMAT = Format(
    "deepspeed-universal",
    _find_folder,
    _open,
    _explain_incomplete,
    tags=True,
)
