"""Which models are read, and which are refused with a reason: what cannot be proven exact must not run."""

from __future__ import annotations

import math
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

import ithaca
from ithaca.engine.model.adapter import read_model
from ithaca.engine.model.families import FAMILIES
from ithaca.engine.model.presets import TINY, preset_config
from ithaca.engine.model.weights import cast_parameters
from ithaca.verify.presets import build


def tiny(preset: str = "llama3", **changes: Any) -> Any:
    return build(preset_config(preset, **changes), seed=0)


def refusal(model: nn.Module) -> str:
    with pytest.raises(ValueError) as caught:
        read_model(model)
    return str(caught.value)


@pytest.mark.parametrize("preset", TINY)
def test_every_preset_is_read_as_its_family(preset: str):
    model = tiny(preset)
    before = {name: id(p) for name, p in model.named_parameters()}
    decoder = read_model(model)
    assert decoder.model is model and decoder.family is FAMILIES[model.config.model_type]
    assert [layer.index for layer in decoder.layers] == list(range(model.config.num_hidden_layers))
    assert decoder.tied == model.config.tie_word_embeddings
    assert {name: id(p) for name, p in model.named_parameters()} == before, "reading a model must not change it"


def test_windows_scales_and_routers_are_the_models_own():
    gemma = read_model(tiny("gemma3"))
    assert [layer.window for layer in gemma.layers] == [80, None]
    assert [layer.rope_type for layer in gemma.layers] == ["sliding_attention", "full_attention"]
    assert gemma.layers[0].scale == 16**-0.5 and gemma.logit_cap == 20.0
    moe = read_model(tiny("qwen3_moe"))
    assert [layer.router is None for layer in moe.layers] == [False, True, False] and moe.router_weight == 0.05
    assert read_model(tiny("qwen3_moe", output_router_logits=False)).router_weight == 0.0
    assert [layer.window for layer in read_model(tiny("mistral")).layers] == [96, 96]


def test_multipliers_and_layers_that_turn_nothing_are_the_models_own():
    granite = read_model(tiny("granite"))
    assert (granite.embedding_multiplier, granite.logit_divisor) == (12.0, 3.0)
    assert [(layer.residual, layer.scale) for layer in granite.layers] == [(0.22, 0.25)] * 2
    smol = read_model(tiny("smollm3"))
    assert [(layer.rotates, layer.window) for layer in smol.layers] == [(True, None), (False, None), (False, 88)]
    plain = read_model(tiny("llama3"))
    assert (plain.embedding_multiplier, plain.logit_divisor, plain.layers[0].residual) == (1.0, 1.0, 1.0)
    assert plain.layers[0].rotates and plain.layers[0].query_scale is None


def test_queries_are_scaled_by_whole_numbers_at_any_length():
    """transformers divides in float32, which has no odd numbers beyond 2**24."""
    scale = read_model(tiny("ministral3")).layers[0].query_scale
    assert scale is not None and (scale.beta, scale.trained) == (0.3, 64)
    for position in (0, 63, 64, 2**25 - 1, 2**25, 10**8 + 63):
        wanted = 1 + 0.3 * math.log(1 + position // 64)
        assert float(scale(torch.tensor(position))) == pytest.approx(wanted, rel=1e-6)
    model = tiny("ministral3")
    model.config.rope_parameters = model.config.rope_parameters | {"llama_4_scaling_beta": None}
    assert "rope_parameters needs llama_4_scaling_beta" in refusal(model)


@pytest.mark.parametrize(
    ("preset", "changes", "words"),
    [
        ("olmoe", {"clip_qkv": 8.0}, "config.clip_qkv=8.0 cuts off queries, keys and values"),
        (
            "smollm3",
            {"use_sliding_window": False},
            "makes layer 2 sliding_attention, but the window of its attention is None",
        ),
        ("seed_oss", {"residual_dropout": 0.1}, "config.residual_dropout=0.1 makes results random; set it to 0.0"),
        ("starcoder2", {"embedding_dropout": 0.1}, "config.embedding_dropout=0.1 makes results random; set it to 0.0"),
        ("gemma", {"use_bidirectional_attention": True}, "only causal attention is supported"),
    ],
)
def test_what_a_row_does_not_know_is_refused(preset: str, changes: dict[str, Any], words: str):
    assert words in refusal(tiny(preset, **changes))


@pytest.mark.parametrize(
    ("preset", "part", "name"),
    [
        ("granite", "model", "embedding_multiplier"),
        ("granite", "model.layers.1", "residual_multiplier"),
        ("smollm3", "model.layers.0.self_attn", "use_rope"),
    ],
)
def test_numbers_that_were_changed_behind_the_config_are_refused(preset: str, part: str, name: str):
    model = tiny(preset)
    setattr(model.get_submodule(part), name, 0)
    assert f"{part}.{name} is 0, but model.config makes it" in refusal(model)


def test_an_unknown_family_is_named_with_those_that_are_known():
    from transformers import GPT2Config, GPT2LMHeadModel

    size = dict(vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    text = refusal(GPT2LMHeadModel(GPT2Config(**size)))
    assert text.startswith("GPT2LMHeadModel (model_type 'gpt2') is not a model ithaca has been proven exact for")
    assert all(family.model_class in text for family in FAMILIES.values())


def test_gemma2_with_its_soft_cap_is_refused():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    size = dict(vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8)
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    assert "Gemma2ForCausalLM (model_type 'gemma2')" in refusal(Gemma2ForCausalLM(Gemma2Config(**size, **heads)))


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.ReLU()], ids=["linear", "no parameters"])
def test_something_that_is_no_decoder_is_refused(model: nn.Module):
    with pytest.raises(ValueError, match=r"\(model_type None\) is not a model"):
        ithaca.prepare(model)


def test_a_head_of_another_kind_is_refused():
    from transformers import LlamaForSequenceClassification

    model = LlamaForSequenceClassification(preset_config("llama3", pad_token_id=0))
    assert "LlamaForSequenceClassification (model_type 'llama')" in refusal(model)


@pytest.mark.parametrize(
    ("preset", "setting", "value", "remedy"),
    [
        ("llama3", "attention_dropout", 0.1, "set it to 0.0"),
        ("llama3", "output_hidden_states", True, "set it to False"),
        ("llama3", "pretraining_tp", 2, "set it to 1"),
        ("mixtral", "router_jitter_noise", 0.01, "set it to 0.0"),
        ("gemma3", "attn_logit_softcapping", 50.0, "set it to None"),
        ("gemma3", "use_bidirectional_attention", True, "only causal attention"),
        ("llama3", "is_causal", False, "only causal attention"),
    ],
)
def test_a_setting_without_an_exact_path_is_refused(preset: str, setting: str, value: Any, remedy: str):
    model = tiny(preset)
    setattr(model.config, setting, value)
    text = refusal(model)
    assert f"config.{setting}" in text and remedy in text
    assert setting == "use_bidirectional_attention" or str(value) in text


def test_output_attentions_is_refused():
    model = tiny()
    model.set_attn_implementation("eager")  # the only one that transformers lets return them
    model.config.output_attentions = True
    text = refusal(model)
    assert "config.output_attentions=True" in text and "set it to False" in text


def test_several_reasons_are_one_error():
    model = tiny(attention_dropout=0.1)
    model.config.output_hidden_states = True
    model.model.layers[0].extra = nn.Linear(2, 2)
    text = refusal(model)
    assert text.startswith("LlamaForCausalLM cannot be prepared: 3 problems")


def test_gradient_checkpointing_of_the_model_itself_is_refused():
    model = tiny()
    model.gradient_checkpointing_enable()
    text = refusal(model)
    assert "model.gradient_checkpointing_disable()" in text and "Stack(recompute=...)" in text
    model.gradient_checkpointing_disable()
    read_model(model)


# Structure: what a layer has and the table does not know may be a quirk that changes the result.


def test_an_extra_part_of_a_layer_is_refused():
    model = tiny()
    model.model.layers[1].gate = nn.Linear(2, 2)
    assert "LlamaDecoderLayer of layer 1 differs from the known structure in gate" in refusal(model)


def test_an_extra_part_of_attention_is_refused():
    model = tiny()
    model.model.layers[0].self_attn.q_norm = nn.Identity()
    assert "LlamaAttention of layer 0 differs from the known structure in q_norm" in refusal(model)


def test_a_missing_part_is_refused():
    model = tiny("qwen3")
    del model.model.layers[1].self_attn.k_norm
    assert "Qwen3Attention of layer 1 differs from the known structure in k_norm" in refusal(model)


def test_a_parameter_of_the_layer_itself_is_refused():
    model = tiny()
    model.model.layers[0].self_attn.sinks = nn.Parameter(torch.zeros(8))
    assert "LlamaAttention of layer 0 has parameters of its own: sinks" in refusal(model)


def test_a_layer_with_another_forward_is_refused():
    """The same parts, put together otherwise: our own order of them would be silently wrong."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    class Doubled(LlamaDecoderLayer):
        def forward(self, *args, **kwargs):
            return 2 * super().forward(*args, **kwargs)

    model = tiny()
    model.model.layers[1] = Doubled(model.config, 1)
    assert "model.layers.1 is a tests.engine.model.test_adapter.Doubled with a forward of its own" in refusal(model)


@pytest.mark.parametrize("where", ["model", "layer", "attention"])
def test_a_patched_forward_is_refused(where: str):
    model = tiny()
    layer = model.model.layers[0]
    module = {"model": model, "layer": layer, "attention": layer.self_attn}[where]
    plain = type(module).forward
    module.forward = MethodType(lambda self, *args, **kwargs: plain(self, *args, **kwargs), module)
    assert "forward" in refusal(model)


def test_a_class_of_the_same_name_is_not_the_same_class():
    from transformers import LlamaForCausalLM

    impostor = type("LlamaForCausalLM", (LlamaForCausalLM,), {"__module__": "remote.modeling"})
    assert "LlamaForCausalLM" in refusal(impostor(preset_config("llama3")))


def test_a_quantised_model_is_refused():
    model = tiny()
    model.config.quantization_config = {"quant_method": "fp8"}
    text = refusal(model)
    assert "quantised" in text and "load it in bf16" in text


def test_a_model_that_is_sharded_already_is_refused():
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = tiny()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model)
        text = refusal(model)
    finally:
        dist.destroy_process_group()
    assert "is sharded already; pass the model before fully_shard" in text


def test_a_projection_of_another_class_is_refused():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = tiny()
    model.model.layers[0].self_attn.q_proj = Scaled(64, 64, bias=False)
    text = refusal(model)
    assert "model.layers.0.self_attn.q_proj is a" in text and "only torch.nn.Linear and PEFT LoRA" in text


def test_rotary_frequencies_the_config_does_not_explain_are_refused():
    model = tiny()
    model.model.rotary_emb.inv_freq *= 1.01
    assert "frequencies differ from its config's" in refusal(model)


def test_a_prepared_model_is_not_prepared_again():
    model = tiny()
    ithaca.prepare(model, ithaca.Stack(shard_parameters=False), device="cpu")
    with pytest.raises(ValueError, match="was prepared before; use the run that prepare returned"):
        ithaca.prepare(model, ithaca.Stack(shard_parameters=False), device="cpu")


# Adapters.


def adapted(preset: str = "llama3", **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    settings = dict(r=2, target_modules=["q_proj", "o_proj"], **options)
    return get_peft_model(tiny(preset), LoraConfig(**settings))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(lora_dropout=0.05), ["lora_dropout=0.05", "set lora_dropout=0.0"]),
        (dict(use_dora=True), ["DoRA", "use plain LoRA"]),
    ],
    ids=["dropout", "DoRA"],
)
def test_adapters_without_an_exact_path_are_refused(options: dict[str, Any], words: list[str]):
    text = refusal(adapted(**options))
    assert "model.layers.0.self_attn.q_proj" in text and all(word in text for word in words)
    lines = text.splitlines()[1:]
    assert len(lines) == len(set(lines)) == 2, "each kind of adapter is named once, not for every layer"


def test_merged_adapters_are_refused():
    model = adapted()
    model.merge_adapter()
    assert "model.unmerge_adapter()" in refusal(model)
    model.unmerge_adapter()
    assert read_model(model).model is model.get_base_model()


def test_another_peft_method_is_refused():
    from peft import VeraConfig, get_peft_model

    model = get_peft_model(tiny(), VeraConfig(r=2, target_modules=["q_proj"]))
    assert "use LoRA" in refusal(model)


@pytest.mark.parametrize("part", ["lm_head", "k_proj", "embed_tokens"])
def test_a_wrapped_copy_of_a_part_that_is_cut_by_rows_is_refused(part: str):
    text = refusal(adapted(modules_to_save=[part]))
    assert part in text and "ModulesToSaveWrapper" in text


# What prepare itself refuses.


@pytest.mark.parametrize("name", ["cudnn", "flash"])
def test_a_kernel_of_another_device_is_refused(name: str):
    with pytest.raises(ValueError) as caught:
        ithaca.prepare(tiny(), ithaca.Stack(attention=name, shard_parameters=False), device="cpu")
    text = str(caught.value)
    assert f"{name}: needs a CUDA device, not cpu" in text and "use attention='auto'" in text


def test_a_compute_dtype_that_nothing_casts_to_is_refused():
    stack = ithaca.Stack(shard_parameters=False)
    with pytest.raises(ValueError, match=r"dtype=torch.bfloat16 .* use shard_parameters=True, or call model.to"):
        ithaca.prepare(tiny(), stack, device="cpu", dtype=torch.bfloat16)
    run = ithaca.prepare(cast_parameters(tiny(), torch.bfloat16), stack, device="cpu")
    assert run.dtype == torch.bfloat16


def test_adapters_in_float32_on_a_half_precision_base_need_fsdp():
    """PEFT makes them so; without FSDP2's casts torch would stop in the middle of a layer."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(cast_parameters(tiny(), torch.bfloat16), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"has parameters of torch.float32, which shard_parameters=False"):
        ithaca.prepare(model, ithaca.Stack(shard_parameters=False), device="cpu")
