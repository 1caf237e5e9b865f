"""A stack on the command line: `--stack.FIELD VALUE`, the same for every verb that takes one, with values as in YAML.

Fields, types and help come from the dataclass, so a new field of `Stack` is an option of plan, ladder, profile and verify as soon
as it is there (`train` reads it as a setting of its config). Two older spellings are understood and read in the same way:
`--set FIELD=VALUE,...` of plan, ladder and profile, and `--FIELD VALUE` of verify.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from ..stack import CHOICES, Stack
from .nodes import Mapping, Place, Scalar, read_value
from .option import about, kinds
from .read import Reader
from .suggest import close_choice

FIELDS = {field.name: field for field in fields(Stack)}
Words = tuple[str, str]  # the option that was used, and FIELD=VALUE


class _Keep(argparse.Action):
    """Keeps what was given as `Words`; `const` is the field of an option of its own."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        kept, flag = namespace.stack_words, option_string or ""
        if self.nargs == 0:
            more = [(flag, f"{self.const}={'false' if flag.startswith('--no-') else 'true'}")]
        elif self.const is not None:
            more = [(flag, f"{self.const}={values}")]
        else:
            more = split_words(flag, values)
        namespace.stack_words = [*kept, *more]


def split_words(flag: str, text: str) -> list[Words]:
    """ "tile=8K,recompute=layer,none" -> tile=8K and recompute=layer,none"""
    return [(flag, pair) for pair in re.split(r",(?=\s*[\w-]+\s*=)", text)]


def add_stack_options(parser: Any, why: str, *, older: str) -> None:
    """Options for every field. why: what giving one means. older: the verb's other spelling, "set" or "field"."""
    parser.set_defaults(overrides=[], stack_words=[])
    group = parser.add_argument_group("stack", why)
    for name, field in FIELDS.items():
        facts, kind = about(Stack, field), kinds(Stack)[name]
        word = "TOKENS" if facts.get("unit") else "N" if int in kind.scalars else "true|false"
        word = "|".join(CHOICES.get(name, (word, "null") if kind.optional else (word,)))
        help = facts["help"].replace("%", "%%")
        group.add_argument(f"--stack.{name}", action=_Keep, const=name, metavar=word, help=help)
        if older == "field":
            flag = f"--{name.replace('_', '-')}"
            if bool in kind.scalars and not kind.optional:  # a switch
                more: dict[str, Any] = {"nargs": 0}
                group.add_argument(flag, f"--no-{flag[2:]}", action=_Keep, const=name, help=argparse.SUPPRESS, **more)
            else:
                group.add_argument(flag, action=_Keep, const=name, help=argparse.SUPPRESS)
    if older == "set":
        group.add_argument("--set", action=_Keep, metavar="FIELD=VALUE,...", help="the same, in an older spelling")


def read_stack(options: argparse.Namespace, world: int | None = None) -> tuple[dict[str, Any], list[str]]:
    """The fields that a command gives, and everything that is wrong with them."""
    dotted = [(f"--{text.partition('=')[0]}", text.removeprefix("stack.")) for text in options.overrides]
    return read_fields([*dotted, *options.stack_words], world)


def read_fields(words: Iterable[Words], world: int | None = None) -> tuple[dict[str, Any], list[str]]:
    """Fields of a stack by name, and everything that is wrong with them, alone and together."""
    reader = Reader(problems := [])
    for flag, text in words:
        name, sign, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not sign or name not in FIELDS:
            shown = flag if flag.startswith("--stack.") or "." in name else f"{flag} {text!r}"
            problems.append(
                f"{shown} is not a field of the stack; write --stack.FIELD VALUE with one of {', '.join(FIELDS)}"
                + close_choice(name, tuple(FIELDS))
            )
            continue
        path, place = f"stack.{name}", Place(flag)
        earlier = reader.given.get(path)
        if earlier is not None and earlier.place != place:  # which came last is not known
            reader.problem(path, place, f"{path} is given with {earlier.place} too; drop one of them")
        elif (node := read_value(value.strip(), flag, problems)) is None:
            reader.failed.add(path)
        else:
            reader.section(Mapping([(Scalar(name, place), node)], place), Stack, "stack.")
    names = [path.removeprefix("stack.") for path in reader.given]
    stack = Stack(**{name: reader.given[f"stack.{name}"].value for name in names})
    wrong = stack.violations(None if reader.failed else world)
    problems += [text for text in wrong if f"stack.{text.partition('=')[0]}" not in reader.failed]
    return {name: getattr(stack, name) for name in names}, problems
