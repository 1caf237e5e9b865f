"""GPUs: one row each. A new one is a row here.

Peaks are dense bf16 products with fp32 sums, from the makers' data sheets (with sparsity they print twice as much, GeForce cards
with fp16 sums twice as much again); memory and links are the makers' numbers too. What torch reports as memory was read off the
machine where a row says it in bytes. Rates of attention and matrix products are shares of the peak that were measured on one H200
and are taken over for the others, where they are guesses: `measured` says which. On AMD's GPUs other kernels run, of which nobody
has tried one: there is no rate to take over, so a plan says what they hold and no time. What machines with these GPUs usually have
of host memory is a guess too, for plans that are not told; they say so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

GB, TB, GIB, TFLOPS = 10**9, 10**12, 2**30, 10**12
# Between GPUs of a machine. GeForce cards may not read each other's memory: what they send goes through the host's, which is taken
# for half as fast. A bridge over two cards (A40, A6000, 3090) is not counted.
NVLINK, PCIE, THROUGH_HOST, INFINITY = "NVLink", "PCIe", "PCIe and host memory", "Infinity Fabric"


@dataclass(frozen=True)
class Gpu:
    """One that a plan can be made for."""

    name: str
    peak: float  # bf16 operations a second
    label: int  # GB on the box
    bandwidth: float  # bytes a second of its memory
    nvlink: float  # bytes a second to its neighbours, each way, over `link`
    pcie: float  # bytes a second to the host, each way
    processors: int  # streaming multiprocessors
    host: int  # bytes of host memory that machines usually have for each of it
    memory: int  # bytes that torch reports, or as many as the label says where that is not known
    hopper: bool = True  # has Hopper's matrix instructions or their successors, which FlashAttention-4 is written for
    measured: bool = False
    link: str = NVLINK  # what it talks to its neighbours over
    cuda: bool = True  # False: ROCm, where nothing of this has run
    probed: tuple[str, str] | None = None  # on this machine: the engine's kernels, without and with a window


def _row(
    name: str, tflops: float, label: int, bandwidth: float, nvlink: int, pcie: int, processors: int, host: int,
    memory: int | None = None, *, hopper: bool = True, measured: bool = False, link: str = NVLINK, cuda: bool = True,
) -> Gpu:  # fmt: skip
    """Label in GB, bandwidth in TB/s, links in GB/s, host memory in GiB."""
    return Gpu(
        name, tflops * TFLOPS, label, bandwidth * TB, nvlink * GB, pcie * GB, processors, host * GIB,
        memory or label * GB, hopper, measured, link, cuda,
    )  # fmt: skip


GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        # name, TFLOP/s, GB, TB/s, to neighbours, PCIe, processors, host
        _row("H100", 989, 80, 3.35, 450, 55, 132, 256, 84_900_000_000),
        _row("H200", 989, 141, 4.8, 450, 55, 132, 256, 150_100_000_000, measured=True),
        _row("H20", 148, 96, 4.0, 450, 55, 78, 256),
        _row("GH200", 989, 96, 4.0, 450, 350, 132, 448),
        _row("B200", 2250, 180, 8.0, 900, 55, 148, 256),
        _row("B300", 2250, 270, 8.0, 900, 55, 160, 256),
        _row("A100", 312, 80, 2.0, 300, 25, 108, 128, 85_100_000_000, hopper=False),
        _row("A40", 149.7, 48, 0.7, 25, 25, 84, 64, hopper=False, link=PCIE),
        _row("RTXA6000", 154.8, 48, 0.77, 25, 25, 84, 64, hopper=False, link=PCIE),
        _row("L40S", 362, 48, 0.86, 25, 25, 142, 64, hopper=False, link=PCIE),
        _row("RTX5090", 209.5, 32, 1.79, 27, 55, 170, 64, hopper=False, link=THROUGH_HOST),
        _row("RTX4090", 165.2, 24, 1.0, 12, 25, 128, 64, hopper=False, link=THROUGH_HOST),
        _row("RTX3090", 71, 24, 0.94, 12, 25, 82, 64, hopper=False, link=THROUGH_HOST),
        _row("MI300X", 1307, 192, 5.3, 448, 55, 304, 256, hopper=False, link=INFINITY, cuda=False),
    )
}

# Others that are known by their peak alone, so that MFU can be shown.
_PEAKS = {
    "gb300": 2500, "gb200": 2500, "h200 nvl": 835, "h100 pcie": 756, "h100 nvl": 835, "h800 pcie": 756, "h800": 989, "a800": 312,
    "a30": 165, "a10": 125, "l40": 181, "l20": 119.5, "l4": 121,
}  # fmt: skip
_OTHER_CHIPS = {"laptop", "mobile", "max", "d", "ti", "super", "mig"}
"""Words that make another, slower or faster chip, or a slice of one, of a name in the table."""


def peak_flops(device_name: str) -> float | None:
    """Peak of a GPU in bf16, by the name torch.cuda.get_device_name gives; None for one that is not in the table. A name with more
    words goes before one with fewer: an H100 PCIe is no H100."""
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    if words & _OTHER_CHIPS:
        return None
    peaks = {name: tflops * TFLOPS for name, tflops in _PEAKS.items()}
    peaks |= {name.replace("rtx", "rtx "): gpu.peak for name, gpu in GPUS.items()}
    names = sorted((name for name in peaks if set(name.split()) <= words), key=lambda name: -len(name.split()))
    return peaks[names[0]] if names else None
