"""A length curriculum: phases are one run. Stopping anywhere and going on is the same as not stopping."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ithaca.base.processes.pool import Workers
from ithaca.config import load
from ithaca.config.curriculum import phase_at, phase_configs
from ithaca.data.needles import Needles
from ithaca.engine.optimizer import learning_rate
from ithaca.evaluation.opening import find_model
from ithaca.observe.metrics import read_metrics
from ithaca.training import trainer
from ithaca.training.phases import train_in_phases

from .test_train import hashes_of, losses

RUN = """
recipe: tiny_cpu
data: {{sources: [{{synthetic: needles}}], context: 256}}
stack: auto
train: {{steps: 9, rows: 4, lr: 1e-3, warmup: 2}}
phases:
  - {{context: 64, steps: 3}}
  - {{context: 128, steps: 4, stack: {{ring: {ring}, tile: 32, recompute: layer}}, sources: [{{synthetic: recall}}]}}
  - context: 256
    steps: 2
    rope: {{rope_type: yarn, factor: 4.0, original_max_position_embeddings: 64}}
checkpoint: {{every: 2, asynchronous: false}}
log: {{every: 1}}
"""


def write(folder: Path, ring: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(RUN.format(ring=ring))
    return folder / "run.yaml"


class Stopped(Exception):
    pass


def run_once(file: str, folder: str, world: int, stop_after: int | None = None) -> int:
    torch.manual_seed(5)
    loaded = load(file, [f"run.folder={folder}", f"launch.cpu={world}"])

    def one(part: Any, text: str | None, **more: Any) -> int:
        """And the state after each phase, on a line of its own."""
        code = trainer.train(part, quiet=True, text=text, **more)
        with open(f"{folder}.states", "a") as states:
            states.write(json.loads((Path(folder) / "status.json").read_text())["state"] + "\n")
        return code

    if stop_after is None:
        return train_in_phases(loaded.config, loaded.text, one)
    plain = trainer.train_step

    def dying(run: Any, optimizer: Any, batches: Any, train: Any, step: int, *more: Any) -> Any:
        if step == stop_after:
            raise Stopped
        return plain(run, optimizer, batches, train, step, *more)

    trainer.train_step = dying
    try:
        return run_once(file, folder, world)
    except Stopped:
        return -1
    finally:
        trainer.train_step = plain


@pytest.fixture(scope="module")
def straight(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phases") / "run"
    assert workers.run(run_once, str(write(folder.parent)), str(folder), 1, world=1) == [0]
    return folder


def test_a_run_is_finished_after_its_last_phase_only(straight: Path):
    assert straight.with_name("run.states").read_text().split() == ["running", "running", "finished"]
    assert "without a clean stop" not in (straight / "logs/rank-0.log").read_text()


def test_every_phase_has_its_own_length_data_stack_and_rotary_settings(straight: Path):
    lines = [line for line in read_metrics(straight / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert [line["samples"] for line in lines] == [4 * step for step in range(1, 10)]
    tokens = [0, *(line["tokens"] for line in lines)]
    assert [b - a for a, b in pairwise(tokens)] == [4 * 64] * 3 + [4 * 128] * 4 + [4 * 256] * 2
    config = load(straight / "config.yaml").config
    assert [phase.stack is not None and phase.stack.chosen is not None for phase in config.phases] == [True] * 3
    assert config.phases[1].stack is not None and config.phases[1].stack.recompute == "layer"
    rates = [learning_rate(part.train, step) for part in phase_configs(config)[:1] for step in range(9)]
    assert [line["lr"] for line in lines] == rates, "one schedule over all phases"
    opened = find_model(straight)
    assert opened.step == 9 and opened.config.data.context == 256 and opened.config.model.rope is not None
    early = find_model(straight / "checkpoints" / "step-8")
    assert early.config.model.rope is not None and early.config.model.rope.factor == 4.0
    assert phase_at(config, 7).data.context == 128 and phase_at(config, 3).data.context == 64
    assert phase_at(config, 7).model.rope is None


@pytest.mark.parametrize("step", [3, 5], ids=["at a boundary", "inside a phase"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(workers: Workers, tmp_path: Path, straight: Path, step: int):
    """Stopped before step+1: at 3 the second phase has just begun; at 5 the checkpoint of step 4 is the newest."""
    file = str(write(tmp_path))
    assert workers.run(run_once, file, str(tmp_path / "run"), 1, step, world=1) == [-1]
    assert workers.run(run_once, file, str(tmp_path / "run"), 1, world=1) == [0]
    assert losses(read_metrics(tmp_path / "run" / "metrics.jsonl")) == losses(read_metrics(straight / "metrics.jsonl"))
    ends = [hashes_of(folder / "checkpoints" / "step-9") for folder in (straight, tmp_path / "run")]
    assert ends[0] == ends[1] and ends[0]


def test_two_ranks_see_the_same(workers: Workers, tmp_path: Path, straight: Path):
    file = str(write(tmp_path, ring=2))
    assert workers.run(run_once, file, str(tmp_path / "run"), 2, world=2) == [0, 0]
    two, one = (losses(read_metrics(folder / "metrics.jsonl")) for folder in (tmp_path / "run", straight))
    assert two == pytest.approx(one, rel=1e-4)


def test_lengths_need_not_be_said_twice_but_must_not_contradict(tmp_path: Path):
    bare = ["phases=[{context: 64, steps: 2}, {context: 1K, steps: 5}]", "data.sources=[{synthetic: needles}]"]
    config = load(None, ["model.folder=tiny_llama", *bare]).config
    assert config.data.context == 1024 and config.train.steps == 7
    with pytest.raises(ValueError, match=r"train.steps=80, but phases have 7 in all"):
        load(None, [*bare, "data.context=1K"], "tiny_cpu")
    with pytest.raises(ValueError, match="is not the longest context of phases, 1024"):
        load(None, ["model.folder=tiny_llama", *bare, "data.context=2K"])
    with pytest.raises(ValueError, match=r"phases\[0\].contxt; did you mean phases\[0\].context"):
        load(None, ["model.folder=tiny_llama", "phases=[{contxt: 64, steps: 2}]"])
    with pytest.raises(ValueError, match=r"phases\[0\].stack: .*world size 1"):
        load(None, ["model.folder=tiny_llama", "launch.cpu=1", "phases=[{context: 64, steps: 2, stack: {ring: 2}}]"])


def test_the_cursor_goes_on_in_the_rows_of_the_next_phase():
    """Sample 12 of the run is row 12 of its phase's order, so no phase begins with the rows an earlier one began with."""
    from ithaca.data.rows import Stream

    first, second = (Stream([Needles(length, 128)], seed=0) for length in (64, 128))
    seen = {first.where(sample)[1] for sample in range(12)}
    assert not seen & {second.where(sample)[1] for sample in range(12, 24)}
