"""Signals outside of training steps: every verb ends with its code and one line of words; nothing half written stays behind, no
process either. Real processes that stop at a named function, say so, and wait there for the signal."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from ithaca.base.processes.pool import ready_template
from ithaca.base.processes.signals import Stop, StoppedAtOnce, StoppedEarly
from ithaca.base.processes.worker import Worker, stop
from ithaca.cli.main import build_parser, main
from ithaca.storage.dcp import plainly

from ..conftest import PRELOAD

ALONE = ["--launch.cpu", "1", "--stack.ulysses", "1", "--stack.ring", "1", "--stack.tile", "null"]
TINY = ["--recipe", "tiny_cpu", "--data.context", "64", "--train.rows", "1", "--train.warmup", "0"]


def halting(_: object, cwd: str, where: str, verb: list[str]) -> None:
    """In a process of its own: a verb, up to this function, which says so and stays."""
    os.chdir(cwd)
    files = [os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("said", "here")]
    for number in (1, 2):
        os.dup2(files[0], number)
    module, _, path = where.partition(":")
    *owners, name = path.split(".")

    def halt(*_: object, **__: object) -> None:
        os.write(files[1], b"here")
        while True:
            time.sleep(0.01)  # signal.pause() would miss a signal that comes just before it

    setattr(functools.reduce(getattr, owners, importlib.import_module(module)), name, halt)
    sys.exit(main(verb))


def stopped(cwd: Path, where: str, verb: Sequence[object], number: int) -> tuple[int | None, str, list[psutil.Process]]:
    """Run a verb up to a function, and signal it there. -> exit code, what it said, the processes it had started"""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    os.mkfifo(cwd / "here")
    verb = [*map(str, verb)]
    worker = Worker("verb", halting, str(cwd), where, verb, environ=environ, template=ready_template(PRELOAD, environ))
    with open(cwd / "here") as here:  # until somebody writes there
        assert here.read(4) == "here", (cwd / "said").read_text()
        children = psutil.Process(worker.process.pid).children(recursive=True)
        worker.process.send(number)
        code = worker.process.wait()
    stop([worker])
    said = (cwd / "said").read_text()
    for name in ("said", "here"):
        (cwd / name).unlink()
    return code, said, children


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    assert main(["train", *TINY, *ALONE, "--train.steps", "1", "--run.folder", str(folder), "--quiet"]) == 0
    return folder


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("ids")
    paths = [folder / f"{name}.npy" for name in "ab"]
    for path in paths:
        np.save(path, np.arange(64) % 64)
    return paths


PACKING = "ithaca.base.processes.tasks:_drive"  # its workers have been started
READING = (
    "ithaca.storage.safe_metadata:SafeReader.read_data"  # inside of torch's reader, which wraps whatever is raised
)


def test_train_while_packing_ends_with_75_and_without_its_workers(tmp_path: Path, ids: list[Path]):
    sources = f"[{', '.join(map(str, ids))}]"
    verb = ["train", *TINY, *ALONE, "--train.steps", 1, "--data.sources", sources, "--run.folder", "run"]
    code, said, children = stopped(tmp_path, PACKING, verb, signal.SIGTERM)
    words = "ithaca train: stopped by SIGTERM before the first step: nothing to save; the same command goes on\n"
    assert code == 75 and said.endswith(words) and "Traceback" not in said
    assert children and not any(each.is_running() for each in children)
    assert not any((tmp_path / "run").glob("**/*unfinished*")) and not (tmp_path / "run/data").exists()


def test_data_pack_ends_with_the_signal_and_leaves_nothing(tmp_path: Path, ids: list[Path]):
    verb = ["data", "pack", *ids, "--vocabulary", 64, "--out", "packed", "--workers", 2]
    code, said, children = stopped(tmp_path, PACKING, verb, signal.SIGINT)
    assert (code, said.splitlines()[-1]) == (130, "ithaca data: stopped by SIGINT") and "Traceback" not in said
    assert children and not any(each.is_running() for each in children)
    assert not list(tmp_path.iterdir())


def test_eval_ends_with_the_signal_while_it_loads(tmp_path: Path, run_folder: Path):
    verb = ["eval", run_folder, "--out", "results", "--cpu", 1]
    code, said, _ = stopped(tmp_path, READING, verb, signal.SIGTERM)
    assert (code, said) == (143, "ithaca eval: stopped by SIGTERM\n")
    assert not list(tmp_path.glob("results/step-*"))


def test_export_ends_with_the_signal_and_leaves_no_half(tmp_path: Path, run_folder: Path):
    code, said, _ = stopped(tmp_path, READING, ["export", run_folder, "out"], signal.SIGTERM)
    assert (code, said) == (143, "ithaca export: stopped by SIGTERM\n")
    assert not list(tmp_path.iterdir())


VERBS = {
    "plan": ["llama3_8b", "--gpus", "1xH100", "--context", "1K"],
    "ladder": ["llama3_8b", "--gpus", "1xH100", "--context", "1K"],
    "profile": ["llama3_8b", "--context", "1K"],
    "eval": ["x"],
    "ask": ["x", "?"],
    "score": ["x", "y", "--out", "z"],
    "verify": [],
    "data": ["inspect", "x"],
    "ckpt": ["verify", "x"],
    "export": ["x", "y"],
    "report": ["x"],
    "recipes": ["ls"],
    "config": ["schema"],
    "slurm": ["x"],
    "doctor": [],
    "bench": [],
    "docs": [],
    "train": ["x"],
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_every_verb_ends_politely(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int):
    parse = build_parser()
    verbs = {name for action in parse._subparsers._group_actions for name in action.choices}  # pyright: ignore
    assert verbs == VERBS.keys()

    def asked(*_: object) -> None:
        os.kill(os.getpid(), number)
        raise AssertionError("the signal was not heard")

    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)]
    for verb, words in VERBS.items():
        options = parse.parse_args([verb, *words])
        options.run, options.overrides = asked, []
        monkeypatch.setattr("ithaca.cli.main._parse", lambda *_, options=options: options)
        code, err = main([]), capsys.readouterr().err
        name = signal.Signals(number).name
        assert code == (75 if verb == "train" else 128 + number), verb
        assert err.startswith(f"ithaca {verb}: stopped by {name}") and err.count("\n") == 1, err
    after = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)]
    assert after == before


def test_an_error_of_a_process_that_had_the_signal_too_is_not_what_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """SIGTERM to a group of processes: the end of a worker may be noticed by code that makes an error of it."""

    def asked(*_: object) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except StoppedEarly:
            raise OSError("a worker was killed by SIGTERM") from None
        return 0

    options = build_parser().parse_args(["doctor"])
    options.run = asked
    monkeypatch.setattr("ithaca.cli.main._parse", lambda *_: options)
    assert main([]) == 143 and capsys.readouterr().err == "ithaca doctor: stopped by SIGTERM\n"


def test_a_second_signal_has_its_own_code(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr("ithaca.base.processes.signals.time", SimpleNamespace(monotonic=lambda: now[0]))
    asked = Stop(early=False)
    asked.ask("SIGTERM")
    now[0] += 1.9
    asked.ask("SIGTERM")  # together with the first: schedulers signal launcher and ranks
    now[0] += 0.2
    with pytest.raises(StoppedAtOnce, match="SIGTERM came again") as found, plainly("writing"):
        asked.ask("SIGTERM")
    assert found.value.exit_code == 143


@pytest.mark.parametrize("to_the_end", [True, False])
def test_a_signal_after_the_end_does_not_change_the_exit_code(to_the_end: bool):
    """A launcher passes its own signal on to ranks that may be leaving already."""
    program = f"""
import os, signal, sys
from ithaca.base.processes.signals import listen
with listen(to_the_end={to_the_end}):
    pass
os.kill(os.getpid(), signal.SIGTERM)
os._exit(75)
"""
    done = subprocess.run([sys.executable, "-c", program])
    assert done.returncode == (75 if to_the_end else -signal.SIGTERM)
