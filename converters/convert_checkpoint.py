"""Convert a checkpoint to another format with `convert`, which implements `portable-convert`.

Example:
    >>> from portable import convert
    >>> conversion = convert("runs/quickstart", "model", dtype="bfloat16")
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from portable.converters.config_and_tokenizer_files import (
    find_custom_code,
    find_excluded_files,
    find_or_download_companions,
    list_companion_names,
    locate_or_download_model,
)
from portable.converters.errors import CommandError, convert_os_errors, prefix_checkpoint_errors
from portable.converters.integrity import LIVE_NAMES_PROBLEM, check_model_complete
from portable.converters.opening import open_checkpoint
from portable.converters.options import (
    ADAPTER_CONFIG,
    DTYPES,
    FORMATS_WITH_PUBLISHED_NAMES,
    NAME_KINDS,
    QUANTIZATION_FORMS,
)
from portable.converters.storage.path_or_url import (
    format_path_suggestion,
    make_absolute,
    parse_path_or_url,
    resolve_links,
)
from portable.converters.writers.atomic_output import validate_output_path
from portable.converters.writers.conversion import ContentOptions, check_output_growth, write_plan_atomically
from portable.converters.writers.targets import get_plan_function, is_single_file_output

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from portable.converters.adapters.adapter import StoredAdapter
    from portable.converters.checkpoint import Checkpoint
    from portable.converters.integrity import CheckpointProblem
    from portable.converters.storage.path_or_url import AnyPath
    from portable.converters.writers.plan import ConversionPlan

# Users expect that files are not copied for these reasons, so such files are not reported.
_EXPECTED_REASONS = ("weights", "training state", "a log", "hidden")


@dataclass(frozen=True)
class Conversion:
    """Result of `convert`.

    Attributes:
        source: Path or URL of the source.
        out: Path or URL of the output.
        checkpoint: The checkpoint that the plan writes, after dequantizing, merging, renaming, and
            quantizing.
        plan: The output files with their tensors. `plan.nbytes` is the size of the files with tensors,
            and `plan.names` are the names of all files.
        tag: Name of the step or tag folder that was chosen inside the source. None if the source itself
            is the checkpoint.
        notes: Notes for the user, for example about files that were not copied.
        warning: Reason why other programs cannot load the output. None if there is no such reason, or
            in a dry run.
    """

    source: AnyPath
    out: AnyPath
    checkpoint: Checkpoint
    plan: ConversionPlan
    tag: str | None
    notes: tuple[str, ...]
    warning: str | None


@convert_os_errors()
def convert(
    source: str | AnyPath,
    out: str | AnyPath,
    *,
    to: str = "safetensors",
    tag: str | None = None,
    dtype: str = "keep",
    names: str | None = None,
    optimizer: bool = False,
    config_from: str | AnyPath | None = None,
    merge_into: str | AnyPath | None = None,
    adapter_config: str | AnyPath | None = None,
    adapter_name: str | None = None,
    dequantize: str | None = None,
    quantize: str | None = None,
    quantize_like: str | AnyPath | None = None,
    max_shard_size: int = ContentOptions.max_shard_size,
    partial: bool = False,
    expand: bool = False,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    verify: bool = False,
    dry_run: bool = False,
    progress: bool = False,
) -> Conversion:
    """Convert a training checkpoint, as `portable-convert` does.

    The tensors are streamed, so memory use does not grow with the model. The source is never changed,
    and the output appears complete or not at all.

    Example:
        >>> from portable import convert
        >>> conversion = convert("runs/quickstart", "model", dtype="bfloat16")
        >>> sorted(conversion.plan.names)[:2]
        ['config.json', 'generation_config.json']

    Args:
        source: Run folder (its newest complete checkpoint is converted), folder of a checkpoint, file,
            URL (`s3://`, `gs://`), or Hub ID. The format is detected.
        out: Folder to create, or a URL. For `to="gguf"` also a file whose name ends with `.gguf`.
        to: Format to write, one of `safetensors`, `dcp`, `dcp-safetensors`, `torch`,
            `deepspeed-universal`, and `gguf`.
        tag: Step of the source: a folder name (`step-000100`) or a number (`100`). Default: the newest.
        dtype: Dtype of the model's floating-point tensors: `float32`, `bfloat16`, `float16`, or `keep`
            for the highest precision in the source. `gguf` also supports `q8_0`, `q4_0`, and `mxfp4`.
            The optimizer state is not cast.
        names: `published` for the tensor names of published files, or `live` for the names that
            transformers uses in memory. Default: `published` for safetensors, torch, and gguf. The
            other formats keep the names of the source.
        optimizer: Whether to also write the optimizer state.
        config_from: Folder, path of a `config.json`, or Hub ID. The `config.json` and the tokenizer are
            copied from there.
        merge_into: Base model (folder, file, URL, or Hub ID). The adapter in the source is merged into
            it.
        adapter_config: The `adapter_config.json` of the adapter, if it is in another folder.
        adapter_name: The adapter to convert, if the source contains several.
        dequantize: Dtype in which quantized weights are written: `bfloat16`, `float16`, or `float32`.
        quantize: Quantization of linear layers: `fp8-block`, `fp8`, `mxfp4`, `int8`, or `int4`.
        quantize_like: Folder or Hub ID of a quantized model, whose layout is used.
        max_shard_size: Maximum size in bytes of the tensors in a file, for the formats `safetensors`,
            `dcp`, and `dcp-safetensors`. A larger tensor is written to a separate file. The other
            formats ignore the value.
        partial: Whether to convert a model with missing tensors, or with shapes that contradict
            `config.json`.
        expand: Whether to accept an output that is much larger than the source. This occurs if several
            tensors in the source share the same bytes.
        trust_remote_code: Whether to copy the Python files of the model. They are not run here, but
            `from_pretrained` may run them.
        overwrite: Whether to replace an earlier output.
        verify: Whether to read the output back and compare it with the source before it appears.
        dry_run: Whether to only plan the output and write nothing.
        progress: Whether to show a progress bar if standard error is a terminal.

    Returns:
        The checkpoint with the plan of its output files, and notes for the user.

    Raises:
        CheckpointError: If the source is damaged, incomplete, or not supported, if an option is
            invalid, or if the output cannot be written. `out` is then unchanged. In an object store, an
            earlier output may be lost if the error occurs after all tensors have been uploaded, for
            example if the verification fails.
    """
    _check_option_value("names", names, NAME_KINDS)
    _check_option_value("dequantize", dequantize, ("bfloat16", "float16", "float32"))
    _check_option_value("quantize", quantize, QUANTIZATION_FORMS)
    _check_option_value("dtype", dtype, list(DTYPES))
    source_path, out_path = locate_or_download_model(str(source)), parse_path_or_url(out)
    single = is_single_file_output(to, out_path)
    if not source_path.exists():
        suggestion = format_path_suggestion(source_path) or "; check the path"
        raise CommandError(f"{source_path}: no such file or folder{suggestion}")
    models = [source_path] if merge_into is None else [source_path, locate_or_download_model(str(merge_into))]
    if not dry_run:
        companions = () if config_from is None else list_companion_names(parse_path_or_url(config_from))
        validate_output_path(
            out_path, models, overwrite=overwrite, is_single_file=single, replaceable_names=companions
        )
    request = _ConversionRequest(
        source=str(source),
        to=to,
        dtype=dtype,
        names=names,
        optimizer=optimizer,
        config_from=None if config_from is None else str(config_from),
        merge_into=None if merge_into is None else models[1],
        adapter_config=None if adapter_config is None else str(adapter_config),
        adapter_name=adapter_name,
        dequantize=dequantize,
        quantize=quantize,
        quantize_like=None if quantize_like is None else str(quantize_like),
        max_shard_size=max_shard_size,
        partial=partial,
        trust_remote_code=trust_remote_code,
        model_paths=models if config_from is None else [*models, parse_path_or_url(config_from)],
        config_from_companions=None if config_from is None else find_or_download_companions(str(config_from)),
    )
    checkpoint = open_checkpoint(source_path, tag, companions=request.config_from_companions)
    chosen_tag = _find_chosen_tag(checkpoint, source_path)
    checkpoint, make_plan = request.prepare_conversion(checkpoint)
    excluded_files = _list_uncopied_files(checkpoint, request.model_paths)
    if dry_run:
        plan = make_plan()
        check_output_growth(checkpoint, plan, is_allowed=expand)
    else:
        plan = write_plan_atomically(
            checkpoint,
            make_plan,
            out_path,
            overwrite=overwrite,
            progress=progress,
            verify=verify,
            expand=expand,
            is_single_file=single,
        )
    notes = [
        *request.notes,
        *_describe_losses(plan, dtype),
        *_describe_excluded_files(excluded_files, to),
        *_describe_problems(request.problems),
        *_describe_missing_config(plan, source_path, out, to),
    ]
    warning = None if dry_run else _describe_foreign_names(checkpoint, plan, to)
    return Conversion(source_path, out_path, checkpoint, plan, chosen_tag, tuple(notes), warning)


def _check_option_value(option: str, value: str | None, allowed: Sequence[str]) -> None:
    if value is not None and value not in allowed:
        raise CommandError(f"{option}: unknown value {value!r}; use one of {', '.join(allowed)}")


class _PlannedConversion(NamedTuple):
    """Checkpoint to write, and a function that plans its output files."""

    checkpoint: Checkpoint
    make_plan: Callable[[], ConversionPlan]


class _AdapterOutcome(NamedTuple):
    """Result of merging or extracting the adapter in the source, if the source contains one.

    Attributes:
        checkpoint: Checkpoint to write.
        adapter: Adapter, if it is written without a base model. None if a complete model is
            written.
        stored: Checkpoint from which `find_model_problems` reads the expert weights. If an adapter
            was merged, this is the base model. In the merged checkpoint, reading a part of a weight
            may require computing the complete weight.
    """

    checkpoint: Checkpoint
    adapter: StoredAdapter | None
    stored: Checkpoint


class _MergedModel(NamedTuple):
    """Merged model together with the base model.

    Attributes:
        merged: The merged checkpoint.
        base: The base model as it is stored, before it is dequantized.
    """

    merged: Checkpoint
    base: Checkpoint


@dataclass
class _ConversionRequest:
    """Options of one `convert` call that affect the model, and the notes collected during the call.

    Attributes that are not listed here correspond to the arguments of `convert` with the same
    names.

    Attributes:
        model_paths: Folders or files of the models from which other files, such as the tokenizer,
            are copied.
        config_from_companions: Files found in `config_from`, keyed by file name. None if
            `config_from` is not set.
        notes: Messages to the user about the conversion.
        problems: Problems of the model that the conversion repairs, or that the user has accepted
            with `--partial`.
    """

    source: str
    to: str
    dtype: str
    names: str | None
    optimizer: bool
    config_from: str | None
    merge_into: AnyPath | None
    adapter_config: str | None
    adapter_name: str | None
    dequantize: str | None
    quantize: str | None
    quantize_like: str | None
    max_shard_size: int
    partial: bool
    trust_remote_code: bool
    model_paths: Sequence[AnyPath]
    config_from_companions: Mapping[str, AnyPath] | None
    notes: list[str] = field(default_factory=list)
    problems: Sequence[CheckpointProblem] = ()

    def prepare_conversion(self, checkpoint: Checkpoint) -> _PlannedConversion:
        """Apply the requested options: merge, dequantize, rename, and quantize.

        Nothing is written, and the tensors of the result are lazy. A merge reads all tensors of the
        adapter, and the check for missing tensors may read parts of expert weights. Sets
        `self.problems` and appends messages to `self.notes`, so call this method once.

        Returns:
            The resulting checkpoint, and a function that plans the output files.

        Raises:
            CheckpointError: If the model is incomplete or does not support an option.
            CommandError: If options contradict each other.
        """
        from portable.converters.names.model_config import check_config_fits_tensors

        if self.dequantize is not None and self.merge_into is None:
            checkpoint = _dequantize_checkpoint(checkpoint, self.dequantize)
        checkpoint, adapter, stored = self._merge_or_extract_adapter(checkpoint)
        if self.config_from_companions is not None and adapter is None:
            check_config_fits_tensors(
                checkpoint.tensors, checkpoint.read_config(), f"--config-from {self.config_from}"
            )
        if adapter is None:
            self.problems = check_model_complete(checkpoint, partial=self.partial, expert_source=stored)
            checkpoint = self._rename_tensors_for_format(checkpoint)
            if self.trust_remote_code:
                files = {
                    name: path for model in self.model_paths for name, path in find_custom_code(model).items()
                }
                checkpoint = checkpoint.with_companions(files)
        elif self.names is not None:
            raise CommandError(
                f"--names: {checkpoint.root} contains an adapter, whose names cannot be converted; "
                "leave out --names"
            )
        quantizes = self.quantize is not None or self.quantize_like is not None
        if quantizes:
            checkpoint = self._quantize_weights(checkpoint, adapter)
        # Quantization has already applied --dtype, so the plan must not cast again.
        choices = ContentOptions("keep" if quantizes else self.dtype, self.max_shard_size, self.optimizer)
        if adapter is None:
            make_plan = functools.partial(get_plan_function(self.to), checkpoint, choices)
            return _PlannedConversion(checkpoint, make_plan)
        if self.to == "gguf":
            from portable.converters.writers.gguf_writer import plan_gguf_adapter

            return _PlannedConversion(
                checkpoint, lambda: plan_gguf_adapter(adapter, self._read_base_config(adapter), choices)
            )
        from portable.converters.writers.safetensors_writer import plan_adapter

        return _PlannedConversion(checkpoint, functools.partial(plan_adapter, adapter, choices))

    def _merge_or_extract_adapter(self, checkpoint: Checkpoint) -> _AdapterOutcome:
        """Merge the source's adapter into the base model, or extract it if no base model is set.

        If the source contains tensors of the base model and only the adapter is extracted, a note
        about these tensors is appended to `self.notes`. A source without an adapter is returned
        unchanged. If no base model is set and the output format is neither `safetensors` nor
        `gguf`, the source is returned unchanged without a search for an adapter.

        Raises:
            CommandError: If an adapter option is given, but the source contains no adapter. Also
                raised if `--adapter-config` or `--adapter-name` is given without `--merge-into`,
                and the output format cannot store an adapter.
        """
        from portable.converters.adapters.adapter import find_adapter

        options = {
            "--merge-into": self.merge_into,
            "--adapter-config": self.adapter_config,
            "--adapter-name": self.adapter_name,
        }
        option = next((name for name, value in options.items() if value is not None), None)
        if self.to not in ("safetensors", "gguf") and self.merge_into is None:
            if option is not None:
                raise CommandError(
                    f"{option}: adapters can only be written as safetensors or gguf; leave out --to {self.to}"
                )
            return _AdapterOutcome(checkpoint, None, checkpoint)
        config = None
        if self.adapter_config is not None:
            from portable.converters.adapters.config import find_adapter_config_file

            config = find_adapter_config_file(self.adapter_config)
        adapter = find_adapter(checkpoint, config=config, name=self.adapter_name)
        if adapter is None:
            if option is not None:
                raise CommandError(f"{option}: {checkpoint.root} contains no adapter; leave out {option}")
            return _AdapterOutcome(checkpoint, None, checkpoint)
        if self.merge_into is not None:
            merged, stored = self._merge_adapter_into_base(checkpoint, adapter, self.merge_into)
            return _AdapterOutcome(merged, None, stored)
        if adapter.base_tensors:
            count = len(adapter.base_tensors)
            tensors = "1 tensor" if count == 1 else f"{count:,} tensors"
            remedy = (
                f"; add --merge-into {self.source} to write the base model with the adapter"
                if adapter.has_complete_base
                else ""
            )
            self.notes.append(f"{tensors} of the base model are not converted{remedy}")
        return _AdapterOutcome(adapter.checkpoint, adapter, checkpoint)

    def _merge_adapter_into_base(
        self, checkpoint: Checkpoint, adapter: StoredAdapter, base_path: AnyPath
    ) -> _MergedModel:
        """Merge an adapter into its base model.

        If `base_path` is the command's `source` or the path of `checkpoint`, the adapter's files
        also contain the base model. The base model is then built from the tensors in these files.
        Otherwise, it is opened from `base_path`. With `--dequantize`, the base model is dequantized
        before the merge. All tensors of the adapter are read immediately.

        If the merge unties the embeddings, a note is appended to `self.notes`.

        Args:
            checkpoint: Checkpoint that contains the adapter.
            adapter: Adapter to merge.
            base_path: Folder or file of the base model.

        Raises:
            CommandError: If the optimizer state is requested, because a merged model has none.
        """
        from portable.converters.adapters.merging import merge

        if self.optimizer:
            raise CommandError("--optimizer: a merged model has no optimizer state; leave out --optimizer")
        contains_base = base_path.exists() and resolve_links(base_path) in (
            resolve_links(checkpoint.root),
            resolve_links(parse_path_or_url(self.source)),
        )
        if contains_base:
            stored = adapter.build_included_base().with_companions(self.config_from_companions or {})
        else:
            stored = open_checkpoint(base_path, companions=self.config_from_companions)
        base = stored if self.dequantize is None else _dequantize_checkpoint(stored, self.dequantize)
        merged = merge(adapter, base, dtype=self.dtype)
        if merged.config.get("tie_word_embeddings") is False:
            self.notes.append(
                "the adapter changes only one of the tied embeddings, so both are written, with "
                "tie_word_embeddings: false in config.json"
            )
        return _MergedModel(merged, stored)

    def _read_base_config(self, adapter: StoredAdapter) -> Mapping[str, Any]:
        """Read the `config.json` of the adapter's base model.

        The file is taken from `--config-from` if this option is set. Otherwise, it is taken from
        the adapter's folder, or else from the base model that the adapter names, which is
        downloaded from the Hub if necessary.

        Returns:
            The config. Empty if the base model is not known, or if the file is damaged.

        Raises:
            CheckpointError: If the base model that the adapter names has no `config.json`, or if
                the base model cannot be downloaded.
        """
        from portable.converters.storage.safe_open import read_json_object_or_empty

        companions, path = self.config_from_companions, adapter.trained_config
        if companions is None and path is None and adapter.config.base_model is not None:
            companions = find_or_download_companions(adapter.config.base_model)
        return read_json_object_or_empty(path if companions is None else companions.get("config.json"))

    def _rename_tensors_for_format(self, checkpoint: Checkpoint) -> Checkpoint:
        """Rename the tensors as `--names` specifies, or as the output format requires.

        Returns:
            A new checkpoint. `checkpoint` itself if `--names` is not given and the format keeps the names
            of the source.
        """
        from portable.converters.naming import (
            find_name_rules,
            read_published_names,
            read_published_shapes,
            rename_to_live,
            rename_to_published,
        )

        names = self.names or ("published" if self.to in FORMATS_WITH_PUBLISHED_NAMES else None)
        if names is None:
            return checkpoint
        config = None if self.config_from_companions is None else self.config_from_companions["config.json"]
        base = None if config is None else read_published_names(config)
        with prefix_checkpoint_errors("--names"):
            rules = find_name_rules(
                checkpoint, base, lambda: {} if config is None else read_published_shapes(config)
            )
        return (
            rename_to_live(checkpoint, rules) if names == "live" else rename_to_published(checkpoint, rules)
        )

    def _quantize_weights(self, checkpoint: Checkpoint, adapter: StoredAdapter | None) -> Checkpoint:
        """Quantize the weights as requested by `--quantize` or `--quantize-like`.

        The cast that `--dtype` requests is also applied.

        Args:
            checkpoint: Checkpoint to quantize.
            adapter: Adapter that the checkpoint contains, or None for a complete model.

        Raises:
            CommandError: If both options are given, if the optimizer state is requested, if the
                output format is not `safetensors`, or if the checkpoint contains an adapter.
        """
        from portable.converters.quantization.quantize import quantize_checkpoint, quantize_like_base

        option = "--quantize" if self.quantize_like is None else "--quantize-like"
        conflicts = {
            "--quantize-like": self.quantize is not None and self.quantize_like is not None,
            "--optimizer": self.optimizer,
            f"--to {self.to}": self.to != "safetensors",
        }
        if excluded := next((name for name, conflict in conflicts.items() if conflict), None):
            raise CommandError(f"{option}: cannot be combined with {excluded}; leave out one of them")
        if adapter is not None:
            raise CommandError(f"{option}: {checkpoint.root} contains an adapter; add --merge-into BASE")
        with prefix_checkpoint_errors(option):
            if self.quantize is not None:
                return quantize_checkpoint(checkpoint, self.quantize, dtype=self.dtype)
            assert self.quantize_like is not None
            base = open_checkpoint(locate_or_download_model(self.quantize_like))
            return quantize_like_base(checkpoint, base, dtype=self.dtype)


def _dequantize_checkpoint(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    from portable.converters.quantization.dequantize import dequantize_checkpoint

    with prefix_checkpoint_errors("--dequantize"):
        return dequantize_checkpoint(checkpoint, dtype)


def _find_chosen_tag(checkpoint: Checkpoint, source: AnyPath) -> str | None:
    """Return the name of the step or tag folder that `open_checkpoint` has chosen in the source.

    Returns None if the source itself is the checkpoint, or one of its files.
    """
    tag = checkpoint.metadata.get("tag")
    if isinstance(tag, str):
        return tag if tag != make_absolute(source).name and not source.is_file() else None
    root = checkpoint.root
    return root.name if make_absolute(root) != make_absolute(source) else None


def _list_uncopied_files(checkpoint: Checkpoint, models: Sequence[AnyPath]) -> dict[str, str]:
    """List the files in the models' folders that are not copied to the output.

    Returns:
        The reason why each file is not copied, keyed by file name.
    """
    excluded = {name: reason for model in models for name, reason in find_excluded_files(model).items()}
    return {name: reason for name, reason in excluded.items() if name not in checkpoint.companions}


def _describe_losses(plan: ConversionPlan, dtype: str) -> list[str]:
    """Return a note about values that a cast has turned into infinity or zero.

    Returns:
        A list with the note. Empty if there are no such values.
    """
    losses = plan.losses
    if not losses.first_tensor_name:
        return []
    counts = {"infinite": losses.num_infinite, "0": losses.num_zero}
    changes = " and ".join(
        f"{count:,} {'value' if count == 1 else 'values'} became {value}"
        for value, count in counts.items()
        if count
    )
    return [f"{changes} in the cast to {dtype} (--dtype), for example in {losses.first_tensor_name!r}"]


def _describe_excluded_files(excluded: Mapping[str, str], to: str) -> list[str]:
    """Describe the files that are not copied, as a list with at most one note.

    The note omits weights, training state, logs, and hidden files, because users do not expect them
    to be copied. The list is empty if no other file is left out, or if the output is a GGUF file.

    Args:
        excluded: Reason for each file that is not copied, keyed by file name.
        to: Format of the output.
    """
    reported = {name: reason for name, reason in excluded.items() if reason not in _EXPECTED_REASONS}
    if not reported or to == "gguf":
        return []
    hint = "; add --trust-remote-code to copy the code" if "custom code" in reported.values() else ""
    return [f"not copied: {', '.join(f'{name} ({reason})' for name, reason in reported.items())}{hint}"]


def _describe_problems(problems: Sequence[CheckpointProblem]) -> list[str]:
    """Describe the problems of an incomplete model, with one string per problem.

    Tensors with transformers' in-memory names, such as stacks of experts, are not reported, because
    the conversion renames them.
    """
    return [
        str(problem) if problem.repaired else f"--partial: {problem}"
        for problem in problems
        if problem.kind != LIVE_NAMES_PROBLEM
    ]


def _describe_missing_config(plan: ConversionPlan, source: AnyPath, out: str | AnyPath, to: str) -> list[str]:
    """Return a note if `from_pretrained` cannot load a safetensors output because it has no config.

    Returns:
        A list with the note, or an empty list.
    """
    if to != "safetensors" or plan.names & {"config.json", ADAPTER_CONFIG}:
        return []
    return [
        f"{source} contains no config.json, so from_pretrained cannot load {out}; take config.json from "
        "the base model with --config-from FOLDER_OR_ID"
    ]


def _describe_foreign_names(checkpoint: Checkpoint, plan: ConversionPlan, to: str) -> str | None:
    """Return a warning if most tensor names do not belong to the model type in the config.

    Args:
        checkpoint: Checkpoint that was written.
        plan: Plan of the output files.
        to: Format of the output.

    Returns:
        The warning. None if most names belong to the model type, or if transformers does not
        implement the model type. Also None if the output is an adapter, or if the format is neither
        `safetensors` nor `torch`.
    """
    from portable.converters.names.known_words import find_foreign_name

    if to not in ("safetensors", "torch") or ADAPTER_CONFIG in plan.names:
        return None
    config = checkpoint.read_config()
    name = find_foreign_name(checkpoint.tensors, config)
    if name is None:
        return None
    return (
        f"{name!r} and most other tensors do not have the names of a model of type "
        f"{config['model_type']!r}, so from_pretrained cannot load them; convert the checkpoint with the "
        "program that wrote it, or specify the model's own config.json with --config-from"
    )
