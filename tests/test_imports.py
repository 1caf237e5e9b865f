"""Benchmarks, examples and the tests for GPUs are imported here, so that no rename leaves them behind where they never run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [path for folder in ("benchmarks", "examples", "tests/gpu") for path in sorted((ROOT / folder).glob("*.py"))]


@contextmanager
def packages_may_be_missing() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in ("triton", "flash_attn", "trl", "datasets"):
            raise


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_it_imports(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(path.parent)  # as Python does with a script's own folder
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    with packages_may_be_missing():
        spec.loader.exec_module(module)
    for node in ast.walk(ast.parse(path.read_text())):  # those inside functions too
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ithaca":
            with packages_may_be_missing():
                source = importlib.import_module(node.module or "")
                for alias in node.names:
                    if not hasattr(source, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")


def test_there_are_some():
    assert len(FILES) > 20
