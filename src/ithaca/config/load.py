"""`load`: recipe, file and command line become one checked `Config`; everything wrong with them comes in one error.

Precedence: command line > file > recipe > default. A recipe is named by `recipe:` in the file or by --recipe. Lists are
replaced as a whole; sections are merged key by key; null switches an optional section off; `stack: auto` drops what lies
below it, and a field of the stack switches auto off; steps take the place of epochs below them, and the other way round.

    loaded = load("run.yaml", ["train.steps=100"])
    loaded.config.train.steps         # 100
    loaded.origins["train.steps"]     # --train.steps
    loaded.text                       # the whole config as YAML, with the origin of each value beside it
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path

from ..stack import Stack, require
from .check import problems_of
from .dump import dump
from .nodes import Place, read_file, read_text, read_value
from .read import Given, Reader, build
from .schema import Config

_SECTIONS = [field.name for field in fields(Config)]
_LENGTH = ("train.steps", "train.epochs")
_STACK = {f"stack.{field.name}" for field in fields(Stack)}


@dataclass(frozen=True)
class Loaded:
    config: Config
    origins: Mapping[str, Place]  # of every value that is not a default
    text: str  # the resolved config as YAML, each origin in a comment; `load` reads it back equal
    recipe: str | None = None


def load(path: str | os.PathLike[str] | None, overrides: Iterable[str] = (), recipe: str | None = None) -> Loaded:
    """Read a run.

    path: a YAML file; None = recipe and overrides alone.
    overrides: "train.steps=100", as `split_overrides` returns them.
    recipe: name of a recipe to start from; wins over the file's own `recipe:` key.
    """
    reader = Reader(problems := [])
    file: dict[str, Given] = {}
    if path is not None:
        named, file = _read_path(Path(path), os.fspath(path), reader)
        recipe = recipe or named
    layers = [_read_recipe(recipe, reader) if recipe else {}, file]
    for override in overrides:
        layers.append(_read_override(override, reader))
    given: dict[str, Given] = {}
    for layer in layers:
        given = _over(given, layer)
    _name(given, path, recipe)
    _phases(given)
    config = build(Config, given, "", reader.failed, problems)
    for paths, text in problems_of(config):
        if not any(_within(key, bad) for key in paths for bad in reader.failed):
            where = next((str(given[key].place) for key in paths if key in given), None)
            problems.append(f"{where}: {text}" if where else text)
    require(problems, "the configuration cannot be used")
    origins = {name: setting.place for name, setting in given.items()}
    return Loaded(config, origins, dump(config, origins), recipe)


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Take `--train.steps 100`, `--train.steps=100` and `--stack auto` out of a command line.

    Returns what is left for argparse, and the overrides as "train.steps=100". A flag with a point in its name is an override;
    so are --stack and --objective. Behind a bare `--` nothing is touched.
    """
    rest: list[str] = []
    overrides: list[str] = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return [*rest, word, *waiting], overrides
        name, equals, value = word[2:].partition("=")
        if not word.startswith("--") or not ("." in name or name in ("stack", "objective")):
            rest.append(word)
            continue
        if not equals:
            if not waiting or waiting[0].startswith("--"):
                raise ValueError(f"--{name} needs a value, such as --{name} VALUE")
            value = waiting.pop(0)
        overrides.append(f"{name}={value}")
    return rest, overrides


def _read_path(path: Path, shown: str, reader: Reader) -> tuple[str | None, dict[str, Given]]:
    if path.is_dir() or not path.exists():
        hint = f"; did you mean --recipe {shown}?" if shown in recipe_names() else ""
        what = "is a folder, not a file" if path.is_dir() else "no such file"
        reader.problems.append(f"{shown}: {what}{hint}")
        reader.failed.update(_SECTIONS)
        return None, {}
    tree = read_file(path, shown, reader.problems)
    if tree is None:
        reader.failed.update(_SECTIONS)  # what is missing is not the user's next mistake
        return None, {}
    recipe = reader.top(tree)
    return recipe, reader.take()


def _read_recipe(name: str, reader: Reader) -> dict[str, Given]:
    try:
        text = recipe_text(name)
    except ValueError as error:
        reader.problems.append(str(error))
        reader.failed.update(_SECTIONS)
        return {}
    tree = read_text(text, f"recipe {name}", reader.problems)
    if tree is not None:
        reader.section(tree, Config, "")
    return reader.take()


def _read_override(text: str, reader: Reader) -> dict[str, Given]:
    name, equals, value = text.removeprefix("--").partition("=")
    name = name.replace("-", "_")
    flag = f"--{name}"
    if not equals:
        reader.problems.append(f"{flag} needs a value: {flag}=VALUE")
        return {}
    node = read_value(value, flag, reader.problems)
    if node is None:
        reader.failed.add(name)
        return {}
    reader.one(name, node)
    return reader.take()


def _name(given: dict[str, Given], path: str | os.PathLike[str] | None, recipe: str | None) -> None:
    """A run is called after its file or recipe, so that two runs do not share a folder by accident."""
    name = Path(path).stem if path is not None else recipe
    if name:
        given.setdefault("run.name", Given(name, Place("name of the file" if path else "name of the recipe")))
    if "run.name" in given:
        given.setdefault("run.folder", Given(f"runs/{given['run.name'].value}", Place("run.name")))


def _phases(given: dict[str, Given]) -> None:
    """Length and steps of a run in phases need not be said twice."""
    phases = given.get("phases")
    if phases is not None and phases.value:
        longest, steps = max(phase.context for phase in phases.value), sum(phase.steps for phase in phases.value)
        given.setdefault("data.context", Given(longest, phases.place))
        if "train.epochs" not in given:
            given.setdefault("train.steps", Given(steps, phases.place))


def _over(below: dict[str, Given], above: dict[str, Given]) -> dict[str, Given]:
    """One layer over another."""
    kept = dict(below)
    auto = above.get("stack.auto")
    for path in above:
        for name in list(kept):
            if name.startswith((path + ".", path + "[")) or path.startswith(name + "."):
                del kept[name]  # a section that is switched off, on or replaced
    if auto is not None and auto.value:
        kept = {name: setting for name, setting in kept.items() if name not in _STACK}
    elif auto is None and any(name in _STACK for name in above):
        first = next(setting for name, setting in above.items() if name in _STACK)
        kept["stack.auto"] = Given(False, first.place)
    for one, other in (_LENGTH, _LENGTH[::-1]):
        # two options of one command line contradict each other; what lies below one of them is replaced by it
        if above.get(one) and above[one].value and other in kept and kept[other].place.line is not None:
            del kept[other]
    return {**kept, **above}


def _within(path: str, bad: str) -> bool:
    return path == bad or path.startswith((bad + ".", bad + "["))


_FOLDER = files("ithaca").joinpath("recipes")


def recipe_names() -> list[str]:
    return sorted(path.name.removesuffix(".yaml") for path in _FOLDER.iterdir() if path.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """The file as it is, comments included. ValueError if there is none of this name."""
    known = recipe_names()
    if name not in known:
        from .suggest import close_choice

        hint = close_choice(name, tuple(known)) or f"; there are {', '.join(known)}"
        raise ValueError(f"recipe {name!r} is unknown{hint}")
    return _FOLDER.joinpath(f"{name}.yaml").read_text(encoding="utf-8")
