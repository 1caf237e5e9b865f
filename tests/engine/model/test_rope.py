"""Rotary positions against three judges: transformers' modules where float32 is good enough; transformers' formulas run
in float64, with angles in 40 digits; and the property that makes RoPE relative.
"""

from __future__ import annotations

import mpmath
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, modeling_rope_utils
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

import ithaca.engine.model.rope
from ithaca.engine.model.rope import Rope, check_against, rope_for, rotate

from ...contract.tiny import prepared, tokens

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 512}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 512,
    "short_factor": [1 + 0.01 * i for i in range(32)],
    "long_factor": [1 + 0.5 * i for i in range(32)],
}
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 512},
    "yarn": YARN,
    "yarn, factor from lengths": YARN | {"factor": None},
    "yarn, no truncation": YARN | {"truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn, attention factor": YARN | {"attention_factor": 0.9},
    "yarn, no ramp": YARN | {"beta_fast": 1e-9, "beta_slow": 1e-9},
    "longrope": LONGROPE,
    "longrope, factor": LONGROPE | {"factor": 16.0},
    "longrope, attention factor": LONGROPE | {"attention_factor": 1.2},
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llama(parameters: dict, dim: int = 64, trained: int = 1024) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * dim,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=dim,
        max_position_embeddings=trained,
        rope_parameters=dict(parameters),
    )


class Double:
    """torch, except that float32 is float64."""

    def __getattr__(self, name: str):
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


def frequencies(config: LlamaConfig, length: int) -> torch.Tensor:
    """What transformers means to compute: its own functions in float64, and 40 digits where they insist on float32."""
    parameters = config.rope_parameters
    kind = parameters["rope_type"]
    if kind not in ("default", "longrope"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(modeling_rope_utils, "torch", Double())
            found = modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind](config, seq_len=length)[0]
        assert found.dtype == torch.float64
        return found
    divisors = [1] * (config.head_dim // 2)
    if kind == "longrope":
        long = length > parameters["original_max_position_embeddings"]
        divisors = parameters["long_factor" if long else "short_factor"]
    with mpmath.workdps(40):
        theta, dim = mpmath.mpf(parameters["rope_theta"]), config.head_dim
        powers = [float(theta ** (-mpmath.mpf(2 * i) / dim) / divisor) for i, divisor in enumerate(divisors)]
    return torch.tensor(powers, dtype=torch.float64)


def exact(inv_freq: torch.Tensor, scaling: float, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [..., D] of position * frequency, formed in 40 digits, as float64."""
    with mpmath.workdps(40):
        angles = [[p * mpmath.mpf(f) for f in inv_freq.tolist()] for p in positions.tolist()]
        cos = torch.tensor(
            [[float(scaling * mpmath.cos(angle)) for angle in row] for row in angles], dtype=torch.float64
        )
        sin = torch.tensor(
            [[float(scaling * mpmath.sin(angle)) for angle in row] for row in angles], dtype=torch.float64
        )
    return torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [300, 512, 513, 1024, 1025, 2048])
def test_agrees_with_llama_at_run_time(name, length):
    config = llama(KINDS[name])
    module = LlamaRotaryEmbedding(config)
    positions = torch.arange(length)
    cos, sin = module(torch.zeros(1, dtype=torch.float32), positions[None])  # updates inv_freq for this length
    rope = rope_for(config, None, length)

    torch.testing.assert_close(module.inv_freq.double(), rope.inv_freq, rtol=1e-6, atol=0)
    assert rope.scaling == pytest.approx(module.attention_scaling, rel=1e-12)
    ours = rope.cos_sin(positions, torch.float32, "cpu")
    torch.testing.assert_close(ours, (cos[0], sin[0]), rtol=0, atol=1e-7 * length)  # rounding of their angles


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("length", [512, 2048])
def test_is_exact(name, length):
    for dim in (64,) if name.startswith("longrope") else (64, 80, 128):
        config = llama(KINDS[name], dim)
        rope = rope_for(config, None, length)
        true = frequencies(config, length)
        torch.testing.assert_close(rope.inv_freq, true, rtol=1e-14, atol=0)
        positions = torch.tensor([0, 1, 2, 255, 511, 1023, 1500, 2047])
        ours = rope.cos_sin(positions, torch.float64, "cpu")
        torch.testing.assert_close(ours, exact(true, rope.scaling, positions), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_length_matters_only_where_it_should(name):
    config = llama(KINDS[name])
    trained = 1024 if name == "dynamic" else 512
    short, same, longer = (rope_for(config, None, length).inv_freq for length in (1, trained, trained + 1))
    assert torch.equal(short, same)
    assert not torch.equal(same, longer)
    for name in ("default", "linear", "yarn", "llama3"):
        config = llama(KINDS[name])
        assert torch.equal(rope_for(config, None, 1).inv_freq, rope_for(config, None, 10**7).inv_freq)


@pytest.mark.parametrize("name", ["default", "llama3"])
@pytest.mark.parametrize("start", [5_000_000, 10_000_000])
def test_exact_at_millions_where_float32_is_not(name, start):
    config = llama(KINDS["default"] if name == "default" else LLAMA3, dim=128, trained=131_072)
    rope = rope_for(config, None, start + 40)
    positions = torch.arange(start - 7, start + 7)
    true = exact(frequencies(config, start + 40), 1.0, positions)
    for ours, wanted in zip(rope.cos_sin(positions, torch.bfloat16, "cpu"), true, strict=True):
        ulp = torch.exp2(torch.floor(torch.log2(wanted.abs())) - 7)
        assert ((ours.double() - wanted).abs() <= 0.501 * ulp).all()
    for ours, wanted in zip(rope.cos_sin(positions, torch.float64, "cpu"), true, strict=True):
        assert (ours - wanted).abs().max() < 1e-8

    float32 = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), positions[None])
    for theirs, wanted in zip(float32, true, strict=True):
        assert (theirs[0].double() - wanted).abs().max() > 0.05


@pytest.mark.parametrize("name", KINDS)
def test_scores_depend_on_distance_only(name):
    torch.manual_seed(0)
    q, k = torch.nn.functional.normalize(torch.randn(2, 5, 64), dim=-1)
    rope = rope_for(llama(KINDS[name]), None, 6_000_000)
    distance = torch.tensor([0, 1, 17, 4096, 900_001])
    scores = []
    for start in (0, 5_000_000):
        at = torch.full((5,), start)
        q_turned = rotate(q, *rope.cos_sin(at, torch.float32, "cpu"))
        k_turned = rotate(k, *rope.cos_sin(at + distance, torch.float32, "cpu"))
        scores.append((q_turned * k_turned).sum(-1))
    torch.testing.assert_close(scores[0], scores[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotate_is_transformers_bit_for_bit(dtype):
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 9, 64, dtype=dtype), torch.randn(2, 2, 9, 64, dtype=dtype)
    positions = torch.stack((torch.arange(9), torch.arange(9) + 1000))
    cos, sin = rope_for(llama(YARN), None, 1009).cos_sin(positions, dtype, "cpu")
    assert cos.shape == (2, 9, 64) and cos.dtype == dtype
    q_true, k_true = apply_rotary_pos_emb(q, k, cos, sin)
    assert torch.equal(rotate(q, cos[:, None], sin[:, None]), q_true)
    assert torch.equal(rotate(k, cos[:, None], sin[:, None]), k_true)


@pytest.mark.parametrize("family", ["phi3", "glm4"])
def test_a_part_of_a_head_is_rotated_bit_for_bit(family: str):
    import importlib

    theirs = importlib.import_module(f"transformers.models.{family}.modeling_{family}").apply_rotary_pos_emb
    q, k = torch.randn(2, 4, 9, 64, dtype=torch.bfloat16), torch.randn(2, 2, 9, 64, dtype=torch.bfloat16)
    cos, sin = rope_for(llama(YARN), None, 1009).cos_sin(torch.arange(9)[None], torch.bfloat16, "cpu")
    cos, sin = (torch.cat((t[..., :20], t[..., :20]), -1) for t in (cos, sin))  # 40 of 64
    for mine, true in zip((q, k), theirs(q, k, cos, sin), strict=True):
        turned = rotate(mine, cos[:, None], sin[:, None], interleaved=family == "glm4")
        assert torch.equal(turned, true) and torch.equal(turned[..., 40:], mine[..., 40:])


def gemma3() -> Gemma3TextConfig:
    return Gemma3TextConfig(
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_hidden_layers=6,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )


@pytest.mark.parametrize("layer_type", ["full_attention", "sliding_attention"])
def test_gemma3_has_frequencies_per_layer_type(layer_type):
    config = gemma3()
    module = Gemma3RotaryEmbedding(config)
    rope = rope_for(config, layer_type, 2048)
    check_against(module, rope, layer_type)
    positions = torch.arange(2048)
    cos, sin = module(torch.zeros(1, dtype=torch.float32), positions[None], layer_type)
    ours = rope.cos_sin(positions, torch.float32, "cpu")
    torch.testing.assert_close(ours, (cos[0], sin[0]), rtol=0, atol=2e-4)

    other = ({"full_attention", "sliding_attention"} - {layer_type}).pop()
    with pytest.raises(ValueError, match=f"of layer type '{other}'.*differ"):
        check_against(module, rope, other)


def test_gemma3_needs_a_layer_type():
    with pytest.raises(ValueError, match=r"no entry for layer type None, only for .*full_attention"):
        rope_for(gemma3(), None, 1)
    rope = rope_for(gemma3(), "full_attention", 1)
    with pytest.raises(ValueError, match="no buffer 'inv_freq'"):
        check_against(Gemma3RotaryEmbedding(gemma3()), rope, None)


def test_phi3_longrope():
    config = Phi3Config(
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        original_max_position_embeddings=1024,
        rope_parameters={k: v for k, v in LONGROPE.items() if k != "original_max_position_embeddings"},
        pad_token_id=0,
    )
    for length in (1024, 1025):
        module = Phi3RotaryEmbedding(config)
        module(torch.zeros(1), torch.arange(length)[None])
        rope = rope_for(config, None, length)
        torch.testing.assert_close(module.inv_freq.double(), rope.inv_freq, rtol=1e-6, atol=0)
        assert rope.scaling == pytest.approx(module.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_check_accepts_the_right_and_refuses_the_wrong(name):
    config = llama(KINDS[name])
    kind = KINDS[name]["rope_type"]
    module, rope = LlamaRotaryEmbedding(config), rope_for(config, None, 1)
    check_against(module, rope, None)
    module(torch.zeros(1), torch.arange(2048)[None])  # dynamic and longrope now hold other frequencies
    check_against(module, rope, None)

    frequencies = rope.inv_freq.clone()
    frequencies[7] *= 1 + 3e-5
    with pytest.raises(ValueError, match=f"rope type '{kind}'.*differ"):
        check_against(module, Rope(frequencies, rope.scaling), None)
    with pytest.raises(ValueError, match=f"rope type '{kind}'.*scales cos and sin"):
        check_against(module, Rope(rope.inv_freq, rope.scaling * 1.001), None)
    with pytest.raises(ValueError, match=f"rope type '{kind}': the model has 32 frequencies"):
        check_against(module, Rope(rope.inv_freq[:16], rope.scaling), None)


@pytest.mark.parametrize("back", [False, True], ids=["cast", "cast and cast back"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_that_were_cast_are_refused_with_the_way_to_mend_them(dtype: torch.dtype, back: bool):
    config = llama(LLAMA3, dim=128, trained=131_072)
    module, rope = LlamaRotaryEmbedding(config).to(dtype), rope_for(config, None, 1)
    module = module.float() if back else module
    with pytest.raises(ValueError) as caught:
        check_against(module, rope, None)
    text = str(caught.value)
    assert f"as model.to({dtype}) does" in text and f"from_pretrained(..., dtype={dtype})" in text
    check_against(type(module)(config), rope, None)  # as the message says


def test_frequencies_that_are_exact_in_any_dtype_are_not_taken_for_rounded_ones():
    config = llama({"rope_type": "default", "rope_theta": 16.0}, dim=4, trained=64)
    check_against(LlamaRotaryEmbedding(config), rope_for(config, None, 1), None)


@pytest.mark.parametrize("factor", [32.0, 128.0])
def test_check_allows_float32_its_ramp(factor):
    for parameters in (YARN | {"factor": factor, "truncate": False}, LLAMA3 | {"factor": factor}):
        for dim in (96, 128, 192):
            config = llama(parameters, dim=dim, trained=131_072)
            check_against(LlamaRotaryEmbedding(config), rope_for(config, None, 1), None)


def test_check_without_values_compares_shapes():
    config = llama(KINDS["default"])
    rope = rope_for(config, None, 1)
    check_against(LlamaRotaryEmbedding(config).to("meta"), rope, None)
    with pytest.raises(ValueError, match="32 frequencies"):
        check_against(LlamaRotaryEmbedding(config).to("meta"), Rope(rope.inv_freq[:8], 1.0), None)


def test_flat_parameters_serve_every_layer_type():
    config = llama(KINDS["default"])
    assert torch.equal(rope_for(config, "full_attention", 1).inv_freq, rope_for(config, None, 1).inv_freq)
    check_against(LlamaRotaryEmbedding(config), rope_for(config, "full_attention", 1), "full_attention")


def test_config_is_left_alone():
    config = llama(YARN)
    before = config.to_dict()
    rope_for(config, None, 4096)
    assert config.to_dict() == before


class Bare:
    """A config with nothing but what is given."""

    hidden_size, num_attention_heads, max_position_embeddings = 128, 2, 1024

    def __init__(self, rope_parameters):
        self.rope_parameters = rope_parameters


@pytest.mark.parametrize(
    "parameters,words",
    [
        ({"rope_type": "proportional", "rope_theta": 1e4}, "rope type 'proportional' is not supported; .*llama3"),
        ({"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "rope type 'linear' needs 'factor'"),
        (LONGROPE | {"short_factor": [1.0] * 5}, "short_factor has 5 numbers, heads of size 64 need 32"),
        (None, "no rope_parameters"),
        ({"full_attention": {"rope_type": "default"}, "sliding_attention": None}, "no entry for layer type None"),
    ],
)
def test_refusals(parameters, words):
    with pytest.raises(ValueError, match=words):
        rope_for(Bare(parameters), None, 1)


def test_device_copy_is_made_once():
    rope = rope_for(llama(KINDS["default"]), None, 1)
    rope.cos_sin(torch.arange(3), torch.float32, "meta")
    copy = rope._copies[torch.device("meta")]
    rope.cos_sin(torch.arange(3), torch.float32, torch.device("meta"))
    assert rope._copies == {torch.device("meta"): copy} and copy is rope._copies[torch.device("meta")]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_holds_what_tiles_compute(rows, dtype, monkeypatch):
    positions = torch.stack([torch.arange(100) + 4_999_900 * row for row in range(rows)])
    rope = ithaca.engine.model.rope.Rope(torch.tensor([1.0, 0.1, 1e-3], dtype=torch.float64), 1.1)
    kept = ithaca.engine.model.rope.Positions(rope, positions, dtype, tile=7)
    monkeypatch.setattr(ithaca.engine.model.rope, "TABLE_BYTES", 0)
    fresh = ithaca.engine.model.rope.Positions(rope, positions, dtype)
    assert kept.table is not None and fresh.table is None
    for tile in (slice(0, 100), slice(13, 14), slice(90, 100)):
        for mine, theirs in zip(kept.cos_sin(tile), fresh.cos_sin(tile), strict=True):
            assert mine.dtype == dtype and mine.shape == (rows, tile.stop - tile.start, 6) and torch.equal(mine, theirs)


@pytest.mark.parametrize("engine", ["composed", "streamed"])
def test_without_a_table_the_gradients_are_the_same(engine, monkeypatch):
    found = []
    for limit in (2**27, 0):
        monkeypatch.setattr(ithaca.engine.model.rope, "TABLE_BYTES", limit)
        run = prepared("llama3", tile=5, heads_per_stage=2, engine=engine, shard_parameters=False)
        run.loss(run.shard(tokens(2, 48), documents=[[20, 28], [48]])).backward()
        found.append([p.grad for p in run.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


RAISED = {"raised theta": {"rope_type": "default", "rope_theta": 5e7}}


@pytest.mark.parametrize("name", [*(each for each in KINDS if "," not in each), *RAISED])
def test_settings_of_a_run_reach_the_exported_config(name: str, tmp_path):
    """model.rope -> the model's config -> config.json -> transformers: the frequencies that were trained with, to 1e-6."""
    from transformers import AutoConfig

    from ithaca.config.schema import Model
    from ithaca.config.schema import Rope as Settings
    from ithaca.engine.build import model_config

    LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=512,
        vocab_size=64,
    ).save_pretrained(tmp_path / "base")
    wanted = {**KINDS, **RAISED}[name]
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in wanted.items()}
    config = model_config(Model(folder=str(tmp_path / "base"), rope=Settings(**given)), 2048)
    config.save_pretrained(tmp_path / "exported")
    read = AutoConfig.from_pretrained(tmp_path / "exported")
    assert {key: read.rope_parameters[key] for key in wanted} == wanted
    assert read.max_position_embeddings == (512 if name == "dynamic" else 2048)
    module = LlamaRotaryEmbedding(read)
    for length in (256, 512, 2048):
        module(torch.zeros(1), torch.arange(length)[None])
        ours = rope_for(config, None, length)
        torch.testing.assert_close(module.inv_freq.double(), ours.inv_freq, rtol=1e-6, atol=0)
        assert ours.scaling == pytest.approx(module.attention_scaling, rel=1e-12)
        if name not in ("dynamic", "longrope"):  # those forget the length as soon as a shorter text comes
            cos, sin = module(torch.zeros(1), torch.arange(16)[None])
            mine = ours.cos_sin(torch.arange(16), torch.float32, "cpu")
            torch.testing.assert_close(mine, (cos[0], sin[0]), rtol=0, atol=1e-6)


def test_another_kind_keeps_the_part_that_is_rotated_or_is_refused():
    from ithaca.config.schema import Model
    from ithaca.config.schema import Rope as Settings
    from ithaca.engine.build import model_config

    yarn = Settings(rope_type="yarn", factor=8.0, original_max_position_embeddings=4096)
    glm = model_config(Model(folder="glm4_9b", rope=yarn), 65536)
    assert glm.rope_parameters["partial_rotary_factor"] == 0.5 and len(rope_for(glm, None, 1).inv_freq) == 32
    with pytest.raises(
        ValueError, match=r"a Phi3Config does not keep these settings .*a larger model\.rope\.rope_theta"
    ):
        model_config(Model(folder="phi4", rope=yarn), 65536)
    assert model_config(Model(folder="phi4", rope=Settings(rope_theta=1e7)), 65536).rope_parameters["rope_theta"] == 1e7


def test_the_precision_script_finds_what_it_is_for():
    """Float32 angles change scores at 5M, ours do not; for every type."""
    import importlib.util
    from pathlib import Path

    spec = importlib.util.spec_from_file_location(
        "rope_precision", Path(__file__).parents[3] / "benchmarks/rope_precision.py"
    )
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, parameters in script.kinds(64).items():
        found = script.measure(parameters, 64)
        assert max(found["ithaca"]) < 2e-7, name
        assert found["float32 angles"][2] > 1e-4 > 100 * found["ithaca"][2], name
