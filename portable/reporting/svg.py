"""Small pictures in SVG, without a plotting library."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING, Any, TypeVar

from converters.errors import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

POINTS = 2000
"""About the number of points that a curve keeps: it is a few hundred pixels wide."""

_Point = TypeVar("_Point", bound=tuple[Any, ...])


class Picture:
    """Shapes on white paper. Coordinates are in pixels, from the upper left corner.

    Args:
        width: in pixels.
        height: in pixels.
    """

    def __init__(self, width: int, height: int) -> None:
        size = f'width="{width}" height="{height}"'
        self._parts = [
            '<?xml version="1.0" encoding="utf-8"?>',
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect {size} fill="#fff"/>',
        ]

    def line(
        self, points: Sequence[tuple[float, float]], colour: str, *, width: float = 1, dash: str = ""
    ) -> None:
        """Connect ``points``."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'
        )

    def dot(self, x: float, y: float, colour: str) -> None:
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'
        )

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", more: str = "") -> None:
        """Write ``text``, escaped, with its baseline at ``y``; ``anchor`` is start, middle or end."""
        shown = html.escape(printable(text).encode("utf-8", "replace").decode("utf-8"))
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{shown}</text>')

    def __str__(self) -> str:
        return "\n".join([*self._parts, "</svg>\n"])


def ticks(low: float, high: float, count: int) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``, with ``low < high``."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= 0.999 * rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{index * step:.10g}") for index in range(first, last + 1)]


def thinned(points: list[_Point]) -> list[_Point]:
    """About :data:`POINTS` of ``points``: the lowest and highest of each stretch, so that no spike is lost.

    Args:
        points: tuples whose last element is the value.
    """
    if len(points) <= POINTS:
        return points
    size = -(-2 * len(points) // POINTS)
    kept = []
    for start in range(0, len(points), size):
        stretch = range(start, min(start + size, len(points)))
        extremes = {min(stretch, key=lambda i: points[i][-1]), max(stretch, key=lambda i: points[i][-1])}
        kept += [points[i] for i in sorted(extremes | ({len(points) - 1} & set(stretch)))]
    return kept
