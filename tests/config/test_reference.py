"""docs/reference/config.md is what the schema says today."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from ithaca import Stack
from ithaca.config.option import about, docstrings, kinds
from ithaca.config.reference import reference
from ithaca.config.schema import Config
from ithaca.config.suggest import paths

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "config.md"


def test_the_page_is_current():
    assert PAGE.read_text(encoding="utf-8") == reference(), (
        "run: python -m ithaca.config.reference > docs/reference/config.md"
    )


def test_every_field_is_on_the_page_with_an_explanation():
    page = reference()
    wanted = [each for each in paths() if not each.startswith("eval.sources[]")]
    assert len(wanted) > 80 and all(f"| `{each}` |" in page for each in wanted)

    def explained(cls: type) -> int:
        count = 0
        for each in fields(cls):
            inner = kinds(cls)[each.name].section
            assert inner is not None or len(about(cls, each)["help"]) > 8, (cls, each.name)
            count += 1 + (explained(inner) if inner else 0)
        return count

    assert explained(Config) > 80


def test_the_explanations_of_the_stack_are_its_own_docstrings():
    found = docstrings(Stack)
    assert set(found) == {each.name for each in fields(Stack)}
    assert found["heads_per_stage"].startswith("Untied Ulysses: query heads per rank and stage.")
    assert "tile" in found  # option.about names this field: its sizes are tokens


def test_the_config_is_light_to_import():
    program = "import sys, ithaca.config as c; c.load(None, recipe='tiny_cpu'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
