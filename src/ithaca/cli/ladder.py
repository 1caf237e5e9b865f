"""`ithaca ladder`: what each technique takes away on the user's own model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

_HELP = """\
Adds one technique after the other (FSDP, Ulysses, checkpointing, offload, tiling, Untied Ulysses, streamed layer) and shows the
peak of a GPU at each rung, what holds most of it, and how fast it would be. Predicted; needs no GPU.

  ithaca ladder llama3_8b --gpus 8xH100-80GB --context 3M --svg ladder.svg
"""


def add_ladder(verbs: Any) -> None:
    parser = verbs.add_parser(
        "ladder",
        help="show what each technique takes away, rung by rung",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_ladder, traceback=False)
    parser.add_argument(
        "model", metavar="MODEL", help="a folder with config.json, that file, or a preset (ithaca plan --help)"
    )
    parser.add_argument("--gpus", required=True, help="such as 8xH100-80GB")
    parser.add_argument("--context", required=True, help="tokens of a row, such as 1M")
    parser.add_argument("--kernel", help="attention kernel: fa4, cudnn or flash (default: the GPU's fastest)")
    parser.add_argument("--json", action="store_true", help="print the ladder as JSON")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="also draw it")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write it as a page")


def run_ladder(options: argparse.Namespace) -> int:
    from ..planner.chart import ladder_svg
    from ..planner.ladder import describe, ladder

    found = ladder(options.model, gpus=options.gpus, context=options.context, kernel=options.kernel)
    whole = found.json()
    if options.svg:
        options.svg.write_text(ladder_svg(whole))
    if options.html:
        from ..report import write_report

        write_report(options.html, ladder=whole)
    print(json.dumps(whole, indent=1) if options.json else "\n".join(describe(found)))
    return 0
