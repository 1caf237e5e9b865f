"""Two machines, for real as far as the network goes: two network namespaces, joined by a virtual cable (two_hosts.py).

torchrun starts two ranks on each host; ulysses 2 stays inside a host, ring 2 runs over the cable, and so does the rendezvous. Loss
and every gradient must equal those of the untouched model in one process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import ROOT

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
            socket.create_connection(("10.77.0.1", 5000), 1).send(b"!")
            break
        except OSError:
            time.sleep(0.05)
"""


def on_two_hosts(command: list[str], seconds: float) -> tuple[int, str, str]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("two_hosts.py")), *command], cwd=ROOT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
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


def test_the_hosts_see_each_other_and_nothing_else():
    code, out, _ = on_two_hosts([sys.executable, "-c", MEET, "{node}"], 30)
    lines = sorted(out.splitlines())
    assert code == 0 and [line.split()[0] for line in lines] == ["host0", "host1"]
    for line in lines:
        assert re.findall(r"'(\w+)'", line) == ["lo", "cable"]


def test_nothing_is_left_behind():
    """After both tests above: no interface of theirs in our own namespace."""
    import socket

    assert "cable" not in [name for _, name in socket.if_nameindex()]
