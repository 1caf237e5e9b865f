"""Is this the model that transformers ships? A guard that looks at what would run, not at what it is called.

Some parts of a model are never called here: its own forward, its layers, attention, the projections, the head and the rotary
module. Our code does their work on their weights (`replaced`). What else their owner put there, such as a hook, a patched
forward or class, another loss, an attention function, a setting changed after the model was built, would be left out without a
word, so it is refused. The other parts (`called`: norms, MLP, output projection, embedding) run as they are. Where one differs
from what its class makes it, it is tried on a few tokens (tokenwise.py): it has to treat them alike.

What the model should be is read from a second one, built from the same class and config on the meta device. What changes after
`prepare` is seen by a fingerprint (fingerprint.py).
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .families import Family
from .tokenwise import HOOKS, mixing, sample

_PACKAGES = ("torch", "transformers", "peft", "huggingface_hub", "kernels", "accelerate")
# whose hooks change nothing: ours and FSDP2's; transformers' collect outputs where its own forward asks for them
_KNOWN_HOOKS = ("ithaca.", "torch.distributed.", "transformers.")
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
# of a module: says nothing of what it computes
_NO_MATTER = {"training", "name_or_path", "kernel_config", "padding_idx", "vocab_size", "layer_idx"}
# of a config: neither do these
_NO_MATTER_IN_CONFIG = {
    "use_cache", "dtype", "torch_dtype", "architectures", "transformers_version", "pad_token_id", "bos_token_id", "eos_token_id",
    "_name_or_path", "name_or_path", "_commit_hash", "return_dict",
}  # fmt: skip
_SHAPED = ("q_proj", "k_proj", "v_proj", "qkv_proj", "embed_tokens", "lm_head")  # linears whose rows are counted here
_REMEDY = "use the model as transformers builds it"


# -- whose code is it -----------------------------------------------------------------------------------------------------


@functools.cache
def _at_home(path: str) -> bool:
    """Whether code comes from one of the packages a model is made of, or from Python itself."""
    files = [getattr(sys.modules.get(name), "__file__", None) for name in _PACKAGES]
    if path.startswith(tuple(os.path.dirname(file) + os.sep for file in files if file)):
        return True
    return path.startswith(sysconfig.get_path("stdlib") + os.sep) and "-packages" + os.sep not in path


def foreign(thing: Any) -> str | None:
    """Name and place of code that is not transformers' or torch's, wrapped in decorators or not; None if all of it is."""
    if isinstance(thing, property):
        return next((name for f in (thing.fget, thing.fset) if f and (name := foreign(f))), None)
    while thing is not None:
        if isinstance(thing, staticmethod | classmethod | MethodType):
            thing = thing.__func__
        if isinstance(thing, functools.partial):
            thing = thing.func
            continue
        code = getattr(thing, "__code__", None)
        if code is None:  # built in, or an object that can be called
            known = isinstance(thing, type) or type(thing).__module__.partition(".")[0] in (*_PACKAGES, "builtins")
            return None if known else hook_name(thing)
        if not _at_home(code.co_filename):  # by the file: a name may be borrowed (functools.wraps)
            return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
        thing = getattr(thing, "__wrapped__", None)
    return None


def patched(kind: type) -> str | None:
    """A method of a class that was replaced by somebody else's, in words; None if there is none. Of the classes that all models
    share, only what a call goes through."""
    for base in kind.__mro__:
        shared = not base.__module__.startswith(("transformers.models.", "peft.")) and base.__name__ != kind.__name__
        for name, value in vars(base).items():
            called = name in ("forward", "__call__", "_call_impl", "_wrapped_call_impl")
            method = isinstance(value, FunctionType | staticmethod | classmethod | property)
            if (called or (method and not shared)) and (other := foreign(value)):
                return f"{base.__name__}.{name} was replaced by {other}"
    return None


@functools.lru_cache(maxsize=1024)
def unpatched(kind: type, forward: Any) -> bool:
    """The same as a yes or no for every call of a module: looked at once for each forward that a class has had."""
    return patched(kind) is None


# -- which parts there are --------------------------------------------------------------------------------------------------


def replaced(inner: Any, family: Family) -> Iterator[tuple[str, nn.Module]]:
    """Parts whose work our code does: nothing that hangs on them would run."""
    yield "", inner
    yield "model", inner.model
    yield "model.rotary_emb", inner.model.rotary_emb
    yield from _with_adapters("lm_head", inner.lm_head)
    for i, layer in enumerate(inner.model.layers):
        yield f"model.layers.{i}", layer
        yield f"model.layers.{i}.self_attn", layer.self_attn
        for part in family.projections:
            yield from _with_adapters(f"model.layers.{i}.self_attn.{part}", getattr(layer.self_attn, part))
        for part in family.dropouts:
            yield f"model.layers.{i}.{part}", getattr(layer, part)


def _with_adapters(name: str, linear: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A linear, and the linears inside of it where PEFT has wrapped it."""
    for inner, module in linear.named_modules():
        if inner == "" or isinstance(module, nn.Linear):
            yield (f"{name}.{inner}" if inner else name), module


def called(inner: Any, family: Family) -> Iterator[tuple[str, nn.Module, int, int | None]]:
    """Parts that are called on some tokens at a time: name, module, width of their input, heads beside it."""
    base, config = inner.model, inner.config
    width = config.hidden_size
    yield "model.embed_tokens", base.embed_tokens, width, None
    yield "model.norm", base.norm, width, None
    for i, layer in enumerate(base.layers):
        name, attention = f"model.layers.{i}", layer.self_attn
        inside = attention.head_dim * config.num_attention_heads
        yield f"{name}.self_attn.o_proj", attention.o_proj, inside, None
        if family.qk_norm == "head":
            for part in ("q_norm", "k_norm"):
                yield f"{name}.self_attn.{part}", getattr(attention, part), attention.head_dim, 3
        elif family.qk_norm:
            yield f"{name}.self_attn.q_norm", attention.q_norm, inside, None
            yield f"{name}.self_attn.k_norm", attention.k_norm, attention.head_dim * config.num_key_value_heads, None
        for part in sorted(family.layer_parts - {"self_attn", *family.dropouts}):
            yield f"{name}.{part}", getattr(layer, part), width, None


# -- before anything is prepared ----------------------------------------------------------------------------------------------


def model_violations(model: nn.Module, inner: Any, family: Family) -> list[str]:
    """Everything about a model that would be left out, in words."""
    twin = _twin(inner)
    if isinstance(twin, str):
        return [twin]
    problems = [
        *function_violations(inner),
        *_setting_violations(inner, twin),
        *_sharing_violations(inner),
        *_compiled_violations(inner),
    ]
    if model is not inner:
        for name, wrapper in (("the PEFT model", model), ("its base_model", getattr(model, "base_model", model))):
            problems += _part_violations(name, wrapper)
    built = dict(twin.named_modules())
    for name, module in replaced(inner, family):
        problems += _part_violations(name or "the model", module, built.get(name))
    for name, parameter in inner.named_parameters():
        problems += _parameter_violations(name, parameter)
    if not problems:  # what is wrong already may break a call
        problems += _tried(inner, built, family)
    return first_of_each(problems)


def owner_changes(inner: nn.Module) -> list[str]:
    """What of a model is not as its class makes it: parts, code and settings that a fresh copy of it would not have."""
    changes = []
    twin = _twin(inner)
    built = {} if isinstance(twin, str) else dict(twin.named_modules())
    for name, module in inner.named_modules():
        plain = built.get(name.replace(".base_layer", ""))
        kind, name = type(module), name or "the model"
        if kind.__module__.partition(".")[0] not in (*_PACKAGES, "ithaca"):
            changes.append(f"{name} is a {kind.__module__}.{kind.__name__}")
        elif problem := patched(kind):
            changes.append(f"{name}: {problem}")
        elif plain is not None and not kind.__module__.startswith("peft."):
            if kind is not type(plain):
                changes.append(f"{name} is a {kind.__name__}, where its class makes a {type(plain).__name__}")
            elif re.search(r"\.\d+\.", name):  # of the layers: what is around them counts lengths and names files
                others = _differences(module, plain).items()
                changes += [
                    f"{name}.{key} is {is_now!r}, where its config makes it {was!r}" for key, (is_now, was) in others
                ]
        functions = ((key, value) for key, value in vars(module).items() if key != "forward")
        own = [key for key, value in functions if isinstance(value, FunctionType | MethodType) and foreign(value)]
        changes += [f"{name}.{key} is a function of somebody else" for key in own]
        if "forward" in vars(module):
            changes.append(f"{name} ({kind.__name__}) has a forward of its own")
        hooks = [hook for table in HOOKS for hook in getattr(module, table).values() if not is_known_hook(hook)]
        changes += [f"{name} ({kind.__name__}) has a hook ({hook_name(hook)})" for hook in hooks]
    return changes


def own_code_violations(model: nn.Module, inner: nn.Module) -> list[str]:
    """What cannot be kept where a model runs by its own code: functions that are replaced, compiled modules, parameters of another
    kind or in two places, and whatever hangs on PEFT's wrapper, which is not called."""
    problems = [*function_violations(inner), *_compiled_violations(inner), *_new_sharing(inner)]
    if model is not inner:
        for name, wrapper in (("the PEFT model", model), ("its base_model", getattr(model, "base_model", model))):
            problems += _part_violations(name, wrapper)
    for name, parameter in inner.named_parameters():
        problems += _parameter_violations(name, parameter)
    return first_of_each(problems)


def _twin(inner: Any) -> Any:
    """The model that its class makes of its config, without numbers."""
    try:
        with torch.device("meta"):
            return type(inner)(copy.deepcopy(inner.config))
    except Exception as error:  # transformers raises whatever its parts raise
        return (
            f"its config does not build a {type(inner).__name__} any more ({type(error).__name__}: {error}); {_REMEDY}"
        )


def _part_violations(name: str, module: nn.Module, built: nn.Module | None = None) -> Iterator[str]:
    kind = type(module)
    if built is not None and kind is not type(built) and not hasattr(module, "base_layer"):
        yield f"{name} is a {kind.__module__}.{kind.__name__} with a forward of its own, which would not be called; {_REMEDY}"
    elif problem := patched(kind):
        yield f"{name}: {problem}, which would not be called; {_REMEDY}"
    if by_accelerate := accelerated(module):
        yield f"{name} ({kind.__name__}) {by_accelerate}"
    elif "forward" in vars(module):
        yield f"{name} ({kind.__name__}) has a forward that is not transformers' own, which would not be called; {_REMEDY}"
    for hooks in HOOKS:
        for hook in getattr(module, hooks).values():
            if not is_known_hook(hook):
                yield (
                    f"{name} ({kind.__name__}) has a hook ({hook_name(hook)}), which would not be called as in the untouched "
                    "model; remove it (hooks on norms, MLP, o_proj and the embedding work)"
                )


def accelerated(module: nn.Module) -> str | None:
    """What Accelerate did to a module's forward, in words; None if nothing."""
    if "_original_forward" not in vars(module):
        return None
    return (
        "runs under Accelerate's autocast (accelerator.prepare(model), mixed_precision), and backward would compute again in "
        "another dtype; do not give the model to accelerator.prepare, and choose the compute dtype with prepare(dtype=...)"
    )


def _compiled_violations(inner: nn.Module) -> Iterator[str]:
    """Compiled code has its calls of attention inside, where they cannot be replaced, and is made anew for each length."""
    for name, module in inner.named_modules():
        # torch.compile(module) is a wrapper, module.compile() a note in the module
        if "_orig_mod" in module._modules or getattr(module, "_compiled_call_impl", None) is not None:
            kind = type(module._modules.get("_orig_mod", module)).__name__
            yield f"{name or 'the model'} ({kind}) was compiled; prepare the model without torch.compile"


def _parameter_violations(name: str, parameter: Tensor) -> Iterator[str]:
    kind = type(parameter.data)
    if (kind is not Tensor and _has_memory(parameter)) or not parameter.is_floating_point():
        what = f"{parameter.dtype}" if kind is Tensor else f"{kind.__module__}.{kind.__name__}"
        yield f"{name} is a parameter of {what}, and there is no exact path for that; load the model in bf16 or float32"
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        yield f"{name} has a hook of its own (register_hook), which would be lost or see a part of the gradient; remove it"


def home_class(inner: nn.Module) -> type | None:
    """The class of transformers' that a model is, or is made from; FSDP2's and its owner's come first."""
    return next((kind for kind in type(inner).__mro__ if kind.__module__.startswith("transformers.models.")), None)


def function_violations(inner: Any) -> Iterator[str]:
    """Functions that the model's own forward would call and ours does not: attention, masks, the loss."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    own = home_class(inner)
    assert own is not None, "refused before"
    module = sys.modules[own.__module__]
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and (other := foreign(value)):
            yield f"{module.__name__}.{name} was replaced by {other}, which would not be called; {_REMEDY}"
    kernel = inner.config._attn_implementation
    for table in (getattr(module, "ALL_ATTENTION_FUNCTIONS", {}), ALL_MASK_ATTENTION_FUNCTIONS):
        if other := foreign(table.get(kernel)):
            yield (
                f"attention {kernel!r} is a function of your own ({other}), which would not be called; use one of transformers: "
                'model.set_attn_implementation("sdpa")'
            )
    if kernel == "sdpa" and (other := foreign(F.scaled_dot_product_attention)):
        yield f"torch.nn.functional.scaled_dot_product_attention was replaced by {other}, which would not be called; undo it"
    loss = inner.loss_function
    if foreign(loss) or getattr(loss, "__name__", "") != "ForCausalLMLoss":
        yield (
            f"model.loss_function is {hook_name(loss)}, but the loss here is cross-entropy over the next token (ForCausalLMLoss); "
            "unset model.loss_function and config.loss_type"
        )
    for name in _GLOBAL_HOOKS:
        for hook in getattr(torch_module, name).values():
            if not is_known_hook(hook):
                yield (
                    f"a hook on all modules ({hook_name(hook)}, torch.nn.modules.module) would not be called for those whose work "
                    "is done here; remove it"
                )


def _setting_violations(inner: Any, twin: Any) -> Iterator[str]:
    """Attributes and shapes that are not what the config says: one of them was changed after the model was built."""
    base, config = inner.model, inner.config
    if len(base.layers) != config.num_hidden_layers:
        yield (
            f"the model has {len(base.layers)} layers, config.num_hidden_layers is {config.num_hidden_layers}; set it to "
            f"{len(base.layers)}, or build the model from the config"
        )
        return
    head = getattr(inner.lm_head, "base_layer", inner.lm_head)
    tied = getattr(head, "weight", None) is getattr(base.embed_tokens, "weight", None)
    if tied != bool(config.tie_word_embeddings):
        yield (
            f"config.tie_word_embeddings is {config.tie_word_embeddings}, but embedding and head are {'one' if tied else 'two'}; "
            f"set it to {tied}, or what is saved is another model"
        )
    for name, module in inner.named_modules():
        own = vars(module).get("config")
        if own is not None and own is not config and plain_config(own) != plain_config(config):
            yield f"{name or 'model'} has a config of its own, other than model.config; {_REMEDY}"
            return
    modules = dict(twin.named_modules())
    for name, module in [*settled(inner)]:
        for key, (actual, built) in _differences(module, modules[name]).items():
            yield (
                f"{name or 'model'}.{key} is {actual!r}, but model.config makes it {built!r}: one of them was changed after the "
                "model was built; set it back, or build the model from its config"
            )
    shapes = {name.replace(".base_layer", ""): p.shape for name, p in inner.named_parameters(remove_duplicate=False)}
    for name, parameter in twin.named_parameters(remove_duplicate=False):
        part = name.split(".")[-2]
        if part in _SHAPED and shapes.get(name) != parameter.shape:
            shape = list(shapes[name]) if name in shapes else "missing"
            yield f"{name} is {shape}, but model.config makes it {list(parameter.shape)}; set the config right"


def settled(inner: Any) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose settings our code has read and does not read again."""
    yield "", inner
    yield "model", inner.model
    yield "model.embed_tokens", inner.model.embed_tokens
    for i, layer in enumerate(inner.model.layers):
        yield f"model.layers.{i}", layer
        yield f"model.layers.{i}.self_attn", layer.self_attn
        for name, part in layer.named_children():
            if isinstance(part, nn.Dropout):
                yield f"model.layers.{i}.{name}", part
        for name in ("gate", "router"):
            gate = getattr(layer.mlp, name, None)
            if isinstance(gate, nn.Module) and not hasattr(gate, "base_layer"):
                yield f"model.layers.{i}.mlp.{name}", gate


def settings(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _NO_MATTER and isinstance(value, int | float | str | tuple | None)
    }


def _differences(module: nn.Module, twin: nn.Module) -> dict[str, tuple[Any, Any]]:
    actual, built = settings(module), settings(twin)
    other = (
        key for key in built if actual.get(key) != built.get(key) and key != "gradient_checkpointing"
    )  # said elsewhere
    return {key: (actual.get(key), built.get(key)) for key in other}


def plain_config(config: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(config).items() if key not in _NO_MATTER_IN_CONFIG}


def _sharing_violations(inner: Any) -> Iterator[str]:
    """One parameter, module or piece of memory in two places: gradients would be counted or shards be stepped twice."""
    tied = {"model.embed_tokens.weight", "lm_head.weight", "lm_head.base_layer.weight"}
    places: dict[int, str] = {}
    for name, module in inner.named_modules(remove_duplicate=False):
        first = places.setdefault(id(module), name)
        if first != name:
            yield f"{name} is the same module as {first}; give each its own (copy.deepcopy)"
            return
    places, spans = {}, []
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        first = places.setdefault(id(parameter), name)
        if first != name:
            if {first, name} <= tied:
                continue
            yield f"{name} is the same parameter as {first}; give each its own (only embedding and head may be tied)"
            return
        if not parameter.is_meta and parameter.is_contiguous() and parameter.numel() and _has_memory(parameter):
            spans.append((parameter.device, parameter.data_ptr(), parameter.nbytes, name))
    spans.sort(key=lambda span: (str(span[0]), span[1]))
    for (device, start, size, name), (other, at, _, second) in itertools.pairwise(spans):
        if device == other and at < start + size:
            yield f"{second} lies in the memory of {name}; give each its own (clone one of them)"
            return


def _new_sharing(inner: nn.Module) -> Iterator[str]:
    """Of a model by its own code: what is in two places, where its class makes two. FSDP2 would gather it for one of them."""
    shared = _shared(inner)
    if not shared:
        return
    twin = _twin(inner)
    new = shared - (set() if isinstance(twin, str) else _shared(twin))
    if new:  # its parts are shared with it, and need not be told
        first, second, *_ = min(new, key=lambda names: len(names[0]))
        yield f"{second} is the same as {first}, where its class makes two; give each its own (copy.deepcopy)"


def _shared(inner: nn.Module) -> set[tuple[str, ...]]:
    """Names of each module or parameter that has more than one."""
    places: dict[int, list[str]] = {}
    for named in (inner.named_modules(remove_duplicate=False), inner.named_parameters(remove_duplicate=False)):
        for name, thing in named:
            places.setdefault(id(thing), []).append(name.replace(".base_layer", ""))
    return {tuple(names) for names in places.values() if len(names) > 1}


def _has_memory(tensor: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor  # imported here: importing ithaca stays light

    return not isinstance(tensor, FakeTensor)


def _tried(inner: Any, built: dict[str, nn.Module], family: Family) -> Iterator[str]:
    """Called parts that are not as their class makes them, tried on a few tokens."""
    for name, module, width, heads in called(inner, family):
        if _stock(module, built[name]):
            continue
        kind = type(module).__name__
        if any(p.is_meta or not _has_memory(p) for p in module.parameters()):
            yield (
                f"{name} ({kind}) is not as transformers builds it, and on the meta device it cannot be tried; build it on a "
                "real device"
            )
        elif problem := mixing(module, sample(module, width, heads)):
            yield f"{name} ({kind}) {problem}; it has to treat every token alike, as it is called on some at a time: {_REMEDY}"


def _stock(module: Any, built: nn.Module) -> bool:
    """Whether a called part is what transformers makes it: the same classes, unpatched, without hooks."""
    if type(module).__module__.startswith("peft.tuners.lora") and hasattr(module, "base_layer"):
        return _stock(module.base_layer, built) and all(_clean(submodule) for submodule in module.modules())
    if type(module).__module__.startswith("peft.utils.") and hasattr(module, "modules_to_save"):
        copies = [module.original_module, *module.modules_to_save.values()]
        return _clean(module) and all(_stock(part, built) for part in copies)
    parts, others = dict(module.named_children()), dict(built.named_children())
    same = type(module) is type(built) and _clean(module) and parts.keys() == others.keys()
    return same and all(_stock(part, others[name]) for name, part in parts.items())


def _clean(module: nn.Module) -> bool:
    if patched(type(module)) or any(
        isinstance(v, FunctionType | MethodType) and foreign(v) for v in vars(module).values()
    ):
        return False
    return "forward" not in vars(module) and all(
        is_known_hook(h) for name in HOOKS for h in getattr(module, name).values()
    )


def first_of_each(problems: Iterable[str]) -> list[str]:
    """The same trouble in every layer is said once."""
    seen: dict[str, str] = {}
    for text in problems:
        key = "".join("#" if c.isdigit() else c for c in text)
        seen.setdefault(key, text)
    return list(seen.values())


def is_known_hook(hook: Any) -> bool:
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return f"{module}.".startswith(_KNOWN_HOOKS)


def hook_name(thing: Any) -> str:
    if isinstance(thing, functools.partial):
        thing = thing.func
    kind = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"
