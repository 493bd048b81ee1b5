"""The page on files of other programs, from the table that reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from portable.config.importing.importer import ACCELERATE, DEEPSPEED, PROGRAMS, TRAINER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from portable.config.importing.importer import Program

_PAGE = """\
# Keys of other programs

<!-- Written by `python -m portable.config.reference` from portable/config/importing/. Edit those. -->

What `portable-train import` makes of each key of another program's file, and of its script's arguments
([how to call it](migrate.md)). An Accelerate YAML and a DeepSpeed JSON that a run names mean the same at each
launch. `tests/gpu/test_published_json.py` and `tests/portable/test_published_yaml.py` compare
two hundred public files with DeepSpeed's parser and Accelerate's launcher, leaf by leaf.

A key named as a setting, or its last part, becomes that setting and is not listed; nor is one without
effect that needs nothing in its place. `import` names each. What is refused has to be left out.
"""
_OF_DEEPSPEED = """
Other keys that the installed DeepSpeed knows are passed on unchanged. A shared key that is `auto` or
missing has the run's value, and a default of the run yields to the JSON. As in DeepSpeed, a micro-batch
size without a batch size means no accumulation, and a batch size alone is not split. Comments, trailing
commas (Hjson), keys that begin with `_` or `//`, deprecated names and `zero_optimization: true` are read as
DeepSpeed reads them. Unknown keys are refused, all at once: DeepSpeed ignores a misspelt one at its top
level. Parameters of a scheduler that are not listed become `train.schedule_params`.
"""
_OF_ACCELERATE = """
`num_processes` is the number of ranks. Names without `fsdp_` are understood, `xla_fsdp_settings` also
inside `fsdp_config`. Sections count only if `distributed_type` names them, as in Accelerate. Any other key is
refused.
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
        text = row.to or row.why
        taken = bool(row.to) or row.how is not None
        if _goes_without_saying(program, name, text, free=row.free):
            continue
        kind = 0 if taken else 1 if row.free else 2
        text = text.removesuffix("; leave it out").removesuffix("; remove it")
        text = f"`{text}`" if text and " " not in text else text.replace("|", "\\|")
        text = ": ".join(filter(None, (("", "no effect", "refused")[kind], text)))
        alike.setdefault((kind, text), []).append(name)
    for (_, text), names in sorted(alike.items(), key=lambda one: one[0][0]):
        yield f"| {', '.join(f'`{name}`' for name in names)} | {text} |"


def _goes_without_saying(program: Program, name: str, text: str, *, free: bool) -> bool:
    """Whether the text of the page covers a key: one of the same name, listed elsewhere, or of no effect."""
    inner = name.startswith("fsdp_config." if program is TRAINER else "fsdp_config.xla_")
    of_schedule = name.startswith("scheduler.") and text == "train.schedule_params"
    alike = text.rpartition(".")[2] == name.rpartition(".")[2]
    return inner or of_schedule or alike or (free and not text)
