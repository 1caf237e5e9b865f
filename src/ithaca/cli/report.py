"""`ithaca report RUN`: a run, or a plan, a ladder, a profile, as one HTML page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

_HELP = """\
Writes one HTML page that works offline: what ran and how it ended, the plan beside the measurement, memory by category and over
time, the curves of training, evaluations, kernels, settings with their reasons, data, and the machine. Works while a run goes on,
and after one that failed. Of two run folders the page is the first one's, with the second beside it.

From a run folder it takes config.yaml, metrics.jsonl and status.json, and plan.json, ladder.json and profile.json where they are.
JSON files may also be given by themselves, or beside the folder to use instead of those in it.

examples:
  ithaca report runs/mine
  ithaca report runs/mine --out mine.html --open
  ithaca report runs/mine runs/other
  ithaca report plan.json ladder.json
"""


def add_report(verbs: Any) -> None:
    parser = verbs.add_parser(
        "report",
        help="write a page about a run, a plan, a ladder or a profile",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=_report)
    parser.add_argument(
        "inputs", metavar="RUN", nargs="+", type=Path, help="a run folder, or two; or JSON of a plan, ladder, profile"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="file to write (default: RUN/report/index.html; of two runs RUN/report/with-OTHER.html; for JSON files report.html)",
    )
    parser.add_argument("--open", action="store_true", help="show it in the browser")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")


def _report(options: argparse.Namespace) -> int:
    from ..base.files import descriptor
    from ..base.units import format_bytes
    from ..observe.report import page_of, read_inputs, write_page

    inputs = read_inputs(options.inputs)
    page = page_of(inputs)
    out = write_page(options.out, page, inputs.run, inputs.other and inputs.other.run)
    beside = descriptor(out) is None and out.is_file()  # else the page may have gone to the standard output
    print(f"wrote {out} ({format_bytes(len(page.encode()))})", file=sys.stdout if beside else sys.stderr)
    if options.open:
        _open(out)
    return 0


def _open(page: Path) -> None:
    import webbrowser

    if not webbrowser.open(page.resolve().as_uri()):
        print("no browser was found here; open the file on a machine that has one")
