"""The kernels: aten ops that ship with torch, FlashAttention-4 where it is installed, and the formula for the rest (formula.py).

Order of preference on a GPU: FlashAttention-4, cuDNN (no windows), torch's own flash (windows, packed documents), and last the
formula, slow. Measured on one H200, causal, D=128, 1M tokens, forward / backward TFLOP/s: fa4 646 / 622, cudnn 505 / 543.
On a CPU one aten op serves, and the formula where scores have a soft cap; it is the same code path that tests use.

Traps of cuDNN, both silent. Its backward reads `out` and `dout` with one set of strides: given tensors of different layouts it
returns gradients that are wrong by half their size, so every tensor is made contiguous here. And in a tensor of more than
2³¹ elements it computes wrong addresses (measured: dq at the far end of 4.3M × 4 heads off by 17%), so it gets fewer heads.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from ...base.holding import module_holds
from ...base.kernels import KERNELS, NO_SOFTCAP, fa4_installed, head_problem
from .compiled import keep_compiled
from .formula import Math
from .kernel import Calls, Kernel, merge
from .padding import equal_sizes, equal_sizes_backward
from .probe import check, probe

log = logging.getLogger("ithaca")
aten = torch.ops.aten
module_holds(__name__, "attention")
module_holds("flash_attn.cute", "workspace")


class Cpu:
    """torch's blocked CPU attention. Windows become an explicit mask, a few hundred rows at a time."""

    name = "cpu"
    packed = False
    rows = 256  # rows per masked block: bounds the mask at rows × (window + rows)

    def __init__(self) -> None:
        self.calls = Calls()

    def problem(self, device, dtype, head_dim, windowed, *, softcapped=False, value_dim=None):
        if device.type != "cpu":
            return f"runs on CPU tensors only, not on {device.type}"
        return NO_SOFTCAP if softcapped else None

    @equal_sizes
    def forward(self, q, k, v, *, causal, scale, window, softcap=None):
        assert softcap is None, NO_SOFTCAP
        self.calls.forward += 1
        op = aten._scaled_dot_product_flash_attention_for_cpu
        if window is None:
            out, lse = op(q, k, v, 0.0, causal, scale=scale)
            return out, lse.contiguous()
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=_lse_dtype(q))
        for rows, cols, mask in _windowed_blocks(q, k, causal, window, self.rows):
            part = op(q[:, :, rows], k[:, :, cols], v[:, :, cols], 0.0, False, attn_mask=mask, scale=scale)
            out[:, :, rows], lse[:, :, rows] = part
        return out, lse

    @equal_sizes_backward
    def backward(self, dout, q, k, v, out, lse, *, causal, scale, window, softcap=None):
        assert softcap is None, NO_SOFTCAP
        self.calls.backward += 1
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward
        group = q.shape[1] // k.shape[1]
        wide_k, wide_v = (t.repeat_interleave(group, 1) if group > 1 else t for t in (k, v))
        lse = _strided_lse(lse)
        if window is None:
            dq, dk, dv = op(dout, q, wide_k, wide_v, out, lse, 0.0, causal, scale=scale)
        else:
            dq, dk, dv = torch.empty_like(q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
            for r, c, mask in _windowed_blocks(q, k, causal, window, self.rows):
                args = (t[:, :, r] for t in (dout, q)), (t[:, :, c] for t in (wide_k, wide_v))
                part_lse = _strided_lse(lse[:, :, r].contiguous())
                part = op(*args[0], *args[1], out[:, :, r], part_lse, 0.0, False, attn_mask=mask, scale=scale)
                dq[:, :, r] = part[0]
                dk[:, :, c] += part[1]
                dv[:, :, c] += part[2]
        return dq, _narrow(dk, group), _narrow(dv, group)


class Cudnn:
    """cuDNN through aten: no build, GQA, every length; measured right at 4.6M tokens.

    One long causal call loses a fifth of its forward rate to cache misses, so the queries go by tiles: all keys before a tile
    as a full rectangle, the diagonal as a causal square, merged by lse. Backward gains nothing from that and stays one call."""

    name = "cudnn"
    packed = False
    query_tile: int | None = 2**16  # None = one call
    limit = 2**31  # elements of a tensor in one call

    def __init__(self) -> None:
        self.calls = Calls()
        self.probed: dict[tuple, str | None] = {}

    def problem(self, device, dtype, head_dim, windowed, *, softcapped=False, value_dim=None):
        if windowed:
            return "has no sliding window"
        unfit = _half_on_cuda(device, dtype, head_dim, softcapped, value_dim)
        return unfit or probe(self, device, dtype, head_dim, False, value_dim=value_dim)

    @equal_sizes
    def forward(self, q, k, v, *, causal, scale, window, softcap=None):
        assert softcap is None, NO_SOFTCAP
        assert window is None
        self.calls.forward += 1
        calls = _calls(q, k, self.limit)
        if len(calls) == 1:
            return self._rows(q, k, v, causal, scale)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        for a, b in calls:
            out[a], lse[a] = self._rows(q[a], k[b], v[b], causal, scale)
        return out, lse

    def _rows(self, q, k, v, causal, scale):
        """One call, or one for each tile of queries."""
        if q.shape[2] == k.shape[2] == 1:  # cuDNN refuses 1 × 1; the softmax of one score is 1
            group = q.shape[1] // k.shape[1]
            return v.repeat_interleave(group, 1), _one_score(q, k, scale)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if self.query_tile is None or q.shape[2] < 2 * self.query_tile:
            return self._forward(q, k, v, causal, scale)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        for start in range(0, q.shape[2], self.query_tile):
            rows = slice(start, min(start + self.query_tile, q.shape[2]))
            tile = q[:, :, rows].contiguous()
            if not causal:
                out[:, :, rows], lse[:, :, rows] = self._forward(tile, k, v, False, scale)
                continue
            own = self._forward(tile, k[:, :, rows].contiguous(), v[:, :, rows].contiguous(), True, scale)
            if start:
                before = self._forward(tile, k[:, :, :start].contiguous(), v[:, :, :start].contiguous(), False, scale)
                own = merge(before, own)
            out[:, :, rows], lse[:, :, rows] = own
        return out, lse

    def _forward(self, q, k, v, causal, scale):
        out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)[:2]
        return out.contiguous(), lse.view(lse.shape[:3])

    @equal_sizes_backward
    def backward(self, dout, q, k, v, out, lse, *, causal, scale, window, softcap=None):
        assert softcap is None, NO_SOFTCAP
        self.calls.backward += 1
        calls = _calls(q, k, self.limit)
        if len(calls) == 1:
            return self._backward(dout, q, k, v, out, lse, causal, scale)
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (k, v))
        for a, b in calls:  # query heads that share a KV head may be in different calls: their parts add in fp32
            part = self._backward(dout[a], q[a], k[b], v[b], out[a], lse[a], causal, scale)
            dq[a] = part[0]
            dk[b] += part[1]
            dv[b] += part[2]
        return dq, dk.to(k.dtype), dv.to(v.dtype)

    def _backward(self, dout, q, k, v, out, lse, causal, scale):
        group = q.shape[1] // k.shape[1]
        if (
            q.shape[2] == k.shape[2] == 1
        ):  # with other blocks of its row, or a sink, the weight of one score is less than 1
            weight = (_one_score(q, k, scale) - lse).exp()[..., None]
            wide_k, wide_v = (t.repeat_interleave(group, 1).float() for t in (k, v))
            slope = weight * (dout.float() * (wide_v - out.float())).sum(-1, keepdim=True) * scale
            dq, dk, dv = slope * wide_k, _narrow(slope * q.float(), group), _narrow(weight * dout.float(), group)
            return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
        dout, q, k, v, out = (t.contiguous() for t in (dout, q, k, v, out))
        none = q.new_empty(0)  # stands for the dropout seed, which is not read without dropout
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse.contiguous()[..., None], none, none, None, None, None,
            q.shape[2], k.shape[2], 0.0, causal, scale=scale,
        )  # fmt: skip


class Flash:
    """torch's own FlashAttention-2: half of cuDNN's rate on Hopper, but with windows and packed documents."""

    name = "flash"
    packed = True

    def __init__(self) -> None:
        self.calls = Calls()
        self.probed: dict[tuple, str | None] = {}

    def problem(self, device, dtype, head_dim, windowed, *, softcapped=False, value_dim=None):
        unfit = _half_on_cuda(device, dtype, head_dim, softcapped, value_dim)
        return unfit or probe(self, device, dtype, head_dim, windowed, value_dim=value_dim)

    @equal_sizes
    def forward(self, q, k, v, *, causal, scale, window, softcap=None):
        assert softcap is None, NO_SOFTCAP
        self.calls.forward += 1
        qt, kt, vt = (t.transpose(1, 2) for t in (q, k, v))
        left, right = _window_sides(causal, window)
        out, lse = aten._flash_attention_forward(
            qt, kt, vt, None, None, q.shape[2], k.shape[2], 0.0, causal, False,
            scale=scale, window_size_left=left, window_size_right=right,
        )[:2]  # fmt: skip
        return _laid_out(out.transpose(1, 2), q), lse

    @equal_sizes_backward
    def backward(self, dout, q, k, v, out, lse, *, causal, scale, window, softcap=None):
        assert softcap is None, NO_SOFTCAP
        self.calls.backward += 1
        left, right = _window_sides(causal, window)
        grads = aten._flash_attention_backward(
            *(t.transpose(1, 2) for t in (dout, q, k, v, out)), lse.contiguous(), None, None, q.shape[2], k.shape[2],
            0.0, causal, *_no_dropout(q), scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return tuple(g.transpose(1, 2) for g in grads)

    @equal_sizes
    def forward_packed(self, q, k, v, *, bounds: Tensor, longest: int, scale: float, window: int | None, softcap=None):
        """Causal attention inside each document of one row; `bounds` int32 [documents + 1]."""
        assert softcap is None, NO_SOFTCAP
        self.calls.forward += 1
        left, right = _window_sides(True, window)
        out, lse = aten._flash_attention_forward(
            *(t[0].transpose(0, 1) for t in (q, k, v)), bounds, bounds, longest, longest, 0.0, True, False,
            scale=scale, window_size_left=left, window_size_right=right,
        )[:2]  # fmt: skip
        return _laid_out(out.transpose(0, 1)[None], q), lse[None]

    @equal_sizes_backward
    def backward_packed(self, dout, q, k, v, out, lse, *, bounds: Tensor, longest: int, scale, window, softcap=None):
        assert softcap is None, NO_SOFTCAP
        self.calls.backward += 1
        left, right = _window_sides(True, window)
        grads = aten._flash_attention_backward(
            *(t[0].transpose(0, 1) for t in (dout, q, k, v, out)), lse[0].contiguous(), bounds, bounds,
            longest, longest, 0.0, True, *_no_dropout(q), scale=scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return tuple(g.transpose(0, 1)[None] for g in grads)


class Flash4:
    """FlashAttention-4 (package flash-attn-4, CuTe DSL): the fastest on Hopper; compiled at first use (compiled.py).

    Its forward takes a soft cap too, but nobody has compared its gradients with one, so it is not offered."""

    name = "fa4"
    packed = True

    def __init__(self) -> None:
        self.calls = Calls()
        self.probed: dict[tuple, str | None] = {}
        self.checked: set[tuple] = set()
        # its compiler says at every compile that it does not know a type of its own: nobody can act on that
        warnings.filterwarnings("ignore", message="Argument aux_data", category=UserWarning)

    def problem(self, device, dtype, head_dim, windowed, *, softcapped=False, value_dim=None):
        if not fa4_installed():
            return "needs the package flash-attn-4, which is not installed"
        unfit = _half_on_cuda(device, dtype, head_dim, softcapped, value_dim)
        if unfit is None and (why := keep_compiled(torch.cuda.get_device_capability(device))):
            log.info(
                "FlashAttention-4 compiles anew in every process: %s (XDG_CACHE_HOME may name another folder)", why
            )
        return unfit or probe(self, device, dtype, head_dim, windowed, value_dim=value_dim)

    @equal_sizes
    def forward(self, q, k, v, *, causal, scale, window, softcap=None):
        assert softcap is None, NO_SOFTCAP
        check(self, q, k, causal=causal, window=window, packed=False, backward=False)
        self.calls.forward += 1
        return self._forward(q, k, v, causal, scale, window)

    @equal_sizes_backward
    def backward(self, dout, q, k, v, out, lse, *, causal, scale, window, softcap=None):
        assert softcap is None, NO_SOFTCAP
        check(self, q, k, causal=causal, window=window, packed=False, backward=True)
        self.calls.backward += 1
        return self._backward(dout, q, k, v, out, lse, causal, scale, window)

    @equal_sizes
    def forward_packed(self, q, k, v, *, bounds: Tensor, longest: int, scale: float, window: int | None, softcap=None):
        assert softcap is None, NO_SOFTCAP
        check(self, q, k, causal=True, window=window, packed=True, backward=False)
        self.calls.forward += 1
        varlen = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
        out, lse = self._forward(q, k, v, True, scale, window, **varlen)
        return out, lse

    @equal_sizes_backward
    def backward_packed(self, dout, q, k, v, out, lse, *, bounds: Tensor, longest: int, scale, window, softcap=None):
        assert softcap is None, NO_SOFTCAP
        check(self, q, k, causal=True, window=window, packed=True, backward=True)
        self.calls.backward += 1
        varlen = {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return self._backward(dout, q, k, v, out, lse, True, scale, window, **varlen)

    def _forward(self, q, k, v, causal, scale, window, **varlen):
        from flash_attn.cute.interface import _flash_attn_fwd  # pyright: ignore[reportMissingImports]

        left, right = _open_window(causal, window)
        out = torch.empty_like(q)  # in its layout
        lse = _flash_attn_fwd(
            *(_tokens_first(t, bool(varlen)) for t in (q, k, v)), out=_tokens_first(out, bool(varlen)),
            softmax_scale=scale, causal=causal and window is None, window_size_left=left, window_size_right=right,
            return_lse=True, **varlen,
        )[1]  # fmt: skip
        return out, lse[None] if varlen else lse

    def _backward(self, dout, q, k, v, out, lse, causal, scale, window, **varlen):
        from flash_attn.cute.interface import _flash_attn_bwd  # pyright: ignore[reportMissingImports]

        left, right = _open_window(causal, window)
        grads = [torch.empty_like(t) for t in (q, k, v)]
        dq, dk, dv, *inputs = (_tokens_first(t, bool(varlen)) for t in (*grads, q, k, v, out, dout))
        lse = (lse[0] if varlen else lse).contiguous()
        _flash_attn_bwd(
            *inputs, lse, softmax_scale=scale, causal=causal and window is None, window_size_left=left,
            window_size_right=right, dq=dq, dk=dk, dv=dv, **varlen,
        )  # fmt: skip
        return tuple(grads)


_CLASSES = {each.__name__: each for each in (Flash4, Cudnn, Flash, Cpu, Math)}
BACKENDS: dict[str, Callable[[], Kernel]] = {name: _CLASSES[row.backend] for name, row in KERNELS.items()}


def _tokens_first(t: Tensor, one_row: bool) -> Tensor:
    """[B, H, S, D] -> [B, S, H, D], or [S, H, D] for a packed row: a view, the kernel takes any strides."""
    return t[0].transpose(0, 1) if one_row else t.transpose(1, 2)


def _laid_out(out: Tensor, q: Tensor) -> Tensor:
    """Heads first, where q is."""
    return out.contiguous() if q.is_contiguous() else out


def _open_window(causal: bool, window: int | None) -> tuple[int | None, int | None]:
    """(left, right) with None for an open side."""
    if window is None:
        return None, None
    return window, 0 if causal else None


def _half_on_cuda(
    device: torch.device, dtype: torch.dtype, head_dim: int, softcapped: bool, value_dim: int | None
) -> str | None:
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in bf16 or fp16, not {str(dtype).removeprefix('torch.')}"
    return NO_SOFTCAP if softcapped else head_problem(max(head_dim, value_dim or 0))  # the smaller is padded


def _window_sides(causal: bool, window: int | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    return window, 0 if causal else -1


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _calls(q: Tensor, k: Tensor, limit: int) -> list[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Rows and heads of q and k that go into one call, so that no tensor has `limit` elements or more: everything at once
    where it can, else a row and KV head at a time with as many of its query heads as fit."""
    if max(q.numel(), k.numel()) < limit:
        return [((slice(None), slice(None)), (slice(None), slice(None)))]
    group, tokens = q.shape[1] // k.shape[1], max(q.shape[2], k.shape[2])
    fit = (limit - 1) // (tokens * q.shape[3])
    if fit == 0:
        raise ValueError(
            f"one head of {tokens:,} tokens × {q.shape[3]} is more than this kernel can address ({limit:,} elements); use a "
            "ring (Stack.ring), which divides the tokens, or attention='fa4'"
        )
    calls = []
    for row in range(q.shape[0]):
        for head in range(k.shape[1]):
            for start in range(head * group, (head + 1) * group, fit):
                heads = slice(start, min(start + fit, (head + 1) * group))
                calls.append(((slice(row, row + 1), heads), (slice(row, row + 1), slice(head, head + 1))))
    return calls


def _one_score(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Of one query and one key, [B, H, 1]."""
    return (q.float() * k.repeat_interleave(q.shape[1] // k.shape[1], 1).float()).sum(-1) * scale


def _narrow(grad: Tensor, group: int) -> Tensor:
    """Sum the gradients of the query heads that share a KV head, in fp32."""
    if group == 1:
        return grad
    grouped = grad.unflatten(1, (-1, group))
    wide = grouped if grad.dtype == torch.float64 else grouped.float()
    return wide.sum(2).to(grad.dtype)


def _strided_lse(lse: Tensor) -> Tensor:
    """The CPU op's backward expects lse in the strides its forward returns: [B, S, H] seen as [B, H, S]."""
    return lse.transpose(1, 2).contiguous().transpose(1, 2)


def _windowed_blocks(q: Tensor, k: Tensor, causal: bool, window: int, rows: int):
    """Blocks of rows with the columns they may see and an additive mask."""
    q_len, k_len = q.shape[2], k.shape[2]
    shift = k_len - q_len
    for start in range(0, q_len, rows):
        stop = min(start + rows, q_len)
        first = max(0, start + shift - window)
        last = min(k_len, stop + shift) if causal else k_len
        i = torch.arange(start, stop)[:, None] + shift
        j = torch.arange(first, last)[None]
        hidden = i - j > window
        if causal:
            hidden |= j > i
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
        yield slice(start, stop), slice(first, last), mask
