"""Finding each other: what is said when it does not work. (That it works: test_local, test_slurm, test_two_hosts.)"""

from __future__ import annotations

import math
import os
import socket
import threading
from dataclasses import replace

import psutil
import pytest
import torch.distributed as dist

from ithaca.training.launch import Job, join, rendezvous
from ithaca.training.launch.rendezvous import _roll_call, choose_gpu, interface_towards

from ...waiting import wait_until

HOST = socket.gethostname()


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")  # join sets them if nobody has; this brings them back afterwards


def job(rank: int, world: int = 2, port: int = 0, kind: str = "torchrun") -> Job:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = port or free.getsockname()[1]
    return Job(rank, rank, world, world, 0, "127.0.0.1", port, kind)


def errors_of(jobs: list[Job], **options: str) -> list[BaseException]:
    """Let all of these join at once, each in a thread; option `same1` is `same` of rank 1."""
    found: list[BaseException] = []

    def one(each: Job) -> None:
        try:
            join(each, "cpu", same=options.get(f"same{each.rank}", ""))
        except Exception as error:
            found.append(error)  # and with it the store of rank 0, for those who have yet to read why

    threads = [threading.Thread(target=one, args=[each]) for each in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize(
    ("kind", "remedy"), [("torchrun", "torchrun --master-port PORT"), ("srun", "export MASTER_PORT=PORT")]
)
def test_port_in_use(kind: str, remedy: str):
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ValueError) as error:
        join(job(0, port=other.getsockname()[1], kind=kind), "cpu", 1.0)
    assert f"on {HOST} is in use by another program; choose another: {remedy}" in str(error.value)


def test_unknown_address():
    with pytest.raises(ValueError, match=r"'no\.such\.host\.invalid', is not known on .*MASTER_ADDR"):
        join(replace(job(1), address="no.such.host.invalid"), "cpu", 1.0)


def test_nobody_listens():
    with pytest.raises(TimeoutError, match=r"no answer from rank 0 at 127\.0\.0\.1:\d+ for 0\.1 s .*firewall"):
        join(job(1), "cpu", 0.1)


def test_missing_ranks_are_named():
    with pytest.raises(TimeoutError, match=r"3 of 4 ranks did not come to 127\.0\.0\.1:\d+ within 0\.1 s: 1, 2, 3; "):
        join(job(0, world=4), "cpu", 0.1)


def test_ranks_with_different_configs_all_stop_with_the_same_words():
    first = job(0)
    found = errors_of([first, replace(first, rank=1, local_rank=1)], same0="a", same1="b")
    assert len(found) == 2 and len(set(map(str, found))) == 1
    assert f"rank 1 on {HOST} has another config than rank 0" in str(found[0])


def test_two_ranks_on_one_gpu_all_stop_with_the_same_words():
    store, found = dist.HashStore(), []

    def one(rank: int) -> None:
        try:
            _roll_call(job(rank), store, {"host": HOST, "gpu": "GPU-5", "same": ""}, math.inf, math.inf)
        except ValueError as error:
            found.append(str(error))

    threads = [threading.Thread(target=one, args=[rank]) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [found[0]] * 2
    assert found[0].startswith(
        f"ranks 0 and 1 on {HOST} have the same GPU; start one process per GPU, or let the scheduler give each"
    )
    assert "launch.share_gpu=true" in found[0]


def test_ranks_that_share_a_gpu_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match=r"^launch\.share_gpu: torch sees no GPU here; "):
        choose_gpu(job(1, world=4), 1, share=True)
    monkeypatch.setattr(rendezvous, "why_not_shared", lambda: None)
    assert [choose_gpu(job(rank, world=4), 2, share=True) for rank in range(4)] == [0, 1, 0, 1]


def test_which_gpu():
    assert [choose_gpu(job(rank, world=4), 4) for rank in range(4)] == [0, 1, 2, 3]
    assert choose_gpu(job(1, kind="srun"), 1) == 0  # the scheduler shows each task one GPU
    with pytest.raises(ValueError, match=r"4 processes .* but torch sees 2 here; use torchrun --nproc-per-node 2"):
        choose_gpu(job(3, world=4), 2)
    with pytest.raises(ValueError, match=r"torch sees 0 here; train on the CPU with launch\.cpu"):
        choose_gpu(job(0, kind="srun"), 0)


def test_interface_of_an_address():
    assert interface_towards("127.0.0.1") == "lo"
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET:
                assert interface_towards(each.address) == name


def test_a_job_on_one_machine_stays_on_loopback(monkeypatch: pytest.MonkeyPatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name)
    with pytest.raises(TimeoutError):
        join(job(0), "cpu", 0.1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"


def test_the_store_listens_on_the_address_of_the_job_only():
    first = job(0)
    thread = threading.Thread(target=errors_of, args=[[first]])
    thread.start()  # it waits for rank 1

    def addresses() -> list[str]:
        mine = psutil.Process().net_connections("tcp")
        return [each.laddr.ip for each in mine if each.status == psutil.CONN_LISTEN and each.laddr.port == first.port]

    wait_until(addresses)
    assert addresses() == ["127.0.0.1"]
    with pytest.raises(ValueError):
        join(replace(first, rank=1, local_rank=1), "cpu", same="another config")  # which sends both home
    thread.join()
