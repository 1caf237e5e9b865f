"""Weights from a folder into a GPU's memory, read by several threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ithaca.engine.model import weights
from ithaca.engine.model.weights import Folder

pytestmark = pytest.mark.gpu


def test_every_piece_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from safetensors.torch import save_file

    monkeypatch.setattr(weights, "_BUFFER", 1 << 12)  # many pieces, the last ones not full
    random = torch.Generator().manual_seed(0)
    stored = {
        name: torch.randn(shape, generator=random).to(dtype)
        for name, shape, dtype in [
            ("a", (999, 77), torch.bfloat16),
            ("b", (5, 3001), torch.float32),
            ("c", (7,), torch.float16),
        ]
    }
    save_file(stored, tmp_path / "model.safetensors")
    there = {name: torch.empty(t.shape, device="cuda") for name, t in stored.items()}
    with Folder(tmp_path) as files:
        for name, t in there.items():
            files.read(name, 0, t, t.shape)
    for name, t in there.items():
        assert torch.equal(t.cpu(), stored[name].float())


def test_a_file_that_ends_early_is_an_error(tmp_path: Path):
    from safetensors.torch import save_file

    save_file({"a": torch.randn(500, 500)}, tmp_path / "model.safetensors")
    with pytest.raises(OSError, match="ends early"), Folder(tmp_path) as files:
        assert files.shape("a") == (500, 500)
        with (tmp_path / "model.safetensors").open("r+b") as file:
            file.truncate(10_000)
        files.read("a", 0, torch.empty(500, 500, device="cuda"), torch.Size((500, 500)))
