"""Tokenizing conversations, beside TRL: ``python -m benchmarks.conversations``.

Both read the same JSONL file with the same tokenizer and template, and end with tokens and the mask of what
the assistant says: here in the token cache, there in the prepared data set of an ``SFTTrainer``. TRL needs to
be installed. Each program runs in a process of its own, in an empty cache; the time is without imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu_model

TEXT = """
the model of a token is what we said about it and then there was more to say so let us go on with some long
answer that has many different words in it while nobody reads them
"""
WORDS = TEXT.split()


def write_conversations(path: Path, count: int) -> None:
    """Two to eight messages each, as in published sets."""
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            messages = []
            for turn in range(draw.choice((1, 1, 2, 2, 3, 4))):
                asked = " ".join(draw.choices(WORDS, k=draw.randint(8, 40)))
                said = " ".join(draw.choices(WORDS, k=draw.randint(20, 200)))
                messages += [
                    {"role": "user", "content": f"{number}.{turn} {asked}?"},
                    {"role": "assistant", "content": f"{said}."},
                ]
            file.write(json.dumps({"messages": messages}) + "\n")


def tokenizer(folder: Path, template: str) -> None:
    """A byte-level tokenizer with a template."""
    from portable.data.sources.documents import Fields
    from portable.data.sources.opening import open_source
    from portable.data.tokens.tokenizer import train_tokenizer

    source = open_source(str(folder / "chat.jsonl"), fields=Fields(format="messages"), max_samples=500)
    trained = train_tokenizer(source, 2000, folder / "training", chat=True)
    trained.chat_template = template
    trained.save_pretrained(folder / "tokenizer")


def clocks() -> tuple[float, float]:
    """Seconds on the wall, and of all cores, with those of children."""
    return time.perf_counter(), sum(os.times()[:4])


def report(start: tuple[float, float], **facts: Any) -> None:
    wall, cores = (now - then for now, then in zip(clocks(), start, strict=True))
    print(json.dumps({"wall": round(wall, 2), "cores": round(cores, 2), **facts}))


def ours(folder: Path) -> None:
    from portable.config import load_config
    from portable.data import build_data

    given = {
        "data.source": str(folder / "chat.jsonl"),
        "data.tokenizer": str(folder / "tokenizer"),
        "data.cache_dir": str(folder / "ours"),
        "data.format": "messages",
        "data.eval_fraction": 0,
        "data.seq_len": 1024,
    }
    config = load_config(None, given)
    start = clocks()
    data = build_data(config.data)
    report(start, tokens=data.sizes.tokens, trained=data.sizes.trained)


def trl(folder: Path, processes: int | None) -> None:
    import transformers
    from datasets import load_dataset
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined, unused-ignore]

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(vocab_size=2000, num_key_value_heads=1, **sizes)
    model = transformers.LlamaForCausalLM(config)
    found = transformers.AutoTokenizer.from_pretrained(folder / "tokenizer")
    arguments = SFTConfig(
        output_dir=str(folder / "trl"),
        assistant_only_loss=True,
        max_length=1025,
        dataset_num_proc=processes,
        report_to="none",
        use_cpu=True,
    )
    start = clocks()
    data = load_dataset(
        "json",
        data_files=str(folder / "chat.jsonl"),
        split="train",
        cache_dir=str(folder / f"trl{processes}"),
    )
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=data, processing_class=found)
    report(start, samples=len(trainer.train_dataset))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--count", type=int, default=20_000, help="conversations")
    parser.add_argument(
        "--template", default="qwen2_5", help="of ChatML, in tests/portable/templates, without marks"
    )
    parser.add_argument("--one", choices=("ours", "trl", "trl in processes"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one == "ours":
        ours(arguments.folder)
    elif arguments.one is not None:
        trl(arguments.folder, os.cpu_count() if "processes" in arguments.one else None)
    else:
        compare(arguments.count, arguments.template)


def compare(count: int, template: str) -> None:
    templates = Path(__file__).parents[1] / "tests" / "portable" / "templates"
    print(f"{cpu_model()}, {os.cpu_count()} cores")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_conversations(folder / "chat.jsonl", count)
        tokenizer(folder, (templates / f"{template}.jinja").read_text("utf-8"))
        size = (folder / "chat.jsonl").stat().st_size
        print(f"{count:,} conversations, {size / 1e6:.0f} MB, template {template}")
        for name in ("ours", "trl", "trl in processes"):
            command = [sys.executable, "-m", "benchmarks.conversations", "--one", name, "--folder", scratch]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{name:<18} failed: {done.stderr.strip().splitlines()[-1]}")
                continue
            found = json.loads(done.stdout.strip().splitlines()[-1])
            speed = f"{size / 1e6 / found['wall']:6.2f} MB/s"
            print(f"{name:<18} {found['wall']:6.1f} s  {found['cores']:6.1f} s of cores  {speed}  {found}")


if __name__ == "__main__":
    main()
