"""The untouched Hugging Face model on the whole batch, in one process: what everything is compared with.

Packed documents are given to it the way transformers takes them: positions that restart, from which it builds its own
block-diagonal mask. Labels are shifted before, with the last token of a document unsupervised, and losses of micro-batches
are summed and divided by their common count.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..activations.loss import IGNORE
from ..sequence import positions, shift_labels

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
        self.wide = copy.deepcopy(model).to(device)
        if self.device.type == "cuda":
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
            place = None
            if documents is not None:
                place = positions(documents, *ids.shape).to(self.device)
            out = model(
                input_ids=ids.to(self.device),
                position_ids=place,
                labels=labels.to(self.device),
                shift_labels=targets.to(self.device),
                num_items_in_batch=count,
                use_cache=False,
            )
            loss = out.loss * (count / sum(counts))
            loss.backward()
            value += loss.detach().double().cpu()
        return Measured(value, {name: p.grad for name, p in model.named_parameters()})

    def routing_margin(self, ids: Tensor, documents: list[list[int]] | None) -> float:
        """How close the closest choice between two experts is. Without experts there is no choice."""
        top_k: int = getattr(self.wide.config, "num_experts_per_tok", None) or 0
        if not top_k:
            return float("inf")
        place = None if documents is None else positions(documents, *ids.shape).to(self.device)
        with torch.no_grad():
            out = self.wide(ids.to(self.device), position_ids=place, use_cache=False, output_router_logits=True)
        gaps = [torch.diff(logits.topk(top_k + 1, -1).values)[:, -1].abs().min() for logits in out.router_logits]
        return min(float(gap) for gap in gaps)

    def compare(self, ours: Measured, batches: list[Raw], name: str, limit: float) -> list[Item]:
        theirs = self.measure(self.wide, batches)
        errors = distances(ours, theirs)
        worst = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
        loss = _distance(ours.loss, theirs.loss)
        if self.narrow is None:
            return [
                Item(f"{name}loss", loss, limit),
                Item(f"{name}gradients ({len(errors)})", errors[worst], limit, worst),
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
        place = None if documents is None else positions(documents, *ids.shape).to(self.device)
        with torch.no_grad():
            theirs, own = (
                None if model is None else model(ids.to(self.device), position_ids=place, use_cache=False).logits.cpu()
                for model in (self.wide, self.narrow)
            )
        scale = 1.0 if own is None else _distance(own, theirs)
        return [Item("logits", _distance(ours, theirs) / scale, limit)]


def distances(ours: Measured, theirs: Measured) -> dict[str, float]:
    """Relative error of every gradient; infinite where one side has a gradient and the other has none."""
    errors = dict.fromkeys(set(ours.gradients) ^ set(theirs.gradients), float("inf"))
    for name in set(ours.gradients) & set(theirs.gradients):
        mine, grad = ours.gradients[name], theirs.gradients[name]
        if (mine is None) != (grad is None):
            errors[name] = float("inf")
        elif grad is not None:
            errors[name] = _distance(mine, grad)
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
    inner: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # pyright: ignore
    inner.set_attn_implementation("sdpa_expanded")


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """As from_pretrained(dtype=...) leaves a model: rotary frequencies stay in float32, which model.to(dtype) would round."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    """‖a - b‖ / ‖b‖; where b is 0, 0 if a is too."""
    assert a is not None and b is not None
    a, b = a.detach().double(), b.detach().double().to(a.device)
    size = float(b.norm())
    if size == 0.0:
        return 0.0 if float(a.norm()) == 0.0 else float("inf")
    return float((a - b).norm()) / size
