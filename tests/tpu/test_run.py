"""Runs on virtual XLA devices: compilations, transfers, reports and errors.

``tests/test_engines.py`` and ``tests/portable/test_moves.py`` test all engines.
"""

from __future__ import annotations

import io
import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from portable.config import RunConfig
from portable.converters import CheckpointError, open_checkpoint
from portable.errors import UserError
from portable.loop import train_step
from portable.registry import create_backend
from portable.reporting.metrics import read_metrics
from portable.run.batches import build_train_loader
from portable.run.prepare import prepare_run
from portable.run.rank import run_rank
from portable.run.resolve import resolve_run
from portable.run.restore import restore_run
from tests.parity import opened
from tests.ranks import RankError, free_port
from tests.runs import TINY_MODEL, configured, flags, tiny
from tests.xla import QUICK, XlaPool

if TYPE_CHECKING:
    from portable.tpu.xla.graphs import GraphRunner
    from portable.tpu.xla.optim import XlaOptimizer

ROOT = Path(__file__).parents[2]
BATCH: dict[str, Any] = {
    "train__global_batch_size": 8,
    "train__micro_batch_size": 2,
    "log__sample_tokens": 0,
}


# For small graphs that no other test has.
ONE_LAYER: dict[str, Any] = {**BATCH, "model__config": {**TINY_MODEL, "num_hidden_layers": 1}}


def leg(config: RunConfig) -> int:
    return run_rank(config.backend, config)


def on_xla(xla: XlaPool, devices: int, folder: Path, corpus: Path, **settings: Any) -> int:
    code: int = xla.run(devices, leg, configured(folder, corpus, backend="xla", **{**BATCH, **settings}))
    return code


def test_xla_metrics_count_graphs_and_transfers(tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    assert on_xla(xla, 4, tmp_path, corpus, train__eval_every=4) == 0
    rows = [row for row in read_metrics(tmp_path) if "loss" in row]
    compiled = [row["graphs_compiled"] - rows[0]["graphs_compiled"] for row in rows]
    # Nothing more to compile, but for the evaluation after step 4 (if no earlier test in the process had it).
    assert compiled in ([0] * 4 + [1] * 4, [0] * 8)
    read = [row["transfers_from_device"] for row in rows]
    # Two reads per logged step: loss and norm, and the counters of masked updates.
    assert [b - a for a, b in itertools.pairwise(read[:4])] == [2, 2, 2]


def reports_of_odd_steps(config: RunConfig) -> list[str]:
    """Return the reports when a batch changes its shape, and when a scalar becomes a constant."""
    from portable.tpu.xla.graphs import GraphRunner

    said: list[str] = []
    with opened(config) as trial:
        backend, engine = trial.backend, trial.engine
        engine.graphs = GraphRunner(said.append)

        def step(length: int, scale: float) -> None:
            tokens = torch.ones(8, length, dtype=torch.int64)
            batch = backend.copy_to_device({"input_ids": tokens, "labels": tokens})
            sums = engine.accumulate_gradients(batch, backend.sum_host_numbers(8), is_last_micro_batch=True)
            engine.take_optimizer_step(1e-3, 1.0, sums.values[0] * scale)

        for length, scale in ((16, 2.0), (16, 2.0), (12, 2.0), (16, 1.0)):
            step(length, scale)
        optimizer: XlaOptimizer = engine._optimizer
        for name, factors in optimizer._group_factors.items():
            optimizer._group_factors[name] = factors._replace(weight_decay=2 * factors.weight_decay)
        step(16, 2.0)
    return said


def test_xla_reports_cause_of_additional_graph(tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    config = configured(tmp_path, corpus, backend="xla", **ONE_LAYER)
    shape, value, update = xla.run(4, reports_of_odd_steps, config)
    assert "graph 4 of the step" in update and "a new constant" in update
    assert "graph 2 of the step" in shape and "8,16" in shape and "8,12" in shape
    assert "graph 3 of the step" in value and "a scalar on the host that is now exactly 0 or 1" in value


def odd_state(config: RunConfig) -> tuple[float, float, int]:
    """Train a model with a parameter that no loss reaches, and with a counter. Returns their values."""
    from portable.tpu.xla.saving import copy_local_shards_to_host

    backend = create_backend("xla")
    run = prepare_run(resolve_run(config, backend.name), backend)
    run.model.register_parameter("spare", torch.nn.Parameter(torch.empty(8, 8, device="meta")))
    run.model.register_buffer("counter", torch.tensor(7))
    engine: Any = restore_run(run, None).engine
    batches = iter(build_train_loader(run, 0))
    engine.model.spare.data.fill_(1.0)
    for _ in range(3):
        train_step(
            backend,
            engine,
            batches,
            batch_plan=run.batch_plan,
            first_sample=0,
            learning_rate=1e-2,
            max_grad_norm=1.0,
        )
    batches.close()
    staged = copy_local_shards_to_host(
        engine.layout, {"spare": engine.model.spare, "counter": engine.model.counter}
    )
    spare = min(float(shard.values.min()) for shard in staged["spare"].local_shards)
    (counter,) = staged["counter"].local_shards
    optimizer: XlaOptimizer = engine._optimizer
    return spare, float(optimizer.read_state_scalars()["spare"]["step"]), int(counter.values)


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_xla_parameter_without_gradient_is_unchanged(
    micro_batch: int, tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    settings = {**ONE_LAYER, "train__micro_batch_size": micro_batch, "train__weight_decay": 0.5}
    config = configured(tmp_path, corpus, backend="xla", **settings)
    assert xla.run(4, odd_state, config) == (1.0, 0.0, 7)


def load_adam_state_without_step(config: RunConfig) -> str:
    with opened(config) as trial:
        optimizer: XlaOptimizer = trial.engine._optimizer
        name = next(iter(optimizer.get_state_tensors()))
        with pytest.raises(CheckpointError) as caught:
            optimizer.load_state({name: {"exp_avg": 0.0, "exp_avg_sq": 0.0}}, None)
    return str(caught.value)


def test_xla_optimizer_rejects_state_without_step(tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    config = configured(tmp_path, corpus, backend="xla", **ONE_LAYER)
    assert "step of model.embed_tokens.weight: is missing" in xla.run(4, load_adam_state_without_step, config)


def compute_rms_of_stacks() -> list[list[float]]:
    from portable.tpu.xla.optim import _compute_rms

    stacks = (torch.tensor([3.0, -4.0]), torch.tensor([[3.0, -3.0], [4.0, 4.0]]))
    return [_compute_rms(stack, is_stacked=True).flatten().tolist() for stack in stacks]


def test_xla_adafactor_updates_stacked_scalars_separately(xla: XlaPool) -> None:
    assert xla.run(1, compute_rms_of_stacks) == [[3.0, 4.0], [3.0, 4.0]]


HISTOGRAMS = [(4, 0, 4), (5, 0, 4), (3, 1, 4), (2, 0, 4), (1, 0, 0)]
"""Number of bins, minimum and maximum."""
VALUES = [0, 1, 1, 3, 4, 4, 9]


def count_on_xla() -> list[list[float]]:
    create_backend("xla")
    values = torch.tensor(VALUES, device="xla")
    return [torch.histc(values, *arguments).tolist() for arguments in HISTOGRAMS]


def test_xla_histc_of_integers_matches_torch(xla: XlaPool) -> None:
    values = torch.tensor(VALUES).double()
    assert xla.run(1, count_on_xla) == [torch.histc(values, *arguments).tolist() for arguments in HISTOGRAMS]


def call_with_tensor_scale() -> list[torch.Tensor]:
    from portable.tpu.xla.custom_optimizer import _TensorScaleMode

    with _TensorScaleMode():
        return call_with_scale(torch.tensor(2.0))


def call_with_scale(scale: Any) -> list[torch.Tensor]:
    values, others = torch.arange(4.0), torch.arange(1.0, 5.0)
    return [
        torch.add(values, others, alpha=scale),
        values.clone().addcdiv_(others, others + 1, value=scale),
        *torch._foreach_add([values], [others], alpha=scale),
        values.masked_fill(values > 1, value=scale),
    ]


def test_xla_scales_only_arguments_of_functions_with_scale(xla: XlaPool) -> None:
    for result, expected in zip(xla.run(1, call_with_tensor_scale), call_with_scale(2.0), strict=True):
        torch.testing.assert_close(result, expected)


def save_as_a_host(folder: Path) -> None:
    """Save a host's half of a tensor, and a number that both hosts have."""
    import torch.distributed as dist

    from portable.engines.fsdp.saving import DcpSaver
    from portable.tpu.xla.layout import LocalShard
    from portable.tpu.xla.saving import StagedPlanner, StagedTensor

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    half = StagedTensor(
        torch.Size((4, 2)), torch.float32, [LocalShard((2 * rank, 0), torch.full((2, 2), float(rank)))]
    )
    only_on_one = StagedTensor(
        torch.Size(()), torch.int64, [LocalShard((), torch.tensor(5))] if rank == 1 else []
    )
    state = {"model": {"half": half, "count": only_on_one}, "optim": {"step": torch.tensor(9.0)}}
    DcpSaver(StagedPlanner).save(state, folder, background=True).wait()
    dist.barrier()


def test_xla_hosts_save_their_shards(tmp_path: Path, xla: XlaPool) -> None:
    """Two real processes write the checkpoint of a pod. The XLA runtime here has only one host."""
    (tmp_path / "saved").mkdir()
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}

    def host(rank: int) -> None:
        xla.run(1, save_as_a_host, tmp_path / "saved", environment={**group, "RANK": str(rank)})

    with ThreadPoolExecutor() as hosts:
        list(hosts.map(host, range(2)))
    tensors = open_checkpoint(tmp_path / "saved").tensors
    np.testing.assert_array_equal(tensors["half"].read(), [[0, 0], [0, 0], [1, 1], [1, 1]])
    assert int(tensors["count"].read()) == 5


def counted_by_hosts() -> list[torch.Tensor]:
    """Return the totals of two hosts that share sequences, which both have the same numbers."""
    backend: Any = create_backend("xla")
    backend.world_size, backend._layout = 2, SimpleNamespace(sequence=2, replicate=torch.clone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "portable.tpu.xla.backend.sum_over_ranks", lambda numbers: [2 * number for number in numbers]
        )
        return [backend.sum_host_numbers(number) for number in ((1 << 24) + 1, 0.5)]


def test_xla_hosts_with_shared_sequences_count_them_once(xla: XlaPool) -> None:
    tokens, weight = xla.run(1, counted_by_hosts)
    assert (tokens.dtype, tokens.item(), weight.item()) == (torch.int64, (1 << 24) + 1, 0.5)


def graph_of_a_step(config: RunConfig) -> str:
    with opened(config) as trial:
        trial.step()
        graphs: GraphRunner = trial.engine.graphs
        (text,) = graphs._texts_by_hash["step"].values()
    return str(text)


def test_xla_recomputation_is_behind_barriers(tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    plain, again = (
        xla.run(4, graph_of_a_step, configured(tmp_path, corpus, backend="xla", **BATCH, **settings))
        for settings in ({}, {"memory__activation_checkpointing": "full"})
    )
    layers = TINY_MODEL["num_hidden_layers"]
    # The barriers are at the logits, between and after the products of the head's backward pass, and between
    # the loss and the backward pass.
    assert plain.count("optimization_barrier") == 4
    assert again.count("optimization_barrier") >= 4 + layers
    # All but the last of the seven matrix products of a Llama layer are repeated, because the last result is
    # not needed.
    assert again.count("aten::mm") - plain.count("aten::mm") == 6 * layers


@pytest.mark.xla
def test_xla_command_line_prints_devices_without_jax(tmp_path: Path, corpus: Path) -> None:
    settings = tiny(tmp_path / "run", corpus, backend="xla", train__global_batch_size=8, train__steps=2)
    program = (
        "import sys; from portable.cli import main; code = main(sys.argv[1:]); "
        "print('jax' in sys.modules, 'jaxlib' in sys.modules, 'torch_xla' in sys.modules); sys.exit(code)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "USE_TORCH_XLA"}
    environment |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "XLA_FLAGS": QUICK}
    done = subprocess.run(
        [sys.executable, "-c", program, *flags(settings)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False", "False", "True"]
    assert "no TPU found; running on 4 virtual CPU devices" in done.stderr
    assert "1 x 4 devices on xla" in done.stderr
    assert "Warning" not in done.stderr
    assert "--- the model continues" in done.stderr


def command_line(arguments: list[str]) -> tuple[int, str]:
    """Return the exit code of ``portable-train``, and its error output."""
    from portable.cli import main

    with redirect_stderr(io.StringIO()) as said:
        code = main(arguments)
    return code, said.getvalue()


def refusal(answer: tuple[int, str]) -> str:
    code, said = answer
    assert code == 2, said
    (line,) = [line for line in said.splitlines() if line]
    return line


@pytest.fixture
def not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch_xla be imported again."""
    for name in ("portable.tpu.xla.runtime", "portable.tpu.xla.backend"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("not_imported")
def test_xla_without_torch_xla_suggests_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        if name.replace("-", "_") == "torch_xla":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    found = metadata.version
    monkeypatch.setattr(metadata, "version", version)
    line = refusal(command_line(["--backend", "xla"]))
    assert line.startswith("error: backend: xla needs the package torch_xla")
    assert "pip install 'portable-trainer[xla]'" in line


REFUSED = [
    ({"strategy": "zero2"}, "strategy: zero2 needs DeepSpeed"),
    ({"precision": "fp16"}, "precision: fp16 is not supported on backend xla"),
    ({"train__optimizer": "adamw_8bit"}, "train.optimizer: adamw_8bit needs CUDA or CPU kernels"),
    ({"train__micro_batch_size": "auto"}, "train.micro_batch_size: auto would compile"),
    ({"train__global_batch_size": 6}, "6 sequences cannot be divided evenly among 4 devices"),
    (
        {"memory__offload_optimizer": "cpu"},
        "memory.offload_optimizer: backend xla does not support offloading",
    ),
    ({"memory__activation_checkpointing": "selective"}, "memory.activation_checkpointing: selective"),
    ({"fsdp__backward_prefetch": "backward_pre"}, "fsdp.backward_prefetch: has no effect, because"),
    (
        {"strategy": "hybrid_shard", "fsdp__shard_group_size": 3},
        "4 devices cannot be divided evenly into groups of 3",
    ),
    ({"xla__compilation_cache": "kept"}, "xla.compilation_cache: graphs for virtual CPU devices"),
    ({"xla__sharding": {"(": 0}}, "xla.sharding: '(' is not a valid regular expression"),
]


def check(folder: Path, corpus: Path, settings: dict[str, Any]) -> str:

    batch = {"train__global_batch_size": 8}
    try:
        resolve_run(configured(folder, corpus, backend="xla", **{**batch, **settings}), "xla")
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_xla_rejects_unsupported_settings(
    settings: dict[str, Any], message: str, tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    assert message in xla.run(4, check, tmp_path / "run", corpus, settings)
    assert not (tmp_path / "run").exists()


def check_on_two_hosts(folder: Path, corpus: Path, metrics: list[str]) -> str:
    settings = {
        "model__task": "seq2seq-lm",
        "model__config": {"model_type": "t5", "vocab_size": 384, "d_model": 32, "num_heads": 2},
        "data__target_field": "text",
        "train__metrics": metrics,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("portable.tpu.xla.runtime.count_hosts", lambda: 2)
        patch.setattr("portable.tpu.xla.runtime.count_local_devices", lambda: 1)
        return check(folder, corpus, settings)


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        (["accuracy"], ""),
        (["rouge_l"], "rouge_l"),
        (["exact_match", "loss", "rouge_l"], "exact_match and rouge_l"),
    ],
)
def test_xla_rejects_generated_texts_on_several_hosts(
    metrics: list[str], names: str, tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    """Each host has only the labels of its rows, but reads the predictions of all rows."""
    message = xla.run(2, check_on_two_hosts, tmp_path / "run", corpus, metrics)
    assert message == (
        "train.metrics: XLA does not generate text on several hosts, so metrics of generated text are not "
        f"available; remove {names}"
        if names
        else ""
    )


def test_xla_ignores_deepspeed_file(tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    argv = flags(tiny(tmp_path / "run", corpus, backend="xla", deepspeed__config="ds.json", **BATCH))
    code, told = xla.run(4, command_line, [*argv, "--dry-run"])
    assert (
        code == 0
        and "note: deepspeed.config: has no effect, because DeepSpeed does not run on backend xla" in told
    )


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"no_such_name": 0}, "'no_such_name' matches no parameter"),
        (
            {"norm": 0, "k_proj": 5},
            r"'k_proj' cannot shard dim 5 of .*k_proj.* null to replicate the parameter",
        ),
    ],
)
def test_xla_sharding_rule_without_match_is_rejected(
    rules: dict[str, int], said: str, tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    config = configured(tmp_path, corpus, backend="xla", **BATCH, xla__sharding=rules)
    with pytest.raises(RankError, match=said):
        xla.run(4, leg, config)


def test_xla_rejects_unusable_device(xla: XlaPool) -> None:
    environment = {"PJRT_DEVICE": "TPU", "TPU_SKIP_MDS_QUERY": "1"}
    line = refusal(xla.run(4, command_line, ["--backend", "xla", "--dry-run"], environment=environment))
    assert "xla cannot use TPU devices" in line and "portable-trainer[tpu]" in line


def test_xla_rejects_launcher(tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    arguments = flags(tiny(tmp_path, corpus, backend="xla"))
    environment = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    line = refusal(xla.run(4, command_line, arguments, environment=environment))
    assert "xla runs one process per host" in line
