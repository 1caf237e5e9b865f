"""Why a run ended: the cause among many failures, the last line of a log, exit codes."""

from __future__ import annotations

from pathlib import Path

from ithaca.base import exits
from ithaca.training.launch.cause import End, Failure, describe, last_line, root

from .conftest import ROOT


def test_exit_codes_of_exceptions():
    class Own(RuntimeError):
        exit_code = exits.NOT_FINITE

    errors = [
        ValueError(),
        TimeoutError(),
        MemoryError(),
        KeyboardInterrupt(),
        SystemExit(4),
        SystemExit("x"),
        Own(),
        KeyError(),
        OSError(),
        ConnectionResetError(),
    ]
    assert [exits.code_of(error) for error in errors] == [2, 7, 5, 130, 4, 1, 6, 1, 2, 8]
    page = (ROOT / "docs/reference/run_folder.md").read_text()
    assert all(f"| {code} |" in page for code in exits.TABLE)


def test_the_cause_is_not_whoever_spoke_first():
    log = Path("logs/rank.log")
    gone = Failure(
        "RuntimeError", "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]", 1.0
    )
    own = Failure("KeyError", "KeyError: 'weight'", 2.0)
    peers = [End(rank, 100 + rank, 1, log, failure=gone) for rank in (0, 2)]
    killed = End(1, 101, -9, log, moment=5.0)
    raised = End(3, 103, 1, log, failure=own)
    aborted = End(4, 104, -6, log, moment=0.0)  # NCCL's watchdog
    assert root([*peers, raised, aborted, killed]) is killed
    assert root([*peers, aborted, raised]) is raised
    assert root([*peers, aborted]) is aborted
    assert root(peers) is peers[0]
    assert describe(peers, 2).startswith("all 2 ranks: RuntimeError")
    assert describe([*peers, raised], 8).startswith("rank 3 (pid 103): KeyError: 'weight'")


def test_last_line(tmp_path: Path):
    log = tmp_path / "log"
    log.write_bytes(b"old\n")
    assert last_line(log, 4) == "" and last_line(tmp_path / "none", 0) == ""
    log.write_bytes(b"old\nstep 1\r\x1b[2K\x1b[32mstep 2\x1b[0m\xff\n\n")
    assert last_line(log, 4) == "step 2\ufffd"
