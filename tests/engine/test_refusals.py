"""Bad models: one paragraph that says why and what to do, on all ranks together. Models that somebody changed: exact or refused."""

from __future__ import annotations

import copy
import json
import logging
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedModel,
    modeling_layers,
)

from ithaca.cli.docs import find
from ithaca.config.schema import Model
from ithaca.engine import own as own_module
from ithaca.engine import proof as proof_module
from ithaca.engine.build import model_config
from ithaca.engine.fsdp import require_own_parameters
from ithaca.engine.model.angles import FLOAT32_POSITIONS, Angles, rotary_modules
from ithaca.engine.model.guard import owner_changes
from ithaca.engine.model.shrink import TEXT, smallest
from ithaca.engine.model.weights import randomize
from ithaca.engine.own import OwnDecoder
from ithaca.engine.parallelize import prepare
from ithaca.planner.config import hf_config
from ithaca.stack import Stack
from ithaca.verify.presets import add_lora, config_of

IDS = torch.randint(0, TEXT, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer tokens of each simulated rank: a proof that fails does so with few as well."""
    monkeypatch.setattr(proof_module, "TOKENS", 8)
    monkeypatch.setattr(proof_module, "DOCUMENTS", [[13, 7, 12], [20, 12]])


def built(kind: str) -> Any:
    config = smallest(kind)
    config.num_hidden_layers = 2
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False)
    randomize(model, 0)
    return model


def refusal(model: nn.Module, engine: str = "auto") -> str:
    """One paragraph, in which every page that is named is there."""
    with pytest.raises(ValueError) as caught:
        prepare(model, Stack(engine=engine, shard_parameters=False), device="cpu")
    text = str(caught.value)
    assert "\n" not in text and len(text) < 900, text
    assert all(find(page) for page in re.findall(r"ithaca docs (\w+)", text))
    return text


# -- folders ----------------------------------------------------------------------------------------------------------------

LLAMA = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 32,
}  # fmt: skip
READERS: dict[str, Callable[[str], Any]] = {
    "train": lambda folder: model_config(Model(folder=folder, random_init=True), 64),
    "verify": lambda folder: config_of(folder, full=False),
    "plan": hf_config,
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"model_type": "mine", "auto_map": {"AutoConfig": "x.C"}},
            "Python code of its own (auto_map), which is not run here",
        ),
        (
            {"model_type": "mine"},
            "knows no model_type 'mine'; if the model is newer than that, pip install -U transformers",
        ),
        ({"is_encoder_decoder": True}, "a llama model with an encoder"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "a t5 model with an encoder"),
        ({"model_type": "vit"}, "a vit model is no decoder that transformers can build"),
    ],
)
def test_folders_that_hold_no_decoder(tmp_path: Path, reader: str, settings: dict[str, Any], said: str):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **settings}))
    with pytest.raises(ValueError) as caught:
        READERS[reader](str(tmp_path))
    assert said in str(caught.value) and "\n" not in str(caught.value) and "ithaca docs families" in str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "helium"])
def test_a_quantised_folder_is_not_verified_as_if_it_were_not(tmp_path: Path, kind: str):
    settings = {**LLAMA, "model_type": kind, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"cannot be verified: the model is quantised .*; load it in bf16 or float32"):
        config_of(str(tmp_path), full=False)


def test_a_type_that_its_owner_registered_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers import AutoConfig, HeliumConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    monkeypatch.setattr(CONFIG_MAPPING, "_extra_content", {})
    kind: Any = type("MineConfig", (HeliumConfig,), {"model_type": "mine"})
    AutoConfig.register("mine", kind)
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": "mine"}))
    assert type(model_config(Model(folder=str(tmp_path), random_init=True), 64)).__name__ == "MineConfig"


# -- models -----------------------------------------------------------------------------------------------------------------


class Remote(PreTrainedModel):
    """What a folder with code of its own makes."""

    def __init__(self) -> None:
        super().__init__(smallest("helium"))
        self.embed = nn.Embedding(8, 8)


class Quantised(nn.Module):
    """As bitsandbytes keeps them: whole numbers and a scale."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.scale = float(linear.weight.detach().abs().max()) / 127
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


def encoder() -> Any:
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
    return BartForConditionalGeneration(BartConfig(vocab_size=32, decoder_attention_heads=2, **sizes))


def quantised(kind: str) -> Any:
    model = built(kind)
    model.model.layers[0].mlp.down_proj = Quantised(model.model.layers[0].mlp.down_proj)
    return model


def with_config(kind: str) -> Any:
    model = built(kind)
    model.config.quantization_config = {"quant_method": "gptq"}
    return model


def with_compiled(part: str) -> Any:
    model = built("helium")
    parent, _, name = part.rpartition(".")
    setattr(model.get_submodule(parent), name, torch.compile(model.get_submodule(part), backend="eager"))
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (encoder, "has an encoder, and only decoders can be trained here: pass a model that predicts the next token"),
        (Remote, "Remote is code of its own (tests.engine.test_refusals), not a class of transformers"),
        (
            lambda: quantised("helium"),
            "down_proj.weight is a parameter of torch.int8, and there is no exact path for that; load",
        ),
        (
            lambda: quantised("llama"),
            "down_proj.weight is a parameter of torch.int8, and there is no exact path for that; load",
        ),
        (lambda: with_config("helium"), "the model is quantised (config.quantization_config)"),
        (lambda: with_config("llama"), "the model is quantised (config.quantization_config)"),
        (
            lambda: torch.compile(built("helium"), backend="eager"),
            "HeliumForCausalLM was compiled; prepare the model without torch.compile",
        ),
        (
            lambda: torch.compile(built("llama"), backend="eager"),
            "LlamaForCausalLM was compiled; prepare the model without torch.compile",
        ),
        (
            lambda: torch.compile(add_lora(built("llama"), 0), backend="eager"),
            "was compiled; prepare the model without torch.compile",
        ),
        (
            lambda: with_compiled("model.layers.0"),
            "model.layers.0 (HeliumDecoderLayer) was compiled; prepare the model",
        ),
        (
            lambda: with_compiled("model.layers.1.mlp"),
            "model.layers.1.mlp (HeliumMLP) was compiled; prepare the model",
        ),
    ],
)
def test_models_that_cannot_be_prepared(make: Callable[[], nn.Module], said: str):
    text = refusal(make())
    assert said in text and "engine='module'" not in text, "no way out where there is none"


@pytest.mark.parametrize("name", ["GradientCheckpointingLayer", "AttentionInterface", "AttentionMaskInterface"])
def test_a_transformers_without_the_interface(monkeypatch: pytest.MonkeyPatch, name: str):
    model = built("helium")
    if name == "GradientCheckpointingLayer":
        monkeypatch.delattr(modeling_layers, name)
    else:
        older: Any = types.ModuleType("transformers")
        older.__path__, older.__version__, older.PreTrainedModel = transformers.__path__, "4.40.0", PreTrainedModel
        for other in {"AttentionInterface", "AttentionMaskInterface"} - {name}:
            setattr(older, other, getattr(transformers, other))
        monkeypatch.setitem(sys.modules, "transformers", older)
    text = refusal(model)
    assert "has no interface by which attention of a model's own code can be replaced" in text
    assert name in text and "pip install -U 'transformers>=5.17'" in text


def refused_here(rank: int, changed: int, kind: str) -> str:
    model = built(kind)
    if rank == changed:
        model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(ValueError) as caught:
        prepare(model, Stack(ulysses=2, shard_parameters=False), device="cpu")
    return str(caught.value)


def refuse_on_ranks(changed: int, kind: str) -> str:
    return refused_here(torch.distributed.get_rank(), changed, kind)


@pytest.mark.parametrize("changed", [0, 1])
def test_all_ranks_end_together(workers, changed: int):
    """A hook on one rank alone, as somebody puts it there to look at what passes."""
    for text in workers.run(refuse_on_ranks, changed, "llama", world=2):
        assert text.startswith(f"rank {changed}: LlamaForCausalLM cannot be prepared: ") and "has a hook" in text
    for text in workers.run(refuse_on_ranks, changed, "helium", world=2):
        assert "is another model on rank " in text and "change it on every rank, or on none" in text


# -- changed by their owner -------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """LoRA as people write it themselves."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.randn(2, linear.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(linear.out_features, 2) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + F.linear(F.linear(x, self.a), self.b)


class OverTokens(nn.Module):
    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(1, keepdim=True)) * self.weight


def adapted(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)


def hooked(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda module, inputs, output: output * 1.5)


def normed(model: Any) -> None:
    model.model.layers[0].input_layernorm = nn.LayerNorm(model.config.hidden_size)


def activated(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def scaled(model: Any) -> None:
    model.model.layers[0].self_attn.scaling *= 1.3


def method(model: Any) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return 1.1 * type(self).forward(self, x)

    mlp = model.model.layers[0].mlp
    mlp.forward = types.MethodType(forward, mlp)


@pytest.mark.parametrize(
    ("kind", "changes"), [("llama", [adapted, hooked, scaled]), ("helium", [normed, activated, method])]
)
def test_a_changed_model_is_exact_by_its_own_code(kind: str, changes: list[Callable[[Any], None]]):
    model = built(kind)
    for change in changes:
        before = owner_changes(model)
        change(model)
        assert len(owner_changes(model)) > len(before), "each is seen"
    own = copy.deepcopy(model)
    run = prepare(model, Stack(engine="module", shard_parameters=False), device="cpu")
    assert isinstance(run.decoder, OwnDecoder) and all(p.grad is None for p in model.parameters())
    loss, theirs = run.loss(run.shard(IDS)), own(input_ids=IDS, labels=IDS).loss
    loss.backward()
    theirs.backward()
    for (name, a), b in zip(model.named_parameters(), own.parameters(), strict=True):
        assert float((a.grad - b.grad).norm() / b.grad.norm()) < 1e-5, name


@pytest.mark.parametrize("change", [adapted, hooked, scaled])
def test_the_table_names_the_way_out(change: Callable[[Any], None]):
    model = built("llama")
    change(model)
    with pytest.raises(
        ValueError, match=r"Stack\(engine='module'\) runs the model's own code, with what was changed in it"
    ):
        prepare(model, Stack(shard_parameters=False), device="cpu")


def over_tokens(model: Any) -> None:
    model.model.layers[0].input_layernorm = OverTokens(model.model.layers[0].input_layernorm)


def closure(model: Any) -> None:
    """Of a copy it would run the parameters of the model that it was made for, and leave gradients there."""
    mlp = model.model.layers[0].mlp
    before = mlp.forward
    mlp.forward = lambda x: 1.1 * before(x)


def shared(model: Any) -> None:
    model.model.layers[1].mlp = model.model.layers[0].mlp


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (over_tokens, r"with what its owner changed \(model.layers.0.input_layernorm is a .*OverTokens\) off by"),
        (closure, r"computes with this very object, .*; make it a method \(types.MethodType\) or a class of its own"),
        (shared, r"model.layers.1.mlp is the same as model.layers.0.mlp, where its class makes two; give each its own"),
        (
            lambda model: (normed(model), model.to("meta")),
            "to prove it on would be too large .* or has no numbers yet; undo",
        ),
    ],
)
def test_what_a_change_may_not_do(change: Callable[[Any], Any], said: str):
    model = built("helium")
    change(model)
    before = [p.grad for p in model.parameters()]
    weights = (lambda run: None) if next(model.parameters()).is_meta else None
    with pytest.raises(ValueError, match=said):
        prepare(model, Stack(engine="module", shard_parameters=False), device="cpu", weights=weights)
    assert all(p.grad is b for p, b in zip(model.parameters(), before, strict=True))


def test_an_untouched_model_has_no_changes():
    for model in (built("helium"), add_lora(built("llama"), 0).get_base_model(), built("gpt2").to(torch.bfloat16)):
        assert owner_changes(model) == []


# -- positions --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["deepseek_v2", "cohere_compass_text"])
def test_rotary_modules_of_other_kinds_are_computed_in_float64(kind: str):
    """Complex numbers, and a position for each of time, height and width: far out they turn as far as from 0, by the same steps."""
    config = smallest(kind)
    model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    (module,) = rotary_modules(model)
    angles = Angles(module, model.config)
    assert angles.sound(model.config.hidden_size)
    far, layer = 5_000_000, [next(iter(module.rope_type))] if isinstance(module.rope_type, dict) else []
    positions = torch.tensor([[0, 1, far, far + 1]])
    positions = positions if not layer else positions.expand(3, 1, -1)
    off = {}
    for wide in (True, False):
        given = angles(torch.zeros(1, 4, model.config.hidden_size), positions, far + 2, wide, *layer)
        turns = given if isinstance(given, Tensor) else torch.complex(*given)
        _, one, a, b = turns[0].to(torch.complex128)
        off[wide] = float((b - a * one).abs().max())
    assert off[True] < 1e-6 < 1e-3 < off[False]


def test_angles_that_stay_in_float32_have_a_longest_document(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Up to there they are off by no more than bf16 rounds cos and sin."""
    far = torch.arange(FLOAT32_POSITIONS - 4096, FLOAT32_POSITIONS)
    frequency = 0.99 ** torch.arange(1, 33)[:, None]
    blur = (frequency * far.float()).double() - frequency.double() * far.double()
    assert 0.9 * 2**-9 < float(blur.abs().max()) <= 2**-9
    monkeypatch.setattr(Angles, "sound", lambda self, hidden: False)
    model = built("helium")
    hooked(model)  # so that a proof is made, not found
    with caplog.at_level(logging.WARNING, "ithaca"):
        run = prepare(model, Stack(shard_parameters=False), device="cpu")
    assert "documents over 65,536 tokens will be refused" in caplog.text
    monkeypatch.setattr(own_module, "FLOAT32_POSITIONS", 20)
    run.loss(run.shard(IDS, documents=[[20, 12], [12, 20]])).backward()
    with pytest.raises(
        ValueError, match="a document of 32 tokens is too long for HeliumForCausalLM: its rotary module"
    ):
        run.loss(run.shard(IDS))


def test_layers_that_share_a_parameter_under_fsdp():
    """As Zamba2's class makes them; FSDP2 would make two of it, which learn apart."""
    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(smallest("zamba2")).model.layers
    with pytest.raises(
        ValueError, match=r"layers 1 and 2 of this model share a parameter \(shared_.*shard_parameters=False"
    ):
        require_own_parameters(layers)
    require_own_parameters(layers[:2])
