"""Cases from files that somebody else wrote: JSON with one thing changed, YAML, and things that are no files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ithaca.storage.digest import digests

from .mutate import DROP, HUGE, KINDS, damaged, dumped, nodes, other_values, put, replace_by
from .options import BASES, settings, wrong_values
from .running import Case

CHECKPOINT = "checkpoints/step-2"


@dataclass(frozen=True)
class Received:
    file: str
    verbs: tuple[tuple[str, ...], ...]  # that read it
    optional: bool = False  # where there is none, that is fine
    needed: bool = True  # without it, or where it cannot be read, they must refuse
    counts: tuple[str, ...] = ()  # fields that are numbers, of which neither a text nor a negative one makes sense

    @property
    def folder(self) -> str:
        return self.file.split("/")[0]


def _run_verbs(run: str) -> tuple[tuple[str, ...], ...]:
    return (
        ("ckpt", "verify", run),
        ("export", run, "exported"),
        ("train", f"{run}.yaml", "--check"),
        ("ckpt", "ls", run),
    )


MODEL = (tuple(BASES["plan"]), tuple(BASES["train"]), tuple(BASES["verify"]), ("ladder", *BASES["ladder"][1:]))
ASK = (("ask", "model", "who?", "--cpu", "1", "--tokens", "1", "--file", "text.txt"),)
PACK = (("data", "pack", "chats.jsonl", "--tokenizer", "model", "--out", "new", "--workers", "1"),)
TOKENS = ("tokens", "documents", "supervised", "vocabulary", "bytes", "largest_token")
REPORT = ("report", "run", "--out", "page.html")
SIZES = (
    "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings",
)  # fmt: skip
FILES = (
    Received("packed/manifest.json", (("data", "inspect", "packed"), tuple(BASES["train"])), counts=TOKENS),
    Received(f"run/{CHECKPOINT}/state.json", _run_verbs("run")[:3], counts=("step", "size")),
    Received(f"run/{CHECKPOINT}/manifest.json", _run_verbs("run")[:3], counts=("step", "size", "block", "format")),
    Received(f"lora/{CHECKPOINT}/state.json", _run_verbs("lora")[:2], counts=("step", "size")),
    Received("run/status.json", (REPORT, tuple(BASES["train"])), counts=("contract", "step", "pid"), optional=True),
    Received("model/config.json", MODEL, counts=SIZES),
    Received("model/model.safetensors.index.json", (tuple(BASES["train"]), *ASK)),
    Received("model/tokenizer_config.json", (*PACK, *ASK), needed=False),
    Received("model/tokenizer.json", (*PACK, *ASK)),
    Received("model/generation_config.json", (("export", "run", "exported"), *ASK), needed=False),
    Received("run/about.json", (REPORT,), counts=("about",), optional=True),
    Received("run/eval/step-2.json", (REPORT,), counts=("eval",), optional=True),
    Received("plan.json", (("report", "plan.json", "--out", "page.html"),), counts=("plan",)),
)  # fmt: skip
LISTED = (  # read, but what is wrong in them is left out with a word, not refused
    Received("run/metrics.jsonl", (REPORT,), needed=False),
    Received(f"run/{CHECKPOINT}/state.json", (("ckpt", "ls", "run"),), needed=False),
    Received(f"run/{CHECKPOINT}/manifest.json", (("ckpt", "ls", "run"),), needed=False),
)


def received_cases(rng: random.Random, world: Path) -> Iterator[Case]:
    """Without end: a file, a change and a verb at random."""
    while True:
        about = rng.choice(FILES if rng.random() < 0.9 else LISTED)
        raw = (world / about.file).read_bytes()
        words = rng.choice(about.verbs)
        draw = rng.random()
        if draw < 0.08:
            kind = rng.choice(KINDS)
            there = about.needed and not (about.optional and kind == "nowhere")
            yield Case(f"{about.file} is {kind}", words, there, _swap(about, kind), (about.folder,))
        elif draw < 0.25 or about.file.endswith(".jsonl"):
            yield Case(f"{about.file} damaged", words, about.needed, _write(about, damaged(raw, rng)), (about.folder,))
        else:
            yield _changed(about, json.loads(raw), words, rng)


def _changed(about: Received, tree: Any, words: tuple[str, ...], rng: random.Random) -> Case:
    places = list(nodes(tree))
    sized = [(at, each) for at, each in places if at[-1] in about.counts and at[0] != "extra" and type(each) is int]
    if sized and rng.random() < 0.4:
        at, _ = rng.choice(sized)
        value: Any = rng.choice([-1, HUGE, "x", [], 1.5, None, DROP, {}, True, 10**30, -HUGE])
        nonsense = about.needed and value is not None and (value is not DROP or about.file.endswith("manifest.json"))
    else:
        at, before = rng.choice(places)
        value, nonsense = other_values(before, rng), False
    shown = "dropped" if value is DROP else repr(value)[:40]
    return Case(
        f"{about.file}: {at} {shown}", words, nonsense, _write(about, dumped(put(tree, at, value))), (about.folder,)
    )


def _write(about: Received, data: bytes) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        path = place / about.file
        path.write_bytes(data)
        if about.file.endswith("state.json"):  # as whoever changes it would: its manifest fits
            manifest = json.loads((path.parent / "manifest.json").read_text())
            (digest,) = digests({"": path}).values()
            manifest["files"]["state.json"] = {"size": len(data), "sha256": digest, "modified": path.stat().st_mtime_ns}
            (path.parent / "manifest.json").write_text(json.dumps(manifest))

    return change


def _swap(about: Received, kind: str) -> Callable[[Path], None]:
    return lambda place: replace_by(kind, place / about.file)


# -- YAML -------------------------------------------------------------------------------------------------------------

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
TEXTS = (
    BOMB,
    "a: &a {b: *a}\n",
    "train: {steps: 1}\ntrain: {steps: 2}\n",
    "train:\n\tsteps: 1\n",
    "train: !!python/object/apply:os.system [id]\n",
    "<<: {train: {steps: 1}}\n",
    "--- {}\n--- {}\n",
    "? [1, 2]\n: 3\n",
    "[]",
    "7",
    "'",
    "x: " + "[" * 5000,
    "train: {" + "steps: 1, " * 30000 + "}",
    "run: {name: '../x'}\n",
    "train: 2001-99-99\n",
    "\x00",
)


def yaml_cases(rng: random.Random, world: Path) -> Iterator[Case]:
    """Without end: the config of the world with one thing changed."""
    good = (world / "run.yaml").read_text()
    known = list(settings())
    verbs = [BASES["train"], BASES["slurm"], ["data", "pack", "run.yaml", "--out", "new"]]

    def case(name: str, text: str | bytes, nonsense: bool) -> Case:
        data = text if isinstance(text, bytes) else text.encode()
        words = tuple(rng.choice(verbs))
        return Case(f"run.yaml {name}", words, nonsense, lambda place: _yaml(place, data), ("run.yaml",))

    for text in TEXTS:
        yield case(repr(text[:40]), text, True)
        yield case(f"with {text[:40]!r}", good + "\n" + text, True)
    for kind in KINDS:
        words = tuple(rng.choice(verbs))
        yield Case(
            f"run.yaml is {kind}",
            words,
            True,
            lambda place, kind=kind: replace_by(kind, place / "run.yaml"),
            ("run.yaml",),
        )
    while True:
        draw = rng.random()
        if draw < 0.6:
            name, kind, facts = rng.choice(known)
            value = rng.choice(list(wrong_values(kind, facts)))
            yield case(f"{name}: {value[:40]}", _with(good, name, value), True)
        elif draw < 0.8:
            lines = good.splitlines()
            del lines[rng.randrange(len(lines))]
            yield case("without a line", "\n".join(lines), False)
        else:
            yield case("damaged", _torn(good.encode(), rng), False)


def _with(text: str, name: str, value: str) -> str:
    """The config with this text behind a setting, as somebody would write it there."""
    tree = yaml.safe_load(text)
    *above, last = name.split(".")
    inner = tree
    for key in above:
        inner = inner.setdefault(key, {})
    inner[last] = "@HERE@"
    return yaml.safe_dump(tree, default_flow_style=True, width=10**9).replace("'@HERE@'", value)


def _torn(raw: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(raw))
    return rng.choice([raw[:at], raw[:at] + rng.randbytes(3) + raw[at:], rng.randbytes(100), raw[:at] + raw[at + 1 :]])


def _yaml(place: Path, data: bytes) -> None:
    (place / "run.yaml").write_bytes(data)
