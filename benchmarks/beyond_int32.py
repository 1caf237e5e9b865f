"""Tensors above 2³¹ elements through tiles, loss and store, end to end, on one GPU.

    python benchmarks/beyond_int32.py [--store host|disk]

A row of 1.1M tokens at hidden size 2048 (2.3e9 elements per hidden state), packed from documents of up to 64K tokens. The reference
is the untouched model, document by document, in float32 and in bf16: no tensor of it comes near 2³¹ elements. Compared: loss,
every parameter gradient, and the store's round trip bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
import torch.nn.functional as F

import ithaca
from ithaca.engine.model.presets import preset_config
from ithaca.engine.model.weights import cast_parameters
from ithaca.engine.offload.choice import open_store
from ithaca.verify.presets import build
from ithaca.verify.reference import expand_kv

SHAPE = dict(
    hidden_size=2048, intermediate_size=4096, vocab_size=8192, num_attention_heads=16, num_key_value_heads=4,
    head_dim=128, num_hidden_layers=1,
)  # fmt: skip


def documents(total: int, most: int) -> list[int]:
    lengths, step = [], 0
    while sum(lengths) < total:
        lengths.append(min(most - 977 * (step % 7), total - sum(lengths)))
        step += 1
    return lengths


def per_document(model, ids, lengths):
    """Sum of cross-entropies and gradients, a document at a time."""
    value, at = 0.0, 0
    count = ids.shape[1] - len(lengths)
    for length in lengths:
        piece = ids[:, at : at + length].cuda()
        logits = model(piece, use_cache=False).logits.float()
        loss = F.cross_entropy(logits[0, :-1], piece[0, 1:], reduction="sum") / count
        loss.backward()
        value += float(loss.detach())
        at += length
    return value, {name: p.grad.float() for name, p in model.named_parameters()}


def distance(a, b):
    return float((a - b).norm() / b.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", default="host", choices=("gpu", "host", "disk"))
    parser.add_argument("--tokens", type=int, default=1_100_000)
    options = parser.parse_args()
    config = preset_config("llama3", **SHAPE, max_position_embeddings=131072)
    model = cast_parameters(cast_parameters(build(config, 0), torch.bfloat16), torch.float32).cuda()
    lengths = documents(options.tokens, 65536)
    torch.manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (1, options.tokens))
    elements = options.tokens * config.hidden_size
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {elements:.3e} elements per hidden state, 2³¹ = {2**31:.3e}"
    )
    assert elements > 2**31
    reference = copy.deepcopy(model)
    expand_kv(reference)
    wide, wide_grads = per_document(reference, ids, lengths)
    del reference
    narrow, narrow_grads = per_document(cast_parameters(copy.deepcopy(model), torch.bfloat16), ids, lengths)
    run = ithaca.prepare(model, ithaca.Stack(store=options.store, heads_per_stage=4, tile=8192))
    start = time.perf_counter()
    loss = run.loss(run.shard(ids, documents=[lengths]))
    loss.backward()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    ours = {name: p.grad.full_tensor().float() for name, p in model.named_parameters()}
    print(f"loss: float32 {wide:.6f}, untouched bf16 {narrow:.6f}, ours {float(loss):.6f}")
    worst = max(
        ours, key=lambda name: distance(ours[name], wide_grads[name]) / distance(narrow_grads[name], wide_grads[name])
    )
    ratio = distance(ours[worst], wide_grads[worst]) / distance(narrow_grads[worst], wide_grads[worst])
    print(f"largest gradient distance over the untouched bf16 model's own: {ratio:.3f} ({worst})")
    print(f"step {seconds:.1f} s, peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB; {run.report()['store']}")
    big = torch.randint(0, 255, (elements + 4097,), dtype=torch.uint8, device="cuda")
    with open_store(options.store, device=big.device) as store:
        handle = store.put([big])
        (back,) = store.take(handle)
        same = torch.equal(back, big)
    print(f"store {options.store}: {big.numel():.3e} elements, bit-identical: {same}")
    good = ratio <= 1.2 and abs(float(loss) - wide) <= 1.2 * max(abs(narrow - wide), wide * 2**-9) and same
    print("ok" if good else "MISSED")
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
