"""What a page is made of: a run folder, another to compare it with, and up to one plan, ladder and profile each.

A plan, a ladder and a profile are JSON files that say what they are with their first key: {"plan": 1, ...}. They may lie in the run
folder under their own names or be given beside it; a given one wins. What cannot be read is a ValueError of one sentence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...base.files import read_json as read_limited
from ...base.run_folder import RunFolder
from ...config.nodes import read_plain
from ..metrics import read_metrics
from .values import number, table

KINDS = ("plan", "ladder", "profile", "eval")
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Inputs:
    run: Path | None = None
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str | None = None
    status: dict[str, Any] = field(default_factory=dict)
    killed: bool = False  # the status says that it runs, but nobody holds the folder
    steps: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl, by step
    events: list[dict[str, Any]] = field(default_factory=list)
    plan: dict[str, Any] | None = None
    ladder: dict[str, Any] | None = None
    profile: dict[str, Any] | None = None
    eval: dict[str, Any] | None = None
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # by step, the given one last
    about: dict[str, Any] = field(default_factory=dict)  # machine, software and data
    other: Inputs | None = None  # a run to compare with


def read_inputs(paths: Iterable[str | os.PathLike[str]]) -> Inputs:
    """A run folder or two, JSON files, or both; the files belong to the first folder."""
    runs: list[Path] = []
    given: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"{path} is not there; give a run folder, or JSON files of a plan, ladder or profile")
        if path.is_dir():
            runs.append(path)
            continue
        kind, content = read_json(path)
        if kind in given:
            raise ValueError(f"{given[kind][0]} and {path} are two of the kind {kind}; give one")
        given[kind] = (path, content)
    if len(runs) > 2:
        raise ValueError(f"{', '.join(map(str, runs[:3]))} are {len(runs)} run folders; give one, or two to compare")
    inputs = gather(runs[0] if runs else None, {kind: content for kind, (_, content) in given.items()})
    return replace(inputs, other=_read_run(runs[1])) if len(runs) > 1 else inputs


def gather(run: Path | None, given: Mapping[str, dict[str, Any] | None]) -> Inputs:
    """The run folder with these JSON objects over it."""
    inputs = _read_run(Path(run)) if run is not None else Inputs()
    for kind, content in given.items():
        if content is not None:
            check_kind(content, f"the {kind}", kind)
    inputs = replace(inputs, **{kind: content for kind, content in given.items() if content is not None})
    if inputs.eval is not None:
        inputs = replace(inputs, evaluations=[*inputs.evaluations, inputs.eval])
    if run is None and not any((inputs.plan, inputs.ladder, inputs.profile, inputs.eval)):
        raise ValueError("there is nothing to report on; give a run folder, or a plan, ladder, profile or evaluation")
    return inputs


def read_json(path: Path) -> tuple[str, dict[str, Any]]:
    """What a JSON file is, and what is in it."""
    try:
        content = read_limited(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"{error}; give a plan, ladder, profile or evaluation, or make it again") from None
    return check_kind(content, str(path)), content


def check_kind(content: Any, name: str, wanted: str | None = None) -> str:
    kind = next(iter(content), None) if isinstance(content, dict) else None
    if kind != wanted if wanted else kind not in KINDS:
        expected = " or ".join(f'"{key}"' for key in ([wanted] if wanted else KINDS))
        raise ValueError(f"{name} is no {wanted or 'plan, ladder or profile'}: its first key has to be {expected}")
    version = content[kind]
    if isinstance(version, bool) or version != VERSION:
        raise ValueError(f"{name} is a {kind} of version {json.dumps(version)[:40]}, this ithaca knows {VERSION}")
    return str(kind)


def _read_run(path: Path) -> Inputs:
    folder = RunFolder(path)
    if not path.is_dir():
        raise ValueError(f"{path} is no folder; give a run folder")
    if not any(entry.is_file() for entry in (folder.config, folder.metrics, folder.status)):
        raise ValueError(f"{path} is no run folder: it has no config.yaml, metrics.jsonl or status.json")
    config, text = _read_config(folder.config)
    status = folder.read_status() or {}
    steps, events = _read_lines(folder.metrics)
    contents: dict[str, Any] = {}
    for kind in KINDS:
        file = path / f"{kind}.json"
        if file.is_file():
            _, contents[kind] = read_json(file)
            check_kind(contents[kind], str(file), kind)
    evaluations = []
    for file in folder.evaluations.glob("step-*.json"):
        _, record = read_json(file)
        check_kind(record, str(file), "eval")
        evaluations.append(record)
    return Inputs(
        run=path,
        config=config,
        config_text=text,
        status=status,
        killed=_killed(folder, status),
        steps=steps,
        events=events,
        evaluations=sorted(evaluations, key=lambda record: number(record.get("step")) or 0),
        about=_read_about(folder.about),
        **contents,
    )


def _read_about(path: Path) -> dict[str, Any]:
    """Of a run of an older ithaca there is none."""
    if not os.path.lexists(path):
        return {}
    try:
        content = read_limited(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    check_kind(content, str(path), "about")
    return content


def _read_config(path: Path) -> tuple[dict[str, Any], str | None]:
    """As YAML, not as a `Config`: a run of an older ithaca has a report too."""
    if not path.is_file():
        return {}, None
    try:
        content, text = read_plain(path)
    except ValueError as error:
        raise ValueError(f"{error}; it was not written by ithaca: move it away") from None
    return table(content), text


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if not path.is_file():
        return [], []
    lines = read_metrics(path)
    steps = [line for line in lines if "event" not in line and number(line["step"]) is not None]
    return sorted(steps, key=lambda line: line["step"]), [line for line in lines if "event" in line]


def _killed(folder: RunFolder, status: Mapping[str, Any]) -> bool:
    if status.get("state") not in ("starting", "running", "saving"):
        return False
    with suppress(OSError):  # a file system without locks cannot tell
        return folder.holder() is None
    return False
