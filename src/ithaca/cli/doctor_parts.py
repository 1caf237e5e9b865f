"""What `ithaca doctor` looks at: one function per part, each free to raise."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from ..base.gpu_sharing import nccl_version
from ..base.units import format_bytes
from ..base.versions import too_old
from ..planner.plan import HOST_SHARE

_CORE = ("torch", "transformers", "triton", "numpy", "safetensors")
_STATES = 16  # bytes of a trained weight: master, gradient, two averages
_HEAD_DIM = 128  # of most models; kernels are asked about it


def packages() -> dict[str, Any]:
    """Versions from the installed files: a package that cannot be imported still has one."""
    versions: dict[str, Any] = {}
    for name in (*_CORE, *(package for package, _, _ in OPTIONAL)):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def cuda() -> dict[str, Any]:
    import torch

    versions: dict[str, Any] = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    nccl = (
        nccl_version() if torch.cuda.is_available() else None
    )  # the one that is loaded, whatever torch was built with
    versions["nccl"] = nccl and ".".join(map(str, nccl))
    versions["driver"] = _driver()
    return versions


def gpus() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count()
    facts: dict[str, Any] = {"count": count}
    if count:
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability(0)))
    links = _links()
    for index in range(count):
        about = torch.cuda.get_device_properties(index)
        free, _ = torch.cuda.mem_get_info(index)
        facts[f"gpu {index}"] = (
            f"{about.name}, {format_bytes(about.total_memory)} ({format_bytes(free)} free), "
            f"{links.get(index, 'link unknown')}"
        )
    if count:
        to, back = _copy_rates()
        facts["copies"] = f"{to / 1e9:.0f} GB/s from pinned host memory, {back / 1e9:.0f} GB/s back (gpu 0)"
    return facts


def host() -> dict[str, Any]:
    facts: dict[str, Any] = {}
    try:
        import psutil

        memory = psutil.virtual_memory()
        facts["memory"] = f"{format_bytes(memory.total)} ({format_bytes(memory.available)} free)"
        weights = HOST_SHARE * memory.available / _STATES / 1e9
        facts["states"] = f"room for those of {weights:.1f}B trained weights (train.offload_optimizer)"
    except Exception as error:
        facts["memory"] = f"broken: {type(error).__name__}: {error}"
    with suppress(OSError, ValueError):  # no such group, or no limit ("max")
        facts["memory limit"] = format_bytes(int(Path("/sys/fs/cgroup/memory.max").read_text())) + " (container)"
    with suppress(ImportError):
        facts["memory speed"] = f"{_memory_rate() / 1e9:.0f} GB/s, read and written by one core"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts["cpus"] = f"{os.cpu_count()} ({usable} usable)"
    facts["locked memory"] = _limit("RLIMIT_MEMLOCK", format_bytes)
    facts["open files"] = _limit("RLIMIT_NOFILE", str)
    fabric = Path("/sys/class/infiniband")
    if fabric.is_dir():
        facts["infiniband"] = len(list(fabric.iterdir()))
    for name, where in (("/dev/shm", lambda: "/dev/shm"), ("temporary disk", tempfile.gettempdir)):
        try:
            usage = shutil.disk_usage(where())
            facts[name] = f"{format_bytes(usage.total)} ({format_bytes(usage.free)} free)"
        except OSError as error:
            facts[name] = f"broken: {error.strerror}"
    return facts


def attention() -> dict[str, Any]:
    """Each backend, and why not; on the device and in the dtype that training would use."""
    import torch

    from ..engine.attention.backends import BACKENDS
    from ..engine.attention.choice import Kernels, Need

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    facts: dict[str, Any] = {}
    for name, make in BACKENDS.items():
        try:
            reason = make().problem(device, dtype, _HEAD_DIM, False)
        except Exception as error:  # one backend that breaks must not hide the others
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        facts[name] = "ok" if reason is None else f"no: {reason}"
    facts["auto takes"] = Kernels("auto").resolve(Need(device, dtype, _HEAD_DIM)).name
    return facts


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "packages": packages,
    "cuda": cuda,
    "gpus": gpus,
    "host": host,
    "attention": attention,
}

# package, how to install it, what it brings
OPTIONAL = (
    ("peft", "pip install 'ithaca[peft]'", "LoRA (model.lora)"),
    ("flash-attn-4", "pip install --pre flash-attn-4", "the fastest attention on Hopper and later"),
    ("torchao", "pip install torchao", "optimizer states in 8 bits (train.optimizer)"),
    ("pyarrow", "pip install pyarrow", "parquet files as data"),
    ("datasets", "pip install datasets", "Hugging Face datasets as data"),
    ("tensorboard", "pip install tensorboard", "TensorBoard events (log.tensorboard)"),
    ("wandb", "pip install wandb", "Weights & Biases (log.wandb)"),
    ("mlflow", "pip install mlflow-skinny", "MLflow (log.mlflow)"),
)


def hints(block: dict[str, Any]) -> list[dict[str, str]]:
    """What is missing, why it matters, and the command that brings it. Looks at the block only."""
    missing: list[dict[str, str]] = []
    gpus, packages, host = (block.get(name, {}) for name in ("gpus", "packages", "host"))
    gpu = bool(gpus.get("count"))
    if not gpu and block.get("cuda", {}).get("driver"):
        missing.append(
            {
                "what": "torch sees no GPU",
                "why": "there is a driver, so this torch is a build without CUDA, or the driver is too old for it",
                "command": "pip install --force-reinstall torch",
            }
        )
    elif not gpu:
        missing.append({"what": "no GPU", "why": "training runs on the CPU: fine for a try, not for long contexts"})
    for text in too_old(packages):
        what, _, why = text.partition(": ")
        why, _, command = why.rpartition("; ")
        missing.append({"what": what, "why": why, "command": command})
    for package, command, why in OPTIONAL:
        if packages.get(package, "") is not None:
            continue
        if package == "flash-attn-4" and not (gpu and float(gpus["capability"]) >= 9):
            continue  # it would not run here
        missing.append({"what": f"{package} is not installed", "why": f"it brings {why}", "command": command})
    if gpu and host.get("/dev/shm", "0 B").split()[1] in ("B", "KB", "MB"):
        why = "NCCL and data workers share memory there, and less than 1 GB runs out; in Docker:"
        missing.append({"what": "/dev/shm is small", "why": why, "command": "docker run --shm-size=16g ..."})
    if host.get("locked memory", "unlimited") != "unlimited" and host.get("infiniband"):
        why = "NCCL over InfiniBand locks the memory it sends from"
        missing.append({"what": "locked memory is limited", "why": why, "command": "ulimit -l unlimited"})
    return missing


def _limit(name: str, form: Callable[[int], str]) -> str:
    import resource

    soft = resource.getrlimit(getattr(resource, name))[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else form(soft)


def _memory_rate() -> float:
    """Bytes a second that a core reads and writes; the best of three."""
    import numpy as np

    source, to = np.ones((2, 2**23))
    return 2 * source.nbytes / min(_seconds(lambda: np.copyto(to, source)) for _ in range(3))


def _copy_rates() -> tuple[float, float]:
    """Bytes a second to the first GPU and back; the best of three."""
    import torch

    here = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    there = here.to("cuda:0")

    def copy(to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize(0)

    ways = ((there, here), (here, there))
    to, back = (here.nbytes / min(_seconds(lambda way=way: copy(*way)) for _ in range(3)) for way in ways)
    return to, back


def _seconds(act: Callable[[], object]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def _nvidia_smi(*arguments: str) -> list[str]:
    """Lines of nvidia-smi's table; none where there is no such tool, or it does not answer."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments, "--format=csv,noheader"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _driver() -> str | None:
    lines = _nvidia_smi("--query-gpu=driver_version")
    return lines[0].strip() if lines else None


def _links() -> dict[int, str]:
    """How each GPU is connected, by nvidia-smi: PCIe as it could be (links sleep while idle), and NVLinks."""
    connections: dict[int, str] = {}
    for line in _nvidia_smi("--query-gpu=index,pcie.link.gen.max,pcie.link.width.max"):
        index, generation, width = (cell.strip() for cell in line.split(","))
        connections[int(index)] = f"PCIe {generation} x{width}"
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(["nvidia-smi", "nvlink", "--status"], capture_output=True, text=True, timeout=10)
        index = None
        links: dict[int, int] = {}
        for line in done.stdout.splitlines():
            if line.startswith("GPU "):
                index = int(line[4:].partition(":")[0])
            elif index is not None and "GB/s" in line:
                links[index] = links.get(index, 0) + 1
        for index, count in links.items():
            connections[index] = f"{connections.get(index, '')}, {count} NVLinks".lstrip(", ")
    return connections
