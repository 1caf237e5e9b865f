"""`python -m ithaca.launch module:function CONFIG [--section.field VALUE ...]`: run a function of a config as `ithaca train` runs.

Bare, under torchrun (`torchrun ... -m ithaca.launch ...`) or under srun. The function gets the config and returns an exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..config import load, split_overrides
from .decision import start
from .exits import CONFIG
from .stop import StoppedEarly


def main(arguments: Sequence[str]) -> int:
    try:
        words, overrides = split_overrides(arguments)
        if len(words) != 2:
            raise ValueError("usage: python -m ithaca.launch module:function CONFIG [--section.field VALUE ...]")
        function, path = words
        return start(load(path, overrides).config, function)
    except StoppedEarly as stopped:
        print(f"ithaca: {stopped}", file=sys.stderr)
        return stopped.exit_code
    except (ValueError, OSError) as error:
        print(f"ithaca: {error}", file=sys.stderr)
        return CONFIG


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
