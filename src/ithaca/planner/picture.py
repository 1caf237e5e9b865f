"""The ladder as PNG, for papers and chats that take no SVG. Needs matplotlib, which is imported when a picture is asked for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ..base.units import format_bytes
from .chart import BAD, COLOURS, GREY, PLAIN, layout


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
    axes.set_xticks(ends, [format_bytes(each) for each in ends], fontsize=9, color=GREY)
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
