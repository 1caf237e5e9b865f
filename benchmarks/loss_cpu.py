"""Our tiled loss against torch's chunked linear_cross_entropy, on a CPU: exactness, peak memory, time.

    python benchmarks/loss_cpu.py [--tokens 2048 --hidden 512 --vocabulary 32768 --tiles 256 32]

The work is what a training step asks for: final norm, head, cross-entropy, divided by the global count, and the gradients of
hidden states, head and norm. The global count is three times this rank's own, as if two more ranks held as many tokens
(--ranks). Every method runs in a process of its own. Time is CPU time, so that a busy machine counts less; peak memory is the
growth of the resident set over the inputs. Errors are relative, ‖ours - exact‖ / ‖exact‖, against float64 on the same (rounded)
inputs. torch's rows need torch >= 2.13.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ithaca.engine.objective.cross_entropy import IGNORE, LossTerms, tiled_loss


def inputs(options: argparse.Namespace, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states [1, s, d], head [V, d], norm [d], labels [1, s]; the first eighth carries no loss."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.tokens, options.hidden, options.vocabulary)
    x = torch.randn(1, shape[0], shape[1], generator=generator)
    head = torch.randn(shape[2], shape[1], generator=generator) * shape[1] ** -0.5
    norm = 1 + 0.2 * torch.randn(shape[1], generator=generator)
    labels = torch.randint(0, shape[2], (1, shape[0]), generator=generator)
    labels[:, : shape[0] // 8] = IGNORE
    # one set of numbers for both precisions of a dtype: those that it can hold
    x, head, norm = (t.to(dtype).to(torch.float64 if options.method == "exact" else dtype) for t in (x, head, norm))
    return (*(t.requires_grad_() for t in (x, head, norm)), labels)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As Hugging Face's Llama does it: in float32 at least, rounded, then scaled."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def whole(x, head, norm, labels, count, tile):
    logits = F.linear(rms_norm(x, norm), head)[0]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, labels[0], ignore_index=IGNORE, reduction="sum") / count


def ours(x, head, norm, labels, count, tile):
    return tiled_loss(
        x, labels, lambda t: F.linear(rms_norm(t, norm), head), [head, norm],
        tile=tile, terms=LossTerms(), scale=1 / count,
    )  # fmt: skip


def torch_chunked(reduction: str):
    def loss(x, head, norm, labels, count, tile):
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=tile)  # tile None: torch's own choice
        normed = rms_norm(x, norm)[0]
        value = F.linear_cross_entropy(
            normed, head, labels[0], reduction=reduction, ignore_index=IGNORE, options=options
        )
        if reduction == "sum":
            return value / count
        return value * (int((labels != IGNORE).sum()) / count)

    return loss


METHODS = {
    "exact": whole,
    "whole logits": whole,
    "ours": ours,
    "torch, sum": torch_chunked("sum"),
    "torch, mean": torch_chunked("mean"),
}


def resident(field: str) -> int:
    """Bytes of VmRSS (now) or VmHWM (most so far)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def child(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    x, head, norm, labels = inputs(options, getattr(torch, options.dtype))
    count = options.ranks * int((labels != IGNORE).sum())
    method = METHODS[options.method]
    small = tuple(t.detach()[..., :8, :].clone().requires_grad_() for t in (x, head))
    method(*small, norm, labels[:, -8:] % 8, count, 4).backward()  # what is made at the first call is not counted
    norm.grad = None
    seconds, growth, value = [], 0, torch.zeros(())
    for _ in range(1 if options.method == "exact" else options.repeats):
        for t in (x, head, norm):
            t.grad = None
        before = resident("VmRSS")
        forget_peak()
        start = time.process_time()
        value = method(x, head, norm, labels, count, options.tile)
        value.backward()
        seconds.append(time.process_time() - start)
        growth = max(growth, resident("VmHWM") - before)
    found = {"loss": value.detach(), "dx": x.grad, "dhead": head.grad, "dnorm": norm.grad}
    kept = Path(options.folder) / f"{options.dtype}.pt"
    errors = {}
    if options.method == "exact":
        torch.save(found, kept)
    else:
        exact = torch.load(kept, weights_only=True)
        errors = {name: distance(found[name], exact[name]) for name in found}  # pyright: ignore[reportArgumentType]
    print(json.dumps({"seconds": min(seconds), "growth": growth, "dtype": str(value.dtype), **errors}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--tiles", type=int, nargs="+", default=[256, 32])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=3, help="the global count is so many times this rank's own")
    for name in ("method", "dtype", "folder", "tile"):  # of a child process
        parser.add_argument("--" + name, type=int if name == "tile" else str, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.method:
        return child(options)
    print(
        f"torch {torch.__version__}, {options.threads} thread(s), {options.tokens} tokens, hidden {options.hidden}, "
        f"vocabulary {options.vocabulary}, {options.ranks} rank(s); best of {options.repeats}"
    )
    head = f"{'dtype':9} {'method':13} {'tile':>5} {'CPU s':>6} {'peak MB':>8} {'loss':>8} {'dx':>8} {'dhead':>8} {'dnorm':>8}"
    print(head)
    known = [name for name in METHODS if "torch" not in name or hasattr(F, "linear_cross_entropy")]
    with tempfile.TemporaryDirectory() as folder:
        for dtype in ("float32", "bfloat16"):
            for method in known:
                tiles = [None] if method in ("exact", "whole logits") else options.tiles
                for tile in [None, *tiles] if "torch" in method else tiles:
                    command = [sys.executable, __file__, *sys.argv[1:], "--method", method, "--dtype", dtype]
                    command += ["--folder", folder] + ([] if tile is None else ["--tile", str(tile)])
                    done = subprocess.run(command, check=True, capture_output=True, text=True)
                    row = json.loads(done.stdout.splitlines()[-1])
                    if method == "exact":
                        continue
                    errors = " ".join(f"{row[name]:8.1e}" for name in ("loss", "dx", "dhead", "dnorm"))
                    label = "auto" if tile is None and "torch" in method else tile or "-"
                    print(
                        f"{dtype:9} {method:13} {label:>5} {row['seconds']:6.2f} {row['growth'] / 1e6:8.0f} {errors}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
