"""Long context inside the trainers people have: `Trainer` of transformers, and `SFTTrainer`, `DPOTrainer` and `GRPOTrainer` of TRL,
each with one more argument.

    from ithaca.integrations import SFTTrainer
    trainer = SFTTrainer(model, args, train_dataset=data, stack=ithaca.Stack(ulysses=8))

`LongContext` makes the same of a trainer of your own: `class Mine(LongContext, MyTrainer)`. docs/guides/trainers.md is the guide.

    trainer   the mixin: what of a trainer has to know that ranks share a sequence
    batches   what a data collator makes, as every rank needs it: the whole batch, documents instead of masks
    sft, dpo, grpo   TRL's
    options   settings that contradict a stack, each with its remedy
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .dpo import DPOTrainer
    from .grpo import GRPOTrainer
    from .sft import SFTTrainer
    from .trainer import LongContext, Trainer

__all__ = ["DPOTrainer", "GRPOTrainer", "LongContext", "SFTTrainer", "Trainer"]
_OF_TRL = {"DPOTrainer": ".dpo", "GRPOTrainer": ".grpo", "SFTTrainer": ".sft"}


def __getattr__(name: str) -> Any:
    # each needs a package of its own: accelerate, or TRL
    if name not in __all__:
        raise AttributeError(f"module 'ithaca.integrations' has no attribute {name!r}")
    from importlib import import_module

    where, extra = (_OF_TRL[name], "trl") if name in _OF_TRL else (".trainer", "trainer")
    try:
        return getattr(import_module(where, __name__), name)
    except ModuleNotFoundError as error:
        if error.name not in ("accelerate", "trl", "datasets"):
            raise
        raise ImportError(
            f"ithaca.integrations.{name} needs the package {error.name}; pip install 'ithaca[{extra}]'"
        ) from error
