"""Which module is at work, as far as hooks can tell, so that an allocation can be told by its module.

Forward: the innermost module whose call has not returned, cut at the parts of a decoder layer (model.layers.3.mlp). Backward: our
layers are single functions there, so it is the layer whose gradient came last, or one of its parts where a tile is computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ...engine.mesh import local_part
from ...engine.run import Run
from ...planner.dry_run.tracker import plain_tensors
from .journal import Journal


class Names:
    """Names of modules and of the modules that own parameters, cut at the parts of a layer."""

    def __init__(self, run: Run) -> None:
        layers = {layer.module for layer in run.decoder.layers}
        named = list(run.model.named_modules())
        self.layers = {module: name for name, module in named if module in layers}
        self.modules = {module: self._part(name) for name, module in named}
        self.owners = {
            parameter: self.modules[module]
            for _, module in named
            for parameter in module._parameters.values()
            if parameter is not None
        }

    def group(self, parameter: nn.Parameter) -> str:
        """The layer that a parameter lies in: FSDP2 has one tensor for all gradients of a layer."""
        owner = self.owners.get(parameter, "")
        return next((name for name in self.layers.values() if owner.startswith(f"{name}.")), owner)

    def _part(self, name: str) -> str:
        for layer in self.layers.values():
            if name.startswith(f"{layer}."):
                return f"{layer}.{name[len(layer) + 1 :].split('.')[0]}"
        return name


@contextmanager
def told_by_module(run: Run, journal: Journal, names: Names) -> Iterator[None]:
    stack: list[str] = []
    backward = [""]  # the layer that backward is in

    def enter(module: nn.Module, args: Any) -> None:
        if module in names.modules:
            stack.append(names.modules[module])
            journal.module = stack[-1]

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        if module not in names.modules:
            return
        stack.pop()
        journal.module = stack[-1] if stack else backward[0]
        result = out[0] if isinstance(out, tuple) else out
        if module in names.layers and isinstance(result, Tensor) and result.requires_grad:
            journal.keep(names.layers[module], but=result)
            result.register_hook(lambda grad, name=names.layers[module]: come_back(name, grad))

    def come_back(name: str, grad: Tensor) -> None:
        stack.clear()
        backward[0] = journal.module = name
        journal.see(grad, "residual")  # whoever made it
        tell_gradients(run, journal, names)

    hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        journal.module = ""


def tell_gradients(run: Run, journal: Journal, names: Names) -> None:
    """A gradient that has reached its parameter is no longer a part of what made it."""
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            journal.see(local_part(parameter.grad), "gradients", module=names.group(parameter))


def tell_residents(
    run: Run, journal: Journal, names: Names, optimizer: torch.optim.Optimizer, others: dict[str, Any]
) -> None:
    """What is there before a step begins: weights, the optimizer's states, and others by what they are called."""
    for line, tensors in others.items():  # first: what is a weight too is called a weight
        for tensor in tensors:
            journal.see(tensor, "other", line=line)
    for parameter in run.model.parameters():
        module = names.owners.get(parameter, "")
        for tensor in plain_tensors(parameter.detach()):
            journal.see(tensor, "parameters", line="the model's weights", module=module)
        for value in optimizer.state.get(parameter, {}).values():
            for tensor in plain_tensors(value) if isinstance(value, Tensor) else ():
                journal.see(tensor, "optimizer", line="the optimizer's states", module=module)
