"""The command line: light to import, clear exit codes (0 done, 1 a check failed, 2 cannot be carried out), clean JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import ithaca.base.processes.pool
from ithaca.cli.main import main, set_allocator
from ithaca.cli.measuring import going_on
from ithaca.engine.model.presets import PRESETS, TINY, preset_config
from ithaca.verify.reference import Item

from ..waiting import wait_until

HEAVY = ("torch", "transformers", "numpy", "safetensors", "rich", "peft")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True)


def cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of a command in this process."""
    try:
        code: Any = main(arguments)
    except SystemExit as end:  # argparse's own way
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# Light.


@pytest.mark.parametrize(
    "program",
    [
        "import ithaca; ithaca.Stack(ulysses=8).violations(8)",
        "from ithaca.cli.main import build_parser; build_parser().format_help()",
        "from ithaca.cli.main import main\ntry: main(['verify', '--help'])\nexcept SystemExit: pass",
        "from ithaca.cli.main import main\ntry: main(['--version'])\nexcept SystemExit: pass",
    ],
    ids=["import", "parser", "help", "version"],
)
def test_nothing_heavy_is_imported_before_it_is_needed(program: str):
    report = f"\nimport sys; print([n for n in {HEAVY} if n in sys.modules])"
    done = python("-c", program + report)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_of_the_installed_command():
    done = python("-m", "ithaca", "--help")
    assert done.returncode == 0 and "verify" in done.stdout and done.stderr == ""


def test_the_allocator_is_set_unless_the_user_has_settings():
    environ = {"HOME": "/there"}
    set_allocator(environ)
    assert environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environ = {name: "max_split_size_mb:512"}
        set_allocator(environ)
        assert environ == {name: "max_split_size_mb:512"}


def test_another_broken_pipe_is_an_error(capsys, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("ithaca.planner.search.plan", broken)
    code, _, error = cli(capsys, "plan", "llama3_8b", "--gpus", "8xH100", "--context", "64K")
    assert code == 2 and "Broken pipe" in error


@pytest.mark.parametrize("more", [[], ["--json", "--explain", "--compare", "tile=2048"]], ids=["little", "much"])
def test_a_reader_that_has_read_enough_is_no_error(more: list[str]):
    command = [sys.executable, "-m", "ithaca", "plan", "llama3_8b", "--gpus", "8xH100", "--context", "64K", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (said, process.returncode) == ("", 141)


def test_names_of_the_package_are_there_when_asked_for():
    assert set(ithaca.__all__) == {"Batch", "Plan", "Run", "Stack", "Trained", "plan", "prepare", "train"}
    assert all(getattr(ithaca, name) is not None for name in ithaca.__all__)
    with pytest.raises(AttributeError, match="module 'ithaca' has no attribute 'Trainer'"):
        ithaca.Trainer  # noqa: B018


# Requests that cannot be carried out: exit code 2, one line that says why, no traceback, no process started.


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(ithaca.base.processes.pool, "Workers", refuse)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["required: VERB"]),
        (["dance"], ["invalid choice: 'dance'"]),
        (["verify", "--fast"], ["unrecognized arguments: --fast"]),
        (["verify", "llama3", "--store", "tape"], ["store='tape' is unknown", "'host'"]),
        (["verify", "llama3", "--tile", "many"], ["--tile: stack.tile='many' is not a number of tokens", "or null"]),
        (["verify", "llama3", "--stack.tile", "many"], ["--stack.tile: stack.tile='many' is not a number of tokens"]),
        (
            ["verify", "llama3", "--stack.tiles", "1"],
            ["--stack.tiles is not a field of the stack", "did you mean tile?"],
        ),
        (["verify", "llama3", "--train.steps", "1"], ["--train.steps is not a field of the stack"]),
        (
            ["verify", "llama3", "--stack.tile", "1", "--tile", "2"],
            ["stack.tile is given with --stack.tile too; drop one"],
        ),
        (["verify", "llama3", "--world", "two"], ["--world", "invalid int value: 'two'"]),
        (["verify"], ["no model given", "llama3", "--matrix"]),
        (["verify", "llama9"], ["'llama9' is neither a folder nor a preset", *PRESETS, "owner/name"]),
        (["verify", "llama3", "--length", "1"], ["--length 1 is too short", "at least 2"]),
        (["verify", "llama3", "--world", "3", "--ulysses", "2"], ["world size 3 is not a multiple of", "= 2"]),
        (["verify", "llama3", "--ulysses", "0"], ["ulysses=0", "at least 1"]),
        (["verify", "llama3", "--ulysses", "none"], ["stack.ulysses='none' must be a whole number"]),
        (
            ["verify", "--ring", "0", "--recompute", "none", "--store", "host"],
            ["3 problems", "ring=0", "store='host' has nothing to hold", "no model given"],
        ),
        (
            ["verify", "--ring", "x", "--stack.tile", "0", "--stack.hold", "maybe", "--world", "0"],
            [
                "5 problems",
                "stack.ring='x'",
                "tile=0",
                "stack.hold='maybe'",
                "no model given",
                "--world 0 must be from 1",
            ],
        ),
        (["verify", "--matrix", "--ulysses", "4"], ["--matrix goes through the settings by itself"]),
        (["verify", "llama9", "--matrix"], ["'llama9' is neither a folder nor a preset"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and value and value[0] == "verify" else None,
)
def test_a_request_that_cannot_be_carried_out(no_workers, capsys, arguments: list[str], words: list[str]):
    code, out, err = cli(capsys, *arguments, *(["--device", "cpu"] if "llama3" in arguments else []))
    assert code == 2 and out == "" and "Traceback" not in err
    for word in words:
        assert word in err


def test_cuda_without_a_gpu_is_refused(no_workers, capsys, monkeypatch: pytest.MonkeyPatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = cli(capsys, "verify", "llama3", "--device", "cuda")
    assert code == 2 and "torch sees no GPU; use --device cpu" in err


def test_folders_that_hold_no_model_we_know(no_workers, capsys, tmp_path: Path):
    code, _, err = cli(capsys, "verify", str(tmp_path))
    assert code == 2 and "has no config.json" in err
    (tmp_path / "config.json").write_text("{ not json")
    code, _, err = cli(capsys, "verify", str(tmp_path))
    assert code == 2 and "Traceback" not in err and str(tmp_path) in err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    code, _, err = cli(capsys, "verify", str(tmp_path))
    assert code == 2 and "a t5 model is no decoder that transformers can build" in err


# What comes out.


class Canned:
    """Workers that answer at once with what a test says."""

    items: Sequence[Item] = ()
    cases: list[Any]

    def __init__(self, count: int, **_: Any):
        Canned.cases = []

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def run(self, fn, case, checks, *, world: int):
        Canned.cases.append(case)
        return [self.items] + [[]] * (world - 1)


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ithaca.base.processes.pool, "Workers", Canned)
    return Canned


GOOD = Item("loss", 1e-7, 1e-5)
BAD = Item("gradients (21)", 3e-2, 1e-5, "model.layers.1.mlp.up_proj.weight")


def test_all_within_their_limits_is_0(canned, capsys):
    canned.items = [GOOD]
    code, out, _ = cli(capsys, "verify", "llama3", "--device", "cpu", "--world", "2", "--ulysses", "2")
    assert code == 0 and "1 checks, all within their limits" in out and "MISS" not in out


def test_a_miss_is_1_and_named(canned, capsys):
    canned.items = [GOOD, BAD]
    code, out, err = cli(capsys, "verify", "llama3", "--device", "cpu")
    assert code == 1 and "1 of 2 checks missed" in out and "MISS" in out and BAD.where in out
    assert "missed: gradients (21) 3.0e-02 model.layers.1.mlp.up_proj.weight" in err


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
def test_an_error_that_is_no_number_is_a_miss_and_valid_json(canned, capsys, error: float):
    canned.items = [GOOD, Item("gradients (21)", error, 1e-5, "a gradient where there should be none")]
    code, out, err = cli(capsys, "verify", "llama3", "--device", "cpu", "--json")

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    report = json.loads(out, parse_constant=refuse)
    assert code == 1 and err == "" and report["ok"] is False
    assert [(item["error"], item["ok"]) for item in report["cases"][0]["items"]] == [(1e-7, True), (None, False)]


def test_flags_reach_the_stack(canned, capsys):
    canned.items = [GOOD]
    arguments = "verify llama3 --device cpu --ulysses 2 --ring 2 --replicate 2 --heads-per-stage 1 --recompute layer "
    arguments += "--store disk --tile none --attention cpu --length 99 --lora"
    code, _, _ = cli(capsys, *arguments.split())
    (case,) = canned.cases
    assert code == 0 and case.world == 8 and case.length == 99 and case.lora
    stack = ithaca.Stack(2, 2, 2, 1, "layer", "disk", None, True, "cpu")
    assert case.stack == stack
    cli(capsys, "verify", "llama3", "--device", "cpu", "--no-shard-parameters")
    assert canned.cases[0].stack == ithaca.Stack(shard_parameters=False)


def test_the_matrix_covers_what_it_is_asked_for(canned, capsys, tmp_path: Path):
    canned.items = [GOOD]
    code, out, _ = cli(capsys, "verify", "--matrix", "--device", "cpu", "--world", "2", "--scratch", str(tmp_path))
    assert code == 0 and {f"tiny_{case.model}" for case in canned.cases} == set(TINY)
    assert {(case.device, case.dtype, case.scratch) for case in canned.cases} == {("cpu", "float32", str(tmp_path))}
    assert f"{len(canned.cases)} cases" in out and max(case.world for case in canned.cases) == 2
    cli(capsys, "verify", "gemma3", "--matrix", "--device", "cpu", "--world", "2")
    assert {case.model for case in canned.cases} == {"gemma3"}


def test_a_refusal_of_the_workers_is_2_without_their_tracebacks(canned, capsys, monkeypatch: pytest.MonkeyPatch):
    def raise_it(self, *_: Any, **__: Any):
        text = "all 2 ranks raised ValueError: 2 problems\n  - this\n  - that\n\nTraceback of rank 0:\nTraceback (most recent"
        raise ithaca.base.processes.pool.WorkerError(text, [0, 1], "ValueError")

    monkeypatch.setattr(Canned, "run", raise_it)
    code, _, err = cli(capsys, "verify", "llama3", "--device", "cpu")
    assert code == 2 and err.endswith("ithaca verify: all 2 ranks raised ValueError: 2 problems\n  - this\n  - that\n")


# For real, once.


def test_verify_of_a_folder_for_real(tmp_path: Path, capsys):
    """A folder with nothing but a config: its model is shrunk and checked, and the report is JSON."""
    preset_config("qwen3").save_pretrained(tmp_path)
    code = main(["verify", str(tmp_path), "--device", "cpu", "--world", "1", "--length", "24", "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    report = json.loads(said.out)
    assert report["ok"] is True and len(report["cases"]) == 1
    names = [item["name"] for item in report["cases"][0]["items"]]
    assert "logits" in names and "loss" in names and any(name.startswith("gradients") for name in names)
    assert report["cases"][0]["stack"]["recompute"] == "keep_attention"


def test_what_takes_long_says_that_it_goes_on(capsys):
    said: list[str] = []
    with going_on("dry run at 13M", every=0.01):
        wait_until(lambda: said.append(capsys.readouterr().err) or "\n" in said[-1])
    assert re.match(r"ithaca: dry run at 13M: \d+ s so far\n", "".join(said))
    capsys.readouterr()
    with going_on("dry run at 8K", every=3600):
        pass
    assert capsys.readouterr().err == ""
