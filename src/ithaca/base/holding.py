"""What holds memory: the words that plan, dry run, ladder and profile share, and how an allocation gets its word.

An allocation belongs to the code that made it, and that code says itself what it holds, beside its definition:

    module_holds(__name__, "attention")                 # whatever this module allocates
    module_holds("torch.distributed.fsdp", "fsdp")      # a package of others, said where it is used

    @holds("exchange")                                  # this function, and functions inside of it, differ from their module
    def _bring(self, ...): ...

    @holds(CALLER)                                      # makes buffers for others: who calls it decides
    def buffer(self, ...): ...

Whoever counts walks up the Python stack, innermost frame first, and takes the first word (`category`). Saying costs nothing at run
time: `holds` notes the function's code object and returns the function as it is, so a declaration moves with what it is about.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import cache
from types import CodeType, FrameType
from typing import Any, TypeVar

CATEGORIES = {
    "parameters": "weights (this rank's shard)",
    "gradients": "gradients of the weights",
    "optimizer": "AdamW's averages",
    "fsdp": "weights gathered for a layer, gradients on their way to their shards",
    "kept": "activations kept for backward, and pieces on their way to or from the store",
    "residual": "the residual stream and its gradient",
    "attention": "q, k, v, output and gradients of an attention stage",
    "exchange": "heads on their way to and from attention (all-to-all, ring)",
    "tile": "a tile of norms, projections and MLP, with its gradients",
    "loss": "a tile of logits, and the gradient of the head",
    "workspace": "what attention and matrix products need inside",
    "slack": "what the allocator holds and nobody uses",
    "context": "the CUDA context",
    "other": "everything else",
}
PHASES = ("load", "forward", "loss", "backward", "step")
CALLER = "caller"  # in place of a category

Function = TypeVar("Function", bound=Callable[..., Any])
_functions: dict[tuple[str, int, str], str] = {}  # file, first line and name of a code object
_modules: dict[str, str] = {}  # dotted name of a module or package


def holds(word: str) -> Callable[[Function], Function]:
    """What a function allocates."""
    _check(word)

    def declare(function: Function) -> Function:
        _declare(inspect.unwrap(function).__code__, word)
        return function

    return declare


def module_holds(name: str, word: str) -> None:
    """What the functions of a module allocate, or of all modules of a package, where nothing nearer to them says otherwise."""
    _check(word)
    _modules[name] = word
    _word_of_module.cache_clear()


def category(frames: Iterable[FrameType]) -> str:
    """Of an allocation. frames: who asked for it, innermost first."""
    words = (word_of(frame) for frame in frames)
    return next((word for word in words if word not in (None, CALLER)), None) or "other"


def word_of(frame: FrameType) -> str | None:
    """What the code of a frame holds: a category, CALLER, or None where nobody said."""
    code = frame.f_code
    word = _functions.get((code.co_filename, code.co_firstlineno, code.co_name))
    return word or _word_of_module(frame.f_globals.get("__name__", ""))


@cache
def _word_of_module(name: str) -> str | None:
    while name and name not in _modules:
        name = name.rpartition(".")[0]
    return _modules.get(name)


def _declare(code: CodeType, word: str) -> None:
    _functions[code.co_filename, code.co_firstlineno, code.co_name] = word
    for inside in code.co_consts:
        if isinstance(inside, CodeType):
            _declare(inside, word)


def _check(word: str) -> None:
    if word not in CATEGORIES and word != CALLER:
        raise ValueError(f"{word!r} is no category of memory; known: {', '.join([*CATEGORIES, CALLER])}")
