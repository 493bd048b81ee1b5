"""Small real checkpoints of every format, for tests of all formats.

A format is added by a line in `_WRITTEN`: a folder that a session fixture of `conftest.py` returns. The
`make_*.py` modules behind those fixtures run as scripts in separate processes, so they are not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.converters.orbax_damage import unchecked_spans

Span = tuple[int, int]
ORBAX = Path(__file__).parent / "orbax_samples"


# The fixture of `conftest.py` -> the module whose `main`, or another function, fills its folder.
MAKERS = {
    "written": "make_dcp",
    "written_ranks": "make_ranks",
    "written_xla": "make_xla",
    "deepspeed_written": "make_deepspeed",
    "deepspeed_parallel": "make_deepspeed_parallel",
    "written_megatron": "make_megatron",
    "written_items": "make_torch_checkpointing",
    "deepspeed_nvme": "make_deepspeed.nvme",
    "universal_loads": "make_universal_loads",
    "adapters": "make_adapters",
    "damaged": "make_damaged",
    "every_damaged": "make_damaged.every",
}


def nothing(path: Path) -> list[Span]:
    """Return no spans: every byte of every file is checked or has no meaning."""
    return []


@dataclass(frozen=True)
class Sample:
    """One checkpoint: a folder below the folder of a session fixture, or a new folder that `make` fills.

    Attributes:
        format: Expected `Checkpoint.format`.
        unchecked: Function that returns the spans (start, stop) of a file that the format does not protect,
            so that a change in them may be accepted. Give the reason at the definition.
        same_layout: File name -> files it may be swapped with undetected, because they have no rank or name.
        untouched: Files that do not contain any of the values (companions, states that are not read).
    """

    name: str
    format: str
    fixture: str = ""
    folder: str = "."
    make: Callable[[Path], None] | None = None
    unchecked: Callable[[Path], list[Span]] = nothing
    same_layout: Callable[[Path, Path], bool] = lambda left, right: False
    untouched: tuple[str, ...] = ("config.json", "trainer_state.json", "generation_config.json")

    @property
    def needs(self) -> str:
        """The package that is required to write the sample."""
        return "deepspeed" if self.fixture.startswith("deepspeed") else _NEEDS.get(self.fixture, "torch")


_NEEDS = {
    "written_xla": "torch_xla",
    "written_megatron": "megatron",
    "written_items": "torch_checkpointing",
}


def _no_checksum(path: Path) -> list[Span]:
    """Return all bytes: safetensors has no checksum, not even of DCP's offsets, and nor has zarr."""
    return [(0, path.stat().st_size)]


def _between_nodes(path: Path) -> list[Span]:
    """Return the unchecked spans of OCDBT: the list of the tree, and the values between the nodes."""
    if path.name == "_METADATA":
        return [(0, path.stat().st_size)]
    return unchecked_spans(path.read_bytes()) if path.parent.name == "d" else []


def _metadata_of_items(path: Path) -> list[Span]:
    """`metadata.pkl` has no checksum, and some of its values are not used, such as the strides."""
    return [(0, path.stat().st_size)] if path.name == "metadata.pkl" else []


def _any(left: Path, right: Path) -> bool:
    """Return True, because no file identifies itself."""
    return True


_EXTRA = tuple(f"extra_state_world_size_{n}_rank_{rank}.pt" for n in (3, 4) for rank in range(n))

_STEP = "global_step2_universal"
_WRITTEN = [
    Sample("dcp", "dcp", "written", "fsdp3-ours"),
    Sample("dcp-accelerate", "dcp", "written", "fsdp2-accelerate"),
    *(
        Sample(f"ranks-{run}", "fsdp-ranks", "written_ranks", run, untouched=_EXTRA)
        for run in ("fsdp2-3", "fsdp1-plain-3", "tensor-parallel-4")
    ),
    *(
        Sample(f"deepspeed-{run}", "deepspeed", "deepspeed_written", run)
        for run in ("zero0-fp32-2", "zero1-fp32-2", "zero2-bf16-2", "zero3-fp32-2")
    ),
    *(
        Sample(f"deepspeed-{run}", "deepspeed", "deepspeed_parallel", run)
        for run in ("pipeline-bf16-4", "experts-zero1-4", "autotp-zero1-4")
    ),
    *(
        Sample(f"universal-{run}", "deepspeed-universal", "deepspeed_written", f"universal/{run}/{_STEP}")
        for run in ("zero2-bf16-2", "zero3-fp32-2")
    ),
    Sample("megatron", "megatron", "written_megatron", "llama-2x2"),
    Sample(
        *("megatron-core", "megatron-core", "written_megatron", "core-llama-tied-2x1"),
        untouched=("metadata.json",),
    ),
    *(
        Sample(
            *(f"torch-checkpointing-{run}", "torch-checkpointing", "written_items", run),
            unchecked=_metadata_of_items,
            untouched=tuple(f"step_{rank}.pt" for rank in range(4)),
        )
        for run in ("fsdp2-3", "tensor-parallel-4")
    ),
    *(Sample(f"xla-{run}", "xla-fsdp", "written_xla", run) for run in ("flat3", "dim3")),
    *(
        Sample(name, kind, fixture, folder, unchecked=_no_checksum, same_layout=_any)
        for name, kind, fixture, folder in (
            ("dcp-safetensors-two-files", "dcp-safetensors", "written", "safetensors/two-files"),
            ("dcp-safetensors-consolidated", "dcp-safetensors", "written", "safetensors/consolidated"),
            ("orbax-zarr", "orbax", "orbax_samples", "zarr"),
            *(
                ("torch-checkpointing-safetensors", "torch-checkpointing", "written_items", run)
                for run in ("fsdp2-3-safetensors",)
            ),
        )
    ),
    Sample(
        *("orbax-maxtext", "orbax", "orbax_samples", "maxtext/checkpoints/7"),
        unchecked=_between_nodes,
        same_layout=lambda left, right: left.parent.name == right.parent.name == "d",
    ),
]


def all_samples() -> list[Sample]:
    """Return all samples. A test is skipped if its sample cannot be written."""
    from tests.converters import make_full

    return [*_WRITTEN, *make_full.SAMPLES]


def folder_of(name: str, request: pytest.FixtureRequest, made: Path) -> Path:
    """Return the folder of a sample: below the folder of its fixture, or `made`, a new one."""
    (sample,) = (sample for sample in all_samples() if sample.name == name)
    if sample.make is None:
        base: Path = request.getfixturevalue(sample.fixture)
        return base / sample.folder
    made.mkdir(parents=True, exist_ok=True)
    sample.make(made)
    return made


def parameters(names: Iterable[str], *values: Any) -> list[Any]:
    """Return parameters of a test or a fixture: each name, followed by `values`."""
    needs = {sample.name: sample.needs for sample in all_samples()}
    return [
        pytest.param(name, *values, marks=pytest.mark.xla if needs[name] == "torch_xla" else [])
        for name in names
    ]
