"""metrics.jsonl: what the contract says, also after a crash and on a full disk."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import subprocess
from pathlib import Path

import pytest

from ithaca.base.run_folder import RunFolder
from ithaca.config.schema import Log
from ithaca.observe.metrics import Metrics, read_metrics

from .records import record, start


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def write(folder: RunFolder, *steps: int, **changes) -> None:
    with Metrics(folder, Log()) as metrics:
        for step in steps:
            metrics.step(record(step, **changes))


def test_fields_are_those_of_the_contract(folder: RunFolder):
    page = (Path(__file__).parents[2] / "docs" / "reference" / "run_folder.md").read_text(encoding="utf-8")
    table = page.split("## metrics.jsonl")[1].split("## checkpoints")[0]
    promised = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    with Metrics(folder, Log()) as metrics:
        metrics.step(record(1, eval_loss=2.4))
        metrics.step(record(2))
        metrics.event("save", step=2, path="checkpoints/step-2")
    first, second, event = map(json.loads, folder.metrics.read_text(encoding="utf-8").splitlines())
    assert set(first) | {"event"} == set(promised)
    assert set(first) - set(second) == {"eval_loss"} and second["mfu"] is None
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", first["time"])
    assert event["event"] == "save" and event["path"] == "checkpoints/step-2"


def test_the_later_line_of_a_step_counts(folder: RunFolder):
    with Metrics(folder, Log()) as metrics:
        metrics.event("start")
        for step in (1, 2, 3):
            metrics.step(record(step, loss=1.0))
    with Metrics(folder, Log()) as metrics:
        metrics.event("resume", step=1)
        for step in (2, 3, 4):
            metrics.step(record(step, loss=2.0))
    lines = read_metrics(folder.metrics)
    assert [line.get("event") or (line["step"], line["loss"]) for line in lines] == [
        "start", (1, 1.0), "resume", (2, 2.0), (3, 2.0), (4, 2.0),
    ]  # fmt: skip


@pytest.mark.parametrize("rest", [b'{"step": 3, "lo', b"\0" * 100, b'{"step": 3, "x": "' + b"y" * 200_000])
def test_a_line_that_was_cut_off(folder: RunFolder, caplog: pytest.LogCaptureFixture, rest: bytes):
    write(folder, 1, 2)
    whole = folder.metrics.read_bytes()
    folder.metrics.write_bytes(whole + rest)
    assert [line["step"] for line in read_metrics(folder.metrics)] == [1, 2]
    write(folder, 3)
    assert f"{len(rest)} bytes are cut off" in caplog.text
    assert folder.metrics.read_bytes().startswith(whole + b'{"step": 3')
    assert [line["step"] for line in read_metrics(folder.metrics)] == [1, 2, 3]


def test_a_line_that_only_lacks_its_end_is_kept(folder: RunFolder):
    write(folder, 1, 2)
    folder.metrics.write_bytes(folder.metrics.read_bytes()[:-1])
    assert [line["step"] for line in read_metrics(folder.metrics)] == [1]  # the contract: no line end, no line
    write(folder, 3)
    assert [line["step"] for line in read_metrics(folder.metrics)] == [1, 2, 3]


def test_a_file_that_is_all_cut_off(folder: RunFolder):
    folder.metrics.write_bytes(b'{"st')
    assert read_metrics(folder.metrics) == []
    write(folder, 1)
    assert len(read_metrics(folder.metrics)) == 1


def test_a_broken_line_in_the_middle_is_named(folder: RunFolder, caplog: pytest.LogCaptureFixture):
    write(folder, 1)
    with open(folder.metrics, "ab") as file:
        file.write(b"\0\0\0\n[1]\n" + b"[" * 100_000 + b'\n{"step": []}\n{"event": {}}\n')
    write(folder, 2)
    assert [line["step"] for line in read_metrics(folder.metrics)] == [1, 2]
    assert all(f"metrics.jsonl:{number} is no line of metrics" in caplog.text for number in range(2, 7))


def test_killed_while_writing(folder: RunFolder):
    code = (
        "import sys, itertools\n"
        "from ithaca.config.schema import Log\n"
        "from ithaca.observe.metrics import Metrics\n"
        "from ithaca.base.run_folder import RunFolder\n"
        "from tests.observe.records import record\n"
        "metrics = Metrics(RunFolder(sys.argv[1]), Log())\n"
        "for step in itertools.count(1):\n"
        "    metrics.step(record(step))\n"
        "    if step == 100: print('go', flush=True)\n"
    )
    writer = start(code, str(folder.path), stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert writer.stdout is not None and writer.stdout.readline() == b"go\n"
    writer.send_signal(signal.SIGKILL)  # wherever it is: it goes on writing
    writer.communicate()
    steps = [line["step"] for line in read_metrics(folder.metrics)]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= 100
    write(folder, len(steps) + 1)
    assert len(read_metrics(folder.metrics)) == len(steps) + 1


def test_a_full_disk_stops_nothing_and_loses_nothing(folder: RunFolder, caplog: pytest.LogCaptureFixture):
    """A limit on the size of files acts as a full disk does: a write ends half-way, the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Metrics(folder, Log()) as metrics:
        metrics.step(record(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (folder.metrics.stat().st_size + 50, before[1]))
        try:
            for step in (2, 3, 4):
                metrics.step(record(step))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert [line["step"] for line in read_metrics(folder.metrics)] == [1]
        assert sum("cannot be written" in message for message in caplog.messages) == 1
        metrics.step(record(5))
        assert [line["step"] for line in read_metrics(folder.metrics)] == [1, 2, 3, 4, 5]


def test_numbers_are_finite(folder: RunFolder):
    with Metrics(folder, Log()) as metrics:
        with pytest.raises(ValueError, match="grad_norm of step 7 is inf"):
            metrics.step(record(7, grad_norm=float("inf")))
        with pytest.raises(ValueError, match="loss is nan"):
            metrics.event("stop", loss=float("nan"))
    assert folder.metrics.read_bytes() == b""


def test_other_ranks_write_nothing_but_know_when_a_line_is_due(folder: RunFolder):
    with Metrics(folder, Log(every=10, tensorboard=True), rank=3) as metrics:
        metrics.step(record(1))
        metrics.event("start")
        assert metrics.trackers == []
        assert [step for step in range(1, 31) if metrics.due(step)] == [1, 10, 20, 30]
    assert not folder.metrics.exists()


def test_a_line_can_be_read_as_soon_as_it_is_written(folder: RunFolder):
    with Metrics(folder, Log()) as metrics:
        for step in (1, 2, 3):
            metrics.step(record(step))
            assert read_metrics(folder.metrics)[-1]["step"] == step
    assert os.stat(folder.metrics).st_mode & 0o777 == 0o644 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ithaca")
