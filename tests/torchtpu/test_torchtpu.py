"""Backend tpu: its settings compared with the CPU, a complete run, and libtpu's compilation of its programs.

:mod:`tests.torchtpu.stand_in` replaces the chips. Front end, process group, sharding and saving are
torch_tpu's. ``tests/test_engines.py`` and ``tests/portable/test_moves.py`` test it like any engine. None of
them tests a real chip, its speed or its memory.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel

from portable.checks import check_config
from portable.config.yaml_writer import dump_yaml
from portable.errors import UserError
from portable.planner.cli import main as plan
from portable.planner.compiled_graph import CompiledGraph, LargeValue
from portable.registry import load_backend_package, resolve_backend_name
from portable.reporting.metrics import read_metrics
from portable.tpu import device_specs
from portable.tpu.torchtpu.dry_chip import DryBuffer, DryMemory
from portable.tpu.torchtpu.dry_run import _combine_programs_into_graph
from portable.tpu.torchtpu.torch_tpu_internals import PACKAGE
from tests.parity import take_steps
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured
from tests.torchtpu.pool import NEEDS_TORCH_TPU, TpuPool, is_here
from tests.torchtpu.stand_in import environment
from tests.zygote import Zygote

needs_torch_tpu = pytest.mark.skipif(not is_here(), reason=NEEDS_TORCH_TPU)
COMMON: dict[str, Any] = {
    "model__attention": "eager",
    "precision": "fp32",
    "train__global_batch_size": 8,
    "train__micro_batch_size": 2,
    "train__steps": 8,
    "data__eval_fraction": 0,
}
SHARED = {
    "context_parallel_size": 2,
    "model__attention": "sdpa",
    "train__micro_batch_size": 4,
    "model__config": {**TINY_MODEL, "num_key_value_heads": 4},
}
MOST = {
    "packed documents, recomputed, EMA, chunked head, Muon": {
        "train__optimizer": "muon",
        "data__packing": "documents",
        "memory__activation_checkpointing": "full",
        "memory__loss_chunk_tokens": 32,
        "train__ema": 0.9,
    },
    "shared sequences": SHARED,
}


def losses(config: Any) -> list[float]:
    """Return losses without the attention kernel, which needs a chip."""
    with sdpa_kernel(SDPBackend.MATH):
        return take_steps(config, config.train.steps).losses


@needs_torch_tpu
@pytest.mark.parametrize("case", MOST)
def test_tpu_losses_match_cpu(
    case: str, corpus: Path, tmp_path: Path, ranks: RankPool, tpus: TpuPool
) -> None:
    """One setting at a time, and adapters. ``tests/test_engines.py`` has the common tests of engines."""
    settings = {**COMMON, **MOST[case]}
    expected = ranks.run(2, losses, configured(tmp_path / "cpu", corpus, **settings))
    on_tpu = configured(tmp_path / "tpu", corpus, backend="tpu", **settings)
    assert tpus.run(2, losses, on_tpu) == pytest.approx(expected, rel=1e-5)
    assert expected[-1] < expected[0]


def test_tpu_backend_without_tpu_is_rejected(corpus: Path, tmp_path: Path) -> None:
    """torch_tpu itself would end the process."""
    with pytest.raises(UserError, match="backend: tpu needs a TPU, but this machine has none"):
        load_backend_package("tpu").check_ranks(1)
    assert resolve_backend_name("auto") == "cpu"


def test_tpu_backend_without_package_suggests_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is missing in environments with torch_xla, which needs another torch."""
    monkeypatch.setattr(device_specs, "count_tpu_chips", lambda: 4)
    monkeypatch.setattr(PACKAGE, "_name", "torch-tpu-that-is-not-here")
    with pytest.raises(UserError, match=r"is not installed; .* 'portable-trainer\[torchtpu\]'"):
        load_backend_package("tpu").check_ranks(2)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"strategy": "zero2"},
            "zero2 needs DeepSpeed, which does not run on backend tpu; set strategy to full_shard",
        ),
        ({"precision": "tf32"}, "tf32 is a mode of NVIDIA GPUs, but the backend is tpu"),
        (
            {"model__attention": "flash_attention_2", "precision": "bf16"},
            "flash_attention_2 needs backend cuda, but the backend is tpu",
        ),
    ],
)
def test_tpu_backend_rejects_unsupported_settings(
    settings: dict[str, Any], told: str, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        config = configured(tmp_path, corpus, backend="tpu", **settings)
        check_config(config)
        check_config(config, is_resolved=True)


def test_plan_for_tpu_backend_offloads(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chips are the same as for backend xla, with the strategies of this backend, which offloads."""
    (tmp_path / "run.yaml").write_text(
        dump_yaml(configured(tmp_path / "run", corpus, backend="tpu", **COMMON))
    )
    asked = ["--config", str(tmp_path / "run.yaml"), "--device", "v6e", "--devices", "4"]
    assert plan(asked) == 0
    assert "full_shard     params" in capsys.readouterr().out
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    run = (tmp_path / "run.yaml").read_text()
    (tmp_path / "run.yaml").write_text(re.sub(r"(?m)^strategy:.*$", "", run))
    assert plan([*asked, "--deepspeed.config", str(tmp_path / "ds.json")]) == 0
    assert "deepspeed.config: has no effect" in capsys.readouterr().err


# -- as a user starts it ----------------------------------------------------------------------------------


@needs_torch_tpu
@pytest.mark.slow
def test_tpu_run_trains_two_steps(corpus: Path, tmp_path: Path, zygote: Zygote) -> None:
    """``test_launch`` tests killed ranks and their remains, for which the launcher is responsible."""
    config = configured(tmp_path / "run", corpus, **COMMON, log__sample_tokens=0)
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    code = "import portable.cli, tests.torchtpu.stand_in as chips; chips.find_chips(); portable.cli.main()"
    flags = f"--config {tmp_path}/run.yaml --backend tpu --nproc 2 --train.steps 2"
    variables: Any = environment(tmp_path / "room", 2)
    done = zygote.run("python", "-c", code, *flags.split(), **variables)
    assert done.returncode == 0, done.stderr
    rows = {row["step"]: row["loss"] for row in read_metrics(tmp_path / "run") if "loss" in row}
    assert sorted(rows) == [1, 2] and (tmp_path / "run" / "final" / "model.safetensors").exists()


WIDE = {**TINY_MODEL, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
EXPERTS = {
    **WIDE,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
HYBRID = {"strategy": "hybrid_shard", "fsdp__shard_group_size": 2}
DRY: dict[str, tuple[dict[str, Any], float, set[str]]] = {
    "hybrid_shard, experts": ({**HYBRID, "model__config": EXPERTS}, 1, {"all-gather", "all-reduce"}),
    # Parts of no round size are gathered by a sum.
    "full_shard, experts": ({"model__config": EXPERTS}, 1, {"all-reduce"}),
    "hybrid_shard, offloaded": ({**HYBRID, "memory__offload_params": "cpu"}, 0, {"all-gather", "all-reduce"}),
    "no_shard": ({"strategy": "no_shard"}, 4 / 3, {"all-reduce"}),
    "offload_optimizer": ({"memory__offload_optimizer": "cpu"}, 1, {"all-gather"}),
    "shared sequences": (
        {"context_parallel_size": 2, "model__attention": "sdpa"},
        1,
        {"all-to-all"},
    ),
}
"""Settings, the ratio of the state to the plan, to which DDP adds its buckets, and collectives."""
ONCE, *MORE = [(name, "v5e") for name in DRY]
MORE += [("full_shard, experts", "v6e"), ("hybrid_shard, offloaded", "v5p")]


def test_simulated_memory_counts_changes_of_all_threads() -> None:
    """torch_tpu creates and destroys buffers in several threads at the same time."""
    memory = DryMemory()
    buffer = DryBuffer.from_sizes(11, [1024])  # PJRT_Buffer_Type_F32

    def change_buffers() -> None:
        handles = [memory.add(buffer) for _ in range(500)]
        for handle in handles[1:]:
            memory.remove(handle)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for change in [threads.submit(change_buffers) for _ in range(4)]:
                change.result()
    finally:
        sys.setswitchinterval(interval)
    assert memory.live_bytes == 4 * buffer.size_bytes == 4 * 4096
    assert 500 * 4096 <= memory.peak_bytes <= 4 * 500 * 4096


def test_graph_of_step_counts_each_run_of_program() -> None:
    value = LargeValue("f32[8]", 32, "aten__mm", "llama.py:12", 2)
    graph = CompiledGraph(
        "a program",
        argument_bytes=0,
        output_bytes=0,
        alias_bytes=0,
        temporary_bytes=0,
        code_bytes=5,
        flops=3,
        bytes_accessed=7,
        compile_seconds=0,
        large_values=(value,),
        custom_calls={"Sharding": 2},
    )
    chip: Any = SimpleNamespace(
        programs={handle: SimpleNamespace(graph=graph) for handle in (1, 2, 3)}, memory=DryMemory()
    )
    step = _combine_programs_into_graph(chip, Counter({1: 4, 2: 1}), 0.0)  # the third does not run
    assert (step.flops, step.bytes_accessed, step.code_bytes) == (5 * 3, 5 * 7, 3 * 5)
    assert step.custom_calls == {"Sharding": 5 * 2}
    assert step.large_values == (replace(value, count=5 * 2),)


@needs_torch_tpu
@pytest.mark.parametrize(
    ("case", "chip"), [ONCE, *(pytest.param(*one, marks=pytest.mark.exhaustive) for one in MORE)]
)
def test_tpu_step_compiles_with_planned_memory(
    case: str, chip: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """libtpu compiles each program, and the buffers have the sizes of the plan."""
    changed, kept, kinds = DRY[case]
    settings = {**COMMON, "model__config": WIDE, "precision": "bf16", "train__micro_batch_size": 1}
    config = configured(
        tmp_path / "run", corpus, backend="tpu", **{**settings, "strategy": "full_shard", **changed}
    )
    (tmp_path / "run.yaml").write_text(dump_yaml(config))
    asked = ["--config", str(tmp_path / "run.yaml"), "--device", chip, "--devices", "4", "--compile"]
    assert plan([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["compiled"]
    (step,) = found["graphs"]
    assert found["fits"] and step["flops"] > 0
    assert kinds <= step["collectives"].keys()
    state, working, _, _ = found["compared"]
    assert state["compiled"] == pytest.approx(kept * state["planned"], rel=1e-3, abs=1000), found["compared"]
    # With units of the model's size, a reduce-scatter that needs its full input again has an effect.
    assert -10 < working["percent"] < 50, found["compared"]
