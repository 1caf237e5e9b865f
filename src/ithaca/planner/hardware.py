"""GPUs by name: memory, arithmetic and links, as far as a plan needs them.

    parse_gpus("8xH100-80GB")    parse_gpus("2x8xH200")    parse_gpus("RTX4090")

Peaks and links are the makers' numbers; rates of attention and matrix products are shares of the peak that were measured on one
H200 (benchmarks/results/) and are taken over for the others, where they are guesses: `measured` says which.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..config.sizes import parse_bytes


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
GPUS = {
    "h100": Gpu("H100", 80, 84_900_000_000, 989e12, 3.35 * _TB, 450 * _GB, 55 * _GB),
    "h200": Gpu("H200", 141, 150_100_000_000, 989e12, 4.8 * _TB, 450 * _GB, 55 * _GB, measured=True),
    "h20": Gpu("H20", 96, 96 * _GB, 148e12, 4.0 * _TB, 450 * _GB, 55 * _GB),
    "gh200": Gpu("GH200", 96, 96 * _GB, 989e12, 4.0 * _TB, 450 * _GB, 350 * _GB),
    "b200": Gpu("B200", 180, 180 * _GB, 2250e12, 8.0 * _TB, 900 * _GB, 55 * _GB),
    "b300": Gpu("B300", 270, 270 * _GB, 2250e12, 8.0 * _TB, 900 * _GB, 55 * _GB),
    "a100": Gpu("A100", 80, 85_100_000_000, 312e12, 2.0 * _TB, 300 * _GB, 25 * _GB, "flash"),
    "a40": Gpu("A40", 48, 48 * _GB, 150e12, 0.7 * _TB, 25 * _GB, 25 * _GB, "flash"),
    "a6000": Gpu("A6000", 48, 48 * _GB, 155e12, 0.77 * _TB, 25 * _GB, 25 * _GB, "flash"),
    "l40s": Gpu("L40S", 48, 48 * _GB, 362e12, 0.86 * _TB, 25 * _GB, 25 * _GB, "flash"),
    "rtx4090": Gpu("RTX4090", 24, 24 * _GB, 165e12, 1.0 * _TB, 25 * _GB, 25 * _GB, "flash"),
    "rtx3090": Gpu("RTX3090", 24, 24 * _GB, 71e12, 0.94 * _TB, 25 * _GB, 25 * _GB, "flash"),
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
    gpu = GPUS.get(re.sub(r"[\s_]", "", name.lower()))
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
