"""A failure with a cause that a person can do something about, and the exit code that says of what kind (launch/exits.py)."""

from __future__ import annotations


class Failed(RuntimeError):
    def __init__(self, exit_code: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = exit_code
