"""Writing a config down and reading it back: equal, for every recipe and for configs drawn at random."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from ithaca import Stack
from ithaca.config import Config, StackOptions, dump, load, recipe_names, violations
from ithaca.config.option import Kind, about, kinds

TEXTS = [
    "x", "a/b-c.d", "none", "null", "yes", "1", "1e5", "", " ", "a: b", "# c", "- d", "*e", "&f", "!g", '"q"', "it's", "ä → 😀",
    "two\nlines", "tab\t", "~", "{}", "[a]", "a,b", "0x1F", ".5", "trailing ", "%", "@", "|", ">", "<<", "auto", "\\n",
]  # fmt: skip


def some(kind: Kind, facts: dict[str, Any], chance: random.Random) -> Any:
    """A value of a field, often an unusual one."""
    if kind.optional and chance.random() < 0.4:
        return None
    if facts.get("choices") and not kind.items:
        return chance.choice(facts["choices"])
    if kind.section is not None:
        return a_section(kind.section, chance)
    if kind.items and (not kind.scalars or chance.random() < 0.3):
        count = kind.length or chance.randint(0, 3)
        return tuple(some(kind.items[i if kind.length else 0], facts, chance) for i in range(count))
    scalar = chance.choice(kind.scalars)
    if scalar is str:
        text = chance.choice(TEXTS)
        return "x" + text if facts.get("path") else text  # ~ is expanded in paths
    if scalar is bool:
        return chance.random() < 0.5
    if scalar is int:
        return chance.choice([0, 1, 7, 1024, 2**40]) if facts.get("unit") else chance.choice([-3, 0, 1, 12345, 10**15])
    return chance.choice([0.0, 1.0, 1e-5, 3.3e-300, 123456.789, 0.1, -2.5, 1e22])


def a_section(cls: type, chance: random.Random) -> Any:
    if issubclass(cls, StackOptions):
        made = {each.name: some(kinds(cls)[each.name], about(cls, each), chance) for each in fields(cls)}
        stack = Stack(**{each.name: made[each.name] for each in fields(Stack)})
        return StackOptions(scratch=made["scratch"]) if made["auto"] else StackOptions.of(stack, made["scratch"])
    return cls(**{each.name: some(kinds(cls)[each.name], about(cls, each), chance) for each in fields(cls)})


def read(text: str, path: Path) -> Config:
    """The config of a text, without the checks between fields: random values seldom pass them."""
    from ithaca.config.nodes import read_file
    from ithaca.config.read import Reader, build

    path.write_text(text, encoding="utf-8")
    problems: list[str] = []
    tree = read_file(path, "x", problems)
    assert tree is not None, problems
    reader = Reader(problems)
    assert reader.top(tree) is None
    config = build(Config, reader.given, "", reader.failed, problems)
    assert problems == []
    return config


def test_random_configs_come_back_equal(tmp_path: Path):
    chance = random.Random(7)
    seen: set[Any] = set()
    for _ in range(25):
        config = a_section(Config, chance)
        text = dump(config)
        assert read(text, tmp_path / "config.yaml") == config
        plain = yaml.safe_load(text)  # other readers can read it too
        assert set(plain) == {each.name for each in fields(Config)}
        assert (plain["description"], plain["train"]["lr"]) == (config.description, config.train.lr)
        seen |= {config.description, config.stack.auto, config.model.lora is None, config.model.rope is None}
    assert {True, False} <= seen and len(seen) > 20  # the draw reached both sides of the switches, and most texts


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_come_back_equal(tmp_path: Path, name: str):
    loaded = load(None, recipe=name)
    path = tmp_path / "config.yaml"
    for text in (loaded.text, dump(loaded.config)):
        path.write_text(text)
        assert load(path).config == loaded.config
    plain = yaml.safe_load(loaded.text)
    assert plain["data"]["context"] == loaded.config.data.context and plain["train"]["lr"] == loaded.config.train.lr


def test_origins_are_comments(tmp_path: Path):
    path = tmp_path / "odd\nname: {.yaml"
    path.write_text("recipe: tiny_cpu\ntrain: {rows: 8}\n")
    text = load(path, ["train.steps=30", "stack=auto"]).text
    assert "\n  steps: 30  # --train.steps\n" in text and "\nstack: auto  # --stack\n" in text
    assert f"\n  rows: 8  # {tmp_path}/odd?name: {{.yaml:2\n" in text
    assert "\n  lr: 0.01  # recipe tiny_cpu:" in text and "\n  clip: 1.0\n" in text
    copy = tmp_path / "copy.yaml"
    copy.write_text(text)
    assert load(copy).config == load(path, ["train.steps=30", "stack=auto"]).config


def test_auto_is_written_down_as_what_it_became(tmp_path: Path):
    config = load(None, ["stack=auto"], "tiny_cpu").config
    assert "\nstack: auto\n" in dump(config)
    chosen = replace(config, stack=StackOptions.of(Stack(ulysses=4), config.stack.scratch))
    path = tmp_path / "config.yaml"
    path.write_text(dump(chosen))
    assert load(path).config.stack.chosen == Stack(ulysses=4) and violations(chosen) == []
