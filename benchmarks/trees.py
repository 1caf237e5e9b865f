"""A batch with shared prompts as a tree, beside the same batch unrolled: time against what FLOPs promise.

    python benchmarks/trees.py                                    # pairs of 64K on 60K; 16 answers of 4K on 128K
    python benchmarks/trees.py --scale 64 --tiny --cpu            # no GPU: does it still run?

One GPU, one row, bf16, random weights, answers supervised and prompts not, `run.logprobs` forward and backward. The promise counts
matrix products (layers for every token twice forward and twice as much backward, the head for labels) and attention (kept:
once forward, 2.5 times that backward).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ithaca

CASES = {"pair": (60, 4, 2), "group": (128, 4, 16)}  # thousands of tokens of the prompt, of an answer; answers
WIDTHS = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, head_dim=64)
TINY = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)


def flops(config: Any, tokens: int, pairs: int, labels: int) -> float:
    heads = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * heads + 2 * kv + 3 * config.intermediate_size)
    linear = 2 * 4 * config.num_hidden_layers * layer * tokens
    attention = 3.5 * 4 * config.num_hidden_layers * heads * pairs
    return linear + attention + 2 * 4 * config.hidden_size * config.vocab_size * labels


def seconds(run: ithaca.Run, ids: torch.Tensor, labels: torch.Tensor, documents: list[Any], cuda: bool) -> float:
    """Of the faster of two steps behind a first."""
    batch, taken = run.shard(ids[None], labels=labels[None], documents=[documents]), []
    for _ in range(3):
        run.model.zero_grad(set_to_none=True)
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        logprobs = run.logprobs(batch)
        assert isinstance(logprobs, torch.Tensor)
        logprobs.sum().backward()
        if cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--scale", type=int, default=1024, help="tokens of a thousand")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    cuda = not options.cpu
    longest = 132 * options.scale
    config = LlamaConfig(
        **(TINY if options.tiny else WIDTHS), num_hidden_layers=options.layers, vocab_size=128_256 if cuda else 512,
        max_position_embeddings=longest, dtype=torch.bfloat16 if cuda else torch.float32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("cuda" if cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    stack = ithaca.Stack(recompute="keep_attention", tile=8192, shard_parameters=False)
    run = ithaca.prepare(model, stack, device="cuda" if cuda else "cpu")
    for name, (thousands, answer, count) in CASES.items():
        prompt, answer = thousands * options.scale, answer * options.scale
        made = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, config.vocab_size, (prompt + count * answer,), generator=made)
        labels = tokens.clone()
        labels[:prompt] = -100
        tree = [(prompt, None), *[(answer, 0)] * count]
        parts = [tokens[prompt + i * answer : prompt + (i + 1) * answer] for i in range(count)]
        unrolled = torch.cat([torch.cat((tokens[:prompt], part)) for part in parts])
        hidden = torch.full((prompt,), -100)
        wanted = torch.cat([torch.cat((hidden, part)) for part in parts])
        once = flops(config, len(tokens), prompt**2 // 2 + count * (answer**2 // 2 + prompt * answer), count * answer)
        whole = flops(config, len(unrolled), count * (prompt + answer) ** 2 // 2, count * answer)
        shared = seconds(run, tokens, labels, tree, cuda)
        apart = seconds(run, unrolled, wanted, [prompt + answer] * count, cuda)
        ratio, promise = apart / shared, whole / once
        print(f"{name}: {count} × {answer:,} on {prompt:,}, {options.layers} layers")
        print(f"  tree {len(tokens):,} tokens {shared:.3f} s; unrolled {len(unrolled):,} tokens {apart:.3f} s")
        print(f"  {ratio:.2f} times as fast; FLOPs promise {promise:.2f}; {ratio / promise:.2f} of it", flush=True)


if __name__ == "__main__":
    main()
