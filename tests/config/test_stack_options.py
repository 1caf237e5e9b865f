"""A stack on the command line: every field of `Stack`, in one spelling, for every verb that takes one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

import ithaca.base.processes.pool
from ithaca.cli.main import main
from ithaca.config import load, read_fields, split_words
from ithaca.stack import PerLayer, Stack

# Of each field: a value as it is written, and what arrives. None of them is the default.
VALUES: dict[str, list[tuple[str, Any]]] = {
    "ulysses": [("2", 2)],
    "ring": [("2", 2)],
    "replicate": [("2", 2)],
    "heads_per_stage": [("1", 1), ("null", None)],
    "recompute": [("layer", "layer"), ("none", "none"), ("1 layer + 1 keep_attention", PerLayer(("layer", "keep_attention"))),
                  ("layer,keep_attention", PerLayer(("layer", "keep_attention"))), ("[layer, layer]", PerLayer(("layer",) * 2))],
    "store": [("host", "host"), ("2 host", PerLayer(("host", "host"))), ("1 disk + 1 gpu", PerLayer(("disk", "gpu")))],
    "tile": [("8K", 8192), ("1_000", 1000), ("none", None), ("null", None)],
    "shard_parameters": [("false", False), ("no", False)],
    "attention": [("flash", "flash"), ("auto", "auto")],
    "engine": [("composed", "composed"), ("auto", "auto")],
    "hold": [("true", True), ("false", False), ("null", None)],
}  # fmt: skip
GIVEN = [(name, text, value) for name, pairs in VALUES.items() for text, value in pairs]
PLANNED = ["llama32_1b", "--gpus", "4xH100", "--context", "64K"]
COMMANDS: dict[str, list[str]] = {
    "plan": ["plan", *PLANNED],
    "profile": ["profile", *PLANNED, "--cpu"],
    "ladder": ["ladder", *PLANNED],
    "verify": ["verify", "llama3", "--device", "cpu"],
    "train": ["train", "--recipe", "tiny_cpu", "--stack", "auto", "--launch.cpu", "4", "--train.rows", "4"],
}
OLDER: dict[str, Callable[[str, str], list[str]]] = {
    "plan": lambda name, text: ["--set", f"{name}={text}"],
    "profile": lambda name, text: ["--set", f"{name}={text}"],
    "ladder": lambda name, text: [f"--set={name}={text}"],
    "verify": lambda name, text: (
        ["--no-shard-parameters"] if name == "shard_parameters" else [f"--{name.replace('_', '-')}", text]
    ),
}


class Arrived(Exception):
    """A verb has read its command, and begins."""


@pytest.fixture
def stack_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], dict[str, Any]]:
    """The fields of a stack with which a verb begins to work."""

    class Workers:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> Workers:
            return self

        def __exit__(self, *_: object) -> None: ...

        def run(self, function: Any, case: Any, *_: Any, **__: Any) -> None:
            raise Arrived(vars(case.stack))

    def planned(*_: Any, **arguments: Any) -> None:
        raise Arrived(arguments)

    def trained(config: Any, *_: Any, **__: Any) -> None:
        raise Arrived(vars(config.stack.chosen))

    monkeypatch.setattr("ithaca.planner.ladder.ladder", planned)  # before the next, which it imports
    monkeypatch.setattr("ithaca.planner.search.plan", planned)
    monkeypatch.setattr("ithaca.training.preflight.check_run", trained)
    monkeypatch.setattr(ithaca.base.processes.pool, "Workers", Workers)

    def run(arguments: list[str]) -> dict[str, Any]:
        with pytest.raises(Arrived) as arrived:
            main(arguments)
        return arrived.value.args[0]

    return run


def test_every_field_has_values_here():
    assert [*VALUES] == [each.name for each in fields(Stack)]
    for each in fields(Stack):
        assert any(value != each.default for _, value in VALUES[each.name]), "the default proves nothing"


@pytest.mark.parametrize("verb", COMMANDS)
def test_every_field_arrives(verb: str, stack_of):
    for name, text, value in GIVEN:
        for words in ([f"--stack.{name}", text], [f"--stack.{name}={text}"]):
            arrived = stack_of([*COMMANDS[verb], *words])
            assert arrived[name] == value and type(arrived[name]) is type(value), (words, arrived)


@pytest.mark.parametrize("verb", OLDER)
def test_every_field_arrives_in_its_older_spelling(verb: str, stack_of):
    for name, text, value in GIVEN:
        arrived = stack_of([*COMMANDS[verb], *OLDER[verb](name, text)])
        assert arrived[name] == value and type(arrived[name]) is type(value), (name, text, arrived)


@pytest.mark.parametrize("verb", COMMANDS)
def test_several_fields_and_nothing_else(verb: str, stack_of):
    arrived = stack_of([*COMMANDS[verb], "--stack.ulysses", "2", "--stack.tile=8K", "--stack.heads-per-stage", "1"])
    names = {each.name for each in fields(Stack)}
    expected: dict[str, Any] = {"ulysses": 2, "tile": 8192, "heads_per_stage": 1}
    if verb in ("verify", "train"):  # have a whole stack
        assert {name: arrived[name] for name in names} == vars(Stack(**expected))
    else:
        assert {name: value for name, value in arrived.items() if name in names} == expected


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("text", ["", "[", "{a: 1}", "[[1]]", "many!", "1.5", "-1", "9" * 40, "0"])
def test_what_cannot_be_is_refused_as_by_a_run(name: str, text: str):
    """No value is read in one way by `train` and in another by the other verbs."""
    read, problems = read_fields([(f"--stack.{name}", f"{name}={text}")])
    try:
        chosen = load(None, [f"stack.{name}={text}"], "tiny_cpu").config.stack.chosen
    except ValueError as error:
        assert problems and all(part in str(error) for problem in problems for part in problem.split("\n"))
    else:
        assert chosen is not None and not problems and read == {name: getattr(chosen, name)}


def test_mistakes_come_all_at_once(capsys: pytest.CaptureFixture[str]):
    wrong = [
        "--stack.tiles",
        "3",
        "--stack.store=tape",
        "--set",
        "ulysses=x,hold=maybe",
        "--stack.heads_per_stage",
        "0",
    ]
    for verb in ("plan", "ladder", "profile"):
        assert main([*COMMANDS[verb], *wrong]) == 2
        said = capsys.readouterr().err
        assert "5 problems" in said
        for part in ("--stack.tiles is not a field of the stack", "did you mean tile?", "store='tape' is unknown; choose one of",
                     "--set: stack.ulysses='x' must be a whole number", "--set: stack.hold='maybe' must be true or false or null",
                     "heads_per_stage=0 must be at least 1"):  # fmt: skip
            assert part in said, (verb, part)


def test_the_older_list_of_fields():
    words = split_words("--set", "recompute=layer,keep_attention,tile=8K, store=1 host + 1 gpu")
    assert read_fields(words) == (
        {"recompute": PerLayer(("layer", "keep_attention")), "tile": 8192, "store": PerLayer(("host", "gpu"))},
        [],
    )
    _, (problem,) = read_fields([("--stack.tile", "tile=1"), ("--set", "tile=1")])
    assert problem == "--set: stack.tile is given with --stack.tile too; drop one of them"
    assert read_fields([("--stack.tile", "tile=1"), ("--stack.tile", "tile=2")]) == ({"tile": 2}, []), (
        "the last one, as in a run"
    )
