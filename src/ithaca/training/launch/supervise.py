"""A run on this machine, started again when a worker is lost: attempts (local.py), and what to do after each.

    ended by itself, or stopped and saved      that is all
    an error that would come again             no: config, data, checkpoint, memory, numbers, bugs end with their exit code
    a rank lost, a hang                        again, from the newest good checkpoint, at most `launch.restarts` times
    the same step for the third time again     no: "3 restarts, no progress past step 41"
    asked to stop meanwhile                    no

torchrun's agent would restart too; docs/decisions/0017-launch.md says why it is not used. Each attempt has new processes and a
new store. The launcher holds the run folder for all attempts together, and the workers inherit its lock, so nobody else gets the
folder while one of them is alive. After the last attempt the launcher writes status.json, because a rank that was killed could not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from signal import SIGTERM, Signals
from typing import Any

from ...base import exits
from ...base.processes.fork_server import Template
from ...base.processes.system import catch_signals, say
from ...base.run_folder import RunFolder
from ...config.schema import Launch
from ...storage.files import latest
from ...storage.place import step_of
from .environment import ATTEMPT
from .local import PASSED_ON, Outcome, show, watch

NO_PROGRESS = 3  # restarts that fail before they pass the step that failed first
GRACE_SECONDS = 1.0  # between SIGTERM and SIGKILL of workers that miss one of them: there is nothing left to save


def supervise(
    command: Sequence[str], folder: RunFolder, launch: Launch, workers: int, template: Template | None = None,
    resumes: bool = True,
) -> int:  # fmt: skip
    """Run `command` in `workers` processes until it is done, or has no more chance. -> exit code

    template: of this command, if workers are to be forked from one. resumes: whether it goes on where a signal stops it.
    """
    policy = Policy(launch.restarts)
    with folder.claim() as lock, catch_signals(PASSED_ON) as signals, template or nullcontext():
        while True:
            outcome = watch(
                command, workers=workers, logs=folder.logs, grace=GRACE_SECONDS, signals=signals, timeouts=launch.timeouts,
                stacks=folder.stacks, inherit=[lock], listening=True, template=template, resumes=resumes,
                environ={**os.environ, ATTEMPT: str(policy.attempts)},
            )  # fmt: skip
            if outcome.code == exits.STOPPED and not resumes:
                by = signals[0] if signals else SIGTERM  # to a worker
                outcome = replace(outcome, code=128 + by, cause=f"stopped by {Signals(by).name}")
            verdict = policy.after(outcome, asked=bool(signals))
            if outcome.cause is None or verdict is not None:
                for text in filter(None, (outcome.cause, verdict)):
                    show(text)
                _note_end(folder, outcome, policy, resumes)
                return outcome.code
            start = step_of_newest(folder)
            show(
                f"{outcome.cause}\n  restarting from step {start} (attempt {policy.attempts - 1} of {launch.restarts})"
            )
            _note(folder, "restarting", resumes, cause=_line(outcome.cause), attempts=policy.attempts)


class Policy:
    """Whether to try again."""

    def __init__(self, restarts: int) -> None:
        self.restarts = restarts
        self.attempts = 1
        self.furthest = -1  # step
        self.stuck = 0  # attempts since that got no further

    def after(self, outcome: Outcome, asked: bool) -> str | None:
        """None: again. A text: not again, and why; empty where the cause says it all."""
        if outcome.cause is None or not outcome.again or asked:
            return ""
        if outcome.step > self.furthest:
            self.furthest, self.stuck = outcome.step, 0
        else:
            self.stuck += 1
        if self.stuck >= NO_PROGRESS:
            return f"{self.stuck} restarts, no progress past step {self.furthest}. Not retrying."
        if self.attempts > self.restarts:
            return f"launch.restarts={self.restarts} are used up; the same command goes on" if self.restarts else ""
        self.attempts += 1
        return None


def step_of_newest(folder: RunFolder) -> int:
    newest = latest(folder.checkpoints)
    return 0 if newest is None else step_of(newest) or 0


def _note_end(folder: RunFolder, outcome: Outcome, policy: Policy, resumes: bool) -> None:
    """What the workers could not write down themselves, or not rightly: one that fails because another has calls that the cause."""
    if outcome.cause is not None:
        _note(folder, "failed", resumes, cause=_line(outcome.cause), exit_code=outcome.code, attempts=policy.attempts)
    elif outcome.code == exits.STOPPED:
        before = folder.read_status() or {}
        if before.get("state") != "stopped":  # before the first step
            cause = before.get("cause") or "a signal"
            _note(folder, "stopped", resumes, cause=cause, exit_code=exits.STOPPED, attempts=policy.attempts)


def _note(folder: RunFolder, state: str, resumes: bool, **about: Any) -> None:
    try:
        before = folder.read_status() or {}
        kept = {name: before[name] for name in ("step", "steps", "checkpoint", "best", "resume") if name in before}
        newest = latest(folder.checkpoints)
        if newest is not None:
            kept["checkpoint"] = f"{folder.checkpoints.name}/{newest.name}"
        resume = {"resume": f"ithaca train {folder.config}"} if resumes else {}
        folder.write_status(state, **{**resume, **kept, **about})
    except (OSError, ValueError) as error:
        say(f"{folder.status} could not be written ({error})")


def _line(cause: str) -> str:
    return cause.partition("\n")[0]
