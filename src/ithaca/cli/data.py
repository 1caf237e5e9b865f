"""`ithaca data pack | inspect`: text to packed tokens, and a look at them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

_PACK = """\
Turns documents into token ids on disk, in parallel, before any training starts. Packing the same again does nothing;
packing something else into the same folder is refused.

FILES are files, folders or globs of .jsonl, .parquet, .txt (.md, .rst) or .npy, .json files that hold an array, a saved Hugging
Face dataset, or files of a dataset on the Hub: hf:OWNER/NAME, hf:OWNER/NAME@REVISION/data/*.parquet. A tokenizer may be on the
Hub too: OWNER/NAME.
What a record is follows from its columns: text; messages (a chat); conversations (ShareGPT); instruction and output (Alpaca);
prompt and completion; chosen and rejected; input_ids. Or give a run's YAML file, whose data section says all this.

examples:
  ithaca data pack books/ --tokenizer ./Llama-3.1-8B --out packed
  ithaca data pack 'logs/*.jsonl' --column text=body --tokenizer ./Llama-3.1-8B --out packed
  ithaca data pack chats.parquet --tokenizer ./Qwen3-8B --out packed
  ithaca data pack sharegpt.jsonl --tokenizer ./Qwen3-8B-Base --chat-template chatml --out packed
  ithaca data pack preferences.jsonl --use chosen --tokenizer ./Qwen3-8B --out packed
  ithaca data pack ids.npy --vocabulary 128256 --out packed
  ithaca data pack hf:HuggingFaceTB/cosmopedia/data/stories/*.parquet --tokenizer Qwen/Qwen3-8B --out packed
  ithaca data pack run.yaml
"""
_INSPECT = """\
Shows what a packed folder holds: documents, lengths, what becomes of them at a context length, and a sample. Of files that are
not packed yet: what they are taken for, and what their first records say; with a tokenizer, as they will be learned.

examples:
  ithaca data inspect chats.jsonl
  ithaca data inspect chats.jsonl --tokenizer ./Qwen3-8B
  ithaca data inspect packed --context 1M
  ithaca data inspect packed --context 128K --long-documents drop --json
"""


def add_data(verbs: Any) -> None:
    parser = verbs.add_parser("data", help="pack documents into tokens on disk, and look at them")
    parser.set_defaults(traceback=False)
    actions = parser.add_subparsers(dest="action", metavar="pack | inspect", required=True)
    raw = argparse.RawDescriptionHelpFormatter
    pack = actions.add_parser("pack", help="tokenise documents", description=_PACK, formatter_class=raw)
    pack.set_defaults(run=run_pack)
    pack.add_argument("files", nargs="+", metavar="FILES", help="what to pack, or the YAML file of a run")
    pack.add_argument("--out", help="folder to make (default with a YAML file: its data.packed)")
    pack.add_argument(
        "--tokenizer", help="folder of the tokenizer, or owner/name (default with a YAML file: what it says)"
    )
    _source_options(pack)
    pack.add_argument("--vocabulary", type=int, metavar="N", help="for token ids without a tokenizer: ids are 0 to N-1")
    pack.add_argument(
        "--eos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="end documents with the end token (default: on)",
    )
    pack.add_argument(
        "--special-tokens",
        choices=("text", "parse"),
        help="what </s> in a document is: text, or the special token (default: text)",
    )
    pack.add_argument("--workers", type=int, metavar="N", help="processes (default: one per core)")
    pack.add_argument(
        "--context", metavar="N", help="also say what becomes of the documents at this length, such as 1M"
    )
    pack.add_argument("--force", action="store_true", help="replace the folder if it holds something else")
    _common(pack)

    inspect = actions.add_parser(
        "inspect", help="show a packed folder, or files", description=_INSPECT, formatter_class=raw
    )
    inspect.set_defaults(run=run_inspect)
    inspect.add_argument(
        "folders",
        nargs="+",
        metavar="FOLDER_OR_FILES",
        help="a packed folder, or files that are to be packed; several in turn",
    )
    inspect.add_argument("--context", metavar="N", help="tokens in a row, such as 128K or 1M")
    inspect.add_argument("--long-documents", default="split", help="split, drop or error (default: split)")
    inspect.add_argument(
        "--tokenizer", help="folder of a tokenizer to decode with (default: the one it was packed with)"
    )
    inspect.add_argument("--samples", type=int, default=3, metavar="N", help="documents to show (default %(default)s)")
    inspect.add_argument("--verify", action="store_true", help="read every file and compare its checksum")
    inspect.add_argument(
        "--validation", metavar="N", help="documents to hold out of each source, or a share of them, such as 0.01"
    )
    _source_options(inspect)
    _common(inspect)


def _source_options(parser: argparse.ArgumentParser) -> None:
    """What is said of files: the settings of a source in YAML, by the same names."""
    parser.add_argument(
        "--format", default="auto", help="jsonl, json, parquet, txt, tokens or datasets (default: by name)"
    )
    kinds = "text, chat, sharegpt, alpaca, completion, preference, rollout, tree or tokens"
    parser.add_argument("--kind", help=f"{kinds} (default: by the columns)")
    parser.add_argument(
        "--column", action="append", default=[], metavar="NAME=COLUMN", help="what a column is called in the data"
    )
    parser.add_argument("--split", help="split of a Hugging Face dataset (default: train)")
    parser.add_argument("--use", choices=("chosen",), help="of preferences: learn from the chosen answers only")
    parser.add_argument(
        "--chat-template",
        metavar="NAME|FILE",
        help="qwen3, chatml, llama3, gemma, or a Jinja file, instead of the tokenizer's",
    )


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")


# pack


def run_pack(options: argparse.Namespace) -> int:
    from ..data.pack import pack
    from ..data.report import describe, plan_words, rows_at, summary

    if options.workers is not None and not 1 <= options.workers <= 1024:
        raise ValueError(f"--workers {options.workers} must be from 1 to 1024 processes")
    if options.vocabulary is not None and not 2 <= options.vocabulary <= 1 << 24:
        raise ValueError(f"--vocabulary {options.vocabulary} must be from 2 to {1 << 24:,} token ids")
    request = _from_config(options) if _is_config(options.files) else _from_flags(options)
    context, policy, seed, shares, share = request.pop("plan")
    notes: list[str] = []
    packed = pack(**request, workers=options.workers, force=options.force, quiet=options.json, say=notes.append)
    more: dict[str, Any] = dict(keep=True, validation=shares(packed), share=share(packed))
    plans = [] if context is None else rows_at(packed, context, policy, seed, **more)
    if options.json:
        print(json.dumps({**describe(packed), "reused": bool(notes), "rows": plans}, indent=1, ensure_ascii=False))
        return 0
    lines = notes + summary(packed)
    for plan in plans:
        lines += plan_words(plan["source"], plan["context"], _counts(plan), policy)
    print("\n".join(lines))
    return 0


def _is_config(files: list[str]) -> bool:
    return len(files) == 1 and Path(files[0]).suffix.lower() in (".yaml", ".yml")


def _source(options: argparse.Namespace, path: str) -> Any:
    from ..data.source import Source

    columns = {}
    for pair in options.column:
        name, sign, column = pair.partition("=")
        if not (name and sign and column):
            raise ValueError(f"--column {pair!r} must be NAME=COLUMN, such as text=body")
        columns[name] = column
    return Source(path, options.format, columns, options.kind, options.split, options.use)


def _from_flags(options: argparse.Namespace) -> dict[str, Any]:
    from ..base.units import parse_tokens

    if not options.out:
        raise ValueError("no folder to write to was given; add --out FOLDER")
    return {
        "sources": [_source(options, path) for path in options.files],
        "out": options.out,
        "tokenizer": options.tokenizer,
        "vocabulary": options.vocabulary,
        "eos": options.eos is not False,
        "special_tokens": options.special_tokens or "text",
        "chat_template": options.chat_template,
        "plan": (
            None if options.context is None else parse_tokens(options.context),
            "split",
            0,
            lambda packed: None,
            lambda packed: True,
        ),
    }


def _from_config(options: argparse.Namespace) -> dict[str, Any]:
    from ..base.units import parse_tokens
    from ..config import load
    from ..data.fetch import fetch_model
    from ..data.samples import encoding, shares_of, shares_prefixes
    from ..data.source import sources_of

    config = fetch_model(load(options.files[0]).config, weights=False)
    sources, data = sources_of(config.data.sources), config.data
    out = options.out or data.packed
    if not sources:
        raise ValueError(f"{options.files[0]} names nothing to pack; give data.sources with a path")
    if not out:
        raise ValueError(f"{options.files[0]} does not say where to; give data.packed, or --out FOLDER")
    for flag in ("kind", "split", "column", "use"):
        if getattr(options, flag):
            raise ValueError(f"--{flag} is for files; with a YAML file it belongs to data.sources")
    context = parse_tokens(options.context) if options.context else data.context
    return {
        "sources": sources,
        "out": out,
        **({"tokenizer": options.tokenizer} if options.tokenizer else encoding(config)),
        **({"vocabulary": options.vocabulary} if options.vocabulary else {}),
        "eos": data.eos if options.eos is None else options.eos,
        "special_tokens": options.special_tokens or data.special_tokens,
        "chat_template": options.chat_template or data.chat_template,
        "plan": (
            context,
            data.long_documents,
            data.seed,
            lambda packed: shares_of(config, packed),
            lambda packed: shares_prefixes(config, packed),
        ),
    }


def _counts(plan: dict[str, Any]) -> Any:
    from dataclasses import fields

    from ..data.plan import Counts

    return Counts(**{field.name: plan[field.name] for field in fields(Counts)})


# inspect


def run_inspect(options: argparse.Namespace) -> int:
    from ..data.look import is_source

    if not 0 <= options.samples <= 1_000_000:
        raise ValueError(f"--samples {options.samples} must be from 0 to 1,000,000")
    seen = []
    for folder in options.folders:
        files = is_source(folder)
        about = _look_at_files(folder, options) if files else _look_at_packed(folder, options)
        seen.append(about)
        if not options.json:
            (_print_files if files else _print)(about, options)
    if options.json:
        print(json.dumps(seen if len(seen) > 1 else seen[0], indent=1, ensure_ascii=False))
    return 0


def _look_at_packed(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    from ..base.units import parse_tokens
    from ..data.folder import Packed
    from ..data.report import describe, rows_at, sample

    for flag in ("kind", "column", "split", "use", "chat_template"):
        if getattr(options, flag) or options.format != "auto":
            raise ValueError(
                f"--{(flag if getattr(options, flag) else 'format').replace('_', '-')} is for files, and {folder} is a packed "
                "folder"
            )
    packed = Packed(folder)
    if options.verify:
        packed.verify()
    about = describe(packed)
    if options.context is not None:
        shares = None if options.validation is None else [_share(options.validation)] * len(about["sources"])
        about["rows"] = rows_at(packed, parse_tokens(options.context), options.long_documents, validation=shares)
    elif options.validation is not None:
        raise ValueError("--validation needs --context: it says what becomes of the documents at that length")
    about["sample"] = (
        sample(packed, _decoder(packed, options.tokenizer), options.samples) if options.samples > 0 else []
    )
    return {**about, "verified": options.verify}


def _share(text: str) -> int | float:
    """A whole number of documents, or a share with a point; split.py says which are possible."""
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            raise ValueError(
                f"--validation {text!r} must be a number of documents, such as 100, or a share below 1, such as 0.01"
            ) from None


def _look_at_files(path: str, options: argparse.Namespace) -> dict[str, Any]:
    from ..base.hub import fetch
    from ..data.fetch import fetch_source
    from ..data.look import look

    if options.context is not None or options.verify or options.validation is not None:
        raise ValueError(
            f"--context, --validation and --verify are for packed folders, and {path} is not packed; leave them out, or pack "
            "it first with 'ithaca data pack'"
        )
    source = fetch_source(_source(options, path))
    tokenizer = None if options.tokenizer is None else fetch(options.tokenizer, "tokenizer")
    return look(source, options.samples, tokenizer, options.chat_template)


def _print_files(about: dict[str, Any], options: argparse.Namespace) -> None:
    from ..data.find import left_out_words
    from ..data.report import marked_words

    files = "1 file" if about["files"] == 1 else f"{about['files']:,} files"
    columns = ", ".join(name if name == column else f"{name} = {column}" for name, column in about["columns"].items())
    lines = [
        f"{about['path']}: {about['format']}, {files}, {about['bytes'] / 1e6:,.1f} MB; kind {about['kind']} ({columns})"
    ]
    if about["kind"] == "preference" and options.use is None:
        lines.append(
            "  both answers are packed, for objective: dpo; with --use chosen only the chosen ones, for plain training"
        )
    if about["chat_template"] is not None:
        lines.append(f"  chat template: {about['chat_template']}")
    lines += [f"  {line}" for line in (*marked_words(about), *left_out_words(about["left_out"]))]
    for record in about["sample"]:
        lines.append(f"── {record['place']} ──")
        marked = not all(part["supervised"] for part in record["parts"])
        if record["parts"] and record["parts"][0]["who"] in (None, "ids"):
            space = "" if record["parts"][0]["who"] is None else " "
            lines.append(space.join(_quoted(part, marked) for part in record["parts"]))
        else:
            lines += [f"{part['who']}: {_quoted(part, marked)}" for part in record["parts"]]
    if any(not part["supervised"] for record in about["sample"] for part in record["parts"]):
        lines.append("⟦ ⟧ = supervised")
    print("\n".join(lines))


def _quoted(part: dict[str, Any], marked: bool) -> str:
    return f"⟦{part['text']}⟧" if marked and part["supervised"] else part["text"]


def _decoder(packed: Any, folder: str | None) -> Any:
    """A tokenizer for the sample: one that was given, and fits, or the one in the folder."""
    from ..base.hub import fetch
    from ..data.tokenizer import check_tokenizer, load_tokenizer

    if folder is not None:
        tokenizer = load_tokenizer(fetch(folder, "tokenizer"))
        check_tokenizer(packed, tokenizer, folder)
        return tokenizer
    own = packed.folder / "tokenizer"
    return load_tokenizer(own) if own.is_dir() else None


def _print(about: dict[str, Any], options: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from ..data.find import left_out_words
    from ..data.report import dropped_words, equal_words, kind_words, left_out_units, marked_words, plan_words

    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    console.print(
        f"{escape(about['folder'])}: {about['documents']:,} documents, {about['tokens']:,} tokens, {about['supervised']:,} of them "
        f"supervised; vocabulary {about['vocabulary']:,} ({about['dtype']}), {about['bytes'] / 1e6:,.1f} MB"
        + (", checksums are right" if options.verify else "")
    )
    for source in about["sources"]:
        dropped = dropped_words(source["dropped"])
        console.print(
            f"  {escape(source['name'])}: {kind_words(source)}, {source['documents']:,} documents, {source['tokens']:,} tokens"
            + (f"; documents left out: {dropped}" if dropped else "")
        )
        said = (
            *marked_words(source),
            *left_out_units(source),
            *equal_words(source),
            *left_out_words(source["left_out"]),
        )
        for line in said:
            console.print(f"    {line}", markup=False)
    lengths = about["lengths"]
    shares = ", ".join(f"{float(share):.0%} {value:,}" for share, value in lengths["quantiles"].items())
    console.print(
        f"tokens in a document: shortest {lengths['shortest']:,}, {shares}, longest {lengths['longest']:,}, "
        f"mean {lengths['mean']:,.1f}"
    )
    table = Table(box=None, pad_edge=False)
    for column in ("length from", "documents", "tokens"):
        table.add_column(column, justify="right")
    table.add_column("share of the tokens")
    most = max(bucket["tokens"] for bucket in about["histogram"])
    for bucket in about["histogram"]:
        bar = "█" * round(40 * bucket["tokens"] / most)
        share = bucket["tokens"] / about["tokens"]
        table.add_row(f"{bucket['from']:,}", f"{bucket['documents']:,}", f"{bucket['tokens']:,}", f"{bar} {share:.1%}")
    console.print(table)
    for plan in about.get("rows", []):
        for line in plan_words(plan["source"], plan["context"], _counts(plan), options.long_documents):
            console.print(line, markup=False)
    for document in about["sample"]:
        whole = document["shown"] == document["tokens"]
        first = "" if whole else f", the first {document['shown']:,}"
        each = f" ({' + '.join(map(str, document['lengths'][:16]))})" if len(document["lengths"]) > 1 else ""
        console.print(f"── document {document['document']:,}: {document['tokens']:,} tokens{each}{first} ──")
        marked = not all(part["supervised"] for part in document["parts"])
        text = "".join(_marked(part, marked) for part in document["parts"])
        console.print(text + ("" if whole else " …"), markup=False, soft_wrap=True)
    if any(not part["supervised"] for document in about["sample"] for part in document["parts"]):
        console.print("⟦ ⟧ = supervised", markup=False)


def _marked(part: dict[str, Any], marked: bool) -> str:
    text = " ".join(map(str, part["ids"])) + " " if part["text"] is None else part["text"]
    return f"⟦{text}⟧" if marked and part["supervised"] else text
