"""Rotary positions, exact at any length.

The problem. RoPE turns pair i of a head's D values by the angle ``position * inv_freq[i]``. transformers forms that
product in float32, which has 24 bits: at position 5,000,000 the angle of the fast pairs is off by tenths of a radian,
and cos and sin with it. Nothing crashes; far tokens just sit at blurred positions.

What we do. Inverse frequencies are recomputed in float64 from the config (not read from the model's float32 buffer,
whose own rounding is multiplied by the position). A tile's angles, cos and sin are formed in float64 and rounded at the
end, to the dtype of the queries. At position 10M the angle is right to 1e-8. The cost is one [tile, D/2] float64
product per tile and pass, next to nothing beside attention.

What is reproduced. The types of transformers' ``config.rope_parameters``, with its rules at run time, so that a forward
of the untouched model agrees wherever float32 is good enough:

- ``default``: ``inv_freq[i] = theta^(-2i/D)``.
- ``linear``: all divided by `factor` (positions interpolated).
- ``dynamic`` (NTK): theta grows with the longest position once that passes `max_position_embeddings`.
- ``yarn`` (arXiv 2309.00071): fast pairs kept, slow pairs divided by `factor`, a linear ramp between; cos and sin are
  scaled.
- ``longrope`` (arXiv 2402.13753): one divisor per pair, from the long list once the longest position passes
  `original_max_position_embeddings`; cos and sin are scaled.
- ``llama3``: like yarn without the scaling, with the ramp over turns instead of pairs.

For dynamic and longrope the frequencies depend on the whole batch, so every rank must pass the same `length`. (After a
long batch, transformers keeps the dynamic frequencies of that batch for shorter ones; we use those of the batch at
hand.)

Of some families only the first part of a head is rotated (`partial_rotary_factor`); of others that is refused, and so are other
types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...base.holding import module_holds
from ..limits import TABLE_BYTES
from .families import FAMILIES

# How far a float32 computation of the frequencies may be off, relative. On the ramps of yarn and llama3 the rounding of
# the ramp is multiplied by `factor`: 7e-6 at factor 128. A different formula is off by far more.
_ROUNDING = {"yarn": 1e-5, "llama3": 1e-5}
_ROUNDING_ELSEWHERE = 1e-6
module_holds(__name__, "tile")


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary frequencies of one kind of layer, for batches of one longest position."""

    inv_freq: Tensor
    """[D/2] float64, on CPU."""
    scaling: float
    """Multiplies cos and sin (transformers' `attention_scaling`); 1 except for yarn and longrope."""
    _copies: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False)

    def cos_sin(self, positions: Tensor, dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """cos and sin [..., D] for integer positions [...], both halves of D alike.

        Uses about 8·D bytes of float64 per position while it runs: call it per tile.
        """
        device = torch.device(device)
        if device not in self._copies:  # a copy to the device waits for it: do that once
            self._copies[device] = self.inv_freq.to(device)
        angles = positions.to(device=device, dtype=torch.float64).unsqueeze(-1) * self._copies[device]
        cos = angles.cos().mul_(self.scaling).to(dtype)
        sin = angles.sin_().mul_(self.scaling).to(dtype)
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


@dataclass(frozen=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + beta · log(1 + ⌊p / trained⌋): a softmax over more keys stays as sharp."""

    beta: float
    trained: int

    @classmethod
    def of(cls, config: Any) -> QueryScale:
        names = ("llama_4_scaling_beta", "original_max_position_embeddings")
        beta, trained = (_parameters(config, None).get(name) for name in names)
        if beta is None or not trained:
            raise ValueError(
                f"config.rope_parameters needs {' and '.join(names)}, by which queries are scaled; add them"
            )
        return cls(float(beta), int(trained))

    def __call__(self, positions: Tensor) -> Tensor:
        """In float32, as transformers has it; the floor of whole numbers is exact at any length."""
        return 1 + self.beta * torch.log(1 + (positions // self.trained).float())


class Positions:
    """cos and sin for the tokens of a batch, tile by tile. Every layer, stage and pass asks for the same ones, so they are computed
    once where they are small; at millions of tokens each tile computes its own."""

    def __init__(self, rope: Rope, positions: Tensor, dtype: torch.dtype, tile: int = 2**14) -> None:
        self.rope, self.positions, self.dtype = rope, positions, dtype
        self.table: tuple[Tensor, Tensor] | None = None
        width = 2 * len(rope.inv_freq)
        if 2 * positions.numel() * width * dtype.itemsize <= TABLE_BYTES:
            parts = [rope.cos_sin(part, dtype, positions.device) for part in positions.split(tile, dim=-1)]
            cos, sin = zip(*parts, strict=True)
            self.table = torch.cat(cos, dim=-2), torch.cat(sin, dim=-2)

    def cos_sin(self, tile: slice) -> tuple[Tensor, Tensor]:
        """[B or 1, t, D] each."""
        if self.table is not None:
            return self.table[0][:, tile], self.table[1][:, tile]
        return self.rope.cos_sin(self.positions[:, tile], self.dtype, self.positions.device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate x [..., D] by cos and sin that broadcast against it, or its first part, if they are of less than D. Bit for bit what
    transformers does to q and to k. interleaved: pairs are neighbours (GLM)."""
    if cos.shape[-1] < x.shape[-1]:
        turned, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), dim=-1)
        return torch.cat((rotate(turned, cos, sin, interleaved), rest.to(cos.dtype)), dim=-1)
    if interleaved:
        cos, sin = (t.chunk(2, dim=-1)[0].repeat_interleave(2, dim=-1) for t in (cos, sin))
        return x * cos + torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2) * sin
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rope_for(config: Any, layer_type: str | None, length: int) -> Rope:
    """The rotary frequencies a model's config asks for.

    Args:
        config: the (text) config of a transformers model.
        layer_type: which entry to use when `config.rope_parameters` has one per layer type (Gemma 3), else ignored.
        length: longest position in the whole batch, plus one. Matters for dynamic and longrope only.
    """
    parameters = _parameters(config, layer_type)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in _KINDS:
        raise ValueError(f"rope type {kind!r} is not supported; supported are {', '.join(_KINDS)}")
    family = FAMILIES.get(getattr(config, "model_type", ""))
    partial = family is not None and family.partial_rope
    for part in (parameters.get("partial_rotary_factor"), getattr(config, "partial_rotary_factor", None)):
        if part is not None and part != 1 and not partial:
            raise ValueError(
                f"partial_rotary_factor={part} with rope type {kind!r} is not supported; "
                "only models that rotate whole heads (partial_rotary_factor 1) are"
            )
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(dim * parameters.get("partial_rotary_factor", 1.0)) if partial else dim
    try:
        inv_freq, scaling = _KINDS[kind](config, parameters, dim, length)
    except KeyError as missing:
        raise ValueError(
            f"rope type {kind!r} needs {missing} in config.rope_parameters; add it to the config"
        ) from None
    return Rope(torch.tensor(inv_freq, dtype=torch.float64, device="cpu"), float(scaling))


def exact_frequencies(config: Any, module: nn.Module, name: str, theirs: Tensor) -> Tensor | None:
    """In float64 what stands in a buffer of a rotary module, if it is what its config says; None: it is not known to be."""
    layer_type = name.removesuffix("inv_freq").rstrip("_") or None
    kind = getattr(module, "rope_type", "default")
    kind = kind.get(layer_type) if isinstance(kind, Mapping) else kind
    if kind not in _KINDS or kind in ("dynamic", "longrope") or not _has_values(theirs):
        return None
    try:
        inv_freq, _ = _KINDS[kind](config, _parameters(config, layer_type), 2 * theirs.numel(), 1)
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    exact = torch.tensor(inv_freq, dtype=torch.float64)
    near = theirs.dtype is torch.float32 and torch.allclose(theirs.detach().cpu().double(), exact, rtol=1e-6, atol=0.0)
    return exact if near else None


def check_against(module: nn.Module, rope: Rope, layer_type: str | None) -> None:
    """Raise ValueError unless `rope` agrees with the model's own rotary module up to the rounding of its buffer.

    The guard against a family that computes frequencies in its own way. The module is looked at as it is before any
    forward, so build `rope` with a length of 1. A buffer that was cast (``model.to(torch.bfloat16)`` does that) is refused
    with a remedy of its own. Of buffers without values (meta, fake) only the shape is compared.
    """
    prefix = f"{layer_type}_" if hasattr(module, f"{layer_type}_inv_freq") else ""
    kind = getattr(module, "rope_type", "default")
    kind = kind.get(layer_type) if isinstance(kind, Mapping) else kind
    # dynamic and longrope overwrite inv_freq in forward and keep the first one aside.
    name = f"{prefix}original_inv_freq" if kind in ("dynamic", "longrope") else f"{prefix}inv_freq"
    theirs = getattr(module, name, None)
    if theirs is None:
        raise ValueError(
            f"{type(module).__name__} has no buffer {name!r} for layer type {layer_type!r}, so the frequencies of rope "
            f"type {kind!r} cannot be checked; rotary modules like those of Llama and Gemma 3 are supported"
        )
    what = f"rope type {kind!r}" + (f" of layer type {layer_type!r}" if layer_type else "")
    remedy = "the model computes its rotary frequencies in a way ithaca does not know, so it is not supported"
    if theirs.shape != rope.inv_freq.shape:
        raise ValueError(
            f"{what}: the model has {theirs.numel()} frequencies, its config says {rope.inv_freq.numel()}; {remedy}"
        )
    scaling = getattr(module, f"{prefix}attention_scaling", 1.0)
    if not math.isclose(scaling, rope.scaling, rel_tol=_ROUNDING_ELSEWHERE):
        raise ValueError(f"{what}: the model scales cos and sin by {scaling}, its config says {rope.scaling}; {remedy}")
    if not _has_values(theirs) or not _has_values(rope.inv_freq):
        return
    theirs = theirs.detach().cpu()
    if (cast := _rounded_to(theirs, rope.inv_freq)) is not None:
        raise ValueError(
            f"{what}: the model's frequencies ({type(module).__name__}.{name}) were rounded to {cast}, as model.to({cast}) does, "
            "and its positions with them, so it is not the model that was trained. Load it with "
            f"from_pretrained(..., dtype={cast}), which leaves them alone, or mend them: "
            "model.model.rotary_emb = type(model.model.rotary_emb)(model.config)"
        )
    limits = torch.finfo(theirs.dtype)
    rounding = max(_ROUNDING.get(str(kind), _ROUNDING_ELSEWHERE), limits.eps)
    error = (theirs.double() - rope.inv_freq).abs()
    if not bool((error <= rounding * rope.inv_freq + limits.tiny * limits.eps).all()):
        worst = (error / rope.inv_freq).max().item()
        raise ValueError(
            f"{what}: the model's frequencies differ from its config's by {worst:.1e} (relative), rounding explains "
            f"{rounding:.1e}; {remedy}"
        )


def _rounded_to(theirs: Tensor, exact: Tensor) -> torch.dtype | None:
    """The half precision that frequencies were cast to, even if they were cast back since."""
    for dtype in (torch.bfloat16, torch.float16):
        rounded = exact.to(dtype).double()
        off = bool(((rounded - exact) / exact).abs().max() > 1e-4)  # some frequencies are exact in any dtype
        if theirs.dtype == dtype or (off and bool(((theirs.double() - rounded) / exact).abs().max() < 1e-7)):
            return dtype
    return None


def _has_values(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor  # imported here: importing ithaca stays light

    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def _parameters(config: Any, layer_type: str | None) -> Mapping[str, Any]:
    """The rope parameters of one layer type."""
    table = getattr(config, "rope_parameters", None)
    if not table:
        raise ValueError(
            f"{type(config).__name__} has no rope_parameters; only models with rotary positions are supported"
        )
    if "rope_type" in table or not any(isinstance(entry, Mapping) for entry in table.values()):
        return table
    if table.get(layer_type) is None:
        known = [name for name, entry in table.items() if entry is not None]
        raise ValueError(
            f"config.rope_parameters has no entry for layer type {layer_type!r}, only for {', '.join(known)}; "
            "name one of these (layers without rotary positions are not supported)"
        )
    return table[layer_type]


# One function per rope type: (config, parameters, D, length) -> (D/2 frequencies, scaling). Python floats are float64.


def _powers(theta: float, dim: int) -> list[float]:
    return [theta ** (-2 * i / dim) for i in range(dim // 2)]


def _default(config: Any, parameters: Mapping[str, Any], dim: int, length: int) -> tuple[list[float], float]:
    return _powers(parameters["rope_theta"], dim), 1.0


def _linear(config: Any, parameters: Mapping[str, Any], dim: int, length: int) -> tuple[list[float], float]:
    return [f / parameters["factor"] for f in _powers(parameters["rope_theta"], dim)], 1.0


def _dynamic(config: Any, parameters: Mapping[str, Any], dim: int, length: int) -> tuple[list[float], float]:
    stretch = max(length / config.max_position_embeddings, 1.0)
    growth = parameters["factor"] * (stretch - 1) + 1
    return _powers(parameters["rope_theta"] * growth ** (dim / (dim - 2)), dim), 1.0


def _yarn(config: Any, parameters: Mapping[str, Any], dim: int, length: int) -> tuple[list[float], float]:
    theta, trained = parameters["rope_theta"], parameters["original_max_position_embeddings"]
    factor = parameters["factor"]
    if factor is None:
        factor = config.max_position_embeddings / trained

    def pair_with(turns: float) -> float:
        """Index of the (fractional) pair that makes so many turns over the trained length."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_with(parameters.get("beta_fast") or 32)
    high = pair_with(parameters.get("beta_slow") or 1)
    if config.rope_parameters.get("truncate", True):  # the outer table, as transformers does, even per layer type
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    inv_freq = []
    for i, f in enumerate(_powers(theta, dim)):
        slow = min(max((i - low) / (high - low), 0.0), 1.0)
        inv_freq.append(f / factor * slow + f * (1 - slow))

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    scaling = parameters.get("attention_factor")
    if scaling is None:
        weight, weight_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scaling = magnitude(weight) / magnitude(weight_all) if weight and weight_all else magnitude(1.0)
    return inv_freq, scaling


def _longrope(config: Any, parameters: Mapping[str, Any], dim: int, length: int) -> tuple[list[float], float]:
    trained = parameters["original_max_position_embeddings"]
    name = "long_factor" if length > trained else "short_factor"
    divisors = parameters[name]
    if len(divisors) != dim // 2:
        raise ValueError(
            f"rope type 'longrope': {name} has {len(divisors)} numbers, heads of size {dim} need {dim // 2}"
        )
    factor = parameters.get("factor")
    if factor is None:
        factor = config.max_position_embeddings / trained
    scaling = parameters.get("attention_factor")
    if scaling is None:
        scaling = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return [f / divisor for f, divisor in zip(_powers(parameters["rope_theta"], dim), divisors, strict=True)], scaling


def _llama3(config: Any, parameters: Mapping[str, Any], dim: int, length: int) -> tuple[list[float], float]:
    trained, factor = parameters["original_max_position_embeddings"], parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    inv_freq = []
    for f in _powers(parameters["rope_theta"], dim):
        turns = trained * f / (2 * math.pi)  # over the trained length: slow pairs below `low`, fast ones above `high`
        fast = min(max((turns - low) / (high - low), 0.0), 1.0)
        inv_freq.append(f / factor * (1 - fast) + f * fast)
    return inv_freq, 1.0


_KINDS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
