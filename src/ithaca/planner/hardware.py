"""GPUs by name: memory, arithmetic and links, as far as a plan needs them.

    parse_gpus("8xH100-80GB")    parse_gpus("2x8xH200")    parse_gpus("RTX4090")

Peaks and links are the makers' numbers; rates of attention and matrix products are shares of the peak that were measured on one
H200 (benchmarks/results/) and are taken over for the others, where they are guesses: `measured` says which. What machines with
these GPUs usually have of host memory is a guess too, for plans that are not told; they say so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from ..attention.traits import KERNELS, problem
from ..config.sizes import parse_bytes
from ..observe.flops import peak_flops
from .model import ModelSizes


@dataclass(frozen=True)
class Gpu:
    name: str
    label: int  # GB on the box
    memory: int  # bytes that torch reports, or as many as the label says where that is not known
    peak: float  # bf16 operations a second
    bandwidth: float  # bytes a second of its memory
    nvlink: float  # bytes a second to a neighbour, each way
    pcie: float  # bytes a second to the host, each way
    processors: int  # streaming multiprocessors
    host: int  # bytes of host memory that machines usually have for each of it
    kernel: str = "fa4"  # the first attention kernel, in the engine's order, that is made for it
    probed: tuple[str, str] | None = None  # on this machine: what the engine takes, without and with a window
    measured: bool = False


_GB, _TB, _GIB = 10**9, 10**12, 2**30


def _gpu(
    name: str, label: int, bandwidth: float, nvlink: int, pcie: int, processors: int, host: int, **more: Any
) -> Gpu:
    """Bandwidth in TB/s, links in GB/s, host memory in GiB; the peak is the one that MFU is counted with."""
    peak = peak_flops(name)
    assert peak is not None, name
    memory = more.pop("memory", label * _GB)
    short = name.replace(" ", "")
    return Gpu(
        short, label, memory, peak, bandwidth * _TB, nvlink * _GB, pcie * _GB, processors, host * _GIB, **more
    )  # fmt: skip


GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        _gpu("H100", 80, 3.35, 450, 55, 132, 256, memory=84_900_000_000),
        _gpu("H200", 141, 4.8, 450, 55, 132, 256, memory=150_100_000_000, measured=True),
        _gpu("H20", 96, 4.0, 450, 55, 78, 256),
        _gpu("GH200", 96, 4.0, 450, 350, 132, 448),
        _gpu("B200", 180, 8.0, 900, 55, 148, 256),
        _gpu("B300", 270, 8.0, 900, 55, 160, 256),
        _gpu("A100", 80, 2.0, 300, 25, 108, 128, kernel="cudnn", memory=85_100_000_000),
        _gpu("A40", 48, 0.7, 25, 25, 84, 64, kernel="cudnn"),
        _gpu("RTX A6000", 48, 0.77, 25, 25, 84, 64, kernel="cudnn"),
        _gpu("L40S", 48, 0.86, 25, 25, 142, 64, kernel="cudnn"),
        _gpu("RTX 4090", 24, 1.0, 25, 25, 128, 64, kernel="cudnn"),
        _gpu("RTX 3090", 24, 0.94, 25, 25, 82, 64, kernel="cudnn"),
    )
}
PER_NODE = 8
DISK = (
    10**12
)  # bytes of scratch space that is assumed for each GPU, where a stack asks for a disk and nobody says how large


@dataclass(frozen=True)
class Hardware:
    gpu: Gpu
    count: int
    per_node: int = PER_NODE
    network: float = 50e9  # bytes a second of a GPU's share between nodes
    host: int | None = None  # bytes of memory of one machine; None = as much as it takes
    disk: int | None = None  # bytes of scratch space of one machine
    disk_rate: float = 2e9  # bytes a second of that disk, all ranks of the machine together
    assumed: tuple[str, ...] = ()  # "host", "disk": nobody said how large they are

    @property
    def ranks_per_node(self) -> int:
        return min(self.count, self.per_node)

    @property
    def words(self) -> str:
        return f"{self.count}x{self.gpu.name}-{self.gpu.label}GB"

    def completed(self, *, disk: bool) -> Hardware:
        """With what such machines usually have in place of what was not said. disk: whether the stack asks for one."""
        found = self
        if self.host is None:
            found = replace(found, host=self.gpu.host * self.ranks_per_node, assumed=(*found.assumed, "host"))
        if self.disk is None and disk:
            found = replace(found, disk=DISK * self.ranks_per_node, assumed=(*found.assumed, "disk"))
        return found


def kernels_for(model: ModelSizes, gpu: Gpu, asked: str | None) -> tuple[str, str]:
    """What the engine attends with, in layers that see everything and in those with a window. asked: None = it chooses."""
    if asked is None and gpu.probed is not None:
        return gpu.probed
    if asked is not None and asked not in KERNELS:
        raise ValueError(f"kernel={asked!r} is unknown; on a GPU it is one of {', '.join(KERNELS)}")
    names = list(KERNELS)[list(KERNELS).index(gpu.kernel) :] if asked is None else [asked]
    kinds = {window is not None for window in model.windows}
    found = []
    for windowed in (False, True):
        reasons = {name: problem(name, model.head_dim, windowed) for name in names}
        chosen = next((name for name, reason in reasons.items() if reason is None), None)
        if chosen is None and windowed in kinds:
            why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            what = "its layers with a sliding window" if windowed else "its layers"
            remedy = "leave the kernel to be chosen" if asked is not None else "no GPU kernel computes it"
            raise ValueError(f"no attention kernel for {model.name}, {what}: {why}; {remedy}")
        found.append(chosen or "")
    return found[0], found[1]


_FORM = re.compile(r"(?:(\d+)\s*x\s*)?(?:(\d+)\s*x\s*)?([a-z][a-z0-9 ]*?)(?:[-\s]([0-9.]+\s*[a-z]+))?", re.IGNORECASE)


def parse_gpus(text: str) -> Hardware:
    """ "8xH100-80GB", "H200", "2x8xA100-40GB" (machines x GPUs), "1x24GB" is refused: which GPU is it?"""
    match = _FORM.fullmatch(text.strip())
    known = ", ".join(gpu.name for gpu in GPUS.values())
    if match is None:
        raise ValueError(f"{text!r} does not name GPUs; write 8xH100-80GB, 1xH200 or 2x8xA100-40GB (machines x GPUs)")
    nodes, count, name, memory = match.groups()
    if count is None:
        nodes, count = None, nodes
    short = re.sub(r"[\s_]", "", name.lower())
    gpu = GPUS.get(short) or GPUS.get(f"rtx{short}")
    if gpu is None:
        raise ValueError(
            f"{name!r} is not in the table of GPUs: {known}; name the nearest with its memory, such as H100-64GB"
        )
    each, machines = int(count or 1), int(nodes or 1)
    if each * machines < 1:
        raise ValueError(f"{text!r} has no GPU; at least 1 is needed")
    if memory:
        asked = parse_bytes(memory.replace(" ", ""))
        if asked < _GB:
            raise ValueError(f"{memory!r} in {text!r} is less than 1 GB of memory; write 80GB or 80GiB")
        if asked != gpu.label * _GB:  # the label is a name; any other number is meant as it stands
            gpu = replace(gpu, label=round(asked / _GB), memory=asked)
    return Hardware(gpu, each * machines, per_node=each if machines > 1 else PER_NODE)
