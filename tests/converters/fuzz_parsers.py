"""Hostile input for every parser, made by hypothesis; run by `test_fuzz.py` in a process with little memory.

`python -m tests.converters.fuzz_parsers FOLDER EXAMPLES`. Each parser may read what it is given or refuse it
with a `CheckpointError` of one line. Any other exception, an example that takes seconds, or one that needs
more memory than the process may have, is a bug.
"""

from __future__ import annotations

import json
import pickle
import resource
import struct
import sys
import zipfile
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from converters import Checkpoint, CheckpointError, OptimizerState, Tensor, open_checkpoint, write_dcp
from converters.containers.pickle_reader import plain, unpickle
from converters.containers.shard_index import read_index
from converters.containers.torchzip import TORCH_STANDINS, TorchZip
from converters.storage.bytes import Memory
from converters.storage.folder import Folder

if TYPE_CHECKING:
    from collections.abc import Callable

MEMORY = 512 << 20
DEADLINE_MS = 5000
ROOT = Path(sys.argv[1]) if len(sys.argv) > 2 else Path()


def refused(read: Callable[[], Any]) -> None:
    try:
        read()
    except CheckpointError as error:
        assert "\n" not in str(error)


def touch(checkpoint: Checkpoint) -> None:
    """Read what a conversion would, up to a size that no seed here reaches."""
    optimizer = checkpoint.optimizer
    state = [value for values in optimizer.state.values() for value in values.values()] if optimizer else []
    for tensor in (*checkpoint.tensors.values(), *state):
        if isinstance(tensor, Tensor) and tensor.nbytes < 1 << 20:
            tensor.read()
    if optimizer:
        plain(optimizer.param_groups)


@st.composite
def edited(draw: st.DrawFn, seed: bytes) -> bytes:
    """`seed` with a few bytes or words changed, a piece cut out, doubled, or the end gone."""
    data = bytearray(seed)
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["byte", "word", "cut", "double", "end", "insert"]))
        if kind == "byte" and data:
            data[at] = draw(st.integers(0, 255))
        elif kind == "word":
            value = draw(
                st.sampled_from([0, 1, 0x7F, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 62, (1 << 64) - 1])
            )
            data[at : at + 8] = struct.pack("<Q", value)[: draw(st.sampled_from([2, 4, 8]))]
        elif kind == "cut":
            del data[at : at + draw(st.integers(1, 64))]
        elif kind == "double":
            data[at:at] = data[at : at + draw(st.integers(1, 64))]
        elif kind == "end":
            del data[at:]
        else:
            data[at:at] = draw(st.binary(max_size=16))
    return bytes(data)


def zip_of(members: dict[str, bytes]) -> bytes:
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as made:
        for name, data in members.items():
            made.writestr(name, data)
    return stream.getvalue()


def seeds() -> tuple[Path, Path]:
    """A DCP folder and a safetensors folder, small, with an optimizer."""
    names = ("a.weight", "a.bias", "b.counts")
    values = [np.ones((3, 5), np.float32), np.zeros(4, np.float32), np.arange(3)]
    kinds = ("F32", "F32", "I64")

    def tensor(name: str, kind: str, value: Any) -> Tensor:
        return Tensor.contiguous(name, kind, value.shape, Memory(value.tobytes()))

    tensors = {n: tensor(n, k, v) for n, k, v in zip(names, kinds, values, strict=True)}
    state: Any = {n: {"exp_avg": tensors[n], "step": 3.0} for n in names[:2]}
    groups = [{"params": list(names[:2]), "lr": 0.1, "betas": [0.9, 0.95], "fused": None}]
    source = Checkpoint(format="x", root=ROOT / "x", tensors=tensors, optimizer=OptimizerState(state, groups))
    write_dcp(source, ROOT / "dcp", optimizer=True, progress=False)
    (ROOT / "st").mkdir()
    return ROOT / "dcp", ROOT / "st"


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.sampled_from(["F32", "I64", "BF16", "dtype", "shape", "data_offsets", "a", "../a", "\0", ""]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "a", "b", "__metadata__", "weight_map"]), inner
        )
    ),
    max_leaves=12,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "I64", "BF16", "F8_E4M3", "F4", "", 3]),
        "shape": st.lists(st.integers(-1, 4) | st.sampled_from([1 << 31, 1 << 62, 1 << 63]), max_size=70),
        "data_offsets": st.lists(st.integers(-1, 64) | st.sampled_from([1 << 62, 1 << 64]), max_size=3),
    }
)
# Opcodes that build, with arguments that fit more often than not.
OPCODES = st.sampled_from(
    [
        *(bytes([op]) for op in b"()]}l0t12as\x85\x86\x87\x89\x88N.ed\x8f\x90\x91\x92\x93\x94Rb\x81QUu"),
        *(b"K" + bytes([n]) for n in (0, 1, 255)),
        *(op + bytes([n]) for op in (b"h", b"q") for n in (0, 1, 2)),
        *(b"J" + struct.pack("<i", n) for n in (-1, 1 << 30)),
        *(b"\x8c" + bytes([len(text)]) + text for text in (b"a", b"torch", b"storage", b"data", b"")),
        *(
            b"c" + name + b"\n"
            for name in (b"torch._utils\n_rebuild_tensor_v2", b"torch\nSize", b"torch\nfloat32")
        ),
        *(b"c" + name + b"\n" for name in (b"collections\nOrderedDict", b"builtins\nset", b"os\nsystem")),
        b"ctorch._tensor\n_rebuild_from_type_v2\n",
        b"ctorch\nFloatStorage\n",
        b"c_codecs\nencode\n",
        b"ccopyreg\n_reconstructor\n",
        b"\x8b" + struct.pack("<I", 1 << 31),
        b"\x8e" + struct.pack("<Q", 1 << 60),
        b"\x96" + struct.pack("<Q", 1 << 60),
        b"G" + struct.pack(">d", 1e300),
    ]
)


def main(examples: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY + _mapped(), resource.RLIM_INFINITY))
    dcp, folder = seeds()
    limits = settings(
        max_examples=examples,
        deadline=DEADLINE_MS,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    metadata, shard = (dcp / ".metadata").read_bytes(), next(dcp.glob("*.distcp")).read_bytes()
    end = shard.index(b"PK\5\6") + 22
    archive, bad = shard[:end], folder / "bad"

    @limits
    @given(edited(archive))
    def zips(data: bytes) -> None:
        bad.write_bytes(data)

        def read() -> None:
            found = TorchZip(Folder(folder).file("bad")).load()
            if hasattr(found, "view"):
                found.view().source.verify()

        refused(read)

    @limits
    @given(st.lists(OPCODES, max_size=40).map(b"".join) | st.binary(max_size=200) | edited(metadata))
    def pickles(data: bytes) -> None:
        def read() -> None:
            plain(unpickle(data, where="f", standins=TORCH_STANDINS, persistent=lambda pid: pid), limit=1000)

        refused(read)

    @limits
    @given(st.lists(OPCODES, max_size=30).map(b"".join))
    def pickles_in_files(data: bytes) -> None:
        bad.with_suffix(".pt").write_bytes(zip_of({"a/data.pkl": data + b".", "a/data/0": bytes(64)}))
        refused(lambda: touch(open_checkpoint(bad.with_suffix(".pt"))))

    @limits
    @given(st.dictionaries(st.text(max_size=5), ENTRY, max_size=4) | JSON, st.integers(0, 200))
    def safetensors(header: Any, more: int) -> None:
        text = json.dumps(header).encode()
        file = bad.with_suffix(".safetensors")
        file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(more))
        refused(lambda: touch(open_checkpoint(file)))

    @limits
    @given(st.binary(max_size=80))
    def safetensors_bytes(data: bytes) -> None:
        file = bad.with_suffix(".safetensors")
        file.write_bytes(data)
        refused(lambda: touch(open_checkpoint(file)))

    @limits
    @given(
        st.fixed_dictionaries({"weight_map": JSON}).map(lambda v: json.dumps(v).encode())
        | st.binary(max_size=99)
    )
    def indices(data: bytes) -> None:
        bad.write_bytes(data)
        refused(lambda: read_index(Folder(folder), "bad", lambda file: {"a": file.nbytes}))

    @limits
    @given(edited(metadata))
    def dcp_metadata(data: bytes) -> None:
        (dcp / ".metadata").write_bytes(data)
        refused(lambda: touch(open_checkpoint(dcp)))

    fuzzers = (zips, pickles, pickles_in_files, safetensors, safetensors_bytes, indices, dcp_metadata)
    for fuzz in fuzzers:
        fuzz()
        (dcp / ".metadata").write_bytes(metadata)
        for file in folder.iterdir():
            file.unlink()
    # The deepest nesting that a small file can hold, in every format that nests.
    deep = b"[" * 100_000
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(deep)) + deep)
    refused(lambda: open_checkpoint(folder / "a.safetensors"))
    for data in (b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".", pickle.dumps([0] * 1_000_000)):
        (folder / "b.pt").write_bytes(zip_of({"a/data.pkl": data}))
        refused(lambda: touch(open_checkpoint(folder / "b.pt")))
    print(f"{len(fuzzers)} parsers, {examples} examples each")


def _mapped() -> int:
    """Bytes of address space in use; libraries reserve far more than they fill."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main(int(sys.argv[2]))
