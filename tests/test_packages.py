"""The order of the packages: each imports from those before it, never from those behind it, and no two modules need each other."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ithaca

ROOT = Path(ithaca.__file__).parent
# Bottom to top. stack.py is what a user asks for.
ORDER = (
    "base",
    "stack",
    "config",
    "engine",
    "planner",
    "data",
    "storage",
    "observe",
    "evaluation",
    "verify",
    "training",
    "integrations",
    "cli",
)
# Inside the engine: an order of its own.
ENGINE = (
    "limits", "mesh", "comm", "ranks", "sequence", "model", "job", "tiling", "attention", "offload", "cost", "layer", "objective",
)  # fmt: skip


def modules(root: Path = ROOT) -> dict[str, Path]:
    """By dotted name without the package's own; "" is ithaca/__init__.py."""
    found = {}
    for path in root.rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(name: str, *, lazy: bool) -> set[str]:
    """Modules of ithaca that this one imports. lazy: also inside functions; what only a type checker reads never counts."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in package if part]
    found = set()

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.ImportFrom) and (child.level or (child.module or "").startswith("ithaca")):
                before = package[: len(package) - child.level + 1] if child.level else []
                parts = child.module.split(".")[0 if child.level else 1 :] if child.module else []
                source = ".".join([*before, *parts])
                whole = [".".join(filter(None, (source, alias.name))) for alias in child.names]
                found.update(each if each in MODULES else source for each in whole)
            elif lazy or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                walk(child)

    walk(parsed(path))
    return found - {name}


def test_no_package_imports_one_behind_it():
    place = {name: at for at, name in enumerate(ORDER)}
    doors = {name.partition(".")[0] for name in MODULES} - {"", "__main__"}
    assert doors == set(ORDER), "a new package needs its place in the order"
    upward = [
        f"{name} imports {other}"
        for name in MODULES
        if (room := name.partition(".")[0]) in place
        for other in imports(name, lazy=True)
        if (there := other.partition(".")[0]) in place and place[there] > place[room]
    ]
    assert not upward


def test_inside_the_engine_neither():
    place = {name: at for at, name in enumerate(ENGINE)}
    upward = []
    for name in MODULES:
        room = name.split(".")[1] if name.startswith("engine.") else None
        for other in imports(name, lazy=True) if room in place else ():
            there = other.split(".")[1] if other.startswith("engine.") else None
            if there is not None and place.get(there, len(ENGINE)) > place[room]:
                upward.append(f"{name} imports {other}")
    assert not upward


def test_no_two_modules_need_each_other():
    TopologicalSorter({name: imports(name, lazy=True) & MODULES.keys() for name in MODULES}).prepare()


def test_a_cycle_would_be_noticed():
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()
    assert "engine.run" in imports("engine.parallelize", lazy=True)
    assert "training.launch.rendezvous" in imports("training.launch", lazy=False)


def test_light_to_import():
    """A package on the way to something that needs no torch imports none itself."""
    for name in ("", "base", "engine", "engine.model", "engine.attention", "engine.layer", "engine.offload", "engine.objective",
                 "planner", "observe"):  # fmt: skip
        assert imports(name, lazy=False) <= {"stack"}, name
