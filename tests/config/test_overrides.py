"""The command line over a file: `--train.steps 100`, read as the type of the field."""

from __future__ import annotations

import pytest

from ithaca.config import split_overrides
from ithaca.stack import PerLayer

from .runs import GOOD, mistakes, run


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.lr=1e-5", 1e-5),
        ("train.lr=1", 1.0),
        ("train.clip=null", None),
        ("train.clip=none", None),
        ("train.warmup=3", 3),
        ("train.warmup=0.25", 0.25),
        ("train.betas=0.8,0.9", (0.8, 0.9)),
        ("train.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("train.deterministic=yes", True),
        ("train.weight-decay=0.5", 0.5),
        ("stack.recompute=none", "none"),
        ("stack.recompute=layer,keep_attention", PerLayer(("layer", "keep_attention"))),
        ("stack.recompute=1 layer + 2 keep_attention", PerLayer(("layer", *["keep_attention"] * 2))),
        ("stack.tile=8K", 8192),
        ("stack.tile=none", None),
        ("launch.gpu_memory=80GB", 80_000_000_000),
        ("data.context=1_024", 1024),
        ("data.seed=007", None),
        ("run.name=a: b #c", "a: b #c"),
        ("run.name=no", "no"),
        ("run.name=12", "12"),
        ("log.wandb=project", "project"),
        ("description=", None),
    ],
)
def test_overrides_are_read_as_the_type_of_their_field(override: str, value: object):
    if override == "data.seed=007":  # octal in YAML 1.1, decimal to people: refused
        assert mistakes(GOOD, override) == ["--data.seed: data.seed='007' must be a whole number"]
        return
    if override == "description=":
        assert mistakes(GOOD, override) == ["--description: description='' must be text"]
        return
    section: object = run(GOOD, override)
    for name in override.partition("=")[0].replace("-", "_").split("."):
        section = getattr(section, name)
    assert section == value and type(section) is type(value)


def test_sources_in_every_form():
    def sources(text: str) -> list[tuple]:
        return [(s.path, s.weight, s.columns.text) for s in run(GOOD, f"data.sources={text}").data.sources]

    assert sources("a.jsonl") == [("a.jsonl", 1.0, "text")]
    assert sources("a.jsonl,b/*.txt") == [("a.jsonl", 1.0, "text"), ("b/*.txt", 1.0, "text")]
    assert sources("[{path: a, weight: 2, columns: {text: body}}, b]") == [("a", 2.0, "body"), ("b", 1.0, "text")]
    assert run(GOOD.replace("[a.jsonl]", "a.jsonl")).data.sources == run(GOOD).data.sources
    assert mistakes(GOOD, "data.sources=[]") == [
        "--data.sources: there is nothing to train on: give data.sources (files, or synthetic: recall), or data.packed (a "
        "folder made by 'ithaca data pack')"
    ]


def test_overrides_are_split_from_other_arguments():
    words = "run.yaml --train.steps 100 --json --stack.ulysses=4 --stack auto --name x --train.lr -1 -- --a.b c"
    rest, overrides = split_overrides(words.split())
    assert rest == ["run.yaml", "--json", "--name", "x", "--", "--a.b", "c"]
    assert overrides == ["train.steps=100", "stack.ulysses=4", "stack=auto", "train.lr=-1"]
    assert split_overrides(["--run.name=a=b"]) == ([], ["run.name=a=b"])
    for words in (["--train.steps"], ["--train.steps", "--train.lr", "1"]):
        with pytest.raises(ValueError, match=r"--train.steps needs a value, such as --train.steps VALUE"):
            split_overrides(words)


def test_an_override_without_a_value_or_with_broken_yaml():
    assert mistakes(GOOD, "train.steps") == ["--train.steps needs a value: --train.steps=VALUE"]
    (only,) = mistakes(GOOD, "data.sources=[{path: a")
    assert only.startswith("--data.sources: not valid YAML: ")
