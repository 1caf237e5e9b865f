"""Options that make no sense end with 2 and a line that names option, value and what would do: single cases that were accepted
once. tests/fuzz looks for others."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from ithaca.cli.main import main

PLAN = ["llama32_1b", "--gpus", "1xH100", "--context", "8K"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", *PLAN, "--rows=-1"], "rows=-1"),
        (["plan", *PLAN, "--lora=-1"], "lora=-1"),
        (["plan", *PLAN, "--kernel", "abc"], "abc"),
        (["plan", *PLAN, "--host", "0"], "'0' is no size"),
        (["plan", *PLAN, "--disk", "9" * 29], "is too large"),
        (["plan", *PLAN, "--layers=-2"], "--layers -2 must be at least 1"),
        (["plan", *PLAN, "--layers=--"], "argument --layers: expected a value, not '--'"),
        (["ladder", *PLAN, "--host", ""], "'' is not a number of bytes"),
        (["ladder", *PLAN, "--steps", "9" * 20], "must be at least 1, and at most"),
        (["verify", "llama3", "--device", "cpu", "--world=-1"], "--world -1 must be from 1"),
        (["verify", "llama3", "--device", "cpu", "--timeout", "nan"], "--timeout nan must be a number of seconds above 0"),
        (["data", "pack", "a.npy", "--out", "p", "--vocabulary=-5"], "--vocabulary -5 must be from 2"),
        (["data", "pack", "a.npy", "--out", "p", "--vocabulary", "50", "--workers", "0"], "--workers 0 must be from 1"),
        (["data", "pack", "a.npy", "--out", "p", "--vocabulary", "50", "--chat-template", "pipe"], "pipe is a named pipe"),
        (["data", "inspect", "a.npy", "--samples=-1"], "--samples -1 must be from 0"),
        (["train", "pipe", "--check"], "pipe is a named pipe"),
        (["train", "run.yaml", "--check", "--train.steps", "9" * 20], "train.steps=99999999999999999999 must be at most"),
        (["train", "run.yaml", "--check", "--eval.lengths", "[!!python/name:os.system x]"], "the tag"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)  # fmt: skip
def test_what_makes_no_sense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
):
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.arange(50))
    os.mkfifo("pipe")
    Path("run.yaml").write_text("model: {folder: tiny_llama}\ndata: {context: 64}\ntrain: {steps: 1}\n")
    try:
        code = main(words)
    except SystemExit as end:  # argparse's own way
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "") and said in err and "Traceback" not in err
