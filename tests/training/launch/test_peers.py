"""Who is to blame when signs of life stop? (That they are carried at all, and what a run then does: test_two_hosts.)"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from ithaca.base import exits
from ithaca.base.run_folder import RunFolder
from ithaca.config.schema import Timeouts
from ithaca.training.launch import Job
from ithaca.training.launch.heartbeat import Beat
from ithaca.training.launch.peers import Peers

BEAT = Beat("step", 3, 0.1, 100.0)
NOW = 1000.0


@pytest.fixture(autouse=True)
def time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ithaca.training.launch.peers.time", SimpleNamespace(monotonic=lambda: NOW))


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


def watcher(store: dist.Store, folder: Path) -> Peers:
    """The first rank of the second host; both ranks were heard."""
    job = Job(1, 0, 2, 1, 1, "10.0.0.1", 29500, "torchrun")
    store.set("beat/0", json.dumps({"beat": asdict(BEAT), "host": "host0", "count": 1}))
    peers = Peers(job, Timeouts(silence=4), RunFolder(folder), lambda _: store)
    peers._talk(BEAT)
    return peers


def put_back(peers: Peers, rank: int, seconds: float) -> None:
    peers.heard[rank] = (peers.heard[rank][0], NOW - seconds)


def test_ranks_are_not_silent_because_the_store_is(store: dist.Store, tmp_path: Path):
    """On a host that is cut off all signs stop at once. Whoever was heard a moment earlier is not the one to blame."""
    peers = watcher(store, tmp_path)
    peers.answered = NOW - 3.8
    put_back(peers, 0, 4.2)
    put_back(peers, 1, 3.8)
    assert peers._verdict(False, NOW) is None
    peers.answered = NOW  # the store is back, and there was nothing new of rank 0
    code, text = peers._verdict(False, NOW) or (0, "")
    assert code == exits.LOST
    assert text == "rank 0 on host0 gave no sign of life for 4 s in step 3: host0 is down or cut off"


def test_a_store_that_gives_no_answer_is_the_one_that_is_named(
    store: dist.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    peers = watcher(store, tmp_path)
    said: list[tuple[int, str]] = []

    def end(code: int, text: str, quiet: bool = False) -> None:
        said.append((code, text))
        raise SystemExit

    monkeypatch.setattr(peers, "_end", end)
    monkeypatch.setattr(peers, "talker", object())  # it waits for an answer
    peers.answered = NOW - 4.2
    put_back(peers, 0, 4.6)
    with pytest.raises(SystemExit):
        in_a_thread(lambda: peers.carry(BEAT))
    assert said == [
        (exits.LOST, "the host of rank 0 (10.0.0.1:29500) gave no answer for 4 s: it is down, or this host is cut off")
    ]


def in_a_thread(work: Callable[[], None]) -> None:
    """Signs are carried by a thread; the main one only leaves them."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
