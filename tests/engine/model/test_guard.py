"""The guard looks at what would run: whatever a model's owner changed is exact here, or refused. First what was changed before
`prepare`, then what changes afterwards. Each case first shows that it matters: the model's own loss moves."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import ithaca
from ithaca.engine.model.adapter import read_model
from ithaca.engine.model.presets import TINY, preset_config
from ithaca.verify.case import full_gradients
from ithaca.verify.presets import add_lora, build

Change = Callable[[Any], object]
LONG = os.environ.get("ITHACA_FAMILIES") == "long"  # make families
IDS = torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def tiny(preset: str = "llama3", **changes: Any) -> Any:
    return build(preset_config(preset, **changes), seed=0)


def own_loss(model: Any) -> Tensor:
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def refusal(model: nn.Module) -> str:
    with pytest.raises(ValueError) as caught:
        read_model(model)
    return str(caught.value)


def layer(model: Any, index: int = 0) -> Any:
    return model.model.layers[index]


def attention(model: Any) -> Any:
    return layer(model).self_attn


def double(module: nn.Module) -> None:
    """A patched forward."""
    plain = module.forward
    module.forward = lambda *args, **kwargs: _twice(plain(*args, **kwargs))  # pyright: ignore[reportAttributeAccessIssue]


def _twice(result: Any) -> Any:
    if isinstance(result, tuple):
        return tuple(None if t is None else 2 * t for t in result)
    if hasattr(result, "last_hidden_state"):
        result.last_hidden_state = 2 * result.last_hidden_state
        return result
    return 2 * result


def hooked(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: _twice(output))


class Scrambled(nn.Module):
    """A part that looks at other tokens."""

    def __init__(self, part: nn.Module, how: str) -> None:
        super().__init__()
        self.part, self.how = part, how

    def forward(self, x: Tensor) -> Tensor:
        y = self.part(x)
        if self.how == "mean":
            return y - y.mean(1, keepdim=True)
        if self.how == "detached":
            return y - 0.1 * y.detach().mean(1, keepdim=True)
        if self.how == "place":
            return y * torch.linspace(1, 2, y.shape[1])[None, :, None]
        if self.how == "rows":
            return y + y.mean(0, keepdim=True)
        return y / y.shape[1] ** 0.5


def scrambled(model: Any, part: str, how: str) -> None:
    setattr(layer(model), part, Scrambled(getattr(layer(model), part), how))


def no_causal(model: Any) -> None:
    attention(model).is_causal = False
    model.set_attn_implementation("sdpa")


def with_kv_of_one(model: Any) -> None:
    attention(model).v_proj.weight = attention(model).k_proj.weight


def with_one_memory(model: Any) -> None:
    attention(model).v_proj.weight.data = attention(model).k_proj.weight.data


def other_loss(model: Any) -> None:
    model.loss_function = lambda logits, labels, **_: logits.float().square().mean()


def with_weight_norm(linear: nn.Linear) -> None:
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(linear).weight_g.data.mul_(2)


def one_layer_less(model: Any) -> None:
    model.config.num_hidden_layers = 1


# what is done to the model, and a word of the refusal
REPLACED: dict[str, tuple[Change, str]] = {
    "forward of the base model": (lambda m: double(m.model), "model (LlamaModel) has a forward"),
    "forward of the rotary module": (lambda m: double(m.model.rotary_emb), "model.rotary_emb"),
    "forward of q_proj": (lambda m: double(attention(m).q_proj), "self_attn.q_proj (Linear) has a forward"),
    "hook on q_proj": (lambda m: hooked(attention(m).q_proj), "self_attn.q_proj (Linear) has a hook"),
    "hook before v_proj": (
        lambda m: attention(m).v_proj.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
        "self_attn.v_proj (Linear) has a hook",
    ),
    "hook on attention": (lambda m: hooked(attention(m)), "self_attn (LlamaAttention) has a hook"),
    "hook on a layer": (lambda m: hooked(layer(m)), "model.layers.0 (LlamaDecoderLayer) has a hook"),
    "hook on the head": (lambda m: hooked(m.lm_head), "lm_head (Linear) has a hook"),
    "hook on the base model": (lambda m: hooked(m.model), "model (LlamaModel) has a hook"),
    "weight norm of q_proj": (lambda m: with_weight_norm(attention(m).q_proj), "q_proj (Linear) has a hook"),
    "parametrized weight norm of q_proj": (
        lambda m: parametrizations.weight_norm(attention(m).q_proj).parametrizations.weight.original0.data.mul_(2),
        "q_proj",
    ),
    "pruned k_proj": (
        lambda m: prune.l1_unstructured(attention(m).k_proj, "weight", 0.5),
        "k_proj (Linear) has a hook",
    ),
    "attention that is not causal": (no_causal, "self_attn.is_causal is False"),
    "another loss": (other_loss, "model.loss_function is"),
    "layers left out by the config": (one_layer_less, "the model has 2 layers, config.num_hidden_layers is 1"),
    "MLP that mixes tokens": (lambda m: scrambled(m, "mlp", "mean"), "mlp (Scrambled)"),
    "MLP that mixes tokens out of autograd's sight": (lambda m: scrambled(m, "mlp", "detached"), "mlp (Scrambled)"),
    "MLP that counts tokens": (lambda m: scrambled(m, "mlp", "count"), "depends on how many tokens"),
    "MLP that knows places": (lambda m: scrambled(m, "mlp", "place"), "depends on the place"),
    "MLP that mixes rows": (lambda m: scrambled(m, "mlp", "rows"), "depends on how many rows"),
    "norm that mixes tokens": (lambda m: scrambled(m, "input_layernorm", "mean"), "input_layernorm (Scrambled)"),
    "hook on a norm that mixes tokens": (
        lambda m: layer(m).input_layernorm.register_forward_hook(lambda module, args, y: y + y.flip(1)),
        "input_layernorm (LlamaRMSNorm)",
    ),
    "hook on the embedding that mixes tokens": (
        lambda m: m.model.embed_tokens.register_forward_hook(lambda module, args, y: y.cumsum(1)),
        "model.embed_tokens (Embedding)",
    ),
    "hook inside the MLP that mixes tokens": (
        lambda m: layer(m).mlp.up_proj.register_forward_hook(lambda module, args, y: y.roll(1, 1)),
        "model.layers.0.mlp (LlamaMLP)",
    ),
}


@pytest.mark.parametrize("case", REPLACED)
def test_what_would_be_left_out_is_refused(case: str):
    change, words = REPLACED[case]
    model = tiny()
    before = own_loss(model).item()
    change(model)
    assert own_loss(model).item() != pytest.approx(before, rel=1e-6), "a change that changes nothing proves nothing"
    assert words in refusal(model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: attention(m).k_proj.weight.register_hook(lambda g: 2 * g), "k_proj.weight has a hook of its own"),
        (with_kv_of_one, "v_proj.weight is the same parameter as model.layers.0.self_attn.k_proj.weight"),
        (with_one_memory, "lies in the memory of"),
        (
            lambda m: setattr(layer(m, 1), "mlp", layer(m).mlp),
            "model.layers.1.mlp is the same module as model.layers.0.mlp",
        ),
        (lambda m: m.model.layers.__setitem__(1, layer(m)), "model.layers.1 is the same module as model.layers.0"),
        (
            lambda m: setattr(layer(m, 1).self_attn.q_proj, "weight", attention(m).q_proj.weight),
            "model.layers.1.self_attn.q_proj.weight is the same parameter",
        ),
    ],
    ids=["parameter hook", "k and v of one parameter", "k and v in one memory", "MLP twice", "layer twice", "q shared"],
)
def test_what_gradients_would_be_wrong_of_is_refused(change: Change, words: str):
    model = tiny()
    change(model)
    assert words in refusal(model)


@pytest.mark.parametrize(
    ("preset", "setting", "value", "words"),
    [
        ("qwen3", "layer_types", ["sliding_attention"] * 2, "layer_type"),
        ("gemma3", "sliding_window", 7, "sliding_window"),
        ("mixtral", "router_aux_loss_coef", 0.9, "router_aux_loss_coef"),
        ("qwen3_moe", "num_experts_per_tok", 1, "num_experts_per_tok"),
        ("llama3", "num_key_value_heads", 8, "num_key_value_groups"),
        ("llama3", "head_dim", 4, "head_dim"),
    ],
)
def test_a_config_that_was_edited_after_the_model_was_built_is_refused(
    preset: str, setting: str, value: Any, words: str
):
    model = tiny(preset, **({"sliding_window": 16} if preset == "qwen3" else {}))
    setattr(model.config, setting, value)
    text = refusal(model)
    assert words in text and "model.config makes it" in text


@pytest.mark.parametrize("preset", ["llama3", "qwen3"])
def test_a_config_that_says_something_else_about_tied_weights_is_refused(preset: str):
    model = tiny(preset)
    model.config.tie_word_embeddings = not model.config.tie_word_embeddings
    assert "embedding and head are" in refusal(model) and "or what is saved is another model" in refusal(model)


def test_a_cap_on_logits_counts_only_where_the_family_obeys_it():
    """transformers' Llama does not look at it."""
    model, reference = tiny(final_logit_softcapping=1.0), tiny(final_logit_softcapping=1.0)
    compare(model, reference)


@pytest.mark.parametrize(("setting", "value"), [("scale_grad_by_freq", True), ("max_norm", 0.5), ("sparse", True)])
def test_an_embedding_that_looks_at_the_whole_batch_or_changes_its_weights_is_refused(setting: str, value: Any):
    model = tiny()
    setattr(model.model.embed_tokens, setting, value)
    assert f"model.embed_tokens.{setting} is {value!r}" in refusal(model)


def test_parameters_that_are_no_plain_numbers_are_refused():
    class Packed(torch.Tensor):
        pass

    model = tiny()
    up = layer(model).mlp.up_proj
    up.weight = nn.Parameter(up.weight.data.as_subclass(Packed))
    assert "mlp.up_proj.weight is a parameter of tests.engine.model.test_guard.Packed" in refusal(model)
    layer(model).mlp.up_proj.weight = nn.Parameter(torch.zeros(96, 64, dtype=torch.uint8), requires_grad=False)
    assert "mlp.up_proj.weight is a parameter of torch.uint8" in refusal(model)


def resized(model: Any) -> None:
    model.resize_token_embeddings(300, mean_resizing=False)
    for each in (model.model.embed_tokens, model.lm_head):
        nn.init.normal_(each.weight, std=0.3, generator=torch.Generator().manual_seed(3))


def fewer_layers(model: Any) -> None:
    model.model.layers = nn.ModuleList([layer(model, 1)])
    model.config.num_hidden_layers = 1


@pytest.mark.parametrize("change", [resized, fewer_layers])
def test_ways_to_change_a_model_that_transformers_knows_work(change: Change):
    """More tokens, fewer or other layers: what the config then says."""
    model, reference = copy.deepcopy(tiny()), copy.deepcopy(tiny())
    change(model)
    change(reference)
    compare(model, reference)


def test_a_second_config_inside_the_model_is_refused():
    model = tiny()
    attention(model).config = copy.deepcopy(model.config)
    read_model(model)  # an equal one is no matter
    attention(model).config.rms_norm_eps = 1.0
    assert "has a config of its own" in refusal(model)


def test_a_patched_class_is_refused(monkeypatch: pytest.MonkeyPatch):
    """As libraries that replace kernels do; the same names, other code. A decorator that keeps the name hides nothing."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.LlamaAttention.forward

    @functools.wraps(plain)
    def other(self, *args: Any, **kwargs: Any):
        out, weights = plain(self, *args, **kwargs)
        return 2 * out, weights

    model = tiny()
    before = own_loss(model).item()
    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", other)
    assert own_loss(model).item() != pytest.approx(before, rel=1e-6)
    text = refusal(model)
    assert "LlamaAttention.forward was replaced by other (" in text and "test_guard.py" in text
    assert text.count("LlamaAttention.forward") == 1, "not once for each layer"


def test_a_patched_function_of_the_models_file_is_refused(monkeypatch: pytest.MonkeyPatch):
    from transformers.models.llama import modeling_llama

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, *_, **__: (q, k))
    assert "modeling_llama.apply_rotary_pos_emb was replaced by" in refusal(tiny())


@pytest.mark.parametrize("name", ["mine", "sdpa"])
def test_an_attention_function_of_somebodys_own_is_refused(name: str, monkeypatch: pytest.MonkeyPatch):
    """A new name, or one of transformers' names with another function behind it."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    def halved(module, q, k, v, mask, **options):
        return 0.5 * nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2), None

    monkeypatch.setitem(AttentionInterface._global_mapping, name, halved)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, sdpa_mask)
    model = tiny()
    model.set_attn_implementation(name)
    assert f"attention {name!r} is a function of your own" in refusal(model)


def test_an_attention_that_is_an_object_and_one_behind_torch_are_refused(monkeypatch: pytest.MonkeyPatch):
    from transformers import AttentionInterface

    class Attention:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    with monkeypatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, "sdpa", Attention())
        assert "attention 'sdpa' is a function of your own" in refusal(tiny())
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", lambda q, k, v, **_: v)
    assert "scaled_dot_product_attention was replaced by" in refusal(tiny())


def test_a_mask_function_of_somebodys_own_is_refused(monkeypatch: pytest.MonkeyPatch):
    from transformers import AttentionMaskInterface

    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "sdpa", lambda *args, **kwargs: None)
    assert "attention 'sdpa' is a function of your own" in refusal(tiny())


def test_a_hook_on_all_modules_is_refused():
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        assert "a hook on all modules" in refusal(tiny())
    finally:
        handle.remove()


def test_a_compiled_layer_is_refused():
    model = tiny()
    layer(model).compile(backend="eager")
    assert "model.layers.0 (LlamaDecoderLayer) was compiled" in refusal(model)


def test_a_changed_part_without_numbers_is_refused():
    model = tiny().to("meta")
    scrambled(model, "mlp", "none")
    assert "on the meta device it cannot be tried" in refusal(model)


def test_a_part_that_gives_random_results_is_refused():
    model = tiny()
    layer(model).mlp = nn.Sequential(layer(model).mlp, nn.Dropout(0.5))
    assert "gave two results for one input" in refusal(model)


# What works as it is: parts that are called as modules.


class Gain(nn.Module):
    """A part of somebody's own that treats tokens alike."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.gain = part, nn.Parameter(torch.tensor([1.5]))

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x) * self.gain


WORKING: dict[str, Change] = {
    "hook on a norm": lambda m: hooked(layer(m).input_layernorm),
    "hook on the last norm": lambda m: hooked(m.model.norm),
    "hook before the MLP": lambda m: layer(m).mlp.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "hook inside the MLP": lambda m: hooked(layer(m).mlp.up_proj),
    "hook on o_proj": lambda m: hooked(attention(m).o_proj),
    "hook on the embedding": lambda m: hooked(m.model.embed_tokens),
    "backward hook on a norm": lambda m: layer(m).post_attention_layernorm.register_full_backward_hook(
        lambda module, into, out: (3 * into[0],)
    ),
    "MLP of one's own": lambda m: setattr(layer(m), "mlp", Gain(layer(m).mlp)),
    "norm of one's own": lambda m: setattr(layer(m), "input_layernorm", Gain(layer(m).input_layernorm)),
    "forward of an MLP": lambda m: double(layer(m).mlp),
    "weight norm in the MLP": lambda m: parametrizations.weight_norm(layer(m).mlp.down_proj),
}


def compare(model: Any, reference: Any) -> None:
    expected = own_loss(reference)
    expected.backward()
    run = ithaca.prepare(model, ithaca.Stack(tile=7, heads_per_stage=2), device="cpu")
    loss = run.loss(run.shard(IDS))
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    ours = full_gradients(model)
    for name, parameter in reference.named_parameters():
        assert (ours[name] is None) == (parameter.grad is None), name
        if parameter.grad is not None:
            assert float((ours[name] - parameter.grad).norm()) <= 1e-5 * float(parameter.grad.norm()), name


@pytest.mark.parametrize("case", WORKING)
def test_what_is_called_as_a_module_works_and_is_exact(case: str):
    model, reference = tiny(), tiny()
    for each in (model, reference):
        WORKING[case](each)
    compare(model, reference)


ADAPTED = ("tiny_llama3", "tiny_gemma3", "tiny_qwen3_moe", "tiny_phi3", "tiny_gpt_oss", "tiny_starcoder2")


@pytest.mark.parametrize(
    ("preset", "how"), [*((name, "plain") for name in TINY), *((name, "lora") for name in (TINY if LONG else ADAPTED))]
)
def test_no_model_as_transformers_builds_it_is_refused(preset: str, how: str):
    """After a forward of its own, too: transformers keeps hooks of its own then."""
    model = tiny(preset)
    own_loss(model).backward()
    read_model(add_lora(model, seed=1) if how == "lora" else model)


PARTS: dict[str, tuple[str, Callable[[Any], object], str]] = {
    "a dropout": (
        "phi3",
        lambda m: setattr(m.model.layers[1].resid_mlp_dropout, "p", 0.1),
        "resid_mlp_dropout.p is 0.1",
    ),
    "a hook on a dropout": (
        "phi3",
        lambda m: m.model.layers[0].resid_attn_dropout.register_forward_hook(lambda *_: None),
        "model.layers.0.resid_attn_dropout (Dropout) has a hook",
    ),
    "a hook on fused heads": (
        "phi3",
        lambda m: m.model.layers[0].self_attn.qkv_proj.register_forward_hook(lambda *_: None),
        "model.layers.0.self_attn.qkv_proj (Linear) has a hook",
    ),
    "no sinks": ("gpt_oss", lambda m: delattr(m.model.layers[0].self_attn, "sinks"), "parameters of its own: none"),
    "a router": ("gpt_oss", lambda m: setattr(m.model.layers[0].mlp.router, "top_k", 1), "mlp.router.top_k is 1"),
    "sinks elsewhere": (
        "glm4",
        lambda m: setattr(m.model.layers[0].self_attn, "sinks", nn.Parameter(torch.zeros(8))),
        "parameters of its own: sinks",
    ),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_that_few_families_have(case: str):
    preset, change, words = PARTS[case]
    model = tiny(preset)
    change(model)
    with pytest.raises(ValueError) as caught:
        read_model(model)
    assert words in str(caught.value)


def test_a_hook_on_an_mlp_that_returns_more_is_tried():
    model = tiny("gpt_oss")
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    read_model(model)
    model.model.layers[0].mlp.register_forward_hook(lambda m, x, y: (y[0] - y[0].mean(1, keepdim=True), y[1]))
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp .* depends on how many tokens there are"):
        read_model(model)


@pytest.mark.parametrize("route", ["add_adapter", "inject"])
def test_adapters_that_were_put_into_the_model_itself_learn_as_in_the_untouched_one(route: str):
    """Hugging Face's own way to PEFT, without a wrapper around the model."""
    from peft import LoraConfig, inject_adapter_in_model

    def adapted() -> Any:
        model, settings = tiny(), LoraConfig(r=3, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"])
        if route == "add_adapter":
            model.add_adapter(settings)
        else:
            inject_adapter_in_model(settings, model)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
        return model

    compare(adapted(), adapted())


# What changes after the model was prepared.


def changed_later(change: Callable[[Any, ithaca.Run], object], *, model: Any = None, **stack: Any) -> str:
    """The refusal at the loss after a change, which must come from the change: the loss before it works."""
    model = copy.deepcopy(tiny()) if model is None else model  # a config of its own, not the preset's
    run = ithaca.prepare(model, ithaca.Stack(**stack), device="cpu")
    run.loss(run.shard(IDS)).backward()
    change(model, run)
    with pytest.raises(ValueError) as caught:
        run.loss(run.shard(IDS))
    return str(caught.value)


LATER: dict[str, tuple[Change, str]] = {
    "hook on q_proj": (lambda m: hooked(attention(m).q_proj), "q_proj (Linear) has a hook since it was prepared"),
    "hook on a layer": (lambda m: hooked(layer(m)), "has a hook since it was prepared"),
    "hook on the head": (lambda m: hooked(m.lm_head), "has a hook since it was prepared"),
    "hook on a norm that mixes tokens": (
        lambda m: m.model.norm.register_forward_hook(lambda module, args, y: y.cumsum(1)),
        "depends on",
    ),
    "hook in the MLP that cannot be tried": (lambda m: hooked(layer(m).mlp.act_fn), "register it before prepare"),
    "forward of a norm": (lambda m: double(m.model.norm), "has another forward"),
    "forward of q_proj": (lambda m: double(attention(m).q_proj), "has another forward"),
    "another MLP": (lambda m: setattr(layer(m), "mlp", nn.Identity()), "has another set of parts"),
    "config.num_hidden_layers": (one_layer_less, "config.num_hidden_layers was 2 when the model was prepared, now 1"),
    "config.rms_norm_eps": (lambda m: setattr(m.config, "rms_norm_eps", 1.0), "config.rms_norm_eps was"),
    "rotary settings": (lambda m: m.config.rope_parameters.update(factor=3.0), "config.rope_parameters was"),
    "attention.scaling": (lambda m: setattr(attention(m), "scaling", 1.0), "self_attn.scaling was"),
    "attention.is_causal": (lambda m: setattr(attention(m), "is_causal", False), "self_attn.is_causal was True"),
    "loss_function": (other_loss, "model.loss_function is"),
    "gradient checkpointing": (lambda m: m.gradient_checkpointing_enable(), "gradient_checkpointing was False"),
    "another head": (
        lambda m: setattr(m.lm_head, "weight", nn.Parameter(torch.zeros(257, 64))),
        "lm_head.weight is another parameter",
    ),
    "hook on a parameter": (
        lambda m: next(m.parameters()).register_hook(lambda g: g),
        "embed_tokens.weight has a hook (register_hook)",
    ),
}


@pytest.mark.parametrize("case", LATER)
def test_what_changes_after_prepare_is_refused(case: str):
    change, words = LATER[case]
    assert words in changed_later(lambda model, run: change(model))


def test_a_class_that_is_patched_after_prepare_is_refused(monkeypatch: pytest.MonkeyPatch):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    text = changed_later(lambda m, run: monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: 2 * x))
    assert "has another forward of its class" in text


def test_dropout_of_adapters_that_is_switched_on_after_prepare_is_refused():
    model = add_lora(tiny(), seed=1)

    def switch_on(model: Any, run: ithaca.Run) -> None:
        q = model.get_base_model().model.layers[0].self_attn.q_proj
        q.lora_dropout["default"] = nn.Dropout(0.5)

    assert "lora_dropout=0.5, which makes results random" in changed_later(switch_on, model=model)


def test_an_adapter_that_is_added_or_merged_after_prepare_is_refused():
    from peft import LoraConfig

    model = add_lora(tiny(), seed=1)
    text = changed_later(lambda m, run: m.add_adapter("b", LoraConfig(r=2, target_modules=["q_proj"])), model=model)
    assert "has another set of parts" in text
    text = changed_later(lambda m, run: m.merge_adapter(), model=add_lora(tiny(), seed=1), shard_parameters=False)
    assert "has merged adapters" in text


def test_hooks_on_norms_may_come_and_go():
    """They are called in both ways to compute, so a new one is tried and then works."""
    model, reference = tiny(), tiny()
    run = ithaca.prepare(model, ithaca.Stack(tile=7), device="cpu")
    before = run.loss(run.shard(IDS)).item()
    handles = [each(m) for m in (model, reference) for each in (_gain, _gain_of_the_mlp)]
    with_hooks = run.loss(run.shard(IDS)).item()
    assert with_hooks == pytest.approx(own_loss(reference).item(), rel=1e-6) and abs(with_hooks - before) > 1e-3
    for handle in handles:
        handle.remove()
    assert run.loss(run.shard(IDS)).item() == before


def test_a_hook_that_collects_sees_the_models_tokens_alone():
    """Before prepare, and after it: what it is tried on is none of its business."""
    model, early, late = tiny(), [], []
    layer(model).mlp.up_proj.register_forward_hook(lambda module, args, y: early.append(tuple(y.shape)))
    run = ithaca.prepare(model, ithaca.Stack(tile=None), device="cpu")
    model.model.norm.register_forward_pre_hook(lambda module, args: late.append(tuple(args[0].shape)))
    with torch.no_grad():
        run.loss(run.shard(IDS))
    assert early == [(2, 40, 96)] and late == [(2, 40, 64)]


def _gain(model: Any):
    return model.model.norm.register_forward_hook(lambda module, args, y: 1.5 * y)


def _gain_of_the_mlp(model: Any):
    return layer(model).mlp.down_proj.register_forward_pre_hook(lambda module, args: (1.5 * args[0],))


def test_what_does_not_matter_may_change():
    model = tiny()
    run = ithaca.prepare(model, device="cpu")
    before = run.loss(run.shard(IDS)).item()
    model.config.use_cache, model.config.pad_token_id = True, 3
    model.eval()
    layer(model).note = "mine"
    assert run.loss(run.shard(IDS)).item() == before


@pytest.mark.parametrize("what", ["logits", "score"])
def test_logits_and_scores_are_guarded_too(what: str):
    run = ithaca.prepare(tiny(), device="cpu")
    hooked(attention(run.model).q_proj)
    with torch.no_grad(), pytest.raises(ValueError, match="has a hook since it was prepared"):
        getattr(run, what)(run.shard(IDS))


def test_a_fused_norm_is_not_used_where_its_class_was_patched(monkeypatch: pytest.MonkeyPatch):
    """On a GPU known norms are one kernel of torch's; a patched one is not known any more."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    from ithaca.engine.model.norm import _plain

    norm, x = LlamaRMSNorm(8), torch.randn(2, 8)
    assert _plain(norm, x)
    norm.forward = MethodType(lambda self, x: 2 * x, norm)
    assert not _plain(norm, x)
    norm = LlamaRMSNorm(8)
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: 2 * x)
    assert not _plain(norm, x)
