"""DCP checkpoints of any program, compared with the live tensors of the run."""

from __future__ import annotations

import json
import pickle
import shutil
import struct
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from benchmarks.checkpoint_scale import list_keys, write_metadata, write_rank
from portable.converters import (
    CheckpointError,
    Tensor,
    open_checkpoint,
    read_item_checksums,
    write_shard_checksums,
)
from portable.converters.cli import main
from portable.converters.formats.dcp.metadata import TensorEntry, read_folder_metadata
from portable.converters.storage.folder import CheckpointFolder
from tests.converters.compare import (
    FileCache,
    assert_model,
    assert_optimizer,
    assert_state,
    bits,
    live,
    load,
    refused,
    remove_tables,
)
from tests.tiny_models import tiny_model


def test_dcp_metadata_with_enum_members_by_name_is_read(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(written / "fsdp2-bare", tmp_path / "step")
    file = tmp_path / "step" / ".metadata"
    metadata = pickle.loads(file.read_bytes())  # noqa: S301 (written by this test)
    by_name = lambda self, _: (getattr, (type(self), self.name))  # noqa: E731
    monkeypatch.setattr("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING.__reduce_ex__", by_name)
    file.write_bytes(pickle.dumps(metadata))
    assert b"getattr" in file.read_bytes()
    assert_model(open_checkpoint(tmp_path / "step"), load(written / "fsdp2-bare.ref.pt")["model"])


def test_dcp_shards_along_other_dimensions_are_read(written: Path) -> None:
    reference = load(written / "grid4.ref.pt")["model"]
    checkpoint = open_checkpoint(written / "grid4")
    assert_model(checkpoint, reference)
    assert all(len(tensor.boxes) > 1 for tensor in checkpoint.tensors.values())


def test_dcp_tied_names_follow_config_and_values(written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step"
    shutil.copytree(written / "plain1-ours", folder)
    assert open_checkpoint(folder).aliases == {"lm_head.weight": "embed_tokens.weight"}
    (folder / "config.json").write_text(json.dumps({"model_type": "odd", "tie_word_embeddings": False}))
    kept = open_checkpoint(folder)
    assert kept.aliases == {}
    assert "lm_head.weight" in kept.tensors


def test_run_folder_selects_newest_complete_step(written: Path, tmp_path: Path) -> None:
    steps = tmp_path / "run" / "checkpoints"
    for step, source in ((100, "fsdp2-ours"), (200, "fsdp3-ours")):
        shutil.copytree(written / source, steps / f"step-{step:06d}")
        (steps / f"step-{step:06d}" / "trainer_state.json").write_text(json.dumps({"step": step}))
    (steps / "step-000300").mkdir()
    (steps / "step-000300" / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model_type": "odd"}))
    checkpoint = open_checkpoint(tmp_path / "run")
    assert checkpoint.root == steps / "step-000200"
    assert checkpoint.metadata["step"] == 200
    assert checkpoint.companions["config.json"] == (tmp_path / "run" / "config.json").absolute()
    assert open_checkpoint(tmp_path / "run", tag="100").metadata["step"] == 100
    assert open_checkpoint(str(tmp_path / "run"), tag="step-000100").metadata["step"] == 100
    with pytest.raises(CheckpointError, match=r"no \.metadata"):
        open_checkpoint(tmp_path / "run", tag="300")
    with pytest.raises(CheckpointError, match=r"'7'.*step-000300"):
        open_checkpoint(tmp_path / "run", tag="7")
    shutil.copytree(written / "fsdp3-ours", steps / "checkpoint-100")
    assert open_checkpoint(tmp_path / "run", tag="step-000100").metadata["step"] == 100
    with pytest.raises(CheckpointError, match=r"'100' matches .*/checkpoint-100 and .*/step-000100; specify"):
        open_checkpoint(tmp_path / "run", tag="100")


def test_dcp_container_names_are_stripped(tmp_path: Path) -> None:
    """The names of a Llama begin with `model.`, and only the nesting of the writer is removed."""
    names = ("model.embed_tokens.weight", "model.norm.weight")
    weights = {name: torch.randn(3, 2) for name in names}
    wrapped = {f"_orig_mod.{name}": value for name, value in weights.items()}
    states: dict[str, dict[str, Any]] = {
        "bare": weights,
        "model": {"model": weights},
        "odd": {"weights": wrapped},
    }
    for kind, state in states.items():
        dcp_save(state, checkpoint_id=tmp_path / kind, no_dist=True)
        assert_model(open_checkpoint(tmp_path / kind), weights)
    dcp_save({"g": {"w": weights[names[0]]}, "d": {"w": weights[names[1]]}}, checkpoint_id=tmp_path / "two")
    assert set(open_checkpoint(tmp_path / "two").tensors) == {"g.w", "d.w"}


def test_dcp_with_two_optimizers_is_ambiguous(tmp_path: Path) -> None:
    """Reinforcement learning saves an actor and a critic, whose parameters have the same names."""
    models = {"actor": torch.nn.Linear(2, 3), "critic": torch.nn.Linear(2, 3)}
    state: dict[str, Any] = {name: model.state_dict() for name, model in models.items()}
    for name, model in models.items():
        optimizer = torch.optim.AdamW(model.named_parameters())
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        state[f"{name}_optim"] = optimizer.state_dict()
    dcp_save(state, checkpoint_id=tmp_path / "run", no_dist=True)
    checkpoint = open_checkpoint(tmp_path / "run")
    assert set(checkpoint.tensors) == {f"{name}.{part}" for name in models for part in ("weight", "bias")}
    with pytest.raises(
        CheckpointError, match=r"several optimizers .'actor_optim', 'critic_optim'., but .* convert wit"
    ):
        _ = checkpoint.optimizer


def test_dcp_optimizer_state_keyed_by_index_is_read(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    dcp_save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "ok")
    assert_optimizer(open_checkpoint(tmp_path / "ok"), live(model, optimizer))


@pytest.mark.parametrize(
    ("writer", "key"),
    [
        (FileSystemWriter, "w"),
        (FileSystemWriter, 0),
        (partial(HuggingFaceStorageWriter, save_distributed=True), "w"),
    ],
)
def test_dcp_optimizer_state_of_another_shape_is_rejected(
    writer: Any, key: str | int, tmp_path: Path
) -> None:
    moments = {"exp_avg": torch.ones(5, 3), "exp_avg_sq": torch.ones(5)}
    state = {"w": torch.ones(5, 3), "optim": {"state": {key: moments}}}
    dcp_save(state, storage_writer=writer(str(tmp_path)), no_dist=True)
    assert "exp_avg_sq of 'w' has shape [5], but the parameter has shape [5, 3]; copy" in refused(tmp_path)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)])  # one list of groups, or a key per setting
def test_dcp_groups_of_many_parameters_are_complete(lr: float | torch.Tensor, tmp_path: Path) -> None:
    names = [f"w{i}" for i in range(100_010)]
    groups = [{"params": names, "lr": lr}]
    state = {"model": {"w0": torch.ones(2)}, "optim": {"state": {}, "param_groups": groups}}
    dcp_save(state, checkpoint_id=tmp_path, no_dist=True)
    optimizer = open_checkpoint(tmp_path).optimizer
    assert optimizer is not None
    (group,) = optimizer.param_groups
    assert group["params"] == names and group["lr"] == pytest.approx(0.1)


def test_dcp_flat_parameters_of_fsdp1_are_rejected(tmp_path: Path) -> None:
    """A LOCAL_STATE_DICT saved through DCP does not contain the shapes of the parameters."""
    state = {"model": {"_flat_param": torch.ones(5), "layers.0._flat_param": torch.ones(7)}}
    dcp_save(state, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=r"flat parameters of FSDP1 \(LOCAL_STATE_DICT\)"):
        open_checkpoint(tmp_path)


# -- its sharded safetensors ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sharded", "two-files", "consolidated", "with-moments", "grid"])
def test_dcp_safetensors_equal_live_tensors(written: Path, name: str) -> None:
    """The checkpoint can be opened by any of its files."""
    folder, reference = written / "safetensors" / name, load(written / f"safetensors+{name}.ref.pt")
    for path in (folder, max(folder.rglob("shard-00002-*"))):
        checkpoint = open_checkpoint(path)
        assert checkpoint.format == "dcp-safetensors"
        assert_model(checkpoint, reference["model"])
    if name == "with-moments":
        moments = {key: {"exp_avg": held["exp_avg"]} for key, held in reference["optim"].items()}
        assert_state(checkpoint, moments)


# -- written without torch, read back by torch itself --------------------------------------------------------


def blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return [blank(item) for item in value] if isinstance(value, list) else value


def test_dcp_of_a_tied_model_loads_into_its_live_state(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    assert main([str(tmp_path / "base"), str(tmp_path / "out"), "--to", "dcp", "--quiet"]) == 0
    weights = model.state_dict()
    assert "lm_head.weight" in weights
    state = {"model": blank(weights)}
    dcp_load(state, checkpoint_id=tmp_path / "out")
    assert all(bits(state["model"][name]) == bits(value) for name, value in weights.items())


def test_torch_loads_converted_dcp_of_fsdp(written: Path, tmp_path: Path) -> None:
    reference = load(written / "fsdp3-ours.ref.pt")
    argv = [str(written / "fsdp3-ours"), str(tmp_path / "out"), "--to", "dcp", "--optimizer", "--verify"]
    assert main([*argv, "--max-shard-size", "500", "--quiet"]) == 0
    assert len(list((tmp_path / "out").glob("*.distcp"))) > 1
    assert "lm_head.weight" in reference["model"]  # tied: a live model needs it
    groups = [{"lr": 0.0, "params": []} for _ in reference["groups"]]
    state: dict[str, Any] = {
        "model": blank(reference["model"]),
        "optim": {"state": blank(reference["optim"]), "param_groups": groups},
    }
    dcp_load(state, checkpoint_id=tmp_path / "out")
    for name, value in reference["model"].items():
        assert bits(state["model"][name]) == bits(value)
    for name, values in reference["optim"].items():
        assert all(bits(state["optim"]["state"][name][what]) == bits(value) for what, value in values.items())
    assert state["optim"]["param_groups"][0]["lr"] == 0.01
    assert state["optim"]["param_groups"][0]["params"] == reference["groups"][0]["params"]
    again = open_checkpoint(tmp_path / "out")
    assert_optimizer(again, reference)
    assert "lm_head.weight" in again.aliases
    assert_model(again, reference["model"])


# -- with checksums: damage that DCP's own records do not show is refused ------------------------------------


@pytest.fixture
def sixteen_ranks(tmp_path: Path) -> Path:
    """Write a checkpoint of 16 ranks, each of which has one row of every tensor."""
    folder = tmp_path / "sixteen"
    folder.mkdir()
    keys = list_keys(5, 16)
    write_metadata(folder, [write_rank(folder, keys, rank) for rank in range(16)])
    return folder


@pytest.mark.parametrize(
    ("rank", "tables"),
    [
        ((3, 16), {3}),
        ((1, 8), {2, 3}),
        ((2, 5), {6, 7, 8, 9}),
        ((30, 32), {15}),
        ((0, 1), {None}),
        (None, {None}),
    ],
)
def test_dcp_rank_opens_only_tables_of_its_rows(
    sixteen_ranks: Path, rank: tuple[int, int] | None, tables: set[int | None]
) -> None:
    opened = list[str]()
    tracking = [True]

    def note(event: str, arguments: Any) -> None:
        if tracking[0] and event == "open" and str(arguments[0]).startswith(str(sixteen_ranks)):
            opened.append(Path(str(arguments[0])).name)

    sys.addaudithook(note)
    checkpoint = open_checkpoint(sixteen_ranks, rank=rank)
    assert checkpoint.optimizer is not None
    number, world_size = rank or (0, 1)
    first, stop = number * 16 // world_size, -(-(number + 1) * 16 // world_size)
    state = checkpoint.optimizer.state.values()
    for tensor in (*checkpoint.tensors.values(), *(value for values in state for value in values.values())):
        assert isinstance(tensor, Tensor)
        assert tensor.read(slice(first, stop)).tolist() == [[float(row)] * 4 for row in range(first, stop)]
    tracking.clear()
    tracking.append(False)
    names = {".metadata" if table is None else f"__{table}.metadata" for table in tables}
    assert sorted(name for name in opened if name.endswith(".metadata")) == sorted(names)
    if None not in tables:  # another slice reads more tables
        assert isinstance(tensor, Tensor)
        assert tensor.read().tolist() == [[float(row)] * 4 for row in range(16)]


@pytest.mark.parametrize("has_tables", [True, False])
def test_dcp_index_has_shards_of_each_region(sixteen_ranks: Path, tmp_path: Path, has_tables: bool) -> None:
    """With tables, the index is used if the tables would be larger than ``.metadata``."""
    if not has_tables:
        remove_tables(sixteen_ranks)
    cache = tmp_path / "cache"
    cache.mkdir()
    for rank in range(2):
        checkpoint = open_checkpoint(sixteen_ranks, rank=(rank, 2), build_once=FileCache(cache))
        for tensor in checkpoint.tensors.values():
            rows = slice(8 * rank + 1, 8 * rank + 8)
            assert tensor.read(rows).tolist() == [[float(row)] * 4 for row in range(rows.start, rows.stop)]
            assert tensor.read().tolist() == [[float(row)] * 4 for row in range(16)]
    assert len(list(cache.iterdir())) == 1


def test_torch_loads_dcp_with_tables(sixteen_ranks: Path) -> None:
    names = [entry.key for entry in list_keys(5, 16)]
    state = {name: torch.zeros(16, 4) for name in names}
    dcp_load(state, checkpoint_id=sixteen_ranks, no_dist=True)
    rows = torch.arange(16.0)[:, None].expand(16, 4)
    assert all(torch.equal(value, rows) for value in state.values())


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("__3.metadata", b"__3_0"),
        ("__3_0.distcp", struct.pack("<4f", 3, 3, 3, 3)),
        ("shard_checksums.json", b"__3.m"),
    ],
    ids=["table", "shard", "index"],
)
def test_damaged_dcp_table_is_rejected(sixteen_ranks: Path, name: str, damaged: bytes) -> None:
    path = sixteen_ranks / name
    content = bytearray(path.read_bytes())
    content[content.index(damaged) + 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        for tensor in open_checkpoint(sixteen_ranks, rank=(3, 16)).tensors.values():
            tensor.read(slice(3, 4))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_dcp_file_of_another_run_is_rejected(tmp_path: Path, name: str) -> None:
    """Only checksums detect it: the layout is identical to the byte, and the values differ."""
    for version, run in ((b"1.0.0", tmp_path / "one"), (b"1.0.1", tmp_path / "other")):
        dcp_save({"model": {"w": torch.randn(64, 3)}}, checkpoint_id=run, no_dist=True)
        (run / ".metadata").write_bytes((run / ".metadata").read_bytes().replace(b"1.0.0", version))
        entry = read_folder_metadata(CheckpointFolder(run))["model.w"]
        assert isinstance(entry, TensorEntry)
        (item,) = entry.items.values()
        (checksum,) = read_item_checksums(run, [(item.file, item.offset, item.length)])
        write_shard_checksums(run, {item.file: {str(item.offset): checksum}})
    assert open_checkpoint(tmp_path / "one").tensors["w"].read().any()
    shutil.copy(tmp_path / "other" / name, tmp_path / "one" / name)
    assert "from another save" in (said := refused(tmp_path / "one")) and name in said
