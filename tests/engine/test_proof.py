"""Proofs: kept, found again, made anew when something changes, and never made of a copy that lacks a part."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM
from transformers.models.granite import modeling_granite

from ithaca.engine import proof as proof_module
from ithaca.engine.model.shrink import smallest
from ithaca.engine.parallelize import prepare
from ithaca.engine.proof import kept_proof, parts_of, prove
from ithaca.stack import Stack


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "ithaca" / "proofs"


def test_kept_and_found_again(cache: Path):
    config: Any = smallest("granite")
    first = kept_proof(GraniteForCausalLM, config)
    begin = time.perf_counter()
    assert kept_proof(GraniteForCausalLM, config) == first and first.exact
    assert time.perf_counter() - begin < 0.1
    (file,) = cache.iterdir()
    other = copy.deepcopy(config)
    other.residual_multiplier = 0.5
    assert kept_proof(GraniteForCausalLM, other).exact and len(list(cache.iterdir())) == 2
    file.write_text("{")  # half written by somebody
    assert kept_proof(GraniteForCausalLM, config).exact


def test_a_class_that_looks_at_its_neighbours_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    own = modeling_granite.GraniteMLP.forward

    def mixing(self: Any, x: torch.Tensor) -> torch.Tensor:
        return own(self, x) + 0.01 * x.cumsum(1)

    monkeypatch.setattr(modeling_granite.GraniteMLP, "forward", mixing)
    proof = prove(GraniteForCausalLM, smallest("granite"))
    assert (
        not proof.exact and "model.layers.0.mlp" in proof.where and "the first module where the two part" in proof.where
    )


def test_a_part_that_counts_its_tokens_is_refused(monkeypatch: pytest.MonkeyPatch):
    """By ranks such a model would be wrong as well, so it is refused."""
    own = modeling_granite.GraniteMLP.forward
    monkeypatch.setattr(modeling_granite.GraniteMLP, "forward", lambda self, x: own(self, x) * (x.shape[1] / 24))
    proof = prove(GraniteForCausalLM, smallest("granite"))
    assert not proof.exact


def test_a_gradient_that_is_no_number_is_never_exact(monkeypatch: pytest.MonkeyPatch):
    """And the ones compared after it do not make up for it."""
    own = proof_module._errors
    monkeypatch.setattr(proof_module, "_errors", lambda a, b: [("loss", float("nan")), *own(a, b)])
    proof = prove(GraniteForCausalLM, smallest("granite"))
    assert not proof.exact and proof.error == float("inf")


def test_a_vocabulary_of_letters(cache: Path):
    config: Any = smallest("granite")
    config.vocab_size = 64
    assert prove(GraniteForCausalLM, config).exact


def test_another_part_is_another_proof(cache: Path):
    config, parts = smallest("granite"), {"GraniteMLP"}
    assert kept_proof(GraniteForCausalLM, config, parts).exact
    assert not kept_proof(GraniteForCausalLM, config, {*parts, "MambaMixer"}).exact


def test_a_copy_that_lacks_a_part_proves_nothing():
    proof = prove(
        GraniteForCausalLM, smallest("granite"), parts={"GraniteMLP", "model.layers.N.mlp.experts.gate_up_proj"}
    )
    assert not proof.exact and "lacks a part of it (model.layers.N.mlp.experts.gate_up_proj)" in proof.why


def test_the_whole_model_has_the_parts_of_its_copy():
    config = GraniteConfig(
        hidden_size=128, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2, vocab_size=500
    )
    with torch.device("meta"):
        model = GraniteForCausalLM(config)
    assert prove(GraniteForCausalLM, config, parts_of(model)).exact


def test_prepare_says_why(caplog: pytest.LogCaptureFixture):
    from transformers import AutoModelForCausalLM

    config = smallest("llama4_text")
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    with pytest.raises(
        ValueError, match=r"Llama4ForCausalLM has no arithmetic of its own here, .* so it is refused: off by "
    ):
        prepare(model, Stack(shard_parameters=False), device="cpu")
