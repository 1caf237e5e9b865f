"""Nothing that is not finite is saved, exported or gone on from; and nothing good is lost for it."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ithaca.base.processes.pool import Workers
from ithaca.cli.main import main
from ithaca.storage import check
from ithaca.storage.checkpoint import CheckpointError, Damaged, NotFiniteValues, load, prune, save
from ithaca.storage.export import export_checkpoint, export_model
from ithaca.storage.finite import not_finite

from .runs import started, train, weights
from .test_export import FP32, tensors_in

ALONE = dict(shard_parameters=False)
LARGE = torch.finfo(FP32).max  # finite, and infinite in bf16


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


# -- looking ----------------------------------------------------------------------------------------------------------


def test_the_largest_numbers_are_finite_and_none_beyond():
    good: dict[str, Tensor] = {
        dtype.__str__(): torch.full((1000,), sign * torch.finfo(dtype).max, dtype=dtype)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        for sign in (1, -1)
    }
    good |= {"none": torch.empty(0, 4), "codes": torch.full((9,), 255, dtype=torch.uint8), "one": torch.tensor(1.0)}
    assert not_finite(good) == []
    for name, tensor in good.items():
        for value in (math.nan, math.inf, -math.inf) if tensor.is_floating_point() and tensor.numel() else ():
            bad = tensor.clone()
            bad.view(-1)[-1] = value
            assert not_finite({**good, name: bad}) == [name]


# -- saving -----------------------------------------------------------------------------------------------------------


def poisoned_saves(folder: str) -> list[Any]:
    """Rank 1 alone holds a number that is not finite: in a weight, in a state. -> what each save said; what is on disk then"""
    run, optimizer = started(stack=dict(ulysses=2), num_hidden_layers=1)
    train(run, optimizer, range(1))
    save(Path(folder), run, optimizer, {}, step=1)
    weight: Any = run.model.get_parameter("lm_head.weight")
    said = []
    for target in (weight, optimizer.state[weight]["exp_avg_sq"]):
        for asynchronous in (False, True):
            local, rank = target.detach().to_local(), dist.get_rank()
            before = local[0, 0].clone()
            if rank == 1:
                local[0, 0] = math.inf if asynchronous else math.nan
            with pytest.raises(NotFiniteValues) as caught:
                save(Path(folder), run, optimizer, {}, step=2, asynchronous=asynchronous)
            local[0, 0] = before
            said.append((str(caught.value), caught.value.exit_code))
    dist.barrier()
    left = sorted(path.name for path in Path(folder).iterdir())
    save(Path(folder), run, optimizer, {}, step=2)
    return [said, left]


def test_one_rank_that_is_not_finite_stops_the_save_on_all(workers: Workers, tmp_path: Path):
    for said, left in workers.run(poisoned_saves, str(tmp_path), world=2):
        assert left == ["LATEST", "RUN", "step-1"], "nothing was written, and the good one stands"
        for (text, code), (name, count) in zip(
            said,
            [
                (name, count)
                for name in ("lm_head.weight", "optimizer.lm_head.weight.exp_avg_sq")
                for count in ("1 NaN and 0 infinite", "0 NaN and 1 infinite")
            ],
            strict=True,
        ):
            assert text.startswith(f"rank 1: {name} is not finite ({count} of ") and code == 6
    assert check.verify(tmp_path / "step-2") == [], "and it goes on"


def test_a_state_that_is_a_number_counts_too(tmp_path: Path):
    run, optimizer = started(stack=ALONE, num_hidden_layers=1)
    train(run, optimizer, range(1))
    optimizer.state[run.model.get_parameter("lm_head.weight")]["scale"] = math.nan
    with pytest.raises(NotFiniteValues, match=r"optimizer\.lm_head\.weight\.scale is nan"):
        save(tmp_path, run, optimizer, {}, step=1)
    assert list(tmp_path.iterdir()) == []


# -- checkpoints of an ithaca that did not look -----------------------------------------------------------------------


def old_bad(folder: Path, run: Any, optimizer: Any, step: int, target: Tensor, value: float = math.nan) -> Path:
    """A checkpoint that is as it was saved, but holds a number that is not finite, as older versions wrote them."""
    before = target.view(-1)[0].clone()
    target.view(-1)[0] = value
    with mock.patch("ithaca.storage.checkpoint.require_finite"):
        path = save(folder, run, optimizer, {}, step=step).wait()
    target.view(-1)[0] = before
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["finite"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[Path, Any, Any]:
    """A run folder: step 2 is good, step 4 has a weight and step 6 a state that is not finite."""
    folder = tmp_path / "run/checkpoints"
    run, optimizer = started(stack=ALONE, num_hidden_layers=1)
    train(run, optimizer, range(1))
    save(folder, run, optimizer, {}, step=2)
    weight = run.model.get_parameter("model.norm.weight")
    old_bad(folder, run, optimizer, 4, weight.detach())
    old_bad(folder, run, optimizer, 6, optimizer.state[weight]["exp_avg"], -math.inf)
    return folder, run, optimizer


def test_verify_names_the_tensors(mixed: Any, capsys: pytest.CaptureFixture[str]):
    folder, _, _ = mixed
    assert main(["ckpt", "verify", str(folder)]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in lines if line.startswith("step-")] == [
        "step-6: DAMAGED", "step-4: DAMAGED", "step-2: ok"
    ]  # fmt: skip
    assert "  optimizer.model.norm.weight.exp_avg is not finite (0 NaN and 1 infinite of 64 numbers)" in lines
    assert "  model.norm.weight is not finite (1 NaN and 0 infinite of 64 numbers)" in lines
    assert lines[-1] == f"2 of 3 damaged; newest good one: {folder / 'step-2'}"


def test_going_on_takes_the_newest_good_one_and_says_so(mixed: Any, caplog: pytest.LogCaptureFixture):
    folder, run, optimizer = mixed
    with pytest.raises(Damaged, match=r"step-4 holds numbers that are not finite: model\.norm\.weight is not finite"):
        load(folder / "step-4", run, optimizer)
    expected = weights(run)
    run, optimizer = started(stack=ALONE, seed=5, num_hidden_layers=1)
    with caplog.at_level(logging.WARNING, "ithaca"):
        assert load(folder, run, optimizer)["step"] == 2
    assert [f"Using step-{step}" in caplog.text for step in (4, 2)] == [True, True]
    assert all(torch.equal(value, expected[name]) for name, value in weights(run).items())
    save(folder, run, optimizer, {}, step=4)
    assert check.verify(folder / "step-4") == [], "a new one takes the place of the bad one"


def test_none_that_is_good_is_an_error_on_all_ranks_and_overwrites_nothing(workers: Workers, tmp_path: Path):
    run, optimizer = started(stack=ALONE, num_hidden_layers=1)
    train(run, optimizer, range(1))
    old_bad(tmp_path, run, optimizer, 1, run.model.get_parameter("lm_head.weight").detach())
    for text in workers.run(refused, str(tmp_path), world=2):
        assert "lm_head.weight is not finite (1 NaN" in text and "move this one away to start without it" in text


def refused(folder: str) -> str:
    run, optimizer = started(stack=dict(ulysses=2), seed=5, num_hidden_layers=1)
    before = weights(run)
    with pytest.raises(Damaged) as caught:
        load(Path(folder), run, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in weights(run).items())
    return str(caught.value)


def test_the_last_good_one_is_not_pruned_for_bad_ones(mixed: Any):
    folder, run, optimizer = mixed
    assert prune(folder, keep_last=1) == [] and check.verify(folder / "step-2") == []
    save(folder, run, optimizer, {}, step=3)
    assert [path.name for path in prune(folder, keep_last=1)] == ["step-2"], "newer bad ones do not count"
    assert check.verify(folder / "step-3") == [] and (folder / "step-4").is_dir()


def test_a_bad_one_is_not_exported(mixed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder, _, _ = mixed
    assert main(["export", str(folder / "step-4"), str(tmp_path / "out")]) == 4
    said = capsys.readouterr().err
    assert "model.norm.weight is not finite (1 NaN" in said and f"'ithaca ckpt verify {folder}' says which are" in said
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))
    assert main(["export", str(folder / "step-2"), str(tmp_path / "out")]) == 0


# -- exports ----------------------------------------------------------------------------------------------------------


def exports(run: Any, folder: Path, **options: Any) -> list[Callable[[str, torch.dtype], Path]]:
    """From the run, and from its checkpoint."""
    save(folder / "checkpoints", run, None, {}, step=1)
    return [
        lambda name, dtype: export_model(run, folder / f"online-{name}", dtype=dtype, **options),
        lambda name, dtype: export_checkpoint(folder, folder / f"offline-{name}", dtype=dtype, **options),
    ]


@pytest.mark.parametrize("lora", [False, True])
def test_what_is_infinite_in_the_dtype_of_the_export_is_refused(tmp_path: Path, lora: bool):
    run, _ = started(stack=ALONE, lora=lora, num_hidden_layers=1)
    name, parameter = next((name, p) for name, p in run.model.named_parameters() if p.requires_grad and p.dim() > 1)
    parameter.detach().view(-1)[0] = LARGE
    for export in exports(run, tmp_path):
        with pytest.raises(NotFiniteValues) as caught:
            export("bf16", torch.bfloat16)
        shown = name.replace(".default", "")  # as PEFT publishes it
        assert str(caught.value).startswith(f"{shown} is not finite (0 NaN and 1 infinite of ")
        assert "--dtype fp32" in str(caught.value)
        assert not list(tmp_path.glob("*-bf16")) and not list(tmp_path.glob(".*"))
        stem = "adapter_model" if lora else "model"
        assert tensors_in(export("fp32", FP32), stem)[shown].view(-1)[0] == LARGE


def test_adapters_that_overflow_when_merged_are_refused(tmp_path: Path):
    from .runs import tiny

    tiny(num_hidden_layers=1).save_pretrained(tmp_path / "base")
    run, _ = started(stack=ALONE, lora=True, num_hidden_layers=1)
    for name, parameter in run.model.named_parameters():
        if ".q_proj." in name and parameter.requires_grad:
            parameter.detach().fill_(1e30)
    online, _ = exports(run, tmp_path, merge_lora=True)
    with pytest.raises(
        NotFiniteValues, match=r"model\.layers\.0\.self_attn\.q_proj\.weight is .*too large to be added in"
    ):
        online("merged", FP32)
    with pytest.raises(NotFiniteValues, match="q_proj"):
        export_checkpoint(tmp_path, tmp_path / "out", dtype=FP32, merge_lora=True, base_folder=tmp_path / "base")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "checkpoints"]


def live_export(folder: str) -> str:
    """Rank 1 alone holds the number; rank 0 writes."""
    run, _ = started(stack=dict(ulysses=2), num_hidden_layers=1)
    if dist.get_rank() == 1:
        run.model.get_parameter("lm_head.weight").detach().to_local()[0, 0] = math.nan  # pyright: ignore
    with pytest.raises(CheckpointError) as caught:
        export_model(run, Path(folder) / "out", dtype=FP32)
    return str(caught.value)


def test_a_run_that_is_not_finite_is_not_exported(workers: Workers, tmp_path: Path):
    for text in workers.run(live_export, str(tmp_path), world=2):
        assert text.startswith("rank 1: lm_head.weight is not finite (1 NaN")
    assert list(tmp_path.iterdir()) == []
