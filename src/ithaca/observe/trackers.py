"""TensorBoard, Weights & Biases and MLflow, kept at arm's length: none may stop a run or slow it down.

A tracker is imported, opened and called in a daemon thread of its own, behind a queue of bounded length:

    training  --offer-->  queue  --thread-->  tracker

`offer` never waits. A tracker that cannot keep up finds the queue full and loses lines, which are counted and told at the end; one
that raises, at whatever call, is told about once and switched off. metrics.jsonl has every line all the same.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from ..base.run_folder import RunFolder
from ..config.schema import Log

logger = logging.getLogger(__name__)

CAPACITY = 1000  # lines that may wait for a tracker: under 1 MB
_BATCH, _PARAM = 100, 6000  # MLflow's limits: parameters of a request, characters of one
PATIENCE = 15.0  # seconds that the end of a run waits for a tracker to send what is left


class Tracker(Protocol):
    """What a tracker has to be able to do. Both are called in its own thread only. Values are numbers, or pictures: arrays of
    bytes, [height, width, 3]."""

    def record(self, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Background:
    """A tracker in a thread of its own. `open_tracker(first_step)` makes it there, when the first line comes."""

    def __init__(self, name: str, open_tracker: Callable[[int], Tracker], capacity: int = CAPACITY) -> None:
        self.name = name
        self.dropped = 0  # lines that found the queue full
        self.down = False  # it has failed and is switched off
        self._open = open_tracker
        self._lines: queue.Queue[tuple[int, Mapping[str, Any]] | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def offer(self, step: int, values: Mapping[str, Any]) -> None:
        """Hand over a line; returns at once."""
        if self.down:
            return
        try:
            self._lines.put_nowait((step, values))
        except queue.Full:
            self.dropped += 1

    def close(self, patience: float = PATIENCE) -> None:
        """Let it send what is left, but wait no longer than `patience` seconds."""
        try:
            if not self.down:
                self._lines.put(None, timeout=patience)
        except queue.Full:
            pass
        else:
            self._thread.join(patience)  # one that is down may still be about to say so
        if self._thread.is_alive():
            logger.warning(
                "%s did not finish in %.0f s and is left behind; metrics.jsonl has every line", self.name, patience
            )
        if self.dropped:
            logger.warning("%s was too slow for %d lines; metrics.jsonl has them", self.name, self.dropped)

    def _work(self) -> None:
        tracker: Tracker | None = None
        try:
            while (line := self._lines.get()) is not None:
                tracker = tracker or self._open(line[0])
                tracker.record(*line)
            if tracker is not None:
                tracker.close()
        except BaseException as error:  # SystemExit too: a library must not end a thread without a word
            self.down = True
            cause = (str(error).strip().splitlines() or [""])[0][:200]
            logger.warning(
                "%s failed and is switched off, training goes on (%s: %s)", self.name, type(error).__name__, cause
            )
            logger.info(
                "%s failed here", self.name, exc_info=True
            )  # for the log file: not loud enough for the terminal


class TensorBoard:
    """Scalars as events in `folder`. Steps from `first_step` on that an earlier run wrote are hidden: they are trained again."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)
            else:
                self._writer.add_image(name, value, step, dataformats="HWC")
        self._writer.flush()  # in a thread that nobody waits for: let a watcher see the step now

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; the same one again after a resume. Without a login or a network it writes to the disk, under
    FOLDER/wandb, for `wandb sync` to send later: it asks no questions on the terminal and writes nothing there."""

    def __init__(
        self, project: str, name: str, folder: Path, settings: Mapping[str, Any], patience: float = 30.0
    ) -> None:
        import wandb  # pyright: ignore[reportMissingImports]  # an extra

        quiet = wandb.Settings(silent=True, console="off", disable_code=True, disable_git=True, init_timeout=patience)
        own = {"project": project, "name": name, "dir": str(folder), "config": dict(settings), "resume": "allow"}
        own.update(id=_run_id(folder / "wandb" / "run-id.txt"), settings=quiet)
        wandb.setup(settings=quiet)
        self._image = getattr(wandb, "Image", None) or str
        with suppress(
            AttributeError, TypeError
        ):  # silences login, which does not look at the settings; not a documented call
            wandb.termsetup(quiet, None)
        mode = os.environ.get("WANDB_MODE")
        if mode is None and not _logged_in(wandb):
            mode = "offline"
            logger.info("wandb has no login: writing to %s; send it with: wandb sync", folder / "wandb")
        try:
            self._run = wandb.init(**own, mode=mode)
        except Exception as error:
            if mode in ("offline", "disabled"):
                raise
            where, why = folder / "wandb", type(error).__name__
            logger.warning("wandb cannot be reached (%s); writing to %s; send it with: wandb sync", why, where)
            wandb.teardown()  # else its service still holds the run's id
            self._run = wandb.init(**own, mode="offline")
        # Steps that are trained again after a resume come again; wandb's own step counter could not go back.
        self._run.define_metric("*", step_metric="step")

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        shown = {
            name: value if isinstance(value, int | float) else self._image(value) for name, value in values.items()
        }
        self._run.log({"step": step, **shown})

    def close(self) -> None:
        self._run.finish()


def _logged_in(wandb: Any) -> bool:
    """Whether wandb knows who we are, asked without a prompt and without the network."""
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # an older wandb, whose login always asks
        return "WANDB_API_KEY" in os.environ


class Mlflow:
    """A run of MLflow, the same one again after a resume: numbers by step, the config as parameters, no pictures. Where
    MLFLOW_TRACKING_URI names no server it writes to the disk, under FOLDER/mlflow (`mlflow ui --backend-store-uri`)."""

    def __init__(self, experiment: str, name: str, folder: Path, settings: Mapping[str, Any]) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]  # an extra
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        place, uri = folder / "mlflow", os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # its other store on disk needs a database package
            uri = place.absolute().as_uri()
        self._client, self._metric = MlflowClient(tracking_uri=uri), Metric
        identity = place / "run-id.txt"
        with suppress(FileNotFoundError):
            self._run = identity.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        known = self._client.get_experiment_by_name(experiment)
        where = self._client.create_experiment(experiment) if known is None else known.experiment_id
        self._run = self._client.create_run(where, run_name=name).info.run_id
        params = [Param(key, str(value)[:_PARAM]) for key, value in settings.items()]
        for at in range(0, len(params), _BATCH):
            self._client.log_batch(self._run, params=params[at : at + _BATCH])
        place.mkdir(parents=True, exist_ok=True)
        identity.write_text(self._run + "\n", encoding="utf-8")

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        now = int(time.time() * 1000)
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._client.log_batch(self._run, [self._metric(name, value, now, step) for name, value in numbers.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)


def _run_id(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(secrets.token_hex(4) + "\n", encoding="utf-8")
        return file.read_text(encoding="utf-8").strip()


def open_trackers(folder: RunFolder, log: Log, name: str, settings: Mapping[str, Any]) -> list[Background]:
    """The trackers that a config asks for."""
    trackers = []
    if log.tensorboard:
        trackers.append(Background("TensorBoard", lambda step: TensorBoard(folder.path / "tensorboard", step)))
    if log.wandb is not None:
        project = log.wandb
        trackers.append(Background("wandb", lambda step: Wandb(project, name, folder.path, settings)))
    if log.mlflow is not None:
        experiment = log.mlflow
        trackers.append(Background("MLflow", lambda step: Mlflow(experiment, name, folder.path, settings)))
    return trackers
