"""Graphs that are traced without values equal the graphs that a run compiles."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.unknown_fields import UnknownFieldSet

from portable.config import RunConfig
from portable.run.rank import run_rank
from portable.tpu.compile.hlo import HloModule
from portable.tpu.compile.messages import xla_messages
from portable.tpu.compile.trace import ANSWER_FILE, trace_graphs
from portable.tpu.xla.sharding import ShardingRules
from tests.portable.data_support import write_jsonl
from tests.portable.test_preferences import PAIRS, pairs
from tests.runs import TINY_MODEL, configured
from tests.tpu.test_parity import MODELS
from tests.xla import QUICK, XlaPool

DEVICES = 4
ONE_LAYER = {**TINY_MODEL, "num_hidden_layers": 1}
# Fields of an instruction that the compiler fills in or that only name things.
_NAMES = ("name", "metadata", "id", "operand_ids", "called_computation_ids")
_UNREAD = {50, 51, 58, 82}
CASES: dict[str, dict[str, Any]] = {
    "accumulated": {
        "precision": "bf16",
        "memory__activation_checkpointing": "full",
        "model__config": {**ONE_LAYER, "attention_dropout": 0.1},
        "train__global_batch_size": 16,
    },
    "one graph": {
        "strategy": "shard_grad_op",
        "train__optimizer": "adafactor",
        "train__global_batch_size": 8,
        "data__packing": "documents",
        "data__eval_fraction": 0,
        "model__config": ONE_LAYER,
    },
    "pairs": {**PAIRS, "data__eval_fraction": 0, "model__config": ONE_LAYER},
    "targets of another length": {
        **MODELS["t5"],
        "data__target_seq_len": 16,
        "data__eval_fraction": 0,
        "train__global_batch_size": 8,
    },
}


def run(config: RunConfig) -> int:
    return run_rank("xla", config)


def traced(config: RunConfig, folder: Path) -> list[str]:
    from portable.tpu.xla.tracing import record_graphs

    return [graph["name"] for graph in record_graphs(config, folder, "CPU")]


@pytest.mark.parametrize("case", CASES)
def test_traced_graphs_equal_compiled_graphs(case: str, tmp_path: Path, corpus: Path, xla: XlaPool) -> None:
    settings = {"checkpoint__export": False, **CASES[case], "train__steps": 2, "train__micro_batch_size": 2}
    if case == "pairs":
        settings |= {"train__global_batch_size": 8, "data__format": "preference"}
        corpus = write_jsonl(tmp_path / "pairs.jsonl", pairs(40))
    config = configured(tmp_path / "run", corpus, backend="xla", log__sample_tokens=0, **settings)
    dumped, folder = tmp_path / "dumped", tmp_path / "traced"
    folder.mkdir()
    dump = f"{QUICK} --xla_dump_to={dumped} --xla_dump_hlo_as_proto --xla_dump_hlo_module_re=SyncTensors"
    assert xla.run(DEVICES, run, config, environment={"XLA_FLAGS": dump}) == 0
    names = xla.run(DEVICES, traced, config, folder, environment={"XLA_HLO_DEBUG": "1"})
    assert names == (["micro-batch", "update", "evaluation"] if case == "accumulated" else ["step"])
    compiled = [path.read_bytes() for path in dumped.glob("*before_optimizations.hlo.pb")]
    theirs = [identity(xla_messages.HloProto.FromString(one).hlo_module) for one in compiled]
    ours = {name: identity((folder / f"{name}.hlo.pb").read_bytes()) for name in names}
    assert {name: found in theirs for name, found in ours.items()} == dict.fromkeys(names, True)
    # The run compiles no other graph, except for the reference's values of all pairs before training.
    assert len(theirs) == len(names) + (case == "pairs")
    updated = ours["update" if case == "accumulated" else "step"]
    assert len(updated[1]) > 2 * 12  # donated: parameters, their state, the counters


def identity(module: bytes) -> tuple[str, list[int]]:
    """Return a hash of the computation of a module, and the parameters that it donates."""
    found = xla_messages.HloModuleProto.FromString(module)
    computations = {one.id: one for one in found.computations}
    known: dict[int, str] = {}

    def computation(number: int) -> str:
        if number not in known:
            values: dict[int, str] = {}
            shapes = {each.id: str(each.shape) for each in computations[number].instructions}
            for instruction in computations[number].instructions:
                operands = [values[operand] for operand in instruction.operand_ids]
                # torch_xla writes some conversions of a type to itself in only one of two equal graphs.
                is_convert = instruction.opcode == "convert"
                if is_convert and shapes[instruction.id] == shapes[instruction.operand_ids[0]]:
                    values[instruction.id] = operands[0]
                    continue
                called = [computation(other) for other in instruction.called_computation_ids]
                values[instruction.id] = digest(repr((fields(instruction), operands, called)))
            known[number] = values[computations[number].root_id]
        return known[number]

    donated = [entry.parameter_number for entry in found.buffer_donor.entries]
    return computation(found.entry_computation_id), sorted(donated)


def fields(instruction: Any) -> list[Any]:
    """Return the fields of an instruction without its names."""
    read = [(one.name, str(value)) for one, value in instruction.ListFields() if one.name not in _NAMES]
    others = [(one.field_number, one.data) for one in UnknownFieldSet(instruction)]
    return [*sorted(read), *sorted((key, data) for key, data in others if key not in _UNREAD and data)]


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


@pytest.mark.xla
@pytest.mark.parametrize("looped", [False, True])
def test_trace_needs_no_memory_for_model(looped: bool, tmp_path: Path, corpus: Path) -> None:
    """The model has a billion parameters, and a run would need 12 bytes per parameter."""
    large = {
        **TINY_MODEL,
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    }
    settings = {"data__seq_len": 4096, "train__global_batch_size": 16, "train__micro_batch_size": 1}
    settings |= (
        {"xla__scan_layers": True, "log__sample_tokens": 0, "data__eval_fraction": 0} if looped else {}
    )
    config = configured(
        tmp_path / "run", corpus, backend="xla", precision="auto", model__config=large, **settings
    )
    found = trace_graphs(config, 16, tmp_path)
    assert [graph.name for graph in found] == (["step"] if looped else ["step", "evaluation", "generation"])
    assert {graph.num_devices for graph in found} == {16}
    assert found[0].num_donated_parameters >= 3 * (11 if looped else 146)
    assert json.loads((tmp_path / ANSWER_FILE).read_text())["host_bytes"] < 2 << 30
    step = found[0].hlo_path.read_bytes()
    assert b"modeling_llama.py" in step  # where operations come from
    sharded = entry_parameter_bytes(step, devices=16)
    parameters = 1_235_814_400
    assert sharded == pytest.approx(12 * parameters / 16, rel=0.01)
    instructions = [i for c in HloModule(step).computations.values() for i in c.instructions]
    shapes = {
        array.dimensions for i in instructions for array in i.result_arrays if array.element_type == "pred"
    }
    assert (16, 1, 4096, 4096) not in shapes  # no mask for each sequence
    # The backward pass waits for the loss, and so do tokens and labels: all behind one barrier.
    barriers = [[a.dimensions for a in i.result_arrays] for i in instructions if i.opcode == "opt-barrier"]
    assert [(), (), (16, 4096), (16, 4096)] in barriers


def entry_parameter_bytes(module: bytes, devices: int) -> int:
    """Bytes of a module's parameters on one device."""
    total = 0
    for instruction in HloModule(module).entry.instructions:
        if instruction.opcode == "parameter":
            unread = {one.field_number: one.data for one in UnknownFieldSet(instruction.message)}
            tiled = unread.get(40, b"").startswith(b"\x08\x03")  # a sharding of type OTHER
            total += instruction.result_bytes // (devices if tiled else 1)
    return total


def test_sharding_rules_shard_untied_head_like_embedding(tmp_path: Path, corpus: Path) -> None:
    """Otherwise, the optimizer's broadcasts for both would be sent between the devices."""
    rules = ShardingRules(configured(tmp_path, corpus, backend="xla"), 4)
    assert rules.choose_shard_dim("model.embed_tokens.weight", [384, 48]) == 1
    assert rules.choose_shard_dim("model.layers.0.mlp.up_proj.weight", [80, 48]) == 0
    assert rules.choose_shard_dim("lm_head.weight", [384, 48]) == 1
