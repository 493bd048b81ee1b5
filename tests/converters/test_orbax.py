"""Orbax checkpoints, read without JAX, bit for bit.

Orbax itself wrote `orbax_samples/` (`make_orbax.py`). If Orbax is installed, the samples are written again.
The factors that MaxText folds into its weights are removed as in MaxText's exporter: the expected values are
its formulas in numpy.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow
import pytest
import transformers

from portable.converters import CheckpointError, Tensor, open_checkpoint
from portable.converters.cli import main
from portable.converters.containers import ocdbt
from portable.converters.containers.crc32c import compute_crc32c
from portable.converters.containers.zarr import ChunkBudget, build_zarr_tensor
from portable.converters.formats.orbax.maxtext import build_maxtext_layout
from portable.converters.storage import compressed_bytes
from portable.converters.storage.byte_sources import InMemorySource
from portable.converters.storage.folder import CheckpointFolder
from portable.converters.tensors.dtypes import get_numpy_dtype_names
from tests.converters import orbax_damage as craft
from tests.converters.making import once
from tests.converters.orbax_values import (
    AROUND,
    KERNELS,
    LLAMA,
    LLAMA_NORMS,
    ODD,
    SIZES,
    STEP,
    maxtext_llama,
    pattern,
)

SAMPLES = Path(__file__).parent / "orbax_samples"
Array = np.ndarray[Any, np.dtype[Any]]


def zstd(count: int) -> bytes:
    """Compress `count` zeros."""
    return bytes(pyarrow.Codec("zstd").compress(bytes(count), asbytes=True))


NOW = pytest.param("written now", marks=pytest.mark.large("jax", "orbax", "flax", "optax"))


@pytest.fixture(scope="module", params=["kept", NOW])
def samples(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "kept":
        return SAMPLES

    def write(out: Path) -> None:
        command = [sys.executable, "-m", "tests.converters.make_orbax", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]

    return once("make_orbax", tmp_path_factory, write)


@pytest.mark.parametrize("run", ["ocdbt", "zarr", "zarr3"])
def test_orbax_tree_is_read_bit_for_bit(samples: Path, run: str) -> None:
    """The arrays are sharded over two dimensions, one or none.

    The tree also has numbers, a string and None.
    """
    checkpoint = open_checkpoint(samples / run)
    assert checkpoint.format == "orbax" and checkpoint.optimizer is None
    assert checkpoint.tensors.keys() == ODD.keys()
    for name, (dtype, shape, _) in ODD.items():
        value = checkpoint.tensors[name].read()
        wanted = pattern(name, dtype, shape)
        assert (value.dtype, value.shape, value.tobytes()) == (wanted.dtype, shape, wanted.tobytes()), name
    assert checkpoint.counters == {"count": 3, "rate": 0.5}
    both = checkpoint.tensors["layers.0.both"]
    assert both.read((slice(2, 5), slice(1, 3))).tobytes() == both.read()[2:5, 1:3].tobytes()


def test_orbax_optimizer_of_two_processes_is_read_bit_for_bit(samples: Path) -> None:
    checkpoint = open_checkpoint(samples / "maxtext")
    assert checkpoint.metadata["step"] == STEP and checkpoint.counters["step"] == STEP
    optimizer = checkpoint.optimizer
    assert optimizer is not None and optimizer.param_groups == [{"params": sorted(optimizer.state)}]
    assert checkpoint.tensors.keys() == optimizer.state.keys()
    for name, (dtype, shape, _) in maxtext_llama().items():
        full = f"params.params.{name}"
        assert checkpoint.tensors[full].read().tobytes() == pattern(f"params.{name}", dtype, shape).tobytes()
        state = optimizer.state[full]
        assert state["step"] == STEP
        for moment, ours in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
            value = state[ours]
            assert isinstance(value, Tensor)
            assert value.read().tobytes() == pattern(f"{moment}.{name}", "float32", shape).tobytes()


# -- MaxText's models ----------------------------------------------------------------------------------------

LAYERS = 4
NORMS: dict[str, dict[str, tuple[str, str]]] = {
    "llama": LLAMA_NORMS,
    "llama-3.1": LLAMA_NORMS,
    "qwen3": {
        **LLAMA_NORMS,
        "self_attention.query_norm.scale": ("D", "self_attn.q_norm"),
        "self_attention.key_norm.scale": ("D", "self_attn.k_norm"),
    },
    "gemma": {
        "pre_self_attention_norm.scale": ("E", "input_layernorm"),
        "pre_ffw_norm.scale": ("E", "post_attention_layernorm"),
    },
    "gemma2": {
        "pre_self_attention_norm.scale": ("E", "input_layernorm"),
        "post_self_attention_norm.scale": ("E", "post_attention_layernorm"),
        "pre_ffw_norm.scale": ("E", "pre_feedforward_layernorm"),
        "post_ffw_norm.scale": ("E", "post_feedforward_layernorm"),
    },
}


def config(kind: str, **more: Any) -> dict[str, Any]:
    made = {**LLAMA, "num_hidden_layers": LAYERS, "model_type": kind.partition("-")[0], **more}
    made["tie_word_embeddings"] = kind.startswith("gemma")
    if kind == "llama-3.1":
        made["rope_parameters"] = {"rope_type": "llama3"}
    return made


def model(kind: str, *, scanned: bool) -> dict[str, Array]:
    """Return parameters of MaxText, in bfloat16, by their paths below `params`."""
    shapes: dict[str, list[int]] = {}
    pairs = kind == "gemma2"
    count = LAYERS // (2 if pairs else 1)
    for name, (sizes, _) in {**KERNELS, **NORMS[kind]}.items():
        module, _, rest = name.partition(".")
        for suffix in ("_local", "_global") if pairs else ("",):
            shape = [SIZES[size] for size in sizes]
            if scanned:
                shapes[f"decoder.layers.{module}{suffix}.{rest}"] = [shape[0], count, *shape[1:]]
            else:
                shapes |= {f"decoder.layers_{i}.{module}{suffix}.{rest}": shape for i in range(count)}
    around = [name for name in AROUND if "logits" not in name or not kind.startswith("gemma")]
    shapes |= {name: [SIZES[size] for size in AROUND[name]] for name in around}
    return {name: pattern(name, "bfloat16", tuple(shape)) for name, shape in shapes.items()}


def layer_of(kind: str, arrays: dict[str, Array], name: str, number: int, *, scanned: bool) -> Array:
    module, _, rest = name.partition(".")
    if kind == "gemma2":
        module, number = f"{module}_{('local', 'global')[number % 2]}", number // 2
    if not scanned:
        return arrays[f"decoder.layers_{number}.{module}.{rest}"]
    return arrays[f"decoder.layers.{module}.{rest}"][:, number]


def expected(kind: str, arrays: dict[str, Array], *, scanned: bool, power: int = 0) -> dict[str, Array]:
    """Return transformers' weights. With a power, return moments, which a weight's factor divides."""
    gemma, made = kind.startswith("gemma"), {}

    def scaled(value: Array, factor: Any, *, up: bool) -> Array:
        single = value.astype(np.float32)
        by = np.float32(factor ** (power or 1))
        return np.asarray(single * by if up != bool(power) else single / by).astype(value.dtype)

    def norm(value: Array) -> Array:
        return np.asarray(value.astype(np.float32) - 1).astype(value.dtype) if gemma and not power else value

    root = np.float32(np.sqrt(np.float32(SIZES["D"])))
    for number in range(LAYERS):
        for name, (sizes, theirs) in {**KERNELS, **NORMS[kind]}.items():
            value = layer_of(kind, arrays, name, number, scanned=scanned)
            if "query.kernel" in name and kind != "qwen3":
                value = scaled(value, root, up=True)
            if kind == "llama-3.1" and ("query." in name or "key." in name):
                value = np.concatenate([value[..., ::2], value[..., 1::2]], axis=-1)
            if len(sizes) == 1:
                value = norm(value)
            elif "out" in name:
                value = value.reshape(-1, value.shape[-1]).T
            else:
                value = value.reshape(value.shape[0], -1).T
            made[f"model.layers.{number}.{theirs}.weight"] = value
    embedding = arrays["token_embedder.embedding"][: SIZES["V"]]
    width = np.float32(np.sqrt(np.float32(SIZES["E"])))
    made["model.embed_tokens.weight"] = scaled(embedding, width, up=False) if gemma else embedding
    made["model.norm.weight"] = norm(arrays["decoder.decoder_norm.scale"])
    if not gemma:
        made["lm_head.weight"] = arrays["decoder.logits_dense.kernel"][:, : SIZES["V"]].T
    return made


def as_tensors(arrays: dict[str, Array]) -> dict[tuple[str, ...], Tensor]:
    return {
        ("params", *name.split(".")): Tensor.from_source(
            name, get_numpy_dtype_names()[value.dtype], value.shape, InMemorySource(value.tobytes())
        )
        for name, value in arrays.items()
    }


def assert_equal(made: dict[str, Tensor], wanted: dict[str, Array]) -> None:
    assert made.keys() == wanted.keys()
    for name, tensor in made.items():
        assert tensor.shape == wanted[name].shape, name
        assert tensor.read().tobytes() == np.ascontiguousarray(wanted[name]).tobytes(), name


@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "layer by layer"])
@pytest.mark.parametrize("kind", list(NORMS))
def test_maxtext_layout_converts_to_transformers(kind: str, scanned: bool) -> None:
    arrays = model(kind, scanned=scanned)
    tensors = as_tensors(arrays)
    layout = build_maxtext_layout(
        {path: tensor.shape for path, tensor in tensors.items()}, config(kind), "here"
    )
    assert layout is not None
    made: dict[str, Tensor] = {}
    for path, tensor in tensors.items():
        made |= layout.convert_weight(path, tensor)
    assert_equal(made, expected(kind, arrays, scanned=scanned))
    for power, moment in ((1, "mu"), (2, "nu")):
        made = {}
        for path, tensor in tensors.items():
            made |= layout.convert_moment(path, tensor, moment)
        assert_equal(made, expected(kind, arrays, scanned=scanned, power=power))


def test_converted_maxtext_llama_loads_in_transformers(tmp_path: Path) -> None:
    """The command converts scanned layers of two processes, with the optimizer."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(LLAMA))
    source, out = str(SAMPLES / "maxtext"), str(tmp_path / "out")
    given = ["--config-from", str(tmp_path / "base"), "--optimizer", "--verify", "--quiet"]
    assert main([source, out, *given]) == 0
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    weight = loaded.state_dict()["model.layers.1.self_attn.q_proj.weight"]
    stored = pattern("params.decoder.layers.self_attention.query.kernel", "bfloat16", (8, 3, 4, 6))[:, 1]
    scaled = (stored.astype(np.float32) * np.float32(np.sqrt(np.float32(6)))).astype(ml_dtypes.bfloat16)
    assert weight.view(dtype=__import__("torch").int16).numpy().tobytes() == scaled.reshape(8, 24).T.tobytes()
    again = open_checkpoint(out)
    assert again.optimizer is not None
    moment = again.optimizer.state["model.layers.1.mlp.up_proj.weight"]["exp_avg"]
    assert isinstance(moment, Tensor)
    wanted = pattern("mu.decoder.layers.mlp.wi_1.kernel", "float32", (8, 3, 12))[:, 1].T
    assert moment.read().tobytes() == np.ascontiguousarray(wanted).tobytes()


LAYER = ("params", "decoder", "layers", "mlp")


@pytest.mark.parametrize(
    ("change", "shapes", "told"),
    [
        (
            {"model_type": "mixtral"},
            {},
            "MaxText models of type 'mixtral' are not supported; export the model with",
        ),
        ({"num_hidden_layers": 5}, {}, r"has shape \[8, 4, 4, 6\], but config.json requires \[8, 5, 4, 6\]"),
        (
            {"vocab_size": 13},
            {},
            "requires at least 13 tokens in dimension 0 and the hidden size 8 in dimension 1",
        ),
        ({"rope_parameters": {"rope_type": "llama3"}, "head_dim": 5}, {}, "head_dim is 5 in config.json"),
        ({}, {(*LAYER, "wi", "kernel"): (8, 4, 24)}, r"mlp\.wi\.kernel' does not belong to a model of type"),
        (
            {},
            {("params", "decoder", "logits_dense", "kernel"): None},
            "whether MaxText divides the logits",
        ),
        ({}, {(*LAYER, "wi_0", "kernel"): None}, r"layers\.0\.mlp\.gate_proj\.weight is missing"),
    ],
)
def test_maxtext_layout_rejects_other_config_or_model(
    change: dict[str, Any], shapes: dict[tuple[str, ...], Any], told: str
) -> None:
    whole = {path: tensor.shape for path, tensor in as_tensors(model("llama", scanned=True)).items()}
    assert build_maxtext_layout(whole, {}, "here") is None
    held = {path: shape for path, shape in (whole | shapes).items() if shape is not None}
    with pytest.raises(CheckpointError, match=told):
        build_maxtext_layout(held, config("llama", **change), "here")


# -- chunks --------------------------------------------------------------------------------------------------


def test_orbax_large_chunks_are_decompressed_into_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressed_bytes, "MEMORY_BYTES", 0)
    monkeypatch.setattr(compressed_bytes, "CACHE_BYTES", 0)
    large = open_checkpoint(SAMPLES / "zarr").tensors["layers.1.large"]
    assert large.read().tobytes() == pattern("layers.1.large", "int32", (300, 2)).tobytes()

    def full() -> Any:
        return Path("/dev/full").open("r+b", 0)

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.raises(CheckpointError, match=r"chunk of 600 bytes .* No space left .* TMPDIR"):
        open_checkpoint(SAMPLES / "zarr").tensors["layers.1.large"].read()


def test_orbax_chunk_with_false_size_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    real = tempfile.TemporaryFile

    def watched() -> Any:
        file = real()
        written.append(os.dup(file.fileno()))
        return file

    monkeypatch.setattr(tempfile, "TemporaryFile", watched)
    chunk = compressed_bytes.DecompressedSource(InMemorySource(zstd(100)), "zstd", 1 << 50, 1 << 50, "here")
    with pytest.raises(CheckpointError, match="ends after 100 of"):
        chunk.load_content(1, set())
    assert os.fstat(written[0]).st_size == 100
    os.close(written[0])


FLAT = {"zarr_format": 2, "shape": [4], "chunks": [2], "dtype": "<f4", "compressor": None, "fill_value": None}
ZSTD = {"chunks": [4], "compressor": {"id": "zstd"}}
INDEX = b"".join(struct.pack("<QQ", at, 2) for at in (4, 0, 2))


@pytest.mark.parametrize(("fill", "wanted"), [(None, 0.0), (7, 7.0), ("-Infinity", -np.inf)])
def test_orbax_missing_chunks_have_fill_value(fill: Any, wanted: float) -> None:
    """Orbax omitted such chunks until 2024. With `store_array_data_equal_to_fill_value`, all must exist."""
    held = {"0": InMemorySource(np.array([1, 2], np.float32).tobytes())}
    made = array({**FLAT, "shape": [5], "fill_value": fill}, held.get)
    assert made.read().tolist() == [1, 2, wanted, wanted, wanted]
    assert made.read((slice(1, 4),)).tolist() == [2, wanted, wanted]


def shards(count: int, inner: int = 1) -> dict[str, Any]:
    """Return a header of version 3: one shard of `count` bytes in chunks of `inner`, uncompressed."""
    plain = {"name": "bytes"}
    sharding = {"chunk_shape": [inner], "codecs": [plain], "index_codecs": [plain]}
    return {
        "zarr_format": 3,
        "shape": [count],
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [count]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }


def array(header: Any, values: Callable[[str], InMemorySource | None]) -> Tensor:
    version = 3 if "chunk_grid" in header else 2
    return build_zarr_tensor("a", json.dumps(header).encode(), version, values, "here", 100, ChunkBudget(50))


def test_orbax_chunks_within_shard_are_read() -> None:
    made = array(shards(6, 2), lambda key: InMemorySource(bytes(range(6)) + INDEX))
    assert made.read().tolist() == [4, 5, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("header", "data", "told"),
    [
        ({**FLAT, "filters": [{"id": "delta"}]}, b"", "filters are not supported"),
        ({**FLAT, "compressor": {"id": "blosc"}}, b"", "compressor is 'blosc', but only"),
        ({**FLAT, "dtype": ">f4"}, b"", "element type '>f4' is not supported"),
        (
            {**FLAT, "chunks": [1 << 40]},
            b"",
            r"chunks of shape \[1099511627776\] do not match an array of shape \[4\]",
        ),
        ({**FLAT, "shape": [1 << 60], "chunks": [1]}, b"", "would have 1,152,921,504,606,846,976 chunks"),
        ({**FLAT, "fill_value": [1, 2]}, None, "the fill value a list is not supported"),
        (
            {**FLAT, "shape": [120], "fill_value": 0},
            None,
            "a/50: damaged: .* more than 50 chunks .* have no stored values",
        ),
        ({**FLAT, **ZSTD}, zstd(15), "ends after 15 of 16"),
        ({**FLAT, **ZSTD}, zstd(1 << 20), "has more than the expected 16 bytes"),
        (
            shards(6, 2),
            bytes(6) + INDEX[:16] + b"\xff" * 16 + INDEX[32:],
            "here: a/c/0: chunk 1 of the shard is missing",
        ),
        (
            shards(6, 2),
            bytes(6) + INDEX[:16] + struct.pack("<QQ", 1 << 63, 2) + INDEX[32:],
            "chunk 1 would end beyond the end of the shard",
        ),
        (shards(1 << 20), bytes(100), "more than 50 chunks that are stored in shards"),
    ],
)
def test_orbax_unsupported_array_is_rejected(header: Any, data: bytes | None, told: str) -> None:
    with pytest.raises(CheckpointError, match=told):
        array(header, lambda key: None if data is None else InMemorySource(data)).read()


# -- the database --------------------------------------------------------------------------------------------


def test_crc32c_matches_rfc_3720() -> None:
    assert compute_crc32c(b"123456789") == 0xE3069283
    assert compute_crc32c(bytes(32)) == 0x8A9136AA
    data = bytes(range(256)) * 260  # side by side, and bytes left over
    assert (compute_crc32c(data[:5001]), compute_crc32c(data[:66001])) == (0x67F60DF9, 0x1F4C3337)


def test_ocdbt_deep_tree_is_read(tmp_path: Path) -> None:
    leaves = [{"a": b"1", "b": b"2"}, {"x": b"3"}]
    nodes = [craft.sealed(craft.NODE, craft.leaf(values), compress=True) for values in leaves]
    root = craft.sealed(
        craft.NODE,
        craft.interior(1, "d/low", [("k/a", 2, 0, len(nodes[0])), ("l/x", 2, len(nodes[0]), len(nodes[1]))]),
    )
    craft.database(tmp_path, root, height=1)
    (tmp_path / "d" / "low").write_bytes(b"".join(nodes))
    found = ocdbt.read_ocdbt_values(CheckpointFolder(tmp_path))
    assert {key: bytes(value.data) for key, value in found.items() if isinstance(value, InMemorySource)} == {
        "k/a": b"1",
        "k/b": b"2",
        "l/x": b"3",
    }


def hostile() -> Iterator[tuple[str, bytes, dict[str, Any], str]]:
    good = craft.leaf({"a": b"1"})
    yield "outside", craft.apart("../../etc/passwd", "a", 0, 4), {}, "points outside of the checkpoint folder"
    yield "beyond", craft.apart("d/data", "a", 1 << 40, 4), {}, "truncated or damaged: a would end at byte"
    yield "huge", craft.apart("d/data", "a", 0, 1 << 50), {}, "truncated or damaged"
    yield "missing", craft.apart("d/other", "a", 0, 4), {}, "d/other: No such file"
    yield "height", good, {"height": 3}, "an OCDBT node has the height 0, but its parent records the height 3"
    yield "rest", good + b"!", {}, "continues after its entries .unexpected bytes: 1."
    yield "entries", b"\0" + craft.files() + craft.varint(1 << 40), {}, "entries"
    yield "order", craft.leaf({"b": b"1", "a": b"2"}), {}, "keys of an OCDBT node are not sorted"
    yield "number", b"\0" + b"\xff" * 10, {}, "an integer of more than 64 bits|is truncated"
    length = len(craft.sealed(craft.NODE, craft.interior(2, "d/data", [("a", 0, 0, 64), ("b", 0, 0, 64)])))
    loop = craft.interior(2, "d/data", [("a", 0, 0, length), ("b", 0, 0, length)])
    yield "loop", loop, {"height": 2}, "a node of the OCDBT tree has two parents"


@pytest.mark.parametrize(
    ("name", "body", "more", "told"), [pytest.param(*case, id=case[0]) for case in hostile()]
)
def test_ocdbt_malicious_database_is_rejected(
    tmp_path: Path, name: str, body: bytes, more: dict[str, Any], told: str
) -> None:
    craft.database(tmp_path, craft.sealed(craft.NODE, body), **more)
    with pytest.raises(CheckpointError, match=told):
        ocdbt.read_ocdbt_values(CheckpointFolder(tmp_path))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("body", "told"),
    [
        (
            b"\0" + craft.files() + craft.varint(1 << 22) + bytes(5 << 22),
            "damaged: the OCDBT tree has .* but needs at least",
        ),
        (bytes(1 << 28), "has more than 134,217,728 bytes"),
    ],
)
def test_ocdbt_decompression_bomb_is_rejected(tmp_path: Path, body: bytes, told: str) -> None:
    craft.database(tmp_path, craft.sealed(craft.NODE, body, compress=True))
    assert (tmp_path / "d" / "data").stat().st_size < 1 << 16
    with pytest.raises(CheckpointError, match=told):
        ocdbt.read_ocdbt_values(CheckpointFolder(tmp_path))


def bodies() -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield bodies of nodes: a leaf of Orbax, and an interior node."""
    for path in sorted((SAMPLES / "ocdbt" / "d").iterdir()):
        data = path.read_bytes()
        yield (
            ocdbt._read_checked_body(
                CheckpointFolder(path.parent).get_file(path.name),
                0,
                len(data),
                craft.NODE,
                ocdbt._MemoryCost(),
            ).data,
            {},
        )
    yield craft.interior(1, "d/data", [("a", 1, 0, 80), ("b", 1, 80, 90)]), {"height": 1}


@pytest.mark.timeout(120)
def test_ocdbt_random_nodes_are_rejected_or_read(tmp_path: Path) -> None:
    """The checksum is correct, because a malicious file has a correct one, too."""
    rng = random.Random(4)
    ended: set[bool] = set()
    for body, more in bodies():
        for _ in range(150):
            bad = bytearray(body)
            for _ in range(rng.choice([1, 1, 2, 8])):
                at = rng.randrange(min(len(bad), rng.choice([40, len(bad)])))
                bad[at] = rng.choice([bad[at] ^ 1 << rng.randrange(8), rng.randrange(256), 255])
            if rng.random() < 0.1:
                del bad[rng.randrange(len(bad)) :]
            craft.database(tmp_path, craft.sealed(craft.NODE, bytes(bad)), **more)
            try:
                ocdbt.read_ocdbt_values(CheckpointFolder(tmp_path))
                ended.add(True)
            except CheckpointError as error:
                assert str(tmp_path) in str(error) and "\n" not in str(error)
                ended.add(False)
    assert ended == {True, False}


def saved(folder: Path, arrays: Mapping[str, Array | np.generic], **more: Any) -> Path:
    """Save a tree of plain arrays, one chunk each, with its flags."""
    listed = {}
    for name, value in arrays.items():
        where = folder / name
        where.mkdir(parents=True)
        header = {"zarr_format": 2, "shape": value.shape, "chunks": value.shape, "dtype": value.dtype.str}
        (where / ".zarray").write_text(json.dumps(header))
        (where / ".".join("0" * value.ndim or "0")).write_bytes(value.tobytes())
        keys = [{"key": key, "key_type": 2} for key in name.split(".")]
        kind: dict[str, Any] = {"value_type": "scalar" if isinstance(value, np.generic) else "jax.Array"}
        kind["skip_deserialize"] = False
        listed[name] = {"key_metadata": keys, "value_metadata": kind}
    content = {"tree_metadata": listed, "use_ocdbt": False, **more}
    (folder / "_METADATA").write_text(json.dumps(content))
    return folder


def test_orbax_chunk_may_be_missing_only_in_old_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((), np.float32)}
    older = saved(tmp_path / "older", arrays, use_ocdbt=None)
    (older / "a" / "0.0").unlink()
    tensors = open_checkpoint(older).tensors
    assert not tensors["a"].read().any() and tensors["b"].read() == 1
    assert "chunks that have no file (1 in total) are read as zeros" in caplog.text
    newer = saved(tmp_path / "newer", arrays, store_array_data_equal_to_fill_value=True)
    (newer / "a" / "0.0").unlink()
    with pytest.raises(CheckpointError, match=r"newer/a/0\.0: No such file"):
        open_checkpoint(newer)


def test_orbax_items_may_have_any_name(tmp_path: Path) -> None:
    step = tmp_path / "ckpt_12"
    step.mkdir()
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    arrays = {"w": np.ones(2, np.float32)}
    saved(step / "mine", arrays)
    assert list(open_checkpoint(tmp_path).tensors) == ["w"]
    saved(step / "other", arrays)
    with pytest.raises(
        CheckpointError, match="several Orbax checkpoints; specify one of these folders: mine, other"
    ):
        open_checkpoint(tmp_path)


def test_orbax_optimizer_of_flax_nnx_is_read(tmp_path: Path) -> None:
    """The settings of `inject_hyperparams` are ignored, and ambiguous parameters are rejected."""
    ones, count = np.ones(3, np.float32), np.array(5, np.int32)
    above = "optimizer.opt_state.inner_state.0"
    arrays: dict[str, Array] = {"model.l.w": ones, f"{above}.mu.l.w": ones * 2, f"{above}.nu.l.w": ones * 3}
    arrays |= {f"{above}.count": count, "optimizer.opt_state.hyperparams.learning_rate": ones[0].reshape(())}
    found = open_checkpoint(saved(tmp_path / "c", arrays))
    assert list(found.tensors) == ["model.l.w"] and found.optimizer is not None
    state = found.optimizer.state["model.l.w"]
    assert state["step"] == 5 and isinstance(state["exp_avg_sq"], Tensor)
    assert state["exp_avg_sq"].read().tolist() == [3, 3, 3]
    lion = {name: value for name, value in arrays.items() if "nu" not in name}
    with pytest.raises(
        CheckpointError, match=r"only one moment of model\.l\.w, but Adam has two; convert without"
    ):
        _ = open_checkpoint(saved(tmp_path / "lion", lion)).optimizer
    two = open_checkpoint(saved(tmp_path / "two", {**arrays, "ema.l.w": ones}))
    with pytest.raises(
        CheckpointError, match=r"mu\.l\.w' is not a moment \(mu or nu\) of optax's Adam for one"
    ):
        _ = two.optimizer


def test_orbax_unfinished_checkpoint_is_rejected(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "zarr", tmp_path / "7.orbax-checkpoint-tmp")
    with pytest.raises(CheckpointError, match="is an unfinished Orbax checkpoint"):
        open_checkpoint(tmp_path / "7.orbax-checkpoint-tmp")
