"""Log-probabilities with gradient beside the loss: time and memory of forward and backward.

    python benchmarks/log_probs.py --shape qwen3_06b --layers 4 --tokens 256K
    python benchmarks/log_probs.py --tokens 512 --tiny --cpu        # no GPU: does it still run?

One GPU, one row, bf16, random weights, every token has a label. `run.loss` takes the gradients of a tile at once; `run.logprobs`
computes the tile again in backward, because what comes from above is not known before.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable

import torch
from rank_of_n import size
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

import ithaca

SHAPES = {  # widths of Qwen3, with its vocabulary
    "qwen3_06b": dict(hidden_size=1024, intermediate_size=3072, num_attention_heads=16, tie_word_embeddings=True),
    "qwen3_4b": dict(hidden_size=2560, intermediate_size=9728, num_attention_heads=32),
}
TINY = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4)


def measured(step: Callable[[], Tensor], run: ithaca.Run, cuda: bool) -> tuple[float, float]:
    """-> seconds of the faster of two steps behind a first, GB at the peak"""
    seconds = []
    for _ in range(3):
        run.model.zero_grad(set_to_none=True)
        gc.collect()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        step().backward()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:]), torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_06b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=size, default="256K")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args()
    cuda, tokens = not options.cpu, options.tokens
    sizes = TINY if options.tiny else SHAPES[options.shape]
    kv = 2 if options.tiny else 8
    config = Qwen3Config(
        **sizes, num_hidden_layers=options.layers, num_key_value_heads=kv, head_dim=16 if options.tiny else 128,
        vocab_size=151_936, max_position_embeddings=tokens, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        dtype=torch.bfloat16 if cuda else torch.float32,
    )  # fmt: skip
    with torch.device("cuda" if cuda else "cpu"):
        model = AutoModelForCausalLM.from_config(config)
    stack = ithaca.Stack(recompute="keep_attention", store="host" if cuda else "gpu", tile=4096, shard_parameters=False)
    run = ithaca.prepare(model, stack, device="cuda" if cuda else "cpu")
    batch = run.shard(torch.randint(0, config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0)))
    above = torch.randn(batch.labels.shape, device=batch.labels.device) / tokens

    def with_entropy() -> Tensor:
        logprobs, entropy = run.logprobs(batch, entropy=True)
        return (above * logprobs - 1e-3 * entropy / tokens).sum()

    rows: dict[str, Callable[[], Tensor]] = {
        "run.loss": lambda: run.loss(batch),
        "run.logprobs": lambda: (above * run.logprobs(batch)).sum(),
        "run.logprobs, entropy": with_entropy,
    }
    shape = "tiny" if options.tiny else options.shape
    print(f"{shape}, {options.layers} layers, {tokens:,} tokens, vocabulary {config.vocab_size:,}", flush=True)
    base: tuple[float, float] | None = None
    for name, step in rows.items():
        seconds, peak = measured(step, run, cuda)
        base = base or (seconds, peak)
        print(
            f"  {name:24} {seconds:8.3f} s  {seconds / base[0]:5.3f}x  {peak:7.2f} GB  {peak - base[1]:+.2f} GB",
            flush=True,
        )


if __name__ == "__main__":
    main()
