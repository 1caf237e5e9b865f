"""What allocators take beyond what was asked for, as read from their sources. A plan counts it, a dry run too."""

from __future__ import annotations


def pinned(nbytes: int) -> int:
    """torch's own pinned memory comes in powers of two (a store pins its buffers by itself, as they are)."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0
