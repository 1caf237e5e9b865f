"""The batch script: what it says, that bash accepts it, and that it runs, with stand-ins for Slurm's commands."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from ithaca.cli.main import main
from ithaca.config import load
from ithaca.training.launch.slurm import Settings, batch_script

from ...waiting import wait_until
from .conftest import LAUNCH, ROOT

Write = Callable[..., Path]
SAVES = """
import os, signal, sys, time
got = []
signal.signal(signal.SIGUSR1, lambda n, _: got.append(n))
open(f"ready-{os.environ['SLURM_PROCID']}", "w").close()
while not got: time.sleep(0.01)
open(f"saves-{os.environ['SLURM_PROCID']}", "w").close()
while not os.path.exists("disk"): time.sleep(0.01)
os.write(1, b"saved\\n")  # in one piece: the tasks share a pipe
sys.exit(75)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a batch script as slurmd does. scontrol writes down what it was asked for; squeue says what the test wants."""
    jobs: list[subprocess.Popen[str]] = []
    folder = tmp_path / "bin"
    folder.mkdir()
    stubs = {
        "srun": f'exec {sys.executable} {Path(__file__).with_name("stub_srun.py")} "$@"',
        "scontrol": f'echo "$@" >> {tmp_path}/scontrol',
        "squeue": f'cat {tmp_path}/state; echo "$@" >> {tmp_path}/squeue',
    }
    for name, line in stubs.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n")
        (folder / name).chmod(0o755)
    (tmp_path / "state").write_text("RUNNING\n")

    def submit(text: str) -> subprocess.Popen[str]:
        (tmp_path / "job.sh").write_text(text)
        # the variables of a batch script: PROCID and NTASKS are there, though no task is
        batch = {
            "SLURM_JOB_ID": "4711",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NTASKS": "4",
            "SLURM_NODEID": "0",
        }
        environ = {**os.environ, **batch, "SLURM_CPUS_PER_TASK": "3", "PYTHONPATH": str(ROOT)}
        environ["PATH"] = f"{folder}:{environ['PATH']}"
        job = subprocess.Popen(
            ["bash", "job.sh"], cwd=tmp_path, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        jobs.append(job)
        return job

    yield submit
    for job in jobs:  # of a test that has failed
        if job.poll() is None:
            for each in [*psutil.Process(job.pid).children(recursive=True), job]:
                each.kill()
            job.communicate()


def script(path: Path, program: Sequence[str], **settings: object) -> str:
    text = batch_script(load(path).config, program, Settings(**settings))  # pyright: ignore
    checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    return text


def test_its_srun_line_runs_a_job(run_yaml: Write, cluster: Callable[[str], subprocess.Popen[str]]):
    """Two nodes of two tasks find each other through Slurm's variables and sum over all ranks."""
    path = run_yaml("{cpu: 2, nodes: 2}", "{ulysses: 2, ring: 2}")
    job = cluster(script(path, [*LAUNCH, "tests.training.launch.functions:add_up", str(path)], cpus=3))
    out, err = job.communicate()
    assert job.returncode == 0, err
    assert out.startswith("sum 10 seen ") and out.count("'3', 'lo'") == 4  # cores of the task; the interface to rank 0
    assert "srun --distribution=block --kill-on-bad-exit=0 --wait=60 --cpus-per-task=3\n" in err


@pytest.mark.parametrize(
    ("state", "again"), [("RUNNING", True), ("COMPLETING", False)], ids=["time limit", "cancelled"]
)
def test_before_the_time_limit_the_run_saves_and_is_queued_again(
    run_yaml: Write, tmp_path: Path, cluster: Callable[[str], subprocess.Popen[str]], state: str, again: bool
):
    (tmp_path / "state").write_text(f"{state}\n")
    job = cluster(script(run_yaml("{cpu: 2, nodes: 2}"), [sys.executable, "-c", SAVES]))

    def still_running() -> str:
        assert job.poll() is None
        return ""

    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 4, still_running)
    job.send_signal(signal.SIGTERM)
    wait_until(lambda: len(list(tmp_path.glob("saves-*"))) == 4, still_running)
    (tmp_path / "disk").touch()  # none has ended before: a script that does not wait for them has nothing to end with
    out, err = job.communicate()
    assert job.returncode == 75, err
    assert out.count("saved\n") == 4 and "job 4711: asked to stop" in out
    assert (tmp_path / "squeue").read_text() == "--noheader --jobs=4711 --format=%T\n"
    assert (tmp_path / "scontrol").exists() is again
    if again:
        assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"


def test_a_failed_run_is_not_queued_again(
    run_yaml: Write, tmp_path: Path, cluster: Callable[[str], subprocess.Popen[str]]
):
    job = cluster(script(run_yaml("{cpu: 2, nodes: 2}"), ["sh", "-c", "exit $((SLURM_PROCID * 2))"]))
    job.communicate()
    assert job.returncode == 6 and not (tmp_path / "scontrol").exists()


def test_the_header(run_yaml: Write):
    text = script(
        run_yaml("{workers: 8, nodes: 2}", "{ulysses: 8, ring: 2}"), ["ithaca", "train", "my run.yaml"], account="physics",
        time="2-00:00:00", warning=600, requeue=False, setup=("module load cuda", "source .venv/bin/activate"),
    )  # fmt: skip
    for line in (
        "--job-name=run", "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--mem=0", "--time=2-00:00:00",
        "--account=physics", "--output=slurm-%x-%j.log", "--open-mode=append", "--signal=B:TERM@600", "--no-requeue",
    ):  # fmt: skip
        assert f"\n#SBATCH {line}\n" in text
    assert "\n##SBATCH --partition=YOUR_PARTITION\n" in text  # to be filled in
    assert "\nmodule load cuda\nsource .venv/bin/activate\n" in text
    assert "    ithaca train 'my run.yaml' &\n" in text and "scontrol" not in text
    directives = [number for number, line in enumerate(text.splitlines()) if line.startswith("#SBATCH")]
    commands = [number for number, line in enumerate(text.splitlines()) if line and not line.startswith("#")]
    assert max(directives) < min(commands)  # Slurm reads none after the first command


def test_on_the_command_line(run_yaml: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = run_yaml("{}", "{ulysses: 4}")
    words = ["slurm", str(path), "--nodes", "2", "--gpus-per-node", "4", "--train.steps", "7", "--partition", "gpu"]
    assert main([*words, "--program", "ithaca"]) == 0
    text, err = capsys.readouterr()
    assert "#SBATCH --partition=gpu\n" in text and err == ""
    assert f"    ithaca train {path} --train.steps 7 --launch.nodes 2 --launch.workers 4 &\n" in text
    out = tmp_path / "job.sh"
    assert main([*words, "--program", "ithaca", "--out", str(out)]) == 0
    assert out.read_text() == text and os.access(out, os.X_OK) and "then: sbatch" in capsys.readouterr().err
    out.write_text("mine")
    assert main([*words, "--out", str(out)]) == 2
    assert out.read_text() == "mine" and "is there already, and nothing was changed" in capsys.readouterr().err
    assert main(["slurm", "--recipe", "qwen3_32b_4m_16xh100"]) == 0
    text = capsys.readouterr().out
    assert "/ithaca train --recipe qwen3_32b_4m_16xh100 &\n" in text and "#SBATCH --ntasks-per-node=8\n" in text


def test_the_example_is_what_the_command_writes_and_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cluster: Callable[[str], subprocess.Popen[str]],
):
    """examples/cluster/slurm.sh, in a folder as docs/guides/multi_node.md makes it. No batch script of ours changes without it."""
    monkeypatch.chdir(tmp_path)
    assert main(["recipes", "cp", "qwen3_32b_4m_16xh100", "run.yaml"]) == 0
    capsys.readouterr()
    words = ["--time", "2-00:00:00", "--cpus-per-task", "8", "--setup", "source .venv/bin/activate"]
    assert main(["slurm", "run.yaml", *words, "--program", "ithaca"]) == 0
    text = (ROOT / "examples/cluster/slurm.sh").read_text()
    assert text == capsys.readouterr().out
    programs = tmp_path / ".venv/bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    (programs / "ithaca").write_text('#!/bin/sh\necho "rank $SLURM_PROCID: $*"\n')
    (programs / "ithaca").chmod(0o755)
    job = cluster(text)
    out, err = job.communicate()
    assert job.returncode == 0, err
    assert sorted(out.splitlines()) == [f"rank {rank}: train run.yaml" for rank in range(4)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "which run? Give a file"),
        (["CONFIG"], "give --gpus-per-node N, or set launch.workers"),
        (["CONFIG", "--gpus-per-node", "4", "--time", "soon"], "--time 'soon' is not a time that Slurm knows"),
        (["CONFIG", "--gpus-per-node", "4", "--warning", "5"], "--warning 5 must be from 60"),
        (["CONFIG", "--gpus-per-node", "4", "--time", "5", "--warning", "300"], "--warning 300 s is all of --time 5"),
        (["CONFIG", "--gpus-per-node", "4", "--mem", "abc"], "--mem 'abc' is not a size that Slurm knows"),
        (["CONFIG", "--gpus-per-node", "4", "--mem=-1G"], "--mem '-1G' is not a size that Slurm knows"),
        (["CONFIG", "--gpus-per-node", "4", "--cpus-per-task", "0"], "--cpus-per-task 0 must be from 1"),
        (["CONFIG", "--gpus-per-node", "4", "--program", " "], "--program is empty"),
        (["CONFIG", "--gpus-per-node", "4", "--setup", "a\nb"], "--setup 'a\\nb' must be one line of shell"),
        (["CONFIG", "--gpus-per-node", "9" * 20], "launch.workers=99999999999999999999 must be at most"),
        (["CONFIG", "--gpus-per-node", "4", "--account", "a b"], "--account 'a b' is no name"),
        (["CONFIG", "--gpus-per-node", "3"], "not a multiple of ulysses"),
        (["CONFIG", "--launch.nods", "3"], "launch.nodes"),
    ],
)
def test_what_is_refused(run_yaml: Write, capsys: pytest.CaptureFixture[str], words: list[str], message: str):
    path = run_yaml("{}", "{ulysses: 4}")
    assert main(["slurm", *(str(path) if word == "CONFIG" else word for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err


def test_settings_of_a_run_are_for_verbs_that_have_a_run(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["doctor", "--train.steps", "7"])
    assert end.value.code == 2 and "unrecognized arguments: --train.steps=7" in capsys.readouterr().err
