"""Readers and a run that goes on: whatever a reader has looked at last, its checkpoint may be pruned before it looks again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ithaca.base.processes.pool import Workers
from ithaca.cli.main import main
from ithaca.evaluation.opening import load_model
from ithaca.storage import files, keep, listing  # before a function of one is replaced, the others must have it
from ithaca.storage.checkpoint import load, save
from ithaca.storage.files import Gone, complete
from ithaca.storage.safe_metadata import SafeReader

from .runs import started

TINY = [
    "--recipe",
    "tiny_cpu",
    "--data.context",
    "64",
    "--train.rows",
    "1",
    "--train.warmup",
    "0",
    "--checkpoint.every",
    "1",
]
TINY += ["--launch.cpu", "1", "--stack.ulysses", "1", "--stack.ring", "1", "--stack.tile", "null", "--quiet"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", *TINY, "--train.steps", "2", "--run.folder", str(folder)]) == 0
    return folder


class Live:
    """A run that has published step 1, and publishes step 2 and prunes step 1 when a reader comes to its n-th look at a file."""

    def __init__(self, trained: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.aside = place / "run", place / "aside"
        shutil.copytree(trained, self.folder)
        self.checkpoints = self.folder / "checkpoints"
        (self.checkpoints / "step-2").rename(self.aside)
        self.looks, self.moment = 0, -1
        for owner, name in (
            (files, "read_json"),
            (files, "digests"),
            (listing, "published"),
            (SafeReader, "read_data"),
        ):
            monkeypatch.setattr(owner, name, self._before(getattr(owner, name)))

    def _before(self, look: Callable[..., Any]) -> Callable[..., Any]:
        def looking(*words: Any, **more: Any) -> Any:
            self.looks += 1
            if self.looks == self.moment:
                self.aside.rename(self.checkpoints / "step-2")
                assert [path.name for path in keep.prune(self.checkpoints, 1)] == ["step-1"]
            return look(*words, **more)

        return looking


def moments(trained: Path, place: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Live], None]) -> int:
    """Read once for every look that a reader takes, with the checkpoint pruned just before it. -> how many there are"""
    with monkeypatch.context() as patch:
        live = Live(trained, place / "undisturbed", patch)
        read(live)
        count = live.looks
    for moment in (*range(1, min(count, 11)), count):  # later looks are at one parameter after the other
        with monkeypatch.context() as patch:
            live = Live(trained, place / str(moment), patch)
            live.moment = moment
            read(live)
            assert live.looks >= moment, (read.__name__, count)
    return count


def test_no_reader_takes_what_was_pruned_for_damaged(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def ls(live: Live) -> None:
        assert main(["ckpt", "ls", str(live.folder), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["checkpoints"]
        assert rows and {row["state"] for row in rows} == {"as written"}

    def verify(live: Live) -> None:
        assert main(["ckpt", "verify", str(live.folder)]) == 0
        out = capsys.readouterr().out
        assert ": ok (" in out and "DAMAGED" not in out

    def write(live: Live) -> None:
        assert main(["export", str(live.folder), str(live.folder / "out")]) == 0
        assert "damaged" not in capsys.readouterr().err

    def find(live: Live) -> None:
        assert [path.name for path in complete(live.checkpoints)] in (["step-1"], ["step-2"], ["step-2", "step-1"])

    for reader, least in ((ls, 4), (verify, 6), (write, 12), (find, 2)):
        assert moments(trained, tmp_path / reader.__name__, monkeypatch, reader) >= least


def test_a_checkpoint_that_was_named_and_pruned_is_not_called_damaged(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for verb in (["ckpt", "verify"], ["ckpt", "ls"], ["export"], ["eval"]):
        with monkeypatch.context() as patch:
            live = Live(trained, tmp_path / "-".join(verb), patch)
            live.moment = 2
            path = live.checkpoints / "step-1"
            more = {"export": [str(tmp_path / "out")], "eval": ["--cpu", "1", "--quiet"]}.get(verb[0], [])
            assert main([*verb, str(path), *more]) == 4
            err = capsys.readouterr().err
            assert f"{path} is not there, or not any more: its run, if that goes on, has pruned it" in err, verb
            assert "damaged" not in err


def test_eval_goes_on_with_the_newest_and_says_which(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    live = Live(trained, tmp_path, monkeypatch)

    def found_and_then(*words: Any) -> Any:
        live.moment = live.looks + 2
        return load_model(*words)

    monkeypatch.setattr("ithaca.evaluation.alone.load_model", found_and_then)
    assert main(["eval", str(live.folder), "--cpu", "1", "--eval.samples", "1", "--eval.depths", "1"]) == 0
    assert not (live.checkpoints / "step-1").exists()
    found = json.loads((live.folder / "eval/step-2.json").read_text())
    assert found["step"] == 2 and found["model"].endswith("step-2") and not (live.folder / "eval/step-1.json").exists()


def load_at_every_moment(trained: str, place: str, named: bool) -> tuple[int, list[tuple[int, int] | str]]:
    """-> looks of a load that nobody disturbs; what each load has found"""
    run, _ = started(num_hidden_layers=1)
    found = [load_while_pruned(run, trained, f"{place}/0", -1, named)]
    looks = [found[0][1]]
    dist.broadcast_object_list(looks, src=0)
    count = int(looks[0])
    found += [load_while_pruned(run, trained, f"{place}/{at}", at, named) for at in range(1, count + 1)]
    return count, found


def load_while_pruned(run: Any, trained: str, place: str, moment: int, named: bool) -> tuple[int, int] | str:
    """As one of two ranks, of which the first is the run that prunes."""
    rank, patch = dist.get_rank(), pytest.MonkeyPatch()
    try:
        if rank == 0:
            live = Live(Path(trained), Path(place), patch)
            live.moment = moment
        dist.barrier()
        folder = Path(place) / "run/checkpoints"
        return load(folder / "step-1" if named else folder, run)["step"], live.looks if rank == 0 else 0
    except Gone as error:
        return str(error)
    finally:
        patch.undo()
        dist.barrier()


@pytest.mark.parametrize("named", [False, True])
def test_ranks_that_load_agree_on_what_was_pruned(workers: Workers, tmp_path: Path, named: bool):
    two = tmp_path / "trained"
    workers.run(save_two, str(two), world=2)
    for looks, (undisturbed, *pruned) in workers.run(load_at_every_moment, str(two), str(tmp_path), named, world=2):
        assert undisturbed[0] == 1 and looks == len(pruned) >= 6
        for moment, found in enumerate(pruned, 1):
            if named:
                assert "step-1 is not there, or not any more" in str(found), (moment, found)
            else:
                assert found[0] == 2, (moment, found)


def save_two(folder: str) -> None:
    run, optimizer = started(num_hidden_layers=1)
    for step in (1, 2):
        save(Path(folder) / "checkpoints", run, optimizer, {}, step=step)
