"""A whole case by the kernel that real ranks are compared by; on the CPU."""

from __future__ import annotations

import os

import pytest

from ithaca.stack import Stack
from ithaca.verify.case import Case

from .formula import run_exactly


@pytest.mark.parametrize("model", ["gemma3", *(["mixtral"] if os.environ.get("ITHACA_FAMILIES") == "long" else [])])
def test_a_whole_case(workers, model: str):
    case = Case(model, Stack(ulysses=2, ring=2, heads_per_stage=1, store="host", tile=61), 4, length=251, packed=True)
    items = workers.run(run_exactly, case, ("logits", "case"), world=4)[0]
    assert items and [(item.name, item.error) for item in items if not item.ok] == []
