"""Tests of one GPU: each strategy, precision, optimizer and memory setting compared with the CPU.

``pytest -m gpu tests/gpu/test_cuda.py`` runs the tests that need a GPU. Without a GPU, they are skipped.
The same tests also run on the CPU if possible, so that they stay correct. Tests that need a library
beyond the base install are skipped without the library.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from portable.converters import Tensor as StoredTensor
from portable.converters import open_checkpoint
from portable.engines.engine_interface import get_dist_backend
from portable.engines.fsdp import sharding
from portable.errors import UserError
from portable.gpu.memory import CudaDiagnostics
from portable.model.weight_sources import to_torch
from portable.optim.local_shards import to_local
from portable.registry import create_backend
from portable.reporting import reporter
from portable.reporting.metrics import read_metrics
from portable.reporting.reporter import RunReporter
from portable.run.rank import run_rank
from tests.parity import opened, take_steps
from tests.runs import TINY_MODEL, configured

Run = Callable[..., list[float]]
STEPS = 6
CLOSE = {"cpu": 1e-5, "cuda": 1e-4}
"""Relative difference from the CPU's losses: a GPU sums in another order, which Adam amplifies."""

OPTIMIZERS = ["adamw", "sgd", "adafactor", "adamw_8bit", "muon"]
HEADS_OF_16 = {**TINY_MODEL, "hidden_size": 64}
"""Fused attention kernels need head sizes that are a multiple of 8."""
HEADS_OF_64 = {**TINY_MODEL, "hidden_size": 256}
MOE = {**HEADS_OF_16, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
MOE |= {"moe_intermediate_size": 32}
GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64}
"""Model with dropout."""

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
    """Return a function that trains on a device. Values are read from the device only after the last step."""

    def losses(device: str, **settings: Any) -> list[float]:
        config = configured(tmp_path / device, corpus, backend=device, **settings)
        return take_steps(config, STEPS).losses

    return losses


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> list[float]:
    """Return the losses of the CPU in fp32, which test_parity compares with a hand-written loop."""
    return take_steps(configured(tmp_path_factory.mktemp("truth"), corpus), STEPS).losses


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that joins a process group of one rank, so that DDP and FSDP are used on one rank."""

    def join(device: str) -> None:
        monkeypatch.setattr(sharding, "is_unsharded", lambda *_, **__: False)
        if device == "cuda":
            torch.cuda.set_device(0)
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(get_dist_backend(torch.device(device)), store=store, rank=0, world_size=1)

    yield join
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "strategy", ["no_shard", "full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2"]
)
def test_strategy_losses_match_cpu(
    strategy: str, device: str, run: Run, truth: list[float], one_rank: Callable[[str], None]
) -> None:
    one_rank(device)
    assert run(device, strategy=strategy) == pytest.approx(truth, rel=CLOSE[device])


@pytest.mark.parametrize("parts", [("params", "optimizer"), ("optimizer",)], ids=["all", "optimizer"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_offloading_losses_match_cpu(
    precision: str, parts: tuple[str, ...], device: str, run: Run, truth: list[float]
) -> None:
    """In fp16, gradients in host memory are combined with a loss scale on the device."""
    settings = {f"memory__offload_{part}": "cpu" for part in parts}
    tolerance = CLOSE[device] if precision == "fp32" else 1e-2
    assert run(device, precision=precision, **settings) == pytest.approx(truth, rel=tolerance)


def test_memory_snapshot_is_written_if_out_of_memory(
    cuda: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The out-of-memory error in the second step is injected. The snapshot is torch's."""
    taken = 0

    def fail(*_: Any, **__: Any) -> None:
        nonlocal taken
        taken += 1
        if taken > 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(RunReporter, "on_step", fail)
    config = configured(tmp_path, corpus, backend=cuda, log__memory_snapshot=True, train__micro_batch_size=3)
    try:
        with pytest.raises(UserError, match=r"out of memory in step 3 .* memory snapshot"):
            run_rank(cuda, config)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    snapshot = pickle.loads((tmp_path / "memory" / "rank0.pickle").read_bytes())  # noqa: S301
    assert snapshot["segments"]
    assert any(snapshot["device_traces"])


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("fp32", 1e-4), ("tf32", 2e-3), ("bf16", 2e-2), ("fp16", 1e-2)]
)
@pytest.mark.parametrize("sharded", [False, True], ids=["alone", "sharded"])
def test_precision_losses_match_cpu(
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("device", "sharded"),
    [
        pytest.param("cuda", False, marks=pytest.mark.gpu, id="cuda-alone"),
        pytest.param("cuda", True, marks=pytest.mark.gpu, id="cuda-sharded"),
        pytest.param("cpu", True, id="cpu-sharded"),
    ],
    indirect=["device"],
)
def test_optimizer_losses_match_cpu(
    optimizer: str, sharded: bool, device: str, run: Run, one_rank: Callable[[str], None]
) -> None:
    settings: dict[str, Any] = {"train__optimizer": optimizer, "train__learning_rate": 0.01}
    expected = run("cpu", **settings)
    assert expected[-1] < expected[0]
    if sharded:
        one_rank(device)
    # Quantized moments round the other way here and there.
    tolerance = 1e-3 if optimizer == "adamw_8bit" else CLOSE[device]
    assert run(device, **settings) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory__activation_checkpointing", "full"),
        ("memory__activation_checkpointing", "selective"),
        ("memory__loss_chunk_tokens", 7),
        ("memory__offload_activations", True),
        ("model__attention", "eager"),
        ("train__micro_batch_size", 1),
        ("train__micro_batch_size", "auto"),
    ],
)
def test_memory_savings_do_not_change_losses(
    key: str, value: Any, device: str, run: Run, truth: list[float]
) -> None:
    assert run(device, **{key: value}) == pytest.approx(truth, rel=CLOSE[device])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_offloaded_activations_change_no_bit(recompute: str, device: str, run: Run) -> None:
    settings: dict[str, Any] = {"precision": "bf16", "memory__activation_checkpointing": recompute}
    assert run(device, **settings, memory__offload_activations=True) == run(device, **settings)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "adafactor", "sgd"])
def test_fused_backward_changes_no_bit(optimizer: str, device: str, run: Run) -> None:
    settings: dict[str, Any] = {
        "train__optimizer": optimizer,
        "train__max_grad_norm": None,
        "train__micro_batch_size": 6,
    }
    assert run(device, **settings, train__fused_backward=True) == run(device, **settings)


@pytest.mark.parametrize("sharded", [False, True], ids=["alone", "sharded"])
def test_compiled_losses_match_cpu(
    sharded: bool, cuda: str, run: Run, truth: list[float], one_rank: Callable[[str], None]
) -> None:
    if sharded:
        one_rank(cuda)
    assert run(cuda, compile=True) == pytest.approx(truth, rel=1e-4)
    assert run(cuda, compile=True, memory__loss_chunk_tokens=7) == pytest.approx(truth, rel=1e-4)


@pytest.mark.parametrize("packing", [True, "documents"])
@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_attention_implementation_losses_match_sdpa(
    attention: str, packing: bool | str, cuda: str, run: Run
) -> None:
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn")
    given = {"precision": "bf16", "data__packing": packing, "model__config": HEADS_OF_64}
    expected = run(cuda, **given)
    assert run(cuda, model__attention=attention, **given) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm"])
def test_experts_implementation_losses_match_cpu(experts: str, precision: str, cuda: str, run: Run) -> None:
    """One product of all experts is compared with one product per expert on the CPU."""
    given = {"precision": precision, "model__config": MOE}
    expected = run("cpu", model__experts="eager", **given)
    tolerance = CLOSE[cuda] if precision == "fp32" else 2e-2
    assert run(cuda, model__experts=experts, **given) == pytest.approx(expected, rel=tolerance)


def test_fp8_losses_match_bf16(cuda: str, run: Run) -> None:
    pytest.importorskip("torchao")
    given: dict[str, Any] = {"precision": "bf16", "model__config": HEADS_OF_64}
    expected = run(cuda, **given)
    found = run(cuda, fp8="tensorwise", **given)
    assert found == pytest.approx(expected, rel=2e-2)
    assert found != expected


def test_packed_document_losses_match_cpu(device: str, run: Run) -> None:
    """The device uses a mask of the full sample, and a CPU one call per document."""
    given = {"data__packing": "documents", "data__seq_len": 64}
    expected = run("cpu", model__attention="eager", **given)
    assert run(device, **given) == pytest.approx(expected, rel=CLOSE[device])
    if device == "cuda":
        assert run(device, compile=True, **given) == pytest.approx(expected, rel=CLOSE[device])


# -- checkpoints -------------------------------------------------------------------------------------------


def leg(folder: Path, corpus: Path, device: str, **settings: Any) -> list[float]:
    """Train a launch of a run in ``folder``. Returns all recorded losses."""
    short = {"data__eval_fraction": 0, "log__sample_tokens": 0, "checkpoint__export": False}
    with pytest.MonkeyPatch.context() as patch:
        # a report takes the same time as a launch
        patch.setattr(reporter, "write_report", lambda *_, **options: [])
        assert run_rank(device, configured(folder, corpus, backend=device, **short, **settings)) == 0
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


RESUMED: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw_8bit": {"train__optimizer": "adamw_8bit"},
    "sharded": {"strategy": "full_shard", "precision": "bf16"},
    "offloaded": {"memory__offload_params": "cpu", "memory__offload_optimizer": "cpu"},
    "optimizer offloaded": {"memory__offload_optimizer": "cpu"},
    "fp16": {"precision": "fp16", "fp16__initial_scale_power": 20},
    "dropout": {"model__config": GPT2, "memory__activation_checkpointing": "full"},
    "lora": {"adapter__type": "lora", "precision": "bf16"},
}


@pytest.mark.parametrize("kind", RESUMED)
def test_cuda_run_resumes_bit_for_bit(
    kind: str, cuda: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a CPU, see ``test_run``, ``test_moves`` and ``test_optimizer_losses_match_cpu``."""
    if kind == "sharded":
        monkeypatch.setattr(sharding, "is_unsharded", lambda *_, **__: False)
    whole = leg(tmp_path / "whole", corpus, cuda, **RESUMED[kind])
    leg(tmp_path / "parts", corpus, cuda, train__stop_after=3, **RESUMED[kind])
    assert leg(tmp_path / "parts", corpus, cuda, **RESUMED[kind]) == whole


def test_checkpoint_moves_between_devices(device: str, tmp_path: Path, corpus: Path) -> None:
    whole = leg(tmp_path / "whole", corpus, "cpu")
    leg(tmp_path / "parts", corpus, "cpu", train__stop_after=2)
    leg(tmp_path / "parts", corpus, device, train__stop_after=5)
    assert leg(tmp_path / "parts", corpus, "cpu") == pytest.approx(whole, rel=CLOSE[device])


ZERO: dict[str, dict[str, Any]] = {
    **{f"zero{stage}": {"strategy": f"zero{stage}"} for stage in (1, 2, 3)},
    "zero2 in bf16": {"strategy": "zero2", "precision": "bf16"},
    "zero2 offloaded": {"strategy": "zero2", "memory__offload_optimizer": "cpu"},
    "zero3 offloaded": {"strategy": "zero3", **RESUMED["offloaded"]},
    "zero3 on a disk": {"strategy": "zero3", "memory__offload_optimizer": "nvme"},
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.ops("async_io")) if "disk" in kind else kind for kind in ZERO],
)
def test_zero_losses_match_cpu(kind: str, cuda: str, tmp_path: Path, corpus: Path) -> None:
    """A run on the CPU continues under ZeRO, then from ZeRO's checkpoint, and ends without ZeRO."""
    pytest.importorskip("deepspeed")
    settings = ZERO[kind]
    given: dict[str, Any] = {"memory__nvme_path": str(tmp_path)} if "disk" in kind else {}
    common: dict[str, Any] = {"precision": settings.get("precision", "fp32")}
    if given:  # DeepSpeed swaps nothing that is smaller than a megabyte
        common["model__config"] = {**TINY_MODEL, "hidden_size": 512, "intermediate_size": 1100}
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = leg(whole, corpus, "cpu", **common)
    leg(parts, corpus, "cpu", train__stop_after=2, **common)
    for stop in (4, 6):
        leg(parts, corpus, cuda, train__stop_after=stop, **{**common, **settings, **given})
    rel = 1e-2 if "precision" in settings else 1e-3 if given else CLOSE[cuda]
    assert leg(parts, corpus, cuda, **common) == pytest.approx(expected, rel=rel)


# -- features of GPUs -----------------------------------------------------------------------------------


@contextmanager
def no_waits(device: str) -> Iterator[None]:
    """Fail if the host waits for the device. On a CPU, test_waits finds such operations."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def steps_without_waiting(device: str, config: Any) -> None:
    with opened(config) as trial:
        results = [trial.step() for _ in range(2)]  # libraries may wait while they warm up
        with no_waits(device):
            results += [trial.step() for _ in range(3)]
        losses = trial.backend.read_to_host([result.loss for result in results])
        assert all(after < before + 0.5 for before, after in pairwise(losses))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("sharded", [False, True], ids=["alone", "sharded"])
@pytest.mark.parametrize("packing", [True, "documents"])
def test_steps_do_not_synchronize_host_between_logs(
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
    given = {"precision": "bf16", "model__config": HEADS_OF_16}
    settings = {**given, "train__optimizer": optimizer, "data__packing": packing}
    steps_without_waiting(cuda, configured(tmp_path, corpus, backend=cuda, **settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "fp16", "train__micro_batch_size": 2},
        {"memory__activation_checkpointing": "full", "model__config": GPT2},
        {"memory__activation_checkpointing": "selective"},
        {"memory__loss_chunk_tokens": 7},
        {"data__packing": False},
        {"adapter__type": "lora"},
        {"adapter__type": "lora", "adapter__base": "nf4", "model__config": HEADS_OF_16},
        {"train__ema": 0.9},
        {"strategy": "no_shard"},
    ],
    ids=lambda settings: "-".join(str(value) for value in settings.values() if not isinstance(value, dict)),
)
def test_steps_do_not_synchronize_host_with_other_settings(
    settings: dict[str, Any], device: str, tmp_path: Path, corpus: Path, one_rank: Callable[[str], None]
) -> None:
    if "adapter__base" in settings:
        pytest.importorskip("bitsandbytes")
    if "strategy" in settings:  # DDP
        one_rank(device)
    given = {"precision": "bf16", **settings}
    steps_without_waiting(device, configured(tmp_path, corpus, backend=device, **given))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"strategy": "full_shard"},
        {"memory__offload_optimizer": "cpu"},
        {"memory__offload_params": "cpu", "memory__offload_optimizer": "cpu"},
    ],
    ids=lambda settings: "-".join(settings) or "alone",
)
def test_background_save_has_state_of_its_step(
    settings: dict[str, Any], device: str, tmp_path: Path, corpus: Path, one_rank: Callable[[str], None]
) -> None:
    """The state is copied to page-locked memory, because the following steps overwrite it."""
    if "strategy" in settings:
        one_rank(device)
    folder = tmp_path / "saved"
    folder.mkdir()
    with opened(configured(tmp_path, corpus, backend=device, **settings)) as trial:
        engine = trial.engine
        for _ in range(2):
            trial.step()
        handle = engine.save_shards(folder, background=True)
        parameters = engine._optimized
        kept = {name: to_local(p.detach()).cpu().clone() for name, p in parameters.items()}
        moments = {
            name: to_local(engine._optimizer.state[p]["exp_avg"]).cpu() for name, p in parameters.items()
        }
        moments = {name: moment.clone() for name, moment in moments.items()}
        for _ in range(3):
            trial.step()
        handle.wait()
        pinned = [to_local(p).is_pinned() for p in parameters.values()]
    stored = open_checkpoint(folder)
    assert stored.optimizer is not None
    for name, value in kept.items():
        state = stored.optimizer.state[name]["exp_avg"]
        assert isinstance(state, StoredTensor)
        assert torch.equal(to_torch(stored.tensors[name].read()), value), name
        assert torch.equal(to_torch(state.read()), moments[name]), name
    assert all(pinned) == (device == "cuda" and any("offload" in key for key in settings))


def test_dropout_is_repeated_in_recomputation(device: str, run: Run) -> None:
    """The generator of the device draws the same values in another run, and in recomputed layers."""
    drawn = run(device, model__config=GPT2)
    assert run(device, model__config=GPT2) == drawn
    again = run(device, model__config=GPT2, memory__activation_checkpointing="full")
    assert again == pytest.approx(drawn, rel=1e-5)
    none = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    assert run(device, model__config={**GPT2, **none}) != pytest.approx(drawn, rel=1e-3)


def test_fp16_loss_scale_is_lowered_after_overflow(device: str, tmp_path: Path, corpus: Path) -> None:
    settings = {"precision": "fp16", "fp16__initial_scale_power": 30, "fp16__hysteresis": 1}
    with opened(configured(tmp_path, corpus, backend=device, **settings)) as trial:
        before = [to_local(p.detach()).clone() for p in trial.engine.model.parameters()]
        trial.step()
        same = [
            torch.equal(to_local(p), old)
            for p, old in zip(trial.engine.model.parameters(), before, strict=True)
        ]
        assert all(same)  # the update overflowed, and was left out
        results = [trial.step() for _ in range(19)]
        counted = trial.backend.get_metrics()
        assert trial.engine.read_update_health().first_bad_update is None
        losses = trial.backend.read_to_host([result.loss for result in results])
    assert counted["loss_scale"] == 2.0 ** (30 - counted["overflows"])
    assert 1 < counted["overflows"] < 20
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("packing", [True, False, "documents"])
def test_compiled_layers_are_not_recompiled(
    packing: bool | str, device: str, tmp_path: Path, corpus: Path
) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiler = "inductor" if device == "cuda" else "eager"
    settings = {"compile": True, "compile_backend": compiler, "data__packing": packing}
    with opened(configured(tmp_path, corpus, backend=device, train__micro_batch_size=2, **settings)) as trial:
        graphs = []
        for _ in range(5):
            trial.step()
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 1 <= graphs[0] == graphs[-1], graphs


@pytest.mark.parametrize(
    "more", [{}, {"memory__activation_checkpointing": "full"}], ids=["plain", "recomputed"]
)
def test_cuda_graph_losses_match_cpu(more: dict[str, Any], cuda: str, run: Run, truth: list[float]) -> None:
    """Graphs must not overwrite the gradients of several micro-batches."""
    given = {"compile": True, "compile_mode": "reduce-overhead", "train__micro_batch_size": 2, **more}
    assert run(cuda, **given) == pytest.approx(truth, rel=1e-4)


@pytest.mark.parametrize("packing", [True, "documents"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_sdpa_uses_fused_kernels(precision: str, packing: bool | str, device: str, run: Run) -> None:
    """No attention gets queries of another dtype than the values, or falls back to the formula."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    # In fp32, the fused kernels of torch 2.11 support only equal numbers of key and query heads.
    model = {**HEADS_OF_16, **({"num_key_value_heads": 4} if precision == "fp32" else {})}
    given = {"precision": precision, "data__packing": packing, "model__config": model}
    expected = run(device, model__attention="eager", **given)
    fused = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    with sdpa_kernel(fused):
        found = run(device, **given)
    assert found == pytest.approx(expected, rel=CLOSE[device] if precision == "fp32" else 1e-2)


@pytest.mark.parametrize(("precision", "least", "most"), [("fp32", 0.0, 1e-5), ("tf32", 1e-4, 1e-2)])
def test_tf32_rounds_only_on_request(
    precision: str, least: float, most: float, cuda: str, tmp_path: Path, corpus: Path
) -> None:
    """TF32 rounds matrix products and convolutions to 11 bits, an error of 3e-4 in a product.

    cuDNN may use Winograd's method for convolutions, which costs a digit in fp32.
    """
    with opened(configured(tmp_path, corpus, backend=cuda, precision=precision)):
        torch.manual_seed(0)
        left, right = torch.randn(2, 256, 256, device=cuda)
        images, weight = torch.randn(8, 64, 32, 32, device=cuda), torch.randn(64, 64, 3, 3, device=cuda)
        cases: list[tuple[Any, torch.Tensor, torch.Tensor]] = [
            (torch.mm, left, right),
            (torch.conv2d, images, weight),
        ]
        for function, one, other in cases:
            exact = function(one.double(), other.double())
            error = float((function(one, other) - exact).norm() / exact.norm())
            assert least <= error < most, function


def test_nccl_collectives_are_recorded(
    cuda: str, tmp_path: Path, one_rank: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.setenv(name, "100")
    one_rank(cuda)
    dist.all_reduce(torch.ones(4, device=cuda))
    torch.cuda.synchronize()
    CudaDiagnostics(torch.device(cuda, 0), rank=0, world_size=2).dump_collectives(tmp_path)
    record = pickle.loads((tmp_path / "nccl_trace_rank_0").read_bytes())  # noqa: S301
    assert any("all_reduce" in entry["profiling_name"] for entry in record["entries"])


@pytest.mark.parametrize("base", ["auto", "nf4", "int8"])
def test_adapter_losses_match_peft_loop(
    base: str, device: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The losses are compared with a loop with peft on the CPU."""
    if device == "cpu":  # if there is a GPU, weights would be quantized on it after another test has used it
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    given: dict[str, Any] = {"adapter__type": "lora", "train__learning_rate": 1e-2, "train__steps": STEPS}
    if base == "auto":
        from tests.test_adapters import peft_losses

        expected = [loss for loss, _ in peft_losses(configured(tmp_path, corpus, **given), STEPS)]
    else:
        pytest.importorskip("bitsandbytes")
        from tests.test_qlora import peft_losses as quantized_losses

        given |= {"adapter__base": base, "model__config": {**HEADS_OF_16, "intermediate_size": 96}}
        expected = quantized_losses(configured(tmp_path, corpus, **given))
    found = take_steps(configured(tmp_path / device, corpus, backend=device, **given), STEPS).losses
    # The card's kernels quantize inputs, and some weights, to a neighboring level.
    tolerance = CLOSE[device] if base == "auto" or device == "cpu" else 1e-2
    assert found == pytest.approx(expected, rel=tolerance)


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
def test_memory_savings_reduce_peak_memory(saving: dict[str, Any], ratio: float, cuda: str, run: Run) -> None:
    """The activations and logits of the model are larger than its parameters."""
    large: dict[str, Any] = {
        "model__config": {**TINY_MODEL, "vocab_size": 8192, "num_hidden_layers": 8, "hidden_size": 192},
        "data__seq_len": 64,
        "train__global_batch_size": 16,
        "train__micro_batch_size": 16,
        "memory__loss_chunk_tokens": 0,
    }
    peaks = []
    for settings in ({}, saving):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run(cuda, **{**large, **settings})
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < ratio * peaks[0]


def test_driver_memory_is_reported(cuda: str, tmp_path: Path, corpus: Path, capfd: Any) -> None:
    backend = create_backend(cuda)
    counted = backend.diagnostics.query_driver_memory()
    assert counted is not None
    used, total = counted
    assert torch.cuda.memory_allocated() <= used <= total
    leg(tmp_path, corpus, cuda, train__steps=2)
    assert "in use, reported by the driver" in capfd.readouterr().err
