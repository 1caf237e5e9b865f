"""Whole runs and their checkpoints: damage, a full disk, a folder nobody can write, data that is not what it was."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from ithaca.base.exits import Failed
from ithaca.cli.main import main
from ithaca.config import load
from ithaca.observe.metrics import read_metrics
from ithaca.storage import check, checkpoint, files, place, publish
from ithaca.training.trainer import train

PLAIN = ["ulysses=1", "ring=1", "recompute=none", "store=gpu", "tile=null", "shard_parameters=false"]
SHORT = ["data.context=64", "train.rows=1", "train.warmup=1", "train.schedule=constant", "log.every=1", "launch.cpu=1"]


def run(folder: Path, steps: int, *more: str) -> int:
    settings = [*SHORT, *(f"stack.{each}" for each in PLAIN), f"run.folder={folder}", f"train.steps={steps}"]
    return train(load(None, [*settings, "checkpoint.every=2", *more], "tiny_cpu").config, quiet=True)


def said(folder: Path) -> str:
    return (folder / "logs/rank-0.log").read_text()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*step-*"))


def test_a_run_falls_back_from_a_damaged_checkpoint_and_stops_if_none_is_good(tmp_path: Path):
    """F6: cut off, then all of them; the message says what and what instead, the exit code is 4."""
    assert run(tmp_path, 4) == 0 and names(tmp_path) == ["step-2", "step-4"]
    before = [line["loss"] for line in read_metrics(tmp_path / "metrics.jsonl") if "loss" in line]
    shard = tmp_path / "checkpoints/step-4/__0_0.distcp"
    os.truncate(shard, shard.stat().st_size // 2)
    (tmp_path / "checkpoints/.step-6.abc.tmp").mkdir()
    assert run(tmp_path, 4) == 0
    assert "ignored damaged checkpoint" in said(tmp_path) and "bytes, the manifest says" in said(tmp_path)
    assert "removed unfinished checkpoint .step-6.abc.tmp (an interrupted save)" in said(tmp_path)
    assert names(tmp_path) == ["step-2", "step-4"] and check.verify(shard.parent) == [], "trained and saved again"
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["loss"] for line in lines if "loss" in line] == before, "steps 3 and 4 again"
    assert [line["from_step"] for line in lines if line.get("event") == "resume"] == [2]
    for path in files.published(tmp_path / "checkpoints"):
        (path / ".metadata").unlink()
    with pytest.raises(Failed, match="has no good checkpoint: step-4, step-2 are damaged") as caught:
        run(tmp_path, 6)
    status = json.loads((tmp_path / "status.json").read_text())
    assert caught.value.exit_code == 4 and (status["state"], status["exit_code"]) == ("failed", 4)


def test_a_full_disk_costs_a_save_and_then_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """F9: the save at step 4 finds no room, that at 6 does; then there is none any more."""
    usage = place.shutil.disk_usage
    answers = iter([None, 1, None, 1, 1, 1])  # bytes free; None = as it is

    def free(path: Any) -> Any:
        found = next(answers)
        return usage(path) if found is None else usage(path)._replace(free=found)

    full = mock.patch.object(place.shutil, "disk_usage", free)
    with full, caplog.at_level(logging.WARNING, "ithaca"), pytest.raises(Failed) as caught:
        run(tmp_path, 20)
    text = str(caught.value)
    assert caught.value.exit_code == 4 and "step 12 could not be saved (3 of 3 failures in a row)" in text
    assert "not enough disk" in text and ", 1 B are free" in text and "newest checkpoint: checkpoints/step-6" in text
    assert "Keeping checkpoints/step-2; the next try is at step 6 (1 of 3 failures in a row)" in caplog.text
    assert names(tmp_path) == ["step-2", "step-6"]
    assert all(check.verify(path) == [] for path in files.published(tmp_path / "checkpoints"))
    events = [line["event"] for line in read_metrics(tmp_path / "metrics.jsonl") if "event" in line]
    assert events == ["start", "save", "save_failed", "save", "save_failed", "save_failed", "save_failed"]
    assert run(tmp_path, 8) == 0 and names(tmp_path) == ["step-6", "step-8"], "there is room again"


def test_checkpoints_that_are_deleted_during_a_save_cost_that_save(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """All of them with step 4; of step 6 a file. Step 8 is saved, and nobody is told that deleted ones are kept."""
    real = publish.publish

    def publishing(draft: Any, entries: Any) -> Path:
        if draft.step == 4:
            shutil.rmtree(tmp_path / "checkpoints")
        elif draft.step == 6:
            (draft.hidden / "state.json").unlink()
        return real(draft, entries)

    with mock.patch.object(checkpoint, "publish", publishing), caplog.at_level(logging.WARNING, "ithaca"):
        assert run(tmp_path, 8) == 0
    assert names(tmp_path) == ["step-8"] and check.verify(tmp_path / "checkpoints/step-8") == []
    first, second = (text for text in caplog.messages if "could not be saved" in text)
    assert "No such file or directory" in first and "Keeping none (checkpoints/step-2 was deleted)" in first
    assert "has lost state.json while it was written" in second and "unexpectedly" not in caplog.text


PARTS = {"half a checkpoint is left": 0.5} | (
    {"nothing is left": 0.0} if os.environ.get("ITHACA_FAULTS") == "long" else {}
)


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_a_disk_that_others_fill_while_a_save_writes(mount: Callable[[str], Path], part: float):
    """F9 on a real file system: there seemed to be room, and the kernel refuses a write, of a shard or of the smallest file."""
    place = mount("size=64m")
    assert run(place, 2) == 0 and names(place) == ["step-2"]
    size = sum(file.stat().st_size for file in (place / "checkpoints/step-2").iterdir())
    usage, ballast = shutil.disk_usage, place / "ballast"

    def fill(path: Any) -> Any:
        """Asked for room, when a save begins: there is, and then it is gone."""
        found = usage(path)
        with open(ballast, "ab", buffering=0) as file:
            file.write(bytes(max(0, found.free - int(part * size))))
        return found._replace(free=1 << 40)

    with mock.patch.object(shutil, "disk_usage", fill), pytest.raises(Failed) as caught:
        run(place, 20)
    text = str(caught.value)
    assert caught.value.exit_code == 4 and "No space left on device" in text and "3 of 3 failures in a row" in text
    assert str(place / "checkpoints") in text, "where there is no space"
    assert "newest checkpoint: checkpoints/step-2" in text
    assert names(place) == ["step-2"] and check.verify(place / "checkpoints/step-2") == []
    ballast.unlink()
    assert run(place, 8) == 0 and names(place)[-1] == "step-8"
    assert all(check.verify(path) == [] for path in files.published(place / "checkpoints"))


def test_a_folder_that_takes_no_checkpoints_ends_the_run_before_it_trains(tmp_path: Path, capsys: Any):
    """F10. /proc is a folder that even root cannot write."""
    (tmp_path / "checkpoints").symlink_to("/proc/self")
    settings = [*SHORT, *(f"stack.{each}" for each in PLAIN), f"run.folder={tmp_path}", "train.steps=2"]
    words = [word for each in settings for word in ("--" + each.partition("=")[0], each.partition("=")[2])]
    assert main(["train", "--recipe", "tiny_cpu", "--quiet", *words]) == 4
    heard = capsys.readouterr().err
    assert f"checkpoints cannot be written to {tmp_path}/checkpoints" in heard and "nothing was trained" in heard
    assert not (tmp_path / "metrics.jsonl").exists()


def test_data_that_changed_since_the_checkpoint_stops_the_run(tmp_path: Path):
    """F28, twice: the file is another, and then the packed folder is another too."""
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"input_ids": list(range(1, 60))}) + "\n" for _ in range(9)))
    data = [f'data.sources=[{{"path": "{source}"}}]', "data.eos=false"]
    assert run(tmp_path / "run", 2, *data) == 0
    source.write_text(source.read_text().replace("59]", "58]"))
    with pytest.raises(Failed, match=r"a\.jsonl has changed \(SHA-256 differs\)") as caught:
        run(tmp_path / "run", 4, *data)
    assert caught.value.exit_code == 3
    (tmp_path / "run/data").rename(tmp_path / "elsewhere")
    with pytest.raises(Failed, match=r"a\.jsonl holds other data than step-2 was trained on") as caught:
        run(tmp_path / "run", 4, *data)
    assert caught.value.exit_code == 3
