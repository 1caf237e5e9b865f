"""Links that were measured here go into plans for the same GPUs, and into no others."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ithaca.planner.links import FILE, Links, find_links, keep_links, links_file, read_links
from ithaca.planner.search import plan
from ithaca.planner.speed import LINK
from ithaca.planner.text import describe
from ithaca.stack import Stack

SLOW = Links("H100", 8, 1, 40e9, 50e9, 60e9, 70e9, "2026-11-17", "torch 2.11, NCCL 2.28.9")
STACK = Stack(ulysses=8, store="host", heads_per_stage=1)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FILE, str(tmp_path / "links.json"))
    return tmp_path / "links.json"


def planned(gpus: str = "8xH100-80GB", stack: Stack = STACK):
    return plan("llama3_8b", gpus=gpus, context="256K", stack=stack)


def test_where_it_is():
    assert links_file({"HOME": "/h"}) == Path("/h/.cache/ithaca/links.json")
    assert links_file({"HOME": "/h", "XDG_CACHE_HOME": "/c"}) == Path("/c/ithaca/links.json")
    assert links_file({"HOME": "/h", FILE: "/team/links.json"}) == Path("/team/links.json")
    assert links_file({"HOME": "/h", FILE: ""}) is None


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch):
    def nowhere(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nowhere)
    assert links_file({}) is None and read_links({}) == [] and keep_links(SLOW, {}) is None


def test_nobody_wants_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(FILE, "")
    assert keep_links(SLOW) is None and read_links() == []


def test_a_record_for_each_kind_and_number(kept: Path):
    fast, two = replace(SLOW, all_to_all=300e9), replace(SLOW, nodes=2)
    for links in (SLOW, two, fast):
        assert keep_links(links) == kept
    assert read_links() == [two, fast], "the newer one of the same"
    assert find_links("h100", 8, 1) == fast and find_links("H100", 8, 2) == two
    assert find_links("H100", 4, 1) is None and find_links("H200", 8, 1) is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "enclosed in double quotes"),
        ('{"gpu": 1}', "not a list"),
        (json.dumps([{**asdict(SLOW), "ring": -1.0}]), "ring is -1.0, not a number of bytes a second"),
        (json.dumps([{**asdict(SLOW), "nodes": 0}]), "nodes is 0"),
    ],
)
def test_a_damaged_file_is_named_and_mended(kept: Path, text: str, said: str):
    kept.write_text(text)
    with pytest.raises(ValueError, match=r"links\.json does not say how fast links are") as refused:
        planned()
    assert said in str(refused.value) and "ithaca doctor --links" in str(refused.value)
    keep_links(SLOW)
    assert read_links() == [SLOW]


def test_a_plan_counts_with_them(kept: Path):
    before = planned()
    assert "links were not measured (ithaca doctor --links)" in "\n".join(describe(before))
    keep_links(SLOW)
    after = planned()
    assert "links measured here on 2026-11-17" in "\n".join(describe(after))
    maker = before.hardware.gpu.nvlink * LINK
    ratio = after.speed.parts["links"] / before.speed.parts["links"]
    assert maker / 60e9 < ratio <= maker / 40e9  # the exchange is most of it
    assert after.memory == before.memory
    assert planned("4xH100-80GB", replace(STACK, ulysses=4)).hardware.links is None


@pytest.mark.parametrize(
    ("field", "stack"), [("ring", Stack(ring=8)), ("gather", Stack(ulysses=8)), ("reduce", Stack(ulysses=8))]
)
def test_each_rate_is_for_its_own(kept: Path, field: str, stack: Stack):
    keep_links(SLOW)
    slow = planned(stack=stack).speed.parts["links"]
    keep_links(replace(SLOW, **{field: 1e9}))
    assert planned(stack=stack).speed.parts["links"] > 1.5 * slow


def test_machines_apart_have_a_record_of_their_own(kept: Path):
    keep_links(SLOW)
    two = plan("llama3_8b", gpus="2x8xH100", context="256K", stack=Stack(ulysses=8, ring=2))
    assert two.hardware.links == SLOW and two.hardware.fabric is None
    assert "links measured here on 2026-11-17, between machines not" in "\n".join(describe(two))
    keep_links(replace(SLOW, nodes=2, ring=1e9))
    slower = plan("llama3_8b", gpus="2x8xH100", context="256K", stack=Stack(ulysses=8, ring=2))
    assert slower.speed.parts["links"] > 2 * two.speed.parts["links"]


def test_one_gpu_has_none(kept: Path):
    assert "links" not in "\n".join(describe(plan("llama32_1b", gpus="1xH100", context="64K")))
