"""Layers in one compiled loop: compared with the same run without a loop, and with torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from portable.config import RunConfig
from portable.converters import open_checkpoint
from portable.errors import UserError
from portable.reporting.metrics import read_metrics
from portable.run.rank import run_rank
from tests.parity import Steps, opened, take_steps
from tests.runs import TINY_MODEL, configured
from tests.tpu.test_parity import BATCH, MODELS, WIDTHS, assert_close, assert_frugal
from tests.xla import XlaPool

STEPS = 4
LLAMA: dict[str, Any] = {"model__config": {**TINY_MODEL, "num_hidden_layers": 3}}
SMALL = {**WIDTHS, "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "head_dim": 12}


def deeper(name: str, layers: int = 3) -> dict[str, Any]:
    settings = MODELS[name]
    depth = {"gpt2": "n_layer", "t5": "num_layers"}.get(name, "num_hidden_layers")
    return {**settings, "model__config": {**settings["model__config"], depth: layers}}


DEEP: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": deeper("gpt2"),
    "mixtral": deeper("mixtral", 2),
    "t5": deeper("t5"),  # its first layers have a table that the others take their bias from
    "opt": {
        "model__config": {
            **WIDTHS,
            "model_type": "opt",
            "hidden_size": 48,
            "word_embed_proj_dim": 48,
            "ffn_dim": 80,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "dropout": 0.0,
        }
    },
    # Two kinds of layers in turn, and one more of the first.
    "gemma3": {
        "model__config": {
            **SMALL,
            "model_type": "gemma3_text",
            "num_key_value_heads": 2,
            "num_hidden_layers": 5,
            "sliding_window": 8,
            "layer_types": [*["sliding_attention", "full_attention"] * 2, "sliding_attention"],
        }
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "accumulation and recomputation": {
        "train__micro_batch_size": 1,
        "memory__activation_checkpointing": "full",
    },
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "no_shard": {"strategy": "no_shard"},
    "hybrid_shard": {"strategy": "hybrid_shard", "fsdp__shard_group_size": 2},
    "adafactor": {"train__optimizer": "adafactor"},
    "rules": {"xla__shard_param_on_dim_0": True, "xla__sharding": {"mlp": 1, "k_proj|v_proj": None}},
    # One learning rate per layer, in one loop. A part of the first two layers, which are equal, is frozen.
    "groups": {
        "model__config": {**TINY_MODEL, "num_hidden_layers": 4, "tie_word_embeddings": False},
        "train__frozen": [r"embed_tokens", r"layers\.[01]\.mlp"],
        "train__parameter_groups": [
            {"pattern": r"layers\.0\.", "learning_rate": 1e-3},
            {"pattern": r"layers\.3\.", "learning_rate": 1e-2, "weight_decay": 2.0},
        ],
    },
}
ON_XLA = ("xla__", "strategy", "fsdp__", "memory__")


def plain(folder: Path, corpus: Path, **settings: Any) -> Steps:
    """Return the steps of the run on the CPU, which has no loop."""
    kept = {name: value for name, value in settings.items() if not name.startswith(ON_XLA)}
    return take_steps(configured(folder, corpus, **{**BATCH, "train__steps": STEPS, **kept}), STEPS)


def looped(xla: XlaPool, devices: int, folder: Path, corpus: Path, **settings: Any) -> Steps:
    steps: Steps = xla.run(devices, take_steps, _looped(folder, corpus, **settings), STEPS)
    return steps


def _looped(folder: Path, corpus: Path, **settings: Any) -> RunConfig:
    wanted = {**BATCH, "backend": "xla", "train__steps": STEPS, "xla__scan_layers": True, **settings}
    return configured(folder, corpus, **wanted)


@pytest.mark.parametrize(
    "model",
    [
        name if name in ("llama", "t5", "gemma3") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in DEEP
    ],
)
def test_scan_layers_losses_match_unrolled(model: str, tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    steps = looped(xla, 4, tmp_path / "xla", corpus, **DEEP[model])
    truth = plain(tmp_path / "cpu", corpus, **DEEP[model])
    assert_close(steps, truth, 1e-6)
    assert steps.norms == pytest.approx(truth.norms, rel=1e-4)
    assert_frugal(steps, {"step": 1})


QUICK_SETTINGS = ("accumulation and recomputation", "shard_grad_op", "adafactor", "groups")


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK_SETTINGS else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in SETTINGS
    ],
)
def test_scan_layers_losses_match_for_other_settings(
    name: str, tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    settings = {**LLAMA, **SETTINGS[name]}
    steps = looped(xla, 4, tmp_path / "xla", corpus, **settings)
    truth = plain(tmp_path / "cpu", corpus, **settings)
    assert steps.losses == pytest.approx(truth.losses, rel=1e-6)
    assert steps.norms == pytest.approx(truth.norms, rel=1e-4)
    several = "train__micro_batch_size" in settings
    assert_frugal(steps, {"micro-batch": 1, "update": 1} if several else {"step": 1})


def test_scan_layers_losses_match_in_bf16(tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    settings = {**LLAMA, "precision": "bf16", "memory__activation_checkpointing": "full"}
    steps = looped(xla, 4, tmp_path / "a", corpus, **settings)
    without = looped(xla, 4, tmp_path / "b", corpus, **settings, xla__scan_layers=False)
    # Compilers round bf16 at different places, which the updates of Adam amplify.
    assert steps.losses[0] == pytest.approx(without.losses[0], rel=1e-4)
    assert_close(steps, without, 2e-3)


def leg(config: RunConfig) -> int:
    return run_rank("xla", config)


def test_scan_layers_checkpoints_move_to_unrolled(tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    """The run begins in a loop on four devices, and continues without a loop and on the CPU.

    It ends in a loop on two devices.
    """
    settings: dict[str, Any] = {**LLAMA, **BATCH, "log__sample_tokens": 2, "train__eval_every": 4}
    assert run_rank("cpu", configured(tmp_path / "truth", corpus, **settings)) == 0
    folder = tmp_path / "run"
    on_tpu = {**settings, "backend": "xla", "xla__scan_layers": True}
    assert xla.run(4, leg, configured(folder, corpus, **on_tpu, train__stop_after=2)) == 0
    on_tpu["xla__scan_layers"] = False
    assert xla.run(4, leg, configured(folder, corpus, **on_tpu, train__stop_after=4)) == 0
    assert run_rank("cpu", configured(folder, corpus, **settings, train__stop_after=6)) == 0
    on_tpu["xla__scan_layers"] = True
    assert xla.run(2, leg, configured(folder, corpus, **on_tpu)) == 0
    ours, truth = (
        open_checkpoint(path / "checkpoints" / "step-000008") for path in (folder, tmp_path / "truth")
    )
    rows, wanted = (read_metrics(path) for path in (folder, tmp_path / "truth"))
    for name in ("loss", "eval_loss"):  # each leg evaluates at its end as well
        found, expected = ({row["step"]: row[name] for row in each if name in row} for each in (rows, wanted))
        assert 8 in expected
        assert {step: found[step] for step in expected} == pytest.approx(expected, rel=1e-6), name
    assert ours.tensors.keys() == truth.tensors.keys()
    assert ours.optimizer is not None and truth.optimizer is not None
    assert ours.optimizer.state.keys() == truth.optimizer.state.keys()
    for name, tensor in truth.tensors.items():
        assert ours.tensors[name].read() == pytest.approx(tensor.read(), abs=2e-5), name


def refusal(config: RunConfig) -> str:
    try:
        with opened(config) as trial:
            trial.step()
    except UserError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"model__config": {**DEEP["opt"]["model__config"], "layerdrop": 0.1}},
            "layerdrop is set in the model's config, so layers are skipped at random",
        ),
        (deeper("llama", 1), "llama has no two consecutive layers that are identical"),
        (
            {"model__config": {**deeper("mixtral", 2)["model__config"], "output_router_logits": True}},
            "the router loss needs the output of every layer's router",
        ),
        (
            {"xla__sharding": {r"layers\.0\.mlp": None}},
            "xla.sharding shards model.layers.0.mlp.gate_proj.weight of one layer differently",
        ),
    ],
)
def test_scan_layers_rejects_unsupported_models(
    model: dict[str, Any], said: str, tmp_path: Path, corpus: Path, xla: XlaPool
) -> None:
    found = xla.run(4, refusal, _looped(tmp_path, corpus, **{**LLAMA, **model}))
    assert found.startswith("xla.scan_layers: ") and said in found and "\n" not in found


def unsound(config: RunConfig) -> list[str]:
    with opened(config) as trial:
        weight = trial.engine.device_parameters.by_name["model.layers.0.mlp.up_proj.weight"]
        nan = torch.full((len(weight), 1, 1), 1.0)
        nan[1] = float("nan")
        with torch.no_grad():
            weight.mul_(trial.engine.layout.replicate(nan))
        batch = next(trial.batches)
        trial.engine.accumulate_gradients(
            trial.backend.copy_to_device(batch), trial.backend.sum_host_numbers(1), is_last_micro_batch=False
        )
        names: list[str] = trial.engine.find_nonfinite_gradients()
        return names


def test_scan_layers_non_finite_gradients_name_layers(tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    names = xla.run(2, unsound, _looped(tmp_path, corpus, **LLAMA, train__micro_batch_size=1))
    assert {f"model.layers.{layer}.mlp.down_proj.weight" for layer in range(3)} <= set(names)
    assert len(names) == len(set(names)) == 3 * 9 + 2


# -- the loop itself -----------------------------------------------------------------------------------------


def body(carry: Any, slices: Any, shared: Any) -> Any:
    (hidden,), (weight, bias), (scale,) = carry, slices, shared
    out = torch.nn.functional.linear(hidden, weight, bias)
    heads = out.view(*out.shape[:2], 2, -1).transpose(1, 2)
    mixed = (heads.softmax(-1) * heads).transpose(1, 2).reshape(out.shape)
    return (hidden + torch.tanh(mixed) * scale,), (mixed.sum(-1),)


def inputs() -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 8), (4, 8, 8), (4, 8), (3, 8)]
    return [torch.randn(shape, generator=draws) for shape in shapes]


def by_hand() -> list[torch.Tensor]:
    given = [tensor.requires_grad_() for tensor in inputs()]
    carry, results = given[0], []
    for index in range(4):
        (carry,), (result,) = body((carry,), (given[1][index], given[2][index]), (given[3],))
        results.append(result)
    loss = carry.square().sum() + torch.stack(results).square().sum()
    loss.backward()
    return [loss.detach(), *(tensor.grad for tensor in given if tensor.grad is not None)]


def in_a_loop(recompute: bool) -> tuple[list[torch.Tensor], int]:
    from portable.tpu.xla import runtime
    from portable.tpu.xla.scan import Scan

    runtime.start_xla_runtime()
    given = [tensor.to("xla:0").requires_grad_() for tensor in inputs()]
    scan = Scan(body, recompute=recompute)
    (carry,), (results,) = scan((given[0],), given[1:3], given[3:])
    loss = carry.square().sum() + results.square().sum()
    loss.backward()
    (traced,) = scan._loops_by_signature.values()
    found = [loss.detach(), *(tensor.grad for tensor in given if tensor.grad is not None)]
    return [tensor.cpu() for tensor in found], traced.num_saved


@pytest.mark.parametrize(("recompute", "saved"), [(False, 4), (True, 1)])
def test_scan_gradients_match_unrolled(recompute: bool, saved: int, xla: XlaPool) -> None:
    """The loop saves the results of linear, softmax and tanh and the carry, or only the carry.

    It never saves the weights.
    """
    found, kept = xla.run(1, in_a_loop, recompute)
    for ours, theirs in zip(found, by_hand(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert kept == saved


def dropped(recompute: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from portable.tpu.xla import runtime
    from portable.tpu.xla.scan import Scan

    def drop(carry: Any, slices: Any, _: Any) -> Any:
        return carry, (torch.nn.functional.dropout(slices[0], 0.5),)

    runtime.start_xla_runtime()
    ones = torch.ones(4, 64, device="xla:0", requires_grad=True)
    _, (results,) = Scan(drop, recompute=recompute)((torch.zeros(1, device="xla:0"),), (ones,))
    results.sum().backward()
    assert ones.grad is not None
    return results.detach().cpu(), ones.grad.cpu()


@pytest.mark.parametrize("recompute", [False, True])
def test_scan_draws_random_numbers_per_iteration(recompute: bool, xla: XlaPool) -> None:
    results, gradient = xla.run(1, dropped, recompute)
    assert 0 < int((results == 0).sum()) < results.numel()
    assert len({tuple(row.tolist()) for row in results}) == 4
    assert torch.equal(results, gradient)  # of a sum: the mask, scaled
