"""What one GPU can show: each strategy, precision, optimizer and saving against the plain run on the CPU.

``pytest -m gpu tests/gpu/test_cuda.py`` runs what needs a GPU; without one it is skipped. The same tests run
on the CPU wherever they mean something there, so that they cannot rot. Neither DeepSpeed nor a library beyond
the base install is needed.
"""

from __future__ import annotations

import importlib.util
import pickle
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from gpu.common.machine import transport
from gpu.fsdp import sharding
from portable.errors import UserError
from portable.loop import train_step
from portable.registry import create_backend
from portable.reporting.metrics import read_metrics
from portable.reporting.reporter import Reporter
from portable.run import finish
from portable.run.batches import train_loader
from portable.run.prepare import prepare
from portable.run.rank import run_rank
from portable.run.restore import restore
from portable.run.settle import settle
from tests.parity import take_steps
from tests.runs import TINY_MODEL, configured

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    Run = Callable[..., list[float]]

STEPS = 6
CLOSE = {"cpu": 1e-5, "cuda": 1e-4}
"""Relative difference from the CPU's losses: a GPU sums in another order, and Adam magnifies it."""

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=[CUDA, "cpu"])
def device(request: pytest.FixtureRequest) -> str:
    return present(request.param)


@pytest.fixture(params=[CUDA])
def cuda(request: pytest.FixtureRequest) -> str:
    return present(request.param)


def present(name: str) -> str:
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return name


@pytest.fixture
def run(tmp_path: Path, corpus: Path) -> Run:
    """Losses of some steps on a device; nothing is read from it before the last."""

    def losses(device: str, **settings: Any) -> list[float]:
        config = configured(tmp_path / device, corpus, backend=device, **settings)
        return take_steps(config, STEPS).losses

    return losses


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[float]:
    """The losses of the CPU in fp32, whose equality with a hand-written loop test_parity holds."""
    return take_steps(configured(tmp_path_factory.mktemp("truth"), corpus), STEPS).losses


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """DDP and FSDP on a process group of one rank, where the program would leave the model as it is."""

    def join(device: str) -> None:
        monkeypatch.setattr(sharding, "stands_alone", lambda *_, **__: False)
        if device == "cuda":
            torch.cuda.set_device(0)
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(transport(torch.device(device)), store=store, rank=0, world_size=1)

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "strategy", ["no_shard", "full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2"]
)
def test_strategies(
    strategy: str, device: str, run: Run, truth: list[float], one_rank: Callable[[str], None]
) -> None:
    one_rank(device)
    assert run(device, strategy=strategy) == pytest.approx(truth, rel=CLOSE[device])


@pytest.mark.parametrize("parts", [("params", "optimizer"), ("optimizer",)], ids=["all", "optimizer"])
def test_offloading(parts: tuple[str, ...], device: str, run: Run, truth: list[float]) -> None:
    settings = {f"memory__offload_{part}": "cpu" for part in parts}
    assert run(device, **settings) == pytest.approx(truth, rel=CLOSE[device])


def test_micro_batches_that_fit(device: str, run: Run, truth: list[float]) -> None:
    assert run(device, train__micro_batch_size="auto") == pytest.approx(truth, rel=CLOSE[device])


def test_a_memory_snapshot(cuda: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That memory runs out is injected in the second step; what is written is torch's own."""
    taken = 0

    def fail(*_: Any, **__: Any) -> None:
        nonlocal taken
        taken += 1
        if taken > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Reporter, "on_step", fail)
    config = configured(tmp_path, corpus, backend=cuda, log__memory_snapshot=True, train__micro_batch_size=3)
    with pytest.raises(UserError, match=r"out of memory in step 3 .* memory snapshot"):
        run_rank(cuda, config)
    snapshot = pickle.loads((tmp_path / "memory" / "rank0.pickle").read_bytes())  # noqa: S301
    assert snapshot["segments"]
    assert any(snapshot["device_traces"])


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-4), ("tf32", 2e-3), ("bf16", 2e-2), ("fp16", 1e-2)]
)
@pytest.mark.parametrize("sharded", [False, True], ids=["alone", "sharded"])
def test_precisions(
    precision: str,
    tolerance: float,
    sharded: bool,
    device: str,
    run: Run,
    truth: list[float],
    one_rank: Callable[[str], None],
) -> None:
    if sharded:
        one_rank(device)
    try:
        losses = run(device, precision=precision)
    except UserError as error:
        pytest.skip(str(error))
    finally:
        torch.set_float32_matmul_precision("highest")
    assert losses == pytest.approx(truth, rel=tolerance)
    assert precision == "fp32" or losses != truth  # it did compute in something else


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "adamw_8bit"])
@pytest.mark.parametrize("sharded", [False, True], ids=["alone", "sharded"])
def test_optimizers(
    optimizer: str, sharded: bool, device: str, run: Run, one_rank: Callable[[str], None]
) -> None:
    settings: dict[str, Any] = {"train__optimizer": optimizer, "train__learning_rate": 0.01}
    expected = run("cpu", **settings)
    assert expected[-1] < expected[0]
    if sharded:
        one_rank(device)
    # Quantised moments round the other way here and there.
    tolerance = 1e-3 if optimizer == "adamw_8bit" else CLOSE[device]
    assert run(device, **settings) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(
    "settings",
    [
        {"memory__activation_checkpointing": "full"},
        {"memory__activation_checkpointing": "selective"},
        {"memory__loss_chunk_tokens": 7},
        {"model__attention": "eager"},
        {"train__micro_batch_size": 1},
    ],
    ids=lambda settings: "-".join(f"{key}-{value}" for key, value in settings.items()),
)
def test_savings_change_nothing(settings: dict[str, Any], device: str, run: Run, truth: list[float]) -> None:
    assert run(device, **settings) == pytest.approx(truth, rel=CLOSE[device])


@pytest.mark.parametrize("sharded", [False, True], ids=["alone", "sharded"])
def test_compiled(
    sharded: bool, cuda: str, run: Run, truth: list[float], one_rank: Callable[[str], None]
) -> None:
    if sharded:
        one_rank(cuda)
    assert run(cuda, compile=True) == pytest.approx(truth, rel=1e-4)


@pytest.mark.parametrize("packing", [True, "documents"])
def test_flash_attention(packing: bool | str, cuda: str, run: Run) -> None:
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn is not installed")
    expected = run(cuda, precision="bf16", data__packing=packing)
    ours = run(cuda, precision="bf16", data__packing=packing, model__attention="flash_attention_2")
    assert ours == pytest.approx(expected, rel=5e-3)


def test_packed_documents(device: str, run: Run) -> None:
    """A mask for the whole sample, and a call per document on a CPU."""
    given = {"data__packing": "documents", "data__seq_len": 64}
    expected = run("cpu", model__attention="eager", **given)
    assert run(device, **given) == pytest.approx(expected, rel=CLOSE[device])
    if device == "cuda":
        assert run(device, compile=True, **given) == pytest.approx(expected, rel=CLOSE[device])


# -- checkpoints -------------------------------------------------------------------------------------------


def leg(folder: Path, corpus: Path, device: str, **settings: Any) -> list[float]:
    """Train a leg of a run in ``folder``; all losses that it has on record."""
    short = {"data__eval_fraction": 0, "log__sample_tokens": 0, "checkpoint__export": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "plot_loss", lambda *_: None)  # a picture takes as long as a leg
        assert run_rank(device, configured(folder, corpus, backend=device, **short, **settings)) == 0
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_a_run_goes_on_bit_for_bit(optimizer: str, device: str, tmp_path: Path, corpus: Path) -> None:
    settings = {"train__optimizer": optimizer}
    whole = leg(tmp_path / "whole", corpus, device, **settings)
    leg(tmp_path / "parts", corpus, device, train__stop_after=3, **settings)
    assert leg(tmp_path / "parts", corpus, device, **settings) == whole


def test_checkpoints_move_between_devices(device: str, tmp_path: Path, corpus: Path) -> None:
    whole = leg(tmp_path / "whole", corpus, "cpu")
    leg(tmp_path / "parts", corpus, "cpu", train__stop_after=2)
    leg(tmp_path / "parts", corpus, device, train__stop_after=5)
    assert leg(tmp_path / "parts", corpus, "cpu") == pytest.approx(whole, rel=CLOSE[device])


# -- what only a GPU has -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor", "adamw_8bit"])
@pytest.mark.parametrize("sharded", [False, True], ids=["alone", "sharded"])
@pytest.mark.parametrize("packing", [True, "documents"])
def test_the_host_waits_for_nothing_between_logs(
    packing: bool | str,
    optimizer: str,
    sharded: bool,
    cuda: str,
    tmp_path: Path,
    corpus: Path,
    one_rank: Callable[[str], None],
) -> None:
    if sharded:
        one_rank(cuda)
    settings = {"precision": "bf16", "train__optimizer": optimizer, "data__packing": packing}
    config = configured(tmp_path, corpus, backend=cuda, **settings)
    backend = create_backend(cuda)
    settled = settle(config, backend.name)
    backend.start()
    try:
        prepared = prepare(settled, backend)
        engine = restore(prepared, None).engine
        batches = iter(train_loader(prepared, 0))
        results = []
        for step in range(5):
            if step == 2:  # libraries may wait while they warm up
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            results.append(
                train_step(
                    backend,
                    engine,
                    batches,
                    plan=prepared.plan,
                    first_sample=step * prepared.plan.global_batch_size,
                    learning_rate=1e-3,
                    max_grad_norm=1.0,
                )
            )
        torch.cuda.set_sync_debug_mode("default")
        losses = backend.read([result.loss for result in results])
        assert all(after < before + 0.5 for before, after in pairwise(losses))
        batches.close()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        backend.stop()


@pytest.mark.parametrize(
    ("saving", "ratio"),
    [
        ({"memory__activation_checkpointing": "full"}, 0.8),
        ({"memory__loss_chunk_tokens": 128}, 0.8),
        ({"train__micro_batch_size": 2}, 0.6),
        ({"train__optimizer": "adafactor"}, 1.0),
        ({"train__optimizer": "adamw_8bit"}, 1.0),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_savings_save(saving: dict[str, Any], ratio: float, cuda: str, run: Run) -> None:
    """A model whose activations and logits outweigh its parameters."""
    large: dict[str, Any] = {
        "model__config": {**TINY_MODEL, "vocab_size": 8192, "num_hidden_layers": 8, "hidden_size": 192},
        "data__seq_len": 64,
        "train__global_batch_size": 16,
        "train__micro_batch_size": 16,
        "memory__loss_chunk_tokens": 0,
    }
    peaks = []
    for settings in ({}, saving):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run(cuda, **{**large, **settings})
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < ratio * peaks[0]


def test_what_the_driver_counts(cuda: str, tmp_path: Path, corpus: Path, capfd: Any) -> None:
    backend = create_backend(cuda)
    counted = backend.diagnostics.driver_memory()
    assert counted is not None
    used, total = counted
    assert torch.cuda.memory_allocated() <= used <= total
    leg(tmp_path, corpus, cuda, train__steps=2)
    assert "in use, reported by the driver" in capfd.readouterr().err
