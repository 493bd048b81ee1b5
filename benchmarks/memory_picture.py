"""What lies in a device's memory under each strategy, as a picture: ``python -m benchmarks.memory_picture``.

It draws what ``portable-plan --json`` prints, for one model on one kind of device.
"""

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
    """What ``portable-plan`` says of :data:`MODEL` with recomputation."""
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
    """A bar for each option, made of its parts, with the device's memory as a line."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    options = [option for option in result["options"] if "nvme" not in option.values()]
    options.sort(key=lambda option: -option["device_bytes"]["total"])
    figure = Figure(figsize=(9, 0.42 * len(options) + 1.4), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    names = []
    for option in options:
        away = [what for what in ("optimizer", "params") if option[f"offload_{what}"] != "none"]
        names.append(option["strategy"] + (f", {' and '.join(away)} on the host" if away else ""))
    left = [0.0] * len(options)
    for part, colour in PARTS.items():
        sizes = [option["device_bytes"][part] / GIBIBYTE for option in options]
        axes.barh(names, sizes, left=left, color=colour, label=part, height=0.72)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    axes.axvline(result["device_memory"] / GIBIBYTE, color="#57606a", linestyle="--", linewidth=1.2)
    axes.set(xlabel="GiB on a device; dashed: what it has", title=title)
    axes.grid(axis="x", alpha=0.25)
    axes.legend(loc="upper right", framealpha=0.95)
    figure.savefig(path, format="svg", metadata={"Date": None})


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
