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
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ithaca.storage.files import latest, step_of

from .conftest import ROOT

TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", "{node}",
    "--master-addr", "10.77.0.1", "--master-port", "29500", "--max-restarts", "0",
]  # fmt: skip

# One rank on each host, with the variables that torchrun would set, and without its two processes that import torch as well.
ONE_RANK = [
    "env", "RANK={node}", "LOCAL_RANK=0", "WORLD_SIZE=2", "LOCAL_WORLD_SIZE=1", "MASTER_ADDR=10.77.0.1", "MASTER_PORT=29500",
]  # fmt: skip

MEET = """
import os, socket, sys, time
os.write(1, f"{socket.gethostname()} {socket.if_nameindex()}\\n".encode())
if sys.argv[1] == "0":
    socket.create_server(("10.77.0.1", 5000)).accept()[0].recv(1)
else:
    while True:
        try:
            socket.create_connection(("10.77.0.1", 5000), 1).send(b"!")
            break
        except OSError:
            time.sleep(0.05)
"""


def on_two_hosts(
    command: list[str], seconds: float, meanwhile: Callable[[], None] = lambda: None, **environ: str
) -> tuple[int, str, str]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("two_hosts.py")), *command], cwd=ROOT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    try:
        meanwhile()
        out, err = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the hosts die with it, and their namespaces and cable with them
            process.communicate()
    if process.returncode == 77:
        pytest.skip(f"two hosts cannot be made here: {err.strip().splitlines()[-1]}")
    return process.returncode, out, err


def test_ulysses_2_in_a_host_and_ring_2_between_hosts_equal_the_untouched_model(run_yaml: Callable[..., Path]):
    path = run_yaml("{cpu: 2, nodes: 2}", "{ulysses: 2, ring: 2}")
    code, out, err = on_two_hosts([*TORCHRUN, "-m", "ithaca.launch", "tests.launch.functions:prove", str(path)], 150)
    assert code == 0, err
    assert re.search(r"^loss: \S+ of 1e-05 ok$", out, re.MULTILINE)
    assert re.search(r"^gradients \(21\): \S+ of 1e-05 ok$", out, re.MULTILINE)
    assert "ulysses [['host0', 'host0'], ['host0', 'host0'], ['host1', 'host1'], ['host1', 'host1']]\n" in out
    assert "ring [['host0', 'host1'], ['host0', 'host1'], ['host0', 'host1'], ['host0', 'host1']]\n" in out
    sent = [int(number) for number in re.findall(r"sent over the cable: (\d+)", out)]
    assert len(sent) == 2 and min(sent) > 100_000  # bytes; the rendezvous alone takes a few thousand


def test_a_host_that_is_cut_off_is_named_and_the_same_command_goes_on(tmp_path: Path):
    """The cable is pulled in the middle of training. No packet says so: without signs of life, gloo would wait for half an hour."""
    run, cut = tmp_path / "run", tmp_path / "cut"
    settings = {
        "data.context": 64, "train.warmup": 1, "train.schedule": "constant", "log.every": 1, "checkpoint.every": 2,
        "launch.cpu": 1, "launch.nodes": 2, "launch.timeouts.silence": 4, "stack.ulysses": 1, "stack.ring": 2, "run.folder": run,
    }  # fmt: skip
    words = [str(word) for name, value in settings.items() for word in ("--" + name, value)]
    train = [*ONE_RANK, sys.executable, "-m", "ithaca", "train", "--recipe", "tiny_cpu", *words]

    def steps() -> int:
        metrics = run / "metrics.jsonl"
        return metrics.read_text().count('"loss"') if metrics.exists() else 0

    def pull_the_plug() -> None:
        deadline = time.monotonic() + 90
        while steps() < 5 and time.monotonic() < deadline:
            time.sleep(0.05)
        cut.touch()

    _, out, err = on_two_hosts([*train, "--train.steps", "100000"], 150, pull_the_plug, TWO_HOSTS_CUT=str(cut))
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "failed" and status["exit_code"] == 8, err
    assert re.fullmatch(r"rank 1 on host1 gave no sign of life for \d+ s .*: host1 is down or cut off", status["cause"])
    assert f"ithaca: {status['cause']}\n  stacks: {run}/stacks" in err
    assert "ithaca: the host of rank 0 (10.77.0.1:29500) gave no answer for" in err
    assert (run / "stacks/rank-0.txt").read_text() and (run / "stacks/rank-1.txt").read_text()
    newest = latest(run / "checkpoints")
    done = step_of(newest) if newest else None
    assert done is not None
    cut.unlink()  # and back
    code, out, err = on_two_hosts([*train, "--train.steps", str(done + 2)], 150, TWO_HOSTS_CUT=str(cut))
    assert code == 0 and f"resumes step-{done}" in out.replace("  ", " "), err


def test_the_hosts_see_each_other_and_nothing_else():
    code, out, _ = on_two_hosts([sys.executable, "-c", MEET, "{node}"], 30)
    lines = sorted(out.splitlines())
    assert code == 0 and [line.split()[0] for line in lines] == ["host0", "host1"]
    for line in lines:
        assert re.findall(r"'(\w+)'", line) == ["lo", "cable"]


def test_nothing_is_left_behind():
    """After the tests above: no interface of theirs in our own namespace."""
    import socket

    assert "cable" not in [name for _, name in socket.if_nameindex()]
