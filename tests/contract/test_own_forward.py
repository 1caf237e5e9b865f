"""The model's own methods after `prepare`, where a user or another trainer may reach for them: forward and backward, saving,
gradients by other ways. Right, or refused with the way to do it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ithaca.base.processes.pool import Workers
from ithaca.engine.ranks import gather
from ithaca.verify.presets import add_lora

from .tiny import gradients, prepared, tiny, tokens, whole, worst

SHARDED = [dict(), dict(shard_parameters=False)]


def reference(seed: int) -> dict[str, torch.Tensor]:
    model, ids = tiny(), tokens(2, seed=seed)
    model(ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def through_its_own_forward(stack: dict[str, Any], part: str) -> tuple[str, int, dict[str, torch.Tensor]]:
    """What backward says, how many gradients it left, and the gradients of a step of ours behind it."""
    run = prepared(tiny(), **stack)
    model, ids = run.model, tokens(2)
    assert isinstance(model, nn.Module)
    said = ""
    try:
        if part == "loss":
            model(input_ids=ids, labels=ids).loss.backward()
        else:
            model(ids).logits.square().mean().backward()
    except RuntimeError as error:
        said = str(error)
    left = sum(p.grad is not None and bool(whole(p.grad).count_nonzero()) for p in model.parameters())
    model.zero_grad()
    run.loss(run.shard(tokens(2, seed=1))).backward()
    return said, left, gradients(run)


@pytest.mark.parametrize("part", ["loss", "logits"])
@pytest.mark.parametrize("stack", SHARDED, ids=["sharded", "whole"])
def test_on_several_ranks_backward_through_the_models_own_forward_is_refused(
    workers: Workers, stack: dict[str, Any], part: str
):
    """Its gradients would be summed over ranks that all have the whole loss."""
    theirs = reference(seed=1)
    for said, left, ours in workers.run(through_its_own_forward, dict(ulysses=2, **stack), part, world=2):
        assert "on 2 ranks" in said and "run.loss(run.shard(input_ids, labels=labels)).backward()" in said
        assert left == 0
        assert worst(ours, theirs) <= 1e-5, "the next step is as if nothing had been"


def looks(stack: dict[str, Any]) -> list[Any]:
    model, ids = tiny(), tokens()
    with torch.no_grad():
        before = model(ids).logits
    prepared(model, **stack)
    with torch.no_grad():
        without = model(ids, labels=ids)
    learning = model(ids, labels=ids)  # nobody calls backward
    answer = model.generate(ids[:, :8], max_new_tokens=4, do_sample=False, pad_token_id=0)
    return [torch.equal(without.logits, before), torch.equal(learning.logits, before), answer.shape[1]]


@pytest.mark.parametrize("stack", SHARDED, ids=["sharded", "whole"])
def test_on_several_ranks_it_can_still_look_and_generate(workers: Workers, stack: dict[str, Any]):
    assert workers.run(looks, dict(ulysses=2, **stack), world=2) == [[True, True, 12]] * 2


@pytest.mark.parametrize("fsdp", [False, True], ids=["plain", "fsdp"])
def test_the_part_below_the_head_is_called_alone_only_where_nothing_is_gathered(fsdp: bool):
    model, ids = tiny(), tokens(2, seed=1)
    before = model.model(ids).last_hidden_state
    run = prepared(model, shard_parameters=fsdp)
    if fsdp:
        with pytest.raises(RuntimeError, match="call the model itself, with output_hidden_states=True"):
            model.model(ids)
        with torch.no_grad():
            assert torch.equal(model(ids, output_hidden_states=True).hidden_states[-1], before)
    else:
        assert torch.equal(model.model(ids).last_hidden_state, before)
    run.loss(run.shard(ids)).backward()
    assert worst(gradients(run), reference(seed=1)) <= 1e-5


# Gradients while another forward waits for its backward.


def norms_between(stack: dict[str, Any], preset: str) -> tuple[list[str], float, float]:
    """One step's gradients, looked at when the next forward has been computed already."""
    run = prepared(preset, **stack)
    run.loss(run.shard(tokens(2))).backward()
    expected = float(
        torch.nn.utils.get_total_norm([whole(p.grad) for p in run.model.parameters() if p.grad is not None])
    )
    pending = run.loss(run.shard(tokens(2, seed=1)))
    missing = [name for name, p in run.model.named_parameters() if p.grad is None]
    norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e9)
    pending.backward()
    return missing, expected, float(whole(norm))


@pytest.mark.parametrize("preset", ["llama3", "qwen3"], ids=["head of its own", "tied head"])
@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_all_there_while_another_forward_is_pending(workers: Workers, world: int, preset: str):
    for missing, expected, norm in workers.run(norms_between, dict(), preset, world=world):
        assert missing == []
        assert norm == pytest.approx(expected, rel=1e-6)


def two_graphs() -> dict[str, torch.Tensor]:
    run = prepared("qwen3", ulysses=2)
    first, second = (run.loss(run.shard(tokens(2, seed=seed))) for seed in (1, 2))
    first.backward()
    second.backward()
    return gradients(run)


def test_and_both_backwards_are_right(workers: Workers):
    model = tiny("qwen3")
    for seed in (1, 2):
        model(tokens(2, seed=seed), labels=tokens(2, seed=seed)).loss.backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for ours in workers.run(two_graphs, world=2):
        assert worst(ours, theirs) <= 1e-5


# Gradients by other ways than backward.


@pytest.mark.parametrize("unused", [False, True])
def test_autograd_grad_by_shards_is_refused(unused: bool):
    run = prepared()
    parameters = list(run.model.parameters())
    with pytest.raises(RuntimeError, match=r"do not reach sharded parameters: .* call loss.backward\(\)"):
        torch.autograd.grad(run.loss(run.shard(tokens())), parameters, allow_unused=unused)
    with pytest.raises(RuntimeError, match="do not reach sharded parameters"):
        run.loss(run.shard(tokens())).backward(inputs=parameters[:1])
    run.loss(run.shard(tokens(2, seed=1))).backward()
    assert worst(gradients(run), reference(seed=1)) <= 1e-5


def test_autograd_grad_works_where_parameters_are_whole():
    run = prepared(shard_parameters=False)
    found = torch.autograd.grad(run.loss(run.shard(tokens(2, seed=1))), list(run.model.parameters()))
    names = [name for name, _ in run.model.named_parameters()]
    assert worst(dict(zip(names, found, strict=True)), reference(seed=1)) <= 1e-5


# Saving.


def save(folder: str, stack: dict[str, Any], kind: str, ranks: str) -> str:
    import ithaca.engine.pretrained

    model = tiny()
    if kind == "peft":
        model = add_lora(model, seed=1)
    elif kind == "add_adapter":
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    run = prepared(model, **stack)
    usual = ithaca.engine.pretrained.WAIT
    if ranks != "all":  # the others never come
        ithaca.engine.pretrained.WAIT = timedelta(milliseconds=10)
    try:
        if ranks == "all" or run.mesh.world.rank == 0:
            model.save_pretrained(folder)
        said = ""
    except RuntimeError as error:
        said = str(error)
    finally:
        ithaca.engine.pretrained.WAIT = usual
    gather(run.mesh.world, None)  # nobody leaves before all are done
    return said


@pytest.mark.parametrize(
    ("world", "stack", "ranks"),
    [
        (1, dict(), "all"),
        (2, dict(ulysses=2), "all"),
        (2, dict(ulysses=2, shard_parameters=False), "all"),
        (2, dict(ulysses=2, shard_parameters=False), "rank 0"),
    ],
    ids=["one process", "sharded", "whole", "whole, rank 0 alone"],
)
def test_a_prepared_model_saves_as_it_came(
    workers: Workers, tmp_path: Path, world: int, stack: dict[str, Any], ranks: str
):
    from transformers import AutoModelForCausalLM

    assert workers.run(save, str(tmp_path), stack, "plain", ranks, world=world) == [""] * world
    expected, loaded = tiny().state_dict(), AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", ["peft", "add_adapter"])
def test_and_its_adapters(workers: Workers, tmp_path: Path, kind: str):
    from safetensors.torch import load_file

    assert workers.run(save, str(tmp_path), dict(ulysses=2), kind, "all", world=2) == [""] * 2
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors and all(".lora_" in name and name.startswith("base_model.model.") for name in tensors)
    if kind == "peft":
        model = add_lora(tiny(), seed=1)
        for name, value in model.state_dict().items():
            if ".lora_" in name:
                assert torch.equal(tensors[name.replace(".default", "")], value), name


def test_a_sharded_model_that_rank_0_saves_alone_says_so(workers: Workers, tmp_path: Path):
    said = workers.run(save, str(tmp_path), dict(ulysses=2), "plain", "rank 0", world=2)
    assert "gathers the shards of all 2 ranks, but 1 called it" in said[0] and "call it on every rank" in said[0]
    assert said[1] == ""
