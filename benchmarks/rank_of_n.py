"""Memory and speed of one rank of N on one GPU: true allocations and kernels, no peers.

    python benchmarks/rank_of_n.py --tokens 1M --ranks 8 --layers 2 [--heads-per-stage 1 --recompute keep_attention ...]

torch's fake process group stands for the peers: collectives take no time and bring no data, so numbers are this rank's
compute, copies and memory, and losses mean nothing. Tokens/s per GPU are extrapolated to all layers of the model from the measured
ones (embedding and loss scaled with them: a lower bound).

    --states          hold what a rank keeps of the whole model: fp32 masters and AdamW states of all layers
    --limit 80        let the allocator have this many GB
    --no-attention    memory runs at millions of tokens: a stand-in kernel allocates its tensors and computes nothing
"""

from __future__ import annotations

import argparse
import time
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

import ithaca
from ithaca.attention.kernel import Calls

SHAPES = {
    "llama3_8b": ("llama", 32, dict(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )),
    "llama32_1b": ("llama", 16, dict(
        hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        vocab_size=128256, tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )),
    "qwen3_32b": ("qwen3", 64, dict(
        hidden_size=5120, intermediate_size=25600, num_attention_heads=64, num_key_value_heads=8, head_dim=128,
        vocab_size=151936,
    )),
}  # fmt: skip


class NoMath:
    """Allocates like an attention kernel, the fp32 accumulator of dq included, and computes nothing."""

    name, packed = "none", False

    def __init__(self) -> None:
        self.calls = Calls()

    def problem(self, device, dtype, head_dim, windowed):
        return None

    def forward(self, q, k, v, *, causal, scale, window):
        return torch.zeros_like(q), torch.zeros(q.shape[:3], device=q.device)

    def backward(self, dout, q, k, v, out, lse, *, causal, scale, window):
        torch.empty(q.shape, dtype=torch.float32, device=q.device)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


def resident_states(model: nn.Module, layers: int, depth: int, ranks: int) -> torch.Tensor:
    """Stands for the fp32 masters and AdamW states of the whole model that the shortened one does not have itself."""
    per_layer = sum(p.numel() for p in model.model.layers[0].parameters())  # pyright: ignore
    measured = sum(p.numel() for p in model.parameters())
    whole = measured + per_layer * (depth - layers)
    nbytes = 12 * whole // ranks - sum(p.to_local().nbytes for p in model.parameters())  # pyright: ignore
    return torch.zeros(nbytes, dtype=torch.uint8, device="cuda")


def size(text: str) -> int:
    unit = {"K": 1024, "M": 1024**2}.get(text[-1].upper())
    return int(float(text[:-1]) * unit) if unit else int(text)


def optional(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama3_8b")
    parser.add_argument("--tokens", type=size, default=size("1M"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--states", action="store_true")
    parser.add_argument("--limit", type=float, default=None, metavar="GB")
    parser.add_argument("--no-attention", action="store_true")
    for field in fields(ithaca.Stack):
        kind = str if isinstance(field.default, str) else optional
        parser.add_argument("--" + field.name.replace("_", "-"), type=kind, default=None)
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.ranks)
    family, depth, shape = SHAPES[options.shape]
    config = AutoConfig.for_model(family, num_hidden_layers=options.layers, max_position_embeddings=2**24, **shape)
    chosen = {f.name: getattr(options, f.name) for f in fields(ithaca.Stack) if getattr(options, f.name) is not None}
    stack = ithaca.Stack(**{"ulysses": options.ranks // chosen.get("ring", 1), **chosen})
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    run = ithaca.prepare(model, stack)
    if options.no_attention:
        run.kernels.chosen = {need: NoMath() for need in run.kernels.chosen}
    torch.cuda.empty_cache()
    states = resident_states(model, options.layers, depth, options.ranks) if options.states else torch.empty(0)
    if options.limit:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.limit * 1e9 / total)
    weights = torch.cuda.memory_allocated()
    ids = torch.randint(0, config.vocab_size, (1, options.tokens))
    batch = run.shard(ids)
    for step in range(options.steps):
        run.model.zero_grad(set_to_none=True)
        torch.cuda.reset_peak_memory_stats()
        run.report()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        start = time.perf_counter()
        marks[0].record()
        loss = run.loss(batch)
        marks[1].record()
        loss.backward()
        marks[2].record()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        forward, backward = (marks[i].elapsed_time(marks[i + 1]) / 1e3 for i in (0, 1))
        peak = torch.cuda.max_memory_allocated()
        whole = seconds * depth / options.layers  # embedding and loss scaled too: a lower bound on the rate
        print(
            f"step {step}: {options.tokens} tokens, rank 0 of {options.ranks}, {options.layers} layers: forward {forward:.2f} s, "
            f"backward {backward:.2f} s, peak {peak / 1e9:.1f} GB, beyond weights {(peak - weights) / 1e9:.1f} GB, "
            f"{options.tokens / options.ranks / whole:.0f} tok/s/GPU over {depth} layers; {run.report()['store']}",
            flush=True,
        )
    math = "off" if options.no_attention else "on"
    switches = f"states {states.nbytes / 1e9:.1f} GB, limit {options.limit} GB, attention math {math}"
    print(switches)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.shape}, {stack}")


if __name__ == "__main__":
    main()
