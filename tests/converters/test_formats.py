"""Tests of every format: it equals the live run that wrote it, and errors name inconsistent files.

Random damage is in `test_mutations.py`, conversions into every other format in `test_matrix.py`. A format is
added by rows here, and by samples in `samples.py`.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from portable.converters import open_checkpoint
from tests.converters.compare import FileCache, assert_model, assert_optimizer, load, refused, rewrite

XLA = pytest.mark.xla

# -- the live run --------------------------------------------------------------------------------------------

# fixture -> checkpoint -> (reference, ranks; the step of a DeepSpeed run, whose reference leaves it out)
_WRITERS = ("ours", "accelerate", "titan", "lightning", "app")
TRUTHS: dict[str, dict[str, Any]] = {
    "written": {
        f"{run}-{writer}": (
            f"{run}-{writer}" + "+pytorch_model_fsdp_0" * (writer == "accelerate"),
            int(run[-1]),
            None,
        )
        for run in ("plain1", "ddp2", "fsdp2", "fsdp3")
        for writer in _WRITERS
    },
    "written_ranks": {
        run: (run, int(run[-1]), None)
        for run in (
            *("fsdp2-2", "fsdp2-3", "hybrid-4", "tensor-parallel-4", "meshes-4"),
            *("fsdp1-mesh-3", "fsdp1-plain-3", "fsdp1-originals-3"),
        )
    },
    "written_items": {
        f"{run}{form}": (f"{run}{form}", int(run[-1]), None)
        for run in ("fsdp2-1", "fsdp2-3", "tensor-parallel-4")
        for form in ("", "-safetensors")
    },
    "written_xla": {
        run: (run, ranks, None)
        for run, ranks in (
            *(("flat3", 3), ("flat4", 4), ("each4", 4), ("each1", 1), ("dim3", 3), ("trainer3", 3)),
            ("spmd", 1),
        )
    },
    "deepspeed_written": {
        f"{run}/global_step2": (f"{run}.2", int(run[-1]), 2)
        for run in (
            *("zero1-fp32-2", "zero1-bf16-3", "zero2-1", "zero2-bf16-2", "zero2-fp32-3", "zero2-4"),
            *("zero3-1", "zero3-fp32-2", "zero3-bf16-3", "zero3-4", "hpz-4", "elastic-2", "sub-groups-3"),
            *("fp32-accumulation-2", "fp32-accumulation-4", "offload-zero2-2", "offload-zero3-2"),
            *("round-robin-3", "aligned-3", "round-robin-aligned-3"),
            *("zero0-1", "zero0-fp32-2", "zero0-bf16-2"),
        )
    }
    | {"accelerate": ("accelerate.1", 2, 1)},
    "deepspeed_parallel": {
        run: (f"{run}.2", 4, 2)
        for run in (
            *("pipeline-fp32-4", "pipeline-bf16-4", "experts-zero1-4", "experts-zero2-4"),
            *("autotp-zero1-4", "autotp-zero2-4", "autotp-zero3-4"),
        )
    },
    "written_universal": {
        f"{run}/global_step2_universal": (f"{run}.2", 0, 2)
        for run in ("zero1-fp32-2", "zero2-bf16-2", "zero3-fp32-2", "sub-groups-3")
    },
}
FORMATS = {
    "written": "dcp",
    "written_ranks": "fsdp-ranks",
    "written_items": "torch-checkpointing",
    "written_xla": "xla-fsdp",
    "deepspeed_written": "deepspeed",
    "deepspeed_parallel": "deepspeed",
    "written_universal": "deepspeed-universal",
}


@pytest.mark.parametrize(
    ("fixture", "name"),
    [
        pytest.param(fixture, name, marks=XLA if fixture == "written_xla" else [])
        for fixture, names in TRUTHS.items()
        for name in names
    ],
)
def test_format_equals_live_run(fixture: str, name: str, request: pytest.FixtureRequest) -> None:
    base: Path = request.getfixturevalue(fixture)
    reference, ranks, step = TRUTHS[fixture][name]
    checkpoint = open_checkpoint(base / name)
    assert checkpoint.format == ("dcp" if name == "spmd" else FORMATS[fixture])
    assert_model(checkpoint, load(base / f"{reference}.ref.pt")["model"])
    assert_optimizer(checkpoint, load(base / f"{reference}.ref.pt"), step)
    assert checkpoint.metadata.get("world_size", 0) == ranks
    if step is not None:
        assert checkpoint.metadata["step"] == checkpoint.counters["global_steps"] == step
    stage = re.search(r"zero([0-3])", name)
    if stage is not None:
        assert checkpoint.metadata["zero_stage"] == int(stage[1])


@pytest.mark.parametrize("name", TRUTHS["written"])
def test_dcp_index_equals_live_run(name: str, written: Path, tmp_path: Path) -> None:
    """The second process of a node maps the index of the first one, and opens no metadata."""
    reference, ranks, _ = TRUTHS["written"][name]
    opened = list[str]()
    is_counting = [True]

    def note(event: str, arguments: Any) -> None:
        if is_counting and event == "open" and str(arguments[0]).startswith(str(written)):
            opened.append(Path(str(arguments[0])).name)

    sys.addaudithook(note)
    folders = 2 if name.endswith("accelerate") else 1
    for _ in range(2):
        checkpoint = open_checkpoint(written / name, build_once=FileCache(tmp_path))
        assert_model(checkpoint, load(written / f"{reference}.ref.pt")["model"])
        assert_optimizer(checkpoint, load(written / f"{reference}.ref.pt"))
        assert checkpoint.metadata.get("world_size", 0) == ranks
    is_counting.clear()
    assert opened.count(".metadata") == folders and len(list(tmp_path.iterdir())) == folders


# -- inconsistent files
# ----------------------------------------------------------------------------------------------------


class Swap(str):
    """The file of the same checkpoint with which a file is swapped."""


Change = Any
"""A function of the content, the bytes to write, a file to copy or to swap with, or None to delete it."""
FOURTH = "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"
OPTIM = "zero_pp_rank_1_mp_rank_00_optim_states.pt"


class Evil:
    """Object that would open a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return open, ("/nonexistent/owned", "w")


def optim(content: Any) -> Any:
    return content["optimizer_state_dict"]


def state(content: Any) -> Any:
    return content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]


def reverse(shapes: Any) -> None:
    for index, group in enumerate(shapes):
        shapes[index] = dict(reversed(group.items()))


def piece(content: Any) -> Any:
    """Return the entry of AutoTP's map for a parameter's part on the second rank."""
    table = content["universal_checkpoint_info"]["affine_map"]["params"]
    return table[r"^odd_proj\.weight$"]["ranks"][1]["pieces"][0]


MP0, MP1 = ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt")


UP = "_fsdp_wrapped_module.layers.0._fsdp_shard_FSDP_SHARD_SEPARATOR__fsdp_wrapped_module" + "".join(
    f"_FSDP_SHARD_SEPARATOR_{part}" for part in ("_fpw_module", "up", "weight")
)
HEAD, SUFFIX = UP.rsplit(".", 1)


def shard(values: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = values["shard_metadata"]["shard_info"][HEAD][SUFFIX]
    return table


def chunk(metadata: Any, name: str) -> Any:
    """Return the entry of DCP's metadata for a chunk of a tensor."""
    return next(place for at, place in metadata.storage_data.items() if at.fqn == name).__dict__


def described(metadata: Any) -> Any:
    return metadata.state_dict_metadata[WEIGHT]


def tensors_of(table: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of the model in torch_checkpointing's list."""
    tensors: dict[str, Any] = table["metadata"]["model"]["nested_path_to_metadata"]
    return tensors


def group_of(table: dict[str, Any]) -> list[Any]:
    groups: list[Any] = tensors_of(table)['["brain.weight"]']
    return groups


def layout_of(table: dict[str, Any]) -> dict[str, Any]:
    layout: dict[str, Any] = group_of(table)[0]["sharding_metadata"]["data"]
    return layout


def name_file(table: dict[str, Any], name: str) -> None:
    """Return the name of the file of the model on rank 1."""
    layout = {"file_path": name, "serialization_format": {"type": "TorchSerialization"}}
    table["metadata"]["model"]["rank_to_layout_info"][1] = layout


def args(**settings: Any) -> Callable[[Any], None]:
    """Change settings of Megatron's parser."""
    return lambda content: vars(content["args"]).update(settings)


WEIGHT, MOMENT = "model.brain.weight", "optim.state.brain.weight.exp_avg"
BOTH = "('layers', '0', 'both')"
UNIVERSAL = "global_step2_universal"
SHARDS = [f"shard-{number:05d}-model-00001-of-00001.safetensors" for number in (1, 2, 3)]
MEGATRON, NEIGHBOR, LAST = (
    f"iter_0000007/mp_rank_{rank}/model_optim_rng.pt" for rank in ("00_000", "01_000", "01_001")
)
LIES: dict[str, dict[tuple[str, str], list[tuple[Change, str]]]] = {
    "written": {
        ("fsdp3-ours", ".metadata"): [
            (lambda m: chunk(m, WEIGHT).update(relative_path="../step/__0_0.distcp"), "points outside"),
            (lambda m: chunk(m, WEIGHT).update(relative_path="/etc/passwd"), "points outside"),
            (lambda m: chunk(m, WEIGHT).update(length=1 << 62), "truncated"),
            (
                lambda m: described(m).__dict__.update(size=torch.Size((1 << 60, 1 << 60))),
                "would have more than",
            ),
            (lambda m: chunk(m, WEIGHT).update(chunk(m, MOMENT)), "overlap in a file"),
            (lambda m: described(m).chunks.pop(), "missing"),
            (lambda m: described(m).chunks.append(described(m).chunks[0]), "overlap"),
            (lambda m: m.planner_data.update({WEIGHT: ("model", "brain.bias")}), "does not match"),
            (lambda m: chunk(m, WEIGHT).update(transform_descriptors=["stream.zstd"]), "compressed"),
            (lambda m: m.__dict__.update(storage_meta=Evil()), r"io\.open"),
        ],
        # torch's consolidation writes zeros for a missing shard without an error
        ("safetensors/consolidated", f"sharded/{SHARDS[2]}"): [(None, "a shard is missing")],
        ("safetensors/consolidated", "sharded/shard-00001-model-00003-of-00001.safetensors"): [
            (
                f"safetensors/consolidated/sharded/{SHARDS[0]}",
                "or a model number outside 1 to 1; remove these files",
            )
        ],
    },
    "deepspeed_written": {
        ("zero2-fp32-3", OPTIM): [
            (lambda c: c.update(ds_version="0.0.1"), "ds_version"),
            (lambda c: c["ds_config"].update(seed=1), "ds_config"),
            (lambda c: optim(c).update(group_paddings=[4]), "differ in size"),
            (lambda c: optim(c)["param_slice_mappings"][0].popitem(), "param_slice_mappings"),
            (lambda c: state(c)["step"].add_(1), "step"),
            (lambda c: state(c).update(exp_avg=torch.zeros(7)), "lengths"),
            (lambda c: state(c).update(exp_avg=state(c)["exp_avg_sq"]), "two parameter groups overlap"),
            (lambda c: optim(c)["base_optimizer_state"]["param_groups"][0].update(lr=1.0), "param_groups"),
            (lambda c: c.update(evil=Evil()), r"io\.open"),
        ],
        ("zero2-fp32-3", OPTIM.replace("rank_1", "rank_0")): [
            (lambda c: state(c).update(exp_avg=None), "the type of 'exp_avg' differs"),
        ],
        ("zero2-fp32-3", MP0): [
            (
                lambda c: c.update(dp_world_size=4),
                "data-parallel ranks is 4 here, but 3 in the optimizer states",
            ),
            (
                lambda c: reverse(c["param_shapes"]),
                "the position of .* contradicts|param_slice_mappings and param_shapes contradict",
            ),
            (lambda c: c["module"]["big.bias"].add_(1), "big.bias|is not"),
        ],
        ("zero3-fp32-2", OPTIM): [(lambda c: optim(c).update(partition_count=3), "partition_count")],
        ("zero3-fp32-2", OPTIM.replace("optim", "model")): [
            (lambda c: reverse(c["param_shapes"]), "param_shapes"),
            (lambda c: c.update(global_steps=9), "global_steps"),
            (lambda c: c["frozen_param_fragments"].popitem(), "frozen"),
        ],
        ("zero3-fp32-2", "*model_states.pt"): [
            (lambda c: c.update(global_steps=9), "records step 9, but the optimizer states are at step 2")
        ],
        ("zero3-fp32-2", "*"): [
            (
                lambda c: c["ds_config"]["zero_optimization"].update(mics_shard_size=4),
                "MiCS.* only supported with ZeRO-3",
            )
        ],
        ("zero2-fp32-3", "*optim_states.pt"): [
            (
                lambda c: optim(c).update(partition_count=1 << 60),
                r"ranks are missing .the first missing rank is 3",
            )
        ],
        ("zero2-4", "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"): [
            (None, "states of 1 of the 4 ranks are missing .the first missing rank is 3")
        ],
        ("zero2-bf16-2", FOURTH): [
            (f"zero2-4/global_step2/{FOURTH}", "the number of ranks that saved the other files is only 2")
        ],
        ("zero2-fp32-3", "mp_rank_01_model_states.pt"): [(b"", "tensor-parallel rank 1")],
        ("zero0-bf16-2", MP0): [
            (
                lambda c: optim(c["optimizer"]).update(param_groups=[0]),
                "parameter groups of the optimizer do not match fp32_groups",
            ),
            (lambda c: c.update(optimizer=[c["optimizer"]]), "has an unknown format; export"),
            (lambda c: c["optimizer"]["fp32_groups"].clear(), "fp32 master weights, has an unknown format"),
            (
                lambda c: c["optimizer"].pop("fp32_groups"),
                "may contain the fp32 master weights, has an unknown format; export",
            ),
        ],
        # The weights are complete, so this error is only raised when the optimizer is read.
        ("zero0-fp32-2", MP0): [(lambda c: c["optimizer"].pop("state"), r"state_dict\(\) of an optimizer")],
        ("zero2-fp32-3", "layer_00-model_00-model_states.pt"): [(b"", "pipeline parallel")],
        ("zero2-fp32-3", "expert_0_mp_rank_00_model_states.pt"): [(b"", "records no experts")],
        ("zero2-fp32-3", "zero_pp_rank_1_mp_rank_00_model_states.pt"): [(b"", "two runs")],
        ("zero2-fp32-3", "zero_pp_rank_00_mp_rank_00_optim_states.pt"): [(b"", "both belong to rank")],
    },
    "deepspeed_parallel": {
        ("autotp-zero2-4", MP1): [
            (lambda c: c["module"]["scale"].add_(1), "scale.*copies on different ranks differ"),
            (
                lambda c: c.update(mp_world_size=3),
                r"parallelism \(2\) .* parallelism \(1\) do not match .* \(3\)",
            ),
        ],
        ("autotp-zero2-4", MP0): [
            (lambda c: c.pop("universal_checkpoint_info"), "only supported if .* records how"),
            (lambda c: piece(c)["source"].__setitem__(0, 6), "odd_proj"),
        ],
        ("pipeline-fp32-4", "layer_01-model_states.pt"): [
            (lambda c: c["up.bias"].add_(1), "1.up.bias' differs")
        ],
        ("pipeline-fp32-4", "layer_00-model_states.pt"): [
            (lambda c: c["weight"].add_(1), "words.weight' differs")
        ],
        ("pipeline-fp32-4", MP0): [
            (lambda c: c.update(module={}), "belongs to a run with pipeline parallelism, but"),
            (lambda c: c.pop("param_shapes"), "bf16 checkpoints without ZeRO are not supported"),
        ],
        ("experts-zero1-4", "layer_1_expert_2_mp_rank_00_model_states.pt"): [
            (
                lambda c: [value.add_(1) for value in c.values()],
                r"layers\.1.*experts\.2.*differs .* of rank 3,",
            ),
        ],
    },
    "written_xla": {
        ("each4", "*00000002-of*"): [
            (lambda v: v["model"].pop(UP), "contains different parameters from"),
            (lambda v: v.pop("shard_metadata"), "no shard_metadata"),
            (lambda v: v.pop("optimizer"), "states of 1 of the 4 ranks are missing .*rank is 2"),
            (lambda v: v["optimizer"]["state"].pop(0), "different runs or steps"),
            (lambda v: v["optimizer"]["state"][0].pop("exp_avg"), "not a tensor"),
            (
                lambda v: v["model"].update({"_fsdp_wrapped_module.tracked": torch.ones(3)}),
                "dtype or shape than on rank",
            ),
            (lambda v: v["model"].update({"evil": Evil()}), r"io\.open"),
            (lambda v: v["shard_metadata"].update(world_size=5), "contains rank 2 of 5"),
            (lambda v: v["optimizer"]["state"][0]["step"].fill_(2.0), "different runs or steps"),
            (lambda v: v["optimizer"]["state"][3]["step"].fill_(2.0), r"'step' of '.*' differs from the"),
            (lambda v: v["optimizer"]["param_groups"][0].update(lr=0.5), "different runs or steps"),
        ],
        ("each4", "*"): [
            (
                lambda v: v["model"].pop(UP),
                "the parameters in shard_metadata differ from the parameters of the model",
            ),
            (
                lambda v: v["model"].update({UP: v["model"][UP][::2]}),
                "does not match a tensor of|contiguous",
            ),
            (lambda v: shard(v).update(_orig_size=[1300, 6]), "does not match a tensor of"),
            (lambda v: v["shard_metadata"]["shard_info"].pop(HEAD), "does not describe"),
            (
                lambda v: v["shard_metadata"].update(world_size=1 << 60),
                "but the name of the file has another rank or world size",
            ),
            (
                lambda v: v["optimizer"]["state"][0].update(exp_avg=torch.ones(3)),
                "shapes do not match the model",
            ),
            (lambda v: v["optimizer"]["param_groups"][0]["params"].pop(), "not in any group"),
        ],
        ("each4", "*00000001-of*"): [
            (lambda v: shard(v).update(_orig_size=[13, 7]), "the shard_info of .* differs")
        ],
        ("each4", "ckpt_rank-00000001-of-00000004.pth"): [
            (
                "each4/ckpt_rank-00000002-of-00000004.pth",
                "but the name of the file has another rank or world size",
            ),
        ],
        ("flat4", "piece.c.pt"): [(None, "states of 1 of the 4 ranks are missing .*rank is 1")],
        ("flat4", "copy.pt"): [("flat4/piece.b.pt", "contains the same rank as")],
    },
    "written_ranks": {
        ("fsdp2-3", "model_world_size_3_rank_1.pt"): [
            (
                "fsdp2-3/model_world_size_3_rank_0.pt",
                "saved under the name 'model_world_size_3_rank_0', so it",
            )
        ],
        ("fsdp2-3", "model_world_size_2_rank_0.pt"): [
            ("fsdp2-2/model_world_size_2_rank_0.pt", "files of runs with different numbers of ranks")
        ],
        ("fsdp2-2", "model_world_size_2_rank_1.pt"): [
            (
                lambda s: s["counts"].add_(1),
                "counts: is replicated, but the values of rank 0 and rank 1 differ",
            )
        ],
        ("fsdp2-2", "model_world_size_2_rank_0.pt"): [
            (lambda s: s.update(counts=None), "counts is a tensor only on some ranks")
        ],
    },
    "written_items": {
        ("fsdp2-3", "model_1.pt"): [
            (None, "No such file"),
            (Swap("model_0.pt"), "is in the file of rank 0, but was written by rank 1"),
            ("fsdp2-1/model_0.pt", "is in the file of rank 1, but was written by rank 0"),
        ],
        ("fsdp2-3", "metadata.pkl"): [
            (
                lambda table: layout_of(table).update(dtype="torch.float16"),
                "metadata.pkl records the dtype F16",
            ),
            (
                lambda table: layout_of(table).update(global_shape=[1 << 60, 13]),
                "metadata.pkl records the dtype BF16",
            ),
            (
                lambda table: layout_of(table).update(dtype="torch.strange"),
                "'torch.strange' is not supported",
            ),
            (lambda table: table.update(world_size=1 << 60), "world_size is 1152921504606846976"),
            (
                lambda table: table.update(world_size=4),
                "does not list one file for each rank, although world_size is 4",
            ),
            (lambda table: table.update(version="1.0"), "has version '1.0', but only version 2.0 is"),
            (lambda table: name_file(table, "../other.pt"), "points outside of the checkpoint folder"),
            (lambda table: name_file(table, "model_0.pt"), "lists the file .* twice"),
            (lambda table: tensors_of(table).pop('["brain.weight"]'), "metadata.pkl does not list"),
            (lambda table: table.update(evil=Evil()), r"io\.open"),
        ],
        ("fsdp2-3-safetensors", "metadata.pkl"): [
            (lambda table: layout_of(table).update(global_shape=[6, 13]), "brain.weight"),
            (lambda table: layout_of(table).update(global_shape=[4, 13]), "brain.weight"),
            (lambda table: layout_of(table)["placements"][0].update(dim=7), "Shard is not supported"),
            (
                lambda table: layout_of(table)["placements"][0].update(type="Partial"),
                "Partial is not supported",
            ),
            (lambda table: layout_of(table)["mesh_spec"].update(mesh_data=(0, 1, 1)), "each rank once"),
            (lambda table: tensors_of(table).update({'["gone"]': group_of(table)}), "'gone' is missing"),
            (lambda table: tensors_of(table).pop('["brain.weight"]'), "metadata.pkl does not list"),
        ],
    },
    "written_universal": {
        ("sub-groups-3", "zero_pp_rank_1_mp_rank_00_model_states.pt"): [
            (None, "ranks are missing .the first missing rank is 1"),
            (
                f"sub-groups-3/{UNIVERSAL}/zero_pp_rank_2_mp_rank_00_model_states.pt",
                "belongs to another rank",
            ),
        ],
        ("zero2-bf16-2", "zero/other/fp32.pt"): [(b"", "does not belong to a parameter")],
        ("zero2-bf16-2", "zero/big.bias/fp32.pt"): [
            (Swap("zero/big.bias/exp_avg.pt"), "was saved under the name"),
            (f"zero1-fp32-2/{UNIVERSAL}/zero/big.bias/fp32.pt", "values differ from"),
            (lambda v: v["param"].detach().add_(1), "values differ from"),
        ],
        ("sub-groups-3", "zero/big.weight/exp_avg_sq.pt"): [
            (lambda v: v.mul_(2), "values differ from the copy in zero/optimizer_state.pt")
        ],
        ("zero2-bf16-2", "zero/big.weight/step.pt"): [(lambda v: v.add_(5), "big.weight")],
        ("zero2-bf16-2", "zero/big.weight/fp32.pt"): [
            (lambda v: v.update(param_n_sub_params=2), "tensor parallel")
        ],
        ("zero2-bf16-2", "zero/optimizer_state.pt"): [
            (lambda v: v.update(partition_count=[1 << 60]), "partition_count"),
            (lambda v: v.update(param_groups=None), "param_groups"),
            (lambda v: v["param_groups"][0].update(params=[9]), "not a list of indices below"),
        ],
    },
    "written_megatron": {
        ("llama-2x2", "**/*.pt"): [
            (args(num_experts=8), "num_experts=8 is not supported"),
            (args(rotary_interleaved=True), "rotary_interleaved=True"),
            (
                args(window_size=(4, 0)),
                r"window_size='\(4, 0\)', and there is no config.json that confirms this value",
            ),
            (
                args(use_rope_scaling=True),
                "use_rope_scaling='llama3 with factor 8.0', and there is no config",
            ),
            (args(a_setting_of_tomorrow="on"), "a_setting_of_tomorrow='on' is not supported"),
            (args(position_embedding_type="none"), "is neither a Llama nor a GPT-2 model"),
            (args(num_layers=5), "layer 4 are missing"),
            (
                args(num_query_groups=1),
                "but num_attention_heads 4, head size 8 and num_query_groups 1 need 48 rows",
            ),
            (
                args(tensor_model_parallel_size=4),
                "tensor-parallel rank 2 and pipeline-parallel rank 0 is missing",
            ),
            (args(vocab_size=130), "has only 128 rows, but the vocabulary has 130 tokens"),
            (lambda content: content.update(optimizer={}), "has no parameter names"),
        ],
        ("llama-2x2", MEGATRON): [
            (Swap(NEIGHBOR), "was written by rank 1, but is in the folder of another rank")
        ],
        ("llama-2x2", LAST): [
            (lambda content: content.update(iteration=6), "iteration differs"),
            (
                lambda content: content["model"]["decoder.final_layernorm.weight"].mul_(2),
                "differs between the tensor-parallel ranks",
            ),
        ],
        ("core-llama-2x2", "iter_0000007/common.pt"): [
            (args(num_layers=1 << 39), "args have no valid num_layers")
        ],
    },
    "orbax_samples": {
        ("ocdbt", "_METADATA"): [
            (None, "because _METADATA, the list of its tensors, is missing"),
            (
                lambda content: content["tree_metadata"].pop(BOTH),
                r"'layers\.0\.both' is stored, but is not listed in _METADATA",
            ),
        ],
    },
}
BELOW = {
    "deepspeed_written": "global_step2",
    "deepspeed_parallel": "global_step2",
    "written_universal": UNIVERSAL,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("fixture", "name", "file", "change", "told"),
    [
        pytest.param(
            *(fixture, *where, *row),
            marks=XLA if fixture == "written_xla" else [],
            id=f"{where[0]}: {row[1]}",
        )
        for fixture, files in LIES.items()
        for where, rows in files.items()
        for row in rows
    ],
)
def test_format_error_names_inconsistency(
    fixture: str,
    name: str,
    file: str,
    change: Change,
    told: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    base, below = request.getfixturevalue(fixture), BELOW.get(fixture, "")
    step = tmp_path / (below or "step")
    shutil.copytree(base / name / below, step)
    if isinstance(change, bytes):
        (step / file).parent.mkdir(exist_ok=True)
        (step / file).write_bytes(change)
    elif isinstance(change, Swap):
        kept = (step / file).read_bytes()
        shutil.copy(step / change, step / file)
        (step / change).write_bytes(kept)
    elif isinstance(change, str):
        shutil.copy(base / change, step / file)
    else:
        for path in sorted(step.glob(file)):
            path.unlink() if change is None else rewrite(path, change)
    assert re.search(told, said := refused(step)), said


# -- the page about formats ----------------------------------------------------------------------------------


PAGE = (Path(__file__).parents[2] / "docs" / "formats.md").read_text("utf-8")


def test_formats_page_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Sequential()
    model.add_module("layer", torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    (tmp_path / "ckpt").mkdir()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
    torch.save(saved, tmp_path / "ckpt" / "last.pt")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/formats.md", "exec"), {})
    assert "torch 1\nlayer.weight F32 (3, 5)\n" in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "out").tensors["layer.weight"].dtype == "BF16"
