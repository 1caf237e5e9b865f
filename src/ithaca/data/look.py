"""A look at files before they are packed: what they were taken for, and what their first records say."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

from .arrays import read_arrays
from .chat import Spans
from .formats import Chat, Example, Ids, Pair, read_example, read_preference, read_rollouts
from .inputs import Input, look_at, with_template
from .nodes import read_nodes
from .quotes import QuotingEncoder
from .readers import read_records, read_text
from .render import (
    Encoders,
    Rendered,
    around,
    check_characters,
    columns_of,
    given_tokens,
    inside,
    read_unit,
    render_text,
)
from .source import KINDS, TEMPLATED, Source, check_use
from .tokenizer import TokenizerParts, load_tokenizer, tokenizer_parts

_SHOWN = 600  # characters of a record, without a tokenizer
_TRIED = 20  # records of a source that are too many to try all


def look(source: Source, count: int, tokenizer: str | None = None, chat_template: str | None = None) -> dict[str, Any]:
    """Format, kind and the first records of a source. With a tokenizer: as they will be learned."""
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    try:
        entry = with_template(look_at(0, source), chat_template, loaded)
    except ValueError as error:
        if Path(source.path).expanduser().is_dir():
            raise ValueError(
                f"{source.path} is not a packed folder: it has no manifest.json. As data: {error}"
            ) from None
        raise
    if source.use is not None:
        check_use(source, entry.kind)
    encoders = None if loaded is None else Encoders(tokenizer_parts(loaded), parse=False)
    examples = list(islice(_examples(entry, encoders), count))
    template = None
    if encoders is not None and entry.kind in TEMPLATED and encoders.template(entry.source) is not None:
        template = chat_template or "the tokenizer's own"
    return {
        "path": source.path,
        "format": entry.format,
        "kind": entry.kind,
        "columns": {name: source.column(name) for name in KINDS[entry.kind]},
        "files": len(entry.files.paths),
        "bytes": sum(stamp.bytes for stamp in entry.files.stamps.values()),
        "left_out": entry.files.left_out,
        "chat_template": template,
        "marked_by": None if encoders is None else encoders.marked_by(entry.source),
        "sample": examples,
    }


def try_first(entry: Input, parts: TokenizerParts | None, *, eos: bool, parse: bool) -> None:
    """ValueError if the first records of a source cannot be packed: what is wrong with all of them is wrong with these."""
    if entry.format in ("txt", "tokens"):
        return
    encoders = None if parts is None else Encoders(parts, parse=parse)
    source, kind = entry.source, entry.kind
    columns = columns_of(kind, KINDS[kind], source)
    for record in islice(read_records(entry.format, entry.parts[0].pieces[0], source, columns), _TRIED):
        try:
            if kind == "tokens":
                given_tokens(record.values, source)
            elif entry.units:
                read_unit(record.values, kind, source, encoders, eos)
            else:
                assert encoders is not None  # pack has asked for a tokenizer
                check_characters(render_text(record.values, kind, source, encoders).text)
        except ValueError as error:
            raise ValueError(f"{record.place()}: {error}") from None


def _examples(entry: Any, encoders: Encoders | None) -> Any:
    """Records in order, each as its place and parts, of which some are supervised."""
    source, kind = entry.source, entry.kind
    for part in entry.parts:
        for piece in part.pieces:
            if entry.format == "txt":
                text = next(read_text(piece.path, piece.stamp))[0]
                yield {"place": piece.path, "parts": [_part("text", text[:_SHOWN], True)]}
            elif entry.format == "tokens":
                for pieces, number in read_arrays(piece.path, piece.stamp):
                    ids = next(iter(pieces), [])[:_SHOWN]
                    shown = " ".join(map(str, ids))[:_SHOWN]
                    yield {"place": f"{piece.path}, document {number:,}", "parts": [_part("ids", shown, True)]}
            else:
                for record in read_records(entry.format, piece, source, columns_of(kind, KINDS[kind], source)):
                    try:
                        parts = _parts(record.values, kind, source, encoders)
                    except ValueError as error:
                        raise ValueError(f"{record.place()}: {error}") from None
                    yield {"place": record.place(), "parts": parts}


def _parts(values: dict[str, Any], kind: str, source: Source, encoders: Encoders | None) -> list[dict[str, Any]]:
    if kind == "tokens":
        ids, seen = given_tokens(values, source)
        flags = [True] * len(ids) if seen is None else seen.tolist()
        return [_part("ids", str(token), flag) for token, flag in zip(ids[:100].tolist(), flags, strict=False)]
    if kind == "preference":
        chosen, rejected = read_preference(values, source)
        return [*_said(chosen, "chosen"), *(part for part in _said(rejected, "rejected") if part["supervised"])]
    if kind == "tree":
        return [part for at, node in enumerate(read_nodes(values, source)) for part in _said_by_node(at, node)]
    if kind == "rollout":
        found = read_rollouts(values, source)
        judged = [f"{found.what[:-1]} {value:g}" for value in found.values]
        said = [_said(each, f"completion, {words}") for each, words in zip(found.examples, judged, strict=True)]
        return [*said[0], *(part for parts in said[1:] for part in parts if part["supervised"])]
    if encoders is None:
        return _said(read_example(values, kind, source, template=True), None)
    return _by_token(render_text(values, kind, source, encoders), encoders)


def _said(example: Example, answer: str | None) -> list[dict[str, Any]]:
    """Who says what. answer: what to call the learned part of a unit."""
    if isinstance(example, str):
        return [_part("text", example, True)]
    if isinstance(example, Pair):
        return [_part("prompt", example.prompt, False), _part(answer or "completion", example.completion, True)]
    if isinstance(example, Ids):
        prompt, completion = (" ".join(map(str, ids))[:_SHOWN] for ids in example)
        return [_part("prompt", prompt, False), _part(answer or "completion", completion, True)]
    assert isinstance(example, Chat)
    parts = []
    for message, wanted in zip(example.messages, example.learned, strict=True):
        content = message.get("content")
        said = [content] if isinstance(content, str) and content else []
        said += [json.dumps(message[name], ensure_ascii=False) for name in ("tool_calls",) if message.get(name)]
        if isinstance(content, list):
            said.append(json.dumps(content, ensure_ascii=False))
        learned = wanted and message["role"] == "assistant"
        who = answer if answer is not None and learned else message["role"]
        parts.append(_part(who, " ".join(said), learned))
    return parts


def _by_token(rendered: Rendered, encoders: Encoders) -> list[dict[str, Any]]:
    """As it will be learned: whole tokens, and the one that ends it."""
    text, spans, encoder, chat = rendered
    if spans is None:
        learned = [(0, len(text))]
    else:
        learned = [
            (int(start), int(stop))
            for _, places in encoder.stream(encoder.pieces(text))
            for start, stop in places[inside(places, spans)]
        ]
    if isinstance(encoder, QuotingEncoder):
        text = encoder.without_aliases(text)
    names = {number: name for name, number in encoders.parts.special.items()}
    _, after = ([], []) if chat else around(encoders.parts, eos=True)
    return _cut(text, learned) + [_part(None, names[token], True) for token in after if token in names]


def _said_by_node(at: int, node: dict[str, Any]) -> list[dict[str, Any]]:
    """Nodes as they stand in the record: of a tree there is no one text."""
    who = f"node {at}" + ("" if at == 0 else f", behind {node['parent']}")
    who += "" if node.get("reward") is None else f", reward {node['reward']:g}"
    trained = node.get("train") is not False
    if node.get("messages") is not None:
        said = _said(Chat(node["messages"], None, [trained] * len(node["messages"])), None)
        return [{**part, "who": f"{who}, {part['who']}"} for part in said]
    text = node["text"] if node.get("text") is not None else " ".join(map(str, node["input_ids"]))
    return [_part(who, text[:_SHOWN], trained)]


def _part(who: str | None, text: str, supervised: bool) -> dict[str, Any]:
    return {"who": who, "text": text, "supervised": supervised}


def _cut(text: str, spans: Spans) -> list[dict[str, Any]]:
    """Neighbours are one part; several tokens may share a character."""
    joined: Spans = []
    for begin, end in spans:
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    parts, at, spans = [], 0, joined
    for begin, end in [*spans, (len(text), len(text))]:
        parts += [_part(None, text[at:begin], False)] * (begin > at) + [_part(None, text[begin:end], True)] * (
            end > begin
        )
        at = end
    return parts


def is_source(path: str) -> bool:
    """Whether a path is of files to look at, and not of a packed folder, or nothing."""
    found = Path(path).expanduser()
    if found.is_dir():
        return not os.path.lexists(found / "manifest.json")  # a link that leads nowhere was one: opening it says so
    return found.is_file() or path.startswith("hf:") or any(character in path for character in "*?[")
