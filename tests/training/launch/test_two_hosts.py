"""Two machines, for real as far as the network goes: two network namespaces, joined by a virtual cable (two_hosts.py).

torchrun starts two ranks on each host; ulysses 2 stays inside a host, ring 2 runs over the cable, and so does the rendezvous. Loss
and every gradient must equal those of the untouched model in one process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ithaca.base.processes.pool import ready_template
from ithaca.base.processes.worker import Worker, stop
from ithaca.storage.files import latest
from ithaca.storage.place import step_of

from ...conftest import PRELOAD
from ...waiting import wait_until
from .conftest import ROOT
from .two_hosts import NOT_ALLOWED, run_on_both

TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", "{node}",
    "--master-addr", "10.77.0.1", "--master-port", "29500", "--max-restarts", "0",
]  # fmt: skip

MEET = """
import os, socket, sys, time
os.write(1, f"{socket.gethostname()} {socket.if_nameindex()}\\n".encode())
if sys.argv[1] == "0":
    socket.create_server(("10.77.0.1", 5000)).accept()[0].recv(1)
else:
    while True:
        try:
            socket.create_connection(("10.77.0.1", 5000)).send(b"!")
            break
        except OSError:
            time.sleep(0.05)
"""


def on_two_hosts(command: list[str]) -> tuple[int, str, str]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("two_hosts.py")), *command], cwd=ROOT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the hosts die with it, and their namespaces and cable with them
            process.communicate()
    skip_where_not_allowed(process.returncode, err)
    return process.returncode, out, err


def skip_where_not_allowed(code: int, err: str) -> None:
    if code == NOT_ALLOWED:
        pytest.skip(f"two hosts cannot be made here: {err.strip().splitlines()[-1]}")


@pytest.mark.skipif(
    os.environ.get("ITHACA_FAULTS") != "long",
    reason="four ranks that import all of torch for themselves, 39 s: make faults",
)
def test_ulysses_2_in_a_host_and_ring_2_between_hosts_equal_the_untouched_model(run_yaml: Callable[..., Path]):
    path = run_yaml("{cpu: 2, nodes: 2}", "{ulysses: 2, ring: 2}")
    code, out, err = on_two_hosts(
        [*TORCHRUN, "-m", "ithaca.training.launch", "tests.training.launch.functions:prove", str(path)]
    )
    assert code == 0, err
    assert re.search(r"^loss: \S+ of 1e-05 ok$", out, re.MULTILINE)
    assert re.search(r"^gradients \(21\): \S+ of 1e-05 ok$", out, re.MULTILINE)
    assert "ulysses [['host0', 'host0'], ['host0', 'host0'], ['host1', 'host1'], ['host1', 'host1']]\n" in out
    assert "ring [['host0', 'host1'], ['host0', 'host1'], ['host0', 'host1'], ['host0', 'host1']]\n" in out
    sent = [int(number) for number in re.findall(r"sent over the cable: (\d+)", out)]
    assert len(sent) == 2 and min(sent) > 100_000  # bytes; the rendezvous alone takes a few thousand


class RunsAhead:
    """The clock by which hosts miss each other (peers.py). Until the cable is cut the machine may be as slow as it likes; then the
    clock runs ahead, and nobody has to wait for minutes.

    On host0 it is the thread which talks to the store that pushes it: the store is there, and never seems silent for long,
    however slow it is. On host1 it is the thread that waits for those talks.
    """

    def __init__(self, node: int, folder: Path) -> None:
        self.talked, self.cut, self.ahead = folder / f"talked-{node}", folder / "cut.done", 0.0
        self.pushed_by_talk, self.push = (True, 20.0) if node == 0 else (False, 400.0)  # silence: 300 s

    def monotonic(self) -> float:
        talks = threading.current_thread().name == "ithaca-peers"
        if talks:
            self.talked.touch()
        if talks == self.pushed_by_talk and self.cut.exists():
            self.ahead += self.push
        return time.monotonic() + self.ahead

    def sleep(self, seconds: float) -> None:
        time.sleep(0.02)  # the longer ones are for hosts that can still read something


def train(node: int, words: list[str], folder: Path) -> int:
    """The one rank of this host, in a job like one of torchrun's."""
    from ithaca.cli.main import main
    from ithaca.training.launch import peers

    os.environ.update(RANK=str(node), LOCAL_RANK="0", WORLD_SIZE="2", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="10.77.0.1", MASTER_PORT="29500")
    peers.time = RunsAhead(node, folder)  # pyright: ignore
    return main(["train", "--recipe", "tiny_cpu", *words])


def play(_pipe: Any, act: Callable[[int], int], folder: Path) -> None:
    """In a process of its own: what both hosts say goes into files."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    os._exit(run_on_both(act, str(folder / "cut")))


@contextmanager
def trained_on_two_hosts(folder: Path, words: list[str]) -> Iterator[Worker]:
    """A fork of the process that has done the imports of all tests; both hosts are forks of it."""
    environ = dict(os.environ)
    act = partial(train, words=words, folder=folder)
    hosts = Worker("two hosts", play, act, folder, environ=environ, template=ready_template(PRELOAD, environ))
    try:
        yield hosts
        hosts.process.wait()
    finally:
        stop([hosts])


def still_running(hosts: Worker, folder: Path) -> str:
    if hosts.process.ended():
        err = (folder / "err").read_text()
        skip_where_not_allowed(hosts.process.status or 0, err)
        raise AssertionError(err)
    return ""


def test_a_host_that_is_cut_off_is_named_and_the_same_command_goes_on(tmp_path: Path):
    """The cable is pulled in the middle of training. No packet says so: without signs of life, gloo would wait for half an hour."""
    run, cut = tmp_path / "run", tmp_path / "cut"
    settings = {
        "data.context": 64, "train.warmup": 1, "train.schedule": "constant", "log.every": 1, "checkpoint.every": 2,
        "launch.cpu": 1, "launch.nodes": 2, "stack.ulysses": 1, "stack.ring": 2, "run.folder": run,
    }  # fmt: skip
    words = [str(word) for name, value in settings.items() for word in ("--" + name, value)]

    with trained_on_two_hosts(tmp_path, [*words, "--train.steps", "100000"]) as hosts:
        # something is saved, and host1 was heard: one that never was is not missed
        wait_until(
            lambda: latest(run / "checkpoints") and (tmp_path / "talked-1").exists(),
            lambda: still_running(hosts, tmp_path),
        )
        cut.touch()
    err = (tmp_path / "err").read_text()
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "failed" and status["exit_code"] == 8, err
    assert re.fullmatch(r"rank 1 on host1 gave no sign of life for \d+ s .*: host1 is down or cut off", status["cause"])
    assert f"ithaca: {status['cause']}\n  stacks: {run}/stacks" in err
    assert "ithaca: the host of rank 0 (10.77.0.1:29500) gave no answer for" in err
    assert (run / "stacks/rank-0.txt").read_text() and (run / "stacks/rank-1.txt").read_text()
    newest = latest(run / "checkpoints")
    done = step_of(newest) if newest else None
    assert done is not None
    for left in (cut, tmp_path / "cut.done"):  # and back
        left.unlink()
    with trained_on_two_hosts(tmp_path, [*words, "--train.steps", str(done + 2)]) as hosts:
        pass
    out = (tmp_path / "out").read_text()
    assert hosts.process.status == 0 and f"resumes step-{done}" in out.replace("  ", " "), (
        tmp_path / "err"
    ).read_text()


def test_the_hosts_see_each_other_and_nothing_else():
    code, out, _ = on_two_hosts([sys.executable, "-c", MEET, "{node}"])
    lines = sorted(out.splitlines())
    assert code == 0 and [line.split()[0] for line in lines] == ["host0", "host1"]
    for line in lines:
        assert re.findall(r"'(\w+)'", line) == ["lo", "cable"]


def test_nothing_is_left_behind():
    """After the tests above: no interface of theirs in our own namespace."""
    import socket

    assert "cable" not in [name for _, name in socket.if_nameindex()]
