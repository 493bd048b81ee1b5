"""The loss of a run as a picture."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from portable.durable import write_durably
from portable.reporting.metrics import read_metrics

if TYPE_CHECKING:
    from pathlib import Path


def plot_loss(folder: Path) -> Path | None:
    """Draw training and evaluation loss of the run in ``folder`` into ``loss.svg``.

    Returns:
        the file, or None if there is nothing to draw yet.
    """
    rows = read_metrics(folder)
    train = [(r["step"], r["loss"]) for r in rows if r.get("loss") is not None]
    evaluation = [(r["step"], r["eval_loss"]) for r in rows if r.get("eval_loss") is not None]
    rates = [(r["step"], r["learning_rate"]) for r in rows if r.get("learning_rate") is not None]
    if not train:
        return None
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    axes.plot(*zip(*train, strict=True), color="#1f6feb", linewidth=1.6, label="training loss")
    if evaluation:
        axes.plot(
            *zip(*evaluation, strict=True), "o-", color="#d1242f", markersize=4, label="evaluation loss"
        )
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.set_title(folder.name, parse_math=False)
    axes.grid(alpha=0.25)
    rate_axes = axes.twinx()
    rate_axes.plot(
        *zip(*rates, strict=True), color="#8b949e", linewidth=1, linestyle=":", label="learning rate"
    )
    rate_axes.set_ylabel("learning rate", color="#57606a")
    rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    lines = [*axes.get_lines(), *rate_axes.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], loc="upper right", framealpha=0.9)
    path = folder / "loss.svg"
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    write_durably(path, drawn.getvalue())
    return path
