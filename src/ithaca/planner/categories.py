"""What holds memory: the words that plan, dry run, ladder and profile share, and how an allocation gets its word.

An allocation is told by the code that made it: `category` looks at the frames of its Python stack, innermost first, and takes the
first that the table knows. The dry run asks with live frames, the profile with those of torch's memory snapshot, and both therefore
agree.
"""

from __future__ import annotations

from collections.abc import Iterable

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

# (end of the file's path, function or None for any) -> category. The innermost frame that is found decides.
_FRAMES: dict[tuple[str, str | None], str] = {
    ("engine/attention/stages.py", "to_heads"): "attention",
    ("engine/attention/stages.py", "gathered"): "attention",
    ("engine/attention/stages.py", "buffer"): "",  # by its caller
    ("engine/attention/stages.py", "_fresh"): "",
    ("engine/attention/stages.py", "to_tokens"): "exchange",
    ("engine/attention/stages.py", "_bring"): "exchange",
    ("engine/attention/stages.py", "bring"): "exchange",
    ("engine/attention/stages.py", None): "attention",
    ("ithaca/engine/comm.py", None): "exchange",
    ("engine/attention/ring.py", None): "attention",
    ("engine/attention/segments.py", None): "attention",
    ("engine/attention/backends.py", None): "attention",
    ("cute/interface.py", None): "workspace",
    ("engine/layer/tokens.py", "add_dh"): "residual",
    ("engine/layer/tokens.py", None): "tile",
    ("engine/layer/streamed.py", "add_dh"): "residual",
    ("engine/layer/streamed.py", "_after_forward"): "residual",
    ("engine/layer/streamed.py", "backward"): "residual",
    ("engine/layer/streamed.py", None): "kept",
    ("engine/layer/composed.py", "__init__"): "kept",
    ("engine/layer/composed.py", "_after_forward"): "residual",
    ("engine/layer/composed.py", "backward"): "residual",
    ("engine/model/projection.py", None): "tile",
    ("engine/model/rope.py", None): "tile",
    ("engine/tiling.py", None): "",  # gradients of whatever asks for them
    ("engine/offload/packing.py", None): "",
    ("engine/objective/kernel.py", None): "loss",
    ("engine/objective/cross_entropy.py", None): "loss",
    ("engine/offload/store.py", None): "kept",
    ("engine/offload/host.py", None): "kept",
    ("engine/offload/disk.py", None): "kept",
    ("planner/dry_run/store.py", None): "kept",
    ("planner/dry_run/run.py", "workspace"): "workspace",
    ("torch/optim", None): "optimizer",
    ("distributed/fsdp", None): "fsdp",
    ("ithaca/engine/run.py", "_hidden"): "residual",
    ("training/step.py", None): "gradients",
    ("engine/optimizer.py", None): "gradients",
}


def category(frames: Iterable[tuple[str, str]]) -> str:
    """frames: (file, function), innermost first."""
    for file, function in frames:
        for known in _known(file):
            found = _FRAMES.get((known, function), _FRAMES.get((known, None)))
            if found:
                return found
    return "other"


def passes(file: str, function: str) -> bool:
    """Whether an allocation here is its caller's business: a helper that makes buffers for others."""
    return any(_FRAMES.get((known, function), _FRAMES.get((known, None))) == "" for known in _known(file))


_files: dict[str, list[str]] = {}


def _known(file: str) -> list[str]:
    if file not in _files:
        names = dict.fromkeys(name for name, _ in _FRAMES)
        _files[file] = [name for name in names if file.endswith(name) or (not name.endswith(".py") and name in file)]
    return _files[file]
