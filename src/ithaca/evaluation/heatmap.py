"""The grid of needles as a picture: an SVG to keep or show, and pixels for TensorBoard.

Length runs downwards, depth to the right. Rust is never found, teal always; both ends and the text in each cell also read
without colour vision.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from ..base.units import format_tokens

STOPS = ((0.0, (181, 67, 46)), (0.5, (240, 217, 160)), (1.0, (42, 127, 123)))
_WIDTH, _HEIGHT, _LEFT, _TOP = 52, 30, 64, 54


def colour(share: float) -> tuple[int, int, int]:
    share = min(max(share, 0.0), 1.0)
    for (low, before), (high, after) in pairwise(STOPS):
        if share <= high:
            part = (share - low) / (high - low)
            red, green, blue = (round(a + (b - a) * part) for a, b in zip(before, after, strict=True))
            return red, green, blue
    return STOPS[-1][1]


def svg(needle: dict[str, Any], title: str) -> str:
    lengths, depths, cells = needle["lengths"], needle["depths"], needle["accuracy"]
    width, height = _LEFT + _WIDTH * len(depths) + 12, _TOP + _HEIGHT * len(lengths) + 30
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="20" font-size="13" font-weight="600" fill="#222">{_escape(title)}</text>',
    ]
    for column, depth in enumerate(depths):
        lines.append(_text(_LEFT + _WIDTH * (column + 0.5), _TOP - 8, f"{depth:.0%}", "#555"))
    for row, (length, shares) in enumerate(zip(lengths, cells, strict=True)):
        y = _TOP + _HEIGHT * row
        lines.append(_text(_LEFT - 8, y + 20, format_tokens(length), "#555", "end"))
        for column, share in enumerate(shares):
            x = _LEFT + _WIDTH * column
            fill = "#{:02x}{:02x}{:02x}".format(*colour(share))
            lines.append(f'<rect x="{x}" y="{y}" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" rx="3" fill="{fill}"/>')
            lines.append(_text(x + _WIDTH / 2 - 1, y + 19, f"{share:.0%}", ink(share)))
    foot = _TOP + _HEIGHT * len(lengths) + 18
    lines.append(
        f'<text x="12" y="{foot}" fill="#555">tokens (down) by depth of the needle (across): share found</text>'
    )
    return "\n".join([*lines, "</svg>"]) + "\n"


def ink(share: float) -> str:
    """Text that can be read on the colour of a share."""
    red, green, blue = colour(share)
    return "#222222" if 0.299 * red + 0.587 * green + 0.114 * blue > 125 else "#ffffff"


def pixels(needle: dict[str, Any], size: int = 24) -> np.ndarray:
    """[height, width, 3] bytes, a square for each cell."""
    cells = np.array([[colour(share) for share in row] for row in needle["accuracy"]], np.uint8)
    return cells.repeat(size, 0).repeat(size, 1)


def _text(x: float, y: float, text: str, fill: str, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}">{text}</text>'


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
