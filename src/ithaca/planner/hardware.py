"""GPUs by name: memory, arithmetic and links, as far as a plan needs them.

    parse_gpus("8xH100-80GB")    parse_gpus("2x8xH200")    parse_gpus("RTX4090")

Peaks and links are the makers' numbers; rates of attention and matrix products are shares of the peak that were measured on one
H200 (benchmarks/results/) and are taken over for the others, where they are guesses: `measured` says which.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from ..config.sizes import parse_bytes
from ..observe.flops import peak_flops


@dataclass(frozen=True)
class Gpu:
    name: str
    label: int  # GB on the box
    memory: int  # bytes that torch reports, or as many as the label says where that is not known
    peak: float  # bf16 operations a second
    bandwidth: float  # bytes a second of its memory
    nvlink: float  # bytes a second to a neighbour, each way
    pcie: float  # bytes a second to the host, each way
    kernel: str = "fa4"  # the fastest attention kernel it has
    measured: bool = False


_GB, _TB = 10**9, 10**12


def _gpu(name: str, label: int, bandwidth: float, nvlink: int, pcie: int, kernel: str = "fa4", **more: Any) -> Gpu:
    """Bandwidth in TB/s, links in GB/s; the peak is the one that MFU is counted with."""
    peak = peak_flops(name)
    assert peak is not None, name
    memory = more.pop("memory", label * _GB)
    short = name.replace(" ", "")
    return Gpu(short, label, memory, peak, bandwidth * _TB, nvlink * _GB, pcie * _GB, kernel, **more)


GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        _gpu("H100", 80, 3.35, 450, 55, memory=84_900_000_000),
        _gpu("H200", 141, 4.8, 450, 55, memory=150_100_000_000, measured=True),
        _gpu("H20", 96, 4.0, 450, 55),
        _gpu("GH200", 96, 4.0, 450, 350),
        _gpu("B200", 180, 8.0, 900, 55),
        _gpu("B300", 270, 8.0, 900, 55),
        _gpu("A100", 80, 2.0, 300, 25, "flash", memory=85_100_000_000),
        _gpu("A40", 48, 0.7, 25, 25, "flash"),
        _gpu("RTX A6000", 48, 0.77, 25, 25, "flash"),
        _gpu("L40S", 48, 0.86, 25, 25, "flash"),
        _gpu("RTX 4090", 24, 1.0, 25, 25, "flash"),
        _gpu("RTX 3090", 24, 0.94, 25, 25, "flash"),
    )
}
PER_NODE = 8


@dataclass(frozen=True)
class Hardware:
    gpu: Gpu
    count: int
    per_node: int = PER_NODE
    network: float = 50e9  # bytes a second of a GPU's share between nodes
    host: int | None = None  # bytes of memory of one machine
    disk: int | None = None  # bytes of scratch space of one machine
    disk_rate: float = 2e9  # bytes a second of that disk, all ranks of the machine together

    @property
    def ranks_per_node(self) -> int:
        return min(self.count, self.per_node)

    @property
    def words(self) -> str:
        return f"{self.count}x{self.gpu.name}-{self.gpu.label}GB"


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
