"""What goes wrong while a checkpoint is written or read, on a few ranks: a kill at every point, an error on one rank alone, a disk
that is full or gone. Each time: what was published before is good, everybody knows, and it goes on."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ithaca.base import faults
from ithaca.base.processes.pool import WorkerError, Workers
from ithaca.storage import check, files
from ithaca.storage.checkpoint import CheckpointError, Damaged, NotWritten, load, ready, save
from ithaca.storage.keep import remove_unfinished, unfinished

from .runs import started, train, weights

LONG = os.environ.get("ITHACA_FAULTS") == "long"  # make faults
STACK = dict(ulysses=2)
POINTS = [
    ("save.begin", 1),
    ("save.after_shard", 1),
    ("save.before_manifest", 0),
    ("save.before_rename", 0),
    ("save.before_latest", 0),
]


@pytest.fixture(scope="module")
def doomed() -> Iterator[Workers]:
    """Two ranks that may be killed; the pool that other tests share is not."""
    with Workers(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def saved(doomed: Workers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    doomed.run(once, str(folder))
    return folder


def once(folder: str) -> None:
    run, optimizer = started(stack=STACK, num_hidden_layers=1)
    train(run, optimizer, range(1))
    save(Path(folder), run, optimizer, {}, step=1)


def interrupted(folder: str, fault: str, asynchronous: bool) -> None:
    run, optimizer = started(stack=STACK, num_hidden_layers=1)
    faults.arm([faults.parse(fault)], dist.get_rank(), None)
    load(Path(folder), run, optimizer)
    train(run, optimizer, range(1, 2))
    saving = save(Path(folder), run, optimizer, {}, step=2, asynchronous=asynchronous)
    if fault.endswith("save.begin!"):
        os.kill(os.getpid(), 9)  # after an asynchronous save has returned, before anybody has published it
    saving.wait()


def goes_on(folder: str) -> int:
    """On other ranks than before."""
    run, optimizer = started(stack=dict(ring=2), seed=5, num_hidden_layers=1)
    step = load(Path(folder), run, optimizer)["step"]
    train(run, optimizer, range(step, step + 1))
    save(Path(folder), run, optimizer, {}, step=step + 1)
    return step


KILLS = [
    ("kill@1:2:save.after_shard", False),
    ("kill@0:2:save.before_rename", False),
    ("kill@0:2:save.before_latest", False),
    ("kill@1:9:save.begin!", True),  # never reached: see `interrupted`
]
MORE_KILLS = [("kill@1:2:save.begin", False), ("kill@0:2:save.before_manifest", True), ("kill@1:0:load", False)]


@pytest.mark.parametrize(("fault", "asynchronous"), [*KILLS, *(MORE_KILLS if LONG else [])])
def test_a_kill_at_any_point_leaves_a_good_checkpoint(
    doomed: Workers, saved: Path, tmp_path: Path, fault: str, asynchronous: bool
):
    """F3 and F4. The rename is the moment: before it step 1 is the newest, after it step 2, and both verify."""
    folder = Path(shutil.copytree(saved, tmp_path / "checkpoints"))
    with pytest.raises(WorkerError) as caught:
        doomed.run(interrupted, str(folder), fault, asynchronous)
    assert caught.value.kind == "died"
    newest = 2 if fault.endswith("before_latest") else 1
    assert files.latest(folder) == folder / f"step-{newest}"
    assert all(check.verify(path) == [] for path in files.published(folder))
    left = "save" in fault and newest == 1 and not fault.endswith("save.begin")
    assert len(unfinished(folder)) == left
    remove_unfinished(folder)
    assert doomed.run(goes_on, str(folder)) == [newest, newest]
    assert files.latest(folder) == folder / f"step-{newest + 1}" and unfinished(folder) == []
    assert (folder / "LATEST").read_text() == f"step-{newest + 1}\n"


# -- an error on one rank is an error on all --------------------------------------------------------------------------


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device", "/there")


def attempts(folder: str) -> list[tuple[str, str, list[str]]]:
    """Saves that fail in one way each, and one that does not. -> kind of the error, its words, what is left"""
    run, optimizer = started(stack=STACK, num_hidden_layers=1)
    train(run, optimizer, range(1))
    save(Path(folder), run, optimizer, {}, step=1)
    rank, found = dist.get_rank(), []
    raised = [(f"raise@{at}:2:{point}", None) for point, at in POINTS if point != "save.before_latest"]
    broken = [("", name) for name in ("pathlib.Path.mkdir", "pathlib.Path.rename", "os.pwrite", "os.fsync")]
    for number, (fault, name) in enumerate([*raised, *broken]):
        faults.arm([faults.parse(fault)] if fault else [], rank, None)
        fails = mock.patch(name, full) if name and rank == 0 else mock.patch("os.nothing", None, create=True)
        with fails:
            try:
                saving = save(Path(folder), run, optimizer, {}, step=2, asynchronous=bool(number % 2))
                saving.wait()
                found.append(("", "", []))
            except CheckpointError as error:
                found.append((type(error).__name__, str(error), []))
        dist.barrier()
        found[-1][2].extend(sorted(path.name for path in Path(folder).iterdir()))
        dist.barrier()
    faults.arm([], rank, None)
    save(Path(folder), run, optimizer, {}, step=2)
    return found


def test_one_rank_that_fails_in_a_save_fails_it_for_all(workers: Workers, tmp_path: Path):
    """No rank waits for another; the kind of the error is the same on both; nothing is left; the next save works."""
    one, two = workers.run(attempts, str(tmp_path), world=2)
    assert len(one) == 8
    for (kind, text, left), (other, words, _) in zip(one, two, strict=True):
        assert kind == other and text == words and left == ["LATEST", "RUN", "step-1"], (kind, text, left)
    assert [kind for kind, _, _ in one] == ["CheckpointError"] * 4 + ["NotWritten"] * 4
    assert all("No space left on device" in text for _, text, _ in one[4:])
    assert "FaultRaised: fault raise@1:2:save.after_shard" in one[1][1] and "failed on rank 1" in one[1][1]
    assert check.verify(tmp_path / "step-2") == []


def without_the_folder(folder: str) -> list[str]:
    """Rank 1 is on a host that does not see the folder."""
    run, _ = started(stack=STACK, num_hidden_layers=1)
    words = []
    for place, blind in ((folder, False), (folder, True), ("/proc/self/checkpoints", False)):
        hidden = mock.patch("pathlib.Path.is_dir", lambda self: False)
        try:
            with hidden if blind and dist.get_rank() == 1 else mock.patch("os.nothing", None, create=True):
                ready(Path(place), run)
            words.append("")
        except CheckpointError as error:
            words.append(str(error))
    return words


def test_a_folder_that_not_all_ranks_see_or_nobody_can_write_is_found_at_the_start(workers: Workers, tmp_path: Path):
    """F10"""
    one, two = workers.run(without_the_folder, str(tmp_path / "new"), world=2)
    assert one == two and one[0] == ""
    assert one[1].startswith("rank 1: ") and "on a file system that all nodes see" in one[1]
    assert "checkpoints cannot be written to /proc/self/checkpoints" in one[2] and "choose another run.folder" in one[2]


# -- a disk that fills while it is written ------------------------------------------------------------------------------


def test_a_file_that_ends_early_is_reported_as_what_it_is(tmp_path: Path):
    """F9: the disk fills in the middle, inside a direct write; torch by itself says "unexpected pos 704 vs 598"."""
    run, optimizer = started(stack=dict(shard_parameters=False), hidden_size=512, intermediate_size=2048)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_001, hard))
        with pytest.raises(NotWritten, match=r"OSError: \[Errno 27\] File too large"):
            save(tmp_path, run, optimizer, {}, step=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files.latest(tmp_path) is None and unfinished(tmp_path) == []
    path = save(tmp_path, run, optimizer, {}, step=1).wait()
    assert check.verify(path) == [] and (path / "__0_0.distcp").stat().st_size > 20_000_001


# -- damage found by reading --------------------------------------------------------------------------------------------


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def two_steps(folder: str) -> None:
    run, optimizer = started(stack=STACK, num_hidden_layers=1)
    for step in (1, 2):
        train(run, optimizer, range(step - 1, step))
        save(Path(folder), run, optimizer, {}, step=step)


def falls_back(folder: str) -> tuple[int, list[str], dict[str, torch.Tensor]]:
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # pyright: ignore
    logging.getLogger("ithaca").addHandler(handler)
    try:
        run, optimizer = started(stack=STACK, seed=5, num_hidden_layers=1)
        return load(Path(folder), run, optimizer)["step"], heard, weights(run)
    finally:
        logging.getLogger("ithaca").removeHandler(handler)


def test_a_damaged_checkpoint_is_passed_over_by_all_ranks_loudly(workers: Workers, tmp_path: Path):
    """F7: a flipped byte, then a shard of another step in its place (same size), then nothing good."""
    workers.run(two_steps, str(tmp_path), world=2)
    newest, older = tmp_path / "step-2", tmp_path / "step-1"
    whole = (newest / "__1_0.distcp").read_bytes()
    flip(newest / "__1_0.distcp")
    (step, heard, first), (other, quiet, _) = workers.run(falls_back, str(tmp_path), world=2)
    assert step == other == 1 and quiet == []
    (text,) = heard
    assert "step-2 is damaged: __1_0.distcp has changed since it was saved (SHA-256 differs)" in text
    assert "Using step-1" in text and f"ithaca ckpt verify {newest}" in text
    shutil.copy(older / "__1_0.distcp", newest / "__1_0.distcp")
    assert (newest / "__1_0.distcp").stat().st_size == len(whole)
    (step, heard, again), _ = workers.run(falls_back, str(tmp_path), world=2)
    assert step == 1 and "__1_0.distcp has changed" in heard[0]
    assert all(torch.equal(again[name], value) for name, value in first.items())
    (older / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(WorkerError, match="step-2 is damaged") as caught:
        workers.run(falls_back, str(tmp_path), world=2)
    assert caught.value.kind == "Damaged" and caught.value.ranks == [0, 1]
    (newest / "manifest.json").unlink()
    with pytest.raises(WorkerError, match=r"has no good checkpoint: step-2, step-1 are damaged.*ithaca ckpt verify"):
        workers.run(falls_back, str(tmp_path), world=2)


def test_a_damaged_one_that_is_named_is_refused_and_one_that_could_run_code_stops_everything(tmp_path: Path):
    run, optimizer = started(stack=dict(shard_parameters=False))
    for step in (1, 2):
        save(tmp_path, run, optimizer, {}, step=step)
    flip(tmp_path / "step-2/__0_0.distcp")
    with pytest.raises(Damaged, match="SHA-256 differs"):
        load(tmp_path / "step-2", run, optimizer)
    with pytest.raises(CheckpointError, match="another model") as caught:
        load(tmp_path, started(stack=dict(shard_parameters=False), num_hidden_layers=1)[0])
    assert not isinstance(caught.value, Damaged), "no older one is tried: it would not fit either"
    save(tmp_path, run, optimizer, {}, step=3)
    save_over = save(tmp_path, run, optimizer, {}, step=2)  # training comes by again: the damaged one is replaced
    assert check.verify(save_over.wait()) == []
