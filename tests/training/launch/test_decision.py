"""`start`: here, in workers of our own, or as part of a job; and what is refused before any process starts."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ithaca.base.run_folder import RunFolder
from ithaca.config import load
from ithaca.training.launch import start

from .conftest import LAUNCH, ROOT

Write = Callable[..., Path]
LONG = os.environ.get("ITHACA_FAULTS") == "long"


def launch(function: str, config: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [*LAUNCH, f"tests.training.launch.functions:{function}", str(config)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True)


@pytest.fixture
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise AssertionError("workers were started")

    monkeypatch.setattr("ithaca.training.launch.supervise.watch", refuse)


# It runs


def test_workers_of_one_machine_find_each_other(run_yaml: Write):
    """And listen on loopback only: tests/security/test_network.py says why."""
    done = launch("add_up_and_look", run_yaml("{cpu: 3}", "{ulysses: 3}"))
    assert (done.returncode, done.stderr) == (0, "")
    added, listening = done.stdout.splitlines()
    assert added.startswith("sum 6 seen [['0', '0', '3', '3', ") and added.count("'lo'") == 3
    assert listening == f"listening {[['127.0.0.1']] * 3}"


def test_a_rank_that_raises_is_the_cause_though_others_notice_first(run_yaml: Write, tmp_path: Path):
    done = launch("fail_on_rank_1", run_yaml("{cpu: 2}"))
    lines = done.stderr.splitlines()
    assert done.returncode == 8 and done.stdout == ""
    assert lines[0].startswith("ithaca: rank 1 (pid ") and lines[0].endswith("): KeyError: 'missing weight'")
    assert lines[-1] == f"  traceback: {tmp_path}/run/logs/rank-1.log" and len(lines) < 6
    assert "in fail_on_rank_1" in (tmp_path / "run/logs/rank-1.log").read_text()
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not LONG, reason="a start more: make faults; tests/faults/test_runs.py kills a rank too")
def test_a_rank_that_is_killed_is_the_cause(run_yaml: Write, tmp_path: Path):
    done = launch("die_on_rank_1", run_yaml("{cpu: 2, restarts: 0}"))
    assert done.returncode == 8
    first, second, *_ = done.stderr.splitlines()
    assert first.startswith("ithaca: rank 1 (pid ") and "was killed by SIGKILL" in first
    assert second == '  last line of its log: "step 41"'


def test_one_device_needs_no_group_and_no_worker(run_yaml: Write, no_workers: None):
    """The stack itself, in this process: it compares with the untouched model."""
    from .functions import alone

    config = load(run_yaml("{cpu: 1}", "{recompute: keep_attention, store: host, shard_parameters: false}")).config
    assert start(config, alone) == 0
    assert start(config, "tests.training.launch.functions:alone") == 0


def test_an_exception_of_one_process_is_explained_in_one_screen(
    run_yaml: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def fail(_: object) -> int:
        raise KeyError("missing weight")

    assert start(load(run_yaml("{cpu: 1}", "auto")).config, fail) == 1
    err = capsys.readouterr().err
    assert err.startswith("ithaca: KeyError: 'missing weight'\n") and "Traceback" not in err
    assert "Traceback" in (tmp_path / "run/logs/rank-0.log").read_text()
    assert start(load(run_yaml("{cpu: 1}", "auto")).config, lambda _: 75) == 75


# It is refused


def test_several_nodes_without_a_job_say_which_commands_start_one(run_yaml: Write, no_workers: None):
    path = run_yaml("{nodes: 2, workers: 8}", "{ulysses: 8, ring: 2}")
    with pytest.raises(ValueError) as error:
        start(load(path).config, print, ["python3", "/env/bin/ithaca", "train", "my run.yaml"])  # pyright: ignore
    text = str(error.value)
    assert (
        "torchrun --nnodes=2 --nproc-per-node=8 --node-rank=I --master-addr=HOST_OF_NODE_0 --master-port=29500 "
        "/env/bin/ithaca train 'my run.yaml'\n"
    ) in text
    assert "srun --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 ithaca train 'my run.yaml'\n" in text


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ("{cpu: 3}", "the world size 3 is not a multiple of ulysses × ring × replicate = 2"),
        ("{}", "torch sees no GPU here; use the CPU with --cpu N"),
        ("{workers: 2}", "torch sees no GPU"),
    ],
)
def test_what_cannot_work_is_refused_before_any_process_starts(
    run_yaml: Write, no_workers: None, monkeypatch: pytest.MonkeyPatch, launch: str, words: str
):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError) as error:
        start(load(run_yaml(launch)).config, print)  # pyright: ignore
    assert words in str(error.value)


def test_gpus_are_counted(run_yaml: Write, monkeypatch: pytest.MonkeyPatch):
    from ithaca.training.launch.decision import Plan, plan_workers

    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    assert plan_workers(load(run_yaml("{}")).config) == Plan("cuda", 4)
    assert plan_workers(load(run_yaml("{workers: 2}")).config) == Plan("cuda", 2)
    with pytest.raises(ValueError, match=r"launch\.workers=8 needs as many GPUs, but torch sees 4"):
        plan_workers(load(run_yaml("{workers: 8}")).config)


def test_a_folder_in_use_is_refused_before_its_logs_are_touched(run_yaml: Write, no_workers: None, tmp_path: Path):
    with RunFolder(tmp_path / "run").claim(), pytest.raises(ValueError, match=r"is in use by pid \d+ on "):
        start(load(run_yaml("{cpu: 2}")).config, print)  # pyright: ignore


@pytest.mark.parametrize(
    ("launch_section", "words"),
    [
        ("{cpu: 4}", "launch.nodes=1 × launch.cpu=4 are 4 processes, but torchrun has started 2; make them agree"),
        ("{cpu: 1, nodes: 2}", "launch.nodes=2, but torchrun has started 1 nodes"),
    ],
)
def test_a_job_of_another_size_than_the_config(run_yaml: Write, launch_section: str, words: str):
    job = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    done = launch("add_up", run_yaml(launch_section), **job, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    assert done.returncode == 2
    assert done.stderr.startswith("ithaca: rank 1 on ") and words in done.stderr and "Traceback" not in done.stderr


def test_launch_by_module_says_how_it_is_used():
    done = subprocess.run(LAUNCH, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith(
        "ithaca: usage: python -m ithaca.training.launch module:function CONFIG"
    )
