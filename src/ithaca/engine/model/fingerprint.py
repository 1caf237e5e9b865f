"""What of a prepared model must not change any more, compared before every forward.

`prepare` has looked at the model (guard.py) and read its settings once; FSDP2 has its parameters. A hook, a patch, a dropout or
a setting that comes later would be left out without a word. So classes, forwards, hooks, children, settings, parameters and
config are noted, and a forward begins with a look at whether they are the same. Hooks on parts that are called as modules
still work, so a new one there is tried, as before `prepare`, and then noted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from .guard import accelerated, called, function_violations, hook_name, is_known_hook, plain_config, settings, settled
from .linear import adapter_violation
from .tokenwise import HOOKS, Stand, mixing, sample

_AGAIN = "prepare a model that has it already, or leave it as it was"


@dataclass
class _Noted:
    """What a module was like. Compared without making anything: hundreds of modules are looked at before each forward."""

    name: str
    module: nn.Module

    def __post_init__(self) -> None:
        own, kind = vars(self.module), type(self.module)
        self.own, self.kind, self.class_forward = own, kind, kind.forward
        self.forward, self.compiled = own.get("forward"), own.get("_compiled_call_impl")
        self.children = list(own["_modules"].values())
        self.adapters = list(own["_modules"].get("lora_A", ()))
        self.hooks = {name: list(own[name]) for name in HOOKS}
        # keys of hooks only grow, so a table of the same length and last key is the same table
        self.empty = [own[name] for name in HOOKS if not own[name]]
        self.filled = [(own[name], len(own[name]), next(reversed(own[name]))) for name in HOOKS if own[name]]

    def same(self) -> bool:
        own = self.own
        if (
            type(self.module) is not self.kind
            or self.kind.forward is not self.class_forward
            or own.get("forward") is not self.forward
            or own.get("_compiled_call_impl") is not self.compiled
        ):
            return False
        for table in self.empty:
            if table:
                return False
        for table, count, last in self.filled:
            if len(table) != count or next(reversed(table)) != last:
                return False
        return self._same_children()

    def _same_children(self) -> bool:
        parts = self.own["_modules"]
        if len(parts) != len(self.children):
            return False
        for part, known in zip(parts.values(), self.children, strict=True):
            if part is not known:
                return False
        return not self.adapters or list(parts["lora_A"]) == self.adapters

    def changes(self) -> list[str]:
        """Which of it is another, hooks aside."""
        pairs = {
            "class": type(self.module) is self.kind,
            "forward of its class": self.kind.forward is self.class_forward,
            "forward": self.own.get("forward") is self.forward,
            "compiled call": self.own.get("_compiled_call_impl") is self.compiled,
            "set of parts": self._same_children(),
        }
        return [word for word, same in pairs.items() if not same]

    def new_hooks(self) -> dict[str, set[int]]:
        return {name: set(self.own[name]) - set(known) for name, known in self.hooks.items()}


class Fingerprint:
    """Of a model that is prepared: taken last, when FSDP2's hooks and our forwards are in place."""

    def __init__(self, model: nn.Module, inner: Any, family: Any) -> None:
        self.inner, self.family = inner, family
        outside = [] if model is inner else [("the PEFT model", model), ("its base_model", model.base_model)]
        self.modules = [_Noted(name, module) for name, module in [*outside, *_watched(inner)]]  # pyright: ignore
        adapted: list[tuple[str, Any]] = [(n.name, n.module) for n in self.modules if hasattr(n.module, "lora_A")]
        self.adapters = [(name, module, module.lora_dropout._modules) for name, module in adapted]
        # a model that runs by its own code reads its settings itself
        self.settings = [] if family is None else [(name, module, settings(module)) for name, module in settled(inner)]
        self.parameters = [
            (name, module._parameters, key, parameter)
            for name, module in inner.named_modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        self.config, self.noted = inner.config, copy.deepcopy(plain_config(inner.config))

    def changes(self) -> list[str]:
        """What has changed and matters, in words."""
        changes = list(self._config_changes())
        for i, noted in enumerate(self.modules):
            if noted.same():
                continue
            problems = list(self._module_changes(noted))
            changes += problems
            if not problems:
                self.modules[i] = _Noted(noted.name, noted.module)
        for name, module, dropouts in self.adapters:
            merged = module.merged_adapters
            if (merged or any(getattr(dropout, "p", 0) for dropout in dropouts.values())) and (
                problem := adapter_violation(module, name)
            ):
                changes.append(problem)
        for name, module, noted in self.settings:
            values = vars(module)
            for key, value in noted.items():
                if values.get(key) != value:
                    changes.append(
                        f"{name}.{key} was {value!r} when the model was prepared, now {values.get(key)!r}; {_AGAIN}"
                    )
        return [*changes, *self._parameter_changes(), *function_violations(self.inner)]

    def _config_changes(self) -> Iterator[str]:
        if self.inner.config is not self.config:
            yield f"model.config is another object than when the model was prepared; {_AGAIN}"
        elif (now := plain_config(self.config)) != self.noted:
            for key in sorted(now.keys() | self.noted.keys()):
                if now.get(key) != self.noted.get(key):
                    yield (
                        f"config.{key} was {self.noted.get(key)!r} when the model was prepared, now {now.get(key)!r}; set it "
                        "back, or build and prepare the model again"
                    )

    def _module_changes(self, noted: _Noted) -> Iterator[str]:
        name, module = noted.name, noted.module
        kind = type(module).__name__
        changes = noted.changes()
        if "forward" in changes and (by_accelerate := accelerated(module)):
            changes.remove("forward")
            yield f"{name} ({kind}) {by_accelerate}"
        for what in changes:
            yield f"{name} ({kind}) has another {what} than when the model was prepared; {_AGAIN}"
        added = noted.new_hooks()
        hooks = [getattr(module, table)[key] for table, keys in added.items() for key in keys]
        unknown = [hook for hook in hooks if not is_known_hook(hook)]
        if unknown and (problem := self._try(name, module, added)):
            yield f"{name} ({kind}) has a hook since it was prepared ({hook_name(unknown[0])}), which {problem}"

    def _try(self, name: str, module: nn.Module, added: dict[str, set[int]]) -> str | None:
        """Hooks are tried around a stand-in: the module itself may be sharded."""
        if self.family is None:
            return "was not there when the model was proven; register it before prepare"
        widths = {part: (width, heads) for part, _, width, heads in called(self.inner, self.family)}
        inside = next((part for part in widths if name == part or name.startswith(f"{part}.")), None)
        if inside is None:
            return "would not be called as in the untouched model; remove it (hooks on norms, MLP, o_proj and embedding work)"
        if name in widths:
            width, heads = widths[name]
        elif isinstance(module, nn.Linear):
            width, heads = module.in_features, None
        else:
            return "cannot be tried once weights are sharded; register it before prepare"
        out = module.out_features if isinstance(module, nn.Linear) else width
        return mixing(module, sample(module, width, heads), Stand(module, width, out).only(added))

    def _parameter_changes(self) -> Iterator[str]:
        others = [entry for entry in self.parameters if entry[1].get(entry[2]) is not entry[3]]
        if others:  # gathered by hand, perhaps
            for module in self.inner.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        for name, held, key, parameter in others:
            if held.get(key) is not parameter:
                yield f"{name}.{key} is another parameter than when the model was prepared, and would be ignored; {_AGAIN}"
        for name, _, key, parameter in self.parameters:
            if parameter._backward_hooks:
                yield (
                    f"{name}.{key} has a hook (register_hook), which sees a part of the gradient or nothing; remove it, and "
                    "change gradients after backward"
                )


def _watched(inner: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules but those inside of adapters, of which there are many, and which the adapter itself tells of."""
    for name, module in inner.named_modules():
        if ".lora_" not in name:
            yield name or "the model", module
