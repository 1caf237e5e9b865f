"""Memory and speed of one rank of N on one GPU: true allocations and kernels, no peers.

    python benchmarks/rank_of_n.py --tokens 1M --ranks 8 --layers 2 [--stack.heads_per_stage 1 --stack.recompute layer ...]

torch's fake process group stands for the peers: collectives take no time and bring back what was sent, so that kernels work on
numbers like those of a real run. Figures are this rank's compute, copies and memory; losses mean nothing.

Tokens/s per GPU are extrapolated from the measured layers to all layers of the model. What happens outside the layers (embedding,
final norm, head, loss) happens once per step whatever the depth, so it is timed by itself and not scaled:
whole = fixed + (step - fixed) × depth / layers. The second number, "at least", scales the step as a whole.

    --states          hold what a rank keeps of the whole model: fp32 masters and AdamW states of all layers
    --limit 80        let the allocator have this many GB
    --no-attention    memory runs at millions of tokens: a stand-in kernel allocates its tensors and computes nothing
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import ithaca
from ithaca.config import add_stack_options, read_stack
from ithaca.engine.model.presets import PRESETS
from ithaca.engine.model.shrink import cut
from ithaca.planner.dry_run.kernels import DryKernel
from ithaca.stack import require


def shape_of(preset: str) -> tuple[str, int, dict[str, Any]]:
    """Family, depth and sizes of one of the planner's presets."""
    sizes = dict(PRESETS[preset])
    del sizes["max_position_embeddings"]
    return sizes.pop("model_type"), sizes.pop("num_hidden_layers"), sizes


SHAPES = {
    name: shape_of(name)
    for name in (
        "llama3_8b", "llama32_1b", "llama32_3b", "qwen3_32b", "qwen3_30b_a3b", "gpt_oss_20b", "qwen3_next_80b_a3b", "qwen35_9b",
    )
}  # fmt: skip


def config_of(shape: tuple[str, int, dict[str, Any]], layers: int, **more: Any) -> Any:
    """Hugging Face's, of the first layers of a shape, for any length."""
    from transformers import AutoConfig  # here: it takes seconds to import

    family, depth, sizes = shape
    fields = cut(sizes | {"num_hidden_layers": depth}, depth, list(range(layers)))
    return AutoConfig.for_model(family, **fields, max_position_embeddings=2**24, **more)


class Marks:
    """Where the time of a step goes: forward, backward, and of both the part inside the layers.

    Hooks on the first and the last layer mark when a step enters and leaves them: tensor hooks do it in backward, since they
    fire in the order of the gradients whatever FSDP2, a checkpoint or our own functions do in between. Marks are CUDA
    events, so they cost nothing and tell the GPU's time; on a CPU they are plain clock readings.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.at: dict[str, Any] = {}
        if layers:  # none, where a compiler has made one piece of them all
            layers[0].register_forward_pre_hook(self._enter, prepend=True)  # before FSDP2 gathers the layer
            layers[-1].register_forward_hook(self._leave)

    def clear(self) -> None:
        self.at = {}

    def mark(self, name: str) -> None:
        if self.cuda:
            self.at[name] = torch.cuda.Event(enable_timing=True)
            self.at[name].record()
        else:
            self.at[name] = time.perf_counter()

    def between(self, start: str, stop: str) -> float:
        if self.cuda:
            return self.at[start].elapsed_time(self.at[stop]) / 1e3
        return self.at[stop] - self.at[start]

    def seconds(self) -> dict[str, float]:
        """After a step that marked "start", "loss" and "end", and a synchronize."""
        forward, backward = self.between("start", "loss"), self.between("loss", "end")
        if "enter" not in self.at:
            return {"forward": forward, "backward": backward}
        inside = self.between("enter", "leave") + self.between("enter backward", "leave backward")
        return {"forward": forward, "backward": backward, "fixed": max(forward + backward - inside, 0.0)}

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if "enter" not in self.at:  # a checkpoint passes here again in backward
            self.mark("enter")
            args[0].register_hook(lambda grad: self.mark("leave backward"))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if "leave" not in self.at:
            self.mark("leave")
            (out[0] if isinstance(out, tuple) else out).register_hook(lambda grad: self.mark("enter backward"))


def whole_depth(step: float, fixed: float, layers: int, depth: int) -> dict[str, float]:
    """Seconds of a step at the model's real depth, from a step of fewer layers."""
    per_layer = (step - fixed) / layers
    return {"per_layer": per_layer, "whole": fixed + per_layer * depth, "at_most": step * depth / layers}


def resident_states(model: nn.Module, layers: int, depth: int, ranks: int, device: torch.device) -> torch.Tensor:
    """Stands for the fp32 masters and AdamW states of the whole model that the shortened one does not have itself."""
    per_layer = sum(p.numel() for p in model.model.layers[0].parameters())  # pyright: ignore
    measured = sum(p.numel() for p in model.parameters())
    whole = measured + per_layer * (depth - layers)
    nbytes = 12 * whole // ranks - sum(p.to_local().nbytes for p in model.parameters())  # pyright: ignore
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


def measure(
    shape: tuple[str, int, dict[str, Any]],
    stack: ithaca.Stack,
    *,
    tokens: int,
    ranks: int,
    layers: int,
    steps: int = 2,
    states: bool = False,
    limit: float | None = None,
    attention: bool = True,
    one_call: bool = False,
    device: str = "cuda",
    each: Callable[[dict[str, Any]], object] = lambda record: None,
) -> dict[str, Any]:
    """Run steps as rank 0 of `ranks`, in a process that has no process group yet. -> the record of the last step.

    shape: an entry of SHAPES. one_call: cuDNN does not tile its queries. `each` gets the record of every step as it ends; a
    true answer ends the run.
    """
    from transformers import AutoModelForCausalLM  # here: it takes seconds to import

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    depth = shape[1]
    on = torch.device(device, 0) if device == "cuda" else torch.device(device)
    config = config_of(shape, layers)
    with on:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    run = ithaca.prepare(model, stack, device=on)
    if not attention:
        run.kernels.chosen = {need: DryKernel("fa4") for need in run.kernels.chosen}  # pyright: ignore
    for kernel in run.kernels.chosen.values():
        if one_call and hasattr(kernel, "query_tile"):
            kernel.query_tile = None  # pyright: ignore[reportAttributeAccessIssue]
    if attention:  # kernels that are compiled at first use are compiled here, not in the first step
        run.loss(run.shard(torch.randint(0, config.vocab_size, (1, 512 * ranks)))).backward()
        run.model.zero_grad(set_to_none=True)
    run.fingerprint = None  # it would refuse hooks on layers; these only look
    marks = Marks(model.model.layers, on)
    cuda = on.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
    held = resident_states(model, layers, depth, ranks, on) if states else torch.empty(0)
    if limit and cuda:
        torch.cuda.set_per_process_memory_fraction(limit * 1e9 / torch.cuda.get_device_properties(0).total_memory)
    weights = torch.cuda.memory_allocated() if cuda else 0
    batch = run.shard(torch.randint(0, config.vocab_size, (1, tokens)))
    record: dict[str, Any] = {}
    for step in range(steps):
        run.model.zero_grad(set_to_none=True)
        run.report()
        marks.clear()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        marks.mark("start")
        loss = run.loss(batch)
        marks.mark("loss")
        loss.backward()
        marks.mark("end")
        if cuda:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        parts = marks.seconds()
        whole = whole_depth(seconds, parts["fixed"], layers, depth)
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        record = {
            "step": step,
            "seconds": seconds,
            **parts,
            **whole,
            "tokens_per_second": tokens / ranks / whole["whole"],
            "at_least": tokens / ranks / whole["at_most"],
            "peak": peak,
            "beyond_weights": peak - weights,
            "states": held.nbytes,
            "store": run.report()["store"],
        }
        if each(record):
            break
    return record


def size(text: str) -> int:
    unit = {"K": 1024, "M": 1024**2}.get(text[-1].upper())
    return int(float(text[:-1]) * unit) if unit else int(text)


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
    parser.add_argument("--one-call", action="store_true", help="cuDNN attends a stage in one call, not by query tiles")
    add_stack_options(
        parser, "what is not given has its default, and ulysses is the ranks that a ring leaves", older="field"
    )
    options = parser.parse_args()
    chosen, problems = read_stack(options)
    require(problems, "this stack cannot run")
    stack = ithaca.Stack(**{"ulysses": options.ranks // chosen.get("ring", 1), **chosen})
    depth = SHAPES[options.shape][1]

    def each(step: dict[str, Any]) -> None:
        print(
            f"step {step['step']}: {options.tokens} tokens, rank 0 of {options.ranks}, {options.layers} layers: "
            f"forward {step['forward']:.2f} s, backward {step['backward']:.2f} s ({step['per_layer']:.2f} s a layer, "
            f"{step['fixed']:.2f} s outside them), peak {step['peak'] / 1e9:.1f} GB, beyond weights "
            f"{step['beyond_weights'] / 1e9:.1f} GB, {step['tokens_per_second']:.0f} tok/s/GPU over {depth} layers (at least "
            f"{step['at_least']:.0f}); {step['store']}",
            flush=True,
        )

    last = measure(
        SHAPES[options.shape],
        stack,
        tokens=options.tokens,
        ranks=options.ranks,
        layers=options.layers,
        steps=options.steps,
        states=options.states,
        limit=options.limit,
        attention=not options.no_attention,
        one_call=options.one_call,
        each=each,
    )
    math = "off" if options.no_attention else "on"
    switches = f"states {last['states'] / 1e9:.1f} GB, limit {options.limit} GB, attention math {math}"
    print(switches)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.shape}, {stack}")


if __name__ == "__main__":
    main()
