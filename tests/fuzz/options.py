"""Cases from the options of every verb, as its own parser has them, and from the settings of the schema."""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from ithaca.cli.main import build_parser
from ithaca.config.option import Kind, about, kinds
from ithaca.config.schema import Config

from .running import Case

# A command of each verb that is accepted. Cases change one thing about it.
PLANNED = ["model", "--gpus", "1xH100-80GB", "--context", "256", "--host", "64GB"]
BASES: dict[str, list[str]] = {
    "plan": ["plan", *PLANNED],
    "ladder": ["ladder", *PLANNED],
    "profile": ["profile", *PLANNED, "--cpu", "--steps", "1", "--out", "profile"],
    "train": ["train", "run.yaml", "--check"],
    "eval": ["eval", "run", "--cpu", "1", "--quiet", "--out", "results"],
    "ask": ["ask", "model", "who?", "--cpu", "1", "--tokens", "1"],
    "score": ["score", "model", "pairs", "--cpu", "1", "--out", "scores"],
    "verify": ["verify", "model", "--device", "cpu", "--world", "1"],
    "data pack": ["data", "pack", "texts.jsonl", "--tokenizer", "model", "--out", "new", "--workers", "1"],
    "data inspect": ["data", "inspect", "packed", "--context", "64"],
    "ckpt ls": ["ckpt", "ls", "run"],
    "ckpt verify": ["ckpt", "verify", "run"],
    "ckpt export": ["ckpt", "export", "run", "exported"],
    "export": ["export", "run", "exported"],
    "report": ["report", "run", "--out", "page.html"],
    "recipes ls": ["recipes", "ls"],
    "recipes show": ["recipes", "show", "tiny_cpu"],
    "recipes cp": ["recipes", "cp", "tiny_cpu", "mine.yaml"],
    "config schema": ["config", "schema"],
    "slurm": ["slurm", "run.yaml"],
    "doctor": ["doctor"],
    "bench": ["bench", "model", "--cpu", "1", "--contexts", "64", "--out", "bench"],
    "docs": ["docs", "config"],
}
POSITIONALS = {
    "plan": 1, "ladder": 1, "profile": 1, "train": 1, "eval": 1, "ask": 1, "score": 1, "verify": 1, "data pack": 2,
    "data inspect": 2, "ckpt ls": 2, "ckpt verify": 2, "ckpt export": 2, "export": 1, "report": 1, "recipes show": 2, "slurm": 1,
    "bench": 1, "docs": 1,
}  # fmt: skip
"""Which word of the command names what is to be read."""

NO_NUMBER = ("abc", "", " ", "1.5", "NaN", "0x10", "--", "1e999", "٣x", "9" * 20, "-" + "9" * 20)
NO_SIZE = ("abc", "-1", "", "1X", "nan", "1e3", "9" * 31, "0.3", "1 2", "K")
UNREADABLE = ("nowhere", "a_pipe", "", "a_file/x", "x" * 5000, "\u202ename", "a_folder/nowhere")
ODD = ("", "nowhere", "-1", "x" * 5000, "\u202e日本", "a_pipe", "a_folder", "$(touch x)", "a b", "%s%n", "\ud7ff", "'")
ZERO_IS_FINE = {"--lora", "--samples"}
SIZES = {"--context", "--host", "--disk", "--shard-size"}
READ = {"--tokenizer", "--base", "--chat-template"}  # what must be there
WRITTEN = {"--out", "--html", "--svg", "--png"}
IGNORED = {"--help", "--version", "--traceback"}
NEVER_REFUSED = {"doctor", "recipes ls", "config schema"}


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Every verb and its parser."""

    def walk(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
        inner = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
        if not inner:
            yield name, parser
        for action in inner:
            for key, each in action.choices.items():
                yield from walk(each, f"{name} {key}".strip())

    return dict(walk(build_parser(), ""))


def option_cases(rng: random.Random) -> Iterator[Case]:
    """Every option of every verb with every value that its kind has; in random order."""
    found = []
    for verb, parser in parsers().items():
        base = BASES[verb]
        for action in parser._actions:
            names = [name for name in action.option_strings if name.startswith("--")]
            if not names or names[0] in IGNORED:
                continue
            for value, nonsense in _values(verb, names[0], action):
                words = _without(base, names[0])
                found.append(Case(f"{verb} {names[0]}={value[:40]!r}", (*words, f"{names[0]}={value}"), nonsense))
        for value in UNREADABLE if verb in POSITIONALS else ():
            words = list(base)
            words[POSITIONALS[verb]] = value
            found.append(Case(f"{verb} of {value[:40]!r}", tuple(words), True))
        found.append(Case(f"{verb} --nonsense", (*base, "--nonsense"), True))
        found.append(Case(f"{verb} --train.nonsense", (*base, "--train.nonsense", "1"), True))
        found.append(Case(f"{verb} as it is", tuple(base), False))
        found.append(Case(f"{verb} alone", tuple(verb.split()), False))
    rng.shuffle(found)
    yield from found


def _values(verb: str, name: str, action: argparse.Action) -> Iterator[tuple[str, bool]]:
    if action.nargs == 0:
        yield "value", True  # a flag takes none
    elif action.choices is not None:
        yield from ((value, True) for value in ("abc", "", "-1", "BF16 ", "9" * 20))
    elif action.type is int:
        yield from ((value, True) for value in (*NO_NUMBER, "-1"))
        yield "0", name not in ZERO_IS_FINE
    elif action.type is float:
        yield from ((value, True) for value in ("abc", "", "nan", "-1", "0", "inf"))
    elif name in SIZES:
        yield from ((value, True) for value in (*NO_SIZE, "0"))
    elif name in READ and not (verb.endswith("export") and name == "--base"):  # which only --merge reads
        yield from ((value, True) for value in ("nowhere", "a_pipe", "a_file/x", "x" * 5000))
    else:
        sure = name in ("--kernel", "--optimizer", "--gpus", "--kind", "--format", "--long-documents", "--set", "--compare",
                        "--mem", "--time", "--column", "--fault", "--recipe", "--lora-targets")  # fmt: skip
        # a pipe to write to is waited for, as by a shell
        yield from ((value, sure and value != "") for value in ODD if not (name in WRITTEN and value == "a_pipe"))


def _without(words: list[str], name: str) -> list[str]:
    """The command without this option and its value."""
    if name not in words:
        return words
    at = words.index(name)
    flag = at + 1 == len(words) or words[at + 1].startswith("--")
    return words[:at] + words[at + (1 if flag else 2) :]


# -- settings ---------------------------------------------------------------------------------------------------------


def settings(cls: type = Config, prefix: str = "") -> Iterator[tuple[str, Kind, dict[str, Any]]]:
    """Every setting that can be given on the command line."""
    for each in fields(cls):
        kind = kinds(cls)[each.name]
        if kind.section is not None:
            yield from settings(kind.section, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}", kind, about(cls, each)


def wrong_values(kind: Kind, facts: dict[str, Any]) -> Iterator[str]:
    """Values that are nonsense for a setting, whatever else is set."""
    yield "{a: 1}"
    yield "[" * 30 + "]" * 30
    if facts.get("choices"):
        yield from ("abc", "-1", "'")
    if str in kind.scalars or (
        kind.items and not facts.get("choices") and (str in kind.items[0].scalars or kind.items[0].section)
    ):
        return  # any text may be a name
    yield "abc"
    yield "nan"
    yield "[[1]]"
    yield "!!python/object:os.system x" if not kind.items else "[!!python/name:os.system x]"
    if int in kind.scalars or float in kind.scalars:
        yield "1e999"
        if int in kind.scalars and float not in kind.scalars:
            yield from ("1.5", "9" * 20, "9" * 400)
        if "least" in facts:
            yield str(facts["least"] - 1)
        if "above" in facts:
            yield from (str(facts["above"]), "-1")
        if "most" in facts:
            yield str(facts["most"] + 1)
    elif bool in kind.scalars:
        yield from ("2", "-1", "maybe")


def override_cases(rng: random.Random) -> Iterator[Case]:
    found = []
    for name, kind, facts in settings():
        for value in wrong_values(kind, facts):
            # --cpu of eval stands behind launch.workers and launch.cpu, which are then not looked at
            among = [BASES["train"], BASES["slurm"], *([] if name.startswith("launch.") else [BASES["eval"]])]
            for base in rng.sample(among, 2):
                words = (*base, f"--{name}={value}")
                found.append(Case(f"{base[0]} {name}={value[:40]!r}", words, True))
        found.append(Case(f"train {name} without a value", (*BASES["train"], f"--{name}"), True))
        found.append(Case(f"train {name}x", (*BASES["train"], f"--{name}x=1"), True))
        for value in rng.sample(ODD, 2):
            found.append(Case(f"train {name}={value[:40]!r}", (*BASES["train"], f"--{name}={value}"), False))
    rng.shuffle(found)
    yield from found
