"""`ithaca`: the command line. A verb is a function; what it needs is imported when it runs.

Exit codes: 0 done, 1 a check failed, 2 the request cannot be carried out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from .doctor import add_doctor
from .recipes import add_recipes
from .verify import add_verify


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ithaca",
        description="Trains Hugging Face decoder models at millions of tokens of context, exactly.",
        epilog="Run 'ithaca VERB --help' for the options of a verb.",
    )
    parser.add_argument("--version", action="version", version=f"ithaca {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    add_verify(verbs)
    add_recipes(verbs)
    add_doctor(verbs)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError) as error:
        if options.traceback:
            raise
        print(f"ithaca {options.verb}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"ithaca {options.verb}: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
