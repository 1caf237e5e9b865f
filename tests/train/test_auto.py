"""`stack: auto` on GPUs: the planner is asked about the hardware that is there. None is here: torch's answers are given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ithaca.config import load
from ithaca.planner.config import hf_config
from ithaca.train.build import automatic_stack, hardware_here, planned
from ithaca.train.ends import Failed

CUDA = torch.device("cuda", 0)


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch):
    """A machine of eight GPUs, as torch describes it."""

    def of(name: str, memory: float, major: int = 9) -> None:
        found = SimpleNamespace(name=name, total_memory=int(memory), major=major)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    return of


def config(tmp_path: Path, **data):
    (tmp_path / "run.yaml").write_text(
        "model: {folder: llama3_8b}\n"
        f"data: {{context: {data.get('context', '1M')}, sources: [{{synthetic: recall}}]}}\n"
        f"train: {{steps: 1, rows: {data.get('rows', 1)}}}\nlaunch: {{gpu_memory: {data.get('memory', 'null')}}}\n"
    )
    return load(str(tmp_path / "run.yaml")).config


def test_the_hardware_is_recognised(tmp_path: Path, eight):
    eight("NVIDIA H200", 150.1e9)
    found = hardware_here(config(tmp_path), 8, CUDA)
    assert (found.gpu.name, found.gpu.memory, found.count, found.per_node) == ("H200", 150_100_000_000, 8, 8)
    assert found.gpu.measured and found.host and found.disk
    assert hardware_here(config(tmp_path, memory="80GB"), 8, CUDA).gpu.memory == 80_000_000_000
    eight("NVIDIA A100-SXM4-40GB", 42.4e9, major=8)
    assert hardware_here(config(tmp_path), 8, CUDA).gpu.kernel == "flash"
    eight("NVIDIA Something New", 300e9, major=12)
    assert hardware_here(config(tmp_path), 8, CUDA).gpu.name == "NVIDIA Something New"


def test_the_planner_chooses(tmp_path: Path, eight):
    eight("NVIDIA H100 80GB HBM3", 84.9e9)
    hf = hf_config("llama3_8b")
    stack, found = automatic_stack(config(tmp_path, context="64K"), hf, 8, CUDA)
    assert found is not None and found.fits and stack == found.stack and stack.ulysses == 8
    looked = planned(config(tmp_path, context="64K"), hf, 8, CUDA, stack)
    assert looked.memory.phases == found.memory.phases
    assert automatic_stack(config(tmp_path), hf, 4, torch.device("cpu"))[1] is None


def test_what_does_not_fit_is_said_before_anything_starts(tmp_path: Path, eight):
    eight("NVIDIA GeForce RTX 4090", 25.3e9, major=8)
    with pytest.raises(Failed, match="does not fit") as error:
        automatic_stack(config(tmp_path), hf_config("llama31_70b"), 8, CUDA)
    assert error.value.exit_code == 5 and "what would fit" in str(error.value)
