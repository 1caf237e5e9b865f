"""`join` and `leave`: the processes of a job find each other.

All of them talk to one small key-value store (torch's TCPStore) at `job.address:job.port`: torchrun's, or rank 0 opens it. They
meet there before torch's process group is made, for the sake of the messages: torch by itself waits ten minutes for a rank that
never came and then prints a page that does not name it. Each rank writes its name and counts up; rank 0 waits until
all are there, looks at what they wrote, and writes a verdict that everybody reads. So all ranks go on, or all stop
with the same words.

What the store or gloo opens is open to everybody who reaches it: torch's rendezvous knows no password. A job on one machine
therefore stays on the loopback interface; rank 0 of a larger one listens on the job's address only, and gloo uses the
interface that leads there. docs/guides/multi_node.md has the rest.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ...base.gpu_sharing import sharing_variables, why_not_shared
from .environment import Job

if TYPE_CHECKING:
    import torch.distributed as dist

_LEAVE_SECONDS = 20.0
_joined: tuple[Job, dist.Store] | None = None  # a process joins one job in its life


def join(
    job: Job, device: str, timeout: float = 600.0, *, collectives: float = 1800.0, same: str = "", share_gpu: bool = False
) -> None:  # fmt: skip
    """Make this process a rank of the job: its GPU, its network interface, torch's default process group.

    device: "cpu" (gloo) or "cuda" (NCCL for GPU tensors, gloo for CPU tensors, which asynchronous checkpoints need).
    timeout: seconds until all ranks must be there. collectives: seconds that one rank may keep the others waiting later on.
    same: something that must be equal on all ranks, such as a digest of the config. share_gpu: ranks may have the same GPU.
    """
    import torch
    import torch.distributed as dist

    global _joined
    deadline = time.monotonic() + timeout
    gpu = choose_gpu(job, torch.cuda.device_count(), share_gpu) if device == "cuda" else None
    if gpu is not None:
        if share_gpu:
            os.environ.update(sharing_variables(job.local_world, torch.cuda.device_count()))
        torch.cuda.set_device(gpu)
    choose_interface(job)
    store = dist.PrefixStore(f"ithaca/{job.attempt}", _open_store(job, deadline, timeout))
    about = {"host": socket.gethostname(), "gpu": None if share_gpu else _identity(gpu), "same": same}
    _roll_call(job, store, about, deadline, timeout)
    try:
        dist.init_process_group(
            "gloo" if gpu is None else "cpu:gloo,cuda:nccl",
            # after a restart by torchrun its store still holds the addresses of the dead: hence the attempt in the prefix
            store=dist.PrefixStore("group", store),
            rank=job.rank,
            world_size=job.world,
            timeout=timedelta(seconds=collectives),
            device_id=None if gpu is None else torch.device("cuda", gpu),
        )
    except RuntimeError as error:  # torch's errors of gloo and NCCL
        interfaces = {name: os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
        shown = ", ".join(f"{name}={value or 'not set'}" for name, value in interfaces.items())
        raise ValueError(
            f"the ranks met at {job.address}:{job.port}, but rank {job.rank} on {socket.gethostname()} cannot reach the others "
            f"({str(error).splitlines()[0]}); name the network interface between the nodes ({shown})"
        ) from error
    _joined = (job, store)


def leave() -> None:
    """Leave the job, when all work is done. Rank 0 stays until all others have gone, because the store goes with it."""
    import torch.distributed as dist

    global _joined
    if dist.is_initialized():
        dist.destroy_process_group()
    if _joined is None:
        return
    job, store = _joined
    _joined = None
    with suppress(RuntimeError):  # the store is gone: then there is nobody to wait for
        gone = store.add("left", 1)
        deadline = time.monotonic() + _LEAVE_SECONDS
        while job.rank == 0 and not job.hosted and gone < job.world and time.monotonic() < deadline:
            time.sleep(0.02)
            gone = store.add("left", 0)


def choose_gpu(job: Job, visible: int, share: bool = False) -> int:
    """Which of the GPUs that torch sees here is this rank's."""
    if share:
        why = why_not_shared()
        if why is not None:
            raise ValueError(f"launch.share_gpu: {why}")
        return job.local_rank % visible
    if visible >= job.local_world:
        return job.local_rank
    if visible == 1 and job.kind in ("srun", "mpirun"):
        return 0  # the scheduler shows each task its own GPU; if it is the same one, the roll call tells
    fewer = {
        "torchrun": f"torchrun --nproc-per-node {visible}",
        "srun": f"srun --ntasks-per-node {visible}",
        "mpirun": f"mpirun --map-by ppr:{visible}:node",
    }.get(job.kind, f"launch.workers={visible}")
    remedy = "train on the CPU with launch.cpu" if visible == 0 else f"use {fewer}, or look at CUDA_VISIBLE_DEVICES"
    raise ValueError(
        f"{job.local_world} processes were started on {socket.gethostname()}, each for a GPU of its own, but torch sees "
        f"{visible} here; {remedy}"
    )


def _identity(gpu: int | None) -> str | None:
    """A name of the GPU that is the same in every process, whatever number it has there."""
    if gpu is None:
        return None
    import torch

    return str(getattr(torch.cuda.get_device_properties(gpu), "uuid", None) or f"{socket.gethostname()}:{gpu}")


def choose_interface(job: Job) -> None:
    """Tell gloo and NCCL which network to use, unless the user has. By themselves they go by the host's name, which on many
    machines leads nowhere, or out into a network where they have no business."""
    if job.one_machine:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
        return
    interface = interface_towards(job.address)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # NCCL finds InfiniBand and Ethernet between nodes by itself, better than one name could say


def interface_towards(address: str) -> str | None:
    """The interface of this machine through which `address` is reached, or None where that cannot be told."""
    import psutil

    for family, _, _, _, target in _resolve(address, 1):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # chooses a route; a datagram socket sends nothing yet
            own = probe.getsockname()[0]
            if own.startswith("127.") and not address.startswith("127."):
                continue  # /etc/hosts names this machine's own loopback, where the other nodes cannot come
            for name, addresses in psutil.net_if_addrs().items():
                if any(entry.address.partition("%")[0] == own for entry in addresses):
                    return name
    return None


def _resolve(address: str, port: int) -> list[Any]:
    try:
        return socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ValueError(
            f"the address of rank 0, {address!r}, is not known on {socket.gethostname()} ({error.strerror}); give a name that "
            "all nodes know, or an IP address (torchrun --master-addr, or MASTER_ADDR)"
        ) from None


def _open_store(job: Job, deadline: float, timeout: float) -> dist.Store:
    import torch.distributed as dist

    first = job.rank == 0 and not job.hosted
    listener = None
    if first:
        listener = job.listener if job.listener is not None else _listen(job)
    else:
        _wait_for_store(job, deadline, timeout)
    try:
        return dist.TCPStore(
            job.address,
            job.port,
            is_master=first,
            wait_for_workers=False,
            master_listen_fd=listener,
            timeout=timedelta(seconds=max(timeout, 30.0)),
        )
    except RuntimeError as error:
        raise ValueError(
            f"something answers at {job.address}:{job.port}, but not as the store of a job ({str(error).splitlines()[0]}); "
            f"choose another port: {_other_port(job)}"
        ) from None


def _listen(job: Job) -> int:
    """A socket for the store, on the job's own address: by itself TCPStore would listen on every network of the machine."""
    host = _resolve(job.address, job.port)[0][4][0]
    if host.startswith("127.") and not job.one_machine and not job.address.startswith("127."):
        host = ""  # the name leads to loopback here, and to a real address on the other nodes (Debian's 127.0.1.1)
    try:
        try:
            return _serve(host, job.port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return _serve("", job.port)  # the address is translated on its way to us: a container, a cloud
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"port {job.port} on {socket.gethostname()} is in use by another program; choose another: {_other_port(job)}"
            ) from None
        raise ValueError(
            f"rank 0 cannot listen on {job.address}:{job.port} ({error.strerror}); choose another: {_other_port(job)}"
        ) from None


def _serve(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048).detach()


def _wait_for_store(job: Job, deadline: float, timeout: float) -> None:
    """Try until rank 0 listens. Torch's own client does the same, with a page of C++ frames for every try."""
    _resolve(job.address, job.port)
    while True:
        try:
            socket.create_connection((job.address, job.port), timeout=5.0).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                reason = error.strerror or str(error) or type(error).__name__
                raise TimeoutError(
                    f"rank {job.rank} on {socket.gethostname()} got no answer from rank 0 at {job.address}:{job.port} for "
                    f"{timeout:g} s ({reason}); is it running there, and does a firewall let port {job.port} through?"
                ) from None
            time.sleep(0.1)


def _other_port(job: Job) -> str:
    return {"torchrun": "torchrun --master-port PORT"}.get(job.kind, "export MASTER_PORT=PORT, the same on all nodes")


def _roll_call(job: Job, store: dist.Store, about: dict[str, Any], deadline: float, timeout: float) -> None:
    try:
        store.set(f"here/{job.rank}", json.dumps(about))
        store.add("arrived", 1)
        if job.rank == 0:
            verdict = _verdict(job, store, deadline, timeout)
            store.set("verdict", json.dumps(verdict))
            if verdict:
                time.sleep(0.5)  # the others read it from a store that ends with this process
        else:
            while not store.check(["verdict"]):
                if time.monotonic() > deadline + 10.0:
                    raise TimeoutError(
                        f"rank {job.rank} on {socket.gethostname()} waited {timeout:g} s for rank 0 to see all ranks; its log "
                        "says what happened"
                    )
                time.sleep(0.05)
            verdict = json.loads(store.get("verdict"))
    except RuntimeError:  # torch's errors of a store
        raise ValueError(
            f"rank {job.rank} on {socket.gethostname()} lost rank 0 while the job was starting; the log of rank 0 says why"
        ) from None
    if verdict:
        raise (TimeoutError if verdict["late"] else ValueError)(verdict["text"])


def _verdict(job: Job, store: dist.Store, deadline: float, timeout: float) -> dict[str, Any] | None:
    """None: all are there and fit together."""
    while store.add("arrived", 0) < job.world:
        if time.monotonic() > deadline:
            missing = [rank for rank in range(job.world) if not store.check([f"here/{rank}"])]
            shown = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
            text = (
                f"{len(missing)} of {job.world} ranks did not come to {job.address}:{job.port} within {timeout:g} s: {shown}; "
                "did every node start, with the same number of processes?"
            )
            return {"late": True, "text": text}
        time.sleep(0.02)
    everyone = [json.loads(store.get(f"here/{rank}")) for rank in range(job.world)]
    owner: dict[str, int] = {}
    for rank, about in enumerate(everyone):
        if about["same"] != everyone[0]["same"]:
            text = f"rank {rank} on {about['host']} has another config than rank 0 on {everyone[0]['host']}; give all the same"
            return {"late": False, "text": text}
        if about["gpu"] is not None and about["gpu"] in owner:
            text = (
                f"ranks {owner[about['gpu']]} and {rank} on {about['host']} have the same GPU; start one process per GPU, or let "
                "the scheduler give each its own; to rehearse a larger job on one GPU, launch.share_gpu=true"
            )
            return {"late": False, "text": text}
        owner[about["gpu"]] = rank
    return None
