"""Models that need no folder: their config by name, with random weights."""

from __future__ import annotations

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    # learns the recall task in two minutes on two CPU cores: wide initial weights, so that attention differs from the mean at
    # once, and slow rotations, so that content meets over thousands of tokens
    "tiny_llama": dict(
        model_type="llama", vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    ),
}  # fmt: skip
