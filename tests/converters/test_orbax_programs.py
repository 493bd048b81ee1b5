"""The TensorStore arrays of Levanter and EasyDeL, bit for bit against these programs' own exporters.

The samples were written by the programs themselves (`make_orbax.py`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from converters import CheckpointError, Tensor, open_checkpoint
from converters.cli import main
from tests.converters.orbax_values import LLAMA, STEP, easydel_llama, pattern

if TYPE_CHECKING:
    from collections.abc import Mapping

SAMPLES = Path(__file__).parent / "orbax_samples"
LEVANTER = ("levanter", "levanter_zarr")
ONE_LAYER = {**LLAMA, "num_hidden_layers": 1}


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Path]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return {"config.json": path}


def unpacked(name: str, out: Path) -> Path:
    shutil.unpack_archive(SAMPLES / f"{name}.zip", out / name)
    return out / name


def same(tensor: Any, wanted: np.ndarray[Any, Any]) -> bool:
    assert isinstance(tensor, Tensor)
    value = tensor.read()
    return (value.dtype, value.shape, value.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())


@pytest.mark.parametrize("name", LEVANTER)
def test_levanter_as_its_own_exporter_does(name: str, tmp_path: Path, config: dict[str, Path]) -> None:
    """The newest step of a run, also with the names of the tree; the vocabulary is padded to 12 rows."""
    run = unpacked(name, tmp_path)
    plain = open_checkpoint(run)
    assert plain.format == "orbax" and plain.metadata["step"] == STEP and plain.counters["step"] == STEP
    assert len(plain.tensors) == 12 and "training_key" not in plain.tensors
    for key, tensor in plain.tensors.items():
        assert same(tensor, pattern(f"model.{key}", "float32", tensor.shape)), key
    found = open_checkpoint(run, companions=config)
    exported = {
        key: value[: 10 if len(value) == 12 and "layers" not in key else None]
        for key, value in np.load(run / "exported.npz").items()
    }
    assert found.tensors.keys() == exported.keys() and len(exported) == 30
    assert all(same(found.tensors[key], value) for key, value in exported.items())
    assert found.optimizer is not None and found.optimizer.state.keys() == exported.keys()
    for moment, saved in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
        layers = f"opt_state.inner_state.1.{saved}.transformer.layers.stacked.self_attn.q_proj.weight"
        queries = pattern(layers, "float32", (3, 2, 2, 6, 8)).reshape(3, 24, 8)
        for layer, wanted in enumerate(queries):
            state = found.optimizer.state[f"model.layers.{layer}.self_attn.q_proj.weight"]
            assert same(state[moment], wanted) and state["step"] == STEP
        words = pattern(
            f"opt_state.inner_state.1.{saved}.embeddings.token_embeddings.weight", "float32", (12, 8)
        )
        assert same(found.optimizer.state["model.embed_tokens.weight"][moment], words[:10])


def wanted_of_easydel(what: str, kind: str) -> Mapping[str, np.ndarray[Any, Any]]:
    made = {}
    for name, shape in easydel_llama().items():
        value = pattern(f"{what}.{name}", kind, shape)
        turned = value.T.copy() if name.endswith("kernel") else value
        made[name.replace(".kernel", ".weight").replace(".embedding", ".weight")] = turned
    return made


def test_easydel_bit_for_bit(tmp_path: Path) -> None:
    folder = unpacked("easydel", tmp_path)
    found = open_checkpoint(folder)
    assert same(
        found.tensors["model.layers.0.mlp.up_proj.kernel"],
        pattern("model.model.layers.0.mlp.up_proj.kernel", "bfloat16", (8, 12)),
    )
    (folder / "config.json").write_text(json.dumps(ONE_LAYER))
    found = open_checkpoint(folder)
    model = wanted_of_easydel("model", "bfloat16")
    assert found.tensors.keys() == model.keys()
    assert all(same(found.tensors[name], value) for name, value in model.items())
    assert found.optimizer is not None
    for moment, what in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
        for name, value in wanted_of_easydel(what, "float32").items():
            state = found.optimizer.state[name]
            assert same(state[moment], value) and state["step"] == STEP
    assert main([str(folder), str(tmp_path / "out"), "--optimizer", "--verify"]) == 0
    written = open_checkpoint(tmp_path / "out")
    assert all(same(written.tensors[name], value) for name, value in model.items())


def test_a_chunk_that_is_not_there_is_zeros_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorStore leaves out chunks of zeros, so that a lost file cannot be told from them."""
    folder = unpacked("easydel", tmp_path)
    (folder / "model/model/norm/kernel/0").unlink()
    assert not open_checkpoint(folder).tensors["model.norm.kernel"].read().any()
    assert "zeros are read for chunks that are not stored (1)" in caplog.text
    caplog.clear()
    run = unpacked("levanter", tmp_path)
    data = max((run / f"step-{STEP}" / "d").iterdir(), key=lambda path: path.stat().st_size)
    data.unlink()
    with pytest.raises(CheckpointError, match=r"/d/\w+: No such file"):
        for tensor in open_checkpoint(run).tensors.values():
            tensor.read()
    open_checkpoint(unpacked("levanter_zarr", tmp_path))
    assert not caplog.text


def test_lists_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = unpacked("easydel", tmp_path)
    index = folder / "tensorstore_index.json"
    content = json.loads(index.read_text())
    first = content["prefixes"]["model"][0]

    def refused(match: str, **changes: Any) -> None:
        listed = [{**first, **changes}, *content["prefixes"]["model"][1:]]
        index.write_text(json.dumps({**content, "prefixes": {"model": listed}}))
        with pytest.raises(CheckpointError, match=match):
            open_checkpoint(folder)

    refused(r"is BF16 \[8, 10\], tensorstore_index\.json says BF16 \[11, 8\]", shape=[11, 8])
    refused(r"is BF16 \[8, 10\], tensorstore_index\.json says F32", dtype="float32")
    refused(r"the element type 'float7' is not supported", dtype="float7")
    refused("leaves the checkpoint folder", path="../model")
    refused("No such file", path="model/none")
    refused("twice", path=content["prefixes"]["model"][1]["path"])
    refused("without its path or shape", shape=None)
    for nothing in (3, {}, {"model": 3}):
        index.write_text(json.dumps({**content, "prefixes": nothing}))
        with pytest.raises(CheckpointError, match="lists no arrays"):
            open_checkpoint(folder)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match=r"tensorstore_index\.json is not the list of EasyDeL's arrays"):
        open_checkpoint(folder)
    step = unpacked("levanter", tmp_path) / f"step-{STEP}"
    manifest = {"format_version": 1, "arrays": [{"path": "step", "shape": [], "dtype": "int32"}]}
    (step / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"holds 'model/\S+', which manifest\.json does not list"):
        open_checkpoint(step)
    (step / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"Levanter's without metadata\.json: it is incomplete"):
        open_checkpoint(step)
    step = unpacked("levanter_zarr", tmp_path) / f"step-{STEP}"
    header = step / "model/lm_head/weight/.zarray"
    header.rename(tmp_path / "header")
    with pytest.raises(CheckpointError, match=r"'model/lm_head/weight' has chunks and no \.zarray"):
        open_checkpoint(step)
    (tmp_path / "header").rename(header)
    shutil.rmtree(step / "model")
    shutil.rmtree(step / "opt_state")
    for name in ("step", "training_key"):
        shutil.rmtree(step / name)
    with pytest.raises(CheckpointError, match=r"metadata\.json lies here, and no arrays"):
        open_checkpoint(step)


@pytest.mark.parametrize("name", [*LEVANTER, "easydel"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model of type 'gpt2' is not read; "),
        ({"num_attention_heads": 2}, r"is \[.*, by config\.json it would be \[.*; give the config\.json"),
        ({"vocab_size": 13}, r"by config\.json it would be \[13, 8\]|\[8, 13\]"),
        ({"num_hidden_layers": 4}, r"by config\.json it would be \[4, |holds no model\.layers\.1\."),
        ({"attention_bias": True}, r"holds no model\.layers\.0\.self_attn\.q_proj\.bias"),
        ({"hidden_size": None}, "its config.json has no hidden_size"),
    ],
)
def test_the_config_of_another_model(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = unpacked(name, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**(ONE_LAYER if name == "easydel" else LLAMA), **changes}))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder, companions={"config.json": path})
