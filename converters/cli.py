"""`portable-convert`: sharded checkpoints in, plain safetensors out."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import re
import shlex
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from converters.commands import BY_SIGNAL, DAMAGED, DONE, REFUSED, ShowVersion, command, exit_codes
from converters.console import complain, fitted, say
from converters.errors import CheckpointError, CommandError, blame, printable
from converters.options import ADAPTER_CONFIG, DTYPES, EXPANSION, FORMS, NAMES, PUBLISHED, WRITERS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from converters.adapters.adapter import Adapter
    from converters.checkpoint import Checkpoint
    from converters.storage.path_or_url import Place
    from converters.tensors.casting import Losses
    from converters.writers.conversion import Plan

# Commands of their own; a folder of that name is given as ./inspect.
_LOOKING = ("inspect", "diff")

# Do not report files that are not copied for one of these reasons, because users expect it.
_EXPECTED_REASONS = ("weights", "training state", "a log", "hidden")

# Seconds after SIGTERM within which clean-up must finish.
_CLEANUP_SECONDS = 20

_USAGE = """\
portable-convert SRC OUT [options]
       portable-convert inspect SRC [--stats] [--json]
       portable-convert diff A B [--json]"""

_DESCRIPTION = """\
Turn a training checkpoint into a folder that from_pretrained loads.

SRC may be a run folder (its newest complete step is converted), one step, a
folder of shards, or one file. The format is detected. Tensors are streamed, so
memory use does not grow with the model. SRC is never changed, and OUT appears
complete or not at all. Both may be URLs of an object store (s3://, gs://).
"""

_EXAMPLES = """\
examples:
  portable-convert runs/x out/                     newest step, values unchanged
  portable-convert runs/x out/ --tag step-000100   a given step
  portable-convert s3://b/run s3://b/model         between object stores
  portable-convert ckpt/ out/ --dtype bfloat16     half the size, for inference
  portable-convert zero/ out/ --config-from org/m  config.json of the base model
  portable-convert ckpt/ out/ --optimizer          the optimizer state too
  portable-convert ckpt/ out/ --to dcp --optimizer for torch.distributed
  portable-convert ckpt/ out.gguf --to gguf        for llama.cpp
  portable-convert fp8/ out/ --dequantize          quantized weights in bfloat16
  portable-convert out/ fp8/ --quantize fp8-block  back; or --quantize-like BASE
  portable-convert lora/ out/                      an adapter, as peft loads it
  portable-convert lora/ out/ --merge-into base/   base and adapter as one model
  portable-convert ckpt/ out/ --dry-run            show what would be written
  portable-convert ckpt/ out/ --verify             compare OUT with SRC
  portable-convert inspect ckpt/ --stats           what it holds; --json
  portable-convert diff ckpt/ out/                 which tensors differ

then:
  AutoModelForCausalLM.from_pretrained("out/")

"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see portable-convert --help)")


def parser_of() -> argparse.ArgumentParser:
    """Build the argument parser of `portable-convert`."""
    parser = _Parser(
        prog="portable-convert",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EXAMPLES + exit_codes(DONE, REFUSED, DAMAGED, BY_SIGNAL),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("src", metavar="SRC", help="run folder, step folder, folder of shards, or file")
    parser.add_argument("out", metavar="OUT", help="folder to create; with --to gguf also a file, x.gguf")
    parser.add_argument("--tag", help="step of SRC: a folder name (step-000100) or a number (100)")
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        default="keep",
        metavar="{keep,float32,bfloat16,float16,q8_0,q4_0,mxfp4}",
        help="dtype of floating-point tensors (also bf16, fp16, fp32), recorded in config.json; keep "
        "(default) is the highest precision in SRC. Integers and 0-d tensors are never cast. The last three: "
        "gguf",
    )
    parser.add_argument(
        "--dequantize",
        nargs="?",
        const="bfloat16",
        choices=["bfloat16", "float16", "float32"],
        help="write quantized weights (FP8, MXFP4, NVFP4, INT4, INT8, GPTQ, AWQ, bitsandbytes) as floats, "
        "bfloat16 by default; also those of BASE",
    )
    parser.add_argument(
        "--quantize",
        choices=FORMS,
        metavar="FORM",
        help=f"write the weights of linear layers as codes: {', '.join(FORMS)}",
    )
    parser.add_argument(
        "--quantize-like",
        metavar="FOLDER_OR_ID",
        help="write the same weights as codes as this quantized model, with its quantization_config",
    )
    parser.add_argument(
        "--config-from",
        metavar="FOLDER_OR_ID",
        help="take config.json and the tokenizer from this folder or hub id, if SRC has none",
    )
    parser.add_argument(
        "--max-shard-size",
        type=_size,
        default=5 * 10**9,
        metavar="SIZE",
        help="maximum size of a shard: 5GB (default), 500MB, 2GiB, or bytes",
    )
    parser.add_argument(
        "--optimizer", action="store_true", help="also write optimizer.safetensors and optimizer.json"
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="also copy Python files of the model, which from_pretrained may run with the same setting; "
        "nothing is run here",
    )
    parser.add_argument("--to", choices=list(WRITERS), default="safetensors", help="format to write")
    parser.add_argument(
        "--names",
        choices=NAMES,
        help="names and shapes of the tensors: those of published files (published, the default for "
        "safetensors, torch and gguf), or those that transformers uses in memory (live). By default, the "
        "other formats keep the names in SRC",
    )
    parser.add_argument(
        "--merge-into",
        metavar="BASE",
        help="write the model in BASE with the adapter in SRC merged into it; BASE is a folder, file or URL "
        "of any format, a Hub ID, or SRC itself if it also contains the base",
    )
    parser.add_argument(
        "--adapter-config",
        metavar="FILE",
        help="the adapter_config.json of the adapter in SRC, if it does not lie beside it",
    )
    parser.add_argument(
        "--adapter-name", metavar="NAME", help="the adapter to take, if SRC holds several (default, ref, ...)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be written, and write nothing"
    )
    parser.add_argument(
        "--verify", action="store_true", help="read OUT back and compare it with SRC before it appears"
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="also convert a model with missing layers, tensors or experts, or with shapes that contradict "
        "config.json",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT where it is an earlier output")
    parser.add_argument(
        "--expand",
        action="store_true",
        help=f"allow OUT to be more than {EXPANSION} times as large as SRC, where tensors of SRC share the "
        "same bytes",
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.add_argument("--quiet", action="store_true", help="print errors only")
    parser.add_argument("--version", action=ShowVersion, help="print the version and stop")
    return parser


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(I?)B)?", text.strip().upper())
    if match is None or (match[3] and not match[2]) or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB, 500MB or 2GiB")
    unit = (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ")
    return max(1, int(float(match[1]) * unit))


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run `portable-convert`; returns an exit code of `converters.commands.EXIT_CODES`."""
    previous = None
    try:
        given = sys.argv[1:] if argv is None else list(argv)
        if argv is None:  # this process runs nothing else, so its settings may change
            # A checkpoint may have 100,000 tensors, and each collection would visit all of them.
            gc.set_threshold(1_000_000)
            # The threads of a conversion multiply in parallel, so OpenBLAS's own threads would only compete
            # with them for the cores. NumPy reads the variable when it is imported, which is later.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        if given[:1] and given[0] in _LOOKING:
            return _look(given)
        options = parser_of().parse_args(given)
        with contextlib.suppress(ValueError):  # not the main thread: signals cannot be handled here
            previous = signal.signal(signal.SIGTERM, _terminated)
        return _convert(options)
    except CheckpointError as error:
        return _report(error, as_json="--json" in given)
    except RecursionError:
        reason = f"{given[-1] if given else ''}: nested too deeply"
        return _report(CheckpointError(reason), as_json="--json" in given)
    finally:
        if previous is not None:
            signal.alarm(0)
            signal.signal(signal.SIGTERM, previous)


def _report(error: CheckpointError, *, as_json: bool) -> int:
    """Print an error on standard error and, with `--json`, also as JSON on standard output."""
    message = printable(error)
    if as_json:
        say(json.dumps({"error": message, "exit_code": error.exit_code}, indent=1))
    complain(f"error: {message}")
    return error.exit_code


def _look(given: list[str]) -> int:
    """Run `inspect` or `diff`, which write nothing."""
    from converters import inspect_and_diff

    command: Callable[..., int] = getattr(inspect_and_diff, given[0])
    return command(partial(_Parser, allow_abbrev=False), given[1:])


def _terminated(signum: int, frame: object) -> NoReturn:
    # An exception, so that the temporary folder is removed. If clean-up hangs, SIGALRM ends the process and
    # the next conversion removes the folder.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_CLEANUP_SECONDS)
    raise SystemExit(BY_SIGNAL + signum)


def _convert(options: argparse.Namespace) -> int:
    # Imported here, so that --help and a mistyped option answer at once.
    from converters.config_and_tokenizer_files import companions_from, list_companion_names, model_from
    from converters.opening import open_checkpoint
    from converters.storage.path_or_url import place, suggest_path
    from converters.writers.conversion import carry_out, check_expansion
    from converters.writers.draft import check_output
    from converters.writers.targets import is_single

    source, out = model_from(options.src), place(options.out)
    single = is_single(options.to, out)
    if not source.exists():
        raise CommandError(f"{source}: no such file or folder{suggest_path(source)}")
    sources = [source] if options.merge_into is None else [source, model_from(options.merge_into)]
    if not options.dry_run:
        more = [] if options.config_from is None else list_companion_names(place(options.config_from))
        check_output(out, sources, overwrite=options.overwrite, single=single, companions=more)
    given = None if options.config_from is None else companions_from(options.config_from)
    checkpoint = open_checkpoint(source, options.tag, companions=given)
    taken = _taken(checkpoint, source)
    models = sources if options.config_from is None else [*sources, place(options.config_from)]
    checkpoint, make_plan = _asked(checkpoint, given, options, models)
    excluded = _find_excluded_files(checkpoint, models)
    if options.dry_run:
        plan = make_plan()
        check_expansion(checkpoint, plan, allowed=options.expand)
        describe = (
            _json(checkpoint, plan, taken, options)
            if options.json
            else _describe(checkpoint, plan, out, single=single)
        )
        say(describe)
        _note_excluded_files(excluded, options)
        _note_config(plan, source, options)
        return 0
    plan = carry_out(
        checkpoint,
        make_plan,
        out,
        overwrite=options.overwrite,
        progress=not options.quiet,
        verify=options.verify,
        expand=options.expand,
        single=single,
    )
    if options.json:
        say(_json(checkpoint, plan, taken, options))
    elif not options.quiet:
        say(fitted(_done(checkpoint, plan, taken, out, verified=options.verify), sys.stdout))
        if (warning := _check_names(checkpoint, plan, options)) is not None:
            complain(f"warning: {printable(warning)}")
        elif (loader := _loader(plan, out, options)) is not None:
            say(fitted(f"  load it with {printable(loader)}", sys.stdout))
    if plan.losses.first and not options.quiet:
        _note(f"{_lost(plan.losses)} in --dtype {options.dtype}, some of them in {plan.losses.first!r}")
    _note_excluded_files(excluded, options)
    _note_config(plan, source, options)
    return 0


def _check_names(checkpoint: Checkpoint, plan: Plan, options: argparse.Namespace) -> str | None:
    """Return a warning if most tensor names do not belong to the model type in the config."""
    from converters.names.known_words import find_foreign_name

    if options.to not in ("safetensors", "torch") or ADAPTER_CONFIG in plan.names:
        return None
    config = checkpoint.read_config()
    name = find_foreign_name(checkpoint.tensors, config)
    if name is None:
        return None
    return (
        f"{name!r} and most other tensors do not have the names of a model of type {config['model_type']!r}, "
        "so from_pretrained cannot load them; convert them with the program that wrote them, or give the "
        "model's own config.json with --config-from"
    )


def _add_custom_code(checkpoint: Checkpoint, models: Sequence[Place]) -> Checkpoint:
    """Add the Python files of a model with custom code to the checkpoint's companions."""
    from converters.config_and_tokenizer_files import find_custom_code

    files = {name: path for model in models for name, path in find_custom_code(model).items()}
    return checkpoint.with_companions(files)


def _find_excluded_files(checkpoint: Checkpoint, models: Sequence[Place]) -> dict[str, str]:
    """Return the reason for each file of the model that is not copied, keyed by file name."""
    from converters.config_and_tokenizer_files import find_excluded_files

    excluded = {name: reason for model in models for name, reason in find_excluded_files(model).items()}
    return {name: reason for name, reason in excluded.items() if name not in checkpoint.companions}


def _note_excluded_files(excluded: Mapping[str, str], options: argparse.Namespace) -> None:
    """Report the files that are not copied, except weights, training state, logs, and hidden files."""
    reported = {name: reason for name, reason in excluded.items() if reason not in _EXPECTED_REASONS}
    if reported and not options.quiet and options.to != "gguf":
        hint = "; --trust-remote-code copies the code" if "custom code" in reported.values() else ""
        _note(f"not copied: {', '.join(f'{name} ({reason})' for name, reason in reported.items())}{hint}")


def _asked(
    checkpoint: Checkpoint,
    given: Mapping[str, Place] | None,
    options: argparse.Namespace,
    models: Sequence[Place],
) -> tuple[Checkpoint, Callable[[], Plan]]:
    """Apply the options that change the model: merging, dequantizing and quantizing.

    Returns:
        The resulting checkpoint, and a function that plans the output files.
    """
    from converters.names.model_config import check_fits
    from converters.writers.conversion import Choices
    from converters.writers.targets import planner

    if options.dequantize is not None and options.merge_into is None:
        checkpoint = _floats(checkpoint, options.dequantize)
    checkpoint, adapter, stored = _adapter(checkpoint, given, options, models)
    if given is not None and adapter is None:
        check_fits(checkpoint.tensors, checkpoint.read_config(), f"--config-from {options.config_from}")
    if adapter is None:
        _check_complete(checkpoint, stored, options)
        checkpoint = _rename_tensors(checkpoint, given, options)
        if options.trust_remote_code:
            checkpoint = _add_custom_code(checkpoint, models)
    elif options.names is not None:
        raise CommandError(
            f"--names: {checkpoint.root} contains an adapter, whose names cannot be converted; omit --names"
        )
    quantizes = options.quantize is not None or options.quantize_like is not None
    if quantizes:
        checkpoint = _codes(checkpoint, adapter, options)
    # What is quantized is cast before that.
    dtype = "keep" if quantizes else options.dtype
    choices = Choices(dtype, options.max_shard_size, options.optimizer)
    if adapter is None:
        return checkpoint, partial(planner(options.to), checkpoint, choices)
    if options.to == "gguf":
        from converters.writers.gguf_writer import plan_gguf_adapter

        return checkpoint, lambda: plan_gguf_adapter(adapter, _base_config(adapter, given), choices)
    from converters.writers.safetensors_writer import plan_adapter

    return checkpoint, partial(plan_adapter, adapter, choices)


def _adapter(
    checkpoint: Checkpoint,
    companions: Mapping[str, Place] | None,
    options: argparse.Namespace,
    models: Sequence[Place],
) -> tuple[Checkpoint, Adapter | None, Checkpoint]:
    """Merge or extract the adapter in SRC, if there is one.

    Returns:
        The checkpoint to write, the adapter if it is written on its own, and the checkpoint with the stored
        values of the experts.
    """
    from converters.adapters.adapter import find_adapter
    from converters.opening import open_checkpoint
    from converters.storage.path_or_url import place

    asked = {
        "--merge-into": options.merge_into,
        "--adapter-config": options.adapter_config,
        "--adapter-name": options.adapter_name,
    }
    given = [name for name, value in asked.items() if value is not None]
    if options.to not in ("safetensors", "gguf") and options.merge_into is None:
        if given:
            raise CommandError(
                f"{given[0]}: adapters are written as safetensors or gguf; leave out --to {options.to}"
            )
        return checkpoint, None, checkpoint
    config = None
    if options.adapter_config is not None:
        from converters.adapters.config import given_config

        config = given_config(options.adapter_config)
    adapter = find_adapter(checkpoint, config=config, name=options.adapter_name)
    if adapter is None:
        if given:
            raise CommandError(f"{given[0]}: {checkpoint.root} holds no adapter")
        return checkpoint, None, checkpoint
    if options.merge_into is None:
        if adapter.base and not options.quiet:
            count = len(adapter.base)
            what = "1 tensor" if count == 1 else f"{count:,} tensors"
            more = f"; --merge-into {options.src} writes it merged" if adapter.has_base else ""
            _note(f"{what} of the base model left out{more}")
        return adapter.checkpoint, adapter, checkpoint
    if options.optimizer:
        raise CommandError("--optimizer: a merged model has no optimizer state; leave it out")
    base_path = models[1]
    itself = base_path.exists() and base_path.resolve() in (
        checkpoint.root.resolve(),
        place(options.src).resolve(),
    )
    if itself:
        base = adapter.base_inside().with_companions(companions or {})
    else:
        base = open_checkpoint(base_path, companions=companions)
    stored = base
    if options.dequantize is not None:
        base = _floats(base, options.dequantize)
    from converters.adapters.merging import merge

    merged = merge(adapter, base, dtype=options.dtype)
    if merged.config.get("tie_word_embeddings") is False and not options.quiet:
        _note(
            "the adapter changes only one of the tied embeddings: they become two, tie_word_embeddings: false"
        )
    return merged, None, stored


def _base_config(adapter: Adapter, given: Mapping[str, Place] | None) -> Mapping[str, Any]:
    """Read the config of the model that an adapter was trained on."""
    from converters.config_and_tokenizer_files import companions_from
    from converters.storage.safe_open import read_small_table

    path = adapter.trained_config
    if given is None and path is None and adapter.config.base is not None:
        given = companions_from(adapter.config.base)
    return read_small_table(path if given is None else given.get("config.json"))


def _rename_tensors(
    checkpoint: Checkpoint, given: Mapping[str, Place] | None, options: argparse.Namespace
) -> Checkpoint:
    """Convert the tensors to the names that `--names` specifies, or to the default of the format."""
    from converters.naming import (
        find_name_rules,
        read_published_names,
        read_published_shapes,
        rename_to_live,
        rename_to_published,
    )

    names = options.names or ("published" if options.to in PUBLISHED else None)
    if names is None:
        return checkpoint
    config = None if given is None else given["config.json"]
    base = None if config is None else read_published_names(config)
    with blame("--names"):
        rules = find_name_rules(
            checkpoint, base, lambda: {} if config is None else read_published_shapes(config)
        )
    return rename_to_live(checkpoint, rules) if names == "live" else rename_to_published(checkpoint, rules)


def _check_complete(checkpoint: Checkpoint, stored: Checkpoint, options: argparse.Namespace) -> None:
    """Refuse an incomplete model unless `--partial` is given, and keep the problems for `_note_config`."""
    from converters.integrity import check_complete

    options.problems = check_complete(checkpoint, partial=options.partial, stored=stored)


def _floats(checkpoint: Checkpoint, dtype: str) -> Checkpoint:
    from converters.quantization.dequantize import dequantized

    with blame("--dequantize"):
        return dequantized(checkpoint, dtype)


def _codes(checkpoint: Checkpoint, adapter: Adapter | None, options: argparse.Namespace) -> Checkpoint:
    from converters.config_and_tokenizer_files import model_from
    from converters.opening import open_checkpoint
    from converters.quantization.quantize import quantized, quantized_like

    option = "--quantize" if options.quantize_like is None else "--quantize-like"
    wrong = {
        "--quantize-like": options.quantize is not None and options.quantize_like is not None,
        "--optimizer": options.optimizer,
        f"--to {options.to}": options.to != "safetensors",
    }
    if excluded := next((name for name, is_given in wrong.items() if is_given), None):
        raise CommandError(f"{option}: cannot be combined with {excluded}; leave out one of them")
    if adapter is not None:
        raise CommandError(f"{option}: {checkpoint.root} holds an adapter; add --merge-into BASE")
    with blame(option):
        if options.quantize is not None:
            return quantized(checkpoint, options.quantize, dtype=options.dtype)
        base = open_checkpoint(model_from(options.quantize_like))
        return quantized_like(checkpoint, base, dtype=options.dtype)


def _lost(losses: Losses) -> str:
    counts = {"infinite": losses.infinite, "0": losses.zero}
    return " and ".join(f"{count:,} values became {what}" for what, count in counts.items() if count)


def _note(text: str) -> None:
    complain(f"note: {printable(text)}")


def _note_config(plan: Plan, source: Place, options: argparse.Namespace) -> None:
    """Report problems of the model, and that `from_pretrained` cannot load OUT without a config.json."""
    from converters.integrity import NAMES_IN_MEMORY

    for problem in () if options.quiet else getattr(options, "problems", ()):
        if problem.kind == NAMES_IN_MEMORY:
            continue  # --names decides which names OUT has
        _note(str(problem) if problem.repaired else f"--partial: {problem}")
    if options.quiet or options.to != "safetensors":
        return
    if not plan.names & {"config.json", ADAPTER_CONFIG}:
        _note(
            f"{source} holds no config.json, so from_pretrained cannot load {options.out}; "
            "take it from the base model with --config-from FOLDER_OR_ID"
        )


def _taken(checkpoint: Checkpoint, source: Place) -> str | None:
    """Return the step or tag that was chosen below SRC, or None if SRC is the checkpoint itself."""
    tag = checkpoint.metadata.get("tag")
    if isinstance(tag, str):
        return tag if tag != source.name else None
    root = checkpoint.root
    return root.name if root.absolute() != source.absolute() else None


def _json(checkpoint: Checkpoint, plan: Plan, taken: str | None, options: argparse.Namespace) -> str:
    """Format the result of a conversion or of a dry run as JSON."""
    from converters.tensors.dtypes import TO_TORCH

    about, losses = checkpoint.metadata, plan.losses
    document = {
        "source": options.src,
        "format": checkpoint.format,
        **{
            key: about[key] for key in ("zero_stage", "world_size", "step") if isinstance(about.get(key), int)
        },
        "tag": taken,
        "out": options.out,
        "to": options.to,
        "written": not options.dry_run,
        "verified": options.verify and not options.dry_run,
        "bytes": plan.nbytes,
        "files": sorted(plan.names),
        "tied": dict(checkpoint.aliases),
        "became_infinite": losses.infinite,
        "became_zero": losses.zero,
        "tensors": {
            entry.name: {"dtype": TO_TORCH[entry.dtype], "shape": list(entry.tensor.shape)}
            for file in plan.files
            for entry in file.entries
        },
    }
    return json.dumps(document, indent=1)


def _done(checkpoint: Checkpoint, plan: Plan, taken: str | None, out: Place, *, verified: bool) -> str:
    """Format the summary of a conversion.

    For example: `deepspeed ZeRO-3, 4 ranks, step 3 → out: 26 tensors, 63.10 kB, float32`.
    """
    from converters.tensors.dtypes import TO_TORCH

    about = checkpoint.metadata
    stage = about.get("zero_stage")
    source = [f"{checkpoint.format} ZeRO-{stage}" if stage else checkpoint.format]
    if isinstance(ranks := about.get("world_size"), int):
        source.append("1 rank" if ranks == 1 else f"{ranks} ranks")
    source += [f"step {about['step']}"] if "step" in about else []
    source += [taken] if taken else []
    entries = [entry for file in plan.files for entry in file.entries]
    dtypes = sorted({TO_TORCH[entry.dtype] for entry in entries})
    written = [
        "1 tensor" if len(entries) == 1 else f"{len(entries)} tensors",
        _bytes(plan.nbytes) + (f" in {len(plan.files)} files" if len(plan.files) > 1 else ""),
        " and ".join(dtypes),
    ]
    checked = "\n  compared with the source" if verified else ""
    return printable(f"{', '.join(source)} → {out}: {', '.join(filter(None, written))}") + checked


def _loader(plan: Plan, out: Place, options: argparse.Namespace) -> str | None:
    """How to load what was written, if a library does; from an object store, after a copy."""
    from converters.storage.path_or_url import is_url

    if options.to != "safetensors" or not plan.names & {"config.json", ADAPTER_CONFIG}:
        return None
    where = out.name if is_url(str(out)) else options.out
    if ADAPTER_CONFIG in plan.names:
        loader = f'PeftModel.from_pretrained(base, "{where}")'
    else:
        try:
            found = json.loads((out / "config.json").read_bytes())["architectures"][0]
        except (ValueError, LookupError, TypeError, RecursionError):
            found = None
        name = found if isinstance(found, str) and found.isidentifier() else "AutoModel"
        loader = f'transformers.{name}.from_pretrained("{where}")'
    if where == options.out:
        return loader
    return f"portable-convert {shlex.quote(options.out)} {shlex.quote(where)}, then {loader}"


def _describe(checkpoint: Checkpoint, plan: Plan, out: Place, *, single: bool) -> str:
    lines = [f"{checkpoint.root} ({checkpoint.format})"]
    if "step" in checkpoint.metadata:
        lines[0] += f", step {checkpoint.metadata['step']}"
    for alias, owner in checkpoint.aliases.items():
        lines.append(f"  tied: {alias} is {owner}, left out")
    for file in plan.files:
        lines.append(
            f"{out if single else out / file.name}: {len(file.entries)} tensors, {_bytes(file.nbytes)}"
        )
        for entry in file.entries:
            source = entry.tensor.dtype
            dtype = source if source == entry.dtype else f"{source} -> {entry.dtype}"
            lines.append(f"  {entry.name}  {list(entry.tensor.shape)}  {dtype}  {_bytes(entry.nbytes)}")
    lines += [f"{out / name}" for name in plan.documents]
    lines += [f"{out / name}: copied from {path}" for name, path in plan.companions.items()]
    lines.append(
        f"total {_bytes(plan.nbytes)}; peak buffer {_bytes(plan.buffer)}; dry run, nothing was written"
    )
    return "\n".join(line[: len(line) - len(line.lstrip())] + printable(line) for line in lines)


def _bytes(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


if __name__ == "__main__":
    sys.exit(main())
