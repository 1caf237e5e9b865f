"""The same numbers on every layout, and those of the untouched model."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import ithaca
from ithaca.base.processes.pool import Workers
from ithaca.config import load
from ithaca.data.needles import Needles
from ithaca.data.rows import IGNORE, Stream
from ithaca.evaluation.languages import Ids
from ithaca.evaluation.score import position_edges, score_rows
from ithaca.evaluation.suite import make_suite, run_suite

from ..contract.tiny import VOCABULARY, prepared, tiny

STACKS: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, dict(recompute="none", tile=None, shard_parameters=False)),
    "tiles and stages": (1, dict(heads_per_stage=1, tile=16, store="host")),
    "ring": (2, dict(ring=2, recompute="layer", tile=32)),
    "data parallel": (2, dict(replicate=2, engine="composed")),
    "ulysses × ring": (4, dict(ulysses=2, ring=2, heads_per_stage=1, tile=16, store="disk")),
}
if os.environ.get("ITHACA_FAMILIES") == "long":  # make families
    STACKS["ulysses, data parallel"] = (4, dict(ulysses=2, shard_parameters=False))
    STACKS["ulysses"] = (4, dict(ulysses=4, engine="composed", recompute="layer"))
ODD = 250  # a length that no number of ranks divides


EVERYTHING = "needle,multi_key,multi_value,variable_tracking,common_words"


def suite_of(groups: int, tasks: str = EVERYTHING) -> Any:
    given = [f"eval.tasks={tasks}", "eval.lengths=200,250", "eval.depths=2", "eval.samples=3", "eval.rows=5"]
    config = load(None, [*given, f"data.context={ODD}"], "tiny_cpu").config
    held_out = Stream([Needles(ODD, VOCABULARY)], seed=1)
    return make_suite(config, Ids(VOCABULARY), held_out, groups)


def evaluate(stack: dict[str, Any], preset: str = "llama3", tasks: str = EVERYTHING) -> dict[str, Any]:
    run = prepared(preset, **stack)
    record = run_suite(run, suite_of(run.mesh.data.size, tasks), 0)
    assert record is not None
    return record


def numbers(record: dict[str, Any]) -> dict[str, Any]:
    return {name: record[name] for name in ("held_out", "needle", "tasks") if name in record}


def flat(value: Any, path: str = "") -> dict[str, float]:
    if isinstance(value, dict):
        return {k: v for name, each in value.items() for k, v in flat(each, f"{path}.{name}").items()}
    if isinstance(value, list):
        return {k: v for place, each in enumerate(value) for k, v in flat(each, f"{path}[{place}]").items()}
    return {path: value} if isinstance(value, int | float) else {}


@pytest.fixture(scope="module")
def alone(workers: Workers) -> dict[str, float]:
    (record,) = workers.run(evaluate, STACKS["plain"][1], world=1)
    return flat(numbers(record))


@pytest.mark.parametrize("name", [name for name in STACKS if name != "plain"])
def test_every_layout_gives_the_same_numbers(workers: Workers, alone: dict[str, float], name: str):
    world, stack = STACKS[name]
    records = workers.run(evaluate, stack, world=world)
    for record in records:
        assert flat(numbers(record)) == pytest.approx(alone, rel=1e-4, abs=1e-6)
    assert len(alone) > 80


def test_the_numbers_are_those_of_the_untouched_model(alone: dict[str, float]):
    """Whole logits of the Hugging Face model, row by row."""
    model, suite = tiny(), suite_of(1)

    def judge(source: Any, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids, labels, _ = source.read(row, 0, source.context)
        with torch.no_grad():
            logits = model(torch.from_numpy(ids)[None]).logits[0].double()
        wanted = torch.from_numpy(labels)
        asked = wanted != IGNORE
        losses = torch.nn.functional.cross_entropy(logits[asked], wanted[asked], reduction="none")
        return np.flatnonzero(asked), losses.numpy(), (logits[asked].argmax(-1) == wanted[asked]).double().numpy()

    rows = [judge(suite.held_out, row) for row in range(5)]
    places, losses, hits = (np.concatenate(each) for each in zip(*rows, strict=True))
    assert alone[".held_out.loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert alone[".held_out.perplexity"] == pytest.approx(np.exp(losses.mean()), rel=1e-5)
    assert alone[".held_out.accuracy"] == pytest.approx(hits.mean())
    edges = [*position_edges(ODD), ODD]
    filled = [(a, b) for a, b in pairwise(edges) if ((places >= a) & (places < b)).any()]
    for index, (a, b) in enumerate(filled):
        inside = (places >= a) & (places < b)
        assert alone[f".held_out.positions[{index}].from"] == a and alone[f".held_out.positions[{index}].to"] == b
        assert alone[f".held_out.positions[{index}].loss"] == pytest.approx(losses[inside].mean(), rel=1e-5)
        assert alone[f".held_out.positions[{index}].tokens"] == inside.sum()
    for index, task in enumerate(suite.tasks):
        answers = [judge(task, row) for row in range(3)]
        assert alone[f".tasks[{index}].log_probability"] == pytest.approx(
            -np.concatenate([a[1] for a in answers]).mean(), rel=1e-5
        )
        assert alone[f".tasks[{index}].exact"] == pytest.approx(np.mean([a[2].all() for a in answers]))
    cell = [judge(suite.grid[1][1], row) for row in range(3)]
    assert alone[".needle.accuracy[1][1]"] == pytest.approx(np.mean([a[2] for a in cell]))


@pytest.mark.parametrize("preset", ["gemma3", "qwen3_moe"])
def test_families_with_windows_or_experts(workers: Workers, preset: str):
    """Their quirks go through the same forward."""
    (one,) = workers.run(evaluate, STACKS["plain"][1], preset, "multi_key", world=1)
    two = workers.run(evaluate, dict(ring=2, tile=64), preset, "multi_key", world=2)[1]
    assert flat(numbers(two)) == pytest.approx(flat(numbers(one)), rel=1e-4, abs=1e-6)


def test_only_supervised_tokens_meet_the_head():
    run = prepared(tile=2)
    seen = []
    hook = run.decoder.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
    ids = torch.randint(0, VOCABULARY, (1, 64))
    labels = torch.full_like(ids, IGNORE)
    labels[0, [3, 41, 42]] = ids[0, [3, 41, 42]]
    losses, hits = run.score(run.shard(ids, labels))
    hook.remove()
    assert seen == [2, 1] and losses[0].nonzero().flatten().tolist() == [2, 40, 41] and hits.shape == (1, 64)
    whole = run.loss(run.shard(ids, labels))
    assert float(losses.sum()) / 3 == pytest.approx(float(whole.detach()), rel=1e-6)


def test_it_costs_its_own_forwards_and_keeps_nothing():
    """One attention call per layer and forward, no backward, nothing in the store, no gradient."""
    run, forwards = prepared(store="host"), []
    (kernel,) = run.kernels.chosen.values()
    before = (kernel.calls.forward, kernel.calls.backward)
    assert run_suite(run, suite_of(1, "multi_key"), 0, before=lambda words: bool(forwards.append(words))) is not None
    assert kernel.calls.forward - before[0] == len(forwards) * len(run.decoder.layers) and forwards
    assert kernel.calls.backward == before[1] and all(p.grad is None for p in run.model.parameters())
    assert run.report()["store"].puts == 0


def test_an_evaluation_can_be_left_off():
    run, words = prepared(), []

    def before(text: str) -> bool:
        words.append(text)
        return len(words) == 3

    assert run_suite(run, suite_of(1), 5, before=before) is None and len(words) == 3
    assert "held-out" in words[0] and not run.busy


def one_layer() -> ithaca.Run:
    model = tiny(
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    return ithaca.prepare(model, ithaca.Stack(ulysses=2, ring=2, heads_per_stage=1, tile=4096), device="cpu")


def far(length: int) -> list[list[float]]:
    from ithaca.evaluation.tasks import Task

    run = one_layer()
    task = Task("needle", Ids(VOCABULARY), length, 0.25)
    scored = score_rows(run, task, [0], tokens=length, edges=position_edges(length))
    return [scored.rows[0].tolist(), scored.ranges[-1].tolist()]


def test_32k_tokens_on_four_ranks(workers: Workers):
    found = workers.run(far, 32768, world=4)
    assert all(each == found[0] for each in found)
    (loss, hits, count), last = found[0]
    assert count == 1 and last == [loss, hits, count] and 1 < loss < 20
