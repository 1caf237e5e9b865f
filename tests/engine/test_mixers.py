"""Linear mixers on one process: segments, documents, kernels that are tried, and what is refused."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_chunk_gated_delta_rule

from ithaca.engine import proof as proofs
from ithaca.engine.attention import scan as scans
from ithaca.engine.attention.scan import SCANS, Call, MixerKernels
from ithaca.engine.layer.mixer import Halo, Spread, convolve, doors_of
from ithaca.engine.mesh import Group
from ithaca.engine.model.shrink import TEXT, smallest
from ithaca.engine.model.weights import randomize
from ithaca.engine.parallelize import prepare
from ithaca.engine.proof import Proof, apart
from ithaca.engine.sequence import Layout
from ithaca.stack import Stack

TOKENS = 300
DELTA, MAMBA = "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"
FUNCTIONS = {DELTA: torch_chunk_gated_delta_rule, MAMBA: mamba2_chunk_scan}
IDS = torch.randint(0, TEXT, (1, 40), generator=torch.Generator().manual_seed(0))


def call_of(name: str) -> tuple[Call, dict[str, Tensor]]:
    """As a model makes it, on three heads in float64, which the formulas turn to float32."""
    numbers = torch.Generator().manual_seed(1)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=numbers)

    wide = (1, TOKENS, 3, 8)
    if name == DELTA:
        args = (some(*wide), some(*wide), some(*wide))
        kwargs: dict[str, Any] = {
            "g": -0.1 * some(*wide[:3]).abs(),
            "beta": some(*wide[:3]).sigmoid(),
            "use_qk_l2norm_in_kernel": True,
        }
    else:
        args = (some(*wide), some(*wide[:3]), -some(3).abs(), some(*wide), some(*wide))
        kwargs = {"chunk_size": 32, "D": some(3), "dt_bias": some(3), "dt_softplus": True}
    call, tensors = Call.of(SCANS[name], inspect.unwrap(FUNCTIONS[name]), args, kwargs)
    return call, tensors


@pytest.mark.parametrize("name", FUNCTIONS)
def test_segments_are_one_scan(name: str):
    call, tensors = call_of(name)
    cut = replace(call, scan=replace(call.scan, segment=64))
    rows = slice(0, 1)
    dout = torch.randn(tensors[call.scan.out].shape, generator=torch.Generator().manual_seed(2))
    (whole, _), (parts, _) = (scans.forward(c, tensors, [(rows, 0, TOKENS)]) for c in (call, cut))
    assert apart(parts, whole) < 1e-6
    (expected, _), (found, _) = (scans.backward(c, tensors, [(rows, 0, TOKENS)], dout) for c in (call, cut))
    assert {n for n in expected if bool(expected[n].any())} == set(tensors)
    assert {n: e for n in tensors if (e := apart(found[n], expected[n])) > 5e-6} == {}
    split, _ = scans.forward(cut, tensors, [(rows, 0, 100), (rows, 100, TOKENS)])
    alone = {n: t if n in call.scan.weights else t[:, 100:] for n, t in tensors.items()}
    assert torch.equal(split[:, 100:], scans.forward(cut, alone, [(rows, 0, 200)])[0]), (
        "a document begins with no state"
    )


def test_a_convolution_stops_where_a_document_begins():
    layout = Layout(20, 1, 1)
    x, weight = torch.randn(2, 5, 20), torch.randn(5, 4)
    documents = [[(0, 7), (7, 8), (8, 20)], [(0, 20)]]
    spread = Spread(Group(1, 0, None), layout, documents, None, MixerKernels())
    made = convolve(spread, causal_conv1d_fn, x, weight, None, "silu")
    plain = inspect.unwrap(causal_conv1d_fn)
    for row, bounds in enumerate(documents):
        for a, b in bounds:
            assert torch.allclose(
                made[row, :, a:b], plain(x[row : row + 1, :, a:b], weight, None, "silu")[0], atol=1e-6
            )


@pytest.mark.parametrize(("length", "ulysses", "ring"), [(3, 4, 1), (97, 4, 1), (5, 1, 2), (64, 2, 3), (9, 3, 2)])
def test_who_gets_which_token(length: int, ulysses: int, ring: int):
    """Every rank's tokens, with those before them, from whoever holds them."""
    layout, ranks = Layout(length, ulysses, ring), ulysses * ring
    spreads = [
        Spread(Group(ranks, rank, None), layout, [[(0, layout.padded)]], None, MixerKernels()) for rank in range(ranks)
    ]
    held = [layout.tokens(*divmod(rank, ulysses)) for rank in range(ranks)]
    assert sorted(torch.cat(held).tolist()) == list(range(layout.padded))
    halos = [Halo.of(spread, 3, torch.device("cpu")) for spread in spreads]
    sent = [tokens[halo.send].split(halo.counts[0]) for tokens, halo in zip(held, halos, strict=True)]
    for rank, halo in enumerate(halos):
        come = torch.cat([parts[rank] for parts in sent])
        assert [len(parts[rank]) for parts in sent] == halo.counts[1]
        ((_, columns, kept),) = halo.lines
        line = torch.cat((torch.tensor([-1]), come[halo.order], held[rank]))[columns]
        assert torch.equal(line[kept], held[rank])
        for at in kept.tolist():
            before = [t if t >= 0 else -1 for t in range(int(line[at]) - 3, int(line[at]))]
            assert line[at - 3 : at].tolist() == before
    gathered = torch.cat(held)[None]
    assert spreads[0].in_order(gathered)[0].tolist() == list(range(layout.padded))
    assert torch.equal(spreads[0].as_gathered(spreads[0].in_order(gathered)), gathered)


def test_a_kernel_that_is_wrong_is_found():
    call, tensors = call_of(DELTA)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        kwargs["g"] = kwargs["g"] * 2
        return torch_chunk_gated_delta_rule(*args, **kwargs)

    def dropped(*args: Any, **kwargs: Any) -> Any:
        return torch_chunk_gated_delta_rule(*args, **kwargs | {"initial_state": None})

    def off(function: Any) -> str | None:
        function.__wrapped__ = call.function  # as transformers' own wrappers have it
        return scans._wrong_scan(replace(call, function=function), tensors)

    assert "computes wrong outputs" in (off(wrong) or "")
    assert "computes wrong outputs" in (off(dropped) or ""), "it goes on from nothing"
    assert off(lambda *args, **kwargs: call.function(*args, **kwargs)) is None
    fewer = tensors | {
        name: tensors[name][:, :, :1] for name in call.scan.shared
    }  # as a model hands over what heads share
    assert scans._wrong_scan(call, fewer) is None

    def swapped(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return causal_conv1d_fn(x, weight.flip(-1), *args, **kwargs)

    plain = inspect.unwrap(causal_conv1d_fn)
    given = (torch.randn(1, 6, 9), torch.randn(6, 4), None, "silu")
    assert "wrong outputs" in (scans._wrong_convolution(swapped, plain, *given) or "")
    assert scans._wrong_convolution(causal_conv1d_fn, plain, *given) is None


@pytest.fixture
def hybrid(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A small Qwen3.5; that it is exact is proven elsewhere."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("ithaca.engine.parallelize.require_proof", lambda decoder: Proof(True, 0.0, ""))
    model = AutoModelForCausalLM.from_config(smallest("qwen3_5_text"), attn_implementation="eager")
    randomize(model, 1)
    return model


def test_documents_do_not_touch_each_other(hybrid: Any):
    run = prepare(hybrid, Stack(shard_parameters=False), device="cpu")
    other = IDS.clone()
    other[0, :17] = (other[0, :17] + 1) % TEXT
    with torch.no_grad():
        a, b = (run.logits(run.shard(ids, documents=[[17, 23]])) for ids in (IDS, other))
    assert torch.equal(a[:, 17:], b[:, 17:]) and not torch.equal(a[:, :17], b[:, :17])


def test_outside_of_a_run_it_is_itself(hybrid: Any):
    own = copy.deepcopy(hybrid)
    run = prepare(hybrid, Stack(shard_parameters=False), device="cpu")
    run.loss(run.shard(IDS)).backward()
    with torch.no_grad():
        assert torch.equal(hybrid(IDS).logits, own(IDS).logits)
        said, expected = (m.generate(IDS[:, :9], max_new_tokens=4, do_sample=False) for m in (hybrid, own))
    assert torch.equal(said, expected), "with its own cache of states"


def test_trees_are_refused_by_name(hybrid: Any):
    run = prepare(hybrid, Stack(shard_parameters=False), device="cpu")
    batch = run.shard(IDS, documents=[[(20, None), (10, 0), (10, 0)]])
    with pytest.raises(
        ValueError, match=r"the documents are trees, and Qwen3_5GatedDeltaNet carries a state .*a document of its own"
    ):
        run.loss(batch)


def test_a_forward_of_its_owner_has_no_doors(hybrid: Any):
    mixer = hybrid.model.layers[0].linear_attn
    assert set(doors_of(mixer)) == {"causal_conv1d_fn", DELTA}
    own = mixer.forward
    mixer.forward = lambda *args, **kwargs: own(*args, **kwargs)
    assert doors_of(mixer) == {}


def test_a_proof_does_not_take_kernels_for_a_gpu(monkeypatch: pytest.MonkeyPatch):
    """A package that is installed would be called on a CPU, where it cannot run."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as file

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("needs a GPU")

    door: Any = file.torch_chunk_gated_delta_rule
    cell = door.__closure__[door.__code__.co_freevars.index("implementation")]
    monkeypatch.setattr(cell, "cell_contents", kernel)  # where transformers keeps what it found installed
    model = proofs._build(file.Qwen3_5ForCausalLM, smallest("qwen3_5_text"), 0)
    with pytest.raises(RuntimeError, match="needs a GPU"):
        model(IDS)
    theirs = proofs.untouched(model, IDS[:, :24], None)
    ours = proofs._engine(model, IDS[:, :24], None, True, 2)
    assert max(error for _, error in proofs._errors(ours, theirs)) < 1e-5


def test_the_first_kernel_that_is_installed_and_right_is_taken(caplog: pytest.LogCaptureFixture):
    def absent(*args: Any) -> None: ...

    def present(*args: Any) -> None: ...

    on_gpu = torch.empty(1, device="meta")
    names = {"a_package_of_nobody": absent, "torch": present}
    assert MixerKernels()._chosen("key", names, on_gpu, lambda kernel: None) is present
    with caplog.at_level("WARNING", logger="ithaca"):
        assert MixerKernels()._chosen("key", names, on_gpu, lambda kernel: "it computes wrong outputs") is absent
    assert "(a_package_of_nobody: it is not installed; torch: it computes wrong outputs)" in caplog.text


@pytest.mark.parametrize(("tile", "lengths"), [(60, [64, 64, 22]), (None, [150])])
def test_a_mixer_sees_a_tile_at_a_time(hybrid: Any, tile: int | None, lengths: list[int]):
    """Its tile is of whole chunks of a scan."""
    seen: list[int] = []
    hybrid.model.layers[0].linear_attn.in_proj_qkv.register_forward_hook(
        lambda _, given, __: seen.append(given[0].shape[1])
    )
    run = prepare(hybrid, Stack(shard_parameters=False, tile=tile), device="cpu")
    ids = torch.randint(0, TEXT, (1, 150), generator=torch.Generator().manual_seed(0))
    run.loss(run.shard(ids)).backward()
    assert seen == lengths + lengths[::-1], "forward, and once more in backward"
