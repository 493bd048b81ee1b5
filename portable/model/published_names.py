"""Conversion of a model to the names, shapes and files with which it is published.

transformers renames and rearranges many tensors when it loads a checkpoint. An export reverses
these changes, so that the exported tensors have the names and shapes in the base model's files. The
export also copies the base model's tensors that transformers does not load, and further files of
the base model. Without a base model, the exported tensors have the names and shapes that
transformers writes by default for the model type. Each checkpoint of the run records the rules for
this conversion, so the checkpoint can be exported on a machine without the base model.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from portable.converters.config_and_tokenizer_files import (
    TOKENIZER_NAMES,
    find_companions_in_folder,
    find_custom_code,
    find_excluded_files,
)
from portable.converters.containers.shard_index import INDEX_FILE_NAME
from portable.converters.names.name_rules import NameRules, build_rules_record, parse_rule, select_used_rules
from portable.converters.names.published_names import arrange_for_files, find_unclaimed_names
from portable.converters.naming import NAME_RULES_FILE, read_recorded_rules, rename_to_published
from portable.converters.storage.folder_operations import copy_file
from portable.converters.storage.safe_open import read_json_object_or_empty
from portable.errors import UserError
from portable.model.parameters import get_state_tensors, map_tied_names
from portable.model.pretrained import fetch_model_folder, open_pretrained_checkpoint
from portable.private import transformers_internals

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from transformers import PreTrainedModel

    from portable.config.sections import ModelConfig
    from portable.converters import Checkpoint, Tensor
    from portable.converters.naming import RecordedRules
    from portable.converters.storage.path_or_url import AnyPath

_ELEMENTS_PER_COMPARISON = 1 << 20
_SHARD = re.compile(r"model-\d{5}-of-\d{5,6}\.safetensors")
# Do not copy these files, because the run writes its own, or they describe the quantization of the base.
_FILES_NOT_COPIED = {
    "README.md",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
}


def build_name_rules(model: PreTrainedModel) -> NameRules:
    """Build the rules by which the installed transformers version renames and reshapes tensors."""
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    rules = tuple(parse_rule(value) for value in transformers_internals.list_name_rules(model))
    return NameRules(rules, model.base_model_prefix, config)


class PublishedModel(NamedTuple):
    """Result of :meth:`PublishedNames.convert_to_published`.

    Attributes:
        checkpoint: The model to export, with published names and shapes.
        names_equal_to_base: Published names of the tensors that are taken from the base model:
            frozen tensors whose values have not changed, and tensors that transformers does not
            load. Trained tensors are not included, even if their values have not changed. Empty
            if the base model is not available.
    """

    checkpoint: Checkpoint
    names_equal_to_base: set[str]


class PublishedNames:
    """Names, shapes and files under which the tensors of a run's model are published.

    They are taken from the base model. Without a base model, the tensors have the same names and
    shapes as in the output of ``save_pretrained``.

    Args:
        settings: The ``model`` section of the config.
        model: The model on the meta device, before an adapter or an engine changes it.
    """

    def __init__(self, settings: ModelConfig, model: PreTrainedModel) -> None:
        self._settings = settings
        self._architecture = type(model).__name__
        self._default_rules = build_name_rules(model)
        self._model_shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._state_names = list(get_state_tensors(model))
        self._unsaved_patterns = list(transformers_internals.get_unsaved_tensor_names(model) or ())
        self._ties = {first: others for first, others in map_tied_names(model).items() if others}
        self._aliases = set(getattr(model, "all_tied_weights_keys", {}))  # ``save_pretrained`` omits these
        self._recorded_rules: RecordedRules | None = None
        trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        self._untrained_names = set(self._model_shapes) - trained  # includes buffers, such as router biases

    @cached_property
    def base_checkpoint(self) -> Checkpoint | None:
        """Checkpoint that the run started from, dequantized to floats.

        The files of a Hub model are downloaded if they are not cached. None if the run starts from
        scratch, or if the base model cannot be found, downloaded, opened or dequantized lazily.
        """
        if self._settings.from_scratch:
            return None
        try:
            return open_pretrained_checkpoint(self._settings, "float32")
        except UserError:
            return None

    @cached_property
    def name_rules(self) -> NameRules:
        """Rules that map the model's tensors to the published names and shapes.

        If the base model is available, the result contains the rules that apply to at least one
        name in its files (see :func:`select_used_rules`). Otherwise, the rules are read from the
        checkpoint that the run resumes from. The default rules of the model type are used if this
        checkpoint does not record any rules, if the run does not resume, or if it trains from
        scratch. The result is cached.
        """
        if self.base_checkpoint is not None:
            shapes = {name: tensor.shape for name, tensor in self.base_checkpoint.tensors.items()}
            return select_used_rules(self._default_rules, shapes, shapes)
        return self._default_rules if self._recorded_rules is None else self._recorded_rules.rules

    def adopt_recorded_rules(self, checkpoint: Checkpoint) -> None:
        """Read the rules for published names from the checkpoint that the run resumes from.

        The rules map the model's tensors to their published names and shapes. They are used only if
        the base model is not available. Does nothing if the run trains from scratch. Must be called
        before :attr:`name_rules` is read, because that property is cached.

        Args:
            checkpoint: The checkpoint from which the run resumes.

        Raises:
            CheckpointError: If the record of the rules is damaged or not supported.
        """
        if not self._settings.from_scratch:
            self._recorded_rules = read_recorded_rules(checkpoint)

    @cached_property
    def unloaded_base_names(self) -> list[str]:
        """Names of base tensors that transformers does not load, such as multi-token prediction layers.

        The export copies these tensors from the base model. Empty if the base model is not available, or if
        the classes of the run's model and the base model differ.
        """
        if self.base_checkpoint is None or not self._has_base_class:
            return []
        return find_unclaimed_names(self.base_checkpoint.tensors, self.name_rules, self._model_shapes)

    @cached_property
    def dropped_base_names(self) -> list[str]:
        """Names of the base model's tensors that the export lacks because the model class differs.

        The class of the run's model then differs from the class in the base model's config.
        Examples are multi-token prediction layers, and the vision tower if only the language model
        is trained. Empty if the base model is not available, or if the classes match.
        """
        if self.base_checkpoint is None or self._has_base_class:
            return []
        return find_unclaimed_names(self.base_checkpoint.tensors, self.name_rules, self._model_shapes)

    @property
    def _has_base_class(self) -> bool:
        """Whether the run's model class is the first entry of the base model's ``architectures``.

        ``architectures`` is a list in the base model's ``config.json``. If the class is the first
        entry, the export also contains the base model's tensors that transformers does not load.
        This property can be read only if the base model is available.
        """
        assert self.base_checkpoint is not None
        architectures = read_json_object_or_empty(self.base_checkpoint.companions.get("config.json")).get(
            "architectures"
        )
        return isinstance(architectures, list) and architectures[:1] == [self._architecture]

    def build_base_tensor_notes(self, reported: Collection[str] = ()) -> list[str]:
        """Build notes about tensors of the base model that the run does not load.

        The notes are shown when the run starts.

        Args:
            reported: Names of base model tensors that another note already lists as unused.

        Returns:
            At most two notes: one about tensors that the export copies from the base model, and one
            about tensors that the export lacks.
        """
        notes = []
        if names := ", ".join(collapse_layer_numbers(self.unloaded_base_names)):
            notes.append(
                "note: transformers does not load these tensors of the base model, so the run does not "
                f"train them, but copies them into the export: {names}"
            )
        if names := ", ".join(
            collapse_layer_numbers(name for name in self.dropped_base_names if name not in reported)
        ):
            notes.append(
                f"note: {self._architecture} does not have these tensors of the base model, so the export "
                f"does not contain them: {names}"
            )
        return notes

    def check_export_like_base(self) -> None:
        """Check that the base model has all exported tensors, as ``checkpoint.export: like_base`` requires.

        Does nothing if the base model is not available.

        Raises:
            UserError: If the base model lacks one of the model's tensors.
        """
        if self.base_checkpoint is None:
            return
        shapes = {name: self._model_shapes[name] for name in self._state_names}
        lacking = sorted(
            arrange_for_files(shapes, self.name_rules).keys() - self.base_checkpoint.tensors.keys()
        )
        if lacking:
            raise UserError(
                f"checkpoint.export: like_base: {self.base_checkpoint.root} does not contain the tensor "
                f"{lacking[0]} of the model; set checkpoint.export: true"
            )

    def write_name_record(self, folder: Path) -> None:
        """Write the rules for published names into a checkpoint.

        The rules map the model's tensors to their published names and shapes. With the rules, the
        checkpoint can be exported without the base model. The file :data:`NAME_RULES_FILE` contains
        the rules and, as patterns, the names of the base model's tensors that transformers does not
        load. After a resume without the base model, :attr:`unavailable_base_names` returns them.

        Nothing is written if the run started from a base model whose files are not available, and
        the checkpoint from which the run resumed does not contain the rules either.

        Args:
            folder: Folder of the checkpoint.
        """
        if not self._settings.from_scratch and self.base_checkpoint is None and self._recorded_rules is None:
            return
        record = build_rules_record(self.name_rules)
        if not self._settings.from_scratch:
            record["not_loaded"] = self.unavailable_base_names or collapse_layer_numbers(
                self.unloaded_base_names
            )
        (folder / NAME_RULES_FILE).write_text(json.dumps(record, indent=1) + "\n", "utf-8")

    def copy_base_files(self, folder: Path, *, tokenizer: bool) -> None:
        """Copy the base model's small files, such as a processor config, into a checkpoint.

        Existing files are not overwritten.

        Args:
            folder: Folder of the checkpoint, which already contains the run's config and tokenizer.
            tokenizer: Whether to copy tokenizer files. Must be False unless the run uses the base model's
                tokenizer unchanged.
        """
        for name, path in self._copyable_base_files.items():
            target = folder / name
            if (TOKENIZER_NAMES.fullmatch(name) and not tokenizer) or target.exists():
                continue
            target.parent.mkdir(exist_ok=True)
            copy_file(path, target)

    @cached_property
    def _copyable_base_files(self) -> dict[str, AnyPath]:
        """Paths of the base model's small files that are copied into checkpoints.

        The keys are file names. Custom code is included if ``model.trust_remote_code`` is set.
        Files that the run itself writes, such as ``config.json``, and files that describe a
        quantization are excluded. Empty without a base model.
        """
        folder = self._base_folder
        if folder is None:
            return {}
        files = find_companions_in_folder(folder)
        if self._settings.trust_remote_code:
            files |= find_custom_code(folder)
        return {name: path for name, path in files.items() if name not in _FILES_NOT_COPIED}

    @cached_property
    def skipped_base_files(self) -> dict[str, str]:
        """Reasons why files of the base model are not copied to the export, keyed by file name.

        Weights, training state, logs and hidden files are not listed, because users do not expect
        them to be copied.
        """
        reasons = {} if self._base_folder is None else find_excluded_files(self._base_folder)
        expected = ("weights", "training state", "a log", "hidden")
        return {
            name: reason
            for name, reason in reasons.items()
            if reason not in expected and name not in self._copyable_base_files
        }

    @cached_property
    def _base_folder(self) -> Path | None:
        """Folder of the base model. None if the run starts from scratch or the folder is not available."""
        if self._settings.from_scratch:
            return None
        try:
            return fetch_model_folder(str(self._settings.name_or_path))
        except UserError:
            return None

    def convert_to_published(self, checkpoint: Checkpoint) -> PublishedModel:
        """Convert a checkpoint of this run to the published tensor names and shapes.

        These are the names and shapes in the base model's files or, without a base model, in the
        output of ``save_pretrained``. Two kinds of tensors are taken from the base model's files,
        so that the export keeps their dtype: frozen tensors whose values have not changed, and
        tensors that transformers does not load. If the base model consists of several shard files,
        the export uses the same shard files.

        Args:
            checkpoint: The checkpoint, without an adapter.

        Returns:
            The model to export, and the names of the tensors that are taken from the base model.
        """
        renamed = self._rename_tied_tensors(rename_to_published(checkpoint, self.name_rules))
        renamed = self._remove_unsaved_tensors(renamed)
        if self.base_checkpoint is None:
            return PublishedModel(renamed, set())
        base = self.base_checkpoint.tensors
        frozen = [name for name in renamed.tensors if name in self._frozen_published_names and name in base]
        unchanged_names = {name for name in frozen if _have_same_values(renamed.tensors[name], base[name])}
        unchanged_names |= set(self.unloaded_base_names) - renamed.tensors.keys()
        tensors = {**renamed.tensors, **{name: base[name] for name in base if name in unchanged_names}}
        published = renamed.with_tensors(tensors, {}, renamed.companions).with_shards(self._base_shard_files)
        return PublishedModel(published, unchanged_names)

    def _remove_unsaved_tensors(self, written: Checkpoint) -> Checkpoint:
        """Drop tensors that ``save_pretrained`` does not write.

        Their names match the patterns in ``_keys_to_ignore_on_save`` of the model. Tensors that the
        base model's files contain are kept.
        """
        base = {} if self.base_checkpoint is None else self.base_checkpoint.tensors
        tensors = {
            name: tensor
            for name, tensor in written.tensors.items()
            if name in base or not any(re.search(key, name) for key in self._unsaved_patterns)
        }
        return written.with_tensors(tensors, {}, written.companions)

    def _rename_tied_tensors(self, written: Checkpoint) -> Checkpoint:
        """Rename each tied tensor to its name in the base model's files.

        Without a base model, it gets the name that ``save_pretrained`` writes. Renaming is necessary
        because the run's checkpoint stores a tied tensor under the name of the first module that uses it.
        """
        published = {
            values.list_sources()[0]: name
            for name, values in arrange_for_files(self._model_shapes, self.name_rules).items()
            if len(values.list_sources()) == 1
        }
        names: dict[str, str] = {}
        for first, others in self._ties.items():
            owner, *aliases = (published.get(name, name) for name in (first, *others))
            alias = next((alias for alias in aliases if self._is_exported_name(alias)), None)
            if alias is not None and owner in written.tensors and not self._is_exported_name(owner):
                names[owner] = alias
        tensors = {names.get(name, name): tensor for name, tensor in written.tensors.items()}
        return written.with_tensors(tensors, {}, written.companions) if names else written

    def _is_exported_name(self, name: str) -> bool:
        """Return whether the export stores a tied tensor under ``name``.

        The export uses the names in the base model's files or, without a base model, the names that
        ``save_pretrained`` writes.

        Args:
            name: One of the names of a tied tensor.
        """
        return (
            name not in self._aliases
            if self.base_checkpoint is None
            else name in self.base_checkpoint.tensors
        )

    @property
    def _base_shard_files(self) -> dict[str, str]:
        """Mapping from base tensor names to shard files, as listed in the base model's index.

        Only files with the usual names, such as ``model-00001-of-00002.safetensors``, are included.
        Empty if the base model is not available or consists of one file.
        """
        table = (
            {}
            if self._base_folder is None
            else read_json_object_or_empty(self._base_folder / INDEX_FILE_NAME).get("weight_map")
        )
        files = table.items() if isinstance(table, dict) else ()
        return {name: file for name, file in files if isinstance(file, str) and _SHARD.fullmatch(file)}

    @property
    def unavailable_base_names(self) -> list[str]:
        """Names of base model tensors that the export lacks because the base model is not available.

        The export would otherwise copy these tensors from the base model. The names are read from the
        checkpoint from which the run resumes, which records them as patterns. See
        :func:`collapse_layer_numbers`. Empty if the base model is available, or if the checkpoint does
        not record such names.
        """
        return (
            self._recorded_rules.not_loaded
            if self.base_checkpoint is None and self._recorded_rules is not None
            else []
        )

    @cached_property
    def _frozen_published_names(self) -> set[str]:
        """Names in the published checkpoint of the tensors that the optimizer does not update.

        These tensors are built only from frozen parameters and buffers. Their values may still change,
        because forward passes update some buffers, such as the running means of batch norms.
        """
        files = arrange_for_files(self._model_shapes, self.name_rules)
        return {
            name for name, values in files.items() if self._untrained_names.issuperset(values.list_sources())
        }


def collapse_layer_numbers(names: Iterable[str]) -> list[str]:
    """Replace the numbers in tensor names by ``*``, and list each resulting pattern once.

    Args:
        names: Names of tensors.

    Returns:
        Patterns, such as ``layers.*.weight (12)``. The number in parentheses is the number of tensors
        that match the pattern, and is omitted if it is 1.
    """
    counts = Counter(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names)
    return [name if count == 1 else f"{name} ({count})" for name, count in counts.items()]


def _have_same_values(ours: Tensor, theirs: Tensor) -> bool:
    """Return whether two tensors have the same shape and values, regardless of their dtypes.

    NaN counts as equal to NaN. Returns False if a dtype is not numeric. About a million
    elements are read at a time, or one row if a row is larger.
    """
    if ours.shape != theirs.shape:
        return False
    try:
        step = max(1, _ELEMENTS_PER_COMPARISON // max(1, prod(ours.shape[1:])))
        for low in range(0, ours.shape[0] if ours.shape else 1, step):
            index = (slice(low, low + step),) if ours.shape else None
            our_rows, their_rows = (tensor.read(index).astype(np.float64) for tensor in (ours, theirs))
            if not np.array_equal(our_rows, their_rows, equal_nan=True):
                return False
    except TypeError:  # the dtype is not numeric
        return False
    return True
