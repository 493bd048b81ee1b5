"""Full state dicts: `.bin`, `.pt` and `.pth` files compared with the tensors passed to torch.save."""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from portable.converters import CheckpointError, open_checkpoint
from portable.converters.cli import main
from tests.converters.compare import assert_model, assert_optimizer, live, refused, rewrite


def weights() -> dict[str, torch.Tensor]:
    """Return tensors of every type and kind of view. `f.base` and `f.row` overlap without being tied."""
    torch.manual_seed(0)
    base, attributed = torch.randn(6, 10), nn.Parameter(torch.randn(2, 3))
    attributed.tag = "x"  # type: ignore[attr-defined]
    return {
        "f.base": base,
        "f.row": base[2],
        "f.column": base[:, 3],
        "f.transposed": base[:4, :5].t(),
        "f.stepped": base[::2, 1::3],
        "f.expanded": base[0, 0].expand(3, 2),
        "f.parameter": nn.Parameter(torch.randn(3)),
        "f.frozen": nn.Parameter(torch.randn(3), requires_grad=False),
        "f.attributed": attributed,
        "f.buffer": nn.Buffer(torch.randn(4)),
        "f.double": torch.randn(3, dtype=torch.float64),
        "f.half": torch.randn(3).half(),
        "f.brain": torch.randn(5, 3).bfloat16(),
        "f.f8": torch.randn(8).to(torch.float8_e4m3fn),
        "i.wide": torch.tensor([1, -(1 << 62)]),
        "i.scalar": torch.tensor(1 << 40),
        "i.u16": torch.tensor([1, 65535], dtype=torch.uint16),
        "i.u32": torch.tensor([3], dtype=torch.uint32),
        "b.mask": torch.tensor([True, False, True]),
        "e.empty": torch.zeros(0, 4),
        "e.scalar": torch.tensor(0.1),
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_full_state_dict_is_read_bit_for_bit(tmp_path: Path, name: str, protocol: int) -> None:
    state = collections.OrderedDict(weights())
    state._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    torch.save(state, tmp_path / name, pickle_protocol=protocol)
    for path in (tmp_path, tmp_path / name):
        checkpoint = open_checkpoint(path)
        assert checkpoint.format == "torch"
        assert checkpoint.optimizer is None
        assert_model(checkpoint, weights())
        assert checkpoint.aliases == {}


def stepped(
    model: nn.Module, groups: Any = None, kind: Any = torch.optim.AdamW, **how: Any
) -> torch.optim.Optimizer:
    """Return an optimizer of all parameters or of `groups`, after a step with all gradients."""
    optimizer: torch.optim.Optimizer = kind(model.parameters() if groups is None else groups, **how)
    torch.stack([p.square().sum() for p in model.parameters() if p.requires_grad]).sum().backward()
    optimizer.step()
    return optimizer


def in_container(name: str) -> Callable[[nn.Module, dict[str, Any]], dict[str, Any]]:
    """Return a function that saves as a program does, with names as DDP leaves them."""
    return lambda model, state: {
        name: nn.ModuleDict({"module": model}).state_dict(),
        "optimizer": state,
        "lr_scheduler": {"last_epoch": 1, "_last_lr": [0.1]},
        # Research code saves its parsed arguments (DETR, fairseq): they are left out, and no code is run.
        "args": argparse.Namespace(lr=1e-3, milestones=[1, 2], inner=argparse.Namespace(name="x")),
        "step": 7,
    }


def wrapped(prefix: str) -> Callable[[nn.Module, dict[str, Any]], dict[str, Any]]:
    """Return a function that saves a compiled model in DDP, or the reverse, also with parameter names."""

    def saved(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
        held = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
        names = [f"{prefix}{name}" for name, _ in model.named_parameters()]
        groups = [{**group, "param_names": names} for group in state["param_groups"]]
        return {"model": held, "optimizer": {**state, "param_groups": groups}, "step": 7}

    return saved


def lightning(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Save like Lightning, with the model as an attribute, `model`."""
    return {
        "epoch": 0,
        "global_step": 7,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": nn.ModuleDict({"model": model}).state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {},
        "optimizer_states": [state],
        "lr_schedulers": [],
    }


def composer(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Save like Lightning, but with names in the optimizer state."""
    names = [f"model.{name}" for name, _ in model.named_parameters()]
    named = {names[key]: value for key, value in state["state"].items()}
    groups = [{**group, "params": names} for group in state["param_groups"]]
    optimizers = {"DecoupledAdamW": {"state": named, "param_groups": groups}}
    held = nn.ModuleDict({"model": model}).state_dict()
    return {"state": {"model": held, "optimizers": optimizers}, "rng": []}


@pytest.mark.parametrize(
    "saved",
    [
        *(in_container(name) for name in ("model", "state_dict", "module", "net")),
        *map(wrapped, ("module.", "_orig_mod.module.", "module._orig_mod.", "_orig_mod.")),
        lightning,
        composer,
    ],
)
def test_full_state_dict_is_found_in_container_of_program(tmp_path: Path, saved: Any) -> None:
    model = nn.Module()
    model.model, model.norm, model.lm_head = nn.Linear(3, 2), nn.BatchNorm1d(3), nn.Linear(2, 5)
    optimizer = stepped(model)
    torch.save(saved(model, optimizer.state_dict()), tmp_path / "last.ckpt")
    checkpoint = open_checkpoint(tmp_path / "last.ckpt")
    assert_model(checkpoint, model.state_dict())
    assert saved is composer or checkpoint.metadata["step"] == 7
    assert_optimizer(checkpoint, live(model, optimizer))


def test_full_state_dict_ties_shared_storages(tmp_path: Path) -> None:
    shared, bias = torch.randn(7, 4), torch.randn(3)
    state = {
        "lm_head.weight": shared,
        "model.embed_tokens.weight": shared,
        "a.bias": bias,
        "b.bias": bias,
        "c.bias": bias[:2],
    }
    torch.save(state, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.aliases == {"lm_head.weight": "model.embed_tokens.weight", "b.bias": "a.bias"}
    assert_model(checkpoint, state)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "tie_word_embeddings": False}))
    assert open_checkpoint(tmp_path).aliases == {"b.bias": "a.bias"}


def test_owner_of_shared_storage_may_be_tied_to_an_equal_tensor(tmp_path: Path) -> None:
    shared = torch.randn(7, 4)
    embedding = "encoder.embed_tokens.weight"
    state = {"shared.weight": shared.clone(), embedding: shared, "lm_head.weight": shared}
    torch.save(state, tmp_path / "pytorch_model.bin")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.aliases == {"lm_head.weight": "shared.weight", embedding: "shared.weight"}
    assert_model(checkpoint, state)


def test_sharded_state_dict_is_read_by_index(tmp_path: Path) -> None:
    """Errors of an index are tested in ``test_safetensors``, because both formats use one reader."""
    values = weights()
    names = list(values)
    files = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    places = {name: files[at >= len(names) // 2] for at, name in enumerate(names)}
    for file in files:
        held = {name: value for name, value in values.items() if places[name] == file}
        torch.save(held, tmp_path / file)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert_model(open_checkpoint(tmp_path), values)
    assert_model(open_checkpoint(index), values)


def test_full_state_dict_errors_name_reason(tmp_path: Path) -> None:
    def said(value: Any, name: str = "m.pt", **how: Any) -> str:
        torch.save(value, tmp_path / name, **how)
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(tmp_path / name).tensors  # noqa: B018
        (tmp_path / name).unlink()
        assert name in str(caught.value)
        return str(caught.value)

    tensor = torch.randn(2)
    assert "before 1.6" in said({"a": tensor}, _use_new_zipfile_serialization=False)
    assert "contains no tensors" in said({"a": 1})
    assert "DeepSpeed" in said({"module": {"a": tensor}, "ds_version": "0.19"})
    assert "torch.nn.modules.linear.Linear" in said(nn.Linear(2, 2))
    assert "_rebuild_sparse" in said({"a": torch.eye(2).to_sparse()})
    conjugate = torch.randn(2, dtype=torch.complex64).conj()  # lazily: the stored bytes are not its value
    assert "contains a lazily conjugated or negated tensor, which is not supported unless" in said(
        {"a": conjugate}
    )
    for arrays, name in (
        ({"model": {"a": tensor, "b": np.ones(2)}}, "model.b"),
        ({"a": tensor, "norm.weight": np.ones(2)}, "norm.weight"),
        ({"norm.weight": np.ones(2)}, "norm.weight"),
        ({"g": {"a": tensor}, "d": {"a": tensor, "norm": np.ones(2)}}, "d.norm"),
    ):
        assert f"{name!r} is a numpy array; save the array as a tensor" in said(arrays)
    assert "one rank's part" in said({"a": tensor}, "pytorch_model_fsdp_rank0.bin")
    loop: dict[str, Any] = {"a": tensor}
    loop["loop"] = loop
    assert "contains itself" in said(loop)
    wide: list[Any] = [tensor]
    for _ in range(12):
        wide = [wide] * 12
    assert "is too large" in said({"a": wide})


def test_full_state_dict_without_container_ignores_random_states(tmp_path: Path) -> None:
    state: Any = np.random.get_state()
    random_states = {"rng_state": state[1], "np_rng_state": state, "rng": {"numpy": state}}
    for weights in ({"a": torch.randn(2)}, {"g": {"a": torch.ones(1)}, "d": {"a": torch.ones(1)}}):
        torch.save({**weights, **random_states}, tmp_path / "m.pt")
        assert len(open_checkpoint(tmp_path / "m.pt").tensors) == len(weights)


def test_full_state_dict_folder_with_several_models_is_rejected(tmp_path: Path) -> None:
    tensor = torch.randn(2)
    torch.save({"a.w": tensor}, tmp_path / "a.pt")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "training_args.bin"):
        torch.save({"x": tensor}, tmp_path / name)
    assert set(open_checkpoint(tmp_path / "a.pt").tensors) == {"a.w"}
    assert set(open_checkpoint(tmp_path).tensors) == {"a.w"}
    torch.save({"a.w": tensor}, tmp_path / "b.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt, b\.pt"):
        open_checkpoint(tmp_path)
    (tmp_path / "b.pt").rename(tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="mp_rank_00"):
        open_checkpoint(tmp_path)


def optimizer_of(path: Path) -> Any:
    checkpoint = open_checkpoint(path)
    assert len(checkpoint.tensors) > 0
    return checkpoint.optimizer


def save_run(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    path.mkdir(exist_ok=True)
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), path / "optimizer.pt")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.second = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(3, 3))
        self.head = nn.Linear(4, 7, bias=False)
        self.embed = nn.Embedding(7, 4)
        self.embed.weight = self.head.weight


def by_kind(model: nn.Module) -> Any:
    """Return two groups: matrices, and vectors with another learning rate."""
    every = list(model.parameters())
    return [{"params": [p for p in every if p.ndim == n], "lr": 0.1 * n} for n in (2, 1)]


@pytest.mark.parametrize(
    ("frozen", "groups", "kind", "how"),
    [
        ("", lambda model: model.parameters(), torch.optim.AdamW, {}),
        ("", by_kind, torch.optim.AdamW, {}),
        ("head", lambda m: [p for p in m.parameters() if p.requires_grad], torch.optim.AdamW, {}),
        ("first", lambda m: list(m.named_parameters())[1:], torch.optim.AdamW, {}),  # holds param_names
        ("", lambda model: model.parameters(), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("", lambda model: model.parameters(), torch.optim.Adagrad, {}),
    ],
)
def test_index_keyed_optimizer_gets_names_if_order_is_unique(
    tmp_path: Path, frozen: str, groups: Any, kind: Any, how: dict[str, Any]
) -> None:
    model = Block()
    if frozen:
        getattr(model, frozen).weight.requires_grad_(False)
    optimizer = stepped(model, groups(model), kind, **how)
    save_run(tmp_path, model, optimizer)
    assert_optimizer(open_checkpoint(tmp_path), live(model, optimizer))


def test_index_keyed_optimizer_with_ambiguous_order_is_rejected(tmp_path: Path) -> None:
    pair = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    pair[0].requires_grad_(False)  # or was it pair[1]?
    model = Block()
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    for name, run, groups, told in (
        ("frozen", pair, pair[1].parameters(), "several ways"),
        ("split", model, [{"params": rest}, {"params": biases}], "several ways"),
        ("turned", model, reversed(list(model.parameters())), "do not match"),
    ):
        save_run(tmp_path / name, run, stepped(run, groups))
        with pytest.raises(CheckpointError, match=told):
            optimizer_of(tmp_path / name)
    out = str(tmp_path / "out")
    assert main([str(tmp_path / "turned"), out, "--quiet"]) == 0
    assert main([str(tmp_path / "turned"), out, "--quiet", "--overwrite", "--optimizer"]) == 65
    torch.save(model.state_dict(), tmp_path / "turned" / "optimizer.bin")
    with pytest.raises(CheckpointError, match="several optimizers"):
        optimizer_of(tmp_path / "turned")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s["param_groups"][0]["params"].pop(), "not in any group"),
        (lambda s: s["state"][0].update(history=[1]), "neither a tensor nor a number"),
        (lambda s: s["state"][0].update(exp_avg_sq=torch.zeros(2)), "shape"),
        (lambda s: s.pop("state"), "is not the state_dict() of an optimizer"),
    ],
)
def test_inconsistent_optimizer_is_rejected(change: Any, told: str, tmp_path: Path) -> None:
    model = Block()
    save_run(tmp_path, model, stepped(model))
    rewrite(tmp_path / "optimizer.pt", change)
    assert told in refused(tmp_path)
