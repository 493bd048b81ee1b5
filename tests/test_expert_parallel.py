"""expert_parallel_size: the results of expert-parallel ranks equal the results of one rank."""

from __future__ import annotations

import copy
import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from portable.adapters.adapter import build_training_model
from portable.adapters.assemble import inspect_run
from portable.commands.convert import main as convert
from portable.config import RunConfig
from portable.converters import Tensor as StoredTensor
from portable.engines.engine_interface import RankInfo
from portable.engines.experts import register_zero_gradient_hooks
from portable.engines.footprint import compute_footprint, find_gathered_units
from portable.engines.fsdp.footprint import compute_shard_group_size
from portable.engines.fsdp.optimizer_state import fill_local_shard
from portable.engines.fsdp.saving import DcpSaver
from portable.engines.fsdp.sharding import shard_model
from portable.engines.transforms import describe_transforms
from portable.errors import UserError, to_one_line
from portable.model import expert_exchange
from portable.model.build import load_model_config
from portable.model.expert_exchange import find_expert_modules
from portable.model.parameters import get_state_tensors, replace_tensors
from portable.model.regularization import remove_dropout
from portable.model.weight_sources import ComputedTensor
from portable.optim.local_shards import list_shard_blocks, to_local
from portable.planner.memory_model import Cluster
from portable.planner.meta_model import build_inventory
from portable.private.torch_internals import build_interleaved_placement
from tests.engines import Engines
from tests.parity import Beside, loss_and_gradients, off, opened
from tests.promises import record
from tests.ranks import RankPool
from tests.runs import TINY_MODEL, configured, leg, losses
from tests.test_adapters import train_with_peft
from tests.tiny_models import VOCABULARY, tiny_config
from tests.views import assert_same_view, view

TOLERANCE = 2e-6
PEFT_TOLERANCE = 1e-6
ROUTER_LOSS: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
MIXTURE: dict[str, Any] = {**TINY_MODEL, "num_experts_per_tok": 2}
SHARED_EXPERTS: dict[str, Any] = {
    **MIXTURE,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**MIXTURE, "num_local_experts": 8},
    "qwen3_moe": {**MIXTURE, "num_experts": 8, "moe_intermediate_size": 24, "head_dim": 8},
    "deepseek_v3": {
        **SHARED_EXPERTS,
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gpt_oss": {**MIXTURE, "num_local_experts": 8, "head_dim": 8, "sliding_window": 12},
    "glm4_moe": {**SHARED_EXPERTS, "head_dim": 8},
}
ADAPTER: dict[str, Any] = {
    "adapter__type": "lora",
    "adapter__r": 4,
    "adapter__target_modules": ["o_proj"],
    "adapter__target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    "train__learning_rate": 5e-3,
    "train__eps": 1e-4,  # Adam would amplify the rounding of small gradients
}
EXPERTS: dict[str, Any] = {"strategy": "full_shard", "expert_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2": (2, {}),
    "4": (4, {"expert_parallel_size": 4}),
    "2 x 2": (4, {}),
    "HSDP": (4, {"strategy": "hybrid_shard", "fsdp__shard_group_size": 2}),
    "gathered": (4, {"strategy": "shard_grad_op"}),
}
PACKED: dict[str, Any] = {"data__packing": "documents", "train__steps": 12}


def mixture(family: str, variant: str = "", **changed: Any) -> dict[str, Any]:
    """Return the settings of a model.

    Args:
        family: Key of :data:`FAMILIES`.
        variant: ``few`` for two experts, so that two ranks share an expert. ``adapter`` for an adapter of the
            experts.
        changed: Changes of the model config.
    """
    changed |= {"num_local_experts": 2} if variant == "few" else {}
    model = {"model__config": {**FAMILIES[family], **changed, "model_type": family}}
    return {**model, **ADAPTER} if variant == "adapter" else model


PARITY: list[Any] = [
    *((family, layout, {}) for family in FAMILIES for layout in ("2", "4", "2 x 2")),
    # A router loss is nonlinear, so the micro-batches have to be the same: one sequence each.
    *(
        (family, layout, ROUTER_LOSS)
        for family in ("mixtral", "qwen3_moe", "gpt_oss")
        for layout in ("2", "4", "2 x 2")
    ),
]


CHOSEN = ("2 x 2", "4")
"""Layouts of the tests that always run. The others run with ``--all``, because these imply them."""


def exhaustive_unless(chosen: bool) -> Any:
    """Return the marks of a case, which runs only with ``--all`` unless it is chosen."""
    return () if chosen else pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("family", "layout", "router"),
    [pytest.param(*case, marks=exhaustive_unless(case[1] == CHOSEN[bool(case[2])])) for case in PARITY],
)
def test_expert_parallel_losses_equal_one_rank(
    family: str, layout: str, router: dict[str, Any], beside: Beside
) -> None:
    size, settings = LAYOUTS[layout]
    given_settings = {**PACKED, **mixture(family, **router)} | (
        {"train__micro_batch_size": 1} if router else {}
    )
    actual, expected = (
        beside.ranks(size, {**EXPERTS, **given_settings, **settings}),
        beside.one(given_settings),
    )
    assert actual == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)
    record(actual, expected, TOLERANCE)


COMPOSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "HSDP": ("HSDP", "mixtral", {}),
    "gathered": ("gathered", "qwen3_moe", {}),
    "recomputed": ("2", "gpt_oss", {"memory__activation_checkpointing": "full"}),
    "partly recomputed": ("2", "deepseek_v3", {"memory__activation_checkpointing": "selective"}),
    "compiled": ("2", "qwen3_moe", {"compile": True, "compile_backend": "aot_eager"}),
    "update on the host": ("2 x 2", "mixtral", {"memory__offload_optimizer": "cpu"}),
    "weights on the host": ("2 x 2", "mixtral", {"memory__offload_params": "cpu"}),
    "shared sequences": ("2 x 2", "qwen3_moe", {"context_parallel_size": 2}),
    "Muon": ("2 x 2", "qwen3_moe", {"train__optimizer": "muon"}),
    "Muon, few experts": ("2 x 2", "mixtral, few", {"train__optimizer": "muon"}),
    "few experts": ("2 x 2", "gpt_oss, few", {"memory__offload_params": "cpu"}),
    "SGD": ("2", "mixtral", {"train__optimizer": "sgd", "train__learning_rate": 0.1}),
    "average": ("2 x 2", "mixtral", {"train__ema": 0.9, "train__eval_ema": True}),
    "adapter": ("2", "mixtral", {"adapter__type": "lora", "adapter__target_modules": ["q_proj", "v_proj"]}),
    "adapter of experts, recomputed": (
        "2",
        "gpt_oss, adapter",
        {"memory__activation_checkpointing": "full", "adapter__target_modules": []},
    ),
    "adapter of experts, by default": ("2", "mixtral", {"adapter__type": "lora"}),
    "adapter of experts, router loss": (
        "2",
        "mixtral, adapter",
        {
            "train__micro_batch_size": 1,
            "model__config": mixture("mixtral", **ROUTER_LOSS)["model__config"],
        },
    ),
    "adapter of experts, copied": (
        "2",
        "mixtral, adapter",
        {"adapter__target_parameters": None, "adapter__modules_to_save": ["experts"]},
    ),
    "adapter of experts, gathered": ("gathered", "mixtral, adapter", {"adapter__use_rslora": True}),
    "adapter of experts, weights on the host": (
        "2 x 2",
        "qwen3_moe, adapter",
        {"memory__offload_params": "cpu", "train__weight_decay": 0.5},
    ),
    "adapter of experts, compiled": (
        "2",
        "qwen3_moe, adapter",
        {"compile": True, "compile_backend": "aot_eager", "train__ema": 0.9, "train__eval_ema": True},
    ),
    "adapter of experts, update on the host": ("2", "mixtral, adapter", {"memory__offload_optimizer": "cpu"}),
    "one after another": ("2", "glm4_moe", {"model__experts": "eager"}),
    "padded": ("4", "mixtral", {"data__packing": False}),
    "all in one unit": ("2", "mixtral", {"fsdp__auto_wrap_policy": "no_wrap"}),
}
LAYOUT_KEYS = ("memory__", "compile", "context_parallel_size", "fsdp__")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=exhaustive_unless("adapter of experts" not in case)) for case in COMPOSED],
)
def test_expert_parallelism_composes(case: str, beside: Beside) -> None:
    layout, family, own = COMPOSED[case]
    size, settings = LAYOUTS[layout]
    model = mixture(*family.split(", "), num_key_value_heads=4)
    given_settings = {**PACKED, "train__steps": 3, **model, **own}
    alone = {key: value for key, value in given_settings.items() if not key.startswith(LAYOUT_KEYS)}
    actual, expected = beside.ranks(size, {**EXPERTS, **given_settings, **settings}), beside.one(alone)
    assert actual == pytest.approx(expected, rel=TOLERANCE, abs=TOLERANCE)


ADAPTERS: list[tuple[str, str, dict[str, Any]]] = [
    ("mixtral", "2 x 2", {}),
    ("qwen3_moe", "2", {"adapter__use_rslora": True, "adapter__target_modules": []}),
    ("gpt_oss", "2 x 2", {"adapter__target_parameters": ["experts.down_proj"]}),
    (
        "deepseek_v3",
        "4",
        {"adapter__trainable_token_indices": [97, 10]},
    ),
    ("glm4_moe", "2", {"adapter__target_modules": "all-linear"}),
    ("mixtral", "2", {"adapter__r": 1}),
    ("qwen3_moe", "HSDP", {"adapter__r": 3}),
]


@pytest.mark.parametrize(
    ("family", "layout", "own"),
    [pytest.param(*case, marks=exhaustive_unless(case is ADAPTERS[0])) for case in ADAPTERS],
)
def test_adapter_of_experts_equals_peft(
    family: str, layout: str, own: dict[str, Any], beside: Beside, conversations: Path, tmp_path: Path
) -> None:
    """Losses, norms, and the saved adapter equal a loop with only peft on one rank."""
    size, settings = LAYOUTS[layout]
    given_settings = {
        "precision": "fp32",
        "data__packing": "documents",
        "data__seq_len": 64,
        "data__eval_fraction": 0,
        "train__steps": 6,
        "train__global_batch_size": 4,
        "train__dropout": False,
        **mixture(family, "adapter"),
        **own,
    }
    config = configured(tmp_path / "alone", conversations, **given_settings)
    expected, model = train_with_peft(config, 6)
    actual = beside.ranks(size, {**EXPERTS, **given_settings, **settings}, tmp_path / "run")
    values = [value for step in expected for value in step]
    assert actual == pytest.approx(values, rel=PEFT_TOLERANCE)
    record(actual, values, TOLERANCE)
    saved = load_file(tmp_path / "run" / "final" / "adapter_model.safetensors")
    trained = peft.get_peft_model_state_dict(model)
    assert saved.keys() == trained.keys()
    difference = torch.cat([(saved[name] - tensor).flatten() for name, tensor in trained.items()])
    assert float(difference.abs().max()) < PEFT_TOLERANCE


MOVES_AT, ENDS_AT = 6, 12
ENDS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"strategy": "no_shard"}),
    "DDP": (2, {"strategy": "no_shard"}),
    "FSDP2": (3, {"strategy": "full_shard"}),
    "zero2": (2, {"strategy": "zero2"}),
    "zero3": (2, {"strategy": "zero3"}),
    **{name: (size, {**EXPERTS, **settings}) for name, (size, settings) in LAYOUTS.items()},
    "3 x 2": (6, EXPERTS),
}
ADAPTER_MOVES: list[tuple[str, str, str]] = [
    ("2 x 2", "single", "mixtral, adapter"),
    ("zero3", "2", "qwen3_moe, adapter"),
    ("2", "4", "mixtral, adapter"),
    ("HSDP", "FSDP2", "gpt_oss, adapter"),
    ("single", "3 x 2", "glm4_moe, adapter"),
    ("3 x 2", "zero2", "deepseek_v3, adapter"),
]
MOVES: list[tuple[str, str, str]] = [
    ("2", "single", "mixtral"),
    ("2", "4", "mixtral"),
    ("2 x 2", "zero2", "mixtral"),
    ("single", "2", "mixtral"),
    ("HSDP", "FSDP2", "gpt_oss"),
    ("zero3", "2 x 2", "deepseek_v3"),
    ("3 x 2", "DDP", "qwen3_moe"),
    ("single", "3 x 2", "glm4_moe"),
    ("2 x 2", "single", "mixtral, few"),
    ("DDP", "2 x 2", "gpt_oss, few"),
    *ADAPTER_MOVES,
]


class Moves:
    """Runs that stop at :data:`MOVES_AT` or continue until :data:`ENDS_AT`."""

    def __init__(self, engines: Engines, source: Path, folder: Callable[[str], Path]) -> None:
        self._engines, self._source, self._folder = engines, source, folder

    def run(self, end: str, family: str, folder: Path, stop_after: int) -> dict[int, float]:
        """Begin or continue a run on an engine of :data:`ENDS`. Returns the loss of each step so far."""
        size, settings = ENDS[end]
        given_settings = {
            **PACKED,
            "data__seq_len": 64,
            "data__eval_fraction": 0,
            "train__steps": ENDS_AT,
            "train__stop_after": stop_after,
            "train__global_batch_size": 12,
            "checkpoint__every_steps": MOVES_AT,
            **mixture(*family.split(", ")),
            **settings,
        }
        assert self._engines.run(settings["strategy"], size, leg, folder, self._source, given_settings) == 0
        return losses(folder)

    @functools.cache  # noqa: B019 (a fixture of the module)
    def begin(self, end: str, family: str) -> Path:
        """Return the folder of a run that has stopped at :data:`MOVES_AT`."""
        folder = self._folder("begun") / "run"
        self.run(end, family, folder, MOVES_AT)
        return folder

    @functools.cache  # noqa: B019
    def losses_of_one(self, family: str) -> dict[int, float]:
        """Return the losses of an uninterrupted run on one rank."""
        return self.run("single", family, self._folder("alone") / "run", ENDS_AT)


@pytest.fixture(scope="module")
def moves(engines: Engines, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Moves:
    return Moves(engines, conversations, tmp_path_factory.mktemp)


@pytest.mark.parametrize(
    ("start", "end", "family"),
    [pytest.param(*move, marks=exhaustive_unless(move not in ADAPTER_MOVES[1:])) for move in MOVES],
)
def test_expert_parallel_run_moves(start: str, end: str, family: str, moves: Moves, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(moves.begin(start, family), tmp_path / "run"))
    actual, expected = moves.run(end, family, folder, ENDS_AT), moves.losses_of_one(family)
    assert list(actual) == list(expected) == list(range(1, ENDS_AT + 1))
    assert actual == pytest.approx(expected, rel=TOLERANCE)
    record(list(actual.values()), list(expected.values()), TOLERANCE)


def test_expert_parallel_run_resumes_bit_for_bit(moves: Moves, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(moves.begin("2 x 2", "mixtral"), tmp_path / "run"))
    alone = moves.run("2 x 2", "mixtral", tmp_path / "alone", ENDS_AT)
    assert moves.run("2 x 2", "mixtral", folder, ENDS_AT) == alone


@pytest.mark.parametrize("family", FAMILIES)
def test_expert_parallel_checkpoint_and_final_model_equal_one_rank(
    family: str, beside: Beside, tmp_path: Path
) -> None:
    """The converter opens the checkpoint, and transformers loads the final model, by published names."""
    given_settings = {**PACKED, **mixture(family), "train__steps": 2}
    beside.ranks(1, {"strategy": "no_shard", **given_settings}, tmp_path / "single")
    beside.ranks(4, {**EXPERTS, **given_settings}, tmp_path / "experts")
    single, actual = (tmp_path / run / "checkpoints" / "step-000002" for run in ("single", "experts"))
    assert_same_view(view(actual), view(single), 1e-3)
    assert convert([str(actual), str(tmp_path / "converted"), "--optimizer", "--verify"]) == 0
    folders = (tmp_path / "single" / "final", tmp_path / "experts" / "final", tmp_path / "converted")
    names = [set(load_file(folder / "model.safetensors")) for folder in folders]
    assert names[0] == names[1] == names[2]
    tokens = torch.arange(24)[None]
    one_rank, final, converted = (load_strictly(folder)(tokens).logits.detach() for folder in folders)
    assert torch.equal(final, converted)
    assert torch.allclose(final, one_rank, atol=1e-5 * float(one_rank.abs().max()), rtol=0)


def test_adapter_of_experts_loads_and_merges(beside: Beside, tmp_path: Path) -> None:
    """peft loads the final adapter and the converter merges it, with the logits of a run on one rank."""
    base, single, actual = (tmp_path / name for name in ("base", "single", "experts"))
    beside.ranks(1, {"strategy": "no_shard", **PACKED, **mixture("mixtral"), "train__steps": 1}, base)
    source = {"model__config": {}, "model__name_or_path": str(base / "final")}
    given_settings = {**PACKED, **ADAPTER, **source, "train__steps": 3, "train__micro_batch_size": 1}
    beside.ranks(1, {"strategy": "no_shard", **given_settings}, single)
    beside.ranks(4, {**EXPERTS, **given_settings}, actual)
    views = [view(run / "checkpoints" / "step-000003") for run in (actual, single)]
    assert_same_view(views[0], views[1], 1e-3)
    merged = tmp_path / "merged"
    assert convert([str(actual / "final"), str(merged), "--merge-into", str(base / "final")]) == 0
    tokens = torch.arange(24)[None]
    expected, adapted = (
        peft.PeftModel.from_pretrained(load_strictly(base / "final"), run / "final").eval()(tokens).logits
        for run in (single, actual)
    )
    scale = float(expected.detach().abs().max())
    assert float((load_strictly(base / "final")(tokens).logits - expected).abs().max()) > 1e-3 * scale
    for logits in (adapted, load_strictly(merged)(tokens).logits):
        assert torch.allclose(logits, expected, atol=1e-5 * scale, rtol=0)


def save_interleaved_factor(folder: Path) -> int:
    """On one of two ranks, save a LoRA factor. Return how often the slices of its shard were computed."""
    dist.init_process_group("gloo")
    with pytest.MonkeyPatch.context() as patch:
        listed = Mock(wraps=list_shard_blocks)
        patch.setattr("portable.engines.fsdp.saving.list_shard_blocks", listed)
        mesh = init_device_mesh("cpu", (2,))
        part = FACTOR[:, dist.get_rank() :: 2].contiguous()  # 8 blocks of two experts
        placement = build_interleaved_placement(1, 8)
        factor = DTensor.from_local(part, mesh, [placement], shape=FACTOR.shape, stride=FACTOR.stride())
        DcpSaver().save({"factor": factor}, folder, background=False)
        return listed.call_count


FACTOR = torch.arange(48.0).reshape(3, 16)


def test_saving_computes_the_slices_of_a_shard_once(ranks: RankPool, tmp_path: Path) -> None:
    """torch needs milliseconds for the slices of a shard, and a checkpoint has many parts of shards."""
    assert ranks.run(2, save_interleaved_factor, tmp_path) == 1
    loaded = {"factor": torch.zeros_like(FACTOR)}
    dcp_load(loaded, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(loaded["factor"], FACTOR)


def load_strictly(folder: Path) -> Any:
    """Load a model with transformers, and check that its names are complete."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    return model.eval()


def begin_and_list_experts(config: RunConfig) -> list[tuple[set[int], set[int]]]:
    """On a rank, begin a run. Return the experts that each rank has read, and its numbers of experts."""
    experts: set[int] = set()
    read = StoredTensor.read

    def read_and_record(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        if actual := re.search(r"experts\.(\d+)\.", tensor.name):
            experts.add(int(actual[1]))
        return read(tensor, *arguments, **keywords)

    patched: Any = StoredTensor
    patched.read = read_and_record
    try:
        with opened(config) as trial:
            stacks = find_expert_modules(trial.engine.model).values()
            counts = {to_local(stack).shape[0] for module in stacks for stack in module.parameters()}
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, (experts, counts))
            return ranks
    finally:
        patched.read = read


def test_pretrained_experts_are_read_by_the_ranks_that_have_them(
    beside: Beside, ranks: RankPool, conversations: Path, tmp_path: Path
) -> None:
    beside.ranks(1, {"strategy": "no_shard", **mixture("mixtral"), "train__steps": 1}, tmp_path / "single")
    given_settings = {
        **EXPERTS,
        "model__config": {},
        "model__name_or_path": str(tmp_path / "single" / "final"),
    }
    config = configured(tmp_path / "experts", conversations, **given_settings, train__global_batch_size=4)
    parts = ranks.run(4, begin_and_list_experts, config)
    assert parts == [({first, first + 1}, {2}) for first in (0, 4, 2, 6)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DDP": ({"strategy": "no_shard"}, "strategy: no_shard"),
    "ZeRO": ({"strategy": "zero2"}, "strategy: zero2"),
    "backend": ({"backend": "xla"}, "backend: xla"),
    "layers": ({"tensor_parallel_size": 2}, "tensor_parallel_size: 2"),
    "precision": ({"precision": "fp16"}, "precision: fp16"),
    "optimizer": ({"train__optimizer": "adafactor"}, "train.optimizer: adafactor"),
    "search": ({"train__micro_batch_size": "auto"}, "train.micro_batch_size: auto"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_expert_parallelism_rejects_unsupported_settings(case: str, corpus: Path, tmp_path: Path) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(UserError, match=f"{message} does not work with expert parallelism"):
        configured(tmp_path, corpus, **{**EXPERTS, **settings})


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        (
            {"model__config": TINY_MODEL},
            "^expert_parallel_size: LlamaForCausalLM has no experts",
        ),
        (mixture("mixtral", num_local_experts=3), "the 3 experts of MixtralForCausalLM cannot be divided"),
        (
            mixture("gpt_oss", "adapter") | {"adapter__target_parameters": ["experts.down_proj_bias"]},
            "the adapter changes down_proj_bias of GptOssForCausalLM in a way that does not work",
        ),
        (mixture("mixtral", "adapter") | {"train__optimizer": "muon"}, "muon needs complete matrices"),
    ],
)
def test_expert_parallelism_rejects_unsupported_models(
    given_settings: dict[str, Any], message: str, corpus: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        inspect_run(configured(tmp_path, corpus, **EXPERTS, **given_settings))


def test_expert_parallel_ranks_divide_a_copy_of_the_parameters() -> None:
    config = RunConfig(strategy="hybrid_shard", expert_parallel_size=2)
    assert compute_shard_group_size(config, 8, 4) == 4
    with pytest.raises(UserError, match=r"^expert_parallel_size: the 3 ranks .* groups of 2; use a divisor"):
        compute_shard_group_size(config, 6, 3)
    with pytest.raises(UserError, match=r"^expert_parallel_size: .* on a single rank.* multiple of 2 ranks"):
        compute_shard_group_size(config, 1, 1)


def test_dry_run_lists_the_exchange_of_tokens(corpus: Path, tmp_path: Path) -> None:
    config = configured(tmp_path, corpus, **EXPERTS, **mixture("mixtral"))
    assert "exchanged tokens of experts" in describe_transforms(inspect_run(config).assembled.model, config)


def count_exchanged_bytes(config: RunConfig) -> float:
    """On a rank, take a step. Return the bytes that a rank sends on average to others for its experts."""
    sent = 0
    exchange = dist.all_to_all_single

    def exchange_and_count(output: torch.Tensor, rows: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        nonlocal sent
        if rows.is_floating_point():
            sizes, rank = arguments[1], dist.get_rank(keywords["group"])
            others = sum(size for index, size in enumerate(sizes) if index != rank)
            sent += others * rows[:1].numel() * rows.element_size()
        return exchange(output, rows, *arguments, **keywords)

    with opened(config) as trial, pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", exchange_and_count)
        trial.step()
        total = torch.tensor(float(sent))
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_planned_bytes_of_exchange_match_a_step(
    recompute: str, ranks: RankPool, conversations: Path, tmp_path: Path
) -> None:
    """Tokens are distributed almost equally: the plan assumes that they are."""
    config = configured(
        tmp_path,
        conversations,
        **{**EXPERTS, **PACKED, **mixture("glm4_moe", n_group=1), "data__seq_len": 64},
        train__global_batch_size=8,
        train__micro_batch_size=4,
        memory__activation_checkpointing=recompute,
    )
    actual = ranks.run(2, count_exchanged_bytes, config)
    model = build_training_model(load_model_config(config.model), config)

    def plan(size: int) -> float:
        changed = config.replaced({"expert_parallel_size": size})
        inventory = build_inventory(model, config.train, find_gathered_units(model, config))
        return compute_footprint(inventory, changed, Cluster(2, 2)).links.per_pass

    stacks = [p for module in find_expert_modules(model).values() for p in module.parameters()]
    gathers = 4 * sum(stack.numel() for stack in stacks) * 3 / 2  # two gathers, and a reduction
    assert actual == pytest.approx(plan(2) - (plan(1) - gathers), rel=0.15)


def beside_one_rank(types: list[str]) -> dict[str, str]:
    """On one of two ranks, return the difference from one rank, or the error, by type."""
    dist.init_process_group("gloo")
    try:
        return {model_type: _beside_one(model_type) for model_type in types}
    finally:
        dist.destroy_process_group()


def _beside_one(model_type: str) -> str:
    torch.manual_seed(0)
    try:
        config = AutoConfig.for_model(**tiny_config(model_type, "causal-lm"))
        plain = AutoModelForCausalLM.from_config(config).float().train()  # some compute otherwise then
        remove_dropout(plain)
        expert_exchange.check_expert_parallel_support(plain, 2)
        batch = {name: torch.randint(5, VOCABULARY, (2, 32)) for name in ("input_ids", "labels")}
        model = copy.deepcopy(plain)
        replace_tensors(model, lambda _, p: torch.nn.Parameter(p.to("meta")), lambda _, buffer: buffer)
        settings = RunConfig(strategy="full_shard", expert_parallel_size=2, precision="fp32")
        register_zero_gradient_hooks(model)
        expert_exchange.install_expert_exchange(model)
        shard_model(model, settings, RankInfo(torch.device("cpu"), dist.get_rank(), 2, 2))
        values = get_state_tensors(plain)
        for name, tensor in get_state_tensors(model).items():
            fill_local_shard(tensor, ComputedTensor.from_tensor(values[name].detach()))
        loss, *gradients = loss_and_gradients(model, batch)
        # Both ranks have the same batch, and the gradients are summed over the ranks.
        return off([loss, *(gradient / 2 for gradient in gradients)], loss_and_gradients(plain, batch))
    except Exception as error:
        return to_one_line(error)


_COMPARED = """
afmoe aria_text axk1 axk2 cohere2_moe deepseek_v2 deepseek_v4 dots1 dots3_note_text ernie4_5_moe exaone_moe
flex_olmo flint glm4_moe glm4_moe_lite gpt_oss granitemoe granitemoe_swa granitemoeshared hy_v3 hy_v4
inkling2_loop_text inkling2_text inkling_text kimi_linear kolibri1 laguna lara_mini lfm2_moe mellum
mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text mixtral olmoe phimoe qwen2_moe qwen3_5_moe
qwen3_5_moe_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text sarvam_moe solar_open zaya
"""
COMPARED = _COMPARED.split()
"""Model types whose gradients equal the gradients of one rank."""


@pytest.mark.parametrize(
    "types",
    [
        ["deepseek_v4", "glm4_moe", "gpt_oss", "minimax_m2", "qwen3_5_moe", "zaya"],
        pytest.param(COMPARED, marks=pytest.mark.exhaustive),
    ],
    ids=["some", "all"],
)
def test_expert_parallel_types_equal_one_rank(types: list[str], ranks: RankPool) -> None:
    actual = ranks.run(2, beside_one_rank, types, timeout=900)
    assert {name: why for name, why in actual.items() if why} == {}


@pytest.mark.parametrize("model_type", ["llama", "llama4_text", "jetmoe"])
def test_expert_parallelism_rejects_other_layouts_of_experts(model_type: str) -> None:
    config = AutoConfig.for_model(**tiny_config(model_type, "causal-lm"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UserError, match=r"^expert_parallel_size: .* has no experts in stacked tensors"):
        expert_exchange.check_expert_parallel_support(model, 2)
