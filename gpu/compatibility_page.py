"""The page on DeepSpeed JSONs and Accelerate YAMLs as people have them, written from the tables in the code.

``python -m gpu.compatibility_page`` writes ``docs/wild.md``; with ``--check`` it only says whether it is up
to date.
"""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from gpu.zero.config.blocks import NO_EFFECT, OPTIMIZER_KEYS, SCHEDULE_KEYS
from gpu.zero.config.document import FOREIGN, NEEDED, SHARED, SWAPPING
from portable.config.accelerate_yaml import FREE, MAPPED, NOTED, ONLY
from portable.config.problems import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WHOLE: Any = {"break_long_words": False, "break_on_hyphens": False}
PAGE = Path(__file__).resolve().parents[1] / "docs" / "wild.md"

_PAGE = """\
# JSON and YAML in the wild

<!-- Written by `python -m gpu.compatibility_page` from the tables in gpu/ and portable/config/. Edit those,
not this. -->

A DeepSpeed JSON (`deepspeed.config`) and an Accelerate YAML (`--accelerate-config`) mean here what they
mean to their own programs. Each key ends in one of three ways: it is used; it is noted in a line and passed
over; or the run is refused before any work, in one line that says why. `--dry-run` prints the notes as
well. `tests/gpu/test_published_json.py` and `tests/portable/test_published_yaml.py` hold more than two
hundred shapes of public repositories to DeepSpeed's parser and Accelerate's launcher, leaf by leaf.

## DeepSpeed JSON

**Used** as settings of the run, where a default yields to them: {shared}; `optimizer.params` ({optimizer})
and `scheduler.params` ({scheduler}); `bf16.enabled`, `fp16.enabled`; and `zero_optimization.stage`. Stage
0, or none, is `no_shard`. All else that the installed DeepSpeed knows goes to it as it stands. `auto`, and
what is left out of what both have, is the run's. A micro-batch alone means accumulation 1, and a batch
alone is not cut up, as in DeepSpeed.

**Read as DeepSpeed reads it:** comments and trailing commas (Hjson); keys that begin with `_` or `//`,
which are remarks; old names, of which a note says the new one; `zero_optimization: true`.

**Noted:** under stage 0, what only DeepSpeed's engine would do; below stage 3, `offload_param` (ignored)
and `nvme` (host memory). Further:

{no_effect}

**Refused:** unknown keys, all of them at once: DeepSpeed passes over a misspelt one at its top level;
values that DeepSpeed does not take; what it has removed; optimizers but AdamW, Adam and SGD; a monitor
without its package; quantised weights and gradients on a CPU; a batch that is not micro-batch x
accumulation x ranks; what contradicts a setting of the run; false for {needed}. Not part of this version:
{foreign}.

## Accelerate YAML

**Used:** {mapped}; `num_processes` is the number of ranks. Of `fsdp_sharding_strategy` and
`fsdp_reshard_after_forward`, the one that `fsdp_version` reads. Old names (`fp16`, `dynamo_backend` at the
top, names without `fsdp_`) are understood.

**Passed over in silence**, since a launcher answers them or they are so here anyway: {free}.

**Noted:** `tpu_*` and `downcast_bf16` off TPUs; offloading that a `zero_stage` does not do; `use_cpu`
with MULTI_GPU, which runs on GPUs; `gpu_ids`, which `CUDA_VISIBLE_DEVICES` is set to; XLA without
`fsdp_config`, which shards here and replicates there: the numbers are the same. Further:

{noted}

**Refused:** unknown keys; a `deepspeed_config_file` that is missing; several machines without a launcher;
`distributed_type` and `mixed_precision` that have no counterpart (MEGATRON_LM, fp8). And other values than
these (the launching of TPU hosts on TPUs only):

| key | allowed | for the others |
| --- | --- | --- |
{only}
"""


def page() -> str:
    """The text of ``docs/wild.md``."""
    shared = (f"{_code(one.path)} ({_code(one.key)})" for one in SHARED if not one.path.startswith("fp16."))
    fp16 = ", ".join(_code(one.key) for one in SHARED if one.path.startswith("fp16."))
    text = _PAGE.format(
        shared=f"{', '.join(shared)}; {fp16}",
        optimizer=", ".join(map(_code, OPTIMIZER_KEYS)),
        scheduler=", ".join(map(_code, SCHEDULE_KEYS)),
        no_effect=_list(
            [(f"activation_checkpointing.{name}", reason) for name, reason in NO_EFFECT.items()]
            + [
                (path, f"with parameters on a disk the run chooses it, {why}")
                for path, why in SWAPPING.items()
            ]
        ),
        needed=", ".join(f"{_code(path)} ({reason})" for path, reason in NEEDED.items()),
        foreign=", ".join(map(_code, FOREIGN)),
        mapped=", ".join(_code(key) for key in MAPPED if key != "downcast_bf16"),
        free=", ".join(map(_code, sorted(FREE))),
        noted=_list([(key, reason) for key, (_, reason) in NOTED.items()]),
        only="\n".join(_only()),
    )
    return "\n\n".join(map(_wrapped, text.split("\n\n")))


def _only() -> Iterator[str]:
    """A row for the keys that are alike."""
    alike: dict[tuple[str, str], list[str]] = {}
    for key, (allowed, reason) in ONLY.items():
        alike.setdefault((", ".join(_code(shown(one)) for one in allowed), reason), []).append(key)
    for (values, reason), names in alike.items():
        around = sorted({name.rpartition(".")[0] for name in names})
        short = [name.rpartition(".")[2] if len(names) > 1 else name for name in names]
        inside = f" of {_code(around[0])}" if len(names) > 1 and around[0] else ""
        nothing = "`null`, `''`, `{}`, `[]`"
        yield f"| {', '.join(map(_code, short))}{inside} | {values.replace(nothing, 'nothing')} | {reason} |"


def _wrapped(block: str) -> str:
    """A paragraph, or the items of a list, in lines that can be read."""
    if block.startswith(("#", "<")) or "| ---" in block:
        return block
    if block.startswith("- "):
        return "\n".join(fill(line, 116, subsequent_indent="  ", **_WHOLE) for line in block.splitlines())
    return fill(block, 116, **_WHOLE)


def _code(name: str) -> str:
    return f"`{name}`"


def _list(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"- {_code(key)}: {reason}." for key, reason in rows)


def main(arguments: list[str]) -> int:
    """Write the page, or check it; the exit code."""
    if arguments not in ([], ["--check"]):
        print("usage: python -m gpu.compatibility_page [--check]", file=sys.stderr)
        return 2
    if not arguments:
        PAGE.write_text(page())
        return 0
    if PAGE.exists() and PAGE.read_text() == page():
        return 0
    print(f"{PAGE} is out of date; run: python -m gpu.compatibility_page", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
