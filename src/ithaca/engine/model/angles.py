"""A model's own rotary module, computed in float64.

In float32 the angle of token p is rounded by p · 2⁻²⁴: at a million tokens by a sixteenth (docs/concepts/rope.md). For families
of the table angles are formed here (rope.py). The rotary module of any other model runs as it is, under a mode of torch in which
every float32 number that it meets is a float64 one; its frequencies too, where they are those that its config says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ...base.holding import CALLER, module_holds
from .rope import exact_frequencies

module_holds(__name__, CALLER)
# In float32 an angle below this is off by at most 2⁻⁹, which is how far bf16 rounds cos and sin; beyond it the blur is the larger
FLOAT32_POSITIONS = 2**16
TILE = 2**14  # positions at a time: float64 takes four times the room of what is left in the end


class Wide(TorchDispatchMode):
    """Inside, float32 is float64. exact: buffers and what stands for them, by the identity of the buffer, which has to live on."""

    def __init__(self, exact: dict[int, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.exact = exact

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, self._widen, (args, kwargs or {}))
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)

    def _widen(self, t: Tensor) -> Tensor:
        if id(t) in self.exact:
            return self.exact[id(t)][1]
        return t.double() if t.dtype is torch.float32 else t


class Angles:
    """A rotary module and the forward it had."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        self.module, self.config, self.forward = module, config, module.forward
        kinds = getattr(module, "rope_type", None)
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        # these look at the largest position that they are given
        self.by_length = bool(kinds & {"dynamic", "longrope"})
        self.exact: dict[torch.device, dict[int, tuple[Tensor, Tensor]]] = {}

    def __call__(self, x: Tensor, positions: Tensor, longest: int, wide: bool, *args: Any, **kwargs: Any) -> Any:
        """What the module says of this rank's positions, if the largest of all is `longest` - 1."""
        if not wide:
            return self._shown(x, positions, longest, *args, **kwargs)
        like, spec = tree_flatten(self.forward(x[:, :1], positions[..., :1], *args, **kwargs))
        parts: list[list[Tensor]] = []
        for part in positions.split(TILE, -1):
            with Wide(self._frequencies(x.device)):
                values = self._shown(x, part, longest, *args, **kwargs)
            parts.append(
                [
                    v.to(t.dtype) if v.dtype in (torch.float64, torch.complex128) else v
                    for v, t in zip(tree_flatten(values)[0], like, strict=True)
                ]
            )
        return tree_unflatten([torch.cat(tensors, 1) for tensors in zip(*parts, strict=True)], spec)

    def _shown(self, x: Tensor, positions: Tensor, longest: int, *args: Any, **kwargs: Any) -> Any:
        """A rank holds some of the positions, but the largest of all decides: it is shown to the module, and its angles dropped."""
        if not self.by_length:
            return self.forward(x, positions, *args, **kwargs)
        last = torch.full_like(positions[..., :1], longest - 1)
        angles = self.forward(x, torch.cat((positions, last), -1), *args, **kwargs)
        return tree_map_only(Tensor, lambda t: t[:, :-1], angles)

    def _frequencies(self, device: torch.device) -> dict[int, tuple[Tensor, Tensor]]:
        if device not in self.exact:
            named = {name: buffer for name, buffer in self.module.named_buffers() if name.endswith("inv_freq")}
            found = {name: exact_frequencies(self.config, self.module, name, buffer) for name, buffer in named.items()}
            self.exact[device] = {
                id(named[name]): (named[name], value.to(device)) for name, value in found.items() if value is not None
            }
        return self.exact[device]

    def sound(self, hidden: int) -> bool:
        """Whether in float64 it says the same, up to the rounding of float32. Of a module on the CPU."""
        positions = torch.arange(64)[None]
        # some have a position for time, height and width, which of text are alike
        return any(self._sound(torch.zeros(1, 64, hidden), p) for p in (positions, positions.expand(3, 1, -1)))

    def _sound(self, x: Tensor, positions: Tensor) -> bool:
        kinds = getattr(self.module, "rope_type", None)
        for more in [(kind,) for kind in kinds] if isinstance(kinds, dict) else [()]:
            try:
                own, wide = (tree_flatten(self(x, positions, 64, w, *more))[0] for w in (False, True))
            except Exception:  # a module of its own kind, with arguments of its own
                return False
            pairs = zip(own, wide, strict=True)
            if not all(a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, atol=1e-5) for a, b in pairs):
                return False
        return True


def rotary_modules(base: nn.Module) -> list[nn.Module]:
    return [module for module in base.modules() if "Rotary" in type(module).__name__ and callable(module.forward)]
