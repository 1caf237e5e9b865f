"""What is in a packed folder, and what becomes of it at a context length: numbers for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .find import left_out_words
from .folder import Packed
from .manifest import DROPPED, FIRST
from .plan import Counts, make_plan, open_plan
from .rows import Rows, Stream
from .split import Split

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_SHOWN = (
    "name", "kind", "use", "units", "values", "equal", "first", "marked_by", "documents", "chats", "tokens", "supervised",
    "dropped", "left_out",
)  # fmt: skip
_SAMPLE = 160  # tokens of a document that are shown


def describe(packed: Packed) -> dict[str, Any]:
    """Counts, sources and lengths."""
    manifest, lengths = packed.manifest, packed.lengths()
    quantiles = np.quantile(lengths, QUANTILES, method="lower").tolist()
    return {
        "folder": str(packed.folder),
        "documents": manifest["documents"],
        "tokens": manifest["tokens"],
        "supervised": manifest["supervised"],
        "vocabulary": manifest["vocabulary"],
        "largest_token": manifest["largest_token"],
        "dtype": packed.dtype.name,
        "bytes": sum(about["bytes"] for about in manifest["files"].values()),
        "dropped": manifest["dropped"],
        "tokenizer": None if manifest["tokenizer"] is None else manifest["tokenizer"]["name"],
        "special_tokens": manifest["settings"]["special_tokens"],
        "sources": [{name: source[name] for name in _SHOWN} for source in manifest["sources"]],
        "lengths": {
            "shortest": int(lengths.min()),
            "longest": int(lengths.max()),
            "mean": float(lengths.mean()),
            "quantiles": {str(share): int(value) for share, value in zip(QUANTILES, quantiles, strict=True)},
        },
        "histogram": histogram(lengths),
    }


def histogram(lengths: np.ndarray) -> list[dict[str, int]]:
    """Documents and tokens by length, in powers of two."""
    power = np.frexp(lengths)[1] - 1  # 2^power ≤ length < 2^(power + 1)
    bins = []
    for exponent in range(int(power.min()), int(power.max()) + 1):
        inside = lengths[power == exponent]
        bins.append({"from": 1 << exponent, "documents": len(inside), "tokens": int(inside.sum())})
    return bins


def rows_at(
    packed: Packed, context: int, long_documents: str = "split", seed: int = 0, *, keep: bool = False,
    validation: Sequence[int | float] | None = None, share: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    """The row plan of every source, in counts. keep: leave the plans in the folder for training. validation: what is held out of
    each (split.py), which is then a plan of its own. share: as `open_rows` has it."""
    plan = open_plan if keep else make_plan
    summaries = []
    for number, source in enumerate(packed.manifest["sources"]):
        aside = 0 if validation is None else validation[number]
        for split in [Split(aside, seed, held_out) for held_out in (False, True)] if aside else [None]:
            more: dict[str, Any] = dict(source=number, split=split, share=share)
            counts = plan(packed, context, long_documents=long_documents, seed=seed, **more).counts
            name = f"{source['name']}, held out" if split is not None and split.held_out else source["name"]
            summaries.append({"source": name, "context": context, **asdict(counts), "full": counts.full})
    return summaries


def about(stream: Stream) -> dict[str, Any]:
    """What a run trains on, for whoever reads its results: of each source what it is, what is supervised, what was left out when it
    was packed, and what its rows leave out."""
    turn, sources, packed = sum(stream.order.counts), [], 0
    for number, source in enumerate(stream.sources):
        found: dict[str, Any] = {"name": source.name, "share": stream.order.counts[number] / turn, "rows": len(source)}
        if isinstance(source, Rows):
            manifest = source.packed.manifest
            given, packed = manifest["sources"][packed], packed + 1
            found |= {name: given[name] for name in _SHOWN if name not in ("name", "left_out")}
            found["left_out"] = {reason: len(names) for reason, names in given["left_out"].items() if names}
            found["counts"] = {**asdict(source.plan.counts), "full": source.plan.counts.full}
            found["tokenizer"] = (manifest["tokenizer"] or {}).get("name")
        else:
            found["kind"] = "synthetic"
        sources.append(found)
    return {"context": stream.context, "rows": len(stream), "sources": sources}


def sample(packed: Packed, tokenizer: Any | None, count: int = 3) -> list[dict[str, Any]]:
    """The beginnings of a few documents, spread over the folder; supervised parts marked where not all is."""
    documents = len(packed.offsets) - 1
    samples = []
    for document in sorted({documents * number // count for number in range(count)}):
        start, stop = (int(offset) for offset in packed.offsets[document : document + 2])
        end = min(stop, start + _SAMPLE)
        ids, seen = packed.read(start, end), packed.mask(start, end)
        parts = [
            {
                "supervised": supervised,
                "ids": part.tolist(),
                "text": None if tokenizer is None else tokenizer.decode(part.tolist()),
            }
            for supervised, part in _runs(ids, seen)
        ]
        lengths = packed.parts(document)[1]["length"].tolist() if packed.has_units() else [stop - start]
        samples.append(
            {"document": document, "tokens": stop - start, "lengths": lengths, "shown": end - start, "parts": parts}
        )
    return samples


def _runs(ids: np.ndarray, seen: np.ndarray | None) -> Iterator[tuple[bool, np.ndarray]]:
    if seen is None:
        seen = np.ones(len(ids), bool)
    for part, flags in zip(*(np.split(array, np.flatnonzero(np.diff(seen)) + 1) for array in (ids, seen)), strict=True):
        yield bool(flags[0]), part


# Words.


def summary(packed: Packed) -> list[str]:
    """A few lines after packing."""
    about = describe(packed)
    lines = [
        f"{about['documents']:,} documents, {about['tokens']:,} tokens ({about['supervised']:,} supervised), "
        f"{about['bytes'] / 1e6:,.1f} MB in {about['folder']}"
    ]
    for source in about["sources"]:
        dropped = dropped_words(source["dropped"])
        lines.append(
            f"  {source['name']}: {kind_words(source)}, {source['documents']:,} documents, {source['tokens']:,} tokens"
            + (f"; documents left out: {dropped}" if dropped else "")
        )
        lines += [f"    {line}" for line in (*marked_words(source), *left_out_units(source), *equal_words(source))]
        lines += [f"    {line}" for line in left_out_words(source["left_out"])]
    if about["special_tokens"] == "parse":
        lines.append("  special tokens that are written in documents are special (special_tokens: parse)")
    return lines


def kind_words(source: dict[str, Any]) -> str:
    if source["units"] and (source["values"] or source["kind"] == "preference"):
        return f"{source['kind']} ({source['values'] or 'pairs'})"
    return source["kind"] + (f" ({source['use']} only)" if source["use"] else "")


def equal_words(source: dict[str, Any]) -> list[str]:
    if not source["equal"]:
        return []
    why = "rewards are all equal" if source["values"] == "rewards" else "advantages are all 0"
    return [
        f"{source['equal']:,} of the prompts: the completions' {why}, so there is nothing to learn from them"
        + _first_words(source, "equal")
    ]


def left_out_units(source: dict[str, Any]) -> list[str]:
    """Where the first units were that teach nothing."""
    return [f"{DROPPED[why]}{_first_words(source, why)}" for why in source["first"] if why in DROPPED]


def _first_words(source: dict[str, Any], why: str) -> str:
    places = source["first"].get(why)
    return f": {', '.join(places)}{' …' if len(places) == FIRST else ''}" if places else ""


def marked_words(source: dict[str, Any]) -> list[str]:
    if source["marked_by"] is None:
        return []
    return [
        f"the chat template does not say which turns are the assistant's; ours of the name {source['marked_by']}, which renders "
        "the same, does"
    ]


def dropped_words(dropped: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {DROPPED[name]}" for name, count in dropped.items())


def plan_words(name: str, context: int, counts: Counts, long_documents: str) -> list[str]:
    """What becomes of the documents of a source, line by line. Nothing is left out of it."""
    rows = "1 row" if counts.rows == 1 else f"{counts.rows:,} rows"
    lines = [f"{name}: {rows} of {context:,} tokens, {counts.full:.2%} full"]
    if counts.rows == 1 and counts.full < 0.9:
        lines.append(
            f"  warning: that is all the data there is, and the rest of the row is padding, which costs the same time; lower the "
            f"context to {context - counts.padding:,}, or add data"
        )
    if counts.shared:
        computed = counts.tokens - counts.dropped_tokens
        whole = computed + counts.shared
        lines.append(
            f"  shared prefixes: {computed:,} of {whole:,} tokens are computed, {counts.shared / whole:.0%} fewer"
        )
    if counts.long_documents and long_documents == "split":
        lines.append(
            f"  {counts.long_documents:,} documents are longer (longest {counts.longest:,}): split into "
            f"{counts.split_pieces:,} pieces; {counts.unpredicted:,} tokens, each the first of a later piece, are not predicted"
        )
    if counts.dropped_documents:
        share = counts.dropped_tokens / counts.tokens
        lines.append(
            f"  {counts.dropped_documents:,} documents are longer (longest {counts.longest:,}) and dropped: "
            f"{counts.dropped_tokens:,} tokens, {share:.1%} of all"
        )
    if counts.unlearnable_pieces:
        lines.append(
            f"  {counts.unlearnable_pieces:,} pieces of split documents have no supervised token and are left out: "
            f"{counts.unlearnable_tokens:,} tokens"
        )
    return lines
