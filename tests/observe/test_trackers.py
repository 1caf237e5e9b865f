"""Trackers that are slow, broken or missing, and the real ones where they are installed."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from ithaca.base.run_folder import RunFolder
from ithaca.config.schema import Log
from ithaca.observe.metrics import Metrics, read_metrics
from ithaca.observe.trackers import Background, Mlflow, TensorBoard, Tracker, Wandb

from ..waiting import wait_until
from .records import record


class Slow:
    """Takes a line only when it is let."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()
        self.steps: list[int] = []
        self.closed = False

    def record(self, step: int, values: Mapping[str, float]) -> None:
        self.begun.set()
        self.gate.wait()
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


class Broken:
    def __init__(self, at: int) -> None:
        self.at = at

    def record(self, step: int, values: Mapping[str, float]) -> None:
        if step >= self.at:
            raise ConnectionError("no route to host\nand a page of details")

    def close(self) -> None:
        raise AssertionError("a tracker that is down is left alone")


@pytest.fixture
def folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> RunFolder:
    caplog.set_level(logging.WARNING, logger="ithaca")
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def test_a_slow_tracker_does_not_slow_training(folder: RunFolder, caplog: pytest.LogCaptureFixture):
    slow = Slow()
    tracker = Background("slow", lambda step: slow, capacity=10)
    with Metrics(folder, Log(), trackers=[tracker]) as metrics:
        for step in range(1, 101):
            metrics.step(record(step))  # one that waited for the tracker would wait for ever
        # ten wait in the queue; one more is in the tracker's hands, if its thread came to take it
        assert tracker.dropped in (89, 90)
        slow.gate.set()
    tracker._thread.join()
    assert slow.closed and slow.steps[:10] == list(range(1, 11)) and len(slow.steps) == 100 - tracker.dropped
    assert len(read_metrics(folder.metrics)) == 100
    assert f"slow was too slow for {tracker.dropped} lines" in caplog.text


def test_a_tracker_that_hangs_at_the_end_is_left_behind(caplog: pytest.LogCaptureFixture):
    for lines in (1, 20):  # the queue has room for the end, and it has none
        slow = Slow()
        tracker = Background("stuck", lambda step, slow=slow: slow, capacity=10)
        tracker.offer(0, {})
        slow.begun.wait()  # the first is in its hands, the others stay in the queue
        for step in range(1, lines):
            tracker.offer(step, {})
        tracker.close(patience=0.01)  # one that waited for the tracker would wait for ever
        slow.gate.set()
    assert caplog.text.count("stuck did not finish") == 2


def test_a_tracker_that_fails_is_told_about_once(folder: RunFolder, caplog: pytest.LogCaptureFixture):
    def refuse(step: int) -> Tracker:
        raise SystemExit("no licence")

    trackers = [Background("broken", lambda step: Broken(at=3)), Background("refused", refuse)]
    with Metrics(folder, Log(), trackers=trackers) as metrics:
        for step in range(1, 51):
            metrics.step(record(step))
            if step == 10:
                wait_until(lambda: all(tracker.down for tracker in trackers))
    assert all(tracker.down for tracker in trackers)
    assert len(read_metrics(folder.metrics)) == 50
    assert sorted(message for message in caplog.messages) == [
        "broken failed and is switched off, training goes on (ConnectionError: no route to host)",
        "refused failed and is switched off, training goes on (SystemExit: no licence)",
    ]


def test_packages_that_are_missing(
    folder: RunFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    for name in ("tensorboard", "wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)  # what `import` then finds is: nothing
    with Metrics(folder, Log(tensorboard=True, wandb="project", mlflow="experiment")) as metrics:
        metrics.step(record(1))
    assert sum("is switched off" in message for message in caplog.messages) == 3
    assert len(read_metrics(folder.metrics)) == 1


def test_tensorboard_for_real(folder: RunFolder, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    where, now = folder.path / "tensorboard", [1e9]
    monkeypatch.setattr(event_file_writer, "time", SimpleNamespace(time=lambda: now[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own dependencies
        for first in (1, 3):  # the second run starts at step 3 again
            tracker = TensorBoard(where, first)
            for step in range(first, 6):
                tracker.record(step, {"loss": float(first)})
            tracker.close()
            now[0] += 1  # its files are named by the second
        events = EventAccumulator(str(where))
        events.Reload()
    assert [(each.step, each.value) for each in events.Scalars("loss")] == [
        (1, 1.0), (2, 1.0), (3, 3.0), (4, 3.0), (5, 3.0),
    ]  # fmt: skip


@pytest.mark.parametrize("network", [False, True])
def test_wandb_for_real(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, network: bool
):
    """Without a login; and with one, when nobody answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wandb = pytest.importorskip("wandb")
        for name in ("WANDB_MODE", "WANDB_API_KEY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(folder.path))
        if network:
            monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
            monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        wandb.teardown()  # what it remembers of the environment
        for _ in range(2):
            tracker = Wandb("project", "run", folder.path, {"train.steps": 5}, patience=1)
            tracker.record(1, {"loss": 2.5})
            tracker.close()
        wandb.teardown()
    runs = list((folder.path / "wandb").glob("offline-run-*"))
    identity = (folder.path / "wandb" / "run-id.txt").read_text().strip()
    assert runs and all(run.name.endswith(identity) for run in runs)  # a resumed run is the same run
    assert capfd.readouterr() == ("", "")


def test_mlflow_for_real(folder: RunFolder, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture):
    """In files, without a server; the second tracker is of a run that was resumed."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow = pytest.importorskip("mlflow")
        for first in (1, 3):
            tracker = Mlflow("experiment", "run", folder.path, {f"setting {at}": at for at in range(150)})
            for step in range(first, 5):
                tracker.record(step, {"loss": float(first), "needles": object()})
            tracker.close()
        client = mlflow.MlflowClient(tracking_uri=(folder.path / "mlflow").as_uri())
        (run,) = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
        found = client.get_metric_history(run.info.run_id, "loss")
    assert sorted((each.step, each.value) for each in found) == [
        (1, 1.0), (2, 1.0), (3, 1.0), (3, 3.0), (4, 1.0), (4, 3.0),
    ]  # fmt: skip
    assert run.info.status == "FINISHED" and run.info.run_name == "run" and len(run.data.params) == 150
    assert capfd.readouterr() == ("", "")
