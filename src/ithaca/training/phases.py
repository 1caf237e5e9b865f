"""A length curriculum: phases of (context, steps, data, stack), one after the other in one run.

A phase is a run of its own in everything but its name: the trainer gets a config in which `data.context`, the sources, the stack
and the rotary settings are those of the phase, and `train.steps` is the step at which it ends. So the end of a phase is the end
of a run: a checkpoint is published there, and the next phase resumes from it, with another stack on the same processes, by
the code that resumes any run. Stopping anywhere, or exactly at a boundary, and starting again is therefore the same thing.

What goes on across phases: weights, optimizer states, the step, the learning rate (one schedule over all steps) and the data
cursor, one integer that counts samples from the beginning of the run. Sample i of a phase is sample i of *its* rows: a phase
with the rows of an earlier one (same context and sources) goes on where that one stopped, and a phase with other rows begins in
the middle of their order, not with those an earlier phase would have begun with. Rows of another context are cut
differently, so documents of a phase may come again in a later one; that is the point of repeating short documents
in long rows, and where it is not wanted, phases name different sources.

All phases are checked, and their stacks chosen, before the first begins: a third phase that does not fit is no surprise.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import replace
from typing import Protocol

import torch
import torch.distributed as dist

from ..base.exits import CONFIG, Failed
from ..base.run_folder import RunFolder
from ..config.curriculum import phase_configs
from ..config.dump import dump, origins
from ..config.schema import Config, StackOptions
from ..engine.build import device_of, model_config
from ..engine.ranks import on_rank0, world_group
from ..stack import Stack
from ..storage.files import latest
from ..storage.place import step_of
from .automatic import automatic_stack
from .length import counted

log = logging.getLogger("ithaca")


class TrainPhase(Protocol):
    def __call__(self, config: Config, text: str | None, *, first: bool, last: bool) -> int: ...


def train_in_phases(config: Config, text: str | None, train: TrainPhase) -> int:
    """Call `train` for each phase that is not done. -> exit code

    text: the resolved config as it is to be written down; of a run with phases it is made here, with every stack chosen.
    """
    if not config.phases:
        return train(counted(config), text, first=True, last=True)
    parts = [_with_stack(part) for part in phase_configs(config)]
    chosen = [replace(phase, stack=part.stack) for phase, part in zip(config.phases, parts, strict=True)]
    text = dump(replace(config, phases=tuple(chosen)), origins(text or ""))
    done = on_rank0(world_group(), lambda: _newest(config))
    code, first = 0, True
    for number, part in enumerate(parts, 1):
        if done >= part.train.steps and number < len(parts):
            continue
        log.info("phase %d of %d: %d tokens until step %d", number, len(parts), part.data.context, part.train.steps)
        code = train(part, text, first=first, last=number == len(parts))
        first = False
        if code != 0:
            return code
        gc.collect()  # FSDP2's modules know each other in circles
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return code


def _newest(config: Config) -> int:
    checkpoint = latest(RunFolder(config.run.folder).checkpoints)
    return 0 if checkpoint is None else step_of(checkpoint) or 0


def _with_stack(config: Config) -> Config:
    """With the stack that rank 0 chooses, where none is given."""
    hf = model_config(config.model, config.data.context)
    if config.stack.chosen is not None:
        return config
    world = dist.get_world_size() if dist.is_initialized() else 1
    device = device_of(config)

    def choose() -> Stack:
        try:
            return automatic_stack(config, hf, world, device)[0]
        except (Failed, ValueError) as error:
            raise Failed(getattr(error, "exit_code", CONFIG), f"at {config.data.context:,} tokens: {error}") from error

    stack = on_rank0(world_group(), choose)
    return replace(config, stack=StackOptions.of(stack, config.stack.scratch))
