"""The ladder as a drawing: stacked bars by holder, the GPU's limit as a line, the sweeps below.

What is drawn is decided once (`layout`), and drawn twice: as SVG, which is plain text and needs no package, and as PNG, for papers
and chats that take no SVG; that needs matplotlib, which is imported when a picture is asked for.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from ..base.holding import CATEGORIES
from ..base.units import format_bytes, format_tokens

# Okabe and Ito's colours and shades of them: told apart by readers who do not see red and green alike.
COLOURS = {
    "parameters": "#0072b2", "gradients": "#56b4e9", "optimizer": "#004c78", "fsdp": "#7fbfe0", "kept": "#009e73",
    "residual": "#66c5ab", "attention": "#d55e00", "exchange": "#e69f00", "tile": "#cc79a7", "loss": "#8c4a72",
    "workspace": "#f0e442", "slack": "#bbbbbb", "context": "#888888", "other": "#555555",
}  # fmt: skip
PLAIN, BAD, GREY = "#8fa7bd", "#b00020", "#555555"
HALO = 'stroke="#ffffff" stroke-width="4" paint-order="stroke"'  # so that the line of the limit does not cross words
LEAST = 0.05  # of the limit that the longest bar must have for both to be seen
LEFT, WIDTH, BAR, GAP, TOP, SIDE, HEAD = 150, 560, 24, 12, 64, 250, 30


@dataclass(frozen=True)
class Row:
    label: str
    parts: list[tuple[str, int]]  # category ("" for a bar of one colour) and bytes, as far as they fit the axis
    end: float  # where the bar ends, as far as it fits
    note: str
    fits: bool
    mark: float | None = None  # measured peak


@dataclass(frozen=True)
class Layout:
    title: str
    about: str
    groups: list[tuple[str, list[Row]]]  # the rungs, without a heading, and each sweep
    limit: int | None  # of the GPU; None where bars are so short that it would flatten them
    reach: float  # bytes at the right end of the axis
    names: list[str]  # of the legend


def layout(ladder: dict[str, Any]) -> Layout:
    """ladder: as `Ladder.json` gives it. Bars beyond three times the limit are cut and say so."""
    rungs, limit = ladder["rungs"], ladder["hardware"]["gpu_memory"]
    longest = max(_largest(rung) for rung in rungs)
    if longest < LEAST * limit:
        limit, reach = None, float(longest)
    else:
        reach = float(min(max(longest, limit), 3 * limit))
    names = [name for name in CATEGORIES if any(rung["holders"].get(name, 0) > 0.005 * reach for rung in rungs)]
    groups = [("", [_row(rung["name"], rung["holders"], rung, reach) for rung in rungs])]
    for name, points in ladder["sweeps"].items():
        rows = [_row(format_tokens(point["value"]), {"": point["peak"]}, point, reach) for point in points]
        groups.append((f"other values of {name} at the top", rows))
    gpus = f"{ladder['hardware']['gpus']} × {ladder['hardware']['gpu']}"
    layers = ladder["layers"] if ladder["layers"] != ladder["model"]["layers"] else None
    title = f"{ladder['model']['name']} at {format_tokens(ladder['context'])} tokens, {gpus}"
    about = "peak memory of a GPU, by what holds it"
    if layers:
        about += f"; {layers} of {ladder['model']['layers']} layers"
    if any(row.mark for _, rows in groups for row in rows):
        about += "; black marks are measured"
    return Layout(title, about, groups, limit, reach, names)


def _largest(rung: dict[str, Any]) -> int:
    return max(rung["peak"], (rung.get("measured") or {}).get("peak") or 0)


def _row(label: str, holders: dict[str, int], of: dict[str, Any], reach: float) -> Row:
    at, parts = 0.0, []
    for name in ("", *CATEGORIES):
        size = min(holders.get(name, 0), max(0.0, reach - at))
        if size > 0:
            parts.append((name, int(size)))
        at += size
    note = format_bytes(of["peak"]) + (" …" if of["peak"] > reach else "")
    measured = of.get("measured") or {}
    if measured.get("problem"):
        note += f", {measured['problem'][:30]}"
    elif measured.get("peak"):
        note += f", measured {format_bytes(measured['peak'])}"
    elif not holders.get("", 0):
        pass
    elif of["tokens_per_second"]:
        note += f", {of['tokens_per_second']:,.0f} tokens/s"
    mark = measured.get("peak")
    return Row(label, parts, at, note, of["fits"], mark if mark and mark <= reach else None)


def ladder_svg(ladder: dict[str, Any]) -> str:
    drawn = layout(ladder)
    scale = WIDTH / drawn.reach
    body: list[str] = []
    y = TOP
    for heading, rows in drawn.groups:
        if heading:
            y += HEAD
            body.append(f'<text x="16" y="{y - 8}" font-weight="600" {HALO}>{escape(heading)}</text>')
        for row in rows:
            body += _bar(row, y, scale)
            y += BAR + GAP
    if drawn.limit is not None:
        x = LEFT + drawn.limit * scale
        body.insert(  # behind everything else
            0,
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 8}" y2="{y}" stroke="#000000" stroke-dasharray="5 4"/>'
            f'<text x="{x:.1f}" y="{y + 16}" text-anchor="middle" fill="{GREY}">{format_bytes(drawn.limit)}</text>',
        )
    for index, name in enumerate(drawn.names):
        at, line = 16 + index % 4 * 215, y + 34 + index // 4 * 20
        body.append(f'<rect x="{at}" y="{line}" width="12" height="12" fill="{COLOURS[name]}"/>')
        body.append(f'<text x="{at + 18}" y="{line + 11}">{escape(name)}</text>')
    height = y + 40 + -(-len(drawn.names) // 4) * 20
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + SIDE} {height}" '
        'font-family="system-ui, sans-serif" font-size="13"><rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="16" y="28" font-size="17" font-weight="600">{escape(drawn.title)}</text>',
        f'<text x="16" y="48" fill="{GREY}">{escape(drawn.about)}</text>',
    ]
    return "\n".join([*head, *body, "</svg>", ""])


def _bar(row: Row, y: int, scale: float) -> list[str]:
    elements = [f'<text x="{LEFT - 10}" y="{y + 17}" text-anchor="end">{escape(row.label)}</text>']
    at = 0.0
    for name, size in row.parts:
        if size * scale >= 0.5:
            tooltip = f"<title>{escape(name)}: {format_bytes(size)}</title>" if name else ""
            elements.append(
                f'<rect x="{LEFT + at * scale:.1f}" y="{y}" width="{size * scale:.1f}" height="{BAR}" '
                f'fill="{COLOURS.get(name, PLAIN)}">{tooltip}</rect>'
            )
        at += size
    if row.mark:
        x = LEFT + row.mark * scale
        elements.append(f'<rect x="{x - 1.5:.1f}" y="{y - 3}" width="3" height="{BAR + 6}" fill="#000000"/>')
    end = LEFT + max(row.end, row.mark or 0.0) * scale + 8
    colour = "" if row.fits else f' fill="{BAD}"'
    elements.append(f'<text x="{end:.1f}" y="{y + 17}"{colour} {HALO}>{escape(row.note)}</text>')
    return elements


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs the package matplotlib (pip install 'ithaca[plots]'); --svg needs none")


def ladder_png(ladder: dict[str, Any], path: Path) -> None:
    """ladder: as `Ladder.json` gives it."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: no window, no state that others share
    from matplotlib.patches import Patch
    from matplotlib.patheffects import withStroke

    drawn = layout(ladder)
    lines = sum(len(rows) + bool(heading) for heading, rows in drawn.groups)
    tall = 0.34 * lines + 1.7
    figure = Figure(figsize=(9.6, tall), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    halo = [withStroke(linewidth=3, foreground="white")]  # the line of the limit must not cross words
    y, labels = 0, []
    for heading, rows in drawn.groups:
        if heading:
            axes.text(0, y, heading, va="center", fontweight="bold", fontsize=9, path_effects=halo)
            y += 1
        for row in rows:
            at = 0.0
            for name, size in row.parts:
                axes.barh(y, size, left=at, height=0.68, color=COLOURS.get(name, PLAIN))
                at += size
            if row.mark:
                axes.plot([row.mark, row.mark], [y - 0.42, y + 0.42], color="black", linewidth=2.2)
            end = max(row.end, row.mark or 0.0) + 0.012 * drawn.reach
            colour = "black" if row.fits else BAD
            axes.text(end, y, row.note, va="center", fontsize=8.5, color=colour, path_effects=halo)
            labels.append((y, row.label))
            y += 1
    if drawn.limit is not None:
        axes.axvline(drawn.limit, color="black", linestyle=(0, (5, 4)), linewidth=1, zorder=0)
    axes.set_xlim(0, drawn.reach * 1.38)
    axes.set_ylim(y - 0.4, -0.7)
    axes.set_yticks([at for at, _ in labels], [label for _, label in labels], fontsize=9)
    ends = [] if drawn.limit is None else [drawn.limit]
    axes.set_xticks(ends, [format_bytes(tick) for tick in ends], fontsize=9, color=GREY)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.suptitle(drawn.title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    axes.set_title(drawn.about, fontsize=9, color=GREY, loc="left")
    keys = [Patch(color=COLOURS[name], label=name) for name in drawn.names]
    figure.legend(handles=keys, loc="outside lower center", ncols=min(5, len(keys)), frameon=False, fontsize=8.5)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror}); name another file with --png") from None
