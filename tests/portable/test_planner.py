"""``portable-plan``: its order, JSON and errors, and its hours compared with published runs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from portable.checks import check_config
from portable.cli import main as train
from portable.config import load_config
from portable.engines.communication_volume import compute_internode_bytes
from portable.errors import RUN_ERROR, RunError
from portable.model.build import build_model_on_meta, load_model_config
from portable.model.flops import compute_flops_per_token
from portable.planner import device_lookup as devices
from portable.planner import plan_tables
from portable.planner.cli import main
from portable.planner.memory_model import PLACEHOLDER_DISK_PATH, Cluster, StrategySetting
from portable.planner.meta_model import MetaModel
from portable.planner.plan import Planner, PlanTarget
from portable.planner.plan_tables import describe_next_reductions
from portable.planner.preparation import build_model_and_work
from portable.planner.run_time import EstimateRange, compute_hours
from portable.registry import load_backend_package
from tests.image_models import write_image_model, write_squares
from tests.promises import record
from tests.runs import SENTENCE

pytestmark = pytest.mark.usefixtures("passes_known")
SMALL = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LARGE = {
    **SMALL,
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
MIXTURE = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
"""Qwen3-30B-A3B."""
WRONG = ("--fsdp.transformer_layer_cls_to_wrap", '["GPT2Block"]', "--device", "h100")
"""Layers that the model does not have."""
Plan = Callable[..., Any]
"""The options of a small or another model: parsed, or as printed text without line breaks."""


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    def run(*arguments: str, model: dict[str, Any] | None = None, told: bool = False) -> Any:
        given = ["--model.config", json.dumps(model or SMALL), "--train.global_batch_size", "64"]
        given += ["--data.seq_len", "64", *arguments]
        assert main(given if told else [*given, "--json"]) == 0
        said = capsys.readouterr().out
        return said if told else json.loads(said)

    return run


def test_plan_lists_options_in_documented_order_with_bytes(plan: Plan) -> None:
    found = plan("--device", "h100", "--devices", "8")
    assert found["parameters"] == 2 * 512 * 64 + 3 * (64 * 64 * 3 + 3 * 64 * 160 + 2 * 64) + 64
    for option in found["options"]:
        size = option["device_bytes"]
        total = size.pop("total")
        assert option["fits"] is True and total == sum(size.values())
    parts_of = ("strategy", "offload_optimizer", "offload_params")
    order = [" ".join(option[part] for part in parts_of) for option in found["options"]]
    assert found["best"]["strategy"] == "no_shard" and order[0] == "no_shard none none"
    zero3 = [name.removeprefix("zero3 ") for name in order if name.startswith("zero3")]
    assert zero3 == ["none none", "none cpu", "cpu none", "cpu cpu", "nvme none", "nvme nvme"]
    for option in plan("--device", "h100", "--devices", "8", "--host-memory", "1kB")["options"]:
        assert option["fits"] is (option["host_bytes"] == 0)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (2, 1), (3, 4)])
def test_internode_bytes_match_ring_all_gather(nodes: int, per_node: int) -> None:
    devices = nodes * per_node
    senders = [rank for rank in range(devices) if rank // per_node != (rank + 1) % devices // per_node]
    blocks_per_device = devices - 1  # each device sends all blocks except the block of its successor
    average = len(senders) * blocks_per_device / devices
    assert compute_internode_bytes(blocks_per_device, Cluster(devices, per_node)) == average


def test_plan_sorts_options_by_sent_bytes(plan: Plan) -> None:
    """The order is documented in docs/planning.md. In fp32, DDP and ZeRO-1 send the same number of bytes."""
    found = plan("--device", "h100", "--devices", "8", "--precision", "fp32", "--train.micro_batch_size", "2")
    sent: dict[int, list[int]] = {}
    for option in found["options"]:
        setting = StrategySetting(option["strategy"], option["offload_optimizer"], option["offload_params"])
        if not setting.offload_targets:
            sent.setdefault(Planner.get_order_position(setting), []).append(option["communication_bytes"])
    groups = [sent[place] for place in sorted(sent)]
    assert len(groups) == 3
    for group, following in itertools.pairwise(groups):
        assert max(group) <= 1.001 * min(following)


def test_plan_of_large_model_saves_memory_step_by_step(plan: Plan, tmp_path: Path) -> None:
    """The printed settings at the end are a valid config."""
    seq = ("--data.seq_len", "2048", "--devices", "64")
    roomy = plan("--device", "h200", *seq, model=LARGE)["best"]
    tight = plan("--device", "l4", *seq, model=LARGE)["best"]
    assert (roomy["activation_checkpointing"], tight["activation_checkpointing"]) == ("none", "full")
    assert tight["strategy"] == "full_shard"
    assert tight["device_bytes"]["total"] < roomy["device_bytes"]["total"]
    text = plan("--device", "l4", *seq, model=LARGE, told=True)
    (tmp_path / "run.yaml").write_text(text[text.index("\nstrategy:") :].split("\n\n")[0] + "\n")
    config = load_config(tmp_path / "run.yaml", {"train.global_batch_size": 64})
    assert config.strategy == "full_shard" and config.is_set("memory.activation_checkpointing")
    none = plan("--device", "t4", "--devices", "1", model=LARGE)
    assert none["best"] is None and not any(option["fits"] for option in none["options"])


def test_plan_suggests_adapter_if_full_training_does_not_fit(plan: Plan) -> None:
    argv = ["--data.seq_len", "1024", "--precision", "bf16", "--train.global_batch_size", "16"]
    argv += ["--device", "a100-80", "--devices"]
    assert plan(*argv, "16", model=LARGE)["with_adapter"] is None
    best = plan(*argv, "2", model=LARGE)["with_adapter"]
    assert best["fits"] and (best["offload_optimizer"], best["offload_params"]) == ("none", "none")
    alone = plan(*argv, "2", "--adapter.type", "lora", model=LARGE)
    assert {**best, "reason": None} == {**alone["best"], "reason": None} and alone["with_adapter"] is None
    said = " ".join(plan(*argv, "2", model=LARGE, told=True).split())
    assert f"With an adapter (adapter.type lora), {best['strategy']} takes" in said


def test_plan_suggests_savings_if_full_training_does_not_fit(plan: Plan) -> None:
    argv = ["--data.seq_len", "1024", "--precision", "bf16", "--train.global_batch_size", "2"]
    argv += ["--device", "h200"]
    assert plan(*argv, "--devices", "2", model=LARGE)["with_savings"] is None
    lean = plan(*argv, model=LARGE)["with_savings"]
    assert lean["settings"] == {"train.master_dtype": "bf16"}
    assert lean["fits"] and (lean["offload_optimizer"], lean["offload_params"]) == ("none", "none")
    rounded = plan(*argv, "--train.master_dtype", "bf16", model=LARGE)
    assert rounded["best"]["device_bytes"] == lean["device_bytes"] and rounded["with_savings"] is None
    said = " ".join(plan(*argv, model=LARGE, told=True).split())
    assert f"With train.master_dtype bf16 (changes the result), {lean['strategy']} takes" in said


@pytest.mark.parametrize(
    ("settings", "setting", "expected"),
    [
        ({}, StrategySetting("full_shard"), "strategy full_shard with memory.offload_optimizer cpu"),
        ({"train.fused_backward": True, "train.max_grad_norm": None}, StrategySetting("full_shard"), None),
        (
            {"strategy": "zero3"},
            StrategySetting("zero1", "cpu"),
            "strategy zero2 with memory.offload_optimizer cpu",
        ),
    ],
)
def test_next_setting_is_valid(
    settings: dict[str, Any], setting: StrategySetting, expected: str | None
) -> None:
    planner = build_planner({"strategy": "full_shard", **settings})
    assert planner.describe_next_setting(setting) == expected


def build_planner(settings: dict[str, Any]) -> Planner:
    """Build a planner for eight GPUs of an unknown type."""
    common = {"model.config": SMALL, "data.source": "org/texts", "backend": "cuda", "precision": "bf16"}
    config = load_config(None, {**common, **settings})
    model = build_model_on_meta(load_model_config(config.model), config.model)
    return Planner(config, MetaModel(model, config), PlanTarget("cuda", Cluster(8, 8), None, None))


def test_plan_notes_are_wrapped() -> None:
    planner = build_planner({})
    option = planner.build_option(StrategySetting("full_shard"))
    planner.failure = "RuntimeError: the model reads the values of a tensor, which has no data"
    text = plan_tables.format_plan(plan_tables.Plan(planner, [option], option), width=60)
    notes = [part for part in text.split("\n\n") if part.startswith(("note:", "* recommended"))]
    assert len(notes) == 2 and max(len(line) for note in notes for line in note.splitlines()) <= 60


def test_next_micro_batch_size_divides_batch() -> None:
    planner = build_planner({"train.global_batch_size": 72, "train.micro_batch_size": 9})
    option = planner.build_option(StrategySetting("full_shard"))
    assert describe_next_reductions(planner, option).startswith("train.micro_batch_size 3, then")


@pytest.mark.parametrize(
    ("settings", "ranks", "expected"),
    [
        (
            {},
            1,
            [
                "activation_checkpointing full",
                "offload_activations true",
                "fused_backward",
                "master_dtype bf16",
            ],
        ),
        (
            {
                "memory.activation_checkpointing": "full",
                "train.max_grad_norm": None,
                "strategy": "shard_grad_op",
            },
            2,
            ["offload_activations true", "fused_backward true", "strategy full_shard", "master_dtype bf16"],
        ),
        (
            {"compile": True, "adapter.type": "lora"},
            1,
            ["activation_checkpointing full", "offload_activations true with", "offload_optimizer cpu"],
        ),
        (
            {"strategy": "zero2", "memory.loss_chunk_tokens": 0},  # ZeRO computes all logits at once
            2,
            ["activation_checkpointing full", "offload_activations", "strategy zero3"],
        ),
        (
            {"memory.loss_chunk_tokens": 0, "train.max_grad_norm": None, "train.on_non_finite": "skip"},
            1,
            [
                "loss_chunk_tokens auto",
                "activation_checkpointing full",
                "offload_activations true",
                "fused_backward true with train.on_non_finite stop",
                "master_dtype bf16",
            ],
        ),
    ],
)
def test_memory_remedies_are_ordered_and_supported(
    settings: dict[str, Any], ranks: int, expected: list[str]
) -> None:
    """The order is documented in docs/strategies.md. A remedy with true or bf16 as its value is valid."""
    batch = {"train.global_batch_size": 8, "train.micro_batch_size": 8 // ranks}
    common = {"model.config": SMALL, "data.source": "org/texts", "backend": "cuda", "precision": "bf16"}
    config = load_config(None, common | batch | settings)
    remedies = list(load_backend_package("cuda").iter_memory_remedies(config, ranks))
    names = [remedy.partition(".")[2] or remedy for remedy in remedies]
    assert [name.startswith(text) for name, text in zip(names, expected, strict=False)] == [True] * len(
        expected
    ), remedies
    assert all(
        ("changes the result" in remedy) == ("null" in remedy or "bf16" in remedy) for remedy in remedies
    )
    for remedy in remedies:
        settings_text = re.split(" with | and ", remedy.partition(" (")[0])
        parts = [part.split() for part in settings_text if "." in part]
        changes = {key: {"true": True, "null": None}.get(value, value) for key, value in parts}
        if "offload_optimizer" not in remedy and "offload_params" not in remedy:
            check_config(config.replaced(changes))


@pytest.mark.parametrize(
    ("backend", "settings", "expected", "absent"),
    [
        ("cpu", {}, ["strategy to zero3", "memory.activation_checkpointing"], "num_workers"),
        ("cuda", {}, ["data.num_workers to a lower number"], "zero3"),
        ("cuda", {"memory.offload_optimizer": "cpu"}, ["memory.offload_optimizer to none", "zero3"], "num_w"),
        ("tpu", {}, ["data.num_workers to a lower number"], "zero3"),
        ("tpu", {"memory.offload_optimizer": "cpu"}, ["memory.offload_optimizer to none"], "zero3"),
    ],
)
def test_host_memory_advice_names_settings_of_the_backend(
    backend: str, settings: dict[str, Any], expected: list[str], absent: str
) -> None:
    common = {"model.config": SMALL, "data.source": "org/texts", "backend": backend, "strategy": "full_shard"}
    advice = load_backend_package(backend).get_host_memory_advice(load_config(None, common | settings))
    assert all(text in advice for text in expected) and absent not in advice, advice


def test_plan_suggests_expert_parallelism_for_a_mixture(plan: Plan) -> None:
    """The bytes of Qwen3-30B-A3B are computed by hand for 64 devices in groups of 8."""
    argv = ["--device", "h100", "--devices", "64", "--data.seq_len", "4096", "--precision", "bf16"]
    argv += ["--train.global_batch_size", "64", "--memory.activation_checkpointing", "full"]
    argv += ["--strategy", "full_shard"]
    whole = plan(*argv, model=MIXTURE)
    divided = whole["with_divided_experts"]
    assert (divided["strategy"], divided["expert_parallel_size"]) == ("shard_grad_op", 8)
    experts = 48 * 128 * 3 * 2048 * 768
    others = whole["parameters"] - experts
    # Each parameter is gathered in bf16 and its gradient is reduced in fp32. A layer sends its tokens six
    # times: to the experts and back in the forward pass, in the recomputation, and in the backward pass.
    exchanged = 6 * 48 * (4096 * 8 * 2048 * 2) * 7 / 8
    expected = (2 + 4) * (others * 63 / 64 + experts / 8 * 7 / 8) + exchanged
    assert divided["communication_bytes"] == pytest.approx(expected, rel=1e-3)
    gathered = (2 + 4) * whole["parameters"] * 63 / 64
    assert whole["best"]["communication_bytes"] == pytest.approx(gathered, rel=1e-3)
    alone = plan(*argv, "--expert_parallel_size", "8", model=MIXTURE)
    assert {**divided, "reason": None} == {**alone["best"], "reason": None}
    assert alone["with_divided_experts"] is None and alone["hours"] == whole["hours"]
    said = " ".join(plan(*argv, model=MIXTURE, told=True).split())
    assert (
        "With expert_parallel_size 8, shard_grad_op takes 20.3 GiB, and a device sends 57.7 GiB per step"
        in said
    )


def test_plan_offloads_to_disk_last(plan: Plan) -> None:
    """The disk is used if the host has no memory for the offloaded state."""
    arguments = ["--device", "a100-40", "--devices", "2", "--host-memory", "100GB"]
    found = plan(*arguments, model=LARGE)
    swapping = [option for option in found["options"] if "nvme" in option["offload_optimizer"]]
    assert [option for option in found["options"] if option["disk_bytes"]] == swapping
    for option in swapping:
        each = 18 if option["offload_params"] == "nvme" else 16
        assert option["disk_bytes"] == pytest.approx(each * found["parameters"], rel=0.001)
    assert (found["best"]["strategy"], found["best"]["offload_optimizer"]) == ("zero3", "nvme")
    told = plan(*arguments, model=LARGE, told=True)
    assert f"nvme_path: {PLACEHOLDER_DISK_PATH}" in told
    assert "of its disk" in " ".join(told.split())  # for any width of the terminal


def test_plan_without_device_has_no_fits(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan()
    assert found["best"] is None and {option["fits"] for option in found["options"]} == {None}
    assert main([]) == 0
    assert "--device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "h10"], ["--device", "h100"]),
        (
            ["--budget", "50"],
            ["--budget: the prices of the devices are unknown; add"],
        ),
        (
            ["--budget", "50", "--train.steps", "9", "--price-per-hour", "t4=0.35"],
            ["--budget: the speed of t4 in fp32 is unknown, so", "; set another precision"],
        ),
        (
            ["--budget", "50", "--price-per-hour", "h100=2", "--backend", "xla"],
            ["--device: h100 needs backend: cuda, but", "; remove backend"],
        ),
        (
            ["--budget", "50", "--price-per-hour", "h100=2", "--wide"],
            ["--wide: has no effect with --budget; remove"],
        ),
        (
            ["--price-per-hour", "h101=2"],
            ["--price-per-hour: unknown device 'h101'; did you mean h100?"],
        ),
        (["--device-memory", "much"], ["--device-memory", "much", "80GB"]),
        (["--devices", "7"], ["train.global_batch_size", "7 devices"]),
        (["--train.step", "3"], ["--train.step", "train.steps"]),
        (["--device", "v5e", "--memory.offload_optimizer", "cpu"], ["memory.offload_optimizer", "xla"]),
        (["--device", "h100", "--backend", "xla"], ["--device", "backend"]),
        (["--model.name_or_path", "no/such-folder-or-model/here"], ["model.name_or_path"]),
        (
            ["--strategy", "full_shard", "--devices", "2", *WRONG],
            ["LlamaForCausalLM has no module of the class GPT2Block"],
        ),
        (
            ["--strategy", "hybrid_shard", "--devices", "4", "--fsdp.shard_group_size", "8"],
            ["fsdp.shard_group_size: the number of ranks (4) is not a multiple of 8; use one of 1, 2, 4"],
        ),
        (
            ["--strategy", "hybrid_shard", "--devices", "4", "--fsdp.shard_group_size", "3"],
            ["fsdp.shard_group_size: the number of ranks (4) is not a multiple of 3; use one of 1, 2, 4"],
        ),
        (
            [
                "--strategy",
                "full_shard",
                "--devices",
                "4",
                "--train.optimizer",
                "adafactor",
                "--train.fused_backward",
                "true",
                "--train.max_grad_norm",
                "null",
            ],
            ["train.fused_backward: adafactor sums its moments over 4 ranks"],
        ),
    ],
)
def test_plan_rejects_bad_input_in_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert out == "" and line.startswith("error: ") and all(word in line for word in words)


# -- hours and prices ------------------------------------------------------------------------------------


GITHUB = "https://github.com"
LLAMA_2 = f"{GITHUB}/meta-llama/llama/blob/main/MODEL_CARD.md"
LLAMA_3 = f"{GITHUB}/meta-llama/llama3/blob/main/MODEL_CARD.md"
LLAMA_3_1 = f"{GITHUB}/meta-llama/llama-models/blob/main/models/llama3_1/MODEL_CARD.md"
TITAN_A100 = f"{GITHUB}/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md"
TITAN_H100 = f"{GITHUB}/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md"
TINY = f"{GITHUB}/jzhang38/TinyLlama/blob/main/README.md"
SMOL = f"{GITHUB}/huggingface/smollm/tree/main/text/pretraining"
TIERING = f"{GITHUB}/AI-Hypercomputer/maxtext/blob/main/docs/reference/models/tiering.md"


def llama(hidden: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int, **more: Any) -> str:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv, "vocab_size": vocabulary}
    return json.dumps({"model_type": "llama", **sizes, "tie_word_embeddings": False, **more})


L2_7B = llama(4096, 11008, 32, 32, 32, 32_000)
L2_13B = llama(5120, 13824, 40, 40, 40, 32_000)
L2_70B = llama(8192, 28672, 80, 64, 8, 32_000)
L3_8B = llama(4096, 14336, 32, 32, 8, 128_256)
L3_70B = llama(8192, 28672, 80, 64, 8, 128_256)
L3_405B = llama(16384, 53248, 126, 128, 8, 128_256)
TINY_LLAMA = llama(2048, 5632, 22, 32, 4, 32_000)
SMOL_3B = llama(2048, 11008, 36, 16, 4, 128_256, tie_word_embeddings=True)
MIXTRAL = llama(4096, 14336, 32, 32, 8, 32_000, model_type="mixtral", num_local_experts=8)
T, B = 10**12, 10**9


def at(rate: float, tokens: float = T) -> float:
    """Device-hours at ``rate`` tokens a second of one device."""
    return tokens / rate / 3600


PUBLISHED: list[tuple[str, str, str, int, float, float, str]] = [
    # name, device, model, seq_len, tokens, device-hours, where
    ("Llama 2 7B", "a100-80", L2_7B, 4096, 2 * T, 184_320, LLAMA_2),
    ("Llama 2 13B", "a100-80", L2_13B, 4096, 2 * T, 368_640, LLAMA_2),
    ("Llama 2 70B", "a100-80", L2_70B, 4096, 2 * T, 1_720_320, LLAMA_2),
    ("TinyLlama", "a100-40", TINY_LLAMA, 2048, 300 * B, 3456, TINY),
    ("torchtitan Llama 3 8B", "a100-80", L3_8B, 8192, T, at(2904), TITAN_A100),
    ("torchtitan Llama 3 70B", "a100-80", L3_70B, 8192, T, at(331), TITAN_A100),
    ("torchtitan Llama 2 13B", "a100-80", L2_13B, 4096, T, at(1914), TITAN_A100),
    ("Llama 3 70B", "h100", L3_70B, 8192, 15 * T, 6_400_000, LLAMA_3),
    ("Llama 3.1 70B", "h100", L3_70B, 8192, 15 * T, 7_000_000, LLAMA_3_1),
    ("Llama 3.1 405B", "h100", L3_405B, 8192, 15 * T, 30_840_000, LLAMA_3_1),
    ("SmolLM3 3B", "h100", SMOL_3B, 4096, 11.2 * T, 384 * 24 * 24, SMOL),
    ("torchtitan Llama 3.1 8B, 8", "h100", L3_8B, 8192, T, at(6667), TITAN_H100),
    ("torchtitan Llama 3.1 8B, 128", "h100", L3_8B, 8192, T, at(6514), TITAN_H100),
    ("MaxText Llama 2 70B", "v5p", L2_70B, 4096, T, at(692), TIERING),
    ("MaxText Mixtral 8x7B", "v5p", MIXTRAL, 4096, T, at(2909), TIERING),
    ("MaxText Llama 2 70B", "v6e", L2_70B, 4096, T, at(900), TIERING),
    ("MaxText Llama 3.1 8B", "v6e", L3_8B, 8192, T, at(7207), TIERING),
    ("MaxText Llama 3.1 70B", "v6e", L3_70B, 8192, T, at(960), TIERING),
    ("MaxText Llama 3.1 405B", "v6e", L3_405B, 8192, T, at(123), TIERING),
    ("MaxText Mixtral 8x7B", "v6e", MIXTRAL, 4096, T, at(3899), TIERING),
]


@cache
def flops(model: str, seq_len: int) -> float:
    config = load_config(None, {"model.config": json.loads(model)})
    found = load_model_config(config.model)
    return compute_flops_per_token(build_model_on_meta(found, config.model), found, seq_len)


def planned(device: str, model: str, seq_len: int, tokens: float) -> float:
    hours = compute_hours(devices.find_device(device), 1, "bf16", flops(model, seq_len) * tokens)
    assert hours is not None
    return hours.likely


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: f"{run[0]} on {run[1]}")
def test_planned_hours_are_within_quarter_of_published_hours(run: tuple[Any, ...]) -> None:
    _, device, model, seq_len, tokens, hours, _ = run
    assert planned(device, model, seq_len, tokens) == pytest.approx(hours, rel=0.25)
    record([planned(device, model, seq_len, tokens)], [hours], 0.25)


EIGHT = ("--train.global_batch_size", "8")


def test_plan_has_hours_and_cost(plan: Plan) -> None:
    words = [*EIGHT, "--train.steps", "1000000", "--device", "h100", "--devices", "8"]
    words += ["--price-per-hour", "2.50"]
    found = plan(*words)
    assert found["tokens"] == 1_000_000 * 8 * 64
    least, most = found["hours"]
    assert 0 < least <= most and found["share_of_peak"] == [0.31, 0.39]
    assert found["cost"] == pytest.approx([least * 8 * 2.5, most * 8 * 2.5])
    assert "less than a minute for 512,000,000 tokens" in " ".join(plan(*words, told=True).split())
    assert plan("--train.steps", "9", "--device", "h100", "--strategy", "zero3")["cost"] is None


def test_plan_of_tiny_run_has_bounds_instead_of_tiny_numbers(plan: Plan) -> None:
    words = [*EIGHT, "--train.steps", "9", "--device", "h100", "--price-per-hour", "2.50"]
    output = " ".join(plan(*words, told=True).split())
    assert "time less than a minute for 4,608 tokens: " in output
    assert "cost less than 0.01, at 2.5 an hour for each device" in output
    prices = ["--price-per-hour", "h100=2.50", "--budget", "1"]
    assert "less than 0.01 for less than a minute, " in plan(*words[:4], *prices, told=True)


@pytest.mark.parametrize(
    ("hours", "time", "cost"),
    [
        (EstimateRange(1e-8, 2e-8), "less than a minute", "less than 0.01"),
        (EstimateRange(0.009, 0.0099), "less than a minute", "less than 0.01"),
        (EstimateRange(0.0151, 0.019), "about 0.91 to 1.1 minutes", "about 0.015 to 0.019"),
        (EstimateRange(1.0, 1.0), "about 60 minutes", "about 1"),
        (EstimateRange(1.5, 2.5), "about 1.5 to 2.5 hours", "about 1.5 to 2.5"),
        (EstimateRange(1234.0, 56789.0), "about 1,200 to 57,000 hours", "about 1,200 to 57,000"),
    ],
)
def test_ranges_of_time_and_cost_are_formatted(hours: EstimateRange, time: str, cost: str) -> None:
    assert (hours.format_time("about "), hours.format_cost("about ")) == (time, cost)


def test_planned_hours_are_limited_by_slow_links(plan: Plan) -> None:
    words = (*EIGHT, "--train.steps", "1000", "--device", "4090")
    alone, two = plan(*words), plan(*words, "--devices", "2")
    sent = two["best"]["communication_bytes"] * 1000 / 3.2e10 / 3600
    assert two["hours"] == pytest.approx([max(hours / 2, sent) for hours in alone["hours"]])
    assert two["hours"][0] == pytest.approx(sent)


def test_planned_hours_of_epochs_count_local_data(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text(SENTENCE * 640)
    words = [*EIGHT, "--train.epochs", "2", "--train.steps", "null", "--device", "l4", "--data.source"]
    steps = 2 * (len(SENTENCE) * 640 // 64) // 8
    told = " ".join(plan(*words, "texts.txt", told=True).split())
    assert f"for at most {steps * 8 * 64:,} tokens" in told and "no runs on this device" in told
    assert plan(*words, "not/here.txt")["hours"] is None


def test_plan_with_budget_sorts_machines_by_cost(plan: Plan) -> None:
    words = [*EIGHT, "--train.steps", "100000000", "--budget", "20"]
    rows = plan(*words, "--price-per-hour", "h100=2.50,l4=0.70,v6e=2.7")
    assert {row["device"] for row in rows} == {"h100", "l4", "v6e"}
    assert [sum(row["cost"]) for row in rows] == sorted(sum(row["cost"]) for row in rows)
    assert [row["within_budget"] for row in rows] == [row["cost"][1] <= 20 for row in rows]
    few = plan(*words, "--price-per-hour", "h100=2.50,l4=0.70", "--budget", "0.1", told=True)
    first, second = few.splitlines()
    assert "1 x h100" in first + second and "exceeds the budget of 0.1" in second


def test_plan_with_budget_builds_model_for_each_precision(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = Mock(wraps=build_model_and_work)
    monkeypatch.setattr("portable.planner.cli.build_model_and_work", build)
    words = [
        *EIGHT,
        "--train.steps",
        "1000",
        "--budget",
        "20",
        "--price-per-hour",
        "t4=0.35,h100=2.50,l4=0.70",
    ]
    assert "note: --budget: the speed of t4 in fp32" not in plan(*words, "--precision", "fp16", told=True)
    build.reset_mock()
    assert {row["device"] for row in plan(*words)} == {"h100", "l4"}
    assert [call.args[0].precision for call in build.call_args_list] == ["fp32", "bf16"]


def test_plan_counts_image_tower(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan measures the largest images of the data, or without data, the largest image of a sample."""
    pytest.importorskip("torchvision")
    monkeypatch.chdir(tmp_path)
    write_image_model(tmp_path / "model", "qwen2_5_vl")
    squares = write_squares(tmp_path / "squares", 8, sizes=((64, 64), (16, 16)))
    words = ["--model.config", "null", "--model.name_or_path", "model", "--device", "h100"]
    words += ["--data.cache_dir", str(tmp_path / "cache"), "--data.packing", "false"]

    capsys.readouterr()

    def activations(source: str, *more: str) -> int:
        size = plan(*words, "--data.source", source, *more)["best"]["device_bytes"]["activations"]
        assert isinstance(size, int)
        return size

    text = activations("missing.jsonl")
    alone = activations("missing.jsonl", "--data.images", "true")
    small = activations("missing.jsonl", "--data.images", "true", "--data.image_max_pixels", "256")
    assert text < small < alone
    assert activations(str(squares)) == alone
    data = ["--data.source", str(squares), "--data.seq_len", "64", "--data.packing", "false"]
    words_of_run = [*words[2:4], *words[6:8], *data, "--output_dir", "run", "--backend", "cpu"]
    assert train([*words_of_run, "--show-data", "1"]) == 0  # which tokenizes the data
    capsys.readouterr()
    assert activations(str(squares)) > alone  # a conversation has two images


def test_plan_reports_run_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outage = RunError("data.source: s3://b/a.jsonl: the store is away; run the command again")
    monkeypatch.setattr("portable.planner.cli.run_command", Mock(side_effect=outage))
    assert main([]) == RUN_ERROR
    assert capsys.readouterr().err == f"error: {outage}\n"
