"""Kernels of a dry run: they allocate what those of a GPU do, in their order, and compute nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from ...base.holding import holds
from ...base.kernels import KERNELS, backward_workspace, problem
from ...engine.attention.choice import Kernels, Need
from ...engine.attention.kernel import Calls
from ...engine.attention.scan import Call, MixerKernels, Tensors, out_dtype
from ...engine.model.nf4 import Nf4
from ...engine.model.token_kernels import TokenKernels
from ...engine.objective.cross_entropy import LossKernel, LossTerms, TileLoss
from .tracker import LiveBytes

SOME = 1024  # tokens that a scan is measured on


class DryKernel:
    """Of attention."""

    packed = True

    def __init__(self, name: str, processors: int = 0) -> None:
        self.name, self.processors, self.calls = name, processors, Calls()

    def problem(self, device: Any, dtype: Any, head_dim: int, windowed: bool) -> str | None:
        return None

    @holds("workspace")
    def workspace(self, direction: str, q: Tensor, k: Tensor) -> Tensor:
        inside = (
            0 if direction == "forward" else backward_workspace(self.name, tuple(q.shape), k.shape[1], self.processors)
        )
        return q.new_empty(inside, dtype=torch.uint8)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        self.workspace("forward", q, k)
        return out, lse

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        grads = tuple(torch.empty_like(t) for t in (q, k, v))
        self.workspace("backward", q, k)
        return grads

    forward_packed, backward_packed = forward, backward


@dataclass
class DryKernels(Kernels):
    """What would be chosen on the GPU is known, by name."""

    windowed: str = ""  # of layers with a window, if that is another
    processors: int = 0  # as in Job
    mixers: MixerKernels = field(default_factory=lambda: DryMixers())

    def _resolve(self, need: Need) -> Any:
        """As the engine: the first that can, from the one that is known on."""
        first, names = self.windowed or self.name if need.windowed else self.name, list(KERNELS)
        others = [name for name in names[names.index(first) + 1 :] if KERNELS[name].gpu]
        for name in (first, *others):
            if (
                problem(name, need.head_dim, need.windowed, softcapped=need.softcapped, value_dim=need.value_dim)
                is None
            ):
                return DryKernel(name, self.processors)
        return DryKernel(first, self.processors)


class DryMixers(MixerKernels):
    """Scans take what their formula does: whether there is a kernel, which would take less, only the GPU's machine knows."""

    def scan(self, call: Call, tensors: Tensors) -> Callable[..., Any]:
        key = (call.function, tuple((t.shape[3:], t.dtype) for t in tensors.values()))
        if key not in self.chosen:
            inside = _inside(call, tensors)
            begins = call.scan.state[0]

            def stand_in(*args: Any, **kwargs: Any) -> Any:
                every = dict(zip(call.places, args, strict=True)) | kwargs
                return _Scanned.apply(call, inside, every[begins], *(every[name] for name in tensors))

            self.chosen[key] = stand_in
        return self.chosen[key]


def _inside(call: Call, tensors: Tensors) -> tuple[int, int]:
    """Bytes that the formula takes for a token of a head beside what it is given and returns: forward, and forward and backward."""
    call = replace(call, function=inspect.unwrap(call.function))
    live = LiveBytes()
    with _disable_current_modes(), FakeTensorMode(), live.watching():
        some = {
            name: torch.empty((1,) if name in call.scan.weights else (1, SOME, 1, *t.shape[3:]), dtype=t.dtype)
            for name, t in tensors.items()
        }
        leaves = {name: t.requires_grad_() for name, t in some.items()}
        live.begin("forward")
        with torch.no_grad():
            call(leaves, None)
        live.begin("backward")
        with torch.enable_grad():
            out, state = call(leaves, None)
        out.backward(torch.empty_like(out))
        given, made = sum(t.nbytes for t in leaves.values()), out.nbytes + state.nbytes
    forward, backward = (sum(live.peaks[phase].values()) - given - made for phase in ("forward", "backward"))
    return max(0, forward) // SOME, max(0, backward - given - out.nbytes) // SOME


class _Scanned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, inside: tuple[int, int], state: Tensor | None, *tensors: Tensor) -> Any:
        names = [*(n for n in (*call.scan.own, *call.scan.shared, *call.scan.weights))]
        ctx.inside, ctx.state = inside[1], state
        ctx.save_for_backward(*tensors)
        like = tensors[[n for n in names].index(call.scan.out)]
        shared = next(t for t in tensors[len(call.scan.own) :])
        _taken(inside[0], like)
        rows, _, heads, size = like.shape
        after = like.new_empty(rows, heads, shared.shape[-1], size, dtype=torch.float32)
        return torch.empty_like(like, dtype=out_dtype(call.scan, like)), after

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dstate: Tensor) -> Any:  # pyright: ignore
        grads = [torch.empty_like(t) for t in ctx.saved_tensors]
        _taken(ctx.inside, dout)
        return None, None, None if ctx.state is None else torch.empty_like(ctx.state), *grads


@holds("workspace")
def _taken(inside: int, like: Tensor) -> None:
    like.new_empty(inside * like.shape[0] * like.shape[1] * like.shape[2], dtype=torch.uint8)


class DryTokens(TokenKernels):
    def fuses_norm(self, x: Tensor) -> bool:
        return x.dtype in (torch.bfloat16, torch.float16)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return _Norm.apply(x, weight)  # pyright: ignore[reportReturnType]

    def fuses(self, x: Tensor) -> bool:
        return x.dtype is torch.bfloat16

    def add_norm(
        self, x: Tensor, update: Tensor | None, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        total = x if update is None else torch.empty_like(x)
        return total, torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)

    def norm_backward(
        self, total: Tensor, weight: Tensor, scales: Tensor, dnormed: Tensor, dtotal: Tensor | None, learn: bool
    ) -> tuple[Tensor, Tensor | None]:
        return torch.empty_like(total), torch.empty_like(weight) if learn else None

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
        return x.new_empty(x.shape)

    def product(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate.new_empty(gate.shape)

    def product_backward(self, gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(gate), grad, torch.empty_like(up)

    def expert_backward(self, wide: Tensor, dproduct: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        product, dwide = torch.empty_like(dproduct), torch.empty_like(wide)
        return product, dwide, wide.new_empty(len(wide), dtype=torch.float32)

    def combine(self, copies: Tensor, place: Tensor, weights: Tensor | None) -> Tensor:
        return copies.new_empty(len(place), copies.shape[1])


class _Norm(torch.autograd.Function):
    """Keeps and makes what torch's fused RMSNorm does on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:  # pyright: ignore
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class DryNf4(Nf4):
    """A shard that packs and unpacks nothing."""

    unpack = staticmethod(lambda packed, out: out)

    def fill(self, weight: Tensor) -> None:
        pass


class DryLoss(LossKernel):
    def fuses(self, device: Any, dtype: torch.dtype, terms: LossTerms) -> bool:
        return terms.logit_cap is None and dtype in (torch.bfloat16, torch.float32)

    def __call__(
        self, logits: Tensor, labels: Tensor, weights: Tensor | None, terms: LossTerms, scale: float, learn: bool
    ) -> TileLoss:
        rows = torch.empty(labels.numel(), dtype=torch.float32)
        return rows.sum(), logits, logits.detach()

    def scale(self, gradient: Tensor, by: Tensor) -> Tensor:
        return gradient

    def adds_products(self, x: Tensor) -> bool:
        return x.dtype is torch.bfloat16

    def add_product(self, total: Tensor | None, rows: Tensor, x: Tensor) -> Tensor:
        return rows.new_empty(rows.shape[1], x.shape[1], dtype=torch.float32) if total is None else total

    def numbers(self, logits: Tensor, labels: Tensor, temperature: float, out: Tensor) -> None:
        pass

    def gradient_in_place(self, logits: Tensor, labels: Tensor, temperature: float, slopes: list[Tensor]) -> None:
        pass
