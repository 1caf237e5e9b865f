"""What a run was made of: its data, the machine and software it ran on, and the settings that somebody gave, with where.

Data and machine are in about.json, which a run writes when it starts; of an older run the data's names are in its config. Where a
setting came from is in the comments of config.yaml, as `dump` writes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from ...config.dump import origins
from ...config.option import about as about_setting
from ...config.option import kinds
from ...config.schema import Config
from .inputs import Inputs
from .values import at, number, positive, said, table, tables, text

_DROPPED = {  # documents that are left out, by the reason that a packed folder names
    "empty": "empty", "too_short": "of fewer than 2 tokens", "unsupervised": "without a supervised token",
}  # fmt: skip


def data(inputs: Inputs) -> dict[str, Any] | None:
    """Sources, one a row, and the whole."""
    given = table(inputs.about.get("data"))
    sources = list(map(_source, tables(given.get("sources")))) or list(_named(inputs))
    if not sources:
        return None
    tokens, supervised = (sum(source[name] or 0 for source in sources) for name in ("tokens", "supervised"))
    return {
        "sources": sources, "counted": bool(given), "context": positive(given.get("context")),
        "tokens": tokens or None, "supervised": supervised / tokens if tokens else None,
    }  # fmt: skip


def _source(given: dict[str, Any]) -> dict[str, Any]:
    counts = table(given.get("counts"))
    kind, use = text(given.get("kind")), text(given.get("use"))
    return {
        "name": text(given.get("name")) or "?", "kind": f"{kind} ({use} only)" if kind and use else kind,
        "share": number(given.get("share")), "rows": number(given.get("rows")),
        "documents": number(given.get("documents")), "tokens": number(given.get("tokens")),
        "supervised": number(given.get("supervised")), "full": number(counts.get("full")),
        "notes": list(_notes(given, counts)),
    }  # fmt: skip


def _notes(given: dict[str, Any], counts: dict[str, Any]) -> Iterator[str]:
    """What is not seen as it is, counted."""
    for name, count in table(given.get("dropped")).items():
        if amount := positive(count):
            yield f"{amount:,} documents {_DROPPED.get(name, name)} left out"
    for reason, count in table(given.get("left_out")).items():
        if amount := positive(count):
            yield f"{amount:,} files left out: {reason}"
    documents, planned = number(given.get("documents")), number(counts.get("documents"))
    if documents is not None and planned is not None and documents > planned:
        yield f"{documents - planned:,} documents held out: not trained on"
    if marked := text(given.get("marked_by")):
        yield f"the assistant's turns are told by our chat template {marked}"
    long, longest = (positive(counts.get(name)) or 0 for name in ("long_documents", "longest"))
    if amount := positive(counts.get("split_pieces")):
        yield f"{long:,} documents are longer than a row (the longest {longest:,} tokens): {amount:,} pieces"
    if amount := positive(counts.get("dropped_documents")):
        yield f"{amount:,} documents are longer than a row and dropped ({positive(counts.get('dropped_tokens')) or 0:,} tokens)"
    if amount := positive(counts.get("unlearnable_pieces")):
        yield f"{amount:,} pieces without a supervised token left out"


def _named(inputs: Inputs) -> Iterator[dict[str, Any]]:
    for source in tables(at(inputs.config, "data", "sources")):
        kind = text(source.get("kind")) or ("synthetic" if source.get("synthetic") else None)
        name = text(source.get("path")) or text(source.get("synthetic"))
        yield _source({"name": name, "kind": kind})
    if (packed := text(at(inputs.config, "data", "packed"))) and not tables(at(inputs.config, "data", "sources")):
        yield _source({"name": packed, "kind": "packed"})


def environment(inputs: Inputs) -> dict[str, Any] | None:
    given = table(inputs.about.get("environment"))
    if not given:
        return None
    device, ranks, nodes = text(given.get("device")), positive(given.get("ranks")), positive(given.get("nodes"))
    where = f"{ranks} × {device}" if ranks and device else device
    facts = [
        ("ranks", "text", where and where + (f" on {nodes} machines" if nodes and nodes > 1 else "")),
        ("machine", "text", text(given.get("host"))),
        ("system", "text", text(given.get("system"))),
        ("CPU cores", "integer", positive(given.get("cpus"))),
        ("memory", "bytes", positive(given.get("memory"))),
        ("CUDA", "text", text(given.get("cuda"))),
        ("started in", "text", text(given.get("folder"))),
        ("started at", "text", (text(given.get("time")) or "").replace("T", " ").replace("Z", " UTC") or None),
    ]
    versions = {name: text(version) for name, version in table(given.get("versions")).items() if text(version)}
    return {
        "command": text(given.get("command")),
        "facts": [{"label": label, "kind": kind, "value": value} for label, kind, value in facts if value is not None],
        "versions": [{"name": name, "version": version} for name, version in versions.items()],
    }


def settings(inputs: Inputs) -> list[dict[str, Any]]:
    """Those that were given, beside the stack: value, what it means, and where it was said."""
    rows = []
    for path, place in origins(inputs.config_text or "").items():
        if path.startswith("stack."):
            continue
        value = at(inputs.config, *path.split("."))
        if (
            path != "description" and not isinstance(value, dict) and not tables(value)
        ):  # sources have a part of their own
            rows.append({"name": path, "value": said(value), "why": meaning(path), "from": str(place)})
    return rows


def meaning(path: str) -> str | None:
    """What a setting means, if this ithaca has it."""
    cls: Any = Config
    *sections, last = path.split(".")
    for name in sections:
        kind = kinds(cls).get(name)
        if kind is None or kind.section is None:
            return None
        cls = kind.section
    setting = next((each for each in fields(cls) if each.name == last), None)
    return about_setting(cls, setting).get("help") if setting is not None else None
