"""A stand-in for srun: 2 nodes × 2 tasks, all on this machine, with the variables that Slurm sets for a step.

Signals as the real one treats them: SIGUSR1 is passed on to every task, SIGTERM becomes SIGKILL. Ends with the largest exit code.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def main(arguments: list[str]) -> int:
    command = arguments[[word.startswith("-") for word in arguments].index(False) :]
    print("srun", *arguments[: len(arguments) - len(command)], file=sys.stderr)
    step = {
        **os.environ, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "127.0.0.[1-2]",
    }  # fmt: skip
    tasks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        for task in tasks:
            task.send_signal(signal.SIGKILL if number == signal.SIGTERM else number)

    signal.signal(signal.SIGUSR1, pass_on)
    signal.signal(signal.SIGTERM, pass_on)
    for rank in range(4):
        place = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2)}
        tasks.append(subprocess.Popen(command, env={**step, **place}))
    codes = [task.wait() for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
