"""The parts of the supervisor that need no process: limits that adapt, who hangs, when to try again, what is slow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ithaca.base import exits
from ithaca.config.schema import Config, Data, Model, Timeouts, Train
from ithaca.observe.stragglers import WINDOW, Stragglers
from ithaca.storage.files import CheckpointError
from ithaca.training.launch import heartbeat
from ithaca.training.launch.hang import Sign, describe_hang, hanging_ranks
from ithaca.training.launch.heartbeat import Beat, Heartbeat
from ithaca.training.launch.local import Outcome
from ithaca.training.launch.process import oom_kills
from ithaca.training.launch.supervise import Policy
from ithaca.training.resume import changes, topology
from ithaca.training.saving import Saver, grace_of

# Limits


def test_a_slow_run_is_not_taken_for_a_hanging_one(monkeypatch: pytest.MonkeyPatch):
    now = [0.0]
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now[0]))
    said: list[Beat] = []
    mine = Heartbeat(Timeouts(), said.append)
    mine.expect(1200.0)  # a step of 10 M tokens, as planned
    mine.section("data", 1)
    mine.section("step", 1)
    assert said[-1].limit == 12_000  # the first one: ten times what was planned
    now[0] += 3000
    mine.section("save", 1)
    assert said[-1].limit == 3600
    now[0] += 1000
    mine.section("step", 2)
    assert said[-1].limit == 15_000  # five times the slowest so far
    now[0] += 100
    mine.section("eval", 2)
    assert said[-1].limit == 15_000
    mine.section("save", 2)
    assert said[-1].limit == 5000
    mine.section("pack", 2)
    assert said[-1].limit is None
    assert Heartbeat(Timeouts(), said.append).limit("step") == 3600  # without a plan: twice the limit of a step
    assert Heartbeat(Timeouts(step=None), said.append).limit("step") is None


def sign(
    rank: int, step: int = 41, section: str = "step", waiting: bool = True, heard: float = 100.0, **more: Any
) -> Sign:
    return Sign(
        rank, f"rank {rank} (pid 1{rank})", heard, Beat(section, step, 60.0, 50.0, "a/b.py:7 in f", waiting), **more
    )


@pytest.mark.parametrize(
    ("signs", "hanging", "text"),
    [
        ([sign(0), sign(1, stopped=True), sign(2)], [1], "rank 1 (pid 11) is stopped (SIGSTOP?) in step 41, for 60 s"),
        ([sign(0), sign(1), sign(2, heard=30.0)], [2], "rank 2 (pid 12) gave no sign of life for 70 s in step 41"),
        ([sign(0, section="data"), sign(1), sign(2)], [0], "made no progress for 60 s in step 41, waiting for data"),
        ([sign(0, step=40, section="save"), sign(1), sign(2)], [0], "made no progress for 60 s while saving step 40"),
        ([sign(0), sign(1), sign(2, waiting=False)], [2], "made no progress for 60 s in step 41, at a/b.py:7 in f"),
        ([sign(0), sign(1, waiting=False), sign(2, waiting=False)], [1, 2], "rank 1 (pid 11) and rank 2 (pid 12) made no"),
        ([sign(0), sign(1), sign(2)], [0, 1, 2], "all 3 ranks made no progress for 60 s in step 41"),
        ([sign(0), Sign(1, "rank 1 (pid 11)", 10.0)], [1], "rank 1 (pid 11) made no progress for 90 s while starting"),
    ],
)  # fmt: skip
def test_the_one_that_hangs(signs: list[Sign], hanging: list[int], text: str):
    found = hanging_ranks(signs, 100.0)
    assert [each.rank for each in found] == hanging
    assert text in describe_hang(found, 100.0, len(signs))


def test_late_and_silent():
    assert sign(0).late(100.0) and not sign(0, heard=120.0).late(100.0)
    assert (
        not Sign(0, "", 0.0).silent(1000.0, 300.0) and sign(0).silent(401.0, 300.0) and not sign(0).silent(401.0, None)
    )
    assert Sign(0, "", 0.0, setup=5.0).late(6.0) and not Sign(0, "", 0.0).late(6.0)


# Again, or not


def test_attempts_and_progress():
    lost = lambda step: Outcome(exits.LOST, "rank 1 was killed", True, step)  # noqa: E731
    policy = Policy(9)
    assert [policy.after(lost(step), False) for step in (41, 41, 12, 41)] == [
        None, None, None, "3 restarts, no progress past step 41. Not retrying.",
    ]  # fmt: skip
    policy = Policy(9)
    assert [policy.after(lost(step), False) for step in (5, 5, 5, 6, 6, 6, 7)] == [None] * 7 and policy.attempts == 8
    policy = Policy(2)
    assert [policy.after(lost(step), False) for step in (1, 2, 3)] == [
        None, None, "launch.restarts=2 are used up; the same command goes on",
    ]  # fmt: skip
    assert Policy(0).after(lost(1), False) == ""
    assert Policy(3).after(lost(1), True) == ""  # somebody wants it to stop
    assert Policy(3).after(Outcome(exits.DATA, "data", False, 1), False) == ""
    assert Policy(3).after(Outcome(exits.DONE), False) == ""


class Own(RuntimeError):
    exit_code = exits.NOT_FINITE


@pytest.mark.parametrize(
    ("error", "code", "again"),
    [
        (ValueError("config"), 2, False),
        (Own("loss"), 6, False),
        (CheckpointError("damaged"), 4, False),
        (MemoryError(), 5, False),
        (KeyError("bug"), 1, False),
        (KeyboardInterrupt(), 130, False),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), 1, True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"), 8, True),
        (TimeoutError(), 7, True),
        (ConnectionResetError(), 8, True),
    ],
)
def test_only_what_may_succeed_is_tried_again(error: BaseException, code: int, again: bool):
    assert (exits.code_of(error), exits.worth_another_try(error)) == (code, again)


def test_kills_by_the_system_are_counted(tmp_path: Path):
    own = tmp_path / "cgroup"
    own.write_text("0::/job/step\n")
    (tmp_path / "v2/job/step").mkdir(parents=True)
    (tmp_path / "v2/job/step/memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    assert oom_kills(own, tmp_path / "v2") == 2
    own.write_text("9:name=systemd:/\n4:cpu,memory:/job\n0::/\n")
    (tmp_path / "v1/memory/job").mkdir(parents=True)
    (tmp_path / "v1/memory/job/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert oom_kills(own, tmp_path / "v1") == 5
    assert oom_kills(tmp_path / "none", tmp_path / "none") == 0


# Stragglers (F21)


def test_a_slow_rank_is_named_once_until_it_recovers():
    watch = Stragglers()
    slow, even = [0.10, 0.10, 0.29, 0.11], [0.10, 0.10, 0.11, 0.11]
    found = [watch.add(even, 1.0) for _ in range(WINDOW)] + [watch.add(slow, 1.0) for _ in range(WINDOW)]
    named = [each for each in found if each is not None]
    assert len(named) == 1 and named[0].rank == 2 and 2.5 < named[0].ratio < 3.0
    assert str(named[0]).startswith(f"rank 2 is {named[0].ratio:.1f}× slower than the median: ")
    assert [watch.add(even, 1.0) for _ in range(WINDOW)] == [None] * WINDOW
    assert sum(watch.add(slow, 1.0) is not None for _ in range(WINDOW)) == 1
    watch = Stragglers()
    assert not any(watch.add(slow, 20.0) for _ in range(30))  # 1% of the step: nobody feels it
    assert not any(watch.add([0.1, 0.9], 1.0) for _ in range(30))  # of two, who is slow?


# Going on (F13, F15)

BEFORE = "model: {folder: m, lora: {rank: 8}}\ndata: {context: 128, seed: 0}\ntrain: {lr: 1.0e-05, steps: 10}\nlaunch: {cpu: 4}\n"


def test_what_changed_since_the_checkpoint():
    now = BEFORE.replace("1.0e-05", "3.0e-05").replace("cpu: 4", "cpu: 8").replace("seed: 0", "seed: 1")
    assert changes(BEFORE, now, 5) == (["train.lr 1e-05 → 3e-05"], ["data.seed 0 → 1"])
    assert changes(BEFORE, BEFORE, 5) == ([], [])
    # runs from before there was a choice go on
    chosen = BEFORE.replace("data: {", "data: {share_prefixes: auto, ")
    assert chosen != BEFORE and changes(BEFORE, chosen, 5) == ([], [])
    assert changes(chosen, chosen.replace("auto", "'off'"), 5)[1] == ["data.share_prefixes auto → off"]
    assert changes(BEFORE, BEFORE.replace(", lora: {rank: 8}", ""), 5) == ([], ["model.lora.rank 8 → null"])


PHASES = "phases: [{context: 128, steps: 4, stack: {ring: 1}}, {context: 256, steps: 4}, {context: 512, steps: 4}]\n"


def test_phases_that_have_begun_keep_their_data():
    now = PHASES.replace("128", "64").replace("256", "320").replace("512", "640").replace("ring: 1", "ring: 2")
    assert changes(PHASES, now, 4) == (
        ["phases.2.context 256 → 320", "phases.3.context 512 → 640"],
        ["phases.1.context 128 → 64"],
    )
    assert [len(each) for each in changes(PHASES, now, 5)] == [1, 2]
    said, refused = changes(PHASES, PHASES.replace(", {context: 512, steps: 4}", ", {context: 512, steps: 9}"), 9)
    assert (said, refused) == (["phases.3.steps 4 → 9"], []), "longer is no other data"
    data = ["data: {context: 512, seed: 0}\n", "data: {context: 640, seed: 1}\n"]
    said, refused = changes(PHASES + data[0], PHASES.replace("512", "640") + data[1], 4)
    assert (said, refused) == (["phases.3.context 512 → 640"], ["data.seed 0 → 1"]), "data.context follows the phases"
    assert changes(PHASES, "train: {steps: 12}\n", 2)[1] == ["phases.1.context 128 → null"], "phases that are gone"


def test_another_layout_is_one_line():
    four, eight = ({"size": size, "stack": dict(ulysses=u, ring=2, replicate=1)} for size, u in ((4, 2), (8, 4)))
    assert topology(four, four, 5120) is None
    assert topology(four, eight, 5120) == (
        "layout changed: 4 ranks (ulysses 2 × ring 2) → 8 ranks (ulysses 4 × ring 2); model and optimizer resharded, data goes "
        "on at sample 5,120"
    )


# Saving (F12)


def saver() -> Saver:
    config = Config(model=Model(folder="m"), data=Data(context=8), train=Train(steps=9))
    return Saver(config, cast(Any, None), cast(Any, None), cast(Any, None), cast(Any, None))


def test_a_grace_that_is_too_short_is_said_once():
    mine = saver()
    assert mine.too_slow(30.0, 20.0) is None  # nothing measured yet
    mine.seconds = 41.0
    assert mine.too_slow(None, 20.0) is None and mine.too_slow(100.0, 20.0) is None
    text = mine.too_slow(60.0, 20.0)
    assert text is not None and "a step takes 20 s and a save 41 s, but the scheduler kills 60 s after" in text
    assert mine.too_slow(60.0, 20.0) is None
    assert grace_of(None, {}) is None and grace_of(9.0, {"TORCHELASTIC_RUN_ID": "x"}) == 9.0
    assert grace_of(None, {"TORCHELASTIC_RUN_ID": "x"}) == 30.0
    assert grace_of(None, {"TORCHELASTIC_RUN_ID": "x", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "300"}) == 300.0
