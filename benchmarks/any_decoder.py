"""A model by its own code beside Hugging Face with checkpointing, and beside the streamed engine where the table knows it.

    python benchmarks/any_decoder.py --tokens 128K                                # glm4, gpt_oss, llama: widths of 9B, 20B, 1B
    python benchmarks/any_decoder.py --tokens 128K qwen3_next --stacks recompute=keep_attention recompute=none,tile=null
    python benchmarks/any_decoder.py --tokens 512 --tiny --cpu glm4 gpt_oss       # no GPU: does it still run?

One GPU, few layers, one row, bf16, the same weights and tokens. The vocabulary is cut to 32K for both: whole logits of Hugging
Face's loss would be what runs out first. Hugging Face is tried with each attention that it has here, and its fastest that works
counts; with sinks only those whose gradient of the sinks is right (compared with eager's on 256 tokens). Gated delta nets run by
flash-linear-attention on both sides where it is installed; which kernels ran is printed. --liger adds Liger's kernels to theirs.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rank_of_n import config_of, shape_of, size

import ithaca
from ithaca.config import read_fields, split_words
from ithaca.engine.model.shrink import shrink_config
from ithaca.stack import Stack, require

# Layers that run, and of which preset. gpt-oss: one with a window, one without. Qwen3-Next: three gated delta nets, one attention.
PRESETS = {
    "glm4": (2, "glm4_9b"),
    "gpt_oss": (2, "gpt_oss_20b"),
    "qwen3_next": (4, "qwen3_next_80b_a3b"),
    "llama": (4, "llama32_1b"),
}
ATTENTION = ("flash_attention_4", "sdpa", "flash_attention_2", "flex_attention", "eager")  # in the order of their speed


def narrowed(kind: str, tiny: bool) -> Any:
    layers, preset = PRESETS[kind]
    family, depth, sizes = shape_of(preset)
    config = config_of((family, depth, sizes | {"vocab_size": 32768, "tie_word_embeddings": False}), layers)
    return shrink_config(config, layers) if tiny else config


def built(config: Any, device: str, attention: str | None) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention, trust_remote_code=False
        )


def measured(step: Callable[[], Any], device: str, steps: int) -> tuple[float, float]:
    """Seconds of the fastest step, and GB at the peak."""
    taken = []
    for _ in range(steps + 1):
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return min(taken[1:]), torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0


def theirs(config: Any, ids: torch.Tensor, device: str, steps: int, attention: str, liger: bool) -> tuple[float, float]:
    if liger:  # it replaces classes, so nothing else runs in such a process
        kernels = importlib.import_module("liger_kernel.transformers")
        # experts are transformers' grouped matrix products: Liger's own are tuned for minutes
        getattr(kernels, f"apply_liger_kernel_to_{config.model_type}")(swiglu=not getattr(config, "num_experts", 0))
    model = built(config, device, attention)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model.zero_grad(set_to_none=True)

    return measured(step, device, steps)


def ours(config: Any, ids: torch.Tensor, device: str, steps: int, stack: Stack) -> tuple[float, float]:
    run = ithaca.prepare(built(config, device, None), stack, device=device, dtype=torch.bfloat16)
    batch = run.shard(ids)

    def step() -> None:
        run.loss(batch).backward()
        run.model.zero_grad(set_to_none=True)

    result = measured(step, device, steps)
    mixers = run.kernels.mixers.chosen.items()
    plain = {key[0].__name__ for key, function in mixers if function is inspect.unwrap(key[0])}
    kernels = sorted({kernel.name for kernel in run.kernels.chosen.values()})
    print(f"    kernels: {', '.join([*kernels, *(f'{name} by the formula' for name in sorted(plain))])}", flush=True)
    return result


def sinks_are_right(config: Any, device: str, attention: str) -> bool:
    """Whether the gradient of the sinks is eager's, up to bf16."""
    ids = torch.randint(0, config.vocab_size, (1, 256), device=device)
    grads = []
    for name in ("eager", attention):
        model = built(config, device, name)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        grads.append(torch.cat([layer.self_attn.sinks.grad.float() for layer in model.model.layers]))
    return bool((grads[0] - grads[1]).norm() < 0.1 * grads[0].norm())


def tried(name: str, call: Callable[[], tuple[float, float]], tokens: int) -> float | None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    try:
        seconds, peak = call()
    except Exception as error:  # out of memory, or not installed: the next one
        first = str(error).strip().partition("\n")[0]
        print(f"  {name:<34} {type(error).__name__}: {first[:110]}", flush=True)
        return None
    print(f"  {name:<34} {tokens / seconds:9,.0f} tokens/s {peak:7.1f} GB", flush=True)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(PRESETS), help=f"default: {', '.join(PRESETS)}")
    parser.add_argument("--tokens", type=size, default=size("128K"))
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="shrunk: to see whether it runs")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument(
        "--stacks",
        nargs="+",
        default=[""],
        metavar="FIELD=VALUE,...",
        help="ours (default: host, tile 16384)",
    )
    parser.add_argument("--liger", action="store_true", help="theirs with Liger's kernels")
    parser.add_argument("--alone", action="store_true", help="without Hugging Face")
    options = parser.parse_args()
    device = "cpu" if options.cpu else "cuda"
    for kind in options.kinds:
        config = narrowed(kind, options.tiny)
        ids = torch.randint(0, config.vocab_size, (1, options.tokens), device=device)
        print(f"{kind}, {PRESETS[kind][0]} layers, {options.tokens:,} tokens", flush=True)
        for attention in () if options.alone else ("eager",) if options.tiny else ATTENTION:
            if kind == "gpt_oss" and attention != "eager":
                try:
                    right = sinks_are_right(config, device, attention)
                except Exception as error:
                    print(f"  Hugging Face, {attention}: {type(error).__name__}: {str(error)[:100]}", flush=True)
                    continue
                if not right:
                    print(f"  Hugging Face, {attention}: the gradient of the sinks is wrong", flush=True)
                    continue
            name = f"Hugging Face, {attention}" + (", Liger" if options.liger else "")
            given = (config, ids, device, options.steps)
            if tried(name, partial(theirs, *given, attention, options.liger), options.tokens):
                break
        for engine in ("module", *(["streamed"] if kind == "llama" else [])):
            store = "gpu" if options.cpu else "host"
            for text in options.stacks:
                fields, problems = read_fields(split_words("--stacks", text)) if text else ({}, [])
                require(problems, "this stack cannot run")
                stack = Stack(**{"engine": engine, "tile": 16384, "store": store, "shard_parameters": False, **fields})
                name = f"ithaca, {engine} {text}".strip()
                tried(name, partial(ours, config, ids, device, options.steps, stack), options.tokens)


if __name__ == "__main__":
    main()
