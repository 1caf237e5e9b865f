"""What a save pays to know that every number is finite: one look at weights and AdamW states, where they lie.

    python benchmarks/finite_cost.py [--model llama3_8b --ranks 8 --repeats 20 --device cuda]

Two cases: rank 0 of `--ranks`, with its rows of every parameter as FSDP2 cuts them, and one GPU that holds everything, with as many
layers of the model as fit into `--share` of the free memory. Each parameter is there in float32, with two states of its size and a
step. Timed is `not_finite` (src/ithaca/storage/finite.py) from call to answer, the host's wait included; beside it the plain way,
`isfinite().all()` for one tensor after the other. Medians; GB/s are bytes of the tensors per second. `--device cpu` is for
`train.offload_optimizer`, where the states are on the host.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ithaca.engine.model.presets import PRESETS
from ithaca.storage.finite import not_finite

STATES = ("weight", "exp_avg", "exp_avg_sq")


def shapes_of(preset: str, layers: int | None = None) -> dict[str, torch.Size]:
    """Name and shape of every parameter of a preset of the planner, with all layers or so many."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(PRESETS[preset])
    if layers is not None:
        settings["num_hidden_layers"] = layers
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def size_of(shapes: dict[str, torch.Size]) -> int:
    return sum(shape.numel() * 4 * len(STATES) for shape in shapes.values())


def of_rank_0(shapes: dict[str, torch.Size], ranks: int) -> dict[str, torch.Size]:
    return {name: torch.Size((-(-shape[0] // ranks), *shape[1:])) for name, shape in shapes.items()}


def that_fit(preset: str, room: float) -> tuple[int, dict[str, torch.Size]]:
    """As many layers as fit, and their shapes."""
    layers = int(PRESETS[preset]["num_hidden_layers"])
    one, two = (size_of(shapes_of(preset, count)) for count in (1, 2))
    most = min(layers, 1 + int((room - one) // (two - one)))
    if most < 1:
        raise SystemExit(f"not even one layer of {preset} fits into {room / 1e9:.1f} GB")
    return most, shapes_of(preset, most)


def tensors_of(shapes: dict[str, torch.Size], device: torch.device) -> dict[str, Tensor]:
    found = {f"{name}.{kind}": torch.zeros(shape, device=device) for name, shape in shapes.items() for kind in STATES}
    return found | {f"{name}.step": torch.zeros((), device=device) for name in shapes}


def one_by_one(tensors: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]


def measure(look: Callable[[dict[str, Tensor]], Any], tensors: dict[str, Tensor], repeats: int) -> tuple[float, int]:
    """-> median seconds; bytes of GPU memory it took on the way"""
    cuda = next(iter(tensors.values())).is_cuda
    times, before = [], 0
    for turn in range(repeats + 1):  # the first warms up
        if cuda:
            torch.cuda.synchronize()
            if turn == 1:
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        assert look(tensors) == []
        if turn:
            times.append(time.perf_counter() - begin)
    return statistics.median(times), torch.cuda.max_memory_allocated() - before if cuda else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3_8b", help="a preset of the planner (default: llama3_8b)")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--share", type=float, default=0.8, help="of the free memory, for the whole model")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        name, room = torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[0] * options.share
    else:
        from ithaca.engine.offload.host import available_memory

        name, room = "CPU", available_memory() * options.share
    print(f"{options.model} on {name}, {options.repeats} turns; torch {torch.__version__}")
    print("| what | tensors | GB | not_finite ms | GB/s | memory on the way MB | one by one ms | GB/s |")
    print("|---|---|---|---|---|---|---|---|")
    layers, fitting = that_fit(options.model, room)
    shard = of_rank_0(shapes_of(options.model), options.ranks)
    for what, shapes in {f"rank 0 of {options.ranks}": shard, f"whole, {layers} layers": fitting}.items():
        if size_of(shapes) > room:
            print(f"| {what} | does not fit into {room / 1e9:.1f} GB |")
            continue
        tensors = tensors_of(shapes, device)
        size = size_of(shapes)
        (fused, memory), (plain, _) = (measure(look, tensors, options.repeats) for look in (not_finite, one_by_one))
        print(
            f"| {what} | {len(tensors)} | {size / 1e9:.1f} | {fused * 1e3:.2f} | {size / fused / 1e9:.0f} | {memory / 1e6:.1f} | "
            f"{plain * 1e3:.2f} | {size / plain / 1e9:.0f} |"
        )
        del tensors


if __name__ == "__main__":
    main()
