"""The untouched Hugging Face model on the whole batch, in one process: what everything is compared with.

Packed documents are given to it the way transformers takes them: positions that restart, from which it builds its own
block-diagonal mask. Labels are shifted before, with the last token of a document unsupervised, and losses of micro-batches
are summed and divided by their common count.

Rotary angles are formed in float64 here and in float32 by transformers, so at length the two differ by what float32 makes of an
angle (docs/concepts/rope.md). The untouched model is therefore measured twice where it matters: as it is, and with exact angles,
which have to agree with ours to the limit. As it is, it may be as far away as from itself with exact angles, and that
distance may be no larger than the rounding of float32 explains.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..engine.layer.mixer import by_formulas
from ..engine.model.adapter import base_model
from ..engine.model.angles import Angles, rotary_modules
from ..engine.model.families import FAMILIES
from ..engine.model.rope import rope_for
from ..engine.model.weights import cast_parameters
from ..engine.objective.cross_entropy import IGNORE
from ..engine.sequence import positions, shift_labels

FLOAT32_ANGLE = 2.0**-24  # rounding of an angle for each token of distance: the fastest pair turns by one
SINGLE_LIMIT = 1.5  # bf16: a single parameter's distance over the untouched model's own

Raw = tuple[Tensor, Tensor, "list[list[int]] | None"]  # input_ids, labels, documents


@dataclass(frozen=True)
class Item:
    """One line of the verdict."""

    name: str
    error: float
    limit: float
    where: str = ""  # the parameter or place with the largest error

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # False for NaN


@dataclass
class Measured:
    loss: Tensor
    gradients: dict[str, Tensor | None]


class Reference:
    def __init__(self, model: nn.Module, dtype: str, device: str) -> None:
        self.device = torch.device(device)
        self.angle = FLOAT32_ANGLE * _sharpness(model)
        model = by_formulas(copy.deepcopy(model)) if self.device.type == "cpu" else model
        self.wide = copy.deepcopy(model).to(device)
        if self.device.type == "cuda" and getattr(base_model(self.wide), "_supports_sdpa", True):
            expand_kv(self.wide)
        self.narrow = None
        if dtype != "float32":
            self.narrow = cast_parameters(copy.deepcopy(model).to(device), getattr(torch, dtype))

    def measure(self, model: nn.Module, batches: list[Raw]) -> Measured:
        """Loss and gradients of several micro-batches together."""
        model.zero_grad(set_to_none=True)
        shifted = [shift_labels(labels, documents, IGNORE) for _, labels, documents in batches]
        counts = [int((labels != IGNORE).sum()) for labels in shifted]
        value = torch.zeros((), dtype=torch.float64)
        for (ids, labels, documents), targets, count in zip(batches, shifted, counts, strict=True):
            if _apart_only(model, documents):
                logits, routed = self._apart(model, ids, documents)
                loss = F.cross_entropy(
                    logits.flatten(0, 1).float(), targets.flatten().to(self.device), ignore_index=IGNORE
                )
                loss = loss + _balance_loss(model, routed)
            else:
                place = None if documents is None else positions(documents, *ids.shape).to(self.device)
                loss = model(
                    input_ids=ids.to(self.device),
                    position_ids=place,
                    labels=labels.to(self.device),
                    shift_labels=targets.to(self.device),
                    num_items_in_batch=count,
                    use_cache=False,
                ).loss
            loss = loss * (count / sum(counts))
            loss.backward()
            value += loss.detach().double().cpu()
        return Measured(value, {name: p.grad for name, p in model.named_parameters()})

    def _apart(
        self, model: nn.Module, ids: Tensor, documents: list[list[int]] | None, **more: Any
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Logits and those of the routers, every document by itself."""
        rows = [row.split(lengths) for row, lengths in zip(ids, documents or [[ids.shape[1]]] * len(ids), strict=True)]
        parts = [[model(part[None].to(self.device), use_cache=False, **more) for part in row] for row in rows]
        logits = torch.stack([torch.cat([part.logits[0] for part in row]) for row in parts])
        routed = [getattr(part, "router_logits", None) or () for row in parts for part in row]
        return logits, tuple(torch.cat(layer) for layer in zip(*routed, strict=True))

    def routing_margin(self, ids: Tensor, documents: list[list[int]] | None) -> float:
        """How close the closest choice between two experts is. Without experts there is no choice."""
        top_k: int = getattr(self.wide.config, "num_experts_per_tok", None) or 0
        if not top_k or model_type(self.wide) not in FAMILIES:
            return float("inf")
        place = None if documents is None else positions(documents, *ids.shape).to(self.device)
        more: dict[str, Any] = dict(output_router_logits=True)
        with torch.no_grad():
            if _apart_only(self.wide, documents):
                _, routed = self._apart(self.wide, ids, documents, **more)
            else:
                routed = self.wide(ids.to(self.device), position_ids=place, use_cache=False, **more).router_logits
        gaps = [torch.diff(logits.topk(top_k + 1, -1).values)[:, -1].abs().min() for logits in routed]
        return min(float(gap) for gap in gaps)

    def compare(self, ours: Measured, batches: list[Raw], name: str, limit: float, angles: bool = False) -> list[Item]:
        """angles: show the distance from the model with exact angles even if the one as it is stands within the limit."""
        theirs = self.measure(self.wide, batches)
        errors = distances(ours, theirs)
        loss = _distance(ours.loss, theirs.loss)
        if self.narrow is None:
            within = max(loss, *errors.values()) <= limit
            if within and not angles:
                return _rows(name, loss, errors, limit)
            with exact_angles(self.wide):
                exact = self.measure(self.wide, batches)
            most = self.angle * max(_longest(ids, documents) for ids, _, documents in batches)
            own = {"": _distance(exact.loss, theirs.loss), **distances(exact, theirs)}
            rounded = {key: 0.0 if within or value > most else value for key, value in own.items()}
            return [
                *_rows(name, loss, errors, limit, rounded),
                *_rows(f"{name}exact angles: ", _distance(ours.loss, exact.loss), distances(ours, exact), limit),
            ]
        own = self.measure(self.narrow, batches)
        own_errors = distances(own, theirs)
        # one number has no spread to average: a bf16 model may hit its loss by luck, so its own error counts as at
        # least the rounding of bf16
        loss /= max(_distance(own.loss, theirs.loss), 2.0**-9)
        ratios = {key: errors[key] / max(own_errors[key], 1e-12) for key in errors}
        worst = max(ratios, key=lambda key: ratios[key] if ratios[key] == ratios[key] else float("inf"))
        # all parameters count alike. A single one has a few dozen numbers (a bias, a head's norm), and the ratio of two such
        # distances scatters: tests/gpu/test_stack_cuda.py averages over batches and holds each to 1.2
        whole = (sum(e**2 for e in errors.values()) / sum(e**2 for e in own_errors.values())) ** 0.5
        return [
            Item(f"{name}loss", loss, limit),
            Item(f"{name}gradients ({len(errors)})", whole, limit, "all parameters"),
            Item(f"{name}worst gradient", ratios[worst], SINGLE_LIMIT, worst),
        ]

    def compare_logits(self, ours: Tensor, ids: Tensor, documents: list[list[int]] | None, limit: float) -> list[Item]:
        def logits_of(model: nn.Module) -> Tensor:
            with torch.no_grad():
                if _apart_only(model, documents):
                    return self._apart(model, ids, documents)[0].cpu()
                place = None if documents is None else positions(documents, *ids.shape).to(self.device)
                return model(ids.to(self.device), position_ids=place, use_cache=False).logits.cpu()

        theirs, own = (None if model is None else logits_of(model) for model in (self.wide, self.narrow))
        error = _distance(ours, theirs) / (1.0 if own is None else _distance(own, theirs))
        if own is not None or error <= limit:
            return [Item("logits", error, limit)]
        with exact_angles(self.wide):
            exact = logits_of(self.wide)
        rounded = _distance(exact, theirs)
        rounded = rounded if rounded <= self.angle * _longest(ids, documents) else 0.0
        return [Item("logits", error, limit + rounded), Item("exact angles: logits", _distance(ours, exact), limit)]


def _rows(
    name: str, loss: float, errors: dict[str, float], limit: float, rounded: dict[str, float] | None = None
) -> list[Item]:
    """Loss, and of all gradients the one that is nearest to its limit or furthest beyond. rounded: added to the limits, the
    loss's by the name ""."""
    limits = {key: limit + (rounded or {}).get(key, 0.0) for key in ("", *errors)}
    worst = max(errors, key=lambda key: errors[key] / limits[key] if errors[key] == errors[key] else float("inf"))
    return [
        Item(f"{name}loss", loss, limits[""]),
        Item(f"{name}gradients ({len(errors)})", errors[worst], limits[worst], worst),
    ]


def _apart_only(model: nn.Module, documents: list[list[int]] | None) -> bool:
    """Whether documents are given one by one: not every model makes a mask of positions that restart."""
    kind = model_type(model)
    return kind not in FAMILIES or (documents is not None and not FAMILIES[kind].masks_documents)


def _balance_loss(model: nn.Module, routed: tuple[Tensor, ...]) -> Tensor | float:
    """What the model itself adds to its loss, of all documents together."""
    inner: Any = base_model(model)
    family = FAMILIES.get(inner.config.model_type)
    if family is None or not family.experts or not inner.config.output_router_logits:
        return 0.0
    own = sys.modules[type(inner).__module__].load_balancing_loss_func
    return inner.router_aux_loss_coef * own(routed, inner.num_experts, inner.num_experts_per_tok)


def _longest(ids: Tensor, documents: list[list[int]] | None) -> int:
    return ids.shape[1] if documents is None else max(max(row) for row in documents)


def _sharpness(model: nn.Module) -> float:
    """How much more an angle moves scores than where they are scaled by 1 / sqrt(D): Granite's default scale is 1."""
    said = [(getattr(module, "scaling", None), getattr(module, "head_dim", None)) for module in model.modules()]
    pairs = [(scale, size) for scale, size in said if isinstance(scale, float) and isinstance(size, int)]
    return max([1.0, *(scale * size**0.5 for scale, size in pairs)])


def model_type(model: nn.Module) -> str:
    return base_model(model).config.model_type  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]


@contextmanager
def exact_angles(model: nn.Module) -> Iterator[None]:
    """The same model, cos and sin of its positions formed in float64."""
    inner: Any = base_model(model)
    config = inner.config.get_text_config()
    modules = rotary_modules(inner)
    for module in modules:
        angles = Angles(module, config)

        def forward(x: Tensor, position_ids: Tensor, *args: Any, angles: Angles = angles, **kwargs: Any) -> Any:
            return angles(x, position_ids, int(position_ids.max()) + 1, True, *args, **kwargs)

        def formed(
            x: Tensor, position_ids: Tensor, layer_type: str | None = None, own: Any = module.forward
        ) -> tuple[Tensor, Tensor]:
            kind = () if layer_type is None else (layer_type,)
            width = own(x, position_ids[..., :1], *kind)[0].shape[
                -1
            ]  # gpt-oss has no second half, which is like the first
            rope = rope_for(config, layer_type, int(position_ids.max()) + 1)
            cos, sin = rope.cos_sin(position_ids, x.dtype, x.device)
            return cos[..., :width], sin[..., :width]

        module.forward = formed if config.model_type in FAMILIES else forward
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def distances(ours: Measured, theirs: Measured) -> dict[str, float]:
    """Relative error of every gradient; infinite where one side has a gradient and the other has none."""
    errors = dict.fromkeys(set(ours.gradients) ^ set(theirs.gradients), float("inf"))
    for name in set(ours.gradients) & set(theirs.gradients):
        own, grad = ours.gradients[name], theirs.gradients[name]
        if (own is None) != (grad is None):
            errors[name] = float("inf")
        elif grad is not None:
            errors[name] = _distance(own, grad)
    return errors


def expand_kv(model: nn.Module) -> None:
    """Let a float32 reference on a GPU reach long inputs: torch has no float32 kernel for grouped heads and would build the
    whole score matrix, while it has one for as many KV heads as query heads."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def attend(module, q, k, v, mask, scaling=None, dropout=0.0, **_):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("sdpa_expanded", attend)
    AttentionMaskInterface.register("sdpa_expanded", sdpa_mask)
    inner: Any = base_model(model)
    inner.set_attn_implementation("sdpa_expanded")


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    """‖a - b‖ / ‖b‖; where b is 0, 0 if a is too."""
    assert a is not None and b is not None
    a, b = a.detach().double(), b.detach().double().to(a.device)
    size = float(b.norm())
    if size == 0.0:
        return 0.0 if float(a.norm()) == 0.0 else float("inf")
    return float((a - b).norm()) / size
