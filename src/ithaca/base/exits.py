"""Exit codes of a run (docs/reference/run_folder.md), which one an exception stands for, and whether to try again after it."""

from __future__ import annotations

import re

DONE = 0
CONFIG = 2
DATA = 3
CHECKPOINT = 4
MEMORY = 5
NOT_FINITE = 6
HANG = 7
LOST = 8
STOPPED = 75  # stopped from outside and saved; EX_TEMPFAIL, which schedulers read as "try again"

TABLE = (DONE, CONFIG, DATA, CHECKPOINT, MEMORY, NOT_FINITE, HANG, LOST, STOPPED)

_PEERS = re.compile(r"gloo|NCCL|Connection (closed|reset)|Broken pipe|TCPStore|lost rank 0", re.IGNORECASE)
_PEERS_KINDS = ("DistBackendError", "DistNetworkError", "DistStoreError")
_BUGS = (TypeError, NameError, AttributeError, ImportError, LookupError, AssertionError, NotImplementedError)


class Failed(RuntimeError):
    """A failure with a cause that a person can do something about, and the exit code that says of what kind."""

    def __init__(self, exit_code: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def from_peers(kind: str, headline: str) -> bool:
    """Whether a rank failed because another had: the name of its exception, and the first line of what it says."""
    return kind in _PEERS_KINDS or bool(_PEERS.search(headline))


def worth_another_try(error: BaseException) -> bool:
    """Not: what would come again, because it lies in the config, the data, the numbers, the size of the memory or the code."""
    return code_of(error) in (1, HANG, LOST) and not isinstance(error, _BUGS)


def code_of(error: BaseException) -> int:
    """The code for an exception that nobody caught. 1 says no more than that: Python's own."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return own
    if isinstance(error, KeyboardInterrupt):
        return 130  # 128 + SIGINT, as shells do
    if isinstance(error, TimeoutError):
        return HANG
    if isinstance(error, ConnectionError):
        return LOST
    if isinstance(error, ValueError | OSError):  # how ithaca says that a request cannot be carried out
        return CONFIG
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without importing it
        return MEMORY
    return LOST if from_peers(type(error).__name__, str(error).partition("\n")[0]) else 1
