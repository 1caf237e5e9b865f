"""ithaca: trains Hugging Face decoder models at millions of tokens of context, exactly.

stack = ithaca.Stack(ulysses=8, heads_per_stage=1, recompute="keep_attention", store="host", tile=4096)
run = ithaca.prepare(model, stack)
batch = run.shard(input_ids, labels=labels, documents=None)
loss = run.loss(batch)
loss.backward()

ithaca.train("run.yaml") trains as the command line does.
ithaca.plan("llama3_8b", gpus="8xH100-80GB", context="1M").stack says which stack is the fastest that fits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .stack import Stack

if TYPE_CHECKING:
    from .engine.batch import Batch
    from .engine.parallelize import prepare
    from .engine.run import Run
    from .planner.plan import Plan
    from .planner.search import plan
    from .training.entry import Trained, train

__version__ = "0.1.0"
__all__ = ["Batch", "Plan", "Run", "Stack", "Trained", "plan", "prepare", "train"]


_WHERE = {
    "Batch": "engine.batch",
    "Plan": "planner.plan",
    "Run": "engine.run",
    "Trained": "training.entry",
    "plan": "planner.search",
    "prepare": "engine.parallelize",
    "train": "training.entry",
}


def __getattr__(name: str) -> Any:
    # torch takes seconds to import; `ithaca --help` and a planner should not pay for it
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    raise AttributeError(f"module 'ithaca' has no attribute {name!r}")
