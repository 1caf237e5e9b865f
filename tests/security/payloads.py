"""Live payloads: each leaves a marker file if it is run, and every test shows that it would."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Payload:
    """Unpickled, it leaves a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def code(marker: Path, *lines: str) -> str:
    """Python that leaves a file when it is imported."""
    return "\n".join([f"open({str(marker)!r}, 'w').close()", *lines, ""])


class Marker:
    """What a payload would leave. `live` proves that one would."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def there(self) -> bool:
        return self.path.exists()

    def live(self) -> None:
        """After a control has run the payload."""
        assert self.there, "the payload is dead, so the test proves nothing"
        self.path.rmdir() if self.path.is_dir() else self.path.unlink()
