"""Counts live bytes while real code runs, on fake tensors (dry run) or on real ones (profile).

Every tensor that an operator returns is looked at; a storage that was not seen before is an allocation, and its end is noticed by
a weak reference. FSDP2 gives storages back and takes them again by resizing them, which is watched too. Sizes are rounded as
torch's CUDA allocator rounds them. What comes out is the peak of each phase, by category (base/holding.py).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter

from ...base.holding import CALLER, category, word_of

ROUND = 512  # bytes: the allocator's smallest step
LARGE = 1 << 20  # bytes of an allocation that is worth a line of its own


@dataclass(frozen=True)
class Held:
    """A storage that lives: what it is for, its bytes, and where it was made."""

    reference: weakref.ref | None
    category: str
    nbytes: int
    line: str
    module: str = ""


class LiveBytes(TorchDispatchMode):
    """With fake tensors: enter it inside a FakeTensorMode, so that it sees that mode's tensors."""

    def __init__(self, device: torch.device | None = None) -> None:
        """device: count the tensors of this one only; None = all."""
        super().__init__()
        self.device = device
        self.phase, self.module = "load", ""
        self.live: Counter[str] = Counter()
        self.total = 0
        self.peaks: dict[str, Counter[str]] = {}
        self.lines: dict[str, Counter[str]] = {}  # the same by the line of ours, or of FSDP2, that allocated
        self._held: dict[int, Held] = {}  # by id of the storage
        self._lock = threading.RLock()  # threads of the disk store free tensors too
        self._home = threading.get_ident()

    @property
    def peak(self) -> int:
        return max((sum(holders.values()) for holders in self.peaks.values()), default=0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all that is asked, and nothing is allocated
        out = func(*args, **(kwargs or {}))
        for value in tree_iter(out):
            if isinstance(value, Tensor):
                self.see(value)
        return out

    def see(self, tensor: Tensor, name: str | None = None, *, line: str | None = None, module: str = "") -> None:
        """Count a tensor's storage, if it is new; `name` gives it another category, and `line` another origin with it."""
        storage = _storage(tensor)
        if storage is None or (self.device is not None and tensor.device != self.device):
            return
        known = self._held.get(id(storage))
        if known is not None and known.reference is not None and known.reference() is storage:
            if name is not None and (name, line or known.line) != (known.category, known.line):
                self._change(storage, known.nbytes, name, line or known.line, module or known.module)
            return
        made = line or self._line()
        name = name or category(self._frames())
        self._change(storage, _rounded(storage.nbytes()), name, made, module or self.module)

    def ignore(self, tensor: Tensor) -> None:
        """This storage is somebody else's: a buffer in host memory where the device is the CPU."""
        storage = tensor.untyped_storage()
        self._change(storage, 0, "other", "", "")

    def _change(self, storage: Any, nbytes: int, name: str, line: str, module: str) -> None:
        key = id(storage)
        with self._lock:
            known = self._forget(key, settled=False)
            reference = known and known.reference
            reference = reference or weakref.ref(storage, lambda _, key=key: self._forget(key))
            held = self._held[key] = Held(reference, name, nbytes, line, module)
            self._move(held, nbytes)
            best = self.peaks.get(self.phase)
            if best is None or self.total >= best.total():
                self._note()

    def _forget(self, key: int, settled: bool = True) -> Held | None:
        with self._lock:
            known = self._held.pop(key, None)
            if known is not None:
                self._move(known, -known.nbytes, settled)
            return known

    def _move(self, held: Held, nbytes: int, settled: bool = True) -> None:
        """The one place where bytes come and go. settled: False between the two halves of a change."""
        self.live[held.category] += nbytes
        self.total += nbytes

    @contextmanager
    def watching(self) -> Iterator[LiveBytes]:
        """The mode itself, and an eye on resized storages."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = self._held.get(id(storage))
            name = "fsdp" if known is None else known.category
            if self.device is None or storage.device == self.device:
                self._change(storage, _rounded(storage.nbytes()), name, self._line(), self.module)
            return result

        torch.UntypedStorage.resize_ = resized  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with self:
                yield self
        finally:
            torch.UntypedStorage.resize_ = resize

    def _frames(self) -> Iterator[FrameType]:
        """Who asks, innermost first. Autograd works for a GPU in a thread of its own, where a derivative that torch knows has no
        frame of Python: then it is asked for by the thread that waits for it."""
        frame = sys._getframe(1)
        while frame is not None:
            yield frame
            frame = frame.f_back
        if threading.get_ident() != self._home:
            frame = sys._current_frames().get(self._home)
            while frame is not None:
                yield frame
                frame = frame.f_back

    def _line(self) -> str:
        """The innermost line of ours, or of FSDP2, that asked for memory."""
        for frame in self._frames():
            path = _shown_path(frame.f_code.co_filename)
            if path and word_of(frame) != CALLER:
                return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
        return "outside of ithaca"

    def begin(self, phase: str) -> None:
        self.phase = phase
        self._note()

    def _note(self) -> None:
        """This is the largest of the phase so far."""
        self.peaks[self.phase] = +self.live
        self.lines[self.phase] = Counter()
        for held in self._held.values():
            if held.nbytes >= LARGE:
                self.lines[self.phase][held.line] += held.nbytes


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor itself, or what is inside a wrapper: the shard of a DTensor, the parts of a quantised state."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    inside = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # pyright: ignore
    for part in inside:
        if isinstance(part, Tensor):  # a DTensor lists its mesh too
            yield from plain_tensors(part)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ROUND) * ROUND


def _storage(tensor: Tensor) -> Any:
    """The storage of a plain tensor; None for a wrapper such as DTensor, whose inside is seen by itself."""
    return None if is_traceable_wrapper_subclass(tensor) else tensor.untyped_storage()


_ours: dict[str, str] = {}  # file -> how it is told, "" where it is not


def _shown_path(file: str) -> str:
    if file not in _ours:
        _, separator, ours = file.rpartition("/ithaca/")
        if separator and "site-packages/" not in ours:  # a checkout may be called ithaca and hold an environment
            _ours[file] = "" if ours.startswith(("planner/", "observe/", "cli/")) else ours  # not those who count
        else:
            _ours[file] = file.rpartition("/site-packages/")[2] if "distributed/fsdp" in file else ""
    return _ours[file]
