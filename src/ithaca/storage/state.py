"""What a checkpoint holds: a flat table of tensors for torch's checkpoint writer, and JSON for everything else.

Why not torch's own helpers (`get_optimizer_state_dict`): for an optimizer that has not stepped yet they make a step, which counts,
and so a run saved at step 0 would not continue as it would have; they put learning rates and the like among the tensors, which
then go to disk as pickles; and tied weights come twice. Here the tables are made from `named_parameters` and `optimizer.state`:

    model.NAME             each parameter; with PEFT adapters only the trainable ones
    optimizer.NAME.KEY     each tensor the optimizer keeps for a parameter

Tensors are the run's own, sharded as they are; loading writes into them, so nothing exists twice.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..engine.model.weights import named_tensors
from ..engine.ranks import gather
from ..engine.run import Run
from .files import CheckpointError, NotFiniteValues
from .low_bit import fits, is_packed, layout_of, take_apart, wide_copy
from .ranks import on_all_ranks

Tensors = dict[str, Tensor]


def at_rest(run: Run) -> None:
    """Between steps, with every parameter back in its shards."""
    if run.busy:
        raise CheckpointError("a forward or backward is under way or has failed; save and load between steps")
    for module in run.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward without backward some are still whole


def has_adapters(run: Run) -> bool:
    return hasattr(run.model, "peft_config")


def model_tensors(run: Run) -> Tensors:
    whole = not has_adapters(run)
    tensors = named_tensors(run.model).items()
    return {f"model.{name}": tensor.detach() for name, tensor in tensors if whole or tensor.requires_grad}


def frozen_of(run: Run) -> list[tuple[str, Tensor]]:
    """What a checkpoint leaves out and refers to: the base under adapters."""
    return [(name, t) for name, t in named_tensors(run.model).items() if has_adapters(run) and not t.requires_grad]


@dataclass
class OptimizerState:
    """An optimizer's state, apart: tensors by flat name, numbers by parameter, options by group."""

    tensors: Tensors
    about: dict[str, Any]
    packed: Tensors  # states in 8 bits on some rank, as the optimizer has them


def optimizer_state(run: Run, optimizer: torch.optim.Optimizer) -> OptimizerState:
    """Collective: ranks must agree on what is there, and a rank may hold no rows of a parameter."""
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    groups, plain, numbers = on_all_ranks(run.mesh.world, lambda: _local(optimizer, names))
    layouts = on_all_ranks(
        run.mesh.world, lambda: {key: layout_of(value) for key, (value, _) in plain.items() if is_packed(value)}
    )
    packed: dict[str, Any] = {}  # in 8 bits on some rank
    for rank_layouts in gather(run.mesh.world, layouts):
        packed.update({key: layout or packed.get(key) for key, layout in rank_layouts.items()})
    stored_packed = set(packed)
    if packed:
        fitting = {key for key, layout in packed.items() if fits(plain[key][0], layout)}
        stored_packed = set.intersection(*gather(run.mesh.world, fitting))

    def flatten() -> Tensors:
        tensors: Tensors = {}
        for key, (value, parameter) in plain.items():
            if key in stored_packed:
                tensors.update(take_apart(key, value, packed[key]))
            elif key in packed:
                tensors[key] = wide_copy(value)
            elif isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() > 1:
                raise CheckpointError(
                    f"{key} is not sharded like its parameter, so each rank has another one and none is whole; use an "
                    "optimizer that works on DTensor"
                )
            else:
                tensors[key] = value
        return tensors

    about = {"class": _class_of(optimizer), "groups": groups, "numbers": numbers}
    return OptimizerState(on_all_ranks(run.mesh.world, flatten), about, {key: plain[key][0] for key in packed})


def _local(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> Any:
    """-> options of groups; key -> (tensor, parameter); name -> numbers"""
    for group in optimizer.param_groups:
        if any(parameter not in names for parameter in group["params"]):
            raise CheckpointError(
                "the optimizer has parameters that are not the run's; make it from run.model.parameters()"
            )
    groups = [
        {
            "params": [names[parameter] for parameter in group["params"]],
            "options": {key: _plain(key, value) for key, value in group.items() if key != "params"},
        }
        for group in optimizer.param_groups
    ]
    tensors: dict[str, tuple[Tensor, Tensor]] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for parameter, state in optimizer.state.items():
        name = names[parameter]  # pyright: ignore[reportArgumentType]
        numbers[name] = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = (value.detach(), parameter)
            else:
                numbers[name][key] = _plain(f"{name}.{key}", value)
    return groups, tensors, numbers


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    """Whose states these are: those of HostAdamW are torch's AdamW's, in another place."""
    return getattr(optimizer, "saved_as", type(optimizer).__name__)


def _plain(key: str, value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, list | tuple):
        return [_plain(key, item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise NotFiniteValues(f"optimizer.{key} is {value}")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"the optimizer's {key} is a {type(value).__name__}, which has no place in a checkpoint")


def allocate(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Let the optimizer make the states it lacks: one step with zero gradients, at learning rate 0, which leaves the weights as
    they are; the step it counts is loaded over. -> parameters that had none"""
    everything = [p for group in optimizer.param_groups for p in group["params"]]
    fresh = [p for p in everything if p.requires_grad and not optimizer.state.get(p)]
    grads = [(p, p.grad) for p in everything]
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for parameter in everything:
            parameter.grad = None
        for parameter in fresh:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if "lr" in group:
                group["lr"] = rate
        for parameter, grad in grads:
            parameter.grad = grad
    return fresh


def keep_only(optimizer: torch.optim.Optimizer, run: Run, saved: dict[str, Any]) -> None:
    """Drop states of parameters that had none when saved: they had not been stepped yet."""
    for name, parameter in run.model.named_parameters():
        if name not in saved:
            optimizer.state.pop(parameter, None)


def restore_numbers(optimizer: torch.optim.Optimizer, run: Run, about: dict[str, Any]) -> None:
    parameters = dict(run.model.named_parameters())
    for name, numbers in about["numbers"].items():
        optimizer.state[parameters[name]].update(numbers)
    for group, saved in zip(optimizer.param_groups, about["groups"], strict=True):
        for key, value in saved["options"].items():
            now = group.get(key)
            if isinstance(now, Tensor):
                now.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(now, tuple) else value


def group_differences(optimizer: torch.optim.Optimizer, run: Run, about: dict[str, Any]) -> list[str]:
    names = {parameter: name for name, parameter in run.model.named_parameters()}
    problems = []
    if about["class"] != _class_of(optimizer):
        problems.append(f"the optimizer was {about['class']} and is {_class_of(optimizer)}")
    now = [[names.get(p) for p in group["params"]] for group in optimizer.param_groups]
    saved = [group["params"] for group in about["groups"]]
    if [len(group) for group in now] != [len(group) for group in saved]:
        sizes = " + ".join(str(len(group)) for group in saved), " + ".join(str(len(group)) for group in now)
        problems.append(f"the optimizer's groups had {sizes[0]} parameters and have {sizes[1]}")
    elif now != saved:
        pair = next(
            (a, b) for one, two in zip(saved, now, strict=True) for a, b in zip(one, two, strict=True) if a != b
        )
        problems.append(f"the optimizer's groups had {pair[0]} where they have {pair[1]}")
    else:
        problems += [
            f"the optimizer's {key} was {value!r:.60} and is {group[key]!r:.60}"
            for group, was in zip(optimizer.param_groups, about["groups"], strict=True)
            for key, value in was["options"].items()
            if key in group and not _alike(group[key], value)
        ]
    return problems


def _alike(now: Any, value: Any) -> bool:
    """Whether an option from a file can take the place of one: a number of a number, as many of as many."""
    if isinstance(now, tuple | list):
        return isinstance(value, list) and len(value) == len(now) and all(map(_alike, now, value))
    if isinstance(now, Tensor | int | float) and not isinstance(now, bool):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return now is None or value is None or type(now) is type(value)


def differences(tensors: Tensors, metadata: Metadata, prefix: str, except_for: Set[str] = frozenset()) -> list[str]:
    """Names, shapes and dtypes that differ between a run and a checkpoint. torch would cast dtypes in silence."""
    stored = metadata.state_dict_metadata
    entries = {key: entry for key, entry in stored.items() if key.startswith(prefix) and key not in except_for}
    tensors = {key: tensor for key, tensor in tensors.items() if key not in except_for}
    problems = []
    for key in sorted(entries.keys() | tensors.keys()):
        name, entry, tensor = key.removeprefix(prefix), entries.get(key), tensors.get(key)
        if entry is None:
            problems.append(f"{name} is not in the checkpoint")
        elif tensor is None:
            problems.append(f"{name} is not in this run")
        else:
            assert isinstance(entry, TensorStorageMetadata)  # safe_metadata lets nothing else through
            then, now = (tuple(entry.size), entry.properties.dtype), (tuple(tensor.shape), tensor.dtype)
            if then != now:
                problems.append(f"{name} is {_kind(*then)} in the checkpoint and {_kind(*now)} in this run")
    return problems


def _kind(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def size(tensors: Tensors) -> int:
    """Bytes of all shards together."""
    return sum(value.numel() * value.element_size() for value in tensors.values())
