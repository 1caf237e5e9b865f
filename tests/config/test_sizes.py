"""Sizes: what people write, and what is refused because it could mean two things."""

from __future__ import annotations

import pytest

from ithaca.base.units import format_bytes, format_tokens, parse_bytes, parse_tokens


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("4096", 4096), ("1_000", 1000), ("1K", 1024), ("64k", 65536), ("1M", 1048576), ("1.5M", 1572864),
     ("10M", 10485760), ("1G", 2**30), (" 2 M ", 2**21), ("0.5K", 512)],
)  # fmt: skip
def test_tokens(text: str, count: int):
    assert parse_tokens(text) == count


@pytest.mark.parametrize("text", ["", "M", "1MB", "1e6", "-1K", "1.2.3", "1 000", "one", "1KK", "0x10", "9" * 40, "١"])
def test_no_tokens(text: str):
    with pytest.raises(ValueError, match="is not a number of tokens such as 4096, 64K or 1M"):
        parse_tokens(text)


def test_a_part_of_a_token():
    with pytest.raises(ValueError, match=r"'0.1K' is not a whole number: it comes to 102.4"):
        parse_tokens("0.1K")


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GB", 80 * 10**9), ("80 gb", 80 * 10**9), ("64GiB", 64 * 2**30), ("1.5TB", 15 * 10**11), ("12", 12), ("12B", 12),
     ("1KiB", 1024), ("1MB", 10**6)],
)  # fmt: skip
def test_bytes(text: str, count: int):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["80G", "1M", "GB", "-1GB", "1 GB of it"])
def test_bytes_that_could_mean_two_things(text: str):
    with pytest.raises(ValueError, match="is not a number of bytes such as 80GB"):
        parse_bytes(text)


def test_back_to_text():
    assert [format_tokens(n) for n in (0, 1000, 1024, 2**20, 5 * 2**20, 2**30, 3072)] == [
        "0", "1000", "1K", "1M", "5M", "1G", "3K"
    ]  # fmt: skip
    assert all(parse_tokens(format_tokens(n)) == n for n in range(0, 5000, 7))
    assert [format_bytes(n) for n in (0, 999, 80e9, 1.44e12)] == ["0 B", "999 B", "80.0 GB", "1.4 TB"]
