from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .payloads import Marker


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Marker]:
    """Nothing may have left it when the test ends."""
    found = Marker(tmp_path / "marker")
    yield found
    assert not found.there, "code from a file was run"
