"""The ladder as an SVG: stacked bars by holder, the GPU's limit as a line. Plain text, so no plotting package is needed."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

from ..config.sizes import format_bytes, format_tokens
from .categories import CATEGORIES

# Okabe and Ito's colours and shades of them: told apart by readers who do not see red and green alike.
COLOURS = {
    "parameters": "#0072b2", "gradients": "#56b4e9", "optimizer": "#004c78", "fsdp": "#7fbfe0", "kept": "#009e73",
    "residual": "#66c5ab", "attention": "#d55e00", "exchange": "#e69f00", "tile": "#cc79a7", "loss": "#8c4a72",
    "workspace": "#f0e442", "slack": "#bbbbbb", "context": "#888888", "other": "#555555",
}  # fmt: skip
LEFT, WIDTH, BAR, GAP, TOP = 150, 560, 24, 12, 64


def ladder_svg(ladder: dict[str, Any]) -> str:
    """ladder: as `Ladder.json` gives it. Bars beyond three times the limit are cut and say so."""
    rungs, limit = ladder["rungs"], ladder["hardware"]["gpu_memory"]
    longest = min(max(max(rung["peak"] for rung in rungs), limit), 3 * limit)
    scale = WIDTH / longest
    names = [name for name in CATEGORIES if any(rung["holders"].get(name, 0) > 0.005 * longest for rung in rungs)]
    bottom = TOP + len(rungs) * (BAR + GAP)
    legend = -(-len(names) // 4)
    height = bottom + 40 + legend * 20
    gpus = f"{ladder['hardware']['gpus']} × {ladder['hardware']['gpu']}"
    title = f"{ladder['model']['name']} at {format_tokens(ladder['context'])} tokens, {gpus}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 190} {height}" font-family="system-ui, sans-serif" '
        'font-size="13"><rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="17" font-weight="600">{escape(title)}</text>',
        '<text x="16" y="48" fill="#555555">peak memory of a GPU, by what holds it</text>',
    ]
    for index, rung in enumerate(rungs):
        y = TOP + index * (BAR + GAP)
        parts.append(f'<text x="{LEFT - 10}" y="{y + 17}" text-anchor="end">{escape(rung["name"])}</text>')
        at = 0.0
        for name in CATEGORIES:
            size = min(rung["holders"].get(name, 0), max(0.0, longest - at))
            if size * scale >= 0.5:
                parts.append(
                    f'<rect x="{LEFT + at * scale:.1f}" y="{y}" width="{size * scale:.1f}" height="{BAR}" fill="{COLOURS[name]}">'
                    f"<title>{escape(name)}: {format_bytes(rung['holders'][name])}</title></rect>"
                )
            at += size
        cut = " …" if rung["peak"] > longest else ""
        weight = "" if rung["fits"] else ' fill="#b00020"'
        parts.append(
            f'<text x="{LEFT + min(rung["peak"], longest) * scale + 8:.1f}" y="{y + 17}"{weight}>'
            f"{format_bytes(rung['peak'])}{cut}</text>"
        )
    x = LEFT + limit * scale
    parts.append(
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{bottom}" stroke="#000000" stroke-dasharray="5 4"/>'
        f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="#555555">{format_bytes(limit)}</text>'
    )
    for index, name in enumerate(names):
        column, row = index % 4, index // 4
        x, y = 16 + column * 215, bottom + 34 + row * 20
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[name]}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 11}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])
