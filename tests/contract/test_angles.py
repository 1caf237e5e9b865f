"""The contract at length. Rotary angles are exact here and rounded to float32 in transformers, so far tokens turn a little
differently: `verify` shows the distance from the model as it is and from the same model with exact angles, and tells such a
difference from a mistake. A small theta makes every pair fast, so that a thousand tokens do what otherwise takes ten thousand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ithaca.engine.model.rope import Rope
from ithaca.stack import Stack
from ithaca.verify.case import Case, run_case

FAST = ("rope_parameters", {"rope_type": "default", "rope_theta": 2.0})
FEW_HEADS = (("num_attention_heads", 2), ("num_key_value_heads", 1))
CASE = Case("qwen3", Stack(shard_parameters=False), length=1021, changes=(FAST, *FEW_HEADS))


@pytest.mark.parametrize("check", ["plain", "logits", "accumulation"])
def test_both_distances_are_shown_and_the_exact_one_holds_the_limit(check: str):
    items = {item.name: item for item in run_case(CASE, (check,))}
    prefix, what = ("accumulation: ", "gradients (24)") if check == "accumulation" else ("", "gradients (24)")
    what = "logits" if check == "logits" else what
    as_it_is, exact = items[f"{prefix}{what}"], items[f"{prefix}exact angles: {what}"]
    assert as_it_is.error > 1e-5 > 5 * exact.error, "angles must matter for this to prove anything"
    assert exact.limit == 1e-5 and as_it_is.limit <= 1e-5 + 1021 * 2.0**-24
    assert all(item.ok for item in items.values())


def test_a_model_within_the_limit_as_it_is_gets_no_more_room():
    items = run_case(Case("llama3", Stack(shard_parameters=False), length=101), ("plain",))
    assert [item.name for item in items] == [
        "loss",
        "gradients (21)",
        "exact angles: loss",
        "exact angles: gradients (21)",
    ]
    assert all(item.ok and item.limit == 1e-5 for item in items)


def test_wrong_angles_are_not_taken_for_rounding(monkeypatch: pytest.MonkeyPatch):
    """The reference with exact angles is made by our own formula; if that is wrong, the model as it is must say so."""
    plain = Rope.cos_sin

    def turned(self: Rope, positions: Tensor, dtype: torch.dtype, device: torch.device | str):
        return plain(Rope(self.inv_freq * (1 + 3e-5), self.scaling), positions, dtype, device)

    monkeypatch.setattr(Rope, "cos_sin", turned)
    items = {item.name: item for item in run_case(CASE, ("plain", "logits"))}
    assert items["exact angles: gradients (24)"].ok, "our formula agrees with itself"
    assert not items["gradients (24)"].ok and not items["logits"].ok
