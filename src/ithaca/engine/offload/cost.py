"""What stores hold, in bytes: the terms of store.py, host.py and disk.py. No torch; tested against the dry run."""

from __future__ import annotations

from collections import deque

from ..limits import IN_FLIGHT


def pinned(nbytes: int) -> int:
    """torch's own pinned memory comes in powers of two (a store pins its buffers by itself, as they are)."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


class InFlight:
    """Tensors on their way out, of which those that are copies hold memory of their own. Kept as runs of equal ones: a layer puts
    thousands of pieces."""

    def __init__(self) -> None:
        self.runs: deque[tuple[int, bool, int]] = deque()  # bytes of a tensor, whether it is a copy, how many
        self.flush()

    def flush(self) -> None:
        """Nothing is on its way any more."""
        self.runs.clear()
        self.total = self.copies = self.count = 0  # bytes, bytes of copies, tensors

    def put(self, nbytes: int, copied: bool, times: int = 1) -> None:
        """Each put first waits for the oldest, as long as there are two and more than IN_FLIGHT bytes; what the last of them waits
        for is what all of them together do."""
        self._add(nbytes, copied, times - 1)
        while self.count >= 2 and self.total > IN_FLIGHT:
            size, is_copy, there = self.runs.popleft()
            needed = -(-(self.total - IN_FLIGHT) // size) if size else there
            gone = min(needed, there, self.count - 1)
            self.count -= gone
            self.total -= gone * size
            self.copies -= gone * size if is_copy else 0
            if gone < there:
                self.runs.appendleft((size, is_copy, there - gone))
        self._add(nbytes, copied, 1)

    def _add(self, nbytes: int, copied: bool, times: int) -> None:
        if times:
            self.runs.append((nbytes, copied, times))
            self.count += times
            self.total += times * nbytes
            self.copies += times * nbytes if copied else 0
