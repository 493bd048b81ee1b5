"""The names of a run's model in published files, and what the run does not train of its base.

transformers renames and rearranges many tensors while it loads a checkpoint. What a run exports has the
names and shapes of the checkpoint that it started from, or the default ones of its model type. A checkpoint
of a run records the rules, so that it can be exported or converted without the base.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from converters.config_and_tokenizer_files import TOKENIZER, custom_code, left_out, small_files_of
from converters.containers.shard_index import INDEX
from converters.names.name_rules import NameRules, parse_rule, rules_to_record, used_rules
from converters.names.published import to_files, unclaimed
from converters.naming import RECORD, recorded_rules, with_published_names
from converters.storage.places import copy_file
from converters.storage.safe_open import read_small_table
from portable.errors import UserError
from portable.model.parameters import state_tensors
from portable.model.pretrained import files_of, snapshot
from portable.private import of_transformers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from transformers import PreTrainedModel

    from converters import Checkpoint, Tensor
    from converters.storage.path_or_url import Place
    from portable.config.sections import ModelConfig

_BLOCK = 1 << 20
_SHARD = re.compile(r"model-\d{5}-of-\d{5,6}\.safetensors")
# A run writes these itself, or they describe how the base was quantized.
_OWN_FILES = {
    "README.md",
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
}


def rules_of_model(model: PreTrainedModel) -> NameRules:
    """Return the rules by which the installed transformers reads the published files of a model."""
    config = json.loads(json.dumps(model.config.to_dict(), default=str))
    rules = tuple(parse_rule(value) for value in of_transformers.name_rules(model))
    return NameRules(rules, model.base_model_prefix, config)


class PublishedNames:
    """The published names of the model of a run.

    Args:
        settings: The settings of the model.
        model: The model on the meta device, before an adapter or an engine changes it.
    """

    def __init__(self, settings: ModelConfig, model: PreTrainedModel) -> None:
        self._settings = settings
        self._architecture = type(model).__name__
        self._default = rules_of_model(model)
        self._live = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._parameters = list(state_tensors(model))
        self._resumed: tuple[NameRules, list[str]] | None = None
        self._frozen = {name for name, p in model.named_parameters() if not p.requires_grad}

    @cached_property
    def base(self) -> Checkpoint | None:
        """The checkpoint that the run started from, with floats; None if there is none or it is not here."""
        if self._settings.from_scratch:
            return None
        try:
            return files_of(self._settings, "float32")
        except UserError:
            return None

    @cached_property
    def rules(self) -> NameRules:
        """The rules for the names in the base's files, or the default ones of the model."""
        if self.base is not None:
            return used_rules(self._default, self.base.tensors)
        return self._default if self._resumed is None else self._resumed[0]

    def resume(self, checkpoint: Checkpoint) -> None:
        """Take over the record of the checkpoint that the run resumes from, in case the base is not here."""
        if not self._settings.from_scratch:
            self._resumed = recorded_rules(checkpoint)

    @cached_property
    def not_loaded(self) -> list[str]:
        """The tensors of the base that the model does not have, such as layers for several tokens at once."""
        if self.base is None or not self._same_class:
            return []
        return unclaimed(self.base.tensors, self.rules, self._live)

    @property
    def _same_class(self) -> bool:
        """Whether the base is a model of the same class, so that its other tensors belong to the export."""
        assert self.base is not None
        named = read_small_table(self.base.companions.get("config.json")).get("architectures")
        return isinstance(named, list) and named[:1] == [self._architecture]

    def notes(self) -> list[str]:
        """Notes at the start of a run, for the user."""
        names = ", ".join(shortened(self.not_loaded))
        told = f"note: not trained, since transformers does not load them, but part of the export: {names}"
        return [told] if names else []

    def check_like_base(self) -> None:
        """Check before the first step that the base has every tensor that is exported in its layout.

        Raises:
            UserError: It lacks a tensor.
        """
        if self.base is None:
            return
        shapes = {name: self._live[name] for name in self._parameters}
        lacking = sorted(to_files(shapes, self.rules).keys() - self.base.tensors.keys())
        if lacking:
            raise UserError(
                f"checkpoint.export: like_base: {self.base.root} has no {lacking[0]}, which the model has; "
                "set checkpoint.export to true"
            )

    def write(self, folder: Path) -> None:
        """Write the record of a checkpoint, from which it can be exported without the base."""
        known = self._settings.from_scratch or self.base is not None or self._resumed is not None
        if not known:
            return
        record = rules_to_record(self.rules)
        if not self._settings.from_scratch:
            record["not_loaded"] = self.lost or shortened(self.not_loaded)
        (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", "utf-8")

    def write_small_files(self, folder: Path, *, tokenizer: bool) -> None:
        """Copy the small files of the base that are not in a checkpoint yet, such as a processor's.

        Args:
            folder: The checkpoint, which has a config and a tokenizer of its own.
            tokenizer: Whether the run uses the tokenizer of the base unchanged, so that its other files fit.
        """
        for name, path in self._small_files.items():
            target = folder / name
            if (TOKENIZER.fullmatch(name) and not tokenizer) or target.exists():
                continue
            target.parent.mkdir(exist_ok=True)
            copy_file(path, target)

    @cached_property
    def _small_files(self) -> dict[str, Place]:
        folder = self._folder
        if folder is None:
            return {}
        found = small_files_of(folder)
        if self._settings.trust_remote_code:
            found |= custom_code(folder)
        return {name: path for name, path in found.items() if name not in _OWN_FILES}

    @cached_property
    def left_out(self) -> dict[str, str]:
        """The files of the base that are not exported, with the reason; without weights and logs."""
        told = {} if self._folder is None else left_out(self._folder)
        plain = ("weights", "training state", "a log", "hidden")
        return {n: why for n, why in told.items() if why not in plain and n not in self._small_files}

    @cached_property
    def _folder(self) -> Path | None:
        if self._settings.from_scratch:
            return None
        try:
            return snapshot(str(self._settings.name_or_path))
        except UserError:
            return None

    def publish(self, checkpoint: Checkpoint) -> tuple[Checkpoint, set[str]]:
        """Return the model of a checkpoint of this run as it is exported, and what is as in the base.

        Tensors that transformers does not load, and frozen tensors, come from the base.
        """
        if self.base is None:
            return with_published_names(checkpoint, self.rules), set()
        written = with_published_names(checkpoint, self.rules)
        held = self.base.tensors
        frozen = [name for name in written.tensors if name in self._frozen_files and name in held]
        untouched = {name for name in frozen if _same_values(written.tensors[name], held[name])}
        untouched |= set(self.not_loaded) - written.tensors.keys()
        tensors = {**written.tensors, **{name: held[name] for name in held if name in untouched}}
        return written.with_tensors(tensors, {}, written.companions).with_shards(self._shards), untouched

    @property
    def _shards(self) -> dict[str, str]:
        """The numbered file of each tensor of the base, as its index has it."""
        table = {} if self._folder is None else read_small_table(self._folder / INDEX).get("weight_map")
        files = table.items() if isinstance(table, dict) else ()
        return {name: file for name, file in files if isinstance(file, str) and _SHARD.fullmatch(file)}

    @property
    def lost(self) -> list[str]:
        """The tensors of the base that an export lacks, because the base is not here."""
        return self._resumed[1] if self.base is None and self._resumed is not None else []

    @cached_property
    def _frozen_files(self) -> set[str]:
        """The published tensors that consist of frozen parameters only."""
        files = to_files(self._live, self.rules)
        return {name for name, values in files.items() if self._frozen.issuperset(values.sources())}


def shortened(names: Iterable[str]) -> list[str]:
    """Replace numbers in the names by `*`, and merge equal names with their count."""
    counts = Counter(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names)
    return [name if count == 1 else f"{name} ({count})" for name, count in counts.items()]


def _same_values(ours: Tensor, theirs: Tensor) -> bool:
    """Whether a tensor of a checkpoint has the values of the base's, whatever the dtypes."""
    if ours.shape != theirs.shape:
        return False
    try:
        step = max(1, _BLOCK // max(1, prod(ours.shape[1:])))
        for low in range(0, ours.shape[0] if ours.shape else 1, step):
            index = (slice(low, low + step),) if ours.shape else None
            one, other = (tensor.read(index).astype(np.float64) for tensor in (ours, theirs))
            if not np.array_equal(one, other, equal_nan=True):
                return False
    except TypeError:  # no numbers
        return False
    return True
