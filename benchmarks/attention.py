"""Attention kernels by themselves: TFLOP/s of forward and backward at several lengths.

    python benchmarks/attention.py [--lengths 64K,256K,1M] [--kernels cudnn,fa4,flash]

Causal, bf16, D=128; one query head per KV head and four. FLOPs are those of the causal triangle: 2·S²·H·D forward, 2.5 times that
backward. Median of the repeats; results are checked for being finite, not for being right (tests/gpu/test_kernels.py does that).
"""

from __future__ import annotations

import argparse
from functools import partial

import torch

from ithaca.engine.attention.backends import BACKENDS


def size(text: str) -> int:
    unit = {"K": 1024, "M": 1024**2}.get(text[-1].upper())
    return int(float(text[:-1]) * unit) if unit else int(text)


def timed(work, repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return sorted(times)[len(times) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="64K,256K,1M")
    parser.add_argument("--kernels", default=",".join(name for name in BACKENDS if name != "cpu"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--query-tile", default=None, help="rows of a query tile of cudnn; 'none' = one call")
    options = parser.parse_args()
    width = options.head_dim
    device = torch.device("cuda", 0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'kernel':8} {'heads':>6} {'tokens':>9} {'forward TFLOP/s':>16} {'backward TFLOP/s':>17}")
    for name in options.kernels.split(","):
        kernel = BACKENDS[name]()
        reason = kernel.problem(device, torch.bfloat16, width, False)
        if options.query_tile and hasattr(kernel, "query_tile"):
            kernel.query_tile = None if options.query_tile == "none" else size(options.query_tile)  # pyright: ignore
        if reason:
            print(f"{name}: {reason}")
            continue
        for heads in (1, 4):
            for length in map(size, options.lengths.split(",")):
                torch.manual_seed(0)
                q, dout = (torch.randn(1, heads, length, width, device=device, dtype=torch.bfloat16) for _ in range(2))
                k, v = (torch.randn(1, 1, length, width, device=device, dtype=torch.bfloat16) for _ in range(2))
                mask = {"causal": True, "scale": width**-0.5, "window": None}
                repeats = 5 if length <= 2**18 else 2
                out, lse = kernel.forward(q, k, v, **mask)
                forward = timed(partial(kernel.forward, q, k, v, **mask), repeats)
                backward = timed(partial(kernel.backward, dout, q, k, v, out, lse, **mask), repeats)
                assert bool(out.isfinite().all()) and bool(lse.isfinite().all())
                flops = 2 * length**2 * heads * width / 1e12
                print(
                    f"{name:8} {heads:4}/1 {length:9} {flops / forward:16.0f} {2.5 * flops / backward:17.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
