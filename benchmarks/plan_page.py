"""How long the page of plans waits for an answer: every preset with arithmetic, at contexts from short to too long.

    python benchmarks/plan_page.py [--gpus 8xH100-80GB] [--limit 0.3]

Asked through the server, as the page asks, each question once (answers are remembered) and behind a first one that warms it up.
Time is that of the processor, which on an idle machine is what one waits; the wall's is printed too. What is above the limit is
listed; the exit code says whether anything is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from statistics import median
from urllib.parse import urlencode
from urllib.request import urlopen

from ithaca.engine.model.families import FAMILIES
from ithaca.engine.model.presets import PRESETS
from ithaca.observe.plans.server import Server

CONTEXTS = ("64K", "256K", "1M", "2M", "3M", "4M", "6M", "8M", "16M")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", nargs="+", default=["1xH200", "8xH100-80GB", "2x8xH200"])
    parser.add_argument(
        "--limit", type=float, default=0.3, help="seconds that an answer may take (default %(default)s)"
    )
    options = parser.parse_args()
    models = [
        name for name, config in PRESETS.items() if config["model_type"] in FAMILIES and not name.startswith("tiny_")
    ]
    took: dict[tuple[str, str, str], float] = {}
    waited: list[float] = []
    with Server({}) as server:

        def ask(**words: str) -> dict:
            with urlopen(f"{server.url}plan?{urlencode(words)}") as answer:
                return json.loads(answer.read())

        ask(model="llama32_1b", gpus="1xH100", context="8K")
        for model in models:
            for gpus in options.gpus:
                for context in CONTEXTS:
                    begin, wall = time.process_time(), time.perf_counter()
                    found = ask(model=model, gpus=gpus, context=context)
                    took[model, gpus, context] = time.process_time() - begin
                    waited.append(time.perf_counter() - wall)
                    assert "answer" in found, found
    times = sorted(took.values())
    share = sum(seconds <= options.limit for seconds in times) / len(times)
    most = times[int(0.95 * len(times))]
    print(f"{len(times)} answers: median {_ms(median(times))}, 95% within {_ms(most)}, longest {_ms(times[-1])}")
    print(f"{share:.1%} within {_ms(options.limit)}; by the wall's clock the median is {_ms(median(waited))}")
    for words, seconds in sorted(took.items(), key=lambda each: -each[1]):
        if seconds > options.limit:
            print(f"  {_ms(seconds):>8}  {' '.join(words)}")
    return int(times[-1] > options.limit)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"


if __name__ == "__main__":
    sys.exit(main())
