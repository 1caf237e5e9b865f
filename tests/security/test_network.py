"""torch's rendezvous, gloo and NCCL know no password. A job on one machine therefore listens on loopback only.
Its ranks: tests/training/launch/test_decision.py."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    names = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
    )
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def test_one_process_listens_on_loopback_though_its_host_has_a_network():
    """A host name that is an address leads there: so this host is made to be called by its own."""
    mine = next(
        (
            each.address
            for addresses in psutil.net_if_addrs().values()
            for each in addresses
            if each.family == socket.AF_INET and not each.address.startswith("127.")
        ),
        None,
    )
    if mine is None or shutil.which("unshare") is None:
        pytest.skip("needs a network and unshare")
    script = f"hostname {mine} && exec {sys.executable} -m tests.security.listening"
    done = subprocess.run(
        ["unshare", "--uts", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env=environment(),
    )
    if done.returncode and "unshare" in done.stderr:
        pytest.skip("this user may not rename a host")
    assert done.returncode == 0, done.stderr
    assert f"torch ['{mine}']" in done.stdout and "ithaca ['127.0.0.1']" in done.stdout
