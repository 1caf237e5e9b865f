"""A kernel that runs and is wrong is refused: a silent error in gradients would ruin a run that looks healthy."""

from __future__ import annotations

import pytest
import torch

from ithaca.attention.backends import Cpu
from ithaca.attention.probe import probe

CPU = torch.device("cpu")


class Probed(Cpu):
    """Right, unless told to spoil one result: 0 is the output, 1 to 3 are the gradients of q, k and v."""

    def __init__(self, spoiled: int | None = None, by: float = 0.8) -> None:
        super().__init__()
        self.spoiled, self.by, self.runs = spoiled, by, 0
        self.probed: dict[tuple, str | None] = {}

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


def test_one_that_does_not_run_says_why_and_is_asked_once():
    class Missing(Probed):
        def backward(self, *given, **named):
            raise NotImplementedError("no such tile\nand a long story")

    kernel = Missing()
    for _ in range(2):
        said = probe(kernel, CPU, torch.float32, 64, False)
        assert said == "does not run on this GPU (NotImplementedError: no such tile)"
    assert kernel.runs == 1
