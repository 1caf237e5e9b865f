"""How far bf16 gradients are from float32, beside the untouched bf16 model's, over several batches: one batch alone scatters."""

from __future__ import annotations

from ithaca.verify.case import Case, Session
from ithaca.verify.reference import distances

# wider than on the CPU, so that a gradient has more than a handful of numbers
WIDE = (("hidden_size", 448), ("head_dim", 32), ("intermediate_size", 512), ("vocab_size", 1024))


def ratios(case: Case, batches: int) -> dict[str, float]:
    """Of each parameter, and of all together (""). Collective; complete on rank 0 and empty elsewhere."""
    session = Session(case)
    squares: dict[str, list[float]] = {}
    for seed in range(batches):
        data = session.data(seed=seed)
        ours = session.measure([data])
        if session.reference is None:
            continue
        ours.gradients = {name: None if grad is None else grad.clone() for name, grad in ours.gradients.items()}
        batch = [(data.input_ids, data.labels, data.documents)]
        wide = session.reference.measure(session.reference.wide, batch)
        own = distances(session.reference.measure(session.reference.narrow, batch), wide)
        for name, error in distances(ours, wide).items():
            for key in (name, ""):
                before = squares.setdefault(key, [0.0, 0.0])
                before[0] += error**2
                before[1] += own[name] ** 2
    return {name: (ours / own) ** 0.5 for name, (ours, own) in squares.items()}
