"""A kernel that runs and is wrong is refused: a silent error in gradients would ruin a run that looks healthy."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from ithaca.engine.attention.backends import Cpu
from ithaca.engine.attention.formula import Math
from ithaca.engine.attention.probe import WrongKernel, check, probe

CPU = torch.device("cpu")


class Probed(Cpu):
    """Right, unless told to spoil one result: 0 is the output, 1 to 3 are the gradients of q, k and v."""

    def __init__(self, spoiled: int | None = None, by: float = 0.8) -> None:
        super().__init__()
        self.spoiled, self.by, self.runs = spoiled, by, 0
        self.probed: dict[tuple, str | None] = {}
        self.checked: set[tuple] = set()

    def forward(self, *given, **named):
        self.runs += 1
        out, lse = super().forward(*given, **named)
        return (out * self.by if self.spoiled == 0 else out), lse

    def backward(self, *given, **named):
        grads = super().backward(*given, **named)
        return tuple(g * self.by if at + 1 == self.spoiled else g for at, g in enumerate(grads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("size", [8, 80, 128])
def test_a_kernel_that_is_right_is_taken(size: int, windowed: bool, dtype: torch.dtype):
    before = torch.get_rng_state()
    kernel = Probed()
    assert probe(kernel, CPU, dtype, size, windowed) is None
    assert torch.equal(torch.get_rng_state(), before) and kernel.calls.forward == kernel.calls.backward == 0


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("spoiled", range(4))
def test_one_that_is_wrong_is_refused(spoiled: int, windowed: bool):
    what = "gradients" if spoiled else "outputs"
    said = probe(Probed(spoiled), CPU, torch.float32, 64, windowed)
    assert said == f"computes wrong {what} for head_dim=64 on this GPU (off by 20%)"
    assert "wrong" in (probe(Probed(spoiled, float("nan")), CPU, torch.float32, 64, windowed) or "")


def test_a_window_that_is_a_few_tokens_off_is_seen():
    class Wider(Probed):
        def forward(self, *given, window, **named):
            return super().forward(*given, window=window and window + 4, **named)

    assert "wrong outputs" in (probe(Wider(), CPU, torch.float32, 64, True) or "")


class Capped(Math):
    """Right, unless it forgets the soft cap in one direction."""

    def __init__(self, forgets: str = "") -> None:
        super().__init__()
        self.forgets = forgets

    def forward(self, *given, softcap=None, **named):
        return super().forward(*given, softcap=None if self.forgets == "forward" else softcap, **named)

    def backward(self, *given, softcap=None, **named):
        return super().backward(*given, softcap=None if self.forgets == "backward" else softcap, **named)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(("forgets", "what"), [("", None), ("forward", "outputs"), ("backward", "gradients")])
def test_a_soft_cap_that_is_forgotten_is_seen(forgets: str, what: str | None, windowed: bool):
    said = probe(Capped(forgets), CPU, torch.float32, 64, windowed, softcapped=True)
    assert said is None if what is None else f"wrong {what} for head_dim=64 with a soft cap" in str(said)
    assert probe(Capped(forgets), CPU, torch.float32, 64, windowed) is None


@pytest.mark.parametrize("value_dim", [16, 40])
def test_values_of_another_size(value_dim: int):
    assert probe(Probed(), CPU, torch.bfloat16, 24, True, value_dim=value_dim) is None
    kernel = Probed(3)
    said = probe(kernel, CPU, torch.float32, 24, False, value_dim=value_dim)
    assert said == f"computes wrong gradients for head_dim=24, value_dim={value_dim} on this GPU (off by 20%)"
    probe(kernel, CPU, torch.float32, 24, False)
    assert len(kernel.probed) == 2


def test_one_that_does_not_run_says_why_and_is_asked_once():
    class Missing(Probed):
        def backward(self, *given, **named):
            raise NotImplementedError("no such tile\nand a long story")

    kernel = Missing()
    for _ in range(2):
        said = probe(kernel, CPU, torch.float32, 64, False)
        assert said == "does not run on this GPU (NotImplementedError: no such tile)"
    assert kernel.runs == 1


class Packed(Probed):
    """With documents in one call, as FlashAttention-4 has them, each its own."""

    def each(self, bounds):
        edges = bounds.tolist()
        return [slice(a, b) for a, b in pairwise(edges)]

    def forward_packed(self, q, k, v, *, bounds, longest, **named):
        parts = [self.forward(*(t[:, :, d] for t in (q, k, v)), causal=True, **named) for d in self.each(bounds)]
        return tuple(torch.cat(each, 2) for each in zip(*parts, strict=True))

    def backward_packed(self, *given, bounds, longest, **named):
        parts = [self.backward(*(t[:, :, d] for t in given), causal=True, **named) for d in self.each(bounds)]
        return tuple(torch.cat(each, 2) for each in zip(*parts, strict=True))


MASKS = [
    (True, None, False),
    (False, None, False),
    (True, 3, False),
    (False, 3, False),
    (True, None, True),
    (True, 3, True),
]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize(("causal", "window", "packed"), MASKS)
def test_each_kind_is_compared_when_it_is_first_used(causal, window, packed, group, backward):
    q, k = torch.empty(1, 2 * group, 5, 16), torch.empty(1, 2, 5, 16)
    mask = dict(causal=causal, window=window, packed=packed, backward=backward)
    right = Packed()
    right.calls.forward = 7
    for _ in range(2):
        check(right, q, k, **mask)
    assert right.runs == (3 if packed else 1) and right.calls.forward == 7 and right.calls.backward == 0
    with pytest.raises(WrongKernel, match=r"cpu computes wrong outputs for head_dim=16 .*; remedy: another kernel"):
        check(Packed(0), q, k, **mask)
    for spoiled in (1, 2, 3):
        if backward:
            with pytest.raises(WrongKernel, match=rf"wrong gradients .*, {group} query heads to a KV head"):
                check(Packed(spoiled), q, k, **mask)
        else:
            check(Packed(spoiled), q, k, **mask)


def test_another_kind_is_another_question():
    kernel, k = Packed(), torch.empty(1, 1, 5, 16)
    mask = dict(causal=True, window=None, packed=False, backward=False)
    for changes in ({}, {"causal": False}, {"window": 9}, {"window": 8}, {"packed": True}, {"backward": True}):
        check(kernel, torch.empty(1, 2, 5, 16), k, **{**mask, **changes})
    assert len(kernel.checked) == 5, "windows of any width are one kernel"
    check(kernel, torch.empty(1, 3, 5, 16), k, **mask)
    check(kernel, torch.empty(1, 2, 5, 16).bfloat16(), k, **mask)
    assert len(kernel.checked) == 7


def test_a_kernel_that_checks_itself_is_passed_over_with_the_same_words():
    class Careful(Probed):
        def backward(self, dout, q, k, *given, **named):
            check(self, q, k, causal=named["causal"], window=named["window"], packed=False, backward=True)
            return super().backward(dout, q, k, *given, **named)

    assert probe(Careful(2), CPU, torch.float32, 64, False) == (
        "computes wrong gradients for head_dim=64 on this GPU (off by 20%)"
    )
