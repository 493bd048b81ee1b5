"""Draw docs/memory.svg: the memory of a device under each strategy, from ``portable-plan --json``."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable.errors import RunError
from portable.planner.cli import main as plan
from portable.reporting.svg import Picture, ticks

if TYPE_CHECKING:
    from collections.abc import Sequence

PARTS = {
    "parameters": "#1f6feb",
    "gathered": "#54aeff",
    "gradients": "#bf8700",
    "optimizer": "#1a7f37",
    "activations": "#cf222e",
}
MODEL = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
"""The sizes of Llama 3.1 8B."""
GIBIBYTE = 1 << 30


def planned(device: str, devices: int) -> dict[str, Any]:
    """The plan of :data:`MODEL` with recomputation, as JSON."""
    settings = [
        "--model.config",
        json.dumps(MODEL),
        "--data.seq_len",
        "4096",
        "--train.global_batch_size",
        "8",
    ]
    settings += ["--train.micro_batch_size", "1", "--memory.activation_checkpointing", "full"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = plan([*settings, "--device", device, "--devices", str(devices), "--json"])
    if code != 0:
        raise RunError(f"portable-plan ended with {code}")
    result: dict[str, Any] = json.loads(printed.getvalue())
    return result


def draw(result: dict[str, Any], path: Path, title: str) -> None:
    """A bar for each option, made of its parts, with the device's memory as a dashed line."""
    options = [option for option in result["options"] if "nvme" not in option.values()]
    options.sort(key=lambda option: -option["device_bytes"]["total"])
    left, right, top, row = 250, 850, 64, 30
    bottom = top + row * len(options)
    most = max(result["device_memory"], options[0]["device_bytes"]["total"]) / GIBIBYTE * 1.04
    picture = Picture(880, bottom + 48)
    picture.text(16, 25, title, more='font-size="15" font-weight="bold"')
    for place, (part, colour) in enumerate(PARTS.items()):
        picture.box(left + 120 * place, 40, 12, 12, colour)
        picture.text(left + 120 * place + 18, 50, part)
    for size in ticks(0, most, 8):
        x = left + size / most * (right - left)
        picture.line([(x, top), (x, bottom)], "#e5e9ee")
        picture.text(x, bottom + 18, f"{size:g}", anchor="middle")
    for place, option in enumerate(options):
        y = top + row * place
        offloaded = [what for what in ("optimizer", "params") if option[f"offload_{what}"] != "none"]
        name = option["strategy"] + (f", {' and '.join(offloaded)} on the host" if offloaded else "")
        picture.text(left - 8, y + row / 2 + 4, name, anchor="end")
        x = float(left)
        for part, colour in PARTS.items():
            width = option["device_bytes"][part] / GIBIBYTE / most * (right - left)
            picture.box(x, y + 4, width, row - 8, colour)
            x += width
    x = left + result["device_memory"] / GIBIBYTE / most * (right - left)
    picture.line([(x, top), (x, bottom)], "#57606a", width=1.5, dash="5 4")
    picture.text((left + right) / 2, bottom + 40, "GiB on a device; dashed: what it has", anchor="middle")
    path.write_text(str(picture), "utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_picture", description=__doc__)
    parser.add_argument("--device", default="h100")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("docs/memory.svg"))
    given = parser.parse_args(argv)
    title = f"A Llama of 8 billion parameters, 1 x 4096 tokens, bf16, {given.devices} x {given.device}"
    draw(planned(given.device, given.devices), given.out, title)
    print(given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
