"""The tiled loss against its definition, written out here; one tile of logits at a time; gradients in one pass."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ithaca.engine.limits import loss_tile
from ithaca.engine.model.linear import bind_linear
from ithaca.engine.objective.cross_entropy import IGNORE, LossKernel, LossTerms, cap, cross_entropy_sum, tiled_loss

WIDTH, VOCABULARY = 16, 37


def by_hand(logits: Tensor, labels: Tensor, terms: LossTerms) -> Tensor:
    """Token by token, from the definition: no cross_entropy, no ignore_index."""
    total = logits.new_zeros(())
    for row, label in zip(logits.flatten(0, -2), labels.flatten().tolist(), strict=True):
        if label == IGNORE:
            continue
        log_z = torch.logsumexp(row, -1)
        losses = log_z - row  # of every possible label
        total = total + (1 - terms.label_smoothing) * losses[label] + terms.label_smoothing * losses.mean()
        total = total + terms.z_loss * log_z**2
    return total


def problem(rows: int = 2, length: int = 11, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, length, WIDTH, generator=generator, dtype=dtype, requires_grad=True)
    head = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))
    labels = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    labels[0, : length // 2] = IGNORE
    labels[-1, -1] = IGNORE
    return x, labels, head


def sum_of(
    x: Tensor, labels: Tensor, head, parameters: list, *, tile: int = 4, terms=None, scale: float = 1.0
) -> Tensor:
    return tiled_loss(x, labels, head, parameters, tile=tile, terms=terms or LossTerms(), scale=scale)


TERMS = [LossTerms(), LossTerms(label_smoothing=0.1), LossTerms(z_loss=0.01), LossTerms(0.3, 0.02, 5.0)]


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("tile", [None, 1, 4, 11, 64])
def test_loss_and_gradients_are_those_of_the_definition(terms: LossTerms, tile: int | None):
    x, labels, head = problem()
    parameters = list(head.parameters())
    expected = by_hand(cap(head(x), terms.logit_cap), labels, terms)
    theirs = torch.autograd.grad(expected, [x, *parameters])
    loss = tiled_loss(x, labels, head, parameters, tile=tile, terms=terms, scale=1.0)
    ours = torch.autograd.grad(loss, [x, *parameters])
    torch.testing.assert_close(loss, expected)
    for mine, grad in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, grad)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_plain_definition_agrees_with_torch(smoothing: float):
    x, labels, head = problem()
    expected = F.cross_entropy(
        head(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing
    )
    torch.testing.assert_close(cross_entropy_sum(head(x), labels, LossTerms(smoothing)), expected)
    torch.testing.assert_close(by_hand(head(x), labels, LossTerms(smoothing)), expected)


@pytest.mark.parametrize("tile", [1, 3, 5])
def test_no_more_than_one_tile_of_logits_exists(tile: int):
    x, labels, head = problem()
    seen: list[tuple[int, ...]] = []
    alive, most = [0], [0]

    def watched(t: Tensor) -> Tensor:
        logits = head(t)
        seen.append(tuple(logits.shape))
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        weakref.finalize(logits, lambda: alive.__setitem__(0, alive[0] - 1))
        return logits

    tiled_loss(x, labels, watched, list(head.parameters()), tile=tile, terms=LossTerms(), scale=1.0).backward()
    counts = [min(tile, 11 - start) for start in range(0, 11, tile)]
    assert seen == [(2, count, VOCABULARY) for count in counts], "each tile once, in forward; none again in backward"
    assert most[0] == 1, "the logits of a tile are gone before the next are made"


def test_the_head_runs_in_forward_only():
    x, labels, head = problem()
    calls = []
    loss = sum_of(x, labels, lambda t: calls.append(len(calls)) or head(t), list(head.parameters()))
    assert len(calls) == 3
    loss.backward()
    assert len(calls) == 3


def test_a_scaled_loss_has_scaled_gradients():
    x, labels, head = problem()
    one = torch.autograd.grad(sum_of(x, labels, head, [head.weight]), [x, head.weight])
    for loss in (sum_of(x, labels, head, [head.weight]) / 8, sum_of(x, labels, head, [head.weight], scale=1 / 8)):
        for whole, part in zip(one, torch.autograd.grad(loss, [x, head.weight]), strict=True):
            torch.testing.assert_close(part, whole / 8)


def test_a_second_backward_is_an_error():
    x, labels, head = problem()
    loss = sum_of(x, labels, head, list(head.parameters()))
    loss.backward()
    with pytest.raises(RuntimeError, match=r"already differentiated; call run.loss again"):
        loss.backward()


def test_tokens_without_a_label_give_zero_and_zero_gradients():
    x, labels, head = problem()
    loss = sum_of(x, torch.full_like(labels, IGNORE), head, list(head.parameters()), terms=LossTerms(0.1, 0.1))
    loss.backward()
    assert x.grad is not None and head.weight.grad is not None
    assert loss.item() == 0.0 and not x.grad.any() and not head.weight.grad.any()


def test_without_grad_nothing_is_differentiated():
    x, labels, head = problem()
    with torch.no_grad():
        loss = sum_of(x, labels, head, list(head.parameters()))
    assert not loss.requires_grad
    frozen = head.requires_grad_(False)
    assert not sum_of(x.detach(), labels, frozen, []).requires_grad


def test_a_frozen_head_still_passes_the_gradient_down():
    x, labels, head = problem()
    expected = torch.autograd.grad(cross_entropy_sum(head(x), labels, LossTerms()), x)[0]
    head.requires_grad_(False)
    torch.testing.assert_close(torch.autograd.grad(sum_of(x, labels, head, []), x)[0], expected)


def test_half_precision_is_summed_in_float32():
    """Hundreds of tiles: a bf16 total would stop growing at 256 times a loss."""
    x, labels, head = problem(1, 600, torch.bfloat16)
    parameters = list(head.parameters())
    loss = sum_of(x, labels, head, parameters, tile=1)
    loss.backward()
    wide = nn.Linear(WIDTH, VOCABULARY).requires_grad_(True)
    wide.load_state_dict(head.state_dict())
    expected = cross_entropy_sum(head(x).float(), labels, LossTerms())
    exact = cross_entropy_sum(wide(x.detach().float()), labels, LossTerms())
    exact.backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert head.weight.grad is not None and wide.weight.grad is not None
    error = (head.weight.grad.float() - wide.weight.grad).norm() / wide.weight.grad.norm()
    assert head.weight.grad.dtype == torch.bfloat16 and float(error) < 2**-8


@pytest.mark.parametrize("vocabulary", [257, 32_000, 128_256, 262_144, 2**40])
@pytest.mark.parametrize("tile", [1, 61, 4096, 10**6])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_large_vocabulary_shortens_the_tiles_of_the_loss(rows: int, tile: int, vocabulary: int):
    short = loss_tile(tile, rows, vocabulary, fused=False)
    assert 1 <= short <= tile
    size = rows * short * vocabulary * 4
    assert size <= 2**29 or short == min(tile, 256), "half a GB of fp32, but no less than 256 tokens"
    whole = loss_tile(None, rows, vocabulary, fused=True)
    assert rows * whole * vocabulary <= 2**30 or whole == 256, "untiled layers leave it 2 GB of bf16"
    assert whole >= loss_tile(tile, rows, vocabulary, fused=True)


def test_the_cap_is_gemmas():
    logits = torch.linspace(-100, 100, 9)
    assert cap(logits, None) is logits
    torch.testing.assert_close(cap(logits, 30.0), torch.tanh(logits / 30.0) * 30.0)


class Summed(LossKernel):
    """The kernels of a GPU, by operators; `products` counts those that were added."""

    products = 0

    def fuses(self, device: torch.device, dtype: torch.dtype, terms: LossTerms) -> bool:
        return True

    def __call__(self, logits, labels, weights, terms, scale, learn):
        made = logits.detach().clone().requires_grad_()
        with torch.enable_grad():
            loss = cross_entropy_sum(made, labels, terms, weights) * scale
        return loss.detach(), logits, torch.autograd.grad(loss, made)[0]

    def scale(self, gradient: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return gradient.mul_(by)

    def adds_products(self, x: torch.Tensor) -> bool:
        return True

    def add_product(self, total, rows, x):
        self.products += 1
        return rows.t() @ x if total is None else total.addmm_(rows.t(), x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tile", "products"), [(4, 3), (None, 0)])
def test_a_heads_gradient_grows_inside_its_products(tile: int | None, products: int, bias: bool):
    torch.manual_seed(0)
    x, labels = torch.randn(2, 11, 8, dtype=torch.float64, requires_grad=True), torch.randint(0, 20, (2, 11))
    head, kernel = torch.nn.Linear(8, 20, bias=bias, dtype=torch.float64), Summed()
    linear, inputs = bind_linear(head), [x, *head.parameters()]

    def grads(**more: Any):
        how = {"tile": tile, "terms": LossTerms(), "scale": 0.5, **more}
        return torch.autograd.grad(tiled_loss(x, labels, linear, list(head.parameters()), **how), inputs)

    for ours, theirs in zip(grads(kernel=kernel, linear=linear), grads(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert kernel.products == products
    head.requires_grad_(False)  # as under an adapter elsewhere
    tiled_loss(x, labels, linear, [], tile=tile, terms=LossTerms(), scale=0.5, kernel=kernel, linear=linear).backward()
    assert kernel.products == products
