"""Reading a run: precedence, places, types, and every mistake at once with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ithaca import Stack
from ithaca.config import load
from ithaca.config.schema import LINEARS
from ithaca.config.suggest import WORDS, paths

from .runs import GOOD, mistakes, run


def more(text: str) -> str:
    """GOOD with lines at its end, from line 9 on."""
    return GOOD + text


# What comes out.


def test_values_defaults_and_places():
    Path("run.yaml").write_text(GOOD)
    loaded = load("run.yaml", ["train.lr=2e-5", "--stack.ulysses=4"])
    config = loaded.config
    assert (config.model.folder, config.data.context, config.train.steps) == ("models/x", 65536, 10)
    assert config.data.sources[0].path == "a.jsonl" and config.train.lr == 2e-5 and config.train.clip == 1.0
    assert config.stack.chosen == Stack(ulysses=4) and config.model.lora is None
    origin = loaded.origins["data.context"]
    assert (origin.file, origin.line, origin.column, str(origin)) == ("run.yaml", 4, 12, "run.yaml:4")
    assert str(loaded.origins["train.lr"]) == "--train.lr" and "train.clip" not in loaded.origins
    assert str(loaded.origins["data.sources[0].path"]) == "run.yaml:5"


def test_command_line_over_file_over_recipe_over_default():
    text = "recipe: tiny_cpu\ntrain:\n  rows: 8\n  lr: 5e-4\n"
    config = run(text, "train.lr=7e-4")
    assert config.train.lr == 7e-4  # command line
    assert config.train.rows == 8  # file
    assert config.train.steps == 80 and config.stack.ring == 2  # recipe
    assert config.train.eps == 1e-8  # default
    other = run("recipe: tiny_cpu\ndata: {context: 1M}\n", recipe="llama3_8b_1m_8xh100")
    assert other.launch.workers == 8 and other.launch.cpu is None  # --recipe wins over the file's


def test_a_recipe_alone_and_names():
    loaded = load(None, recipe="tiny_cpu")
    assert loaded.recipe == "tiny_cpu" and loaded.config.run.folder == "runs/tiny_cpu"
    assert run(GOOD).run.name == "run" and run(GOOD).run.folder == "runs/run"
    assert run(GOOD, "run.name=b").run.folder == "runs/b"
    assert run(GOOD, "run.folder=/x/y").run.name == "run"


def test_optional_sections_are_switched_by_null_and_by_their_fields():
    assert run(GOOD, "model.lora.rank=8").model.lora is not None
    lora = run(GOOD, "model.lora={}").model.lora
    assert lora is not None and (lora.rank, lora.targets) == (16, LINEARS)
    text = GOOD.replace("folder: models/x", "folder: models/x\n  lora: {rank: 4, alpha: 8}")
    assert run(text).model.lora is not None
    assert run(text, "model.lora=null").model.lora is None
    again = run(text, "model.lora=null", "model.lora.rank=2").model.lora
    assert again is not None and (again.rank, again.alpha) == (2, 32.0)  # what null dropped does not come back
    assert run(GOOD + "log:\n").log == run(GOOD).log  # all lines of a section commented out


def test_auto_and_fields_of_the_stack_exclude_each_other_by_layer():
    assert run(GOOD).stack.auto and run(GOOD).stack.chosen is None
    text = more("stack: {ulysses: 4, store: host, scratch: /fast}\n")
    assert run(text).stack.chosen == Stack(ulysses=4, store="host")
    auto = run(text, "stack=auto").stack
    assert auto.auto and auto.chosen is None and auto.ulysses == 1 and auto.scratch == "/fast"
    assert run(text, "stack=auto", "stack.ring=2").stack.chosen == Stack(ring=2)
    assert run(more("stack: auto\n"), "stack.scratch=/fast").stack.chosen is None
    assert mistakes(more("stack: {auto: true, ring: 2}\n")) == [
        "run.yaml:9: stack.ring cannot be given with auto: true; drop one of them"
    ]


def test_home_is_expanded_in_paths_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    config = run(GOOD.replace("models/x", "~/x"), "run.name=~x")
    assert config.model.folder == "/home/somebody/x" and config.run.name == "~x"


# Mistakes.


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train: {stepss: 3, steps: 1}", "unknown key train.stepss; did you mean train.steps?"),
        ("steps: 3", "unknown key steps; did you mean train.steps?"),
        ("train: {steps: 2, context: 3}", "unknown key train.context; did you mean data.context?"),
        ("log: {folder: x}", "unknown key log.folder; did you mean model.folder or run.folder?"),
        ("trian: {steps: 2}", "unknown key trian; did you mean train?"),
        ("train: {steps: 2, learning_rate: 3}", "unknown key train.learning_rate; did you mean train.lr?"),
        ("seq_len: 4096", "unknown key seq_len; did you mean data.context?"),
        ("log: {zzz: 1}", "unknown key log.zzz; log has every, tensorboard, wandb, mlflow"),
        ("eval: {sources: [{pth: x}]}", "unknown key eval.sources[0].pth; did you mean eval.sources[0].path?"),
        ("stack: {ulyses: 2}", "unknown key stack.ulyses; did you mean stack.ulysses?"),
        ("stack: {Ulysses: 2}", "unknown key stack.Ulysses; did you mean stack.ulysses?"),
    ],
)
def test_unknown_keys(line: str, words: str):
    text = more(line + "\n") if not line.startswith("train") else GOOD.partition("train:")[0] + line + "\n"
    number = text.count("\n")
    assert f"run.yaml:{number}: {words}" in mistakes(text)


def test_words_of_other_trainers_lead_to_keys_that_exist():
    assert len(WORDS) > 50 and set(WORDS.values()) <= set(paths())
    assert not set(WORDS) & {each.rpartition(".")[2] for each in paths()}  # never away from a name that exists


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("steps: 10", "steps: ten", 7, "train.steps='ten' must be a whole number"),
        ("steps: 10", 'steps: "10"', 7, "train.steps='10' must be a whole number; drop the quotes"),
        ("steps: 10", "steps: 1.5", 7, "train.steps='1.5' must be a whole number"),
        ("steps: 10", "steps: true", 7, "train.steps='true' must be a whole number"),
        ("steps: 10", "steps:", 7, "train.steps='' must be a whole number"),
        ("steps: 10", "steps: [1]", 7, "train.steps=a list of 1 must be a whole number"),
        ("steps: 10", "steps: {a: 1}", 7, "train.steps is a section here, but must be a whole number"),
        ("warmup: 2", "lr: .nan", 8, "train.lr='.nan' must be a number"),
        ("warmup: 2", "lr: 1e999", 8, "train.lr='1e999' must be a number"),
        ("warmup: 2", "clip: fast", 8, "train.clip='fast' must be a number or null"),
        ("warmup: 2", "schedule: cosin", 8,
         "train.schedule='cosin' must be one of cosine, linear, constant, wsd; did you mean cosine?"),
        ("warmup: 2", "deterministic: 1", 8, "train.deterministic='1' must be true or false"),
        ("warmup: 2", "betas: [0.9]", 8, "train.betas=a list of 1 must be a list of 2 numbers"),
        ("warmup: 2", "betas: 0.9", 8, "train.betas='0.9' must be a list of 2 numbers"),
        ("warmup: 2", "betas: [0.9, x]", 8, "train.betas[1]='x' must be a number"),
        ("context: 64K", "context: 64KB", 4,
         "data.context='64KB' is not a number of tokens such as 4096, 64K or 1M (1K = 1,024)"),
        ("context: 64K", "context: 0.3K", 4, "data.context='0.3K' is not a whole number: it comes to 307.2"),
        ("[a.jsonl]", "[[a]]", 5, "data.sources[0]=a list of 1 must be a section (key: value lines)"),
        ("train:\n  steps: 10\n  warmup: 2", "train: 5", 6, "train='5' must be a section (key: value lines)"),
        ("  warmup: 2", "stack: fast", 8, "stack='fast' must be a section (key: value lines), or the word auto"),
        ("  warmup: 2", "launch: {gpu_memory: 80G}", 8,
         "launch.gpu_memory='80G' is not a number of bytes such as 80GB (10⁹) or 64GiB (2³⁰) or null"),
    ],
)  # fmt: skip
def test_wrong_types(old: str, new: str, line: int, words: str):
    assert mistakes(GOOD.replace(old, new)) == [f"run.yaml:{line}: {words}"]


def test_all_mistakes_at_once():
    text = """\
recipe: tiny_cpu
model:
  folder: x
  dtype: fp16
data:
  contxt: 5
train:
  steps: many
  warmup: 300
  rows: 3
  accumulation: 2
stack:
  ulysses: 0
  store: tape
checkpoint: {keep_last: 0}
"""
    found = mistakes(text, "log.every=never", "lgo.every=1")
    assert found == [
        "run.yaml:4: model.dtype='fp16' must be one of bf16, fp32; did you mean bf16?",
        "run.yaml:6: unknown key data.contxt; did you mean data.context?",
        "run.yaml:8: train.steps='many' must be a whole number",
        "--log.every: log.every='never' must be a whole number",
        "--lgo.every: unknown key lgo; did you mean log?",
        "run.yaml:15: checkpoint.keep_last=0 must be at least 1",
        "run.yaml:13: stack.ulysses=0 must be at least 1; use 1 to switch it off",
        "run.yaml:14: stack.store='tape' is unknown; choose one of 'gpu', 'host', 'disk'",
        "run.yaml:11: train.accumulation=2 does not divide train.rows=3; every micro-batch must have the same number of rows",
    ]  # and nothing about warmup, which depends on the steps that could not be read


def test_what_is_missing_is_said_with_its_meaning():
    assert mistakes("") == [
        "model.folder is missing: a Hugging Face folder (config.json, safetensors, tokenizer), the name of a preset such as "
        "tiny_llama, or of a model on the Hub: owner/name, owner/name@revision (ithaca docs hub).",
        "data.context is missing: tokens in a row: the length trained at.",
        "there is nothing to train on: give data.sources (files, or synthetic: recall), or data.packed (a folder made by "
        "'ithaca data pack')",
        "train.steps is missing or 0: optimizer steps of the whole run, at least 1; or give train.epochs",
    ]


def test_files_and_recipes_that_are_not_there():
    with pytest.raises(ValueError, match=r"none.yaml: no such file$"):
        load("none.yaml")
    with pytest.raises(ValueError, match="tiny_cpu: no such file; did you mean --recipe tiny_cpu"):
        load("tiny_cpu")
    with pytest.raises(ValueError, match="is a folder, not a file"):
        load(Path.cwd())
    with pytest.raises(ValueError, match="recipe 'tiny_cp' is unknown; did you mean tiny_cpu"):
        load(None, recipe="tiny_cp")
    assert mistakes("recipe: [a]\n" + GOOD)[0].startswith("run.yaml:1: recipe must be the name of a recipe")
