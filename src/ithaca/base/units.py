"""Sizes as people write them: `1M` tokens, `80GB`.

Tokens count in powers of two, because contexts and shards do: 1K = 1,024 and 1M = 1,048,576 tokens. Bytes follow the
labels on hardware: 1 GB = 10⁹ bytes, 1 GiB = 2³⁰. A bare `80G` of bytes could be either, so it is refused.
"""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = re.compile(r"([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_LARGEST = 2**60
_TOKENS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_BYTES = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_tokens(text: str) -> int:
    """'4096' -> 4096, '64K' -> 65536, '1.5M' -> 1572864."""
    return _parse(text, _TOKENS, "a number of tokens such as 4096, 64K or 1M (1K = 1,024)")


def parse_bytes(text: str) -> int:
    """'80GB' -> 80000000000, '64GiB' -> 68719476736."""
    return _parse(text, _BYTES, "a number of bytes such as 80GB (10⁹) or 64GiB (2³⁰)")


def parse_room(text: str) -> int:
    """As parse_bytes, of something that must have a size: a memory, a disk, a file."""
    size = parse_bytes(text)
    if size == 0:
        raise ValueError(f"{text!r} is no size; give a number of bytes above 0, such as 80GB")
    return size


def _parse(text: str, units: dict[str, int], want: str) -> int:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in units or len(match[1]) > 30:
        raise ValueError(f"{text!r} is not {want}")
    value = Decimal(match[1].replace("_", "")) * units[match[2].lower()]
    if value != int(value):
        raise ValueError(f"{text!r} is not a whole number: it comes to {value.normalize()}")
    if value > _LARGEST:
        raise ValueError(f"{text!r} is too large: at most {_LARGEST:,} can be counted with")
    return int(value)


def format_tokens(count: int) -> str:
    """1048576 -> '1M', 1000 -> '1000': the short form only where it is exact."""
    for unit in ("g", "m", "k"):
        if count and count % _TOKENS[unit] == 0:
            return f"{count // _TOKENS[unit]}{unit.upper()}"
    return str(count)


def format_bytes(count: float) -> str:
    """85899345920 -> '85.9 GB' (decimal units)."""
    for unit in ("TB", "GB", "MB", "KB"):
        if count >= _BYTES[unit.lower()]:
            return f"{count / _BYTES[unit.lower()]:.1f} {unit}"
    return f"{count:.0f} B"
