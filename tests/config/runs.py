"""A small run, read from a file in the current folder, and what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ithaca.config import load
from ithaca.config.schema import Config

GOOD = """\
model:
  folder: models/x
data:
  context: 64K
  sources: [a.jsonl]
train:
  steps: 10
  warmup: 2
"""


def run(text: str, *overrides: str, recipe: str | None = None) -> Config:
    Path("run.yaml").write_text(text)
    return load("run.yaml", overrides, recipe).config


def mistakes(text: str, *overrides: str) -> list[str]:
    """The problems of a run, one a line."""
    with pytest.raises(ValueError) as error:
        run(text, *overrides)
    head, _, rest = str(error.value).partition("\n")
    if not rest:
        return [head.removeprefix("the configuration cannot be used: ")]
    lines = [line.removeprefix("  - ") for line in rest.splitlines()]
    assert head == f"the configuration cannot be used: {len(lines)} problems"
    return lines
