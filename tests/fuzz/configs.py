"""Random configs with --dry-run: whether a config ends in a traceback, hangs or is refused without a reason.

    python -m tests.fuzz.configs [--count 3000] [--seed 0] [--only N] [--json FILE]

Each case changes one to six settings of a tiny run. Their values follow the JSON Schema, with its bounds and
values just outside of them, or are of another type, or are odd: huge numbers, NaN, control characters, paths
of devices. Keys of model.config and of DeepSpeed files have odd values as well. All cases run in one process.
The program prints each broken promise with its case; `--only N` repeats one case.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from portable.config.reference import build_json_schema
from tests.tiny_models import tiny_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LONGEST = 10.0
"""Seconds of processor time after which a case counts as hanging."""
MEMORY = 1 << 30
"""Bytes by which one case may raise the peak of resident memory."""
BASE: dict[str, Any] = {
    "backend": "cpu",
    "strategy": "no_shard",
    "precision": "fp32",
    "output_dir": "run",
    "model": {
        "config": {
            "model_type": "llama",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 512,
            "max_position_embeddings": 64,
        }
    },
    "data": {"source": "data.txt", "tokenizer": "tokenizer", "seq_len": 32, "cache_dir": "cache"},
    "train": {"steps": 12, "global_batch_size": 4, "micro_batch_size": 1},
    "log": {"trackers": []},
}
HUGE = (2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, 10**30, 10**400, 10**4200)
INTEGERS = (-(10**400), -(2**31), -1, 0, 1, 2, 3, 7, 64, 999, 65_536, *HUGE)
FLOATS: tuple[float, ...] = (
    0.0,
    -0.0,
    5e-324,
    1e-46,
    1e-8,
    0.1,
    0.999999999,
    1.0,
    2.0,
    1e6,
    1e38,
    1e308,
    -1.0,
)
FLOATS += (float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *("", " ", "a", "auto", "none", "null", "true", "1e999", "0x10", "data.txt", "tokenizer", ".", "..", "/"),
    *(
        "../../data.txt",
        "~",
        "~nobody/x",
        "${HOME}",
        "$UNSET_VARIABLE",
        "${",
        "/dev/zero",
        "/dev/null",
        "/dev/stdin",
    ),
    *(
        "/proc/self/mem",
        "/proc/self/environ",
        "s3://",
        "s3://b/../x",
        "gs://b//x",
        "file:///etc/passwd",
        "http://[",
        "ftp://x",
    ),
    *(
        "os:system",
        "os:getcwd",
        "math:inf",
        "a.b:c(d=1)",
        "a:b(",
        "a:b(c=__import__('os'))",
        "json:loads('[')",
    ),
    *(
        "(a+)+$",
        "[",
        "(?P<",
        "*",
        "**",
        "{",
        "}",
        "%s%n",
        "a\nb",
        "a\tb",
        "\x1b[2J",
        "\u202e",
        "\0",
        "a\0b",
        "\ud800",
    ),
    *("é" * 300, "x" * 5000, "a/" * 2000, "train[:10%]", "org/name", "org/name/x", "-", "--x", "con", "NaN"),
)
NESTED: tuple[Any, ...] = (
    [],
    {},
    [[]],
    [None],
    {"a": {"b": 1}},
    {"": 0},
    [1, "a"],
    {"a": []},
    [{}],
    [{"name": "a"}],
)
_MODEL_KEYS = """
hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size
max_position_embeddings rms_norm_eps initializer_range head_dim pad_token_id attention_dropout
hidden_act tie_word_embeddings rope_theta rope_scaling rope_parameters dtype torch_dtype num_labels
id2label layer_types quantization_config auto_map architectures sliding_window attention_bias
mlp_bias pretraining_tp use_cache eos_token_id
"""
MODEL_KEYS = tuple(_MODEL_KEYS.split())
MODEL_VALUES: tuple[Any, ...] = (
    *(
        {"rope_type": kind, "factor": factor}
        for kind in ("linear", "dynamic", "yarn", "llama3", "x")
        for factor in (0, -1, 8.0, 1e300)
    ),
    *(
        {"type": "linear", "factor": 0},
        ["full_attention"],
        ["full_attention", "sliding_attention"],
        {"0": "a"},
    ),
    *({"quant_method": "bitsandbytes"}, {"AutoModel": "x.y"}),
)
TINY_TYPES = (
    "gpt2",
    "bert",
    "mixtral",
    "mamba2",
    "gemma3_text",
    "qwen3_moe",
    "t5",
    "bart",
    "rwkv",
    "falcon_h1",
)
MODEL_TYPES = (*TINY_TYPES, "nope", "", "auto", "../x", "\0")
DEEPSPEED: dict[str, tuple[Any, ...]] = {
    "zero_optimization": (
        {"stage": 2},
        {"stage": 3, "offload_param": {"device": "nvme"}},
        {"stage": 9},
        {"stage": "x"},
        [],
        3,
    ),
    "fp16": ({"enabled": True, "loss_scale": -1}, {"enabled": "auto"}, 7),
    "bf16": ({"enabled": True}, {"enabled": 1e400}),
    "optimizer": (
        {"type": "AdamW", "params": {"lr": 1e400, "betas": [0.9]}},
        {"type": "x"},
        {"params": []},
        "Adam",
    ),
    "scheduler": (
        {"type": "WarmupLR", "params": {"warmup_num_steps": -5}},
        {"type": "OneCycle", "params": {}},
        [],
    ),
    "train_batch_size": (0, 4, -1, "auto", 10**30, 10**400, 1.5),
    "train_micro_batch_size_per_gpu": (0, 1, "auto", 10**20),
    "gradient_accumulation_steps": (0, 1, "auto", 10**20, None),
    "gradient_clipping": (-1, 0, 1.0, "auto", 1e400, 10**400),
    "aio": ({"block_size": -1}, {"block_size": 10**400}),
    "activation_checkpointing": ({"partition_activations": True}, 5),
    "wall_clock_breakdown": ("x", True),
}


class Case(NamedTuple):
    """A config with its changes.

    Attributes:
        config: Content of the file.
        changes: Keys and values that differ from `BASE`.
        as_json: Whether the file is written as JSON.
    """

    config: dict[str, Any]
    changes: list[tuple[str, Any]]
    as_json: bool


class Outcome(NamedTuple):
    """Outcome of a case.

    Attributes:
        code: Exit code, or None if an exception left the program.
        broken: Promises that the case broke.
        seconds: Processor time in seconds.
        grown: Growth of the peak of resident memory, in bytes.
        error: End of standard error.
    """

    code: int | None
    broken: list[str]
    seconds: float
    grown: int
    error: str


class Generator:
    """A source of random configs.

    Args:
        seed: Seed of the run. Each case depends only on it and on the number of the case.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._schema = build_json_schema()
        self._leaves = list(self._iter_leaves(self._schema, ()))

    def build_case(self, number: int) -> Case:
        """Build the case with this number."""
        rng = random.Random(f"{self._seed} {number}")
        config, changes = copy.deepcopy(BASE), []
        for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4, 6))):
            path, value = self._draw_change(rng)
            node = config
            for part in path[:-1]:
                if not isinstance(node.get(part), dict):
                    node[part] = {}
                node = node[part]
            node[path[-1]] = value
            changes.append((".".join(path), value))
        return Case(config, changes, rng.random() < 0.5)

    def _draw_change(self, rng: random.Random) -> tuple[tuple[str, ...], Any]:
        kind = rng.random()
        if kind < 0.15:
            return ("model", "config", rng.choice(MODEL_KEYS)), rng.choice(
                (*MODEL_VALUES, self._draw_odd(rng), self._draw_odd(rng))
            )
        if kind < 0.2:
            return ("model", "config"), self._draw_model(rng)
        if kind < 0.26:
            names = rng.sample(sorted(DEEPSPEED), rng.randint(1, 3))
            return ("deepspeed", "config"), {name: rng.choice(DEEPSPEED[name]) for name in names}
        path, node = rng.choice(self._leaves)
        if path == ("backend",):  # others need their devices
            return path, rng.choice(("cpu", "auto", "x", None))
        return path, self._draw_value(rng, node)

    def _draw_model(self, rng: random.Random) -> dict[str, Any]:
        model_type = rng.choice(MODEL_TYPES)
        if model_type not in TINY_TYPES:
            return {"model_type": model_type}
        odd = {rng.choice(MODEL_KEYS): self._draw_odd(rng)} if rng.random() < 0.5 else {}
        return {**tiny_config(model_type), **odd}

    def _draw_value(self, rng: random.Random, node: dict[str, Any], depth: int = 0) -> Any:
        if rng.random() < 0.12 or depth > 4:
            return self._draw_odd(rng)
        node = self._resolve(node)
        for choice in ("anyOf", "oneOf"):
            if choice in node:
                return self._draw_value(rng, rng.choice(node[choice]), depth)
        if "const" in node:
            return node["const"]
        if "enum" in node:
            return rng.choice(node["enum"])
        match node.get("type"):
            case "boolean":
                return rng.choice((True, False, "yes", "off"))
            case "integer" | "number":
                return self._draw_number(rng, node)
            case "string":
                return rng.choice(TEXTS)
            case "array":
                items = node.get("prefixItems")
                if items is None:
                    items = [node.get("items", {})] * rng.choice((0, 1, 1, 2, 3))
                return [self._draw_value(rng, item, depth + 1) for item in items]
            case "object" if "properties" in node:
                chosen = [
                    name
                    for name in node["properties"]
                    if name in node.get("required", ()) or rng.random() < 0.3
                ]
                return {name: self._draw_value(rng, node["properties"][name], depth + 1) for name in chosen}
            case "object":
                inner = node.get("additionalProperties")
                inner = inner if isinstance(inner, dict) else {}
                return {
                    rng.choice(TEXTS): self._draw_value(rng, inner, depth + 1)
                    for _ in range(rng.randint(0, 2))
                }
        return self._draw_odd(rng)

    def _draw_number(self, rng: random.Random, node: dict[str, Any]) -> Any:
        """Draw a number within the bounds, next to one of them, or any."""
        whole = node["type"] == "integer"
        least = node.get("minimum", node.get("exclusiveMinimum", 0))
        most = node.get("maximum", node.get("exclusiveMaximum", 1 << 20))
        kind = rng.random()
        if kind < 0.55:
            usual = (1, 2, 4, 12, 64) if whole else (1e-8, 1e-3, 0.1, 0.5, 1.0, 10.0)
            return rng.choice([number for number in usual if least <= number <= most] or [least])
        if kind < 0.8:
            step = 1 if whole else rng.choice((1e-9, 0.1, 1.0))
            return rng.choice((least, most)) + rng.choice((-step, 0, step))
        return rng.choice(rng.choice((INTEGERS, FLOATS)))

    def _draw_odd(self, rng: random.Random) -> Any:
        return rng.choice(rng.choice((INTEGERS, FLOATS, TEXTS, NESTED, (None, True, False))))

    def _resolve(self, node: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in node:
            node = self._schema["$defs"][node["$ref"].rpartition("/")[2]]
        return node

    def _iter_leaves(
        self, node: dict[str, Any], path: tuple[str, ...]
    ) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
        node = self._resolve(node)
        if len(path) == 2 or "properties" not in node:
            yield path, node
        else:
            for name, inner in node["properties"].items():
                yield from self._iter_leaves(inner, (*path, name))


class HangError(BaseException):
    """A case that takes too much processor time."""


@contextmanager
def limit_time(seconds: float) -> Iterator[None]:
    """Raise HangError after this much processor time."""

    def stop(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1)  # again, in case the first exception is caught
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def write_case(case: Case, path: Path) -> None:
    """Write the config of a case as JSON or YAML."""
    if case.as_json:  # a subset of YAML, but for numbers that are not finite
        text = json.dumps(case.config).replace("Infinity", "1e999").replace("NaN", '".nan"')
    else:
        text = yaml.safe_dump(case.config, allow_unicode=True)
    path.write_text(text, "utf-8", errors="surrogatepass")


def run_case(case: Case, path: Path) -> Outcome:
    """Run a case with --dry-run in this process."""
    from portable.cli import main

    write_case(case, path)
    output, errors = io.StringIO(), io.StringIO()
    peak, started = _peak_memory(), time.process_time()
    code: int | None = None
    broken: list[str] = []
    try:
        with limit_time(LONGEST), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
            code = main(["--config", str(path), "--dry-run"])
    except HangError:
        broken.append(f"used {LONGEST:g} s of processor time:\n{traceback.format_exc()[-2000:]}")
    except SystemExit as error:
        broken.append(f"SystemExit({error.code!r})")
    except BaseException:
        broken.append(traceback.format_exc()[-3000:])
    seconds, grown = time.process_time() - started, _peak_memory() - peak
    said = errors.getvalue()
    if code == 2 and not said.startswith("error: ") and "\nerror: " not in said:
        broken.append("exit code 2 without an error line")
    elif code not in (0, 2, None):
        broken.append(f"exit code {code}")
    if grown > MEMORY:
        broken.append(f"took {grown >> 20} MiB")
    if any(not (character.isprintable() or character in "\n\t\r") for character in said + output.getvalue()):
        broken.append("printed a control character")
    return Outcome(code, broken, seconds, grown, said.strip()[-300:])


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def prepare_folder(folder: Path) -> None:
    """Write the data and the tokenizer that `BASE` names."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    (folder / "data.txt").write_text("Any text will do, if there is enough of it to learn from.\n" * 400)
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**alphabet, "<end>": len(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")  # type: ignore[no-untyped-call, unused-ignore]
    fast.save_pretrained(folder / "tokenizer")


def run_cases(numbers: Sequence[int], seed: int, folder: Path) -> Iterator[tuple[int, Case, Outcome]]:
    """Run cases in a folder, and yield the outcome of each."""
    prepare_folder(folder)
    generator = Generator(seed)
    path = folder / "config.yaml"
    before = Path.cwd()
    os.chdir(folder)
    try:
        first = run_case(Case(BASE, [], False), path)  # imports modules for all cases
        assert first.code == 0, first.error
        for number in numbers:
            case = generator.build_case(number)
            yield number, case, run_case(case, path)
    finally:
        os.chdir(before)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases and print the broken promises."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.configs", description=__doc__)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcome of each case to it")
    arguments = parser.parse_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    numbers = range(arguments.count) if arguments.only is None else [arguments.only]
    codes: Counter[int | None] = Counter()
    broken, longest = 0, 0.0
    rows = []
    with tempfile.TemporaryDirectory(prefix="fuzz-configs-") as folder:
        for number, case, outcome in run_cases(numbers, arguments.seed, Path(folder)):
            codes[outcome.code] += 1
            longest = max(longest, outcome.seconds)
            broken += bool(outcome.broken)
            changes = [(key, repr(value)[:200]) for key, value in case.changes]
            rows.append({"number": number, "changes": changes, **outcome._asdict()})
            if outcome.broken or arguments.only is not None:
                print(f"case {number}: {changes}\n  exit code {outcome.code}: {outcome.error}")
                print("".join(f"  {line}\n" for promise in outcome.broken for line in promise.splitlines()))
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(
        f"{len(rows)} configs (seed {arguments.seed}): {codes[0]} accepted, {codes[2]} refused, {broken} "
        f"broke a promise; the longest took {longest:.1f} s of processor time"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
