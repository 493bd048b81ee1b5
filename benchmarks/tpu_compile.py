"""Compare libtpu's compiler with the planner, by model, slice, and strategy.

``python -m benchmarks.tpu_compile`` traces each step in ``tests/tpu/compiled_steps.json`` without
weights, and compiles it for its slice. It writes the results to this file, and prints them next to
the current plan. A TPU is not required. A row in the file begins with the fields of a case. To add
a case, add a row that contains only these fields. Large models take minutes each. ``--case``
selects some of the cases.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import command_line
from portable.adapters.adapter import build_training_model
from portable.adapters.settings import resolve_adapter_config
from portable.config import load_config
from portable.errors import UserError
from portable.model import build as models
from portable.planner.compiled_graph import CollectiveStatistics
from portable.planner.device_lookup import find_device
from portable.planner.memory_model import Cluster, StrategySetting
from portable.planner.meta_model import MetaModel
from portable.planner.plan import Planner, PlanTarget
from portable.tpu.compile.compiler import compile_graph_files, find_libtpu
from portable.tpu.compile.slices import select_tpu_slice
from portable.tpu.compile.trace import ANSWER_FILE, trace_graphs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.config import RunConfig
    from portable.planner.plan import DeviceBytes, PlanOption

GIB = 1 << 30
RECORD = Path(__file__).parents[1] / "tests/tpu/compiled_steps.json"


def _llama(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 131072 if vocabulary > 32000 else 4096,
        "tie_word_embeddings": False,
    }


_QWEN2 = {"model_type": "qwen2", "tie_word_embeddings": True}
_EXPERTS = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": {**_llama(896, 4864, 24, 14, 2, 151936), **_QWEN2},
    "llama-1b": {**_llama(2048, 8192, 16, 32, 8, 128256), "tie_word_embeddings": True},
    "llama-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "llama-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "mixtral-8x7b": {**_llama(4096, 14336, 32, 32, 8, 32000), **_EXPERTS, "max_position_embeddings": 8192},
}
# Two layers with realistic widths, so that each architecture and setting compiles in seconds.
_WIDE = {**_llama(1024, 2816, 2, 8, 4, 32000), "max_position_embeddings": 1024}
_PLAIN = {key: value for key, value in _WIDE.items() if key != "tie_word_embeddings"}
_BERT = {
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "max_position_embeddings": 1024,
}
_GPT2 = {"n_embd": 1024, "n_layer": 2, "n_head": 16, "n_positions": 1024}
_T5 = {"d_model": 1024, "d_kv": 64, "d_ff": 2816, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 16}
SMALL: dict[str, dict[str, Any]] = {
    "llama": _WIDE,
    # Models with values that do not fit into a core's vector memory, as in large models.
    "wide-llama": _llama(2048, 5632, 4, 16, 8, 32000),
    "wide-llama-2": _llama(2048, 5632, 2, 16, 8, 32000),
    "qwen2": {**_PLAIN, **_QWEN2, "vocab_size": 151936},
    "qwen3": {**_PLAIN, "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128},
    "mistral": {**_PLAIN, "model_type": "mistral", "vocab_size": 32768},
    "gemma2": {**_PLAIN, "model_type": "gemma2", "vocab_size": 256000, "head_dim": 128},
    "gpt2": {**_GPT2, "model_type": "gpt2", "vocab_size": 50257},
    "opt": {**_BERT, "model_type": "opt", "vocab_size": 50272, "word_embed_proj_dim": 1024, "ffn_dim": 4096},
    "bert": {**_BERT, "model_type": "bert", "vocab_size": 30522, "intermediate_size": 4096},
    "t5": {**_T5, "model_type": "t5", "vocab_size": 32128},
    "mixtral": {**_PLAIN, **_EXPERTS, "hidden_size": 512, "intermediate_size": 1024},
}
OTHER_GRAPHS = ("evaluation", "generation")
OTHER_TASKS: dict[str, dict[str, Any]] = {
    "bert": {"model.task": "masked-lm", "data.packing": False},
    "t5": {"model.task": "seq2seq-lm", "data.target_field": "text", "data.source": "texts.jsonl"},
}


@dataclass(frozen=True)
class Case:
    """Training step to compile, described by its model, slice, strategy and settings."""

    model: str
    device: str
    devices: int
    strategy: str
    micro_batch: int
    seq_len: int
    recompute: str = "full"
    precision: str = "bf16"
    optimizer: str = "adamw"
    micro_batches: int = 1
    scan_layers: bool = False
    attention_rows: int | None = None
    adapter: str | None = None
    context_parallel: int = 1
    others: bool = False
    """Whether to also compile the graphs of evaluation and generation."""

    @property
    def name(self) -> str:
        parts = [self.model, f"{self.device}-{self.devices}", self.strategy, self.recompute]
        parts += [self.precision] * (self.precision != "bf16") + [self.optimizer] * (
            self.optimizer != "adamw"
        )
        parts += [f"{self.micro_batches}-micro-batches"] * (self.micro_batches > 1)
        parts += ["scan"] * self.scan_layers
        parts += [f"rows-{self.attention_rows}"] * (self.attention_rows is not None)
        parts += [f"{self.context_parallel}-a-sequence"] * (self.context_parallel > 1)
        parts += [str(self.adapter)] * (self.adapter is not None) + ["all-graphs"] * self.others
        return "/".join([*parts, f"{self.micro_batch}x{self.seq_len}"])

    def config(self, folder: str) -> RunConfig:
        architecture = {**SMALL, **MODELS}[self.model]
        sequences = self.micro_batch * self.devices // self.context_parallel
        hybrid = {"fsdp.shard_group_size": self.devices // 2} if self.strategy.startswith("hybrid") else {}
        return load_config(
            None,
            {
                "backend": "xla",
                "output_dir": folder,
                "model.config": architecture,
                "strategy": self.strategy,
                "context_parallel_size": self.context_parallel,
                "precision": self.precision,
                "data.seq_len": self.seq_len,
                "data.eval_fraction": 0.01 if self.others else 0,
                "log.sample_tokens": 32 if self.others else 0,
                "adapter.type": self.adapter,
                "train.optimizer": self.optimizer,
                "train.micro_batch_size": self.micro_batch,
                "train.global_batch_size": self.micro_batches * sequences,
                "memory.activation_checkpointing": self.recompute,
                "xla.scan_layers": self.scan_layers,
                "xla.attention_rows": self.attention_rows,
                **hybrid,
                **OTHER_TASKS.get(self.model, {}),
            },
        )


_MODELS: dict[tuple[str, ...], MetaModel] = {}


def planner_of(case: Case, folder: str) -> Planner:
    """Build the planner for a case's run.

    Cases with the same model, adapter, optimizer and precision share a model on the meta device, and
    its cached forward and backward passes.
    """
    config = resolve_adapter_config(case.config(folder))
    sections = config.model.model_dump_json(), config.adapter.model_dump_json()
    model = *sections, config.train.optimizer, config.precision
    if model not in _MODELS:
        built = build_training_model(models.load_model_config(config.model), config)
        _MODELS[model] = MetaModel(built, config)
    device = find_device(case.device)
    target = PlanTarget("xla", Cluster(case.devices, device.devices_per_node), device, None)
    return Planner(config, _MODELS[model], target)


def plan(case: Case, folder: str) -> PlanOption:
    """Return the planner's prediction for a case."""
    planner = planner_of(case, folder)
    return planner.build_option(StrategySetting.from_config(planner.config))


def measure(case: Case, *, only_memory: bool) -> dict[str, Any]:
    """Trace and compile one case.

    Args:
        case: Step to compile.
        only_memory: Whether to stop before code generation.

    Returns:
        Row for the file, which contains the fields of the case and the results. Sizes are in bytes per
        device. FLOPs and sent bytes are per step.
    """
    with tempfile.TemporaryDirectory(prefix="tpu-compile-") as scratch:
        vocabulary = planner_of(case, scratch).model.vocab_size
        folder = Path(scratch) / "graphs"
        traced = trace_graphs(case.config(scratch), case.devices, folder)
        host = json.loads((folder / ANSWER_FILE).read_text("utf-8"))["host_bytes"]
        compiled = compile_graph_files(
            {graph.name: graph.hlo_path for graph in traced},
            select_tpu_slice(case.device, case.devices, None),
            find_libtpu(),
            case.micro_batch * case.seq_len * vocabulary,
            only_memory=only_memory,
        )
    times = {"micro-batch": case.micro_batches, **dict.fromkeys(OTHER_GRAPHS, 0)}
    collectives: dict[str, CollectiveStatistics] = {}
    for graph in compiled.graphs:
        for kind, found in graph.collectives.items():
            more = found * times.get(graph.name, 1)
            collectives[kind] = collectives.get(kind, CollectiveStatistics()) + more
    return {
        **asdict(case),
        "libtpu": compiled.compiler,
        "only_memory": only_memory,
        "fits": compiled.fits,
        "problems": list(compiled.problems),
        "hbm_bytes": compiled.hbm_bytes,
        "peak_bytes": compiled.peak_bytes,
        "state_bytes": compiled.state_bytes,
        "working_bytes": compiled.working_bytes,
        "code_bytes": compiled.code_bytes,
        "sent_bytes": compiled.compute_sent_bytes_per_step(case.micro_batches),
        "collectives": {kind: [found.count, found.bytes] for kind, found in sorted(collectives.items())},
        "large_values": [
            f"{value.count} x {value.shape} {value.operation}"
            for graph in compiled.graphs
            for value in graph.large_values
        ],
        "host_transfers": [transfer for graph in compiled.graphs for transfer in graph.host_transfers],
        "flops": sum(graph.flops * times.get(graph.name, 1) for graph in compiled.graphs),
        "compile_seconds": round(sum(graph.compile_seconds for graph in compiled.graphs), 1),
        "trace_seconds": round(sum(graph.trace_seconds for graph in traced), 1),
        "trace_host_bytes": host,
        "compile_host_bytes": compiled.host_bytes,
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """Format a Markdown table with one line per row of results. The plan comes from the current code."""
    lines = [
        "| step | slice | fits | state, GiB | + temporary | planned: state | + temporary | sum to plan | "
        "TFLOP a chip | sends, GiB | trace, s | compile, s |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in found:
        case = case_of(row)
        planned, percent = _planned(row)
        words = [case.model, f"`{case.strategy}`", case.recompute, *_unusual(case)]
        measured = [f"{row['state_bytes'] / GIB:.2f}", f"{row['working_bytes'] / GIB:.2f}"]
        sums = [f"{row['flops'] / 1e12:.3g}", f"{row['sent_bytes'] / GIB:.2f}"]
        if row["problems"]:  # the compiler reports only the total memory, without a module to analyze
            measured, sums = [f"{row['peak_bytes'] / GIB:.2f} in all", ""], ["", ""]
        cells = [
            f"{', '.join(words)}, {case.micro_batch} x {case.seq_len}",
            f"{case.device}-{case.devices}",
            "yes" if row["fits"] else "no",
            *measured,
            f"{planned.resident / GIB:.2f}",
            f"{(planned.total - planned.resident) / GIB:.2f}",
            f"{percent:+.1f} %",
            *sums,
            f"{row['trace_seconds']:.0f}",
            f"{row['compile_seconds']:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _planned(row: dict[str, Any]) -> tuple[DeviceBytes, float]:
    """Compute the plan for a row of results.

    Returns:
        The planned bytes, and by how many percent the compiler's memory exceeds the plan (negative if
        it is lower).
    """
    with tempfile.TemporaryDirectory() as folder:
        planned = plan(case_of(row), folder).device_bytes
    # The sum of state and working memory excludes the code.
    taken = row["peak_bytes"] if row["problems"] else row["state_bytes"] + row["working_bytes"]
    return planned, (taken / planned.total - 1) * 100


def case_of(row: dict[str, Any]) -> Case:
    """Convert a row to its case. Missing fields have their defaults, and results are ignored."""
    return Case(**{field.name: row.get(field.name, field.default) for field in fields(Case)})


def _unusual(case: Case) -> list[str]:
    usual = {"precision": "bf16", "optimizer": "adamw"}
    found = [str(getattr(case, key)) for key, value in usual.items() if getattr(case, key) != value]
    found += [f"{case.micro_batches} micro-batches"] * (case.micro_batches > 1) + ["loop"] * case.scan_layers
    found += [f"{case.attention_rows} rows"] * (case.attention_rows is not None)
    found += [f"{case.context_parallel} a sequence"] * (case.context_parallel > 1)
    return found + [str(case.adapter)] * (case.adapter is not None) + ["all graphs"] * case.others


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu_compile", description=__doc__)
    parser.add_argument(
        "--case", nargs="+", metavar="TEXT", help="only cases with one of these in their name"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--only-memory", action="store_true", help="end before code is made")
    parser.add_argument(
        "--json", type=Path, default=RECORD, metavar="FILE", help="the cases, and the results"
    )
    given = parser.parse_args(argv)
    record: dict[str, dict[str, Any]] = json.loads(given.json.read_text("utf-8"))
    chosen = [name for name in record if not given.case or any(text in name for text in given.case)]
    if given.list:
        print("\n".join(chosen))
        return 0
    for name in chosen:
        try:
            record[name] = measure(case_of(record[name]), only_memory=given.only_memory)
        except UserError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            continue
        print(table([record[name]]).splitlines()[-1], file=sys.stderr, flush=True)
        given.json.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    measured = [record[name] for name in chosen if "peak_bytes" in record[name]]
    print(f"$ {command_line('benchmarks.tpu_compile', argv)}\n\n{table(measured)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
