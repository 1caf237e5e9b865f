"""Versions of other packages below which a file can run code, whatever we do.

pyproject.toml asks for newer ones. An environment that was put together by hand may not have them, so what reads files from
elsewhere asks here first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata

FLOORS = {
    "torch": ("2.10", "a crafted file corrupts memory, weights_only or not (CVE-2026-24747, CVE-2025-32434)"),
    "transformers": (
        "5.5",
        "the config.json of a model runs code without trust_remote_code (CVE-2026-4372, CVE-2026-5241)",
    ),
    "safetensors": ("0.8", "headers are not checked as ours are meant to be"),
    "datasets": ("4.0", "a Python script that comes with a dataset can run"),
    "pyarrow": ("14.0.1", "a parquet or arrow file runs code (CVE-2023-47248)"),
}


def too_old(installed: Mapping[str, str | None]) -> list[str]:
    """In words, which of these versions are below the floor. Packages that are not there, or not known here, are none."""
    problems = []
    for name, (floor, why) in FLOORS.items():
        version = installed.get(name)
        if version is not None and _numbers(version) < _numbers(floor):
            problems.append(
                f"{name} {version} is too old to read files of others: {why}; pip install -U '{name}>={floor}'"
            )
    return problems


@cache
def require_floors(*names: str) -> None:
    """ValueError if one of these packages is installed below its floor."""
    installed: dict[str, str | None] = {}
    for name in names:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    problems = too_old(installed)
    if problems:
        raise ValueError("; ".join(problems))


def _numbers(version: str) -> tuple[int, ...]:
    """2.13.0+cpu -> (2, 13, 0)"""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()
