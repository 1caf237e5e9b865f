"""Preferences and rollouts in a run: losses and gradients are those of the untouched model on the same records, whoever holds the
tokens; the reference is the start, the model without its adapters, or what another model has scored."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import ithaca
from ithaca.base.processes.pool import Workers
from ithaca.cli.main import main
from ithaca.config import load
from ithaca.data.batch import batch_from_rows, batch_of_units
from ithaca.data.folder import Packed
from ithaca.data.pack import pack
from ithaca.data.rows import Stream, open_rows
from ithaca.data.samples import pack_sources
from ithaca.data.source import Source
from ithaca.engine.criterion import Preferences, Rollouts, Supervised, check_criterion, units_of
from ithaca.engine.objective.policy import Policy
from ithaca.engine.objective.preference import Preference, preference_losses
from ithaca.engine.parallelize import read_decoder
from ithaca.evaluation.reference import Scores, score, tokens_of_batch
from ithaca.evaluation.score import score_rows
from ithaca.evaluation.suite import Suite, run_suite
from ithaca.observe.metrics import read_metrics
from ithaca.training.trainer import train

from ..contract.tiny import VOCABULARY, gradients, meta, tiny, worst
from ..data.make import write_jsonl

CONTEXT, ROWS = 48, 8
LONG = os.environ.get("ITHACA_TREES") == "long"


def records() -> list[dict[str, Any]]:
    """Pairs as token ids: prompts and answers of many lengths, two of them the same prompt."""
    rng = np.random.default_rng(0)

    def ids(most: int) -> list[int]:
        return rng.integers(0, VOCABULARY, rng.integers(1, most + 1)).tolist()

    return [{"prompt": ids(6), "chosen": ids(9), "rejected": ids(7)} for _ in range(40)]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    path = write_jsonl(folder / "pairs.jsonl", records())
    pack([Source(str(path))], folder / "packed", vocabulary=VOCABULARY, workers=1, quiet=True)
    tiny("llama3").save_pretrained(folder / "model")
    return folder / "packed"


def plain_sums(model: Any, record: dict[str, Any]) -> Tensor:
    """Log-probabilities of chosen and rejected, [2], one sequence at a time."""
    sums = []
    for answer in ("chosen", "rejected"):
        ids = torch.tensor([[*record["prompt"], *record[answer]]])
        scores = model(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        each = scores.gather(1, ids[0, 1:, None])[:, 0]
        sums.append(each[len(record["prompt"]) - 1 :].sum())
    return torch.stack(sums)


def reference_of(part: Tensor) -> Tensor:
    """Some numbers that a reference may have given."""
    return -8.0 - (part.double() * 0.7).sin()


def stream_of(folder: str, share: bool = True) -> Stream:
    return Stream(open_rows(Packed(folder), CONTEXT, share=share, keep=False), seed=3)


SETTINGS = {
    "sigmoid": Preference(beta=0.3, label_smoothing=0.1),
    "ipo": Preference("ipo", beta=0.2),
    "hinge by length": Preference("hinge", beta=0.5, by_length=True),
}


def expected(packed: Path, settings: Preference, share: bool) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """The step's loss, numbers and gradients by the untouched model, from the records themselves."""
    model, stream = tiny("llama3"), stream_of(str(packed), share)
    numbers = [stream.units(row) for row in range(ROWS)]
    parts = torch.from_numpy(np.concatenate([units.parts for units in numbers]))
    every = records()
    used = [every[int(part) // 2] for part in parts[::2]]
    sums = torch.stack([plain_sums(model, record) for record in used])
    lengths = torch.tensor([[len(record["chosen"]), len(record["rejected"])] for record in used])
    losses, values = preference_losses(sums.double(), reference_of(parts).view(-1, 2), lengths, settings)
    losses.mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(losses.mean().detach()), {name: float(value.mean()) for name, value in values.items()}, grads


def step(folder: str, stack: dict[str, Any], accumulation: int, settings: Preference, share: bool) -> Any:
    run = ithaca.prepare(tiny("llama3"), ithaca.Stack(**stack), device="cpu")
    stream, each = stream_of(folder, share), ROWS // accumulation
    batches = [
        batch_of_units(stream, range(at, at + each), run.mesh, run.stack, VOCABULARY) for at in range(0, ROWS, each)
    ]
    assert all((batch.parents is not None) == share for batch in batches)
    criterion = Preferences(settings, lambda run, batch: reference_of(units_of(batch).parts))
    loss = 0.0
    for part, finite in criterion.losses(run, batches):
        part.backward()
        loss += float(part.detach())
        assert bool(finite)
    found = gradients(run)
    return loss, criterion.numbers(), found if run.mesh.world.rank == 0 else None


LAYOUTS: dict[str, tuple[int, dict[str, Any], int, str]] = {
    "1, accumulating": (1, dict(tile=7, store="host"), 4, "ipo"),
    "2 data": (2, dict(), 2, "hinge by length"),
    "2 ring": (2, dict(ring=2, tile=5), 2, "sigmoid"),
    "4 = 2 ulysses × 2 data": (4, dict(ulysses=2, heads_per_stage=1), 4, "sigmoid"),
}


def layouts(names: Any, apart: str) -> list[Any]:
    """Each with prompts that are shared but one, `apart`; `make trees`: each with both."""
    pairs = [(name, share) for share in (True, False) for name in names if LONG or share == (name != apart)]
    return [pytest.param(name, share, id=f"{name}{'' if share else ', apart'}") for name, share in pairs]


@pytest.mark.parametrize(("name", "share"), layouts(LAYOUTS, "2 ring"))
def test_as_the_untouched_model(workers: Workers, packed: Path, name: str, share: bool):
    world, stack, accumulation, settings = LAYOUTS[name]
    loss, numbers, theirs = expected(packed, SETTINGS[settings], share)
    answers = workers.run(step, str(packed), stack, accumulation, SETTINGS[settings], share, world=world)
    for found, said, _ in answers:
        assert found == pytest.approx(loss, rel=1e-5) and found == answers[0][0]
        assert said == pytest.approx(numbers, rel=1e-4, abs=1e-5)
    assert len(theirs) > 8 and worst(answers[0][2], theirs) <= 1e-5


# -- scores of a reference ---------------------------------------------------------------------------------------------


def scored(folder: str, out: str, stack: dict[str, Any], share: bool) -> None:
    run = ithaca.prepare(tiny("llama3"), ithaca.Stack(**stack), device="cpu")
    stream = stream_of(folder, share)
    score(run, Path(out), stream, [0, 1, 2], model="tiny", temperature=1.0, tokens=CONTEXT)
    score(run, Path(out), stream, range(3, len(stream)), model="tiny", temperature=1.0, tokens=2 * CONTEXT)


@pytest.mark.parametrize(
    ("world", "stack", "share"), [(1, {}, False), (4, dict(ulysses=2, tile=5), True)], ids=["1, apart", "4, shared"]
)
def test_scores_are_those_of_the_untouched_model(
    workers: Workers, packed: Path, tmp_path: Path, world: int, stack: dict[str, Any], share: bool
):
    workers.run(scored, str(packed), str(tmp_path / "scores"), stack, share, world=world)
    scores, folder, model = Scores(tmp_path / "scores"), Packed(packed), tiny("llama3")
    scores.check(folder, VOCABULARY, 1.0)
    with torch.no_grad():
        right = torch.cat([plain_sums(model, record) for record in records()])
    assert scores._sums == pytest.approx(right.double().numpy(), rel=1e-5)
    every = scores.tokens(0, int(folder.offsets[-1]))
    assert every.sum() == pytest.approx(float(right.sum()), rel=1e-5)
    seen = folder.mask(0, int(folder.offsets[-1]))
    assert seen is not None and np.array_equal(every != 0, seen)
    assert not scores.unscored(stream_of(str(packed)), range(20))
    for about, message in (
        (
            {"vocabulary": 5},
            r"vocabulary has 5 tokens, and this model's has \d+: .* Score with a model of this vocabulary",
        ),
        ({"content": "0" * 64}, "is of other data than"),
        ({"temperature": 0.5}, "was scored at temperature 0.5, and this run has 1; score it again"),
    ):
        scores.about.update(about)
        with pytest.raises(ValueError, match=message):
            scores.check(folder, VOCABULARY, 1.0)
        scores.about.update(vocabulary=VOCABULARY, content=folder.identity, temperature=1.0)
    (tmp_path / "scores" / "sums.bin").write_bytes(bytes(8 * 80))
    with pytest.raises(ValueError, match=r"sums.bin is missing or has changed since it was written"):
        Scores(tmp_path / "scores")


# -- whole runs ------------------------------------------------------------------------------------------------------------

RUN = [
    "model.dtype=fp32", f"data.context={CONTEXT}", "train.rows=4", "train.lr=1e-2", "train.warmup=0", "train.schedule=constant",
    "objective=dpo",
]  # fmt: skip


def trained(data: str, folder: str, more: list[str]) -> int:
    given = [*RUN, f"model.folder={Path(data).parent / 'model'}", f"data.packed={data}", f"run.folder={folder}", *more]
    return train(load(None, given).config, quiet=True)


def run(workers: Workers, data: Path, folder: Path, world: int, steps: int, *more: str) -> list[dict[str, Any]]:
    given = [f"launch.cpu={world}", f"train.steps={steps}", f"stack.ulysses={world}", *more]
    assert workers.run(trained, str(data), str(folder), given, world=world) == [0] * world
    return [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def test_a_run_that_compares_with_its_start(workers: Workers, packed: Path, tmp_path: Path):
    held_out = ["data.validation=6", "eval.every=2", "eval.rows=1", "eval.keep_best=true"]
    whole = run(workers, packed, tmp_path / "whole", 1, 4, *held_out)
    # nothing is preferred yet, and then what was chosen is
    assert whole[0]["loss"] == pytest.approx(math.log(2), abs=1e-5) and abs(whole[0]["margin"]) < 1e-5
    assert whole[-1]["loss"] < 0.65 and whole[-1]["margin"] > 0.05 and whole[-1]["accuracy"] > 0.6
    assert whole[-1]["margin"] == pytest.approx(whole[-1]["chosen_reward"] - whole[-1]["rejected_reward"], abs=1e-6)
    assert "entropy" not in whole[0]
    record = json.loads((tmp_path / "whole" / "eval" / "step-4.json").read_text())["held_out"]
    assert record["loss"] == whole[-1]["eval_loss"] and record["units"] > 0 and "margin" in record
    run(workers, packed, tmp_path / "parts", 1, 2, *held_out)
    parts = run(workers, packed, tmp_path / "parts", 1, 4, *held_out)  # of which more rows are scored first
    assert [(line["loss"], line.get("eval_loss")) for line in parts] == [
        (line["loss"], line.get("eval_loss")) for line in whole
    ]
    assert len([*(tmp_path / "parts" / "reference").rglob("*.bin")]) == 2
    hashes = [
        {name: about["sha256"] for name, about in json.loads(path.read_text())["files"].items() if "distcp" in name}
        for path in (tmp_path / name / "checkpoints" / "step-4" / "manifest.json" for name in ("whole", "parts"))
    ]
    assert hashes[0] == hashes[1] and hashes[0]


def measured(folder: str, rows: int) -> dict[str, Any]:
    run = ithaca.prepare(tiny("llama3"), ithaca.Stack(), device="cpu")
    criterion = Preferences(SETTINGS["sigmoid"], lambda run, batch: reference_of(units_of(batch).parts))
    suite = Suite(stream_of(folder), [], [], rows, 1, CONTEXT, None, criterion)
    record = run_suite(run, suite, 0)
    assert record is not None
    return record["held_out"]


def test_an_evaluation_counts_every_pair_once(workers: Workers, packed: Path):
    """Also where groups get a copy of the last row to keep them busy."""
    (alone,) = workers.run(measured, str(packed), 3, world=1)
    pairs = sum(len(stream_of(str(packed)).units(row).counts) for row in range(3))
    assert alone["units"] == pairs
    for found in workers.run(measured, str(packed), 3, world=4):
        assert found == pytest.approx(alone, rel=1e-5)


def test_adapters_compare_with_their_base(workers: Workers, packed: Path, tmp_path: Path):
    """Which is what they began as, so both references are the same."""
    lora = ["model.lora.rank=4", "objective.loss=ipo"]
    found = {
        (world, reference): run(
            workers, packed, tmp_path / f"{reference}-{world}", world, 3, *lora, f"objective.reference={reference}"
        )
        for world, reference in ((1, "adapters"), (2, "start"))
    }
    losses = {key: [line["loss"] for line in lines] for key, lines in found.items()}
    assert losses[1, "adapters"] == pytest.approx(losses[2, "start"], rel=1e-4)
    assert losses[2, "start"][-1] < losses[2, "start"][0]
    assert not (tmp_path / "adapters-1" / "reference").exists()


# -- rollouts --------------------------------------------------------------------------------------------------------------


def rollouts() -> list[dict[str, Any]]:
    """Groups of 2 to 4 completions, with rewards and with log-probabilities of whoever sampled them."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(24):
        completions = [rng.integers(0, VOCABULARY, rng.integers(1, 6)).tolist() for _ in range(rng.integers(2, 5))]
        found.append(
            {
                "prompt": rng.integers(0, VOCABULARY, rng.integers(1, 5)).tolist(),
                "completions": completions,
                "rewards": rng.normal(size=len(completions)).tolist(),
                "logprobs": [(-6 + rng.normal(size=len(each)) * 0.3).clip(max=0).tolist() for each in completions],
            }
        )
    found[3]["rewards"] = [1.0] * len(found[3]["rewards"])  # nothing to learn here
    return found


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollouts")
    path = write_jsonl(folder / "rollouts.jsonl", rollouts())
    pack([Source(str(path))], folder / "packed", vocabulary=VOCABULARY, workers=1, quiet=True)
    tiny("llama3").save_pretrained(folder / "model")
    return folder / "packed"


POLICIES = {
    "grpo": Policy(kl=0.05, temperature=0.8),
    "dapo": Policy("dapo", clip_low=0.1, clip_high=0.3, normalise="batch"),
    "bnpo": Policy("bnpo", kl=0.1, unbiased_kl=False, normalise="none"),
    "dr_grpo": Policy("dr_grpo", longest=7),
}


def plain_policy(
    packed: Path, settings: Policy, accumulation: int, share: bool
) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Written out, completion by completion. The reference says -6.5 of every token."""
    model, stream, every = tiny("llama3"), stream_of(str(packed), share), rollouts()
    first = np.cumsum([0, *(len(each["completions"]) for each in every)])
    steps = [[] for _ in range(accumulation)]  # groups of each micro-batch
    for row in range(ROWS):
        starts = stream.units(row).parts[np.cumsum([0, *stream.units(row).counts[:-1]])]
        steps[row * accumulation // ROWS] += [every[int(np.searchsorted(first, start))] for start in starts]
    groups = [group for groups in steps for group in groups]
    spread = torch.tensor([reward for group in groups for reward in group["rewards"]], dtype=torch.float64).std()
    count = sum(len(group["completions"]) for group in groups)
    tokens = sum(len(each) for group in groups for each in group["completions"])
    loss, numbers = torch.zeros(()), {"ratio": 0.0, "clipped": 0.0, "kl": 0.0, "entropy": 0.0}
    for micro in steps:
        in_micro = sum(len(each) for group in micro for each in group["completions"])
        for group in micro:
            rewards = torch.tensor(group["rewards"], dtype=torch.float64)
            advantage = rewards - rewards.mean()
            if settings.normalise != "none":
                advantage = advantage / ((rewards.std() if settings.normalise == "group" else spread) + 1e-4)
            for ids, old, gain in zip(group["completions"], group["logprobs"], advantage.float(), strict=True):
                whole = torch.tensor([[*group["prompt"], *ids]])
                logits = model(whole, use_cache=False).logits[0, len(group["prompt"]) - 1 : -1] / settings.temperature
                scores = logits.log_softmax(-1)
                logprobs = scores.gather(1, torch.tensor(ids)[:, None])[:, 0]
                ratio = (logprobs - torch.tensor(old)).exp()
                inside = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
                each = -torch.minimum(ratio * gain, inside * gain)
                further = -6.5 - logprobs
                divergence = (further.exp() - further - 1) * (ratio if settings.unbiased_kl else 1.0)
                each = each + settings.kl * divergence
                divisors = {
                    "grpo": len(ids) * count, "dapo": tokens, "bnpo": in_micro * accumulation, "dr_grpo": 7 * count,
                }  # fmt: skip
                loss = loss + each.sum() / divisors[settings.loss]
                clipped = (ratio * gain > inside * gain).float().sum()
                found = (ratio.sum(), clipped, divergence.sum(), -(scores.exp() * scores).sum())
                for name, value in zip(numbers, found, strict=True):
                    numbers[name] += float(value.detach()) / tokens
    loss.backward()
    if not settings.kl:
        del numbers["kl"]
    return float(loss.detach()), numbers, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def policy_step(folder: str, stack: dict[str, Any], accumulation: int, settings: Policy, share: bool) -> Any:
    run = ithaca.prepare(tiny("llama3"), ithaca.Stack(**stack), device="cpu")
    stream, each = stream_of(folder, share), ROWS // accumulation
    batches = [
        batch_of_units(
            stream, range(at, at + each), run.mesh, run.stack, VOCABULARY, lambda a, b: np.full(b - a, -6.5, np.float32)
        )
        for at in range(0, ROWS, each)
    ]
    assert all((batch.parents is not None) == share for batch in batches)
    criterion = Rollouts(settings, rewards=True, reference=tokens_of_batch if settings.kl else None)
    loss = 0.0
    for part, _ in criterion.losses(run, batches):
        part.backward()
        loss += float(part.detach())
    found = gradients(run)
    return loss, criterion.numbers(), found if run.mesh.world.rank == 0 else None


GROUPS: dict[str, tuple[int, dict[str, Any], int]] = {
    "grpo": (1, {}, 4),
    "bnpo": (2, dict(ring=2, tile=5), 2),
    "dr_grpo": (2, {}, 2),
    "dapo": (4, dict(ulysses=2, tile=3), 2),
}


@pytest.mark.parametrize(("name", "share"), layouts(GROUPS, "dr_grpo"))
def test_a_policy_step_written_out(workers: Workers, sampled: Path, name: str, share: bool):
    settings, (world, stack, accumulation) = POLICIES[name], GROUPS[name]
    loss, numbers, theirs = plain_policy(sampled, settings, accumulation, share)
    answers = workers.run(policy_step, str(sampled), stack, accumulation, settings, share, world=world)
    for found, said, _ in answers:
        assert found == pytest.approx(loss, rel=1e-5) and found == answers[0][0]
        assert {key: said[key] for key in numbers} == pytest.approx(numbers, rel=1e-4) and said["clipped"] > 0
    assert len(theirs) > 8 and worst(answers[0][2], theirs) <= 1e-5


def test_a_run_on_rollouts(workers: Workers, sampled: Path, tmp_path: Path):
    """Judged completions become likelier or less, and a run that was stopped goes on bit for bit."""
    asked = ["objective={kind: policy, kl: 0.01, clip_high: 0.3}", "train.lr=1e-3"]
    whole = run(workers, sampled, tmp_path / "whole", 1, 3, *asked)
    assert {"ratio", "clipped", "kl", "entropy"} <= whole[0].keys() and "margin" not in whole[0]
    assert abs(whole[0]["kl"]) < 1e-6 < whole[-1]["kl"]
    run(workers, sampled, tmp_path / "parts", 1, 2, *asked)
    parts = run(workers, sampled, tmp_path / "parts", 1, 3, *asked)
    assert [line["loss"] for line in parts] == [line["loss"] for line in whole]


# -- trees -----------------------------------------------------------------------------------------------------------------


def grown() -> list[dict[str, Any]]:
    """Trees of 2 to 8 nodes, of which some are not learned; the first children of a node may begin alike."""
    rng, found = np.random.default_rng(2), []
    for _ in range(16):
        nodes: list[dict[str, Any]] = []
        for at in range(rng.integers(2, 9)):
            ids = rng.integers(0, 4 if at % 2 else VOCABULARY, rng.integers(1, 5)).tolist()
            parent = None if at == 0 else int(rng.integers(0, at))
            nodes.append({"input_ids": ids, "parent": parent, "train": bool(rng.random() < 0.7)})
        nodes[0]["train"], nodes[-1]["train"] = False, True
        found.append({"nodes": nodes})
    return found


def ways_of(record: dict[str, Any]) -> list[tuple[list[int], list[bool]]]:
    nodes, found = record["nodes"], []
    for leaf in range(len(nodes)):
        if all(node["parent"] != leaf for node in nodes):
            ids, learned, at = [], [], leaf
            while at is not None:
                ids = [*nodes[at]["input_ids"], *ids]
                learned = [nodes[at]["train"]] * len(nodes[at]["input_ids"]) + learned
                at = nodes[at]["parent"]
            found += [(ids, learned)] * any(learned[1:])
    return found


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trees")
    path = write_jsonl(folder / "trees.jsonl", grown())
    pack([Source(str(path))], folder / "packed", vocabulary=VOCABULARY, workers=1, quiet=True)
    return folder / "packed"


@pytest.fixture(scope="module")
def unrolled() -> tuple[float, int, dict[str, Tensor]]:
    """Loss, supervised tokens and gradients of the untouched model, way by way."""
    model, total, count = tiny("llama3"), torch.zeros(()), 0
    for ids, learned in (way for record in grown() for way in ways_of(record)):
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        total = total + losses[torch.tensor(learned[1:])].sum()
        count += sum(learned[1:])
    (total / count).backward()
    return float(total.detach()) / count, count, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def step_of_trees(folder: str, stack: dict[str, Any], share: bool) -> Any:
    run = ithaca.prepare(tiny("llama3"), ithaca.Stack(**stack), device="cpu")
    stream = stream_of(folder, share)
    parts = range(3), range(3, len(stream))  # two micro-batches
    batches = [batch_from_rows(stream, part, run.mesh, run.stack, VOCABULARY) for part in parts]
    assert all((batch.parents is not None) == share for batch in batches)
    criterion, loss = Supervised(), 0.0
    for part, finite in criterion.losses(run, batches):
        part.backward()
        loss += float(part.detach())
        assert bool(finite)
    measured = score_rows(run, stream, range(len(stream)), tokens=CONTEXT, edges=(0, 5)).ranges
    found = gradients(run)
    return loss, sum(batch.supervised for batch in batches), measured, found if run.mesh.world.rank == 0 else None


FORESTS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, dict(tile=7)),
    "2 ring": (2, dict(ring=2, tile=5)),
    "4 = 2 ulysses × 2 ring": (4, dict(ulysses=2, ring=2, heads_per_stage=1)),
    "2 ulysses": (2, dict(ulysses=2)),
}


@pytest.mark.parametrize(("name", "share"), layouts(FORESTS, "2 ulysses"))
def test_trees_as_their_ways_unrolled(
    workers: Workers, trees: Path, unrolled: tuple[float, int, dict[str, Tensor]], name: str, share: bool
):
    """What is shared counts once for every way through it, in the loss and in evaluations."""
    world, stack = FORESTS[name]
    loss, count, theirs = unrolled
    answers = workers.run(step_of_trees, str(trees), stack, share, world=world)
    for found, supervised, measured, _ in answers:
        assert found == pytest.approx(loss, rel=1e-5) and supervised == count == int(measured[:, 2].sum())
        assert float(measured[:, 0].sum()) / count == pytest.approx(loss, rel=1e-5) and measured[:, 2].min() > 0
    assert len(theirs) > 8 and worst(answers[0][3], theirs) <= 1e-5


def test_what_was_shared_is_said(trees: Path, tmp_path: Path):
    config = tiny("qwen3_moe").config
    for name, balanced in (("plain", False), ("balanced", True)):
        config.output_router_logits, config.router_aux_loss_coef = balanced, 0.01
        config.save_pretrained(tmp_path / name)
    for model, more, words in (
        ("plain", [], "tokens are computed, "),
        ("plain", ["data.share_prefixes=off"], None),
        ("balanced", [], "is computed for each of them: the experts' balance loss"),
    ):
        said: list[str] = []
        given = [f"model.folder={tmp_path / model}", f"data.packed={trees}", f"data.context={CONTEXT}", "train.steps=1"]
        pack_sources(load(None, [*given, f"run.folder={tmp_path / 'run'}", *more]).config, said.append)
        assert ("tokens are computed" in "\n".join(said)) == (words == "tokens are computed, ")
        assert words is None or words in "\n".join(said)


# -- refused before the first step ---------------------------------------------------------------------------------------


def test_what_an_objective_cannot_learn_from(
    packed: Path, sampled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    run = ithaca.prepare(tiny("llama3"), ithaca.Stack(), device="cpu")
    score(run, Path("scores"), stream_of(str(packed)), [0], model="tiny", temperature=1.0, tokens=CONTEXT)
    about = json.loads(Path("scores/reference.json").read_text())
    shutil.copytree("scores", "others")
    Path("others/reference.json").write_text(json.dumps({**about, "vocabulary": 5}))
    Path("run.yaml").write_text(f"""
model: {{folder: {packed.parent / "model"}}}
data: {{context: {CONTEXT}}}
train: {{steps: 3}}
launch: {{cpu: 1}}
""")
    common = ["train", "run.yaml", "--check"]
    for data, more, words in (
        (
            packed,
            [],
            "holds preferences, and objective.kind=sft learns from texts, chats, completions and trees; learn from both",
        ),
        (packed, ["--objective=policy"], "holds preferences, and objective.kind=policy learns from rollouts"),
        (sampled, ["--objective=dpo"], "holds rollouts, and objective.kind=dpo learns from preferences"),
        (packed, ["--objective=dpo", "--objective.reference=nowhere"], "nowhere holds no scores of a reference"),
        (
            packed,
            ["--objective=dpo", "--objective.reference=others"],
            "vocabulary has 5 tokens, and this model's has 257",
        ),
        (
            packed,
            ["--objective=dpo", "--objective.reference=scores"],
            "of the 3 rows of this run; score all: ithaca score MODEL",
        ),
    ):
        assert main([*common, f"--data.packed={data}", *more]) in (2, 3)
        assert words in capsys.readouterr().err
    assert main([*common, f"--data.packed={packed}", "--objective=dpo"]) == 0


def test_experts_with_a_loss_of_their_own():
    decoder = read_decoder(meta("qwen3_moe", output_router_logits=True), ithaca.Stack())
    check_criterion("sft", decoder)
    with pytest.raises(
        ValueError, match=r"objective.kind=dpo has no balance loss of experts.* set output_router_logits to false"
    ):
        check_criterion("dpo", decoder)
