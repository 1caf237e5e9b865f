"""The stack of `stack: auto`, and the plan of a run on the GPUs it has."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..base.exits import MEMORY, Failed
from ..base.gpu_sharing import ranks_per_gpu
from ..base.processes.worker import Worker, receive, send, stop
from ..config.schema import Config
from ..engine.attention.choice import kernels_here
from ..engine.build import DTYPES, model_name, simple_stack
from ..engine.model.families import FAMILIES
from ..engine.model.sizes import sizes_of
from ..engine.offload.host import available_memory
from ..planner.config import requested
from ..planner.gpus import GPUS, Gpu
from ..planner.hardware import Hardware
from ..planner.own import attention_of
from ..planner.plan import Plan
from ..planner.search import plan
from ..planner.text import describe
from ..stack import Stack
from .launch.environment import find_job

log = logging.getLogger("ithaca")


def automatic_stack(config: Config, hf: Any, world: int, device: torch.device) -> tuple[Stack, Plan | None]:
    """The stack of `stack: auto`: on a GPU the planner's, which raises where nothing fits; else a rule that works anywhere."""
    if device.type != "cuda":
        return simple_stack(config.data.context, hf, world), None
    plan = planned(config, hf, world, device)
    for name, value, why in plan.reasons:
        log.info("stack auto: %s=%s: %s", name, value, why)
    if not plan.fits:
        raise Failed(MEMORY, "this run does not fit:\n" + "\n".join(describe(plan)))
    return plan.stack, plan


def has_arithmetic(hf: Any) -> bool:
    """Whether the planner can count what a model takes; others run by their own code."""
    return hf.model_type in FAMILIES


def planned(config: Config, hf: Any, world: int, device: torch.device, stack: Stack | None = None) -> Plan:
    """The plan of a run on the GPUs it has, with the kernels it will take; with a stack, of that stack."""
    name = model_name(config.model)
    sizes = sizes_of(hf.to_dict(), name) if has_arithmetic(hf) else None
    head_dim, windows = attention_of(hf) if sizes is None else (sizes.head_dim, sizes.windows)
    kinds = {window is not None for window in windows}
    wanted = "auto" if stack is None else stack.attention
    probed = kernels_here(wanted, device, DTYPES[config.model.dtype], head_dim, kinds)
    hardware = hardware_here(config, world, device)
    hardware = replace(hardware, gpu=replace(hardware.gpu, probed=probed))
    asked = {"gpus": hardware, "stack": stack, **requested(config)}
    return planned_apart(name, config=hf, **asked) if sizes is None else plan(sizes, **asked)


def planned_apart(name: str, **asked: Any) -> Plan:
    """A plan by dry runs, in a process of its own: each makes a process group, and here there may be one, of which this is but the
    first rank."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    worker = Worker("ithaca plan", _plan_here, name, asked, environ=environ)
    try:
        while True:
            what, value = receive(worker.pipe)
            if what == "said":
                log.info("stack auto: %s", value)
            elif what == "refused":
                raise ValueError(value)
            else:
                return value
    except (EOFError, ConnectionResetError):
        raise RuntimeError(
            f"the dry runs of {name} ended: {worker.cause_of_death(10.0)}; give the stack, or look at the log"
        ) from None
    finally:
        stop([worker])


def _plan_here(pipe: Any, name: str, asked: dict[str, Any]) -> None:
    try:
        send(pipe, ("plan", plan(name, say=lambda line: send(pipe, ("said", line)), **asked)))
    except ValueError as error:
        send(pipe, ("refused", str(error)))


def hardware_here(config: Config, world: int, device: torch.device) -> Hardware:
    """This machine, in the planner's words."""
    scratch = Path(config.stack.scratch or tempfile.gettempdir())
    gpus = max(1, torch.cuda.device_count())
    per_node = job.local_world if (job := find_job(os.environ)) else gpus
    sharing = ranks_per_gpu(per_node, gpus) if config.launch.share_gpu else 1
    gpu = gpu_here(device, config.launch.gpu_memory, sharing)
    return Hardware(
        gpu,
        world,
        per_node=per_node,
        host=available_memory(),
        disk=shutil.disk_usage(scratch).free if scratch.is_dir() else None,
    )


def gpu_here(device: torch.device, limit: int | None = None, sharing: int = 1) -> Gpu:
    """A GPU that the planner's table does not have is taken for the nearest, with its own memory. sharing: ranks that have it."""
    properties = torch.cuda.get_device_properties(device)
    words = properties.name.lower().replace(" ", "").replace("nvidia", "")
    known = next((gpu for name, gpu in sorted(GPUS.items(), key=lambda item: -len(item[0])) if name in words), None)
    if known is None:
        known = replace(GPUS["h100" if properties.major >= 9 else "a100"], name=properties.name, measured=False)
    memory = (properties.total_memory if limit is None else min(limit, properties.total_memory)) // sharing
    return replace(known, memory=memory, label=round(memory / 1e9), processors=properties.multi_processor_count)
