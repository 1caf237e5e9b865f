"""The JSON Schema of the YAML: takes every run that the repository has, and refuses what `load` refuses of a single value."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ithaca.cli.main import main
from ithaca.config import dump, load, recipe_names, recipe_text
from ithaca.config.json_schema import json_schema

from ..fuzz.options import settings, wrong_values
from .runs import GOOD

ROOT = Path(__file__).parents[2]
TYPES: dict[str, Any] = {
    "object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int, "number": (int, float),
}  # fmt: skip
CHECKED = {
    "anyOf", "const", "enum", "type", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "items",
    "prefixItems", "minItems", "maxItems", "properties", "additionalProperties", "$ref",
}  # fmt: skip
SAID = {"description", "default", "title", "$schema", "$defs"}


def fits(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    """The part of JSON Schema that ours is written in; a word that is not known here is an error."""
    assert not schema.keys() - CHECKED - SAID, schema
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    if "anyOf" in schema and not any(fits(value, each, root) for each in schema["anyOf"]):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    names = schema.get("type", [])
    for_type = [names] if isinstance(names, str) else names
    if for_type and not any(
        isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool)) for name in for_type
    ):
        return False
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return False
    if isinstance(value, int | float):
        limits = [
            value >= schema.get("minimum", value), value <= schema.get("maximum", value),
            value > schema.get("exclusiveMinimum", value - 1), value < schema.get("exclusiveMaximum", value + 1),
        ]  # fmt: skip
        return all(limits)
    if isinstance(value, list):
        inner = schema.get("prefixItems") or [schema.get("items", {})] * len(value)
        size = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return size and all(fits(item, each, root) for item, each in zip(value, inner, strict=False))
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        return value.keys() <= known.keys() and all(fits(item, known[name], root) for name, item in value.items())
    return True


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json.loads(json.dumps(json_schema()))


def taken(text: str, schema: dict[str, Any]) -> bool:
    return fits(yaml.safe_load(text), schema, schema)


def test_every_run_of_the_repository_fits(schema: dict[str, Any]):
    texts = {f"recipe {name}": recipe_text(name) for name in recipe_names()}
    for page in (*ROOT.glob("docs/**/*.md"), ROOT / "README.md"):
        blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        texts |= {f"{page.name} {number}": block for number, block in enumerate(blocks)}
    texts |= {f"{name} written out": dump(load(None, [], name).config) for name in recipe_names()}
    texts["a small one"] = GOOD
    assert len(texts) >= 2 * len(recipe_names()) + 3
    for name, text in texts.items():
        assert taken(text, schema), name


def test_what_load_refuses_of_a_value_is_refused(schema: dict[str, Any]):
    refused = 0
    for path, kind, facts in settings():
        for text in wrong_values(kind, facts):
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError:
                continue  # tags of Python
            if value in ("1e999", float("inf")) or (isinstance(value, int) and abs(value) >= 2**63):
                continue  # how large a number may be is left to `load`
            for name in reversed(path.split(".")):
                value = {name: value}
            assert not fits(value, schema, schema), f"{path}: {text}"
            refused += 1
    assert refused > 200


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("data: {context: 64K}", True),
        ("data: {context: 64Q}", False),
        ("data: {sources: a.jsonl}", True),
        ("data: {sources: [a.jsonl, {path: b, weight: 2}]}", True),
        ("data: {sources: [{pth: b}]}", False),
        ("launch: {gpu_memory: 80GB}", True),
        ("launch: {gpu_memory: 80G}", False),
        ("stack: auto", True),
        ("stack: {recompute: 6 layer + 10 keep_attention, store: [host, gpu]}", True),
        ("stack: {engine: fast}", False),
        ("train: {lr: 1e-5, warmup: 0.1, betas: [0.9, 0.95]}", True),
        ("train: {betas: [0.9]}", False),
        ("train: {stepss: 3}", False),
        ("model: {lora: null}", True),
        ("model: {lora: {}}", True),
        ("model: null", True),
        ("eval: {tasks: needle}", True),
        ("eval: {tasks: [needles]}", False),
        ("recipe: tiny_cpu", True),
        ("trian: {steps: 3}", False),
    ],
)
def test_single_values(schema: dict[str, Any], text: str, good: bool):
    assert taken(text, schema) is good


def test_the_command_prints_it(schema: dict[str, Any], capsys: pytest.CaptureFixture[str]):
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema
    steps = schema["$defs"]["Train"]["properties"]["steps"]
    assert steps["description"].startswith("Optimizer steps of the whole run") and steps["default"] == 0
