"""A batch script for Slurm, with the reason beside each line. It is a text of your own from then on: read it, edit it.

What it takes care of, because each of these has cost people runs:

- One task per GPU, ranks in blocks, so that the ranks of a node share Ulysses (docs/guides/multi_node.md).
- Before the time limit Slurm signals the batch script only (`B:`). The script passes it on as SIGUSR1, because srun turns SIGTERM
  into SIGKILL of all tasks. The run saves and ends with 75, and the script puts the job back into the queue.
- A job that was cancelled ends with 75 too, but is not RUNNING any more and stays away.
- The folder of `--output` must exist when the job starts, or Slurm fails without a word: the log lies where sbatch is called.
- srun does not take over `--cpus-per-task` from sbatch (since Slurm 22.05), and by default kills nobody when a task fails.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ...config import Config


@dataclass(frozen=True)
class Settings:
    """What a cluster wants to know and a config does not say."""

    time: str = "24:00:00"
    account: str | None = None
    partition: str | None = None
    cpus: int | None = None  # per task
    memory: str = "0"  # per node; 0 = all of it
    warning: int = 300  # seconds before the time limit
    requeue: bool = True
    setup: tuple[str, ...] = ()  # lines of shell before the run


def batch_script(config: Config, program: Sequence[str], settings: Settings | None = None, made_by: str = "") -> str:
    """program: the command of one rank, such as ["ithaca", "train", "run.yaml"]. ValueError if the config does not say how many."""
    settings = settings or Settings()
    launch = config.launch
    per_node = launch.cpu or launch.workers
    if per_node is None:
        raise ValueError("how many GPUs a node has must be known here; give --gpus-per-node N, or set launch.workers")
    _check(settings)
    return "\n".join([*_header(config, per_node, settings, made_by), "", *_body(config, program, settings)]) + "\n"


def _check(settings: Settings) -> None:
    seconds = _seconds(settings.time)
    if not 60 <= settings.warning < 1 << 16:  # Slurm's own limit
        raise ValueError(
            f"--warning {settings.warning} must be from 60, as Slurm itself may be so late, to 65535 s; use 120 or more"
        )
    if 0 < seconds <= settings.warning:
        raise ValueError(
            f"--warning {settings.warning} s is all of --time {settings.time}, so nothing would be trained"
        )
    if settings.cpus is not None and not 1 <= settings.cpus <= 1 << 12:
        raise ValueError(f"--cpus-per-task {settings.cpus} must be from 1 to 4096")
    if not re.fullmatch(r"[0-9]{1,12}[KMGTkmgt]?", settings.memory):
        raise ValueError(
            f"--mem {settings.memory!r} is not a size that Slurm knows; use one such as 512G, or 0 for all of it"
        )
    for name, value in {"account": settings.account, "partition": settings.partition}.items():
        if value is not None and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+-]*", value):
            raise ValueError(f"--{name} {value!r} is no name that a Slurm directive can hold")
    for line in settings.setup:
        if not line.strip() or not all(letter.isprintable() or letter == "\t" for letter in line):
            raise ValueError(f"--setup {line!r} must be one line of shell; give it several times")


def _seconds(time: str) -> int:
    """Of a time limit as Slurm writes it: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]]. 0: none."""
    match = re.fullmatch(r"(?:([0-9]{1,4})-)?([0-9]{1,6})(?::([0-9]{1,2}))?(?::([0-9]{1,2}))?", time)
    if match is None:
        raise ValueError(f"--time {time!r} is not a time that Slurm knows; use HH:MM:SS or D-HH:MM:SS")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None or len(numbers) == 3:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _header(config: Config, per_node: int, settings: Settings, made_by: str) -> list[str]:
    launch = config.launch
    what = "GPUs" if launch.cpu is None else "processes"
    lines = [
        "#!/bin/bash",
        f"# {_comment(config.run.name)}: {launch.nodes} nodes × {per_node} {what}.",
        *([f"# Made by: {_comment(made_by)}"] if made_by else []),
        "# Submit it with: sbatch THIS_FILE    Watch it in the log below and in status.json of the run folder.",
        "",
        f"#SBATCH --job-name={re.sub(r'[^A-Za-z0-9._-]', '_', config.run.name)}",
        f"#SBATCH --nodes={launch.nodes}",
        "# One task is one rank; it has one GPU.",
        f"#SBATCH --ntasks-per-node={per_node}",
    ]
    if launch.cpu is None:
        lines.append(f"#SBATCH --gpus-per-node={per_node}")
    lines += [
        "# CPU cores of a rank: data, optimizer offload, copies.",
        _directive("cpus-per-task", settings.cpus, "CORES_PER_TASK"),
        "# Host memory of a node; 0 is all of it, which store: host needs.",
        f"#SBATCH --mem={settings.memory}",
        f"#SBATCH --time={settings.time}",
        _directive("account", settings.account, "YOUR_ACCOUNT"),
        _directive("partition", settings.partition, "YOUR_PARTITION"),
        "# In the folder where sbatch is called. Every rank has a log of its own in the run folder.",
        "#SBATCH --output=slurm-%x-%j.log",
        "#SBATCH --open-mode=append",
        f"# {settings.warning} s before the time limit: a signal to this script, so that the run can save. Longer than a",
        "# step and a checkpoint take together.",
        f"#SBATCH --signal=B:TERM@{settings.warning}",
        "# The job may start again: after a time limit (below), a preemption, the failure of a node.",
        "#SBATCH --requeue" if settings.requeue else "#SBATCH --no-requeue",
    ]
    return lines


def _directive(name: str, value: object, placeholder: str) -> str:
    """One that is not known stands there as a comment, ready to be filled in."""
    return f"##SBATCH --{name}={placeholder}" if value is None else f"#SBATCH --{name}={value}"


def _body(config: Config, program: Sequence[str], settings: Settings) -> list[str]:
    cores = 'export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"'
    lines = [
        "set -u",
        *(settings.setup or ("# module load cuda; source .venv/bin/activate    (or: ithaca slurm --setup LINE)",)),
        cores,
        "",
        "# srun passes SIGUSR1 on to every rank as it is. SIGTERM it would turn into SIGKILL: nothing saved.",
        "step= stopping=no",
        "stop() {",
        "    trap '' TERM",
        "    stopping=yes",
        '    echo "job $SLURM_JOB_ID: asked to stop; the run saves and ends"',
        '    [ -n "$step" ] && kill -USR1 "$step"',
        "}",
        "trap stop TERM",
        "",
        "# Blocks: ranks fill one node after the other. A rank that fails takes the others with it after 60 s, not at once: ranks",
        "# that end together with 75 must not be killed by the first of them.",
        "srun --distribution=block --kill-on-bad-exit=0 --wait=60 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \\",
        f"    {shlex.join(program)} &",
        "step=$!",
        'wait "$step"',
        "code=$?",
        'if [ "$stopping" = yes ]; then  # the signal ended the first wait, not srun',
        '    wait "$step"',
        "    again=$?",
        '    [ "$again" -ne 127 ] && code=$again',
        "fi",
    ]
    if settings.requeue:
        lines += [
            "",
            "# 75: saved, start again. A job that somebody has cancelled is not RUNNING any more.",
            'if [ "$code" -eq 75 ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then',
            '    scontrol requeue "$SLURM_JOB_ID"',
            "fi",
        ]
    return [*lines, 'exit "$code"']


def _comment(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
