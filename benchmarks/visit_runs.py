"""Runs of ``portable-train`` itself on a GPU, each compared with the truth: a part of a visit.

``python -m benchmarks.visit_runs parity`` trains as a user would, and prints one line of JSON with what was
measured. Exits with 1 if a promise was broken. Without a GPU, or with ``--small``, models are tiny and run
on the CPU. Most launches run in processes that were started ahead and have imported everything: a visit has
no minutes for imports. (Forks of a process that has would not do: some libraries start CUDA as they are
imported, and no fork can use it then.)
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.kills import Run, until
from converters import Tensor, open_checkpoint
from portable.cli import main as portable_train
from portable.ranks.parent_death import die_with_parent
from portable.reporting.metrics import read_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

AHEAD = max(1, (os.cpu_count() or 1) // 8)
"""Processes that wait for their command."""
LOADED = (
    "portable.engines.backend",
    "portable.engines.fsdp.engine",
    "portable.run.rank",
    "transformers.models.llama.modeling_llama",
)
STEPS = 12
KILLS = 5
CLOSE = 1e-4
"""Largest relative difference of a GPU's losses from the CPU's in fp32: it sums in another order."""

TINY = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
HALF_BILLION = {
    "model_type": "llama",
    "vocab_size": 32768,
    "hidden_size": 1280,
    "intermediate_size": 3456,
    "num_hidden_layers": 22,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
BERT = {"model_type": "bert", "max_position_embeddings": 128}
SMALL_BERT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}


class BrokenError(Exception):
    """What was promised did not hold."""


@dataclass
class Place:
    """Where a check runs."""

    folder: Path
    device: str
    small: bool
    _waiting: deque[subprocess.Popen[str]] = field(default_factory=deque)

    def close(self) -> None:
        """End the processes that have no command."""
        for process in self._waiting:
            process.kill()
            process.communicate()

    def _launched(self, flags: Sequence[str]) -> int:
        """The exit code of ``portable-train`` with ``flags``."""
        while len(self._waiting) <= AHEAD:
            command = [sys.executable, "-m", "benchmarks.visit_runs", "--wait"]
            self._waiting.append(subprocess.Popen(command, stdin=subprocess.PIPE, text=True))
        process = self._waiting.popleft()
        process.communicate(json.dumps(flags) + "\n")
        return process.returncode

    def train(self, name: str, **settings: Any) -> Path:
        """Run ``portable-train`` with dotted settings (``__`` for a dot) in the folder ``name``.

        Raises:
            BrokenError: it failed.
        """
        output = self.folder / name
        given = {"backend": self.device, "output_dir": str(output), "log.trackers": []}
        given |= {key.replace("__", "."): value for key, value in settings.items()}
        given.setdefault("data.cache_dir", str(self.folder / "cache"))
        flags = [
            f"--{key}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in given.items()
        ]
        if code := self._launched(flags):
            raise BrokenError(f"{name}: portable-train ended with {code}; its error is above")
        return output

    def tiny(self, name: str, **settings: Any) -> Path:
        """Train the tiny Llama for some steps in fp32, logging each."""
        given: dict[str, Any] = {
            "precision": "fp32",
            "model__config": TINY,
            "data__seq_len": 64,
            "data__max_samples": 40,
            "data__eval_fraction": 0,
            "train__steps": STEPS,
            "train__warmup_steps": 2,
            "train__eval_every": None,
            "checkpoint__every_steps": 4,
            "log__every_steps": 1,
            "log__sample_tokens": 0,
        }
        return self.train(name, **given | settings)


def wait() -> int:
    """Import everything, and then be the ``portable-train`` whose flags come on standard input."""
    die_with_parent()
    for name in LOADED:
        importlib.import_module(name)
    flags = sys.stdin.readline()
    return portable_train(json.loads(flags)) if flags else 0


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder) if "loss" in row]


def difference(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of two runs' losses.

    Raises:
        BrokenError: they have different lengths.
    """
    if len(found) != len(expected) or not expected:
        raise BrokenError(f"{len(found)} losses where {len(expected)} were expected")
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise BrokenError(text)


def _falls(found: Sequence[float], by: float) -> None:
    third = max(1, len(found) // 3)
    first, last = sum(found[:third]) / third, sum(found[-third:]) / third
    _require(last < first - by, f"the loss went from {first:.3f} to {last:.3f}")


def _rate(folder: Path) -> dict[str, Any]:
    """The last throughput and the largest memory in the metrics."""
    rows = read_metrics(folder)
    rates = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second")]
    peaks = [row["memory"] for row in rows if row.get("memory")]
    found: dict[str, Any] = {}
    if rates:
        found["tokens_per_second"] = round(max(rates))
    if peaks:
        found["peak_gib"] = round(max(peaks) / 2**30, 2)
    return found


def quickstart(place: Place) -> dict[str, Any]:
    """The command that a user types first, then the conversion of its checkpoint."""
    begun = time.monotonic()
    folder = place.folder / "quickstart"
    command = [sys.executable, "-m", "portable.cli", f"--output_dir={folder}"]
    few = ["--train.steps=8", "--log.every_steps=1"] if place.small else []
    _require(subprocess.run([*command, *few], check=False).returncode == 0, "portable-train failed")
    seconds = time.monotonic() - begun
    _falls(losses(folder), 0.05 if place.small else 0.5)
    out = place.folder / "out"
    command = [sys.executable, "-m", "converters.cli", str(folder), str(out)]
    _require(subprocess.run(command, check=False).returncode == 0, "portable-convert failed")
    return {"seconds": round(seconds, 1), "loss": losses(folder)[-1], **_rate(folder)}


def parity(place: Place) -> dict[str, Any]:
    """The device's losses beside the CPU's in fp32, for each strategy."""
    return _beside_cpu(place, {strategy: {"strategy": strategy} for strategy in ("no_shard", "full_shard")})


def resume(place: Place) -> dict[str, Any]:
    """A run in two launches equals one launch bit for bit: losses, weights and moments."""
    kinds: dict[str, dict[str, Any]] = {
        "fp32": {},
        "bf16": {"precision": "bf16", "memory__activation_checkpointing": "full"},
        "sharded": {"precision": "bf16", "strategy": "full_shard"},
    }
    for name, settings in kinds.items():
        whole = place.tiny(f"{name}-whole", **settings)
        place.tiny(f"{name}-parts", train__stop_after=5, **settings)
        parts = place.tiny(f"{name}-parts", **settings)
        _require(losses(parts) == losses(whole), f"{name}: the resumed run's losses are others")
        _same_state(parts, whole, name)
    return {"equal bit for bit": ", ".join(kinds)}


def _same_state(found: Path, expected: Path, name: str) -> None:
    """Compare the newest checkpoints of two runs byte for byte."""
    one, other = (dict(_tensors(folder)) for folder in (found, expected))
    _require(one.keys() == other.keys(), f"{name}: other tensors")
    for key, tensor in one.items():
        same = not isinstance(tensor, Tensor) or bytes(tensor.read()) == bytes(other[key].read())
        _require(same and (isinstance(tensor, Tensor) or tensor == other[key]), f"{name}: {key} differs")


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    checkpoint = open_checkpoint(folder)
    yield from checkpoint.tensors.items()
    _require(checkpoint.optimizer is not None, f"{folder.name}: no optimizer state")
    assert checkpoint.optimizer is not None
    for name, state in checkpoint.optimizer.state.items():
        yield from ((f"{name} {key}", value) for key, value in state.items())


def move(place: Place) -> dict[str, Any]:
    """From the CPU to the device and back, in the middle of a run."""
    whole = losses(place.tiny("whole", backend="cpu"))
    place.tiny("moved", backend="cpu", train__stop_after=4)
    place.tiny("moved", train__stop_after=8)
    place.tiny("moved", strategy="full_shard", train__stop_after=10)
    found = difference(losses(place.tiny("moved", backend="cpu")), whole)
    _require(found < CLOSE, f"losses differ by {found:.1e}")
    return {"difference": f"{found:.1e}"}


def kill(place: Place) -> dict[str, Any]:
    """SIGKILL at random moments; the run that ends equals an undisturbed one byte for byte."""
    return _killed(place, {}, KILLS)


def _killed(place: Place, changes: dict[str, Any], kills: int) -> dict[str, Any]:
    changes = {"backend": place.device, "train.steps": 40, **changes}
    whole = Run(place.folder, place.folder / "never killed", 40, ranks=1, changes=changes)
    whole.start("no_shard")
    code, output = whole.wait()
    _require(code == 0, f"the undisturbed run ended with {code}: {output[-500:]}")
    run = Run(place.folder, place.folder / "killed", 40, ranks=1, changes=changes)
    dice = random.Random(0)
    reached = []
    for number in count():
        run.start("no_shard")
        if number == kills:
            code, output = run.wait()
            _require(code == 0, f"the last launch ended with {code}: {output[-500:]}")
            break
        target = run.step() + dice.randint(1, 5)
        until(lambda: run.begun() or not run.running())
        until(lambda wanted=target: run.step() >= wanted or not run.running())  # type: ignore[misc]
        run.kill_everything()
        run.wait()
        reached.append(run.step())
    same = _exported(place.folder / "killed") == _exported(place.folder / "never killed")
    _require(same, "the weights differ from those of an undisturbed run")
    _require(run.losses() == whole.losses(), "the losses differ from those of an undisturbed run")
    return {"kills": kills, "at steps": " ".join(map(str, reached))}


def _exported(folder: Path) -> list[bytes]:
    """The weights that a run exported, of the model or of its adapter."""
    files = sorted((folder / "final").glob("*.safetensors"))
    _require(bool(files), f"{folder.name}: nothing was exported")
    return [path.read_bytes() for path in files]


def lora(place: Place) -> dict[str, Any]:
    """Adapters: moves from and to the CPU, kills, resumed bits; rates on half a billion frozen weights."""

    def base(name: str, sizes: dict[str, Any]) -> dict[str, Any]:
        folder = place.tiny(name, model__config=sizes, train__steps=2, checkpoint__every_steps=None)
        return {"model__config": None, "model__name_or_path": str(folder / "final"), "adapter__type": "lora"}

    small = base("small", TINY)
    given = {**small, "train__learning_rate": 1e-2, "checkpoint__every_steps": None}
    whole = losses(place.tiny("stays", backend="cpu", **given))
    place.tiny("moved", backend="cpu", train__stop_after=4, **given)
    place.tiny("moved", train__stop_after=8, strategy="full_shard", **given)
    far = difference(losses(place.tiny("moved", backend="cpu", **given)), whole)
    _require(far < CLOSE, f"losses differ by {far:.1e} after moves")
    found: dict[str, Any] = {"moved": f"{far:.1e}"}
    _killed(place, {key.replace("__", "."): value for key, value in small.items()}, 2)

    given["precision"] = "bf16"
    large = {**given, "train__steps": 20, "data__max_samples": 200}
    if not place.small:
        large |= base("large", HALF_BILLION)
        large |= {"data__seq_len": 1024, "train__global_batch_size": 16, "train__micro_batch_size": 8}
    for name in ("auto", "nf4", "int8"):
        folder = place.tiny(name, **large, adapter__base=name)
        _falls(losses(folder), 0.05)
        found |= {f"{name} {key}": value for key, value in _rate(folder).items()}
        found[f"{name} loss"] = round(losses(folder)[-1], 4)
        # On short sequences: flash attention adds gradients of more blocks up in any order.
        whole_run = place.tiny(f"{name}-whole", **given, adapter__base=name)
        place.tiny(f"{name}-parts", **given, adapter__base=name, train__stop_after=5)
        parts = place.tiny(f"{name}-parts", **given, adapter__base=name)
        _require(losses(parts) == losses(whole_run), f"{name}: the resumed run's losses are others")
        _require(_exported(parts) == _exported(whole_run), f"{name}: the resumed run's adapter is another")
    return {**found, "equal bit for bit": "resumed, killed"}


ON_HOST = {"memory__offload_optimizer": "cpu"}


def zero(place: Place) -> dict[str, Any]:
    """DeepSpeed's stages, without and with offloading."""
    return _beside_cpu(
        place,
        {
            "zero1": {"strategy": "zero1"},
            "zero2": {"strategy": "zero2"},
            "zero3": {"strategy": "zero3"},
            "zero2, optimizer offloaded": {"strategy": "zero2", **ON_HOST},
            "zero3, all offloaded": {"strategy": "zero3", **ON_HOST, "memory__offload_params": "cpu"},
        },
    )


def cpu_adam(place: Place) -> dict[str, Any]:
    """DeepSpeed's optimizer for the host, which is compiled first."""
    document = {"zero_force_ds_cpu_optimizer": True, "zero_optimization": {"stage": 2}}
    settings = {"strategy": "zero2", **ON_HOST, "deepspeed__config": document}
    return _beside_cpu(place, {"zero2, DeepSpeedCPUAdam": settings})


def _beside_cpu(place: Place, kinds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The differences of runs with ``kinds`` of settings from the losses of the CPU in fp32."""
    expected = losses(place.tiny("cpu", backend="cpu"))
    found = {}
    for name, settings in kinds.items():
        far = difference(losses(place.tiny(name, **settings)), expected)
        _require(far < CLOSE, f"{name}: losses differ by {far:.1e}")
        found[name] = f"{far:.1e}"
    return found


def zero_moves(place: Place) -> dict[str, Any]:
    """From FSDP2 to DeepSpeed's stages and back; a run of DeepSpeed in two launches."""
    expected = losses(place.tiny("cpu", backend="cpu"))
    for until_step, strategy in ((3, "full_shard"), (6, "zero2"), (9, "zero3"), (STEPS, "full_shard")):
        moved = place.tiny("moved", strategy=strategy, train__stop_after=until_step)
    far = difference(losses(moved), expected)
    _require(far < CLOSE, f"losses differ by {far:.1e} after moves")
    settings = {"strategy": "zero3", "precision": "bf16"}
    whole = place.tiny("bf16", **settings)
    place.tiny("bf16-parts", train__stop_after=5, **settings)
    parts = place.tiny("bf16-parts", **settings)
    _require(losses(parts) == losses(whole), "zero3: the resumed run's losses are others")
    return {"moved": f"{far:.1e}", "equal bit for bit": "zero3 resumed"}


def eight_bits(place: Place) -> dict[str, Any]:
    """AdamW with moments in 8 bits: ours, and bitsandbytes' by import path."""
    sizes = {"model__config": TINY, "train__learning_rate": 1e-3}
    expected = losses(place.tiny("adamw", **sizes))
    found = {}
    for name in ("adamw_8bit", "bitsandbytes.optim:AdamW8bit"):
        folder = name.partition(":")[0]
        given = {**sizes, "train__optimizer": name}
        far = difference(losses(place.tiny(folder, **given)), expected)
        _require(far < 1e-2, f"{name}: losses differ by {far:.1e} from those of AdamW")
        place.tiny(f"{folder}-parts", train__stop_after=5, **given)
        parts = place.tiny(f"{folder}-parts", **given)
        _require(
            losses(parts) == losses(place.folder / folder), f"{name}: the resumed run's losses are others"
        )
        found[folder] = f"{far:.1e}"
    return {**found, "equal bit for bit": "resumed"}


def float8(place: Place) -> dict[str, Any]:
    """Products in fp8 by torchao, as a function of the user's: losses, and a resumed run's bits."""
    given = {"precision": "bf16", "train__learning_rate": 1e-3}
    expected = losses(place.tiny("bf16", **given))
    given["model__function"] = "benchmarks.float8:converted"
    whole = losses(place.tiny("fp8", **given))
    far = difference(whole, expected)
    _require(whole != expected, "fp8: the losses are those of bf16")
    _require(far < 2e-2, f"fp8: losses differ by {far:.1e} from those of bf16")
    place.tiny("fp8-parts", train__stop_after=5, **given)
    _require(losses(place.tiny("fp8-parts", **given)) == whole, "fp8: the resumed run's losses are others")
    return {"from bf16": f"{far:.1e}", "equal bit for bit": "resumed"}


def llama(place: Place) -> dict[str, Any]:
    """Half a billion parameters in bf16: trained, saved, resumed, exported."""
    settings: dict[str, Any] = {
        "precision": "bf16",
        "strategy": "full_shard",
        "model__config": TINY if place.small else HALF_BILLION,
        "data__seq_len": 128 if place.small else 1024,
        "data__max_samples": 200,
        "train__steps": 12 if place.small else 40,
        "train__global_batch_size": 4 if place.small else 16,
        "train__micro_batch_size": 2 if place.small else 8,
        "train__learning_rate": 3e-3 if place.small else 3e-4,
        "checkpoint__every_steps": None,
        "log__every_steps": 2,
    }
    half = settings["train__steps"] // 2
    place.train("llama", train__stop_after=half, **settings)
    folder = place.train("llama", **settings)
    _falls(losses(folder), 0.1)
    saved = sum(path.stat().st_size for path in (folder / "final").iterdir())
    return {"loss": losses(folder)[-1], "final_mb": round(saved / 1e6), **_rate(folder)}


def bert(place: Place) -> dict[str, Any]:
    """Classification of texts in a JSONL file."""
    dice = random.Random(0)
    words = {"good": ["fine", "bright", "warm", "clear"], "bad": ["dull", "grey", "cold", "dim"]}
    rows = []
    for _ in range(2000):
        label = dice.choice(list(words))
        text = " ".join(dice.choices([*words[label], "a", "film", "about", "time"], k=12))
        rows.append(json.dumps({"text": f"{text} {dice.choice(words[label])}", "label": label}))
    source = place.folder / "reviews.jsonl"
    source.write_text("\n".join(rows) + "\n", "utf-8")
    folder = place.train(
        "bert",
        precision="bf16",
        model__task="sequence-classification",
        model__config=BERT | {"vocab_size": 400} | (SMALL_BERT if place.small else {}),
        data__source=str(source),
        data__seq_len=32,
        data__packing=False,
        train__steps=60,
        train__global_batch_size=32,
        train__micro_batch_size=32,
        train__learning_rate=1e-3 if place.small else 5e-5,
        log__every_steps=2,
    )
    _falls(losses(folder), 0.2)
    return {"loss": losses(folder)[-1], **_rate(folder)}


CHECKS: dict[str, Callable[[Place], dict[str, Any]]] = {
    check.__name__: check
    for check in (
        quickstart,
        parity,
        resume,
        move,
        kill,
        llama,
        bert,
        lora,
        zero,
        zero_moves,
        cpu_adam,
        eight_bits,
        float8,
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.visit_runs", description=__doc__)
    parser.add_argument("check", choices=CHECKS, nargs="?")
    parser.add_argument("--small", action="store_true", help="tiny models; the default without a GPU")
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.wait:
        return wait()
    if options.check is None:
        parser.error("name a check")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(prefix="visit-") as folder:
        place = Place(Path(folder), device, options.small or device == "cpu")
        try:
            found = CHECKS[options.check](place)
        except BrokenError as error:
            print(f"broken: {error}")
            return 1
        finally:
            place.close()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
