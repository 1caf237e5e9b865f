"""The machines of a run, as a plan sees them, and which attention kernels they get.

parse_gpus("8xH100-80GB")    parse_gpus("2x8xH200")    parse_gpus("GeForce RTX 5090")
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..base.kernels import GPU_KERNELS, KERNELS, problem
from ..base.units import parse_bytes
from ..engine.model.sizes import ModelSizes
from .gpus import GPUS, NVLINK, PCIE, THROUGH_HOST, Gpu
from .links import Links, find_links

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
    links: Links | None = None  # of one machine's GPUs, if they were measured here
    fabric: Links | None = None  # of all machines', likewise

    @property
    def ranks_per_node(self) -> int:
        return min(self.count, self.per_node)

    @property
    def words(self) -> str:
        return f"{self.count}x{self.gpu.name}-{self.gpu.label}GB"

    @property
    def nodes(self) -> int:
        return -(-self.count // self.per_node)

    @property
    def rates(self) -> str:
        """Where the rates of its arithmetic come from: measured, scaled or not known."""
        return "measured" if self.gpu.measured else "scaled" if self.gpu.cuda else "not known"

    @property
    def about_links(self) -> str | None:
        """Where the rates of what GPUs send each other come from; of one GPU there is nothing to say."""
        if self.count == 1:
            return None
        needed = [self.links] if self.nodes == 1 else [self.links, self.fabric]
        found = [links for links in needed if links is not None]
        if found:
            dates = " and ".join(dict.fromkeys(links.date for links in found))
            missing = (
                "" if len(found) == len(needed) else ", between machines not" if self.links else ", inside them not"
            )
            return f"links measured here on {dates}{missing}"
        unmeasured = "links were not measured (ithaca doctor --links)"
        if self.gpu.link == NVLINK or self.ranks_per_node == 1:
            return unmeasured
        rate = f"{self.gpu.nvlink / 1e9:.0f} GB/s each way"
        shared = ", beside the copies to the host" if self.gpu.link in (PCIE, THROUGH_HOST) else ""
        return f"no NVLink: GPUs talk over {self.gpu.link}, {rate}{shared}; {unmeasured}"

    def with_links(self) -> Hardware:
        """With what was measured here on as many GPUs of this kind (ithaca doctor --links)."""
        if self.count == 1 or self.links or self.fabric:
            return self
        fabric = find_links(self.gpu.name, self.per_node, self.nodes) if self.nodes > 1 else None
        return replace(self, links=find_links(self.gpu.name, self.ranks_per_node, 1), fabric=fabric)

    def completed(self, *, disk: bool) -> Hardware:
        """With what such machines usually have in place of what was not said. disk: whether the stack asks for one."""
        hardware = self
        if self.host is None:
            hardware = replace(hardware, host=self.gpu.host * self.ranks_per_node, assumed=(*hardware.assumed, "host"))
        if self.disk is None and disk:
            hardware = replace(hardware, disk=DISK * self.ranks_per_node, assumed=(*hardware.assumed, "disk"))
        return hardware


def kernels_for(model: ModelSizes, gpu: Gpu, asked: str | None) -> tuple[str, str]:
    """What the engine attends with, in layers that see everything and in those with a window. asked: None = it chooses."""
    if asked is None and gpu.probed is not None:
        return gpu.probed
    if asked is not None and asked not in GPU_KERNELS:
        raise ValueError(f"kernel={asked!r} is unknown; on a GPU it is one of {', '.join(GPU_KERNELS)}")
    names = [name for name in GPU_KERNELS if _made_for(name, gpu)]
    if asked is not None and asked not in names:
        raise ValueError(f"kernel={asked!r} is not made for {gpu.name}, which has {', '.join(names)}")
    names = names if asked is None else [asked]
    kinds = {window is not None for window in model.windows}
    kernels = []
    for windowed in (False, True):
        reasons = {name: problem(name, model.head_dim, windowed) for name in names}
        chosen = next((name for name, reason in reasons.items() if reason is None), None)
        if chosen is None and windowed in kinds:
            why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            what = "its layers with a sliding window" if windowed else "its layers"
            remedy = "leave the kernel to be chosen" if asked is not None else "no GPU kernel computes it"
            raise ValueError(f"no attention kernel for {model.name}, {what}: {why}; {remedy}")
        kernels.append(chosen or "")
    return kernels[0], kernels[1]


def _made_for(kernel: str, gpu: Gpu) -> bool:
    return (gpu.hopper or KERNELS[kernel].since != "hopper") and (gpu.cuda or KERNELS[kernel].rocm)


_FORM = re.compile(
    r"(?:(\d+)\s*x\s*)?(?:(\d+)\s*x\s*)?([a-z][a-z0-9]*(?:[ _-][a-z][a-z0-9]*|[ _-][0-9]{4})*)(?:[-\s]([0-9.]+\s*[a-z]+))?",
    re.IGNORECASE,
)
_MEANINGLESS = re.compile(
    r"nvidia|geforce|amd|instinct|sxm\d?"
)  # words of a product's full name that tell nothing apart


def parse_gpus(text: str) -> Hardware:
    """ "8xH100-80GB", "H200", "2x8xA100-40GB" (machines x GPUs), "1x24GB" is refused: which GPU is it?"""
    match = _FORM.fullmatch(text.strip())
    known = ", ".join(gpu.name for gpu in GPUS.values())
    if match is None:
        count, _, short = re.sub(r"\s", "", text.lower()).rpartition("x")
        meant = GPUS.get(f"rtx{short}")
        hint = f"; did you mean {count or 1}x{meant.name}?" if meant else ""
        raise ValueError(
            f"{text!r} does not name GPUs; write 8xH100-80GB, 1xH200 or 2x8xA100-40GB (machines x GPUs){hint}"
        )
    nodes, count, name, memory = match.groups()
    if count is None:
        nodes, count = None, nodes
    short = _MEANINGLESS.sub("", re.sub(r"[\s_-]", "", name.lower()))
    gpu = GPUS.get(short) or GPUS.get(f"rtx{short}")
    if gpu is None:
        raise ValueError(
            f"{name!r} is not in the table of GPUs: {known}; name the nearest with its memory, such as H100-64GB"
        )
    per_node, machines = int(count or 1), int(nodes or 1)
    if per_node * machines < 1:
        raise ValueError(f"{text!r} has no GPU; at least 1 is needed")
    if memory:
        asked = parse_bytes(memory.replace(" ", ""))
        if asked < 10**9:
            raise ValueError(f"{memory!r} in {text!r} is less than 1 GB of memory; write 80GB or 80GiB")
        if asked != gpu.label * 10**9:  # the label is a name; any other number is meant as it stands
            gpu = replace(gpu, label=round(asked / 10**9), memory=asked)
    return Hardware(gpu, per_node * machines, per_node=per_node if machines > 1 else PER_NODE)
