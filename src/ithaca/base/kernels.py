"""The attention kernels: one row each, in the order of preference. Imports no torch: stack, planner and engine read this.

A new kernel is a row here and a class in engine/attention/backends.py. The row says what is known without running it: what it can
do, how fast it is, and what it takes beside its inputs and outputs. On the machine itself only a call tells (probe.py), and
choice.py asks; a plan for another machine goes by the rows.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LARGEST_HEAD = 256
BLOCK = 128  # rows that kernels round the sequence up to
FP32 = 4  # bytes
SCORES = 2**26  # bytes of a block of scores, where they are written out (engine/attention/formula.py)

Rates = dict[int, tuple[float, float]]  # head size up to -> share of the GPU's peak, forward and backward


@dataclass(frozen=True)
class Call:
    """One call of a kernel's backward, as far as its workspace depends on it."""

    rows: int  # of the batch
    heads: int
    kv_heads: int
    tokens: int  # rounded up to BLOCK
    head_dim: int
    processors: int = 0  # of the GPU, under torch's deterministic algorithms; 0 = results may differ in their last bits

    @property
    def queries(self) -> int:
        return self.rows * self.heads * self.tokens

    @property
    def keys(self) -> int:
        return self.rows * self.kv_heads * self.tokens

    @property
    def dq_sums(self) -> int:
        """dq is added up in fp32."""
        return FP32 * self.queries * self.head_dim

    @property
    def shares_kv(self) -> bool:
        return self.heads > self.kv_heads


def _fa4_workspace(call: Call) -> int:
    row_sums = 2 * FP32 * call.queries  # two numbers a row
    shared_dk_dv = 2 * FP32 * call.keys * call.head_dim if call.shares_kv else 0  # added up in fp32 as well
    return call.dq_sums + row_sums + shared_dk_dv


def _cudnn_workspace(call: Call) -> int:
    row_sums = FP32 * call.queries  # a number a row
    every_dk_dv = 2 * 2 * call.queries * call.head_dim if call.shares_kv else 0  # of every query head, in bf16
    return call.dq_sums + row_sums + every_dk_dv


def _flash_workspace(call: Call) -> int:
    # it adds dq up in as many copies as there are processors for each head, where the order of sums must not vary
    copies = -(-call.processors // (call.rows * call.heads)) - 1 if call.processors else 0
    # it wants heads inside tokens, and copies output and its gradient into that order
    reordered = 2 * 2 * call.queries * call.head_dim if call.heads > 1 else 0
    return _cudnn_workspace(call) + copies * call.dq_sums + reordered


def _math_workspace(call: Call) -> int:
    scores = 4 * min(SCORES, FP32 * call.queries * call.tokens)  # scores, weights, their gradients, and copies of these
    return scores + 2 * FP32 * call.keys * call.head_dim  # dk and dv are added up in fp32


@dataclass(frozen=True)
class Kernel:
    backend: str  # its class in engine/attention/backends.py
    rates: Rates  # measured on one H200, in whole steps (benchmarks/results/2026-11-15-h200.md)
    older_rates: Rates | None = None  # on GPUs before Hopper, where those differ
    workspace: Callable[[Call], int] = lambda call: 0
    windows: bool = True
    softcap: bool = False  # of scores
    strided: bool = False  # reads and writes heads in any layout, so they need not be copied into one
    heads: tuple[int, ...] | None = None  # head sizes it was found right for; None = multiples of 8 up to LARGEST_HEAD
    every_head: bool = False  # any head size
    since: str = "ampere"  # the first kind of GPU that it is made for
    gpu: bool = True
    rocm: bool = False  # torch has it for AMD's GPUs too, where we have not tried it
    condition: str = ""  # what a plan for another machine takes for granted


KERNELS = {
    "fa4": Kernel(
        "Flash4", {64: (0.554, 0.548), 256: (0.68, 0.61)}, workspace=_fa4_workspace, since="hopper", strided=True,
        heads=(24, 32, 64, 96, 128, 192, 256), condition="FlashAttention-4 is installed (otherwise --kernel cudnn)",
    ),
    "cudnn": Kernel("Cudnn", {64: (0.45, 0.43), 256: (0.60, 0.545)}, workspace=_cudnn_workspace, windows=False),
    "flash": Kernel(
        "Flash", rocm=True, strided=True, rates={64: (0.30, 0.29), 256: (0.31, 0.33)}, workspace=_flash_workspace,
        older_rates={64: (0.55, 0.45), 256: (0.62, 0.50)},  # for which it was written
    ),
    # no plan is for CPUs; where CPU tensors are measured, a rate stands in and the time is never shown
    "cpu": Kernel("Cpu", {256: (0.31, 0.33)}, gpu=False, every_head=True, strided=True),
    # last, for what no other can; these rates are a guess from the bytes that it moves, and nobody has measured them
    "math": Kernel(
        "Math", {256: (0.05, 0.05)}, workspace=_math_workspace, softcap=True, every_head=True, rocm=True,
        condition="attention by plain matrix products, as no kernel is known for this model; their speed was not measured",
    ),
}  # fmt: skip
GPU_KERNELS = tuple(name for name, kernel in KERNELS.items() if kernel.gpu)

NO_SOFTCAP = "has no soft cap of scores"


def head_problem(head_dim: int) -> str | None:
    """Of every kernel of a GPU."""
    if head_dim % 8 or head_dim > LARGEST_HEAD:
        return f"head_dim={head_dim} is not a multiple of 8 up to {LARGEST_HEAD}"
    return None


def problem(
    name: str, head_dim: int, windowed: bool, *, softcapped: bool = False, value_dim: int | None = None
) -> str | None:
    """Why a kernel is not for such a layer, as far as is known; None if it is. value_dim: where it is not head_dim."""
    kernel = KERNELS[name]
    if windowed and not kernel.windows:
        return "has no sliding window"
    if softcapped and not kernel.softcap:
        return NO_SOFTCAP
    if kernel.every_head:
        return None
    head_dim = max(head_dim, value_dim or 0)  # the smaller is padded
    if kernel.heads is not None and head_dim not in kernel.heads:
        return f"head_dim={head_dim} is not among those it was found right for"
    return head_problem(head_dim)


def with_windows(name: str) -> str:
    """The kernel of layers with a window, where that of the others is `name`: itself, or the first behind it that has windows."""
    names = list(KERNELS)
    return next(kernel for kernel in names[names.index(name) :] if KERNELS[kernel].windows)


def fa4_installed() -> bool:
    """FlashAttention-4 is flash_attn.cute; FlashAttention-2 is called flash_attn too. Imports neither."""
    package = importlib.util.find_spec("flash_attn")
    folders = (package and package.submodule_search_locations) or ()
    return any((Path(folder) / "cute" / "interface.py").is_file() for folder in folders)


def import_ahead() -> threading.Thread | None:
    """Begin to import what FlashAttention-4 is built on, where it is installed: seconds, half of them spent on files, and so beside
    those of torch. Nothing in it imports torch, so neither thread meets a module that the other has half made."""
    if not fa4_installed():
        return None

    def run() -> None:
        with suppress(Exception):  # whoever needs it imports it again, and says what is wrong
            importlib.import_module("cutlass")

    thread = threading.Thread(target=run, name="import", daemon=True)
    thread.start()
    return thread


@cache
def rates_of(name: str, head_dim: int, older: bool) -> tuple[float, float]:
    """Shares of the peak, forward and backward. older: on a GPU before Hopper."""
    kernel = KERNELS[name]
    table = kernel.older_rates if older and kernel.older_rates else kernel.rates
    return next((rates for limit, rates in sorted(table.items()) if head_dim <= limit), table[max(table)])


def backward_workspace(name: str, shape: tuple[int, ...], kv_heads: int, processors: int = 0) -> int:
    """Bytes that the backward of q of `shape` [B, H, S, D] and as many keys takes inside; a forward takes none."""
    rows, heads, tokens, head_dim = shape
    return KERNELS[name].workspace(Call(rows, heads, kv_heads, -(-tokens // BLOCK) * BLOCK, head_dim, processors))
