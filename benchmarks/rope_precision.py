"""How far are rotary positions off at length? The same relative distances at position 0 and far out, ours against float32 angles.

    python benchmarks/rope_precision.py [--dim 128] [--markdown]

Two unit vectors, a query and a key, at a distance of 0 to 100,000 tokens. Their score must not depend on where they stand. Shown is
the largest change of a score between position 0 and position p, over 256 pairs of vectors and 7 distances, for every rotary type:
with transformers' own module (angles in float32) and with ithaca's (angles in float64, rounded once). cos and sin are float32 in
both, so what differs is the angles alone. Numbers are computed here, on the CPU, in seconds.
"""

from __future__ import annotations

import argparse

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ithaca.engine.model.rope import rope_for, rotate

PLACES = (131_072, 1_048_576, 5_000_000, 10_000_000)
DISTANCES = (0, 1, 17, 256, 4_096, 32_768, 100_000)


def kinds(dim: int) -> dict[str, dict]:
    trained = {"original_max_position_embeddings": 8192}
    return {
        "default, theta 5e5": {"rope_type": "default", "rope_theta": 5e5},
        "raised theta, 5e7": {"rope_type": "default", "rope_theta": 5e7},
        "linear ×64": {"rope_type": "linear", "rope_theta": 5e5, "factor": 64.0},
        "dynamic": {"rope_type": "dynamic", "rope_theta": 5e5, "factor": 2.0},
        "yarn ×64": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 64.0, **trained},
        "llama3 ×64": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 64.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **trained,
        },
        "longrope": {
            "rope_type": "longrope", "rope_theta": 5e5, "factor": 64.0, "short_factor": [1.0] * (dim // 2),
            "long_factor": [1.0 + i for i in range(dim // 2)], **trained,
        },
    }  # fmt: skip


def measure(parameters: dict, dim: int) -> dict[str, list[float]]:
    """Per method, the largest change of a score at each of PLACES."""
    config = LlamaConfig(
        hidden_size=dim, num_attention_heads=1, num_key_value_heads=1, head_dim=dim, max_position_embeddings=8192,
        rope_parameters=dict(parameters),
    )  # fmt: skip
    longest = max(PLACES) + max(DISTANCES) + 1
    rope, module = rope_for(config, None, longest), LlamaRotaryEmbedding(config)
    module(torch.zeros(1), torch.tensor([[longest - 1]]))  # dynamic and longrope settle on this length
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(256, dim, generator=generator), dim=-1) for _ in "qk")

    def ours(places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rope.cos_sin(places, torch.float32, "cpu")

    def theirs(places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = places.float()[:, None] * module.inv_freq.float()
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * module.attention_scaling, angles.sin() * module.attention_scaling

    def scores(turn, start: int) -> torch.Tensor:
        distance = torch.tensor(DISTANCES)
        q_turned = rotate(q[:, None], *turn(start + distance))
        k_turned = rotate(k[:, None], *turn(torch.full_like(distance, start)))
        return (q_turned.double() * k_turned.double()).sum(-1)

    return {
        name: [float((scores(turn, place) - scores(turn, 0)).abs().max()) for place in PLACES]
        for name, turn in (("float32 angles", theirs), ("ithaca", ours))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    head = ["type", "angles", *(f"{place:,}" for place in PLACES)]
    rows = [
        [kind, name, *(f"{value:.1e}" for value in values)]
        for kind, parameters in kinds(options.dim).items()
        for name, values in measure(parameters, options.dim).items()
    ]
    if options.markdown:
        print("\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]))
    else:
        widths = [max(len(row[at]) for row in [head, *rows]) for at in range(len(head))]
        print(
            "\n".join(
                "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]
            )
        )


if __name__ == "__main__":
    main()
