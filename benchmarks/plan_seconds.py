"""How long ``portable-plan`` takes for a large model, beside what it cannot do without.

``python -m benchmarks.plan_seconds --docs docs/planning.md`` runs, in turns and each in a process of its own:
the first plan of a model, with nothing kept; a later one of the same model on another device; the import of
the model's code, which whoever builds it waits for; and the memory estimator of DeepSpeed, which reckons
parameters, gradients and optimizer state from a number of parameters that it is told.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from benchmarks.machine import command_line, describe_machine, machine_in_words
from benchmarks.pages import put_into

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BEGIN = "<!-- benchmarks.plan_seconds: begin -->"
END = "<!-- benchmarks.plan_seconds: end -->"
LLAMA_70B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
_PLAN = ["-m", "portable.planner.cli", "--data.seq_len", "4096", "--train.global_batch_size", "64"]
_IMPORT = "import transformers.models.llama.modeling_llama"
_ESTIMATE = (
    "from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold as estimate; "
    "estimate(total_params=70_553_706_496, largest_layer_params=1_050_673_152, num_gpus_per_node=8, "
    "num_nodes=2)"
)


def commands(model: Mapping[str, object]) -> dict[str, list[str]]:
    """What is run, by what it is called; the first leaves behind what the second finds."""
    plan = [*_PLAN, "--devices", "16", "--model.config", json.dumps(model)]
    return {
        "portable-plan, the first of this model": [*plan, "--device", "h100"],
        "portable-plan, again, for another device": [*plan, "--device", "h200"],
        "importing the model's code": ["-c", _IMPORT],
        "DeepSpeed's estimator, told the number of parameters": ["-c", _ESTIMATE],
    }


def measure(rounds: int, model: Mapping[str, object]) -> dict[str, float]:
    """Medians in seconds. What the first round reads from the disk for all is not counted."""
    found: dict[str, list[float]] = {name: [] for name in commands(model)}
    for index in range(rounds + 1):
        with tempfile.TemporaryDirectory(prefix="plan-seconds-") as cache:
            environment = {
                **os.environ,
                "XDG_CACHE_HOME": cache,
                "USE_TORCH_XLA": "0",
                "DS_ACCELERATOR": "cpu",
            }
            for name, arguments in commands(model).items():
                start = time.perf_counter()
                subprocess.run(
                    [sys.executable, *arguments],
                    env=environment,
                    check=True,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                if index:
                    found[name].append(time.perf_counter() - start)
        print(f"round {index} of {rounds}", file=sys.stderr, flush=True)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def table(seconds: Mapping[str, float]) -> str:
    """A Markdown table; also as multiples of the first line's."""
    base = next(iter(seconds.values()))
    lines = ["| | seconds | of the first |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {took:.2f} | {took / base:.2f} |" for name, took in seconds.items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_seconds", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="put the table into this page as well")
    given = parser.parse_args(argv)
    command = command_line("benchmarks.plan_seconds", argv)
    machine = describe_machine(torch.device("cpu"), "deepspeed")
    seconds = measure(given.rounds, LLAMA_70B)
    on = machine_in_words(machine)
    told = f"{table(seconds)}\n\n`{command}`; Llama, 70 billion parameters, 16 devices; {on}"
    print(told)
    if given.docs is not None:
        put_into(given.docs, f"\n{told}\n", BEGIN, END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
