"""A run that never ran, with numbers of the size of a real one: Llama 3 8B at 1M tokens on eight GPUs of 80 GB."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from ithaca.observe.report.values import CATEGORIES

GB = 10**9
GPU = 85 * GB
CONTEXT = 2**20
MODEL = {"name": "Llama 3 8B", "family": "llama", "parameters": 8_030_261_248, "layers": 32}
HARDWARE = {"gpus": 8, "gpu": "H100-80GB", "gpu_memory": GPU, "host_memory": 1000 * GB, "disk": None}
STACK = {
    "ulysses": 8, "ring": 1, "replicate": 1, "heads_per_stage": 1, "recompute": ["keep_attention"] * 32, "store": "host",
    "tile": 4096, "shard_parameters": True, "attention": "auto", "engine": "streamed", "hold": None,
}  # fmt: skip


def gb(**sizes: float) -> dict[str, int]:
    return {name: round(size * GB) for name, size in sizes.items()}


STATES = dict(parameters=4.0, gradients=4.0, optimizer=8.0)
PHASES = {
    "load": gb(parameters=4.0, fsdp=1.2, context=0.6),
    "forward": gb(**STATES, fsdp=2.1, residual=2.2, attention=4.3, exchange=3.2, tile=1.4, slack=0.9, context=0.6),
    "loss": gb(**STATES, fsdp=1.1, residual=1.1, loss=5.6, slack=0.9, context=0.6),
    "backward": gb(
        **STATES,
        fsdp=3.2,
        kept=2.1,
        residual=3.3,
        attention=8.6,
        exchange=6.4,
        tile=3.9,
        workspace=2.2,
        slack=1.4,
        context=0.6,
    ),
    "step": gb(**STATES, workspace=1.6, slack=0.8, context=0.6),
}
REASONS = (
    ("ulysses", 8, "All eight GPUs share a sequence by heads; 32 query heads divide by 8."),
    ("heads_per_stage", 1, "One head at a time holds 6.4 GB of exchange buffers instead of 25.8 GB."),
    ("recompute", "keep_attention", "Attention is not computed twice: 44 % of a step."),
    ("store", "host", "Kept activations are 69 GB per GPU, and the host has 125 GB per GPU to spare."),
    ("tile", 4096, "Larger tiles are not faster on this GPU; smaller ones cost 3 %."),
    ("train.offload_optimizer", False, "States of 16 GB fit beside the activations."),
)


def plan() -> dict[str, Any]:
    peak = sum(PHASES["backward"].values())
    return {
        "plan": 1, "model": MODEL, "hardware": HARDWARE, "context": CONTEXT, "rows": 1, "stack": STACK, "fits": True,
        "budget": 80 * GB, "spare": 80 * GB - peak, "phases": PHASES, "peak": peak, "peak_phase": "backward",
        "allocated": peak - PHASES["backward"]["slack"] - PHASES["backward"]["context"],
        "host": 69 * GB, "disk": 0,
        "time": {
            "step": 181.4, "tokens_per_second": CONTEXT / 8 / 181.4, "bound_by": "attention",
            "parts": {"attention": 158.2, "matmul": 19.6, "other": 3.6, "pcie": 5.5, "disk": 0, "links": 7.9},
        },
        "reasons": [{"field": field, "value": value, "why": why} for field, value, why in REASONS],
    }  # fmt: skip


def ladder() -> dict[str, Any]:
    rungs: list[dict[str, Any]] = []

    def rung(name: str, adds: str, rate: float | None = None, measured: float | None = None, **sizes: float) -> None:
        holders = gb(**sizes)
        peak = sum(holders.values())
        found = {"peak": round(measured * GB), "tokens_per_second": rate and rate * 0.985} if measured else None
        rungs.append(
            {
                "name": name, "adds": adds, "stack": STACK, "peak": peak, "phases": {"backward": holders}, "holders": holders,
                "largest": max(holders, key=lambda each: holders[each]), "tokens_per_second": rate, "fits": peak < 80 * GB,
                "measured": found,
            }
        )  # fmt: skip

    sharded = dict(**STATES, fsdp=3.2)
    untiled = dict(residual=6.6, attention=17.2, exchange=25.8, tile=31, loss=67.2, slack=2, context=0.6)
    tiled = dict(kept=2.1, tile=3.9, workspace=2.2, slack=1.4, context=0.6)
    rung("plain", "the untouched model", parameters=32, gradients=32, optimizer=64, kept=14600, loss=538, context=0.6)
    rung("fsdp", "parameters, gradients, states over 8 GPUs", **sharded, kept=14600, loss=538, context=0.6)
    rung("ulysses", "each GPU holds an eighth of the tokens", **sharded, kept=1825, loss=67, attention=17, exchange=26)
    rung("recompute", "only layer inputs and attention outputs stay", **sharded, kept=69, **untiled)
    rung("store", "kept tensors wait in host memory", 690, **sharded, kept=2.1, **untiled)
    whole = dict(residual=6.6, attention=17.2, exchange=25.8, loss=3)
    rung("tiles", "MLP and loss by 4,096 tokens", 702, 83.9, **sharded, **tiled, **whole)
    rung(
        "untied ulysses", "one head per stage", 715, 54.8, **sharded, **tiled, residual=6.6, attention=8.6, exchange=6.4
    )
    rung(
        "streamed layer",
        "no whole tensor but one",
        722.6,
        49.1,
        **sharded,
        **tiled,
        residual=3.3,
        attention=8.6,
        exchange=6.4,
    )
    heads = [(1, 47.7, 722), (2, 52.9, 726), (4, 63.4, 729), (8, 84.6, 731)]
    tiles = [(1024, 45.1, 655), (2048, 46.0, 701), (4096, 47.7, 722), (8192, 51.5, 724), (16384, 59.2, 724)]
    return {
        "ladder": 1, "model": MODEL, "hardware": HARDWARE, "context": CONTEXT, "rungs": rungs,
        "sweeps": {
            name: [
                {"value": value, "peak": round(peak * GB), "tokens_per_second": rate, "fits": peak < 80}
                for value, peak, rate in points
            ]
            for name, points in (("heads_per_stage", heads), ("tile", tiles))
        },
    }  # fmt: skip


def profile(moments: int = 3000) -> dict[str, Any]:
    """Forward through 32 layers, loss, backward through 32 layers, step."""
    noise = random.Random(1)
    seconds = [180 * index / (moments - 1) for index in range(moments)]
    names = [name for name in CATEGORIES if name != "other"]
    layers: dict[str, list[int]] = {name: [] for name in names}
    for index in range(moments):
        share = index / (moments - 1)
        wave = share * 64 % 1  # inside a layer
        row = dict(parameters=4.0, optimizer=8.0, gradients=0.0, fsdp=1.1 + 2.2 * (wave < 0.75), context=0.6)
        if share < 0.3:
            row |= dict(
                residual=2.2,
                attention=4.3 * math.sin(math.pi * wave),
                exchange=3.2 * (wave < 0.6),
                tile=1.4 * (wave > 0.6),
            )
        elif share < 0.33:
            row |= dict(residual=1.1, loss=5.4 * math.sin(math.pi * (share - 0.3) / 0.03))
        elif share < 0.97:
            row |= dict(
                gradients=4.0 * (share - 0.33) / 0.64, kept=2.1, residual=3.3,
                attention=8.8 * min(1, 1.4 * math.sin(math.pi * wave)), exchange=6.4 * (0.1 < wave < 0.8),
                tile=3.9 * (wave > 0.55), workspace=2.2 * (0.4 < wave < 0.85) + 0.2, slack=1.3,
            )  # fmt: skip
        else:
            row |= dict(gradients=4.0, workspace=1.6)
        for name in names:
            layers[name].append(round(row.get(name, 0.0) * GB * noise.uniform(0.995, 1.0)))
    totals = [sum(column) for column in zip(*layers.values(), strict=True)]
    top = totals.index(max(totals))
    kernels = [
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x128x128_4x1x1", 101.2, 32768),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_128x128x128_4x1x1", 55.9, 32768),
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT", 9.7, 65536),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopB_NNN", 8.8, 65536),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 6.9, 8192),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 1.4, 128),
    ] + [
        (
            f"void at::native::vectorized_elementwise_kernel<{n}, at::native::CUDAFunctor_add<c10::BFloat16>>",
            0.9 / n,
            4096 * n,
        )
        for n in range(1, 60)
    ]
    return {
        "profile": 1, "model": MODEL, "hardware": HARDWARE, "device": "NVIDIA H100", "rank_of": 8, "layers": 2,
        "context": CONTEXT, "peak": totals[top], "peak_phase": "backward",
        "categories": {name: values[top] for name, values in layers.items()},
        "phases": {"forward": gb(parameters=4.0, attention=21.0), "backward": {name: each[top] for name, each in layers.items()}},
        "planned": {
            "peak": 46 * GB, "peak_phase": "backward", "phases": {name: PHASES[name] for name in ("forward", "backward")},
            "step": 181.4, "tokens_per_second": 722.5,
        },
        "allocated": {"counted": totals[top] + GB // 20, "steps": totals[top] + GB // 10}, "tokens_per_second": 708.0,
        "busy": 179.2, "missing": ["one thing", "another thing"],
        "timeline": {
            "seconds": seconds, "categories": layers,
            "phases": [{"name": name, "from": 180 * at} for name, at in (("forward", 0), ("loss", 0.3), ("backward", 0.33))],
        },
        "copies": {"seconds": 5.61, "exposed": 0.42, "bytes_out": 69 * GB, "bytes_in": 69 * GB, "traced": {"alone": 0.31}},
        "kernels": [{"name": name, "seconds": time, "calls": calls} for name, time, calls in kernels],
        "modules": [{"name": f"model.layers.{n}.self_attn", "bytes": round((15 - n) * 1.1 * GB)} for n in range(14)],
        "lines": [{"where": f"engine/attention/stages.py:{120 + 13 * n}", "bytes": round(8.4 * GB / (n + 1))} for n in range(14)],
        "steps": [{"seconds": 186.2, "peak": totals[top]}, {"seconds": 183.9, "peak": totals[top] - GB // 10}],
    }  # fmt: skip


CONFIG = """\
description: "Llama 3 8B, all weights, 1M tokens, 8 × H100 80 GB"
model:
  folder: models/Meta-Llama-3-8B
data:
  context: 1048576
stack:
  ulysses: 8
  ring: 1
  replicate: 1
  heads_per_stage: 1
  recompute: keep_attention
  store: host
  tile: 4096
  shard_parameters: true
  attention: auto
  engine: streamed
  hold: null
  auto: false
  scratch: null
train:
  steps: 400
  rows: 1
run:
  name: {name}
  folder: runs/first
launch:
  workers: 8
"""


def about(**environment: Any) -> dict[str, Any]:
    """As a run writes it when it starts."""
    counts = {
        "documents": 11_800, "tokens": 900_000_000, "rows": 858, "long_documents": 310, "longest": 4_200_000, "split_pieces": 990,
        "unpredicted": 680, "dropped_documents": 0, "dropped_tokens": 0, "unlearnable_pieces": 3, "unlearnable_tokens": 900,
        "padding": 1_000_000, "full": 0.9989,
    }  # fmt: skip
    books = {
        "name": "data/books/*.jsonl", "share": 0.75, "rows": 858, "kind": "text", "use": None, "marked_by": None,
        "documents": 12_000, "chats": 0, "tokens": 900_000_000, "supervised": 900_000_000, "dropped": {"empty": 7},
        "left_out": {"of no known format": 2}, "counts": counts, "tokenizer": "models/Meta-Llama-3-8B",
    }  # fmt: skip
    chats = {
        **books,
        "name": "data/chats.jsonl",
        "share": 0.25,
        "kind": "preference",
        "use": "chosen",
        "documents": 40_000,
    }
    chats |= {
        "tokens": 80_000_000,
        "supervised": 20_000_000,
        "dropped": {},
        "left_out": {},
        "counts": {},
        "marked_by": "llama3",
    }
    where = {
        "time": "2026-11-15T06:27:00Z", "command": "ithaca train run.yaml --train.steps 400", "folder": "/me", "host": "node-1",
        "device": "NVIDIA H100 80GB HBM3", "ranks": 8, "nodes": 1, "system": "Linux-6.8", "cpus": 192, "memory": 2_000 * GB,
        "cuda": "13.0", "versions": {"ithaca": "0.1.0", "python": "3.12.3", "torch": "2.11.0"},
    }  # fmt: skip
    data = {"context": CONTEXT, "rows": 900, "sources": [books, chats]}
    return {"about": 1, "environment": {**where, **environment}, "data": data}


def line(step: int, steps: int, noise: random.Random) -> dict[str, Any]:
    share = step / steps
    seconds = noise.gauss(184.6, 1.2) + (41 if step == 1 else 0)
    loss = 1.55 + 4.1 * math.exp(-9 * share) + noise.gauss(0, 0.035)
    found = {
        "step": step, "time": "2026-11-15T12:00:00Z", "loss": loss,
        "lr": 1e-5 * min(1, share / 0.1, 0.5 + 0.5 * math.cos(math.pi * share)),
        "grad_norm": 0.6 + 3 * math.exp(-12 * share) + abs(noise.gauss(0, 0.12)) + (7 if step == round(0.61 * steps) else 0),
        "tokens": step * CONTEXT, "samples": step, "seconds": seconds, "tokens_per_second": CONTEXT / 8 / seconds,
        "mfu": 0.52 * 184.6 / seconds, "gpu_peak": round(49.1 * GB) + noise.randrange(GB // 5), "host_peak": round(68.7 * GB),
        "disk_peak": 0, "copy_wait": abs(noise.gauss(0.4, 0.1)),
    }  # fmt: skip
    if step % (steps // 8) == 0:
        found["eval_loss"] = loss + 0.09
    return found


def write_run(
    folder: Path,
    *,
    name: str = "llama3_8b_1m",
    steps: int = 400,
    wanted: int | None = None,
    parts: bool = True,
    **status: Any,
) -> Path:
    """A run folder as docs/reference/run_folder.md describes it, with plan, ladder and profile in it."""
    folder.mkdir(parents=True, exist_ok=True)
    noise = random.Random(0)
    lines: list[dict[str, Any]] = [{"event": "start", "time": "2026-11-15T06:27:07Z", "from_step": 0}]
    for step in range(1, steps + 1):
        lines.append(line(step, wanted or steps, noise))
        if step == steps // 3:
            lines.append({"event": "save", "time": "2026-11-15T12:00:00Z", "checkpoint": f"step-{step}", "waited": 0.2})
            lines.append({"event": "resume", "time": "2026-11-15T13:00:00Z", "from_step": step})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    (folder / "config.yaml").write_text(CONFIG.replace("{name}", json.dumps(name)))
    state = {
        "contract": 1, "state": "finished", "time": "2026-11-16T02:57:00Z", "host": "node", "pid": 1,
        "step": steps, "steps": wanted or steps,
        "checkpoint": f"checkpoints/step-{steps}", "exit_code": 0, "resume": "ithaca train runs/first/config.yaml",
    }  # fmt: skip
    (folder / "status.json").write_text(json.dumps({**state, **status}))
    (folder / "about.json").write_text(json.dumps(about()))
    if parts:
        for kind, found in (("plan", plan()), ("ladder", ladder()), ("profile", profile())):
            (folder / f"{kind}.json").write_text(json.dumps(found))
    return folder
