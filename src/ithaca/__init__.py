"""ithaca: trains Hugging Face decoder models at millions of tokens of context, exactly.

stack = ithaca.Stack(ulysses=8, heads_per_stage=1, recompute="keep_attention", store="host", tile=4096)
run = ithaca.prepare(model, stack)
batch = run.shard(input_ids, labels=labels, documents=None)
loss = run.loss(batch)
loss.backward()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .stack import Stack

if TYPE_CHECKING:
    from .run import Batch, Run, prepare

__version__ = "0.1.0"
__all__ = ["Batch", "Run", "Stack", "prepare"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; `ithaca --help` and a planner should not pay for it
    if name in ("Batch", "Run", "prepare"):
        from . import run

        return getattr(run, name)
    raise AttributeError(f"module 'ithaca' has no attribute {name!r}")
