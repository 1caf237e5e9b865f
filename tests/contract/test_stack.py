"""Stack: every violation is found, with the value, the limit and the remedy; several at once are one error."""

from __future__ import annotations

import dataclasses

import pytest

from ithaca.stack import ATTENTION, RECOMPUTE, STORES, PerLayer, Stack, require

WRONG_VALUES = [
    (Stack(ulysses=0), ["ulysses=0", "at least 1", "use 1 to switch it off"]),
    (Stack(ring=-2), ["ring=-2", "at least 1", "use 1 to switch it off"]),
    (Stack(replicate=0), ["replicate=0", "at least 1", "use 1 to switch it off"]),
    (Stack(heads_per_stage=0), ["heads_per_stage=0", "at least 1", "None to switch it off"]),
    (Stack(tile=-1), ["tile=-1", "at least 1", "None to switch it off"]),
    (Stack(recompute="attention"), ["recompute='attention'", *map(repr, RECOMPUTE)]),
    (Stack(store="nvme"), ["store='nvme'", *map(repr, STORES)]),
    (Stack(attention="triton"), ["attention='triton'", *map(repr, ATTENTION)]),
    (Stack(recompute=("layer", "some")), ["recompute='some'", *map(repr, RECOMPUTE)]),
    (Stack(recompute=("layer", "none"), store="host"), ["store='host'", "recompute='none'", "keep_attention"]),
    (Stack(recompute=("layer", "none"), store=("gpu", "host")), ["store='host'", "recompute='none'", "keep_attention"]),
    (Stack(recompute="none", store=("gpu", "host")), ["store='host'", "recompute='none'", "keep_attention"]),
    (Stack(store=("host", "tape")), ["store='tape'", *map(repr, STORES)]),
    (Stack(store="2 host + 3 disk"), ["store='2 host + 3 disk'", "one of them beside the GPU", "use disk"]),
    (Stack(recompute="none", engine="streamed"), ["engine='streamed'", "recompute='none'", "engine='composed'"]),
    (Stack(engine="fast"), ["engine='fast'", "'composed'", "'streamed'"]),
    (Stack(recompute="none", store="host"), ["store='host'", "recompute='none'", "keep_attention", "store='gpu'"]),
    (Stack(recompute="none", store="disk"), ["store='disk'", "recompute='none'", "keep_attention", "store='gpu'"]),
    (
        Stack(shard_parameters=False, replicate=2),
        ["replicate=2", "shard_parameters=False", "set replicate=1 or shard_parameters=True"],
    ),
]
WRONG_TYPES = [
    ("ulysses", 2.0, "a whole number"),
    ("ring", "2", "a whole number"),
    ("replicate", None, "a whole number"),
    ("ulysses", True, "a whole number"),
    ("heads_per_stage", 1.5, "a whole number or None"),
    ("tile", "4096", "a whole number or None"),
    ("recompute", None, "a string"),
    ("store", 1, "a string"),
    ("store", ("host", None), "one string per layer"),
    ("attention", None, "a string"),
    ("shard_parameters", 1, "True or False"),
]


def test_the_default_and_every_listed_choice_are_fine():
    assert Stack().violations() == []
    assert Stack().violations(world=7) == []
    for name, choices in (("recompute", RECOMPUTE), ("store", STORES), ("attention", ATTENTION)):
        for choice in choices:
            stack = dataclasses.replace(Stack(), **{name: choice})
            assert stack.violations() == [], (name, choice)


def test_layers_may_differ():
    stack = Stack(recompute="1 layer + 2 none", store="1 host + 2 gpu")
    assert stack.violations() == [], "the layers that keep everything keep it on the GPU"
    assert [stack.store_of(layer) for layer in range(3)] == ["host", "gpu", "gpu"] and stack.offload == "host"
    assert stack.words("store") == "1 host + 2 gpu" and stack.words("tile") == 4096
    assert Stack().offload == Stack(store=("gpu", "gpu")).offload == "gpu"


@pytest.mark.parametrize("text", ["6 layer + 10 keep_attention", "16 layer", "1 host + 1 gpu + 1 host"])
def test_one_word_for_each_layer_comes_back_as_it_was_written(text: str):
    read = PerLayer.read(text)
    assert read is not None and str(read) == text and PerLayer.read(str(read)) == read
    assert Stack(recompute=text).recompute == read and Stack(recompute=tuple(read)).words("recompute") == text


@pytest.mark.parametrize(
    "text",
    ["", "layer", "6", "6 + 10 layer", "layer + 6", "6 layer +", "² layer", "0 layer", "999999999 layer", "-1 layer"],
)
def test_what_names_no_layers_is_refused_as_it_was_written(text: str):
    (line,) = Stack(store="gpu", recompute=text, engine="streamed").violations() or ["fine"]
    assert line.startswith(f"recompute={text!r} is unknown") or (text, line) == ("layer", "fine")


def test_a_stack_is_plain_data():
    stack = Stack(ulysses=4, ring=2)
    assert stack.context_ranks == 8
    assert stack == Stack(ulysses=4, ring=2) and hash(stack) == hash(Stack(ulysses=4, ring=2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        stack.ring = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("stack", "words"), WRONG_VALUES, ids=lambda case: str(case)[:60])
def test_a_wrong_value_is_named_with_its_limit_and_remedy(stack: Stack, words: list[str]):
    (line,) = stack.violations()
    for word in words:
        assert word in line


@pytest.mark.parametrize(("name", "value", "want"), WRONG_TYPES)
def test_a_wrong_type_is_named_and_arithmetic_is_not_tried(name: str, value: object, want: str):
    (line,) = dataclasses.replace(Stack(ring=0), **{name: value}).violations(world=4)
    assert line == f"{name}={value!r} must be {want}"


def test_several_mistakes_are_one_error_with_a_line_each():
    stack = Stack(ulysses=0, tile=0, recompute="some", store="tape")
    with pytest.raises(ValueError) as caught:
        require(stack.violations(4), "this stack cannot run")
    lines = str(caught.value).splitlines()
    assert lines[0] == "this stack cannot run: 4 problems"
    for line, word in zip(lines[1:], ("ulysses=0", "tile=0", "recompute='some'", "store='tape'"), strict=True):
        assert line.startswith("  - ") and word in line


def test_one_mistake_is_one_line():
    with pytest.raises(ValueError) as caught:
        require(Stack(ring=0).violations(), "this stack cannot run")
    assert str(caught.value) == "this stack cannot run: ring=0 must be at least 1; use 1 to switch it off"
    require([], "nothing")


@pytest.mark.parametrize("world", [1, 2, 6, 9])
def test_a_world_that_does_not_fit_is_named_with_both_numbers(world: int):
    (line,) = Stack(ulysses=2, ring=2, replicate=2).violations(world)
    assert f"world size {world} is not a multiple of" in line
    assert "2 × 2 × 2 = 8" in line and "start a multiple of 8 processes" in line


@pytest.mark.parametrize("world", [8, 16, 24])
def test_what_is_left_of_the_world_is_data_parallel(world: int):
    assert Stack(ulysses=2, ring=2, replicate=2).violations(world) == []


def test_one_recompute_for_each_layer_of_the_model():
    import ithaca

    from .tiny import tiny

    with pytest.raises(ValueError, match="recompute='3 layer' names 3 layers, but the model has 2"):
        ithaca.prepare(tiny(), Stack(recompute=("layer", "layer", "layer"), shard_parameters=False))


def test_lists_and_numbers_of_numpy_are_taken():
    import numpy as np

    stack = Stack(recompute=["layer", "keep_attention"], store=["host", "gpu"], tile=np.int64(8))  # pyright: ignore
    assert stack == Stack(recompute=("layer", "keep_attention"), store=("host", "gpu"), tile=8)
    assert not stack.violations() and hash(stack) == hash(
        Stack(recompute="1 layer + 1 keep_attention", store="1 host + 1 gpu", tile=8)
    )
