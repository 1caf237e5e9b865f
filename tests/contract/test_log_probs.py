"""Log-probabilities and entropies of labels under any gradient from above, and their sums by document, whoever holds the tokens.

The reference is the untouched model in one process, document by document. In the suite every layout and every kind of model once;
`make losses` (ITHACA_LOSSES=long): every family, adapters and three that run by their own code on 1, 2, 4 and 8 ranks.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ithaca
from ithaca.base.processes.pool import Workers
from ithaca.engine.model.presets import TINY
from ithaca.engine.model.shrink import TEXT, smallest
from ithaca.engine.model.weights import randomize
from ithaca.engine.objective.reference import without_adapters
from ithaca.verify.presets import add_lora

from .test_one_loss import DOCUMENTS, LENGTH, ROWS, labelled
from .tiny import VOCABULARY, gradients, prepared, tiny, tokens, worst

TEMPERATURE = 0.7
OWN = ("glm4", "gpt_oss", "gemma2")  # by their own code


def model_of(kind: str) -> Any:
    """A preset, one with adapters, or a type of transformers that runs by its own code."""
    if kind in OWN:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(smallest(kind), attn_implementation="eager")
        return randomize(model, 1) or model
    return add_lora(tiny("llama3"), 2) if kind == "lora" else tiny(kind)


def batch_of(packed: bool) -> tuple[Tensor, Tensor, list[list[int]] | None, Tensor]:
    """ids, labels, documents, and what comes from above for each label."""
    ids = tokens(ROWS, LENGTH) % TEXT
    weights = torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(5))
    return ids, labelled(ids), DOCUMENTS if packed else None, weights


def objective(sums: Tensor, weighted: Tensor) -> Tensor:
    """Of the documents' log-probabilities something that is not a sum, as preferences are, and of tokens any combination."""
    return -F.logsigmoid(0.1 * (sums[1:] - sums[:-1])).sum() + weighted.sum()


def reference(kind: str, packed: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model = model_of(kind)
    ids, labels, documents, weights = batch_of(packed)
    sums, weighted = [], []
    for row in range(ROWS):
        start = 0
        for length in documents[row] if documents else [LENGTH]:
            part = slice(start, start + length)
            start += length
            scores = (model(ids[row : row + 1, part], use_cache=False).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            target, above = labels[row, part][1:], weights[row, part][1:]
            keep = target != -100
            logprobs = scores.gather(1, target.clamp(min=0)[:, None])[:, 0]
            entropy = -(scores.exp() * scores).sum(-1)
            sums.append(logprobs[keep].sum())
            weighted.append((above * logprobs + above.square() * entropy)[keep].sum())
    loss = objective(torch.stack(sums), torch.stack(weighted))
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}


def step(kind: str, stack: dict[str, Any], packed: bool, device: str = "cpu") -> tuple[Tensor, Any]:
    stack = {**stack, "engine": "module"} if kind in OWN else stack  # some of them have a row in the table by now
    run = ithaca.prepare(model_of(kind).to(device), ithaca.Stack(**stack), device=device, dtype=torch.float32)
    ids, labels, documents, weights = batch_of(packed)
    batch = run.shard(ids, labels=labels, documents=documents, weights=weights)
    logprobs, entropy = run.logprobs(batch, temperature=TEMPERATURE, entropy=True)
    assert bool((logprobs[batch.labels == -100] == 0).all()) and bool((entropy[batch.labels == -100] == 0).all())
    above = batch.weights
    assert above is not None
    weighted = run.by_document(batch, above * logprobs + above.square() * entropy)
    loss = objective(run.by_document(batch, logprobs), weighted)
    loss.backward()
    found = {name: grad.cpu() for name, grad in gradients(run).items() if bool(grad.any())}
    return loss.detach().cpu(), found if run.mesh.world.rank == 0 else None


CASES: dict[str, tuple[str, int, dict[str, Any], bool]] = {
    "1": ("llama3", 1, dict(), True),
    "1, whole": ("llama3", 1, dict(shard_parameters=False, tile=None, recompute="none"), False),
    "2 data, a rank without a label": ("llama3", 2, dict(tile=7), True),
    "2 ring": ("gemma3", 2, dict(ring=2, tile=7, store="host"), True),
    "4 = 2 ulysses × 2 ring": ("llama3", 4, dict(ulysses=2, ring=2, heads_per_stage=1, tile=5), True),
    "4 = 2 ulysses × 2 data": ("qwen3", 4, dict(ulysses=2, store="host"), False),
    "2 replicas": ("olmo2", 2, dict(replicate=2), True),
    "4 replicas": ("olmo2", 4, dict(replicate=4), True),
    "8 = 4 ulysses × 2 ring": ("mistral", 8, dict(ulysses=4, ring=2), True),
    "divided": ("granite", 2, dict(ulysses=2, tile=9), True),
    "experts": ("qwen3_moe", 2, dict(ulysses=2, recompute="layer"), True),
    "adapters": ("lora", 2, dict(ulysses=2, store="host"), True),
    "own code": ("glm4", 2, dict(ulysses=2), True),
    "own code, sinks": ("gpt_oss", 4, dict(ulysses=2, ring=2), False),
    "own code, capped": ("gemma2", 2, dict(ring=2, tile=9), False),
}
LONG = os.environ.get("ITHACA_LOSSES") == "long"  # make losses
if LONG:
    KINDS = [*TINY, "lora", *OWN]
    LAYOUTS = {
        1: dict(tile=9),
        2: dict(ring=2, store="host"),
        4: dict(ulysses=2, heads_per_stage=1, tile=5),
        8: dict(ulysses=2, ring=4),
    }
    CASES |= {
        f"{kind} on {world}, {'packed' if packed else 'whole'}": (kind, world, LAYOUTS[world], packed)
        for kind, world, packed in itertools.product(KINDS, LAYOUTS, (True, False))
    }


@pytest.mark.parametrize(
    "name", [name for name in CASES if LONG or name not in ("4 replicas", "8 = 4 ulysses × 2 ring")]
)
def test_parity(workers: Workers, name: str):
    kind, world, stack, packed = CASES[name]
    loss, theirs = reference(kind, packed)
    answers = workers.run(step, kind, stack, packed, world=world)
    assert all(torch.equal(value, answers[0][0]) for value, _ in answers)
    assert abs(float(answers[0][0] - loss)) <= 1e-5 * abs(float(loss))
    assert len(theirs) > 8 and worst(answers[0][1], theirs) <= 1e-5


def beside_a_reference(first: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """In bf16: the base's log-probabilities, and gradients of the adapters."""
    run = ithaca.prepare(model_of("lora"), ithaca.Stack(ulysses=2), device="cpu", dtype=torch.bfloat16)
    batch = run.shard(tokens(2) % TEXT)

    def reference() -> Tensor:
        with torch.no_grad(), without_adapters(run.model):
            return run.by_document(batch, run.logprobs(batch))  # pyright: ignore[reportArgumentType]

    base = reference() if first else torch.zeros(2)
    sums = run.by_document(batch, run.logprobs(batch))  # pyright: ignore[reportArgumentType]
    (-sums.sum() / batch.supervised).backward()
    return base if first else reference(), sums.detach(), gradients(run)


def test_a_reference_without_adapters_leaves_no_trace(workers: Workers):
    """Nor if it is the very first forward, in which FSDP2 looks at what is trained."""
    for (base, sums, ours), (again, same, theirs) in zip(
        workers.run(beside_a_reference, True, world=2), workers.run(beside_a_reference, False, world=2), strict=True
    ):
        assert torch.equal(base, again) and torch.equal(sums, same) and not torch.equal(base, sums)
        assert len(ours) > 8 and ours.keys() == theirs.keys()
        assert all(grad.dtype == torch.float32 and torch.equal(grad, theirs[name]) for name, grad in ours.items())


def together(stack: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Something of tokens that lie on different ranks, and the gradient of the embedding."""
    run = ithaca.prepare(tiny("llama3"), ithaca.Stack(**stack), device="cpu")
    batch = run.shard(tokens(4, 22))
    whole = run.by_token(batch, run.logprobs(batch))  # pyright: ignore[reportArgumentType]
    (whole[:, 1:] * whole[:, :-1] * whole[0, 3]).sum().backward()
    return whole.detach(), gradients(run)["model.embed_tokens.weight"]


@pytest.mark.parametrize(("world", "stack"), [(2, dict(ring=2)), (4, dict(ulysses=2))], ids=str)
def test_tokens_of_all_ranks_together(workers: Workers, world: int, stack: dict[str, Any]):
    right, slopes = together({})
    assert right.shape == (4, 22) and not right[:, -1].any() and right[:, :-1].all()
    for whole, grad in workers.run(together, stack, world=world):
        torch.testing.assert_close(whole, right, rtol=1e-5, atol=1e-5)
        assert float((grad - slopes).norm() / slopes.norm()) < 1e-5


# -- in one process ---------------------------------------------------------------------------------------------------------


def test_the_sum_is_the_loss_and_score_says_the_same():
    run = prepared(tile=8)
    ids = tokens(2)
    batch = run.shard(ids)
    logprobs = run.logprobs(batch)
    assert isinstance(logprobs, Tensor)
    assert float(-logprobs.detach().sum() / batch.supervised) == pytest.approx(
        float(run.loss(batch).detach()), rel=1e-6
    )
    losses, _ = run.score(batch)
    assert torch.equal(losses, -logprobs.detach()) and not losses.requires_grad
    likeliest = run.logits(batch).argmax(-1)
    batch.labels[batch.labels != -100] = likeliest[batch.labels != -100]
    batch.labels[0, 30] = (batch.labels[0, 30] + 1) % VOCABULARY
    hits = run.score(batch)[1]
    assert torch.equal(hits, likeliest == batch.labels) and int(hits.sum()) == batch.supervised - 1


def test_weights_of_labels():
    """As the same tokens counted so often."""
    ids, weights = tokens(2), torch.randint(0, 4, (2, 48), generator=torch.Generator().manual_seed(1)).float()
    run = prepared(tile=8)
    batch = run.shard(ids, weights=weights)
    loss = run.loss(batch, label_smoothing=0.1, z_loss=1e-3)
    loss.backward()
    model = tiny("llama3")
    logits = model(ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    each = F.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none", label_smoothing=0.1)
    each = each + 1e-3 * logits.logsumexp(-1) ** 2
    right = (each * weights[:, 1:].flatten()).sum() / (2 * 47)
    right.backward()
    assert float(loss.detach()) == pytest.approx(float(right.detach()), rel=1e-6)
    assert worst(gradients(run), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}) <= 1e-5
    halved = run.loss(batch, supervised=4 * 47, label_smoothing=0.1, z_loss=1e-3)
    assert float(halved.detach()) == pytest.approx(float(loss.detach()) / 2, rel=1e-6)


def test_two_forwards_and_one_backward():
    """As a loss of two batches has it, with the store between."""
    halves = tokens(2).chunk(2)
    run = prepared(store="host", tile=8)
    batches = [run.shard(half) for half in halves]
    first, second = (run.logprobs(batch) for batch in batches)
    assert isinstance(first, Tensor) and isinstance(second, Tensor)
    (first.sum() * second.sum() / 1e3).backward()
    model = tiny("llama3")
    sums = [-model(half, labels=half, use_cache=False).loss * 47 for half in halves]
    (sums[0] * sums[1] / 1e3).backward()
    assert worst(gradients(run), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}) <= 1e-5


def test_logits_of_one_tile():
    run, seen = prepared(tile=4), []
    run.decoder.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].shape[1]))
    logprobs = run.logprobs(run.shard(tokens(1, 18)))
    assert isinstance(logprobs, Tensor)
    logprobs.sum().backward()
    assert seen == [4, 4, 4, 4, 1] * 2  # 17 labels; again in backward


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda run: run.logprobs(run.shard(tokens()), temperature=0.0),
            "temperature=0.0 must be a finite number above",
        ),
        (lambda run: run.logprobs(run.shard(tokens()), temperature=float("nan")), "temperature=nan must be"),
        (lambda run: run.by_document(run.shard(tokens()), torch.zeros(2, 3)), r"values has shape \(2, 3\)"),
        (lambda run: run.by_token(run.shard(tokens()), torch.zeros(2, 3)), r"values has shape \(2, 3\)"),
        (
            lambda run: run.shard(tokens(), weights=torch.ones(2, 48)),
            r"weights is \(2, 48\), but input_ids has shape \(1, 48\)",
        ),
        (lambda run: run.shard(tokens(), weights=[1.0]), "weights is list"),
        (lambda run: run.shard(tokens(), weights=torch.full((1, 48), torch.nan)), r"weights\[0, 0\] is nan"),
    ],
)
def test_refused(call: Any, words: str):
    with pytest.raises(ValueError, match=words):
        call(prepared())


def test_differentiated_once():
    run = prepared()
    logprobs = run.logprobs(run.shard(tokens()))
    assert isinstance(logprobs, Tensor)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already differentiated"):
        logprobs.sum().backward()


def test_sums_keep_the_last_digits():
    run = prepared()
    values = torch.ones(1, 48)
    values[0, 0] = 2.0**25  # beside which float32 has no room for ones
    assert float(run.by_document(run.shard(tokens()), values)) == 2.0**25 + 47
