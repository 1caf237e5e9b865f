"""Runs a function of a config as `ithaca train` runs: bare, under torchrun or srun. It gets the config and returns an exit code.

python -m ithaca.training.launch module:function CONFIG [--section.field VALUE ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ...base.exits import CONFIG
from ...base.processes.signals import StoppedEarly
from ...config import load, split_overrides
from .decision import start


def main(arguments: Sequence[str]) -> int:
    try:
        words, overrides = split_overrides(arguments)
        if len(words) != 2:
            raise ValueError(
                "usage: python -m ithaca.training.launch module:function CONFIG [--section.field VALUE ...]"
            )
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
