"""Why this stack: a sentence for each of its fields that matters."""

from __future__ import annotations

from typing import Any

from ..base.units import format_bytes
from .plan import Plan


def reasons_of(plan: Plan, pinned: dict[str, Any], kernel: str | None) -> list[tuple[str, Any, str]]:
    """One reason for each field of the stack that matters. pinned: fields that were given. kernel: the one that was given."""
    stack, gpu = plan.stack, plan.hardware.gpu
    tried = "" if not plan.executed else ", of a few that are tried"
    reasons = []

    def because(name: str, why: str) -> None:
        reasons.append((name, stack.words(name), "given" if name in pinned else why))

    if stack.ulysses > 1 or "ulysses" in pinned:
        because(
            "ulysses",
            f"{stack.ulysses} GPUs of a machine share the sequence by heads: 1/{stack.ulysses} of its activations each",
        )
    if stack.ring > 1 or "ring" in pinned:
        because("ring", "the GPUs that are left share it by passing keys and values around")
    if stack.recompute == "none":
        because("recompute", "activations fit as they are: nothing is computed twice")
    elif stack.recompute == "keep_attention":
        because("recompute", "attention is the expensive part and its output is kept; the rest is computed again")
    elif stack.recompute == "layer":
        because("recompute", "there is no room for attention outputs: backward attends once more")
    else:
        whole, keeps = (stack.recompute.count(kind) for kind in ("none", "keep_attention"))
        text = f"there is room for the attention outputs of {keeps} layers; the others attend once more"
        if whole:
            text = f"there is room for all activations of {whole} layers; of the others all but attention is computed again"
        because("recompute", text)
    room = format_bytes(plan.memory.disk or plan.memory.host - plan.memory.offloaded)
    why = {
        "gpu": "kept activations fit on the GPU",
        "host": f"{room} of kept activations a GPU wait in pinned host memory",
        "disk": f"{room} of kept activations a GPU wait on disk: host memory is too small",
    }[stack.offload]
    because("store", why + ("; there is no room for the others" if isinstance(stack.store, tuple) else ""))
    if stack.tile is not None or "tile" in pinned:
        because("tile", f"the longest tiles that fit{tried}: norms, MLP and loss hold one tile at a time")
    if stack.heads_per_stage is not None or "heads_per_stage" in pinned:
        why = f"as many heads at a time as fit{tried}: attention buffers follow it"
        if isinstance(stack.recompute, tuple):
            why = "attention buffers follow it; more heads at a time would leave room for fewer attention outputs"
        because("heads_per_stage", why)
    if stack.hold is not None:
        because(
            "hold",
            "what a layer reads again stays on the GPU"
            if stack.hold
            else "no room to hold a layer's input: it is read again",
        )
    kernels = list(dict.fromkeys(plan.job.kernel_of(layer) for layer in range(plan.job.model.layers)))
    why = f"what the engine takes on {gpu.name}" if kernel is None else "given"
    reasons.append(("attention", " and ".join(kernels), why + ("" if gpu.measured else ", rate not measured there")))
    return reasons
