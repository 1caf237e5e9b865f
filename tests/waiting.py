"""Waiting for what a test can see, never for a number of seconds: on a slow machine everything takes longer, nothing fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

TOO_LONG = 250.0  # seconds after which what is waited for will never come; no test depends on its value


def wait_until(condition: Callable[[], Any], trouble: Callable[[], str] = lambda: "") -> None:
    """trouble: what to say if it does not happen; it may also raise as soon as it cannot happen any more."""
    deadline = time.monotonic() + TOO_LONG
    while True:
        try:
            if condition():
                return
        except FileNotFoundError:  # a file that is waited for, or one that was just replaced
            pass
        said = trouble()
        assert time.monotonic() < deadline, f"it did not happen {said}"
        time.sleep(0.01)
