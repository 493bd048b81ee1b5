"""What libtpu's compiler says of a step, beside the plan: model x slice x strategy.

``python -m benchmarks.tpu_compile --json tpu.json`` traces each step without weights,
compiles it for the slice and writes a table. It needs no TPU. Large models take minutes each: ``--case``
chooses, and ``--json`` keeps what earlier calls have found, so that a call goes on where the last one ended.
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
from portable.adapters.adapter import training_model
from portable.adapters.settings import settled
from portable.config import load_config
from portable.errors import UserError
from portable.model import build as models
from portable.planner.compiled import Collective
from portable.planner.device_lookup import named
from portable.planner.memory_model import Cluster, Setting
from portable.planner.meta_model import MetaModel
from portable.planner.plan import Planner, Target
from tpu.compile.compiler import compile_graphs, find_library
from tpu.compile.slices import find_slice
from tpu.compile.trace import ANSWER, trace_graphs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from portable.config import RunConfig
    from portable.planner.plan import DeviceBytes, Option

GIB = 1 << 30
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen2-0.5b": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "mixtral-8x7b": {
        **_LLAMA,
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
# Two layers of real width: what each architecture and setting compiles to, in seconds.
_WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
# Values that do not fit into a core's vector memory, as in large models.
_WIDER = {
    **_WIDE,
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {**_WIDE, "model_type": "llama", "vocab_size": 32000, "tie_word_embeddings": False},
    "wide-llama": {**_WIDER, "num_hidden_layers": 4},
    "wide-llama-2": {**_WIDER, "num_hidden_layers": 2},
    "qwen2": {**_WIDE, "model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": True},
    "qwen3": {**_WIDE, "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128},
    "mistral": {**_WIDE, "model_type": "mistral", "vocab_size": 32768},
    "gemma2": {**_WIDE, "model_type": "gemma2", "vocab_size": 256000, "head_dim": 128},
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 50257,
        "n_embd": 1024,
        "n_layer": 2,
        "n_head": 16,
        "n_positions": 1024,
    },
    "opt": {
        "model_type": "opt",
        "vocab_size": 50272,
        "hidden_size": 1024,
        "word_embed_proj_dim": 1024,
        "ffn_dim": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "max_position_embeddings": 1024,
    },
    "bert": {
        "model_type": "bert",
        "vocab_size": 30522,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "max_position_embeddings": 1024,
    },
    "t5": {
        "model_type": "t5",
        "vocab_size": 32128,
        "d_model": 1024,
        "d_kv": 64,
        "d_ff": 2816,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 16,
    },
    "mixtral": {
        **_WIDE,
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
OTHER_GRAPHS = ("evaluation", "generation")
OTHER_TASKS: dict[str, dict[str, Any]] = {
    "bert": {"model.task": "masked-lm", "data.packing": False},
    "t5": {"model.task": "seq2seq-lm", "data.target_field": "text", "data.source": "texts.jsonl"},
}


@dataclass(frozen=True)
class Case:
    """A step to compile."""

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
    others: bool = False
    """Evaluation and generation as well."""

    @property
    def name(self) -> str:
        parts = [self.model, f"{self.device}-{self.devices}", self.strategy, self.recompute]
        parts += [self.precision] * (self.precision != "bf16") + [self.optimizer] * (
            self.optimizer != "adamw"
        )
        parts += [f"{self.micro_batches}-micro-batches"] * (self.micro_batches > 1)
        parts += ["scan"] * self.scan_layers
        parts += [f"rows-{self.attention_rows}"] * (self.attention_rows is not None)
        parts += [str(self.adapter)] * (self.adapter is not None) + ["all-graphs"] * self.others
        return "/".join([*parts, f"{self.micro_batch}x{self.seq_len}"])

    def config(self, folder: str) -> RunConfig:
        architecture = {**SMALL, **MODELS}[self.model]
        hybrid = {"fsdp.shard_group_size": self.devices // 2} if self.strategy.startswith("hybrid") else {}
        return load_config(
            None,
            {
                "backend": "xla",
                "output_dir": folder,
                "model.config": architecture,
                "strategy": self.strategy,
                "precision": self.precision,
                "data.seq_len": self.seq_len,
                "data.eval_fraction": 0.01 if self.others else 0,
                "log.sample_tokens": 32 if self.others else 0,
                "adapter.type": self.adapter,
                "train.optimizer": self.optimizer,
                "train.micro_batch_size": self.micro_batch,
                "train.global_batch_size": self.micro_batch * self.devices * self.micro_batches,
                "memory.activation_checkpointing": self.recompute,
                "xla.scan_layers": self.scan_layers,
                "xla.attention_rows": self.attention_rows,
                **hybrid,
                **OTHER_TASKS.get(self.model, {}),
            },
        )


def _large(model: str, device: str, devices: int, batch: int, seq_len: int, **given: Any) -> Case:
    """A step as one would run it: recomputed, in a loop, attention by rows."""
    usual = {"strategy": "full_shard", "scan_layers": True, "attention_rows": 512 if seq_len > 1024 else None}
    return Case(model, device, devices, micro_batch=batch, seq_len=seq_len, **{**usual, **given})


def _small(model: str, strategy: str = "full_shard", recompute: str = "full", **given: Any) -> Case:
    batch, seq_len = (4, 2048) if model.startswith("wide") else (2, 256 if model == "mixtral" else 1024)
    return Case(model, "v5e", 4, strategy, batch, seq_len, recompute, **given)


FAMILIES = [model for model in SMALL if not model.startswith("wide")]
DIFFERENT = ["llama", "gpt2", "t5", "mixtral"]
SETTINGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "`full_shard`": ({}, FAMILIES),
    "no recomputation": ({"recompute": "none"}, FAMILIES),
    # Of Gemma 2 and T5, two layers are not alike.
    "loop": ({"scan_layers": True}, [model for model in FAMILIES if model not in ("gemma2", "t5")]),
    "fp32": ({"precision": "fp32"}, DIFFERENT),
    "`shard_grad_op`": ({"strategy": "shard_grad_op"}, DIFFERENT),
    "`hybrid_shard`": ({"strategy": "hybrid_shard"}, DIFFERENT),
    "`no_shard`": ({"strategy": "no_shard"}, DIFFERENT),
    "LoRA": ({"adapter": "lora"}, DIFFERENT),
}
"""The columns of the second table, and the architectures that are compiled for each."""
COLUMN = {
    _small(model, **given): heading for heading, (given, models) in SETTINGS.items() for model in models
}
CASES = (
    _large("qwen2-0.5b", "v5e", 4, 1, 2048),
    _large("qwen2-0.5b", "v4", 4, 2, 2048, strategy="no_shard"),
    _large("qwen2-0.5b", "v6e", 4, 2, 2048, strategy="shard_grad_op"),
    _large("llama-1b", "v5e", 8, 1, 4096),
    _large("llama-1b", "v5e", 8, 1, 4096, strategy="shard_grad_op"),
    _large("llama-1b", "v5e", 8, 1, 4096, scan_layers=False),
    _large("llama-1b", "v4", 8, 2, 4096),
    _large("llama-1b", "v6e", 8, 2, 4096),
    _large("llama-8b", "v5e", 16, 1, 4096),
    _large("llama-8b", "v5e", 16, 1, 4096, micro_batches=4),
    _large("llama-8b", "v5e", 16, 1, 4096, others=True),
    _large("llama-8b", "v5e", 16, 1, 4096, optimizer="adafactor"),
    _large("llama-8b", "v5e", 16, 1, 4096, optimizer="muon"),
    _large("llama-8b", "v5e", 4, 1, 4096, adapter="lora"),
    _large("llama-8b", "v5e", 64, 1, 4096),
    _large("llama-8b", "v4", 16, 1, 4096),
    _large("llama-8b", "v5p", 16, 1, 8192),
    _large("llama-8b", "v5p", 16, 1, 4096, recompute="none"),
    _large("llama-8b", "v6e", 16, 1, 8192),
    _large("llama-8b", "v6e", 16, 1, 8192, strategy="hybrid_shard"),
    _large("llama-8b", "v6e", 16, 1, 4096, strategy="shard_grad_op"),
    _large("mixtral-8x7b", "v5p", 64, 1, 2048),
    _large("llama-70b", "v5p", 64, 1, 8192),
    _large("llama-70b", "v4", 64, 1, 4096),
    _large("llama-70b", "v6e", 64, 1, 4096),
    _large("llama-70b", "v5e", 64, 1, 4096),
    _large("llama-70b", "v5e", 64, 1, 4096, adapter="lora"),
    *(_small("wide-llama-2", recompute=recompute) for recompute in ("full", "none")),
    *(
        _small("wide-llama", recompute=recompute, scan_layers=loop, attention_rows=512)
        for recompute in ("full", "none")
        for loop in (False, True)
    ),
    *(_small(model, **given) for given, models in SETTINGS.values() for model in models),
    *(
        _small("llama", strategy, "none")
        for strategy in ("shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard")
    ),
    _small("llama", "hybrid_shard_zero2"),
    *(_small(model, optimizer=o) for model in ("llama", "mixtral") for o in ("adafactor", "sgd", "muon")),
    _small("llama", micro_batches=4),
    _small("llama", others=True),
    # Minutes each: layers one by one.
    _large("llama-8b", "v5e", 16, 1, 4096, scan_layers=False),
    _large("llama-70b", "v5p", 64, 1, 8192, scan_layers=False),
)


_MODELS: dict[tuple[str, ...], MetaModel] = {}


def planner_of(case: Case, folder: str) -> Planner:
    """The planner of a case's run. Cases of one model share it, and the passes that it has run."""
    config = settled(case.config(folder))
    sections = config.model.model_dump_json(), config.adapter.model_dump_json()
    model = *sections, config.train.optimizer, config.precision
    if model not in _MODELS:
        built = training_model(models.model_config(config.model), config)
        _MODELS[model] = MetaModel(built, config)
    device = named(case.device)
    target = Target("xla", Cluster(case.devices, device.per_node), device, None)
    return Planner(config, _MODELS[model], target)


def plan(case: Case, folder: str) -> Option:
    """What the planner says of a case."""
    planner = planner_of(case, folder)
    return planner.option(Setting.of(planner.config))


def measure(case: Case, *, only_memory: bool) -> dict[str, Any]:
    """Trace and compile one case. Sizes in bytes, of one device; FLOPs and bytes sent in a step."""
    with tempfile.TemporaryDirectory(prefix="tpu-compile-") as scratch:
        vocabulary = planner_of(case, scratch).model.vocab_size
        folder = Path(scratch) / "graphs"
        traced = trace_graphs(case.config(scratch), case.devices, folder)
        host = json.loads((folder / ANSWER).read_text("utf-8"))["host_bytes"]
        compiled = compile_graphs(
            {graph.name: graph.path for graph in traced},
            find_slice(case.device, case.devices, None),
            find_library(),
            case.micro_batch * case.seq_len * vocabulary,
            only_memory=only_memory,
        )
    times = {"micro-batch": case.micro_batches, **dict.fromkeys(OTHER_GRAPHS, 0)}
    collectives: dict[str, Collective] = {}
    for graph in compiled.graphs:
        for kind, found in graph.collectives.items():
            more = found * times.get(graph.name, 1)
            collectives[kind] = collectives.get(kind, Collective()) + more
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
        "sent_bytes": compiled.sent_bytes(case.micro_batches),
        "collectives": {kind: [found.count, found.bytes] for kind, found in sorted(collectives.items())},
        "large_values": [
            f"{value.count} x {value.shape} {value.operation}"
            for graph in compiled.graphs
            for value in graph.large_values
        ],
        "host_transfers": [transfer for graph in compiled.graphs for transfer in graph.host_transfers],
        "flops": sum(graph.flops * times.get(graph.name, 1) for graph in compiled.graphs),
        "compile_seconds": round(sum(graph.compile_seconds for graph in compiled.graphs), 1),
        "trace_seconds": round(sum(graph.seconds for graph in traced), 1),
        "trace_host_bytes": host,
        "compile_host_bytes": compiled.host_bytes,
    }


def table(found: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, one line a case. The plan is today's."""
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
        if row["problems"]:  # the compiler gives its need, and no module
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


def matrix(found: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of every architecture in every setting: memory, and what it is to today's plan."""
    rows = {case_of(row): row for row in found}
    columns = {
        heading: given
        for heading, (given, models) in SETTINGS.items()
        if any(_small(model, **given) in rows for model in models)
    }
    lines = [f"| two layers | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for model in FAMILIES:
        cells = []
        for given in columns.values():
            row = rows.get(_small(model, **given))
            cells.append("" if row is None else f"{_taken(row) / GIB:.2f} ({_planned(row)[1]:+.0f} %)")
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(found: Sequence[dict[str, Any]]) -> str:
    """Both: what is in no column of the second is a line of the first."""
    apart = [row for row in found if case_of(row) not in COLUMN]
    return f"{table(apart)}\n\n{matrix(found)}"


def _taken(row: dict[str, Any]) -> int:
    """Bytes of a chip without code."""
    taken: int = row["peak_bytes"] if row["problems"] else row["state_bytes"] + row["working_bytes"]
    return taken


def _planned(row: dict[str, Any]) -> tuple[DeviceBytes, float]:
    """What the planner says, and by how many percent the compiler says more."""
    with tempfile.TemporaryDirectory() as folder:
        planned = plan(case_of(row), folder).device_bytes
    return planned, (_taken(row) / planned.total - 1) * 100


def case_of(row: dict[str, Any]) -> Case:
    """The case that ``row`` is of."""
    return Case(**{field.name: row[field.name] for field in fields(Case)})


def _unusual(case: Case) -> list[str]:
    usual = {"precision": "bf16", "optimizer": "adamw"}
    found = [str(getattr(case, key)) for key, value in usual.items() if getattr(case, key) != value]
    found += [f"{case.micro_batches} micro-batches"] * (case.micro_batches > 1) + ["loop"] * case.scan_layers
    found += [f"{case.attention_rows} rows"] * (case.attention_rows is not None)
    return found + [str(case.adapter)] * (case.adapter is not None) + ["all graphs"] * case.others


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tpu_compile", description=__doc__)
    parser.add_argument(
        "--case", nargs="+", metavar="TEXT", help="only cases with one of these in their name"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--only-memory", action="store_true", help="end before code is made")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="add the results to this file; what it has is not repeated"
    )
    given = parser.parse_args(argv)
    cases = [case for case in CASES if not given.case or any(text in case.name for text in given.case)]
    if given.list:
        print("\n".join(case.name for case in cases))
        return 0
    known: dict[str, dict[str, Any]] = {}
    if given.json is not None and given.json.exists():
        known = json.loads(given.json.read_text("utf-8"))
    for case in cases:
        if case.name in known:
            continue
        try:
            known[case.name] = measure(case, only_memory=given.only_memory)
        except UserError as error:
            print(f"{case.name}: {error}", file=sys.stderr, flush=True)
            continue
        print(table([known[case.name]]).splitlines()[-1], file=sys.stderr, flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    rows = [known[case.name] for case in CASES if case.name in known]
    print(f"$ {command_line('benchmarks.tpu_compile', argv)}\n\n{tables(rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
