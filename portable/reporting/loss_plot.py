"""``loss.svg``: the training and evaluation loss of a run, with its learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from portable.durable import write_durably
from portable.output.existing_run import existing_run
from portable.reporting.json_lines import number, read_rows
from portable.reporting.metrics import METRICS_FILE
from portable.reporting.svg import Picture, thinned, ticks

if TYPE_CHECKING:
    from pathlib import Path

_WIDTH, _HEIGHT = 800, 450
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 728, 40, 402
_INK, _SOFT, _GRID = "#1f2328", "#57606a", "#e5e9ee"
_TRAINING, _EVALUATION, _RATE = "#1f6feb", "#d1242f", "#8b949e"
_LOSS = "eval_loss"
_DASHES = ("", "5 3")
"""Of the first evaluation losses; the legend has no room for more."""
_LARGEST = 1e300
"""Above this the difference of two values may overflow."""


def plot_loss(folder: Path) -> Path | None:
    """Draw ``loss.svg`` of the run in ``folder``.

    Returns:
        The file, or None if no loss has been logged yet.
    """
    rows, _ = read_rows(folder / METRICS_FILE)
    training, rates = (_series(rows, key) for key in ("loss", "learning_rate"))
    names = dict.fromkeys(key for row in rows for key in row if key == _LOSS or key.startswith(f"{_LOSS}/"))
    evaluations = {name.partition("/")[2]: _series(rows, name) for name in list(names)[: len(_DASHES)]}
    if not training:
        return None
    picture = Picture(_WIDTH, _HEIGHT)
    name = folder.name if len(folder.name) <= 30 else f"{folder.name[:29]}…"
    picture.text(_LEFT, 25, name, more='font-size="15" font-weight="bold"')
    steps = _padded([step for series in (training, *evaluations.values(), rates) for step, _ in series], 0)
    losses = _padded([loss for series in (training, *evaluations.values()) for _, loss in series], 0.05)
    for step in ticks(*steps, 7):
        x = _scale(step, steps, _LEFT, _RIGHT)
        picture.line([(x, _BOTTOM), (x, _TOP)], _GRID)
        picture.text(x, _BOTTOM + 18, f"{step:,.10g}", anchor="middle", more=f'fill="{_INK}"')
    for loss in ticks(*losses, 6):
        y = _scale(loss, losses, _BOTTOM, _TOP)
        picture.line([(_LEFT, y), (_RIGHT, y)], _GRID)
        picture.text(_LEFT - 7, y + 4, f"{loss:.5g}", anchor="end", more=f'fill="{_INK}"')
    legend = [("training loss", _TRAINING, "")]
    if rates:
        scale = _padded([rate for _, rate in rates], 0.05)
        for rate in ticks(*scale, 6):
            y = _scale(rate, scale, _BOTTOM, _TOP)
            picture.line([(_RIGHT, y), (_RIGHT + 4, y)], _SOFT)
            picture.text(_RIGHT + 7, y + 4, f"{rate:.3g}", more=f'fill="{_SOFT}"')
        _curve(picture, rates, steps, scale, _RATE, dash="2 3")
        legend.append(("learning rate (right)", _RATE, "2 3"))
    _curve(picture, training, steps, losses, _TRAINING, dots=len(training) == 1)
    for place, (name, evaluation) in enumerate(evaluations.items()):
        if evaluation:
            dash = _DASHES[place]
            _curve(picture, evaluation, steps, losses, _EVALUATION, dash=dash, dots=True)
            legend.insert(1 + place, (name[:18] or "evaluation loss", _EVALUATION, dash))
    frame = [(_LEFT, _TOP), (_RIGHT, _TOP), (_RIGHT, _BOTTOM), (_LEFT, _BOTTOM), (_LEFT, _TOP)]
    picture.line(frame, _SOFT)
    picture.text((_LEFT + _RIGHT) / 2, _HEIGHT - 10, "step", anchor="middle", more=f'fill="{_INK}"')
    middle = (_TOP + _BOTTOM) / 2
    turned = f'fill="{_INK}" transform="rotate(-90 16 {middle})"'
    run = existing_run(folder).config
    unit = "nats a token" if run is None or run.train.loss is None else run.train.loss
    picture.text(16, middle, f"loss ({unit:.40})", anchor="middle", more=turned)
    for place, (name, colour, dash) in enumerate(reversed(legend)):
        x = _RIGHT - 150 * (place + 1)
        picture.line([(x, 21), (x + 24, 21)], colour, width=2, dash=dash)
        picture.text(x + 30, 25, name, more=f'fill="{_INK}"')
    path = folder / "loss.svg"
    write_durably(path, str(picture))
    return path


def _series(rows: list[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return thinned([(r["step"], r[key]) for r in rows if number(r.get(key)) and abs(r[key]) < _LARGEST])


def _padded(values: list[float], margin: float) -> tuple[float, float]:
    """The range of ``values``, widened by the share ``margin`` of it on both sides; never empty."""
    low, high = min(values), max(values)
    wider = (high - low) * margin if high - low > 1e-9 * abs(high) else abs(high) * 0.1
    wider = wider if high - low + wider > 1e-300 else 1.0
    return low - wider, high + wider


def _scale(value: float, scale: tuple[float, float], start: float, end: float) -> float:
    """The pixel of ``value``, where ``scale`` runs from ``start`` to ``end``."""
    return start + (value - scale[0]) / (scale[1] - scale[0]) * (end - start)


def _curve(
    picture: Picture,
    points: list[tuple[int, float]],
    steps: tuple[float, float],
    scale: tuple[float, float],
    colour: str,
    *,
    dash: str = "",
    dots: bool = False,
) -> None:
    placed = [(_scale(x, steps, _LEFT, _RIGHT), _scale(y, scale, _BOTTOM, _TOP)) for x, y in points]
    picture.line(placed, colour, width=1.6, dash=dash)
    for x, y in placed if dots else ():
        picture.dot(x, y, colour)
