"""Measures one case in a process of its own: `python -m ithaca.observe.profiler < wanted.json`. The last line is the answer.

A case that runs out of memory, or is killed for it, takes nothing with it, and what it allocated is gone when it ends. Exit codes
are those of a run (base/exits.py).
"""

from __future__ import annotations

import json
import sys
from statistics import median

from ...base.exits import code_of
from .measure import measure
from .wanted import Wanted


def main() -> int:
    wanted = Wanted.read(json.load(sys.stdin))
    try:
        measured = measure(wanted)
    except Exception as error:
        print(str(error).splitlines()[0] if str(error) else type(error).__name__, file=sys.stderr)
        return code_of(error)
    seconds = median(step["seconds"] for step in measured.steps if step["seconds"] is not None)
    peaks = [step["peak"] for step in measured.steps if step["peak"] is not None]
    tensors = max(peaks) if peaks else measured.account.peak
    answer = {
        "peak": tensors + sum(measured.around.values()),
        "tensors": tensors,
        "tokens_per_second": measured.tokens / seconds,
        "seconds": seconds,
        "categories": measured.account.categories,
        "device": measured.device,
        "kernel": measured.kernels_of,
    }
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
