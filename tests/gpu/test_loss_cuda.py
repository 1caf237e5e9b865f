"""The fused loss on a GPU against the plain operators: value, gradient of the input and of the head."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from ithaca.engine.model.linear import bind_linear
from ithaca.engine.objective.cross_entropy import IGNORE, LossKernel, LossTerms, cap, cross_entropy_sum, tiled_loss
from ithaca.engine.objective.log_probs import Question, tiled_log_probs

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


def problem(vocabulary: int, dtype: torch.dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 37, 64, device=CUDA).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, 64, device=CUDA) * 0.3).to(dtype).requires_grad_()
    labels = torch.randint(0, vocabulary, (2, 37), device=CUDA)
    labels[0, 5:9] = IGNORE
    labels[1, -1] = IGNORE
    labels[1, 0] = vocabulary - 1
    return x, weight, labels


def distance(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    mine, theirs = mine.detach().double(), theirs.detach().double()
    return float((mine - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("vocabulary", [5, 257, 4096, 128256, 151937])
@pytest.mark.parametrize("terms", [LossTerms(), LossTerms(label_smoothing=0.1), LossTerms(z_loss=1e-2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tile", [None, 10])
def test_like_the_operators(vocabulary, terms, dtype, tile, monkeypatch):
    """The kernel is no further from float64 than torch's operators on the same tiles."""
    assert LossKernel().fuses(CUDA, dtype, terms), "Triton is missing"
    x, weight, labels = problem(vocabulary, dtype)

    def ours():
        loss = tiled_loss(x, labels, lambda t: F.linear(t, weight), [weight], tile=tile, terms=terms, scale=1 / 31)
        return loss, *torch.autograd.grad(loss, (x, weight))

    fused = ours()
    monkeypatch.setattr(LossKernel, "fuses", lambda *_: False)
    plain = ours()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = cross_entropy_sum(F.linear(*wide), labels, terms) / 31
    room = 1e-6 if dtype == torch.float32 else 1e-4
    for mine, theirs, truth in zip(fused, plain, (exact, *torch.autograd.grad(exact, wide)), strict=True):
        assert distance(mine, truth) <= 1.2 * distance(theirs, truth) + room


def test_a_heads_gradient_grows_inside_its_products():
    x, _, labels = problem(4096, torch.bfloat16)
    head = torch.nn.Linear(64, 4096, bias=False, device=CUDA, dtype=torch.bfloat16)
    linear, how = bind_linear(head), {"tile": 8, "terms": LossTerms(), "scale": 1 / 31}
    assert LossKernel().adds_products(x), "torch has no product that adds in float32"
    ours, theirs = (
        torch.autograd.grad(tiled_loss(x, labels, linear, [head.weight], **how, **more), (x, head.weight))
        for more in ({"linear": linear}, {})
    )
    wide = [t.detach().double().requires_grad_() for t in (x, head.weight)]
    exact = torch.autograd.grad(cross_entropy_sum(F.linear(*wide), labels, LossTerms()) / 31, wide)
    assert torch.equal(ours[0], theirs[0]) and distance(ours[1], exact[1]) <= distance(theirs[1], exact[1]) + 1e-4


@pytest.mark.parametrize("scale", [1.0, 1 / 3])
def test_a_scaled_loss(scale: float):
    x, weight, labels = problem(257, torch.bfloat16)

    def grads(by: float):
        loss = tiled_loss(x, labels, lambda t: F.linear(t, weight), [weight], tile=8, terms=LossTerms(), scale=1.0)
        return torch.autograd.grad(loss * by, (x, weight))

    for plain, scaled in zip(grads(1.0), grads(scale), strict=True):
        assert torch.equal((plain.float() * scale).bfloat16(), scaled)


def test_without_gradients_and_without_supervision():
    x, weight, labels = problem(257, torch.bfloat16)
    with torch.no_grad():
        value = tiled_loss(x, labels, lambda t: F.linear(t, weight), [], tile=8, terms=LossTerms(), scale=1.0)
        expected = cross_entropy_sum(F.linear(x, weight), labels, LossTerms())
    assert distance(value, expected) < 1e-6 and not value.requires_grad
    nothing = torch.full_like(labels, IGNORE)
    loss = tiled_loss(x, nothing, lambda t: F.linear(t, weight), [weight], tile=8, terms=LossTerms(), scale=1.0)
    grads = torch.autograd.grad(loss, (x, weight))
    assert float(loss.detach()) == 0.0 and all(float(g.abs().max()) == 0.0 for g in grads)


def test_a_soft_cap_goes_by_the_operators():
    terms = LossTerms(logit_cap=3.0)
    assert not LossKernel().fuses(CUDA, torch.bfloat16, terms)
    x, weight, labels = problem(257, torch.float32)
    loss = tiled_loss(x, labels, lambda t: F.linear(t, weight), [weight], tile=8, terms=terms, scale=1.0)
    expected = cross_entropy_sum(cap(F.linear(x, weight), 3.0), labels, LossTerms())
    assert distance(loss, expected) < 1e-6


def test_rows_beyond_two_to_the_31():
    """One tile of logits with more than 2³¹ elements."""
    tokens, vocabulary = 17_000, 128256
    torch.manual_seed(0)
    logits = torch.randn(tokens, vocabulary, device=CUDA, dtype=torch.bfloat16)
    labels = torch.randint(0, vocabulary, (tokens,), device=CUDA)
    last = logits[-3:].float()
    from ithaca.engine.objective.kernel import cross_entropy_in_place

    cross_entropy_in_place(logits, labels, None, scale=1.0, label_smoothing=0.0, z_loss=0.0, ignore=IGNORE, learn=True)
    expected = last.softmax(-1)
    expected[torch.arange(3), labels[-3:]] -= 1
    assert distance(logits[-3:], expected) < 4e-3


@pytest.mark.parametrize("vocabulary", [5, 257, 4096, 151937])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tile", "temperature"), [(None, 1.0), (10, 0.6)])
def test_log_probabilities_like_the_operators(vocabulary, dtype, tile, temperature, monkeypatch):
    """Values, entropies, and gradients with any gradient from above."""
    x, weight, labels = problem(vocabulary, dtype)
    above = [torch.randn(labels.shape, device=CUDA, generator=torch.Generator(CUDA).manual_seed(1)) for _ in range(2)]
    asked = (labels.flatten() != IGNORE).nonzero()[:, 0]
    question = Question(
        lambda t: F.linear(t, weight),
        asked,
        labels.flatten()[asked],
        tile,
        temperature,
        None,
        LossKernel(),
        nullcontext,
    )

    def ours():
        scored = tiled_log_probs(x, question, [weight])
        loss = (scored.logprobs * above[0] + scored.entropy * above[1]).sum()
        return scored.logprobs, scored.entropy, *torch.autograd.grad(loss, (x, weight)), scored.hits

    *fused, hits = ours()
    monkeypatch.setattr(LossKernel, "fuses", lambda *_: False)
    *plain, plain_hits = ours()
    assert torch.equal(hits, plain_hits)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    scores = (F.linear(*wide) / temperature).log_softmax(-1)
    keep = labels != IGNORE
    logprobs = scores.gather(2, labels.clamp(min=0)[..., None])[..., 0] * keep
    entropy = -(scores.exp() * scores).sum(-1) * keep
    grads = torch.autograd.grad((logprobs * above[0] + entropy * above[1]).sum(), wide)
    room = 1e-6 if dtype == torch.float32 else 1e-4
    for mine, theirs, truth in zip(fused, plain, (logprobs, entropy, *grads), strict=True):
        assert distance(mine, truth) <= 1.2 * distance(theirs, truth) + room


def test_weights_of_labels():
    x, weight, labels = problem(4097, torch.bfloat16)
    weights = torch.rand(labels.shape, device=CUDA)
    how = dict(tile=10, terms=LossTerms(label_smoothing=0.1, z_loss=1e-2), scale=1 / 31)
    loss = tiled_loss(x, labels, lambda t: F.linear(t, weight), [weight], weights=weights, **how)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = cross_entropy_sum(F.linear(*wide), labels, how["terms"], weights.double()) / 31
    pairs = zip(
        (loss, *torch.autograd.grad(loss, (x, weight))), (exact, *torch.autograd.grad(exact, wide)), strict=True
    )
    assert all(distance(mine, truth) < 5e-3 for mine, truth in pairs)
