"""Small real checkpoints of every format, for tests that hold for all of them.

A format takes part by a line in `_WRITTEN`: a folder that a session fixture of `conftest.py` gives. The
`make_*.py` behind those fixtures run as scripts, in processes of their own, so nothing here imports them.
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
    """Every byte of every file is checked, or says nothing."""
    return []


@dataclass(frozen=True)
class Sample:
    """One checkpoint: a folder below that of a session fixture, or what `make` writes into a new one.

    Attributes:
        format: what `Checkpoint.format` says of it.
        unchecked: the bytes of a file that nothing in the format vouches for, so that a change in them
            may come through: spans (start, stop). Say why at the definition.
        same_layout: file name -> files it may be swapped with unnoticed, for want of a rank or name inside.
        untouched: files that carry no part of the values (companions, states that are not read).
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
        """The package without which it cannot be made."""
        return "deepspeed" if self.fixture.startswith("deepspeed") else _NEEDS.get(self.fixture, "torch")


_NEEDS = {
    "written_xla": "torch_xla",
    "written_megatron": "megatron",
    "written_items": "torch_checkpointing",
}


def _no_checksum(path: Path) -> list[Span]:
    """safetensors keeps no checksum, also not of DCP's offsets in its header; nor does zarr."""
    return [(0, path.stat().st_size)]


def _between_nodes(path: Path) -> list[Span]:
    """OCDBT's nodes have checksums; the tree's list, and the values between the nodes, have none."""
    if path.name == "_METADATA":
        return [(0, path.stat().st_size)]
    return unchecked_spans(path.read_bytes()) if path.parent.name == "d" else []


def _metadata_of_items(path: Path) -> list[Span]:
    """`metadata.pkl` has no checksum, and some of its values are not used, such as the strides."""
    return [(0, path.stat().st_size)] if path.name == "metadata.pkl" else []


def _any(left: Path, right: Path) -> bool:
    """No file says which one it is."""
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
    """Every sample; a test that cannot have it made is skipped."""
    from tests.converters import make_full

    return [*_WRITTEN, *make_full.SAMPLES]


def folder_of(name: str, request: pytest.FixtureRequest, made: Path) -> Path:
    """Where a sample lies: below its fixture's folder, or in `made`, a new one."""
    (sample,) = (sample for sample in all_samples() if sample.name == name)
    if sample.make is None:
        base: Path = request.getfixturevalue(sample.fixture)
        return base / sample.folder
    made.mkdir(parents=True, exist_ok=True)
    sample.make(made)
    return made


def parameters(names: Iterable[str], *values: Any) -> list[Any]:
    """Parameters of a test or a fixture: each name, followed by `values`."""
    needs = {sample.name: sample.needs for sample in all_samples()}
    return [
        pytest.param(name, *values, marks=pytest.mark.xla if needs[name] == "torch_xla" else [])
        for name in names
    ]
