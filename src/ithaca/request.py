"""How our code runs inside a Hugging Face module: by calls that carry a request.

FSDP2 gathers and frees parameters in hooks around a module's forward. So a layer, the head and the model itself are called as
modules, with a `Request` as last argument, and their forward hands such calls to us. Every other call runs the forward
the module had before, so the model object stays usable as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn


@dataclass
class Request:
    """Marks a call as ours and says what is wanted."""

    do: Callable[..., Any]


def route(module: nn.Module) -> None:
    """Let calls that end with a request run our code inside this module's own hooks (FSDP's), all others as before."""
    module._forward_before_ithaca = module.forward  # pyright: ignore[reportArgumentType]
    module.forward = MethodType(_routed_forward, module)  # a method, so that a deep copy runs on its own weights


def _routed_forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[-1], Request):
        return args[-1].do(*args[:-1])
    return module._forward_before_ithaca(*args, **kwargs)
