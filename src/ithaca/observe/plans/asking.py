"""What a plan is asked for, as words by name: those of a link, of the page's fields, and of the command line are the same.

    read({"model": "llama3_8b", "gpus": "8xH100-80GB", "context": "3M"})

Names are those of `ithaca plan`'s options. A word that is empty was not given. What is wrong is said field by field, so that the
page can say it beside the field.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...base.units import format_tokens, parse_room, parse_tokens
from ...config import read_fields, split_words
from ...planner.hardware import Hardware, parse_gpus

MOST_GPUS = 65536
LONGEST = 2**34  # tokens: beyond any, and every list that is made of them stays short
_TOKENS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_AMOUNT = re.compile(r"(\d{1,15}(?:\.\d{1,12})?)\s*([kmbt]?)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Asked:
    """words: what was given. The others: what it means."""

    words: dict[str, str]
    model: str
    gpus: Hardware
    context: int
    options: dict[str, Any]  # the other arguments of the planner's functions
    pinned: dict[str, Any] = field(default_factory=dict)  # fields of the stack that stay as given
    tokens: float | None = None  # to train on, which has a cost
    price: float | None = None  # of a GPU for an hour

    @property
    def question(self) -> tuple[tuple[str, str], ...]:
        """All that an answer of the planner depends on."""
        return tuple((name, word) for name, word in self.words.items() if name not in ("tokens", "price"))

    @property
    def command(self) -> str:
        """What asks for the same in a terminal."""
        command = ["ithaca", "plan", self.model]
        for name, word in self.words.items():
            flag = f"--{name.replace('_', '-')}"
            if name in FLAGS:
                command += [flag] if word == "yes" else ["--no-offload-optimizer"] * (name == "offload_optimizer")
            elif name == "stack":
                for _, pair in split_words("", word):
                    key, _, value = pair.partition("=")
                    command += [f"--stack.{key.strip()}", value.strip()]
            elif name not in ("model", "tokens", "price"):
                command += [flag, word]
        return shlex.join(command)


class Wrong(ValueError):
    """What cannot be asked. problems: by the name of the field."""

    def __init__(self, problems: dict[str, str]) -> None:
        super().__init__("; ".join(problems.values()))
        self.problems = problems


def read(words: Mapping[str, str]) -> Asked:
    given = {name: words[name].strip() for name in NAMES if words.get(name, "").strip()}
    problems = {name: f"{name!r} is no question of a plan" for name in words if name not in NAMES}
    values: dict[str, Any] = {}
    for name, word in given.items():
        try:
            values[name] = READ[name](word)
        except ValueError as error:
            problems[name] = str(error)
    for name, wanted in NEEDED.items():
        if name not in given:
            problems[name] = wanted
    if "lora_targets" in values and not values.get("lora"):
        problems["lora_targets"] = "adapters are named here, but there are none: give their rank too"
    if values.get("quantize") not in (None, "nf4"):
        problems["quantize"] = f"{values['quantize']!r} is unknown: there is nf4"
    elif "quantize" in values and not values.get("lora"):
        problems["quantize"] = "four bits are for a frozen base under adapters: give their rank too"
    if problems:
        raise Wrong(problems)
    model, gpus, context = (values.pop(name) for name in NEEDED)
    if values.pop("synchronous", False):
        values["asynchronous"] = False
    pinned, tokens, price = values.pop("stack", {}), values.pop("tokens", None), values.pop("price", None)
    return Asked(given, model, gpus, context, values, pinned, tokens, price)


def spelled(change: Mapping[str, Any], gpus: str) -> dict[str, str]:
    """Arguments of the planner as words for `read`. gpus: as they were asked for."""
    words = {}
    for name, value in change.items():
        if isinstance(value, Hardware):
            words[name] = gpus_text(value, gpus)
        elif name == "context":
            words[name] = format_tokens(value)
        elif name in ("host", "disk"):
            words[name] = f"{-(-value // 10**9)}GB"
        else:
            words[name] = "yes" if value is True else str(value)
    return words


def gpus_text(hardware: Hardware, like: str) -> str:
    """As `parse_gpus` reads it back. like: GPUs of the same kind, as somebody spelled them."""
    name = re.sub(r"^\s*(\d+\s*x\s*)*", "", like, flags=re.IGNORECASE)
    if hardware.per_node != Hardware.per_node and hardware.count > hardware.per_node:
        return f"{hardware.count // hardware.per_node}x{hardware.per_node}x{name}"
    return f"{hardware.count}x{name}"


def _gpus(text: str) -> Hardware:
    hardware = parse_gpus(text)
    if hardware.count > MOST_GPUS:
        raise ValueError(f"{text!r} are more GPUs than can be planned here; at most {MOST_GPUS:,}")
    return hardware


def _context(text: str) -> int:
    tokens = parse_tokens(text)
    if not 2 <= tokens <= LONGEST:
        raise ValueError(f"a context of {text} must be at least 2 tokens, and at most {format_tokens(LONGEST)}")
    return tokens


def _whole(least: int, what: str) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not re.fullmatch(r"\d{1,7}", text, re.ASCII) or not least <= int(text) <= 1_000_000:
            raise ValueError(f"{what} must be a whole number of at least {least}, and at most 1,000,000, not {text!r}")
        return int(text)

    return number


def _amount(what: str) -> Callable[[str], float]:
    def number(text: str) -> float:
        match = _AMOUNT.fullmatch(text)
        if match is None or not (value := float(match[1]) * _TOKENS[match[2].lower()]):
            raise ValueError(f"{text!r} is not {what}")
        return value

    return number


def _flag(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"{text!r} is neither yes nor no")
    return text == "yes"


def _stack(text: str) -> dict[str, Any]:
    pinned, problems = read_fields(split_words("stack", text))
    if problems:
        raise ValueError("; ".join(problems))
    return pinned


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


NEEDED = {
    "model": "name a model: a preset, a folder with config.json, or owner/name on the Hub",
    "gpus": "name GPUs, such as 8xH100-80GB",
    "context": "say how long a row is, such as 1M",
}
READ: dict[str, Callable[[str], Any]] = {
    "model": str,
    "gpus": _gpus,
    "context": _context,
    "rows": _whole(1, "rows"),
    "accumulation": _whole(1, "micro-batches"),
    "host": parse_room,
    "disk": parse_room,
    "optimizer": str,
    "offload_optimizer": _flag,
    "lora": _whole(0, "the rank of adapters"),
    "lora_targets": _names,
    "quantize": str,
    "synchronous": _flag,
    "deterministic": _flag,
    "kernel": str,
    "stack": _stack,
    "tokens": _amount("a number of tokens such as 10B; here 1B = 10⁹"),
    "price": _amount("a price, such as 2.50"),
}
NAMES = tuple(READ)
FLAGS = tuple(name for name, reader in READ.items() if reader is _flag)
