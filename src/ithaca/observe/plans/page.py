"""The page of plans, from the same parts in two forms: one that asks its server, and one file that has its answers in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ... import __version__
from ...base.kernels import GPU_KERNELS
from ...engine.job import OPTIMIZERS
from ...engine.model.families import FAMILIES
from ...engine.model.presets import PRESETS
from ...planner.gpus import GPUS
from ...planner.plan import Plan
from ..report import asset, fill, write_page
from ..report.values import CATEGORIES
from .answers import Piece, pieces, shown
from .asking import read

_SHARED = ("format.js", "dom.js", "bars.js", "plot.js", "parts.js", "summary.js", "memory.js")
_OWN = ("fields.js", "setup.js", "plans.js")
Kept = tuple[dict[str, Any], list[Piece]]  # an answer, and the pieces that took longer; of a page at most two
CONTEXTS = ("32K", "64K", "128K", "256K", "512K", "1M", "2M", "3M", "4M", "8M")


def live_page(first: Mapping[str, str]) -> str:
    """first: the words that its fields begin with, where its link has none."""
    return _page({"live": True, "first": dict(first), "choices": _choices(), "setups": []}, asks_its_server=True)


def file_page(setups: Sequence[Kept]) -> str:
    return _page({"live": False, "setups": [{"answer": kept, "pieces": pieces} for kept, pieces in setups]})


def write_plans(out: Path, setups: Sequence[Kept]) -> Path:
    return write_page(out, file_page(setups))


def file_of(words: Mapping[str, str], planned: Plan) -> Kept:
    """A plan that was made, and all that its page has beside it."""
    asked = read(words)
    if planned.executed:
        return shown(asked, planned), []
    return shown(asked, planned), list(pieces(asked, lambda line: None))


def _page(data: dict[str, Any], *, asks_its_server: bool = False) -> str:
    style = asset("page.css") + "\n" + _read("plans.css")
    script = "\n".join([*map(asset, _SHARED), *map(_read, _OWN)])
    whole = {"version": __version__, "categories": CATEGORIES, **data}
    return fill(_read("plans.html"), style, script, whole, asks_its_server=asks_its_server)


def _choices() -> dict[str, Any]:
    """What the fields offer. Anything else may be written too, where the planner knows it."""
    real = {name: config for name, config in PRESETS.items() if not name.startswith("tiny_")}
    return {
        "models": [
            {"name": name, "about": "" if config["model_type"] in FAMILIES else "by a dry run of its own code"}
            for name, config in real.items()
        ],
        "gpus": [f"{gpu.name}-{gpu.label}GB" for gpu in GPUS.values()],
        "contexts": CONTEXTS,
        "optimizers": list(OPTIMIZERS),
        "kernels": GPU_KERNELS,
    }


def _read(name: str) -> str:
    return resources.files("ithaca.observe.plans").joinpath(name).read_text(encoding="utf-8")
