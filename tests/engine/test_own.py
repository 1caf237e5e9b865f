"""The module engine: what is computed again and what is not, and that a model is itself outside of a run."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ithaca.engine.model.shrink import TEXT, smallest
from ithaca.engine.model.weights import randomize
from ithaca.engine.offload import host
from ithaca.engine.own import OwnDecoder
from ithaca.engine.parallelize import prepare
from ithaca.engine.run import NoRoom
from ithaca.stack import Stack
from ithaca.verify.presets import add_lora

from .model.operators import Operators

IDS = torch.randint(0, TEXT, (2, 64), generator=torch.Generator().manual_seed(0))


def built(kind: str, **changes: Any) -> Any:
    config = smallest(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False)
    randomize(model, 0)
    return model


@pytest.mark.parametrize(("recompute", "again"), [("keep_attention", 0), ("layer", 1), ("none", 0)])
def test_no_kernel_runs_twice_unless_asked(recompute: str, again: int):
    model = built("helium")
    layers = len(model.model.layers)
    run = prepare(model, Stack(recompute=recompute, shard_parameters=False), device="cpu")
    loss = run.loss(run.shard(IDS))
    (kernel,) = run.kernels.chosen.values()
    assert (kernel.calls.forward, kernel.calls.backward) == (layers, 0)
    loss.backward()
    assert (kernel.calls.forward, kernel.calls.backward) == (layers * (1 + again), layers)


class Norms(Operators):
    """Everywhere, and counted."""

    def fuses_norm(self, x: torch.Tensor) -> bool:
        return True

    def norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        self.calls.append("norm")
        return super().norm(x, weight, epsilon)


@pytest.mark.parametrize(("kind", "looks"), [("glm4", True), ("phi3", False)])
@pytest.mark.parametrize(("recompute", "again"), [("keep_attention", 0), ("layer", 1)])
def test_an_mlp_is_computed_once_forward_and_once_backward(kind: str, looks: bool, recompute: str, again: int):
    """GLM-4 normalises what comes out of it, which is therefore kept; Phi-3 adds it, and backward has no use for it."""
    model, tokens = built(kind), 40
    untouched = copy.deepcopy(model)
    run = prepare(model, Stack(engine="module", recompute=recompute, tile=16, shard_parameters=False))
    assert isinstance(run.decoder, OwnDecoder) and run.decoder.blank == (None if looks else 0.0)
    part = model.model.layers[1].mlp
    decoder, own = part._part_of_ithaca
    seen = []
    part._part_of_ithaca = decoder, lambda x: (seen.append(x.shape[1]), own(x))[1]
    ids = torch.randint(0, TEXT, (1, tokens))
    run.loss(run.shard(ids)).backward()
    assert sum(seen) == (2 + again) * tokens
    untouched(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for (name, ours), theirs in zip(model.named_parameters(), untouched.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 1e-5 * theirs.grad.norm(), name


@pytest.mark.parametrize(
    ("kind", "kernel", "norm"),
    [
        ("glm4", "norm", "RMSNorm"),
        ("gemma2", "add_norm", "RMSNorm"),
        ("qwen3_5_text", "add_norm", "RMSNorm"),
        ("qwen3_5_text", "product", "RMSNormGated"),
    ],
)
def test_norms_by_one_kernel_where_they_are_its_formula(kind: str, kernel: str, norm: str):
    """Gemma adds one to its weights; a gated delta net multiplies by a gate behind its norm."""
    model = built(kind)
    own = copy.deepcopy(model)
    run = prepare(model, Stack(shard_parameters=False, engine="module"), device="cpu")
    assert isinstance(run.decoder, OwnDecoder)
    run.decoder.token_kernels = kernels = Norms()
    loss, theirs = run.loss(run.shard(IDS)), own(input_ids=IDS, labels=IDS).loss
    loss.backward()
    theirs.backward()
    norms = sum(type(module).__name__.endswith(norm) for module in model.modules())
    assert norms and kernels.calls.count(kernel) == 2 * norms - (norm == "RMSNorm"), (
        "again in backward, but for the last one"
    )
    for (name, a), b in zip(model.named_parameters(), own.parameters(), strict=True):
        assert float((a.grad - b.grad).norm() / b.grad.norm()) < 1e-5, name
    calls = len(kernels.calls)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, own(IDS).logits) and len(kernels.calls) == calls, (
            "outside of a run it is itself"
        )


def test_the_model_is_itself_outside_of_a_run():
    model = built("gemma2")
    own = copy.deepcopy(model)
    run = prepare(model, Stack(shard_parameters=False), device="cpu")
    run.loss(run.shard(IDS)).backward()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, own(IDS).logits)
    assert model.config._attn_implementation == "eager"


def test_hooks_do_what_they_do():
    """A hook on any part of a layer runs as in the untouched model."""
    model = built("helium")
    own = copy.deepcopy(model)
    for each in (model, own):
        each.model.layers[1].self_attn.q_proj.register_forward_hook(lambda module, inputs, output: output * 1.5)
    run = prepare(model, Stack(shard_parameters=False), device="cpu")
    loss, theirs = run.loss(run.shard(IDS)), own(input_ids=IDS, labels=IDS).loss
    loss.backward()
    theirs.backward()
    assert float((loss - theirs).detach().abs()) < 1e-5
    for (name, a), b in zip(model.named_parameters(), own.parameters(), strict=True):
        assert float((a.grad - b.grad).norm() / b.grad.norm()) < 1e-5, name


@pytest.mark.parametrize("part", ["layers.1.mlp", "layers.0.self_attn.k_proj", "embed_tokens", "norm"])
def test_a_hook_that_mixes_tokens_is_refused(part: str):
    model = built("helium")
    model.model.get_submodule(part).register_forward_hook(lambda module, inputs, output: output + output.roll(1, 1))
    with pytest.raises(ValueError, match=rf"with what its owner changed \(model.{part} .* has a hook .*off by"):
        prepare(model, Stack(shard_parameters=False), device="cpu")


def test_a_hook_on_the_wrapper_of_adapters_is_refused():
    model = add_lora(built("helium"), 0)
    model.register_forward_hook(lambda module, inputs, output: output)
    with pytest.raises(ValueError, match=r"the PEFT model .* has a hook"):
        prepare(model, Stack(shard_parameters=False), device="cpu")


def test_a_proof_leaves_the_callers_random_numbers_alone():
    model = built("helium")
    model.model.norm.register_forward_hook(lambda module, inputs, output: output)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    prepare(model, Stack(shard_parameters=False), device="cpu")
    assert torch.equal(torch.rand(3), expected)


def test_a_hook_that_comes_later_is_refused():
    model = built("helium")
    run = prepare(model, Stack(shard_parameters=False), device="cpu")
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output)
    with pytest.raises(ValueError, match="was not there when the model was proven; register it before prepare"):
        run.loss(run.shard(IDS))


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("gpt2", {"resid_pdrop": 0.1}, "config.resid_pdrop=0.1 makes results random; set it to 0.0"),
        ("mamba", {}, r"MambaMixer scans channel by channel \(mamba_inner_fn, Mamba-1\)"),
        ("rwkv", {}, "never came to attention that can be replaced"),
    ],
)
def test_what_is_refused(kind: str, changes: dict[str, Any], said: str):
    with pytest.raises(ValueError, match=said):
        prepare(built(kind, **changes), Stack(shard_parameters=False), device="cpu")


def test_engines_of_the_table_are_not_for_it():
    with pytest.raises(ValueError, match="engine='module'"):
        prepare(built("helium"), Stack(engine="streamed", shard_parameters=False), device="cpu")


def test_what_is_in_a_store_is_not_held_beside_it():
    """A layer's input waits in the store alone: on a GPU that is what the store is for."""
    model = built("helium")
    seen: list[weakref.ref[Any]] = []
    model.model.layers[1].register_forward_pre_hook(lambda _, args: seen.append(weakref.ref(args[0].untyped_storage())))
    run = prepare(model, Stack(recompute="layer", store="host", shard_parameters=False), device="cpu")
    seen.clear()  # a hook is proven on a copy, which ran too
    loss = run.loss(run.shard(IDS))
    gc.collect()
    assert len(seen) == 1 and seen[0]() is None
    loss.backward()


def test_a_host_without_room_is_told_before_anything_is_stored(monkeypatch: pytest.MonkeyPatch):
    model = built("helium")
    layers, hidden = len(model.model.layers), model.config.hidden_size
    mixed = ("layer",) + ("keep_attention",) * (layers - 1)
    run = prepare(model, Stack(recompute=mixed, store="host", shard_parameters=False), device="cpu")
    monkeypatch.setattr(host, "available_memory", lambda: 4 * IDS.numel() * hidden - 1)
    with pytest.raises(NoRoom, match="of memory available, this step needs"):
        run.loss(run.shard(IDS))
    assert run.store.held_bytes == 0
    monkeypatch.setattr(host, "available_memory", lambda: 4 * IDS.numel() * hidden)
    with pytest.raises(NoRoom):  # the first layer fits, and what those above it keep does not
        run.loss(run.shard(IDS))
    monkeypatch.undo()
    run.report()
    run.loss(run.shard(IDS)).backward()
    assert sum(run.reserved.values()) == run.report()["store"].bytes_out
