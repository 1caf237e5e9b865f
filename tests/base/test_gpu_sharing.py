"""Ranks that share a GPU: only where NCCL can, only if asked for, and refused in words elsewhere. tests/ranks has them for real."""

from __future__ import annotations

import pytest
import torch

from ithaca.base import gpu_sharing
from ithaca.base.gpu_sharing import nccl_version, sharing_variables, why_not_shared
from ithaca.base.processes.pool import Workers
from ithaca.cli.main import main

NONE = "torch sees no GPU here; without one, ranks run on the CPU (launch.cpu, --device cpu, --cpu)"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")


@pytest.mark.parametrize(
    ("version", "why"),
    [
        (None, "no NCCL is loaded here"),
        ((2, 28, 9), "NCCL 2.28.9 is loaded, and ranks can share a GPU from 2.30 on; torch 2.14 brings one"),
        ((2, 30, 0), None),
        ((3, 0, 1), None),
    ],
)
def test_which_nccl_can(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int] | None, why: str | None):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_sharing, "nccl_version", lambda: version)
    said = why_not_shared()
    assert said is why if why is None else said is not None and said.startswith(why)


def test_kernels_of_all_ranks_fit_beside_each_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NCCL_MAX_CTAS", raising=False)
    blocks = [sharing_variables(ranks, gpus)["NCCL_MAX_CTAS"] for ranks, gpus in ((2, 1), (8, 1), (8, 2), (64, 1))]
    assert blocks == ["16", "4", "8", "1"]
    assert sharing_variables(8, 1)["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    monkeypatch.setenv("NCCL_MAX_CTAS", "2")
    assert sharing_variables(8, 1)["NCCL_MAX_CTAS"] == "2", "a user knows better"


def test_without_the_protocol_that_sums_wrongly(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NCCL_PROTO", raising=False)
    assert sharing_variables(2, 1)["NCCL_PROTO"] == "^LL128"


@no_gpu
def test_without_a_gpu():
    assert nccl_version() is None and why_not_shared() == NONE
    with pytest.raises(ValueError, match=r"^2 ranks cannot share 0 GPUs: torch sees no GPU here; "):
        Workers(2, device="cuda", share_gpu=True)


TRAIN = ["train", "--recipe", "tiny_cpu", "--share-gpu"]


@no_gpu
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["verify", "llama3", "--world", "2", "--share-gpu"], "--share-gpu: torch sees no GPU here"),
        (["verify", "llama3", "--device", "cpu", "--share-gpu"], "--share-gpu: --device cpu was asked for"),
        (
            TRAIN,
            "launch.share_gpu needs launch.workers, how many ranks share the GPUs; on the CPU there is nothing to share",
        ),
        ([*TRAIN, "--launch.cpu", "null"], "launch.share_gpu needs launch.workers"),
        ([*TRAIN, "--launch.cpu", "null", "--launch.workers", "4"], "torch sees no GPU here"),
    ],
)
def test_the_commands_refuse_it(words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path):
    if words[0] == "train":
        words = [*words, "--run.folder", str(tmp_path / "run")]
    assert main(words) == 2
    assert said in capsys.readouterr().err
