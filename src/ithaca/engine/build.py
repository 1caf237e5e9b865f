"""From a config to a prepared model.

A model comes from a Hugging Face folder: built on the meta device and filled shard by shard, so that no rank holds it whole. With
`random_init` only its config is read, and with a preset name not even a folder is needed. Rotary settings of the run go into
the model's config before it is built, so that an export carries them and inference agrees with training.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..base.hub import find_name, short
from ..config.schema import LATENT, LINEARS, Config, Lora, Model
from ..stack import Stack
from .model.config import read_config
from .model.families import FAMILIES
from .model.presets import PRESETS, preset_config
from .model.sizes import extension, pretrained_length
from .model.weights import cast_parameters
from .parallelize import prepare
from .run import Run

log = logging.getLogger("ithaca")

MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")  # linears of an MLP, which experts have as parameters
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def model_config(options: Model, context: int) -> Any:
    """The Hugging Face config of the model, with the run's rotary settings."""
    preset = is_preset(options)
    if preset:
        config = preset_config(options.folder)
    else:
        config = read_config(options.path, trust_remote_code=options.trust_remote_code)
        if find_name(options.folder) is not None:  # not where the cache is: checkpoints and exports say it too
            config._name_or_path = options.folder
    if options.rope is not None:
        _check_rope(options, config)
        config.rope_parameters = _with_rope(config.rope_parameters, options)
        _check_kept(config)
    longest = getattr(config, "max_position_embeddings", None) or context
    if context > longest:
        if options.rope is None and not (options.random_init or preset):
            raise ValueError(_too_long(context, longest, config.model_type))
        kinds = {table.get("rope_type") for table in _tables(config.rope_parameters)}
        if "dynamic" not in kinds:  # there this number is the length that stretching begins at
            config.max_position_embeddings = context
    config.use_cache = False
    return config


def is_preset(options: Model) -> bool:
    return options.folder in PRESETS and not Path(options.folder).is_dir()


def model_name(options: Model) -> str:
    return options.folder if is_preset(options) else short(options.folder)


def _tables(parameters: Any) -> list[Any]:
    """Rotary settings; Gemma 3 has one table per kind of layer."""
    parts = [value for value in parameters.values() if isinstance(value, dict)]
    return parts if parts and "rope_type" not in parameters else [parameters]


def _with_rope(parameters: Any, options: Model) -> Any:
    assert options.rope is not None
    if _tables(parameters) == [parameters]:
        return options.rope.over(parameters)
    return {kind: options.rope.over(table) for kind, table in parameters.items()}


def _check_rope(options: Model, config: Any) -> None:
    """Settings that contradict the model: it was not trained at the length they say."""
    assert options.rope is not None
    native = getattr(config, "max_position_embeddings", None)
    own = [table.get("original_max_position_embeddings") for table in _tables(config.rope_parameters)]
    said = options.rope.original_max_position_embeddings
    if said is not None and native is not None and said > native and said not in own:
        raise ValueError(
            f"model.rope.original_max_position_embeddings={said:,} is longer than the {native:,} positions that {options.folder} "
            f"was trained with; give {native:,}, or the length before an earlier extension"
        )


def _check_kept(config: Any) -> None:
    """Settings that a config of this kind does not keep: Phi-3's takes yarn for longrope. An export would be another model."""
    said, why = config.rope_parameters, "it makes something else of them"
    try:
        kept = type(config).from_dict(config.to_dict()).rope_parameters
    except Exception as error:  # a config class raises whatever it likes
        kept, why = {}, " ".join(str(error).split())[:200]
    if any(kept.get(name) != value for name, value in said.items()):
        raise ValueError(
            f"model.rope: a {type(config).__name__} does not keep these settings ({why}), so what is exported would be another "
            "model; choose another rope_type, or a larger model.rope.rope_theta alone"
        )


def _too_long(context: int, longest: int, family: str) -> str:
    return (
        f"data.context={context:,} is longer than the {longest:,} positions the model was made for; extend it, for example with "
        f"{extension(context, pretrained_length(family, longest), family)}; or lower data.context"
    )


def build_model(options: Model, config: Any, seed: int) -> tuple[nn.Module, Path | None]:
    """The model, and the folder its weights come from (then it is on the meta device)."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as words

    words.disable_progress_bar()  # the run has a display of its own
    build = AutoModelForCausalLM.from_config
    torch.manual_seed(seed)  # the same weights on every rank
    # a frozen LoRA base stays in the compute dtype; what is trained gets fp32 masters
    dtype = DTYPES[options.dtype] if options.lora else torch.float32
    if options.random_init or is_preset(options):
        model = build(config, dtype=dtype, trust_remote_code=options.trust_remote_code)
        return (with_lora(model, options.lora, seed) if options.lora else model), None
    with torch.device("meta"):
        model = build(config, dtype=dtype, trust_remote_code=options.trust_remote_code)
        model = with_lora(model, options.lora, seed) if options.lora else model
    return model, options.path


def with_lora(model: nn.Module, options: Lora, seed: int) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError("model.lora needs the package peft (pip install peft); or drop model.lora") from None
    torch.manual_seed(seed + 1)
    alpha: Any = options.alpha  # PEFT divides it by the rank: any number will do
    family = FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    targets = options.targets
    if targets == LINEARS:  # nobody named them: those are meant that there are, also where one is several of them
        fused = family.fused if family else {}
        targets = _there({fused.get(name, name): None for name in targets}, linears, model)
    elif taken := [target for target in targets if _means_experts(target, model)]:
        raise ValueError(
            f"model.lora.targets names {', '.join(taken)}, which PEFT takes for experts, whatever else has that name; a run makes "
            "no adapters on experts: leave them out, or wrap the model with PEFT yourself (ithaca docs trainers)"
        )
    adapters = LoraConfig(
        r=options.rank, lora_alpha=alpha, lora_dropout=options.dropout, target_modules=list(targets),
        task_type="CAUSAL_LM",
    )  # fmt: skip
    linears = sorted({name.rpartition(".")[2] for name in linears})
    wrapped: Any = get_peft_model(model, adapters)  # pyright: ignore[reportArgumentType]
    names = [name for name, module in wrapped.named_modules() if hasattr(module, "lora_A")]
    tables = [
        name.rpartition(".")[2]
        for name, module in wrapped.named_modules()
        if len(getattr(module, "lora_embedding_A", ()))
    ]
    if tables:
        raise ValueError(
            f"model.lora.targets names {', '.join(sorted(set(tables)))}, an embedding, quantised or not; adapters go on linear "
            f"layers here: {', '.join(linears)}"
        )
    # PEFT is content where one of them is there
    missing = [target for target in targets if not any(f".{name}".endswith(f".{target}") for name in names)]
    if missing:
        raise ValueError(
            f"model.lora.targets names {', '.join(missing)}, which this model does not have; its linear layers are "
            f"{', '.join(linears)}"
        )
    return wrapped


def _there(targets: Iterable[str], linears: Sequence[str], model: nn.Module) -> tuple[str, ...]:
    """Those that the model has. By names that experts had once PEFT adapts all of them, in a billion weights: whoever wants that
    wraps the model with PEFT (ithaca docs trainers). So MLPs of a mixture are left out, but for the expert that all tokens see."""
    mixture = any(hasattr(module, "has_gate") for module in model.modules())
    leaves = {name.rpartition(".")[2] for name in linears if not (mixture and name.rpartition(".")[0].endswith(".mlp"))}
    there = tuple(target for target in targets if target in leaves and not _means_experts(target, model))
    if not there:
        raise ValueError(
            f"model.lora: this model has none of the linear layers {', '.join(targets)}; name others in model.lora.targets: "
            f"{', '.join(sorted(leaves))}"
        )
    latent = tuple(name for name in LATENT if name in leaves)
    there = (*there, *latent)
    left = [target for target in targets if target not in there and not (latent and target in LINEARS[:3])]
    of_experts = [target for target in left if target in MLP and (mixture or target in leaves)]
    if of_experts:
        shared = "" if leaves.isdisjoint(of_experts) else ", and PEFT knows no other linear layer by these names"
        log.warning("model.lora: no adapters on %s: its experts have none%s", ", ".join(of_experts), shared)
    if others := [target for target in left if target not in of_experts]:
        log.warning("model.lora: no adapters on %s: this model has no such linear layer", ", ".join(others))
    return there


def _means_experts(target: str, model: nn.Module) -> bool:
    """Whether PEFT takes this name for experts. It does for types of models whose experts were linears once, and then adapts no
    linear of that name: not the expert that all tokens see either."""
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers as convert
    except ImportError:  # an older PEFT, which takes names as they are
        return False
    from peft import LoraConfig

    probe = LoraConfig(target_modules=[target])
    try:
        convert(probe, model, None)
    except ValueError:  # half of two that became one
        return True
    return target not in (probe.target_modules or ())


def prepared(config: Config, hf: Any, stack: Stack, device: torch.device) -> Run:
    model, weights = build_model(config.model, hf, config.train.seed)
    dtype = DTYPES[config.model.dtype]
    if not stack.shard_parameters and weights is None:
        model = cast_parameters(model, dtype)
    return prepare(
        model, stack, device=device, dtype=dtype, weights=weights, scratch=config.stack.scratch,
        offload_parameters=bool(config.train.offload_optimizer), seed=config.train.seed + 1,
        quantize=config.model.quantize,
    )  # fmt: skip


def simple_stack(context: int, hf: Any, world: int) -> Stack:
    """All ranks share the sequence, by heads as far as those go, then by a ring."""
    heads = hf.num_attention_heads
    ulysses = max(n for n in range(1, world + 1) if world % n == 0 and n <= heads)
    tokens = context // world
    short = tokens <= 2**15
    stack = Stack(
        ulysses=ulysses,
        ring=world // ulysses,
        heads_per_stage=None if short else max(1, heads // ulysses // 8),
        recompute="keep_attention",
        tile=None if tokens <= 4096 else 4096,
    )
    log.info("stack auto: %s", stack)
    return stack


def device_of(config: Config) -> torch.device:
    if config.launch.cpu is not None or not torch.cuda.is_available():
        # On a CPU without bf16 instructions torch multiplies bf16 in plain code: slower, with the same results. It says so with a
        # C++ stack of twenty lines, at the first product.
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed, switching to BLAS gemm")
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
