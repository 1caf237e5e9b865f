"""What the attention kernels of a GPU can do, as far as that is known without running them. No torch: the planner reads this.

On the machine itself only a call tells (probe.py), and `choice.py` asks. A plan for another machine goes by this table, in the same
order of preference.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

LARGEST_HEAD = 256


@dataclass(frozen=True)
class Traits:
    windows: bool = True
    heads: tuple[int, ...] | None = (
        None  # head sizes it was measured right for; None = multiples of 8 up to LARGEST_HEAD
    )


KERNELS = {
    "fa4": Traits(heads=(24, 32, 64, 96, 128, 192, 256)),  # Hopper and later
    "cudnn": Traits(windows=False),
    "flash": Traits(),
}


def head_problem(head_dim: int) -> str | None:
    """Of every kernel of a GPU."""
    if head_dim % 8 or head_dim > LARGEST_HEAD:
        return f"head_dim={head_dim} is not a multiple of 8 up to {LARGEST_HEAD}"
    return None


def problem(name: str, head_dim: int, windowed: bool) -> str | None:
    """Why a kernel is not for such a layer, as far as is known; None if it is."""
    traits = KERNELS[name]
    if windowed and not traits.windows:
        return "has no sliding window"
    if traits.heads is not None and head_dim not in traits.heads:
        return f"head_dim={head_dim} is not among those it was found right for"
    return head_problem(head_dim)


def fa4_installed() -> bool:
    """FlashAttention-4 is flash_attn.cute; FlashAttention-2 is called flash_attn too. Imports neither."""
    package = importlib.util.find_spec("flash_attn")
    folders = (package and package.submodule_search_locations) or ()
    return any((Path(folder) / "cute" / "interface.py").is_file() for folder in folders)
