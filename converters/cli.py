"""Implement `portable-convert`, which converts sharded checkpoints to safetensors and other formats."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import re
import shlex
import signal
import sys
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from portable.converters.commands import (
    BY_SIGNAL,
    DAMAGED,
    DONE,
    REFUSED,
    ShowVersion,
    exit_without_traceback,
    format_exit_codes,
)
from portable.converters.console import print_error, print_line, wrap_lines
from portable.converters.errors import CheckpointError, CommandError, to_printable
from portable.converters.options import (
    ADAPTER_CONFIG,
    DTYPES,
    MAX_EXPANSION,
    NAME_KINDS,
    QUANTIZATION_FORMS,
    WRITERS,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.converters.convert_checkpoint import Conversion

# First arguments that select a subcommand. A folder with such a name must be passed as ./inspect.
_SUBCOMMANDS = ("inspect", "diff")

# Seconds after SIGTERM within which cleanup must finish.
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
  portable-convert ckpt/ out/ --dry-run            only print the plan
  portable-convert ckpt/ out/ --verify             compare OUT with SRC
  portable-convert inspect ckpt/ --stats           its contents; --json
  portable-convert diff ckpt/ out/                 which tensors differ

then:
  AutoModelForCausalLM.from_pretrained("out/")

"""


class _ConvertParser(argparse.ArgumentParser):
    """Argument parser that raises CommandError for an invalid command line instead of exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise CommandError with the message and a hint to use `--help`."""
        raise CommandError(f"{message} (see portable-convert --help)")


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser for a conversion with `portable-convert`.

    The subcommands `inspect` and `diff` have separate parsers.
    """
    parser = _ConvertParser(
        prog="portable-convert",
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EXAMPLES + format_exit_codes(DONE, REFUSED, DAMAGED, BY_SIGNAL),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("src", metavar="SRC", help="run folder, step folder, folder of shards, or file")
    parser.add_argument(
        "out", metavar="OUT", help="folder to create or, with --to gguf, a folder or a file such as x.gguf"
    )
    parser.add_argument("--tag", help="step of SRC: a folder name (step-000100) or a number (100)")
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        default="keep",
        metavar="{keep,float32,bfloat16,float16,q8_0,q4_0,mxfp4}",
        help="dtype of floating-point tensors in OUT, which is recorded in config.json; bf16, fp16 and "
        "fp32 are also accepted. keep (default) writes the highest precision in SRC. Integers and 0-d "
        "tensors are never cast. q8_0, q4_0 and mxfp4 need --to gguf",
    )
    parser.add_argument(
        "--dequantize",
        nargs="?",
        const="bfloat16",
        choices=["bfloat16", "float16", "float32"],
        help="convert quantized weights (FP8, MXFP4, NVFP4, INT4, INT8, GPTQ, AWQ, bitsandbytes) to this "
        "dtype, bfloat16 by default. With --merge-into, this applies to the weights of BASE too",
    )
    parser.add_argument(
        "--quantize",
        choices=QUANTIZATION_FORMS,
        metavar="FORM",
        help=f"quantize the weights of linear layers. FORM is one of {', '.join(QUANTIZATION_FORMS)}",
    )
    parser.add_argument(
        "--quantize-like",
        metavar="FOLDER_OR_ID",
        help="quantize the same weights as in this model, in the same format, and write the "
        "quantization_config of this model",
    )
    parser.add_argument(
        "--config-from",
        metavar="FOLDER_OR_ID",
        help="take config.json and the tokenizer from this folder or Hub ID if SRC does not contain them",
    )
    parser.add_argument(
        "--max-shard-size",
        type=_parse_byte_size,
        default=5 * 10**9,
        metavar="SIZE",
        help="maximum size of a shard, such as 500MB or 2GiB; a number without a unit is in bytes (default: "
        "5GB)",
    )
    parser.add_argument(
        "--optimizer",
        action="store_true",
        help="also write the optimizer state (with --to safetensors: "
        "optimizer.safetensors and optimizer.json)",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="also copy the model's Python files, which from_pretrained runs with trust_remote_code=True. "
        "portable-convert does not run them",
    )
    parser.add_argument(
        "--to", choices=list(WRITERS), default="safetensors", help="format to write (default: safetensors)"
    )
    parser.add_argument(
        "--names",
        choices=NAME_KINDS,
        help="names and shapes of the tensors: published (as in published files, the default for "
        "safetensors, torch and gguf) or live (as transformers uses them in memory). By default, "
        "the other formats keep the names in SRC",
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
        help="the adapter_config.json of the adapter in SRC, if it is in another folder",
    )
    parser.add_argument(
        "--adapter-name",
        metavar="NAME",
        help="name of the adapter to convert, such as default, if SRC contains several adapters",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the files and tensors that OUT would contain, and write nothing",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read the written tensors back and compare them with SRC; if "
        "a tensor differs, the conversion fails",
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="also convert a model with missing layers, tensors or experts, or with shapes that contradict "
        "config.json",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if portable-convert wrote it")
    parser.add_argument(
        "--expand",
        action="store_true",
        help=f"allow OUT to be more than {MAX_EXPANSION} times as large as SRC, which can happen if many "
        "tensors in SRC share the same bytes",
    )
    parser.add_argument("--json", action="store_true", help="print a summary of OUT as JSON")
    parser.add_argument("--quiet", action="store_true", help="print only errors")
    parser.add_argument("--version", action=ShowVersion, help="print the version and stop")
    return parser


def _parse_byte_size(text: str) -> int:
    """Parse a size such as `5GB`, `500MB`, `2GiB`, or a number of bytes.

    Returns:
        The size in bytes, at least 1.

    Raises:
        argparse.ArgumentTypeError: If the size is not positive, is larger than the largest float, or
            has an unknown unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT]?)(I?)B)?", text.strip().upper())
    if match is None or (match[3] and not match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB, 500MB or 2GiB")
    size = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ")
    if not 0 < size < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB, 500MB or 2GiB")
    return max(1, int(size))


@exit_without_traceback
def main(argv: Sequence[str] | None = None) -> int:
    """Run `portable-convert`.

    A `CheckpointError` is printed instead of raised. During a conversion, SIGTERM raises
    `SystemExit`, so that the temporary output is removed.

    Args:
        argv: Command-line arguments. If None, `sys.argv[1:]` is used. In this case, the garbage
            collector and OpenBLAS are also configured for the entire process.

    Returns:
        The exit code. See `portable.converters.commands.EXIT_CODES`. For `diff`, 1 means that the
        checkpoints differ.
    """
    previous = None
    try:
        arguments = sys.argv[1:] if argv is None else list(argv)
        if argv is None:  # this process has no other purpose, so process-wide settings may change
            # Collect garbage rarely, because each collection would visit all of up to 100,000 tensors.
            gc.set_threshold(1_000_000)
            # The threads of a conversion multiply in parallel, so OpenBLAS's own threads would only compete
            # with them for the cores. Set the variable now, because NumPy reads it when it is imported.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        if arguments[:1] and arguments[0] in _SUBCOMMANDS:
            return _run_inspect_or_diff(arguments)
        options = build_parser().parse_args(arguments)
        with contextlib.suppress(ValueError):  # not the main thread: signals cannot be handled here
            previous = signal.signal(signal.SIGTERM, _exit_on_sigterm)
        return _run_conversion(options)
    except CheckpointError as error:
        return _report_error(error, as_json="--json" in arguments)
    except RecursionError:
        reason = (
            "portable-convert: the data in a file is nested too deeply; check that the paths in the command "
            "are checkpoints"
        )
        return _report_error(CheckpointError(reason), as_json="--json" in arguments)
    finally:
        if previous is not None:
            signal.alarm(0)
            signal.signal(signal.SIGTERM, previous)


def _report_error(error: CheckpointError, *, as_json: bool) -> int:
    """Print an error to standard error. With `--json`, also print it as JSON to standard output.

    Returns:
        The exit code.
    """
    message = to_printable(error)
    if as_json:
        print_line(json.dumps({"error": message, "exit_code": error.exit_code}, indent=1))
    print_error(f"error: {message}")
    return error.exit_code


def _run_inspect_or_diff(arguments: list[str]) -> int:
    """Run the read-only subcommand `inspect` or `diff`, and return its exit code.

    Args:
        arguments: Name of the subcommand and its arguments.
    """
    from portable.converters.inspect_and_diff import run_diff, run_inspect

    command = {"inspect": run_inspect, "diff": run_diff}[arguments[0]]
    return command(partial(_ConvertParser, allow_abbrev=False), arguments[1:])


def _exit_on_sigterm(signum: int, frame: object) -> NoReturn:
    # Raise an exception, so that the temporary folder is removed. If cleanup hangs, SIGALRM ends the process
    # and the next conversion removes the folder.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_CLEANUP_SECONDS)
    raise SystemExit(BY_SIGNAL + signum)


def _run_conversion(options: argparse.Namespace) -> int:
    """Run a conversion, print a summary or JSON to standard output, and return the exit code.

    Notes and a warning are printed to standard error. The exit code is always 0, because errors
    are raised.
    """
    # Imported here, so that --help and errors in the options are printed without a delay.
    from portable.converters.convert_checkpoint import convert

    printed = {"src", "out", "json", "quiet"}
    conversion = convert(
        options.src,
        options.out,
        progress=not options.quiet,
        **{name: value for name, value in vars(options).items() if name not in printed},
    )
    if options.json:
        print_line(_format_json(conversion, options))
    elif options.dry_run:
        print_line(_format_dry_run(conversion, output_format=options.to))
    elif not options.quiet:
        print_line(wrap_lines(_format_summary(conversion, verified=options.verify), sys.stdout))
        if conversion.warning is not None:
            print_error(f"warning: {to_printable(conversion.warning)}")
        elif (loader := _format_load_hint(conversion, options)) is not None:
            print_line(wrap_lines(f"  load it with {to_printable(loader)}", sys.stdout))
    for note in () if options.quiet else conversion.notes:
        print_error(f"note: {to_printable(note)}")
    return 0


def _format_json(conversion: Conversion, options: argparse.Namespace) -> str:
    """Format the result of a conversion or of a dry run as an indented JSON object."""
    from portable.converters.tensors.dtypes import TO_TORCH

    checkpoint, plan = conversion.checkpoint, conversion.plan
    metadata, losses = checkpoint.metadata, plan.losses
    document = {
        "source": options.src,
        "format": checkpoint.format,
        **{
            key: metadata[key]
            for key in ("zero_stage", "world_size", "step")
            if isinstance(metadata.get(key), int)
        },
        "tag": conversion.tag,
        "out": options.out,
        "to": options.to,
        "written": not options.dry_run,
        "verified": options.verify and not options.dry_run,
        "bytes": plan.nbytes,
        "files": sorted(plan.names),
        "tied": dict(checkpoint.aliases),
        "became_infinite": losses.num_infinite,
        "became_zero": losses.num_zero,
        "tensors": {
            entry.name: {"dtype": TO_TORCH[entry.dtype], "shape": list(entry.tensor.shape)}
            for file in plan.files
            for entry in file.entries
        },
    }
    return json.dumps(document, indent=1)


def _format_summary(conversion: Conversion, *, verified: bool) -> str:
    """Format the summary of a conversion.

    For example: `deepspeed ZeRO-3, 4 ranks, step 3 → out: 26 tensors, 63.10 kB, float32`. If `verified`
    is True, a second line states that the output was compared with the source.
    """
    from portable.converters.tensors.dtypes import TO_TORCH

    checkpoint, plan = conversion.checkpoint, conversion.plan
    metadata = checkpoint.metadata
    stage = metadata.get("zero_stage")
    source = [f"{checkpoint.format} ZeRO-{stage}" if stage else checkpoint.format]
    if isinstance(ranks := metadata.get("world_size"), int):
        source.append("1 rank" if ranks == 1 else f"{ranks} ranks")
    source += [f"step {metadata['step']}"] if "step" in metadata else []
    source += [conversion.tag] if conversion.tag else []
    entries = [entry for file in plan.files for entry in file.entries]
    dtypes = sorted({TO_TORCH[entry.dtype] for entry in entries})
    written = [
        "1 tensor" if len(entries) == 1 else f"{len(entries)} tensors",
        _format_byte_count(plan.nbytes) + (f" in {len(plan.files)} files" if len(plan.files) > 1 else ""),
        " and ".join(dtypes),
    ]
    checked = "\n  compared with the source" if verified else ""
    return (
        to_printable(f"{', '.join(source)} → {conversion.out}: {', '.join(filter(None, written))}") + checked
    )


def _format_load_hint(conversion: Conversion, options: argparse.Namespace) -> str | None:
    """Format the Python code that loads the output.

    Returns:
        The code. If the output is in an object store, the code is preceded by a command that copies the
        output. None if the output is not in the safetensors format, or if it contains neither
        `config.json` nor `adapter_config.json`.
    """
    from portable.converters.storage.path_or_url import is_url

    plan, out = conversion.plan, conversion.out
    if options.to != "safetensors" or not plan.names & {"config.json", ADAPTER_CONFIG}:
        return None
    location = out.name if is_url(str(out)) else options.out
    if ADAPTER_CONFIG in plan.names:
        loader = f'PeftModel.from_pretrained(base, "{location}")'
    else:
        try:
            architecture = json.loads((out / "config.json").read_bytes())["architectures"][0]
        except (ValueError, LookupError, TypeError, RecursionError):
            architecture = None
        name = architecture if isinstance(architecture, str) and architecture.isidentifier() else "AutoModel"
        loader = f'transformers.{name}.from_pretrained("{location}")'
    if location == options.out:
        return loader
    return f"portable-convert {shlex.quote(options.out)} {shlex.quote(location)}, then {loader}"


def _format_dry_run(conversion: Conversion, *, output_format: str) -> str:
    """Format the plan of a dry run: the tensors in each output file, and the total size."""
    from portable.converters.writers.targets import is_single_file_output

    checkpoint, plan, out = conversion.checkpoint, conversion.plan, conversion.out
    single = is_single_file_output(output_format, out)
    lines = [f"{checkpoint.root} ({checkpoint.format})"]
    if "step" in checkpoint.metadata:
        lines[0] += f", step {checkpoint.metadata['step']}"
    for alias, owner in checkpoint.aliases.items():
        lines.append(f"  tied: {alias} is left out, because it is the same as {owner}")
    for file in plan.files:
        lines.append(
            f"{out if single else out / file.name}: {len(file.entries)} tensors, "
            f"{_format_byte_count(file.nbytes)}"
        )
        for entry in file.entries:
            source = entry.tensor.dtype
            dtype = source if source == entry.dtype else f"{source} -> {entry.dtype}"
            lines.append(
                f"  {entry.name}  {list(entry.tensor.shape)}  {dtype}  {_format_byte_count(entry.nbytes)}"
            )
    lines += [f"{out / name}" for name in plan.documents]
    lines += [f"{out / name}: copied from {path}" for name, path in plan.companions.items()]
    lines.append(
        f"total {_format_byte_count(plan.nbytes)}; peak buffer "
        f"{_format_byte_count(plan.peak_buffer_nbytes)}; dry run, nothing was written"
    )
    return "\n".join(line[: len(line) - len(line.lstrip())] + to_printable(line) for line in lines)


def _format_byte_count(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


if __name__ == "__main__":
    sys.exit(main())
