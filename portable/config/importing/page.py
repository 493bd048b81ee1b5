"""The page on files of other programs, from the table that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.importing.importer import ACCELERATE, DEEPSPEED, PROGRAMS, TRAINER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config.importing.importer import Program

_PAGE = """\
# JSON and YAML in the wild

<!-- Written by `python -m portable.config.reference` from portable/config/importing/. Edit those. -->

`portable-train import FILE ...` prints a config made from files of other programs, and from the arguments
of their scripts: `portable-train import accelerate.yaml -- train.py --learning_rate 1e-5 ...`. A comment
beside each setting says where it is from; comments at the end say what has no effect here, and what has no
counterpart and what to do instead. The exit code is 0 if the printed config can be used as it is; otherwise
a line on stderr names what is missing. The global batch is micro-batch x accumulation x devices;
`--devices`, or `num_processes` of an Accelerate file, says how many.

A launch reads two kinds of files itself, by the same table: an Accelerate YAML (`--accelerate-config`, or
the environment of `accelerate launch`), and a DeepSpeed JSON (`deepspeed.config`). They have the same
meaning here as in their own programs. `tests/gpu/test_published_json.py` and
`tests/portable/test_published_yaml.py` compare more than two hundred files of public repositories with
DeepSpeed's parser and Accelerate's launcher, leaf by leaf. What they refuse ends a launch in one line,
before any work.
"""
_OF_DEEPSPEED = """
Other keys that the installed DeepSpeed knows are passed on unchanged. A shared key that is `auto` or
missing has the run's value, and a default of the run yields to the JSON. As in DeepSpeed, a micro-batch
size without a batch size means no accumulation, and a batch size alone is not split. Comments, trailing
commas (Hjson), keys that begin with `_` or `//`, deprecated names and `zero_optimization: true` are read as
DeepSpeed reads them. Unknown keys are refused, all at once: DeepSpeed ignores a misspelt one at its top
level.
"""
_OF_ACCELERATE = """
`num_processes` is the number of ranks. Names without `fsdp_` are understood. Sections count only if
`distributed_type` names them, as in Accelerate. Any other key is refused.
"""
_CHAPTERS = (
    ("DeepSpeed JSON", DEEPSPEED, _OF_DEEPSPEED),
    ("Accelerate YAML", ACCELERATE, _OF_ACCELERATE),
    ("Trainer, TRL, axolotl, LLaMA-Factory", TRAINER, ""),
    ("torchtune", PROGRAMS[0], ""),
)


def page() -> str:
    """The text of ``docs/wild.md``."""
    parts = [_PAGE]
    for title, program, more in _CHAPTERS:
        parts += [f"## {title}", more, "| their keys | here |", "| --- | --- |", *_rows(program), ""]
    return "\n".join(parts)


def _rows(program: Program) -> Iterator[str]:
    """A row for keys that come to the same: settings, then those without effect, then those refused."""
    alike: dict[tuple[int, str], list[str]] = {}
    for name, row in program.rows.items():
        taken = bool(row.to) or row.how is not None
        if program is TRAINER and name.startswith("fsdp_config."):
            continue
        text = row.to or row.why
        text = f"`{text}`" if text and " " not in text else text.replace("|", "\\|")
        kind = 0 if taken else 1 if row.free else 2
        text = ": ".join(filter(None, (("", "no effect", "refused")[kind], text)))
        alike.setdefault((kind, text), []).append(name)
    for (_, text), names in sorted(alike.items(), key=lambda one: one[0][0]):
        yield f"| {', '.join(f'`{name}`' for name in names)} | {text} |"
