"""Scans: functions of a model's own code that carry a state from token to token, each head by itself.

Gated delta nets and Mamba-2 call such a function by name, on [B, tokens, heads, ·]. `SCANS` says which arguments are what. Here is
one run over whole documents for some heads, and its gradients: every document begins with no state, a long one goes on by segments
from the state that the segment before has left, so that what a scan takes inside follows the segment and not the document.
Backward walks the segments from the last: computes one again, differentiates it, and passes the gradient of the state on.

Which code computes: on a CPU the plain torch function of the model's file, the formula. On a GPU the kernel that transformers takes
in its place where a package is installed (flash-linear-attention, mamba-ssm, causal-conv1d), after it was tried here against the
formula, documents, segments and gradients included. Otherwise the formula, which is slow, with a line that says so.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...base.holding import module_holds
from ..tiling import differentiate

log = logging.getLogger("ithaca")
module_holds(__name__, "attention")

CHUNK = 64  # tokens that a gated delta net computes at once: a state passed on between whole ones changes no number
LIMIT = 0.05  # relative, of a kernel in half precision: rounding is a tenth of it

# Rows, first token, end: documents that begin and end alike. One that begins below 0 has begun before what is here.
Span = tuple[slice, int, int]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Scan:
    """How one is called. Arguments by their names in the torch function, since kernels call them otherwise."""

    own: tuple[str, ...]  # [B, tokens, heads] or [B, tokens, heads, ·]
    shared: tuple[str, ...]  # the same, where several heads may have one in common
    weights: tuple[str, ...]  # [heads]
    out: str  # the argument that has the shape of what is returned
    state: tuple[str, str]  # the argument it begins with, and the one that asks for what it ends with
    alone: bool  # returned without a pair where no state is asked for
    wide: bool  # returned in float32
    segment: int  # tokens, whole chunks of what it computes by; formulas take 0.4 GB a head for it in backward, Mamba-2's 1.1
    package: str  # whose kernel transformers takes
    repeats: str = ""  # of the module: how many heads of `shared` there are, where its code has repeated them


_DELTA = Scan(
    ("value", "g", "beta"), ("query", "key"), (), "value", ("initial_state", "output_final_state"), alone=False, wide=False,
    segment=2**15, package="fla", repeats="num_k_heads",
)  # fmt: skip
SCANS = {
    "torch_chunk_gated_delta_rule": _DELTA,
    "chunk_kimi_delta_attention": _DELTA,
    "mamba2_chunk_scan": Scan(
        ("hidden_states", "dt"), ("B", "C"), ("A", "D", "dt_bias"), "hidden_states", ("initial_states", "return_final_states"),
        alone=True, wide=True, segment=2**12, package="mamba_ssm",
    ),
}  # fmt: skip
CONVOLUTION, CONVOLUTION_PACKAGE = "causal_conv1d_fn", "causal_conv1d"


def has_scan(config: Any) -> bool:
    """Whether the file of its model's code has one."""
    from transformers import AutoModelForCausalLM

    model_class = AutoModelForCausalLM._model_mapping.get(type(config), None)  # pyright: ignore[reportAttributeAccessIssue]
    return model_class is not None and any(hasattr(sys.modules[model_class.__module__], name) for name in SCANS)


@dataclass(frozen=True)
class Call:
    """A call of a scan, taken apart: tensors that have heads, and the rest of what it was given."""

    scan: Scan
    function: Callable[..., Any]
    places: tuple[str, ...]  # names of positional arguments
    given: dict[str, Any]  # everything that is no tensor of ours

    @classmethod
    def of(cls, scan: Scan, function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Call, Tensors]:
        names = list(inspect.signature(inspect.unwrap(function)).parameters)
        places = tuple(names[: len(args)])
        every = dict(zip(places, args, strict=True)) | kwargs
        ours = (*scan.own, *scan.shared, *scan.weights)
        tensors = {name: every.pop(name) for name in ours if isinstance(every.get(name), Tensor)}
        return cls(scan, function, places, every), tensors

    def __call__(self, tensors: Tensors, state: Tensor | None) -> tuple[Tensor, Tensor]:
        begins, ends = self.scan.state
        every = self.given | tensors | {begins: state, ends: True}
        args = [every.pop(name) for name in self.places]
        return self.function(*args, **every)


def forward(
    call: Call, tensors: Tensors, spans: list[Span], came: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """[B, tokens, heads, ·] of each -> what the scan returns, and the state [B, heads, ·] after the last token. came: that before
    the first, for documents that have begun before."""
    like, left = tensors[call.scan.out], None
    if len(spans) == 1 and like.shape[1] <= call.scan.segment:
        return call(tensors, _state(came, slice(None), spans[0][1]))
    out = torch.empty_like(like, dtype=out_dtype(call.scan, like), memory_format=torch.contiguous_format)
    for rows, start, stop in spans:
        state = _state(came, rows, start)
        for a, b in _segments(start, stop, call.scan.segment):
            out[rows, a:b], state = call(_cut(call.scan, tensors, rows, a, b), state)
        if stop == like.shape[1] and state is not None:
            left = state.new_empty(like.shape[0], *state.shape[1:]) if left is None else left
            left[rows] = state
    return out, left


def backward(
    call: Call,
    tensors: Tensors,
    spans: list[Span],
    dout: Tensor,
    came: Tensor | None = None,
    dleft: Tensor | None = None,
) -> tuple[Tensors, Tensor | None]:
    """Gradients of all tensors, those of weights in float32, and of the state that came."""
    grads = {name: _zeros(t, wide=name in call.scan.weights) for name, t in tensors.items()}
    dcame = None if came is None else torch.zeros_like(came)
    for rows, start, stop in spans:
        segments = list(_segments(start, stop, call.scan.segment))
        states: list[Tensor | None] = [_state(came, rows, start)]
        with torch.no_grad():
            for a, b in segments[:-1]:
                states.append(call(_cut(call.scan, tensors, rows, a, b), states[-1])[1])
        dstate = dleft[rows] if dleft is not None and stop == dout.shape[1] else None
        for a, b in reversed(segments):
            before = states.pop()
            leaves = {n: t.detach().requires_grad_() for n, t in _cut(call.scan, tensors, rows, a, b).items()}
            first = None if before is None else before.detach().requires_grad_()
            with torch.enable_grad():
                out, after = call(leaves, first)
            outputs, given = [out], [dout[rows, a:b].to(out.dtype)]
            if dstate is not None:
                outputs, given = [out, after], [*given, dstate]
            inputs = [*leaves.values(), *([] if first is None else [first])]
            found = differentiate(outputs, given, inputs)
            dstate = None if first is None else found[-1]
            for name, grad in zip(leaves, found, strict=False):
                if grad is not None and name in call.scan.weights:
                    grads[name] += grad
                elif grad is not None:
                    grads[name][rows, a:b] = grad
        if dcame is not None and dstate is not None:
            dcame[rows] = dstate
    return grads, dcame


def _state(came: Tensor | None, rows: slice, start: int) -> Tensor | None:
    return came[rows] if came is not None and start < 0 else None


def out_dtype(scan: Scan, like: Tensor) -> torch.dtype:
    return torch.float32 if scan.wide else like.dtype


def _zeros(t: Tensor, wide: bool) -> Tensor:
    dtype = torch.promote_types(t.dtype, torch.float32) if wide else t.dtype
    return torch.zeros(t.shape, dtype=dtype, device=t.device)


def _segments(start: int, stop: int, segment: int) -> Iterator[tuple[int, int]]:
    for a in range(max(start, 0), stop, segment):
        yield a, min(a + segment, stop)


def _cut(scan: Scan, tensors: Tensors, rows: slice, a: int, b: int) -> Tensors:
    return {name: t if name in scan.weights else t[rows, a:b] for name, t in tensors.items()}


# -- which code computes --------------------------------------------------------------------------------------------------


@dataclass
class MixerKernels:
    """The functions that mixers get in place of those of their model's file, chosen once."""

    chosen: dict[Any, Callable[..., Any]] = field(default_factory=dict)

    def scan(self, call: Call, tensors: Tensors) -> Callable[..., Any]:
        value = tensors[call.scan.out]
        key = (call.function, value.device, value.dtype, *(t.shape[-1] for t in tensors.values()))
        return self._chosen(key, {call.scan.package: call.function}, value, lambda _: _wrong_scan(call, tensors))

    def convolution(
        self, function: Callable[..., Any], x: Tensor, weight: Tensor, bias: Tensor | None, activation: Any
    ) -> Callable[..., Any]:
        key = (function, x.device, x.dtype, weight.shape[-1], bias is None, activation)

        def wrong(kernel: Callable[..., Any]) -> str | None:
            return _wrong_convolution(kernel, inspect.unwrap(function), x, weight, bias, activation)

        return self._chosen(key, {CONVOLUTION_PACKAGE: function, "fla": _convolution_of_fla}, x, wrong)

    def _chosen(
        self,
        key: Any,
        kernels: dict[str, Callable[..., Any]],
        like: Tensor,
        wrong: Callable[[Callable[..., Any]], str | None],
    ) -> Callable[..., Any]:
        """kernels: by the package that each needs; the first of them has the formula inside."""
        if key not in self.chosen:
            plain, reasons = inspect.unwrap(next(iter(kernels.values()))), []
            for package, kernel in kernels.items() if like.device.type != "cpu" else ():
                why = _tried(wrong, kernel) if importlib.util.find_spec(package) else "it is not installed"
                if why is None:
                    self.chosen[key] = kernel
                    break
                reasons.append(f"{package}: {why}")
            else:
                if reasons:
                    log.warning("%s by the plain formula, which is slow (%s)", plain.__name__, "; ".join(reasons))
                self.chosen[key] = plain
        return self.chosen[key]


def _convolution_of_fla(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Any = None) -> Tensor:
    """transformers knows none but causal-conv1d's; who has a kernel for scans has this one too."""
    from fla.modules.convolution import causal_conv1d  # pyright: ignore[reportMissingImports]

    return causal_conv1d(x.mT, weight, bias, activation=activation)[0].mT


def _tried(wrong: Callable[[Callable[..., Any]], str | None], kernel: Callable[..., Any]) -> str | None:
    try:
        return wrong(kernel)
    except Exception as error:  # whatever an optional package or a driver raises is the reason, not our failure
        why = (str(error).strip().splitlines() or [""])[0][:160]
        return f"its kernel does not run on this GPU ({type(error).__name__}: {why})"


def _wrong_scan(call: Call, tensors: Tensors) -> str | None:
    """Two documents, one of them by two segments. A scan gets what heads share once for each of them, and so does this one."""
    generator, tokens, heads = torch.Generator().manual_seed(0), 300, tensors[call.scan.out].shape[2]
    call = replace(call, scan=replace(call.scan, segment=128))
    some: Tensors = {}
    for name, t in tensors.items():
        if name in call.scan.weights:
            some[name] = t.detach()
            continue
        numbers = torch.randn(1, tokens, heads, *t.shape[3:], generator=generator)
        # decays are logarithms, so below 0, and small enough that a state lasts; rates are between 0 and 1
        numbers = -0.05 * numbers.abs() if name == "g" else numbers.sigmoid() if name == "beta" else numbers
        some[name] = numbers.to(t.device, t.dtype)
    spans: list[Span] = [(slice(0, 1), 0, 200), (slice(0, 1), 200, tokens)]
    dout = torch.randn(some[call.scan.out].shape, generator=generator).to(some[call.scan.out].device)
    plain = replace(call, function=inspect.unwrap(call.function))
    with torch.no_grad():
        ours, right = (forward(each, some, spans)[0] for each in (call, plain))
    found, expected = (backward(each, some, spans, dout)[0] for each in (call, plain))
    return _off({"outputs": ours} | found, {"outputs": right} | expected)


def _wrong_convolution(
    function: Callable[..., Any],
    plain: Callable[..., Any],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Any,
) -> str | None:
    numbers = torch.randn(1, x.shape[1], 200, generator=torch.Generator().manual_seed(0)).to(x.device, x.dtype)
    results: list[Tensors] = []
    for each in (function, plain):
        leaves = {"x": numbers, "weight": weight} | ({} if bias is None else {"bias": bias})
        leaves = {name: t.detach().clone().requires_grad_() for name, t in leaves.items()}
        with torch.enable_grad():
            out = each(leaves["x"], leaves["weight"], leaves.get("bias"), activation=activation)
        found = differentiate([out], [numbers.to(out.dtype)], list(leaves.values()))
        results.append({"outputs": out.detach()} | {n: g for n, g in zip(leaves, found, strict=True) if g is not None})
    return _off(*results)


def _off(ours: Tensors, right: Tensors) -> str | None:
    for name, expected in right.items():
        off = float((ours[name].float() - expected.float()).norm() / expected.float().norm())
        if not off < LIMIT:  # also where it is not a number
            what = name if name == "outputs" else f"gradients of {name}"
            return f"its kernel computes wrong {what} on this GPU (off by {off:.0%})"
    return None
