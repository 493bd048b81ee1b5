"""libtpu's compiler on hand-written modules and on the graph of a run, and the analysis of its results."""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import portable
from portable.config import load_config
from portable.errors import UserError
from portable.formatting import format_bytes
from portable.planner.cli import main
from portable.planner.compiled_graph import CollectiveStatistics, CompiledGraph, CompiledRun, LargeValue
from portable.planner.compiler_report import add_remedy_to_problems, compare_with_plan
from portable.planner.memory_model import StrategySetting
from portable.planner.plan import DeviceBytes, PlanOption
from portable.tpu.compile import compiler, trace
from portable.tpu.compile.compiler import (
    compile_graph_files,
    describe_compile_error,
    describe_memory_shortage,
    find_libtpu,
)
from portable.tpu.compile.hlo import HloComputation
from portable.tpu.compile.libtpu import build_compile_options
from portable.tpu.compile.messages import xla_messages
from portable.tpu.compile.report import analyze_module, count_convolution_flops
from portable.tpu.compile.slices import SLICE_FAMILIES, TpuSlice, select_tpu_slice
from portable.tpu.libtpu_flags import ADDED_LIBTPU_FLAGS, add_missing_libtpu_flags
from tests.ranks import wait_for
from tests.tpu import hlo_modules as hlo
from tests.tpu.hlo_modules import field, varint

NEVER = 1 << 62
ALL = ("v4", "v5e", "v5p", "v6e")
FOUR = {"v4": "2x2x1", "v5e": "2x2", "v5p": "2x2x1", "v6e": "2x2"}


@pytest.fixture(scope="module")
def library(torch_xla: None) -> compiler.LibtpuInstallation:
    try:
        return find_libtpu()
    except UserError:
        pytest.skip("libtpu is not installed")


def written(folder: Path, **modules: bytes) -> dict[str, Path]:
    for name, data in modules.items():
        (folder / name).write_bytes(data)
    return {name: folder / name for name in modules}


# -- the options -------------------------------------------------------------------------------------------


def test_compile_options_match_torch_xla() -> None:
    found = xla_messages.CompileOptions.FromString(build_compile_options([0, 4, 2], is_tupled=True))
    build = found.executable_build_options
    assert found.parameter_is_tupled_arguments
    assert (build.device_ordinal, build.num_replicas, build.num_partitions) == (-1, 1, 3)
    assert (build.use_spmd_partitioning, [*build.allow_spmd_sharding_propagation_to_output]) == (True, [True])
    devices = build.device_assignment.computation_devices
    assert [[*one.replica_device_ids] for one in devices] == [[0], [4], [2]]


# -- slices ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "devices", "topology", "said"),
    [
        ("v5e", 12, None, "--devices: no slice of v5e has 12 chips; use 8 or 16"),
        ("v5p", 16, "4x", "--topology: '4x' does not have the form AxBxC of a v5p slice; use one of"),
        ("v5e", 16, "4x8", "--topology: the number of chips in 4x8 is 32, but --devices is 16"),
        ("v3", 8, None, "--device: v3 is not a TPU that --compile supports; use one of v4, v5e, v5p, v6e"),
    ],
)
def test_select_tpu_slice_rejects_unknown_slices(
    device: str | None, devices: int, topology: str | None, said: str
) -> None:
    with pytest.raises(UserError) as refusal:
        select_tpu_slice(device, devices, topology)
    assert str(refusal.value).startswith(said)


def flags_of_torch_xla(version: int, given: str) -> str:
    """Return the LIBTPU_INIT_ARGS that torch_xla sets on a TPU, without its import, which takes seconds."""
    spec = find_spec("torch_xla")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    wanted = ("_set_missing_flags", "_setup_libtpu_flags")
    tree.body = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name in wanted]
    environment = {"LIBTPU_INIT_ARGS": given}
    scope: dict[str, Any] = {
        "re": re,
        "os": SimpleNamespace(environ=environment),
        "tpu": SimpleNamespace(version=lambda: version),
    }
    exec(compile(tree, spec.origin, "exec"), scope)
    scope["_setup_libtpu_flags"]()
    return environment["LIBTPU_INIT_ARGS"]


@pytest.mark.xla
def test_compiler_flags_match_run() -> None:
    given = "--mine=1 --xla_latency_hiding_scheduler_rerun=2"
    for device, version in (("v4", 4), ("v5e", 5), ("v5p", 5), ("v6e", 6)):
        ours = TpuSlice(device, FOUR[device]).build_compiler_environment({"LIBTPU_INIT_ARGS": given})[
            "LIBTPU_INIT_ARGS"
        ]
        begun = add_missing_libtpu_flags(
            given, ADDED_LIBTPU_FLAGS
        )  # as portable.tpu.xla.runtime, before torch_xla is imported
        assert sorted(ours.split()) == sorted(flags_of_torch_xla(version, begun).split()), device


# -- analysis of a module ----------------------------------------------------------------------------


def test_analyze_module_counts_collectives_and_bytes() -> None:
    """Cases: a start and an end with and without a product between them, a loop, and a fused scatter."""
    part, whole = hlo.shape(64, 128), hlo.shape(256, 128)
    both = hlo.tuple_of(part, whole)
    cycles = b'{"window_config":{"estimated_cycles":"900"}}'
    scatter = [
        hlo.op(40, "parameter", whole, parameter_number=0),
        hlo.op(41, "all-reduce", whole, 40, channel_id=9, extra=hlo.group(0, 1, 2, 3)),
        hlo.op(42, "partition-id", hlo.shape(element=hlo.S32)),
        hlo.op(43, "dynamic-slice", part, 41, 42),
    ]
    entry = [
        hlo.op(1, "parameter", part, parameter_number=0),
        hlo.op(2, "all-gather-start", both, 1, channel_id=1, extra=hlo.group(0, 1, 2, 3)),
        hlo.op(3, "fusion", part, 1, called=[5], backend_config=cycles),
        hlo.op(4, "all-gather-done", whole, 2),
        hlo.op(5, "all-gather-start", both, 3, channel_id=2, extra=hlo.group(0, 1, 2, 3)),
        hlo.op(6, "bitcast", part, 3),
        hlo.op(7, "all-gather-done", whole, 5),
        hlo.op(8, "fusion", part, 7, called=[4]),
        hlo.op(9, "all-reduce", part, 8, channel_id=3, extra=hlo.group(0, 1)),
        hlo.op(10, "collective-permute", part, 9),
    ]
    product = [hlo.op(50, "parameter", part, parameter_number=0), hlo.op(51, "multiply", part, 50, 50)]
    others = [
        hlo.computation(4, scatter, [whole], part, 43, fused=True),
        hlo.computation(5, product, [part], part, 51, fused=True),
    ]
    found = analyze_module(hlo.module(others, entry, [part], part, 10), 4, NEVER)
    one = 64 * 128 * 4
    assert found.collectives == {
        "all-gather": CollectiveStatistics(2, 2 * 3 * one, 2, 1, 900),
        "reduce-scatter": CollectiveStatistics(1, 3 * one, 0, 0, 0),
        "all-reduce": CollectiveStatistics(1, one, 0, 0, 0),
        "collective-permute": CollectiveStatistics(1, one, 0, 0, 0),
    }


@pytest.mark.parametrize("where", ["a fusion", "a loop"])
def test_analyze_module_counts_continued_collectives_once(where: str) -> None:
    """In the TPU form, a start, a product that continues it, and an end share a channel, and count once."""
    part, whole = hlo.shape(64, 128), hlo.shape(256, 128)

    def fused(number: int, *targets: str) -> bytes:
        inside = [
            hlo.op(number, "parameter", part, parameter_number=0),
            hlo.op(number + 1, "all-gather", whole, number, channel_id=5, extra=hlo.group(0, 1, 2, 3)),
            *(hlo.op(number + 2, "custom-call", whole, number + 1, custom_call_target=t) for t in targets),
        ]
        return hlo.computation(number, inside, [part], whole, number + 1 + len(targets), fused=True)

    others = [fused(100, "AsyncCollectiveStart"), fused(200), fused(300, "AsyncCollectiveDone")]
    inner = [
        hlo.op(400, "parameter", part, parameter_number=0),
        hlo.op(401, "fusion", whole, 400, called=[200]),
    ]
    others.append(hlo.computation(400, inner, [part], whole, 401))
    carries = ("fusion", 200) if where == "a fusion" else ("call", 400)
    entry = [
        hlo.op(1, "parameter", part, parameter_number=0),
        hlo.op(2, "fusion", whole, 1, called=[100]),
        hlo.op(3, carries[0], whole, 1, called=[carries[1]]),
        hlo.op(4, "fusion", whole, 1, called=[300]),
        hlo.op(5, "fusion", whole, 1, called=[200]),  # nothing is open: it is a separate collective
    ]
    found = analyze_module(hlo.module(others, entry, [part], whole, 5), 4, NEVER).collectives["all-gather"]
    assert (found.count, found.bytes) == (2, 2 * 3 * 64 * 128 * 4)
    if where == "a fusion":
        assert found == CollectiveStatistics(2, found.bytes, 1, 1, 0)


def test_analyze_module_lists_large_values_and_host_transfers() -> None:
    small, large = hlo.shape(16, 16), hlo.shape(64, 512, element=hlo.BF16)
    fast = hlo.shape(64, 512, element=hlo.BF16, memory=1)
    loss_file = str(Path(portable.__file__).parent / "model" / "loss.py")
    entry = [
        hlo.op(1, "parameter", large, parameter_number=0),
        hlo.op(2, "fusion", large, 1, model=("aten__mm", "/venv/lib/site-packages/transformers/x.py", 3)),
        hlo.op(8, "fusion", hlo.shape(64, 512, element=29), 1, model=("aten__to", loss_file, 5)),
        hlo.op(3, "add", fast, 2, 2),
        hlo.op(4, "bitcast", large, 2),
        hlo.op(5, "fusion", hlo.tuple_of(small, large), 4),
        hlo.op(6, "outfeed", small, 1, model=("aten__item", "y.py", 4)),
        hlo.op(7, "custom-call", small, 1, custom_call_target="MoveToHost"),
    ]
    found = analyze_module(hlo.module([], entry, [large], small, 7), 4, 64 * 512)
    assert [(str(v.shape), v.bytes, v.operation, v.source, v.count) for v in found.large_values] == [
        ("bf16[64,512]", 65536, "aten__mm", "transformers/x.py:3", 1),
        ("bf16[64,512]", 65536, "", "", 1),
        ("f8e3m4[64,512]", 32768, "aten__to", "portable/model/loss.py:5", 1),
    ]
    assert found.host_transfers == ("outfeed aten__item y.py:4", "custom-call")
    assert found.custom_calls == {"MoveToHost": 1}


def test_analyze_module_counts_loop_iterations() -> None:
    for trips in (0, 1, 9):
        found = analyze_module(hlo.loop(trips, 64, 4), 4, 64 * 64)
        assert found.loops_of_unknown_length == 0
        counts = {value.operation: value.count for value in found.large_values}
        assert counts.get("aten__mm", 0) == trips
    unknown = hlo.loop(9, 64, 4).replace(b"\xfa\x03\x02LT", b"\xfa\x03\x02NE")
    assert analyze_module(unknown, 4, NEVER).loops_of_unknown_length == 1


@pytest.mark.parametrize(
    ("operations", "trips"),
    [
        ([("add", 18, 11, 13), ("copy", 19, 18), ("add", 14, 19, 13)], 5),  # unrolled: adds 2
        ([("multiply", 18, 11, 11), ("add", 14, 18, 13)], None),
        ([("add", 14, 13, 13)], None),
    ],
)
def test_analyze_module_finds_step_of_loop_counter(
    operations: list[tuple[Any, ...]], trips: int | None
) -> None:
    counting = [hlo.op(number, name, hlo.shape(element=hlo.S32), *of) for name, number, *of in operations]
    report = analyze_module(hlo.loop(9, 64, 4, counting=counting), 4, 64 * 64)
    assert report.loops_of_unknown_length == (trips is None)
    assert {value.count for value in report.large_values if value.operation} == {trips or 1}


def test_analyze_module_counts_bytes_of_nested_loops() -> None:
    """The compiler counts each body once, so the report has the bytes of all other iterations."""
    outer, inner, width = 3, 5, 256
    report = analyze_module(hlo.nested_loops(outer, inner, width), 1, NEVER)
    accessed = 2 * 4 * width**2
    assert report.loops_of_unknown_length == 0
    assert report.looped_bytes == pytest.approx(accessed * (outer - 1 + outer * inner - 1), rel=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_count_convolution_flops_matches_direct_count(seed: int) -> None:
    """The count is compared with all pairs of positions, with strides, paddings and dilations."""
    size, stride, low, high, holes, gaps, extent = [
        (1, 1, 0, 0, 1, 1, 7),
        (3, 1, 1, 1, 1, 1, 6),
        (4, 3, 0, 0, 1, 4, 4),  # a batch of 4
        (3, 2, 2, 1, 2, 1, 9),
        (5, 2, 3, 4, 1, 3, 5),
        (4, 3, 3, 3, 3, 2, 4),
    ][seed]
    spread, reach = (extent - 1) * gaps + 1, (size - 1) * holes + 1
    outputs = (spread + low + high - reach) // stride + 1
    met = sum(
        0 <= (at := out * stride + step * holes - low) < spread and at % gaps == 0
        for out, step in itertools.product(range(outputs), range(size))
    )
    window = b"".join(field(i, v) for i, v in enumerate((size, stride, low, high, holes, gaps), start=1))
    axes = field(3, 0) + field(4, 2) + field(6, numbers := varint(1)) + field(7, 0) + field(8, 2)
    axes += field(9, 0) + field(10, 2) + field(11, numbers) + field(12, numbers)
    left, right, result = hlo.shape(5, extent, 3), hlo.shape(3, size, 7), hlo.shape(5, outputs, 7)
    instructions = [
        hlo.op(1, "parameter", left, parameter_number=0),
        hlo.op(2, "parameter", right, parameter_number=1),
        hlo.op(3, "convolution", result, 1, 2, extra=field(15, field(1, window)) + field(16, axes)),
    ]
    computation = hlo.computation(1, instructions, [left, right], result, 3)
    scope = HloComputation(xla_messages.HloComputationProto.FromString(computation), None)
    assert count_convolution_flops(scope, scope.by_id[3]) == 2 * met * 3 * 5 * 7


# -- errors of libtpu ----------------------------------------------------------------------

OUT_OF_MEMORY = """\
XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 34.88G of 15.75G hbm. Exceeded.

Total hbm usage >= 35.13G:
    reserved        258.00M
    program          30.88G
    arguments         4.00G

  Largest program allocations in hbm:

  1. Size: 1.12G
     Operator: op_type="aten__mm" op_name="aten__mm.1" source_file="/site-packages/llama.py" source_line=12
     Shape: bf16[24576,24576]{1,0:T(8,128)(2,1)}
     Allocation type: HLO temp
     ==========================
"""


def test_describe_memory_shortage_is_one_line() -> None:
    assert describe_memory_shortage(OUT_OF_MEMORY) == (
        "needs 34.9 GiB (4.0 GiB for arguments), but a chip has 15.8 GiB; the largest value is "
        "bf16[24576,24576] (1.1 GiB) of aten__mm.1 at llama.py:12"
    )
    newer = (
        "E1000: Ran out of memory on HBM, HLO temporaries (37.25G) exceeds available HBM (15.75G). HLO: m."
    )
    assert describe_memory_shortage(newer) == "needs 37.2 GiB, but a chip has 15.8 GiB"
    assert describe_compile_error("no\nmore", "") == "no"
    assert describe_compile_error("no kernel `ragged-dot-none`", "") == (
        "no kernel `ragged-dot-none`; use model.experts batched_mm"
    )


def graph(**sizes: Any) -> CompiledGraph:
    usual = dict.fromkeys(
        ("argument_bytes", "output_bytes", "alias_bytes", "temporary_bytes", "code_bytes", "flops"), 0
    )
    found = {"name": "step", "bytes_accessed": 0, "compile_seconds": 0, **usual, **sizes}
    return CompiledGraph(**found)


def test_compiled_run_computes_peak_and_problems() -> None:
    sums = {"all-gather": CollectiveStatistics(1, 100)}
    graphs = (
        graph(name="micro-batch", argument_bytes=60, temporary_bytes=50, code_bytes=1, collectives=sums),
        graph(
            name="update", argument_bytes=100, output_bytes=90, alias_bytes=80, code_bytes=2, collectives=sums
        ),
    )
    found = CompiledRun("v5e:2x2", "libtpu", 160, graphs)
    assert (found.peak_bytes, found.fits) == (100 + 3 + 50, True)  # the state stays through the micro-batch
    assert found.compute_sent_bytes_per_step(4) == 500
    needs = DeviceBytes(parameters=20, gathered=10, gradients=20, optimizer=40, activations=40)
    option = PlanOption(StrategySetting("full_shard"), 1, "none", needs, 0, 0, 0, 400, True)
    assert [(line.planned, line.compiled, line.percent) for line in compare_with_plan(found, option, 4)] == [
        (80, 100, 25),  # state: the gradients' sums are kept from one micro-batch to the next
        (50, 50, 0),
        (130, 153, pytest.approx(17.69, abs=0.01)),
        (400, 500, 25),
    ]
    value = LargeValue("f32[8,4]", 128, "aten__mm", "llama.py:12")
    step = graph(argument_bytes=60, temporary_bytes=70, large_values=(LargeValue("s8[9]", 9, "", ""), value))
    one = CompiledRun("v5e:2x2", "libtpu", 90, (step,))
    resident, working, *_ = compare_with_plan(one, option, 1)
    assert (resident.planned, working.planned) == (60, 70)  # the gradients come and go within the step
    (problem,) = add_remedy_to_problems(one, "less").problems
    assert problem == (
        "the run does not fit into the 90 B of device memory, because it needs 60 B for arguments, 70 B for "
        "temporary values and results, and 0 B for code; the largest value is f32[8,4] (128 B) of aten__mm "
        "at llama.py:12; to reduce memory: less"
    )


# -- the command -------------------------------------------------------------------------------------------

RUN = ["--train.global_batch_size", "4", "--train.micro_batch_size", "1", "--data.seq_len", "16"]
ON_TORCHTPU = ["--backend", "tpu", "--compile", "--device", "v5e", "--devices", "4"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only-memory"], "--only-memory: has an effect only with --compile; add --compile"),
        (["--compile", "--device", "h100"], "--compile: backend cuda has no compiler that works without"),
        ([*ON_TORCHTPU, "--train.optimizer", "muon"], "--compile: train.optimizer muon cannot be simulated"),
        (["--compile", "--device", "v5e", "--devices", "2"], "--devices: no slice of v5e has 2 chips"),
        (["--compile", "--device", "v5e"], "--compile: needs libtpu, the TPU compiler; install libtpu with"),
    ],
)
def test_plan_compile_rejects_bad_flags_in_one_line(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    assert main([*RUN, *arguments]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert error.startswith(f"error: {said}")


@pytest.mark.xla
def test_plan_suggests_attention_by_rows(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data.seq_len", "2048", "--memory.activation_checkpointing", "full", "--device", "v5e"]
    assert main([*RUN, "--model.config", json.dumps(TINY), *arguments, "--json"]) == 0
    reason = json.loads(capsys.readouterr().out)["best"]["reason"]
    assert "If memory runs out: xla.attention_rows 512" in reason
    assert main([*RUN, "--model.config", json.dumps(TINY), *arguments, "--xla.attention_rows", "512"]) == 0
    assert "attention_rows" not in capsys.readouterr().out


def test_find_libtpu_rejects_missing_or_invalid_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    with pytest.raises(
        UserError,
        match=r"^TPU_LIBRARY_PATH: .*libtpu.so is not a file; set TPU_LIBRARY_PATH to the path of libtpu.so$",
    ):
        find_libtpu()
    (tmp_path / "libtpu.so").write_text("text")
    graphs = written(tmp_path, step=hlo.added(8))
    with pytest.raises(UserError, match=r"^--compile: v5e:1x1: .*libtpu.so is not a libtpu library .*$"):
        compile_graph_files(graphs, TpuSlice("v5e", "1x1"), find_libtpu(), NEVER)


# -- the compiler itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize("only_memory", [False, True])
def test_compile_graph_files_of_known_modules(
    only_memory: bool, library: compiler.LibtpuInstallation, tmp_path: Path
) -> None:
    """Bytes, FLOPs and traffic of these modules on four chips are known in advance."""
    kept, trips, width = 1 << 20, 7, 512
    graphs = written(
        tmp_path,
        donated=hlo.added(1024, 1024, devices=4, donated=True),
        copied=hlo.added(1024, 1024, devices=4),
        loop=hlo.loop(trips, width, 4),
    )
    found = compile_graph_files(graphs, TpuSlice("v5e", "2x2"), library, NEVER, only_memory=only_memory)
    assert found.fits
    assert 1 << 27 < found.host_bytes < 1 << 33
    assert [graph.name for graph in found.graphs] == list(graphs)
    assert (found.code_bytes == 0) is only_memory
    sizes = {g.name: (g.argument_bytes, g.output_bytes, g.alias_bytes) for g in found.graphs}
    assert sizes["donated"] == (kept, kept, kept)
    assert sizes["copied"] == (kept, kept, 0)
    looped = found.find_graph("loop")
    assert looped is not None
    product = 2 * width**3 / 4
    assert trips * product <= looped.flops <= 1.05 * trips * product
    gathered = looped.collectives["all-gather"]
    assert gathered.count == trips
    assert gathered.bytes in [trips * 3 * width * width // 4 * size for size in (2, 4)]


def test_usable_hbm_bytes_match_compiler_limit(library: compiler.LibtpuInstallation, tmp_path: Path) -> None:
    """The limit of the planner equals the limit above which the compiler fails."""
    for device in ALL:
        chips = SLICE_FAMILIES[device]
        graphs = written(tmp_path, step=hlo.added(chips.usable_hbm_bytes // 4 + (1 << 28)))
        found = compile_graph_files(graphs, TpuSlice(device, FOUR[device]), library, NEVER)
        assert not found.fits
        (problem,) = found.problems
        assert f"a chip has {format_bytes(found.hbm_bytes)}" in problem, problem
        assert found.peak_bytes > found.hbm_bytes


def test_compile_graph_files_reports_compile_error(
    library: compiler.LibtpuInstallation, tmp_path: Path
) -> None:
    one = TpuSlice("v5e", "1x1")
    with pytest.raises(UserError) as unknown:
        compile_graph_files(written(tmp_path, step=hlo.custom("no_such_kernel")), one, library, NEVER)
    assert str(unknown.value) == (
        "--compile: step: libtpu cannot compile this graph: Custom emitter for no_such_kernel not found, in "
        "the operation of aten__foo at llama.py:7"
    )
    with pytest.raises(UserError, match=r"^--compile: v5e:3x3: "):
        compile_graph_files(written(tmp_path, step=hlo.added(8)), TpuSlice("v5e", "3x3"), library, NEVER)


def test_compile_graph_files_reports_crash_of_compiler(
    library: compiler.LibtpuInstallation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_no_such_flag=1")
    with pytest.raises(UserError) as died:
        compile_graph_files(written(tmp_path, step=hlo.added(8)), TpuSlice("v5e", "1x1"), library, NEVER)
    assert "\n" not in str(died.value)
    assert str(died.value).startswith("--compile: libtpu ended with exit code 1 when it started: ")
    assert str(died.value).endswith("'xla_no_such_flag'; remove this flag from LIBTPU_INIT_ARGS")


ASKS = """
import os
from pathlib import Path
from portable.tpu.compile.child_process import run_in_child_process
code = "import os, sys, time; open(sys.argv[1] + '.pid', 'w').write(str(os.getpid())); time.sleep(60)"
run_in_child_process(
    code, Path({answer!r}), request=None, environment=os.environ, format_failure=lambda *ended: ""
)
"""


def test_compile_process_ends_with_its_parent(tmp_path: Path) -> None:
    """A killed plan leaves no process that traces or compiles for minutes."""
    answer, said = tmp_path / "answer", tmp_path / "answer.pid"
    process = subprocess.Popen([sys.executable, "-c", ASKS.format(answer=str(answer))])
    wait_for(lambda: said.exists() and said.read_text())
    asked = Path("/proc", said.read_text().strip())
    process.kill()
    process.wait()
    wait_for(lambda: not asked.exists() or (asked / "stat").read_text().split()[2] == "Z")


TINY = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.usefixtures("traces_in_forks")
@pytest.mark.slow
def test_step_compiles_for_each_tpu_generation(
    library: compiler.LibtpuInstallation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One step is traced once, and compiled for all generations."""
    traced: list[trace.TracedGraph] = []

    def once(config: Any, devices: int, folder: Path) -> list[trace.TracedGraph]:
        if not traced:
            traced.extend(trace.trace_graphs(config, devices, tmp_path))
        return traced

    monkeypatch.setattr(compiler, "trace_graphs", once)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    settings = ["--model.config", json.dumps(TINY), "--precision", "bf16", "--log.sample_tokens", "0"]
    settings += ["--data.eval_fraction", "0", "--compile", "--json", "--devices", "4"]
    multiplied = 256 * 64 + 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128
    state = 12 * (256 * 64 + multiplied) // 4
    for device in ALL:
        quick = ["--only-memory"] * (device != "v5e")
        assert main([*RUN, *settings, "--device", device, *quick]) == 0
        found = json.loads(capsys.readouterr().out)["compiled"]
        (step,) = found["graphs"]
        assert step["name"] == "step"
        assert (found["topology"], found["fits"]) == (f"{device}:{FOUR[device]}", True)
        assert found["libtpu"].startswith("libtpu ")
        assert state <= step["alias_bytes"] <= step["argument_bytes"] <= 1.2 * step["alias_bytes"]
        assert step["output_bytes"] <= 1.1 * step["alias_bytes"]
        assert 6 * multiplied * 16 < step["flops"] < 12 * multiplied * 16  # a chip has 16 tokens
        assert step["host_transfers"] == []
        kinds = step["collectives"]
        assert kinds["all-gather"]["overlapped"] == kinds["all-gather"]["asynchronous"] > 5
        assert kinds["reduce-scatter"]["count"] > 0
        gathered = 2 * multiplied * 3 // 4  # bytes that a chip sends for every matrix in bf16
        assert gathered <= kinds["all-gather"]["bytes"] <= 2.5 * gathered
    assert not list(tmp_path.glob("tpu_driver*"))  # libtpu's temporary files of several megabytes


def step_of(library: compiler.LibtpuInstallation, folder: Path, chips: str, **settings: Any) -> CompiledGraph:
    """Return the step of a Llama on v5e chips, with the memory and the collectives of the compiler."""
    config = load_config(
        None,
        {
            "backend": "xla",
            "output_dir": str(folder),
            "precision": "bf16",
            "data.eval_fraction": 0,
            "log.sample_tokens": 0,
            "train.micro_batch_size": 2,
            **settings,
        },
    )
    wanted = TpuSlice("v5e", chips)
    (step,) = trace.trace_graphs(config, wanted.num_devices, folder / "traced")
    found = compile_graph_files({"step": step.hlo_path}, wanted, library, NEVER, only_memory=True)
    return found.graphs[0]


@pytest.mark.usefixtures("traces_in_forks")
@pytest.mark.slow
def test_gradients_are_reduced_to_shards(library: compiler.LibtpuInstallation, tmp_path: Path) -> None:
    """This includes the gradient of a tied head, and of a matrix with a long second dimension."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 8192}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    settings = {
        "model.config": {**TINY, **sizes, **heads, "tie_word_embeddings": True},
        "memory.activation_checkpointing": "full",
        "train.global_batch_size": 8,
    }
    step = step_of(library, tmp_path, "2x2", **settings)
    sent = {kind: one.bytes for kind, one in step.collectives.items()}
    matrices = 512 * (8192 + 512 + 2 * 256 + 512 + 3 * 1408)
    assert sent["all-reduce"] < 512 * 64  # sums and norms
    assert 0.9 * matrices * 2 * 3 / 4 < sent["reduce-scatter"] < 1.2 * matrices * 2 * 3 / 4
    # Each matrix is gathered once forwards and once backwards, the head's once.
    assert sent["all-gather"] < 1.03 * (2 * matrices - 512 * 8192) * 2 * 3 / 4
    # Of the activations, only the embeddings and their gradient.
    assert sent["all-to-all"] == 2 * 2 * 256 * 512 * 2 * 3 / 4


@pytest.mark.usefixtures("traces_in_forks")
@pytest.mark.slow
def test_muon_sends_each_matrix_twice(library: compiler.LibtpuInstallation, tmp_path: Path) -> None:
    """A chip sends its shards of the other chips' matrices, and later the computed updates, in bf16."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    settings = {
        "model.config": {**TINY, "hidden_size": 512, "intermediate_size": 512, **heads},
        "memory.activation_checkpointing": "full",
        "train.global_batch_size": 8,
    }
    sent = {}
    for optimizer in ("adamw", "muon"):
        step = step_of(library, tmp_path / optimizer, "2x2", **settings, **{"train.optimizer": optimizer})
        sent[optimizer] = sum(one.bytes for one in step.collectives.values())
    # Seven matrices of one shape in each layer, made up to a multiple of four.
    layers: Any = TINY["num_hidden_layers"]
    matrices = -(-7 * layers // 4) * 4 * 512 * 512
    assert sent["muon"] - sent["adamw"] == pytest.approx(2 * 2 * matrices * 3 / 16, rel=0.01)


@pytest.mark.usefixtures("traces_in_forks")
@pytest.mark.slow
def test_gradients_are_sharded_immediately(library: compiler.LibtpuInstallation, tmp_path: Path) -> None:
    """On 64 chips, full gradients are added, but they are not kept until the update."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4}
    settings = {
        "model.config": {**TINY, **sizes},
        "memory.activation_checkpointing": "full",
        "train.global_batch_size": 128,
    }
    step = step_of(library, tmp_path, "8x8", **settings)
    layer = 2048 * (2 * 2048 + 2 * 1024 + 3 * 8192)
    assert step.collectives["all-reduce"].bytes > 4 * 2 * layer  # else it is time to measure again
    assert step.temporary_bytes < 3 * 2 * layer


@pytest.mark.usefixtures("traces_in_forks")
@pytest.mark.slow
def test_logits_are_stored_once(library: compiler.LibtpuInstallation, tmp_path: Path) -> None:
    """The gradients of the logits overwrite them, and the gradient of the head is never added in full."""
    tokens, vocabulary, width = 1024, 64128, 256
    settings = {
        "model.config": {**TINY, "hidden_size": width, "vocab_size": vocabulary},
        "data.seq_len": tokens,
        "train.global_batch_size": 16,
    }
    step = step_of(library, tmp_path, "2x4", **settings)
    logits = 2 * tokens * vocabulary * 2
    assert logits <= step.temporary_bytes < 1.5 * logits
    assert step.collectives["all-reduce"].bytes < width * vocabulary / 100


@pytest.mark.usefixtures("traces_in_forks")
@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "tokens", "most"), [(32000, 256, 1.0), (32001, 1024, 1.5)])
def test_head_needs_no_copies(
    vocabulary: int, tokens: int, most: float, library: compiler.LibtpuInstallation, tmp_path: Path
) -> None:
    """Neither the state of the head nor the gradients of the logits are copied to another layout."""
    settings = {
        "model.config": {**TINY, "hidden_size": 1024, "vocab_size": vocabulary},
        "data.seq_len": tokens,
        "train.global_batch_size": 8,
    }
    step = step_of(library, tmp_path, "2x2", **settings)
    logits, head = 2 * tokens * vocabulary * 2, vocabulary * 1024 * 2
    assert step.temporary_bytes < most * (logits + head)
