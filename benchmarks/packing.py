"""Padding and throughput of packed texts: this project beside the Trainer and TRL, in one run.

``python -m benchmarks.packing`` trains one model on texts of very different lengths, in each way that the
three have to put them into batches, a few steps at a time in turns. All get the same tokens. What counts is
the tokens that a loss was computed for, by the second.

TRL need not be installed here: ``--trl FOLDER`` names a folder with it (``pip install --no-deps --target
FOLDER trl``). Without it, its rows are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("USE_TORCH_XLA", "0")

import numpy as np
import torch

from benchmarks.loops import PortableLoop
from benchmarks.machine import command_line, describe_machine, machine_in_words
from portable.config import RunConfig, load_config
from portable.registry import create_backend
from portable.run.batches import train_loader
from portable.run.prepare import Prepared, prepare
from portable.run.settle import settle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

OURS: dict[str, Any] = {
    "portable-train, packing: documents": "documents",
    "portable-train, packing: true": True,
    "portable-train, packing: false": False,
}
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass
class Seen:
    """What the steps of a contestant took, and the tokens that they were for."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second, by the median step."""
        return sum(self.tokens) / len(self.tokens) / statistics.median(self.seconds)

    @property
    def without(self) -> float:
        """The share of positions without such a token."""
        return 1 - sum(self.tokens) / sum(self.positions)


def write_texts(folder: Path, count: int) -> Path:
    """``count`` pieces of Python's standard library, of log-normal lengths."""
    library = "".join(
        path.read_text(encoding="utf-8", errors="replace")
        for path in sorted(Path(os.__file__).parent.glob("*.py"))
    )
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(6.5, 0.9, count).astype(int), 40, 12_000)
    starts = random.integers(0, len(library) - 12_000, count)
    path = folder / "texts.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            file.write(json.dumps({"text": library[start : start + length]}) + "\n")
    return path


def config_of(folder: Path, texts: Path, given: argparse.Namespace, packing: object) -> RunConfig:
    return load_config(
        None,
        {
            "backend": "cpu",
            "precision": given.precision,
            "output_dir": str(folder / "run"),
            "model.config.max_position_embeddings": given.seq_len,
            "data.source": str(texts),
            "data.cache_dir": str(folder / "cache"),
            "data.seq_len": given.seq_len,
            "data.packing": packing,
            "data.eval_fraction": 0,
            "train.global_batch_size": given.batch,
            "train.micro_batch_size": given.batch,
            "train.steps": 1_000_000,
            "log.trackers": [],
        },
    )


class Ours:
    """The loop of a run; its batches are counted by a second loader."""

    def __init__(self, prepared: Prepared, folder: Path, now: Callable[[], float]) -> None:
        self._loop = PortableLoop(prepared, folder, now)
        self._batches = iter(train_loader(prepared, 0))
        self.seen = Seen()

    def turn(self, steps: int) -> Iterator[tuple[float, int, int]]:
        for seconds in self._loop.turn(steps).seconds:
            labels = next(self._batches)["labels"]
            yield seconds, int((labels != -100).sum()), labels.numel()


class Peer:
    """A Trainer of transformers, or TRL's; each turn is a short training of its own.

    Args:
        prepared: a run, of which the peer gets model, tokenizer and tokens.
        documents: the tokens of each text.
        strategy: TRL's ``packing_strategy``; None for the Trainer, which pads.
    """

    def __init__(
        self,
        prepared: Prepared,
        documents: list[list[int]],
        folder: Path,
        strategy: str | None,
        now: Callable[[], float],
    ) -> None:
        self._prepared, self._documents, self._now = prepared, documents, now
        self._folder, self._strategy = folder, strategy
        self.seen = Seen()
        self._turn = 0

    def turn(self, steps: int) -> Iterator[tuple[float, int, int]]:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling

        config, self._turn = self._prepared.config, self._turn + 1
        model = AutoModelForCausalLM.from_config(self._prepared.model_config, attn_implementation="sdpa")
        arguments: dict[str, Any] = {
            "output_dir": str(self._folder),
            "use_cpu": True,
            "bf16": config.precision == "bf16",
            "per_device_train_batch_size": config.train.micro_batch_size,
            "max_steps": steps + 1,  # the first is slower
            "optim": "adamw_torch_fused",
            "report_to": "none",
            "save_strategy": "no",
            "logging_strategy": "no",
            "disable_tqdm": True,
            "gradient_checkpointing": False,
            "seed": self._turn,  # other samples each turn
        }
        seen: list[tuple[float, int, int]] = []
        tokenizer = self._prepared.data.tokenizer
        with redirect_stdout(sys.stderr):
            if self._strategy is None:
                from transformers import Trainer, TrainingArguments

                rows = [{"input_ids": tokens[: config.data.seq_len]} for tokens in self._documents]
                trainer = timed(Trainer, seen, self._now)(
                    model=model,
                    args=TrainingArguments(**arguments),
                    train_dataset=Dataset.from_list(rows),
                    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
                )
            else:
                from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined, unused-ignore]

                given = SFTConfig(
                    **arguments,
                    packing=True,
                    packing_strategy=self._strategy,
                    max_length=config.data.seq_len,
                )
                rows = [{"input_ids": tokens} for tokens in self._documents]
                trainer = timed(SFTTrainer, seen, self._now)(
                    model=model, args=given, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
                )
            trainer.train()
        yield from seen[1:]


def timed(kind: type, seen: list[tuple[float, int, int]], now: Callable[[], float]) -> Any:
    """The trainer ``kind``, which adds the seconds, trained tokens and positions of each step to ``seen``.

    A step ends where the next begins, so that the update and the loading of data count.
    """

    class Timed(kind):  # type: ignore[misc]
        _began: tuple[float, int, int] | None = None

        def training_step(self, model: Any, inputs: Any, *rest: Any) -> Any:
            self._finish()
            labels = inputs["labels"]
            self._began = now(), int((labels != -100).sum()), labels.numel()
            return super().training_step(model, inputs, *rest)

        def train(self, *given: Any, **more: Any) -> Any:
            result = super().train(*given, **more)
            self._finish()
            return result

        def _finish(self) -> None:
            if self._began is not None:
                start, tokens, positions = self._began
                seen.append((now() - start, tokens, positions))

    return Timed


def contestants(folder: Path, given: argparse.Namespace) -> tuple[dict[str, Any], dict[str, float]]:
    """The contestants by name, and the padding of all samples where it is known before."""
    texts = write_texts(folder, given.texts)
    found: dict[str, Any] = {}
    planned = {}
    now = CLOCKS[given.clock]
    for name, packing in OURS.items():
        config = config_of(folder, texts, given, packing)
        backend = create_backend("cpu")
        prepared = prepare(settle(config, backend.name), backend)
        found[name] = Ours(prepared, folder / f"ours {len(found)}", now)
        if packing == "documents":
            planned[name] = prepared.data.train.waste
            documents = documents_of(prepared)
    found["Trainer, padded"] = Peer(prepared, documents, folder, None, now)
    if given.trl is not None:
        for strategy in ("bfd", "wrapped"):
            found[f"TRL, {strategy}"] = Peer(prepared, documents, folder, strategy, now)
    return found, planned


def documents_of(prepared: Prepared) -> list[list[int]]:
    """The tokens of each text."""
    samples: Any = prepared.data.train
    cache = samples._cache
    return [cache.document("text", number).tolist() for number in range(cache.documents)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", type=Path, metavar="FOLDER", help="a folder with TRL")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step")
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument(
        "--clock",
        choices=tuple(CLOCKS),
        default="wall",
        help="cpu: processor time, for a busy machine; set OMP_NUM_THREADS=1 with it",
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    given = parser.parse_args(argv)
    if given.trl is not None:
        sys.path.append(str(given.trl))
    machine = describe_machine(torch.device("cpu"), *(() if given.trl is None else ("trl",)))
    with tempfile.TemporaryDirectory() as folder:
        found, planned = contestants(Path(folder), given)
        for turn in range(given.rounds + 1):
            for name, contestant in found.items():
                print(f"turn {turn} of {given.rounds}: {name}", file=sys.stderr)
                for seconds, tokens, positions in contestant.turn(given.steps):
                    if turn:  # the first warms up
                        seen: Seen = contestant.seen
                        seen.seconds.append(seconds)
                        seen.tokens.append(tokens)
                        seen.positions.append(positions)
    print(f"\n{command_line('benchmarks.packing', argv)}\n\n{machine_in_words(machine)}\n")
    print("| | s a step | tokens a step | positions without | tokens/s | beside packing: true |")
    print("|---|---|---|---|---|---|")
    plain: Seen = found["portable-train, packing: true"].seen
    for name, contestant in found.items():
        seen = contestant.seen
        without = planned.get(name, seen.without)
        median = statistics.median(seen.seconds)
        print(
            f"| {name} | {median:.3f} | {sum(seen.tokens) / len(seen.tokens):,.0f} | {without:.1%} "
            f"| {seen.rate:,.0f} | {seen.rate / plain.rate:.2f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
