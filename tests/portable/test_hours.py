"""`portable-plan`'s hours beside those of published runs, and what it makes of prices."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from portable.backend import Diagnostics
from portable.cli import main as train
from portable.config import load_config
from portable.engines.backend import TorchBackend
from portable.model.build import build_model, model_config
from portable.model.flops import flops_per_token
from portable.planner.cli import main
from portable.planner.device_lookup import named
from portable.planner.hours import hours_at
from tests.promises import record
from tests.runs import SENTENCE, flags, tiny

pytestmark = pytest.mark.usefixtures("passes_known")
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
    found = model_config(config.model)
    return flops_per_token(build_model(found, config.model), found, seq_len)


def planned(device: str, model: str, seq_len: int, tokens: float) -> float:
    hours = hours_at(named(device), 1, "bf16", flops(model, seq_len) * tokens)
    assert hours is not None
    return hours.likely


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: f"{run[0]} on {run[1]}")
def test_hours_are_within_a_quarter_of_published_ones(run: tuple[Any, ...]) -> None:
    _, device, model, seq_len, tokens, hours, _ = run
    assert planned(device, model, seq_len, tokens) == pytest.approx(hours, rel=0.25)
    record([planned(device, model, seq_len, tokens)], [hours], 0.25)


SMALL = json.dumps(
    {"model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2}
    | {"intermediate_size": 160, "num_attention_heads": 4, "max_position_embeddings": 128}
)
GIVEN = ["--model.config", SMALL, "--data.seq_len", "64", "--train.global_batch_size", "8"]
Plan = Callable[..., Any]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """The plan of a small model: parsed, or in words."""

    def run(*words: str, told: bool = False) -> Any:
        assert main([*GIVEN, *words] if told else [*GIVEN, *words, "--json"]) == 0
        said = capsys.readouterr().out
        return said if told else json.loads(said)

    return run


def test_the_plan_has_hours_their_source_and_the_price(plan: Plan) -> None:
    words = ("--train.steps", "1000000", "--device", "h100", "--devices", "8", "--price-per-hour", "2.50")
    found = plan(*words)
    assert found["tokens"] == 1_000_000 * 8 * 64
    least, most = found["hours"]
    assert 0 < least <= most and found["share_of_peak"] == [0.31, 0.39]
    assert found["cost"] == pytest.approx([least * 8 * 2.5, most * 8 * 2.5])
    told = " ".join(plan(*words, told=True).split())
    assert "minutes for 512,000,000 tokens" in told and "Llama 3, SmolLM3, torchtitan" in told
    assert "at 2.5 an hour for each device" in told
    assert plan("--train.steps", "9", "--device", "h100", "--strategy", "zero3")["cost"] is None


def test_slow_links_bound_the_hours(plan: Plan) -> None:
    words = ("--train.steps", "1000", "--device", "4090")
    alone, two = plan(*words), plan(*words, "--devices", "2")
    sent = two["best"]["communication_bytes"] * 1000 / 3.2e10 / 3600
    assert two["hours"] == pytest.approx([max(hours / 2, sent) for hours in alone["hours"]])
    assert two["hours"][0] == pytest.approx(sent)


def test_epochs_count_the_data_that_is_there(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text(SENTENCE * 640)
    words = ["--train.epochs", "2", "--train.steps", "null", "--device", "l4", "--data.source"]
    steps = 2 * (len(SENTENCE) * 640 // 64) // 8
    told = " ".join(plan(*words, "texts.txt", told=True).split())
    assert f"for at most {steps * 8 * 64:,} tokens" in told and "no run on this device" in told
    assert plan(*words, "not/here.txt")["hours"] is None


def test_a_dry_run_ends_with_the_hours(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device whose memory and peak are known."""
    monkeypatch.setattr(Diagnostics, "driver_memory", lambda _: (0, 1 << 34))
    monkeypatch.setattr(TorchBackend, "peak_flops", lambda *_: 1e9)
    settings = tiny(tmp_path / "run", corpus, train__steps=1000, precision="bf16")
    assert train([*flags(settings), "--dry-run"]) == 0
    last = capsys.readouterr().out.splitlines()[-1].split(None, 1)
    assert last[0] == "time" and "192,000 tokens: 30% to 50% of the peak" in last[1]


def test_a_budget_sorts_machines_by_cost(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--train.steps", "100000000", "--budget", "20"]
    rows = plan(*words, "--price-per-hour", "h100=2.50,l4=0.70,v6e=2.7")
    assert {row["device"] for row in rows} == {"h100", "l4", "v6e"}
    assert [sum(row["cost"]) for row in rows] == sorted(sum(row["cost"]) for row in rows)
    assert [row["within_budget"] for row in rows] == [row["cost"][1] <= 20 for row in rows]
    few = plan(*words, "--price-per-hour", "h100=2.50,l4=0.70", "--budget", "0.1", told=True)
    first, second = few.splitlines()
    assert "1 x h100" in first + second and "more than 0.1" in second
    # SkyPilot's catalog, where it is installed
    prices = {"A100-80GB": [(12.0, 8)], "H100": [(3.0, 1), (16.0, 8)]}
    offers = {
        name: [SimpleNamespace(price=price, accelerator_count=count) for price, count in of]
        for name, of in prices.items()
    }
    sky, catalog = ModuleType("sky"), ModuleType("sky.catalog")
    sky.__spec__ = ModuleSpec("sky", None)
    vars(catalog)["list_accelerators"] = lambda gpus_only: offers
    monkeypatch.setitem(sys.modules, "sky", sky)
    monkeypatch.setitem(sys.modules, "sky.catalog", catalog)
    found = {row["device"]: row for row in plan(*words)}
    assert found.keys() == {"h100", "a100-80"}
    assert found["h100"]["cost"][0] == pytest.approx(2.0 * found["h100"]["hours"][0])


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (["--budget", "many"], "--budget: 'many' is not an amount"),
        (["--budget", "50"], "--budget: no prices; give --price-per-hour"),
        (["--budget", "50", "--price-per-hour", "2.50"], "write 2.50 beside --device"),
        (["--price-per-hour", "h101=2"], "--price-per-hour: unknown device 'h101'; did you mean h100?"),
        (["--device", "h100", "--price-per-hour", "2,50"], "h100 has two prices"),
        (["--device", "h100", "--price-per-hour", "l4=2"], "no price of the device that is planned for"),
        (["--budget", "5", "--price-per-hour", "h100=2", "--devices", "8"], "--devices: has no effect with"),
    ):
        assert main([*GIVEN, *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ") and expected in line
