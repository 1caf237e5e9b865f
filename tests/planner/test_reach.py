"""The planner's reach: runs as their files say, several machines side by side, and GPUs that nobody has measured."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ithaca.cli.main import main
from ithaca.config import load, recipe_names
from ithaca.engine.job import Job
from ithaca.engine.model.presets import PUBLISHED
from ithaca.planner.config import hf_config
from ithaca.planner.gpus import GPUS, NVLINK
from ithaca.planner.hardware import parse_gpus
from ithaca.planner.run import parts_of
from ithaca.planner.search import plan
from ithaca.planner.speed import estimate
from ithaca.stack import Stack
from ithaca.training import automatic

RUN = """\
model: {folder: llama32_1b, lora: {rank: 8}}
data: {context: 64K, sources: [{synthetic: recall}]}
train: {steps: 100, rows: 2, accumulation: 2, offload_optimizer: true}
checkpoint: {every: 10}
launch: {workers: 2}
"""
FIXED = "stack: {ulysses: 2, heads_per_stage: 4, recompute: layer, store: host, tile: 2K}\n"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(RUN + FIXED)
    return path


# -- runs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stack", [FIXED, "", "stack: auto\n"], ids=["fixed", "none", "auto"])
def test_a_file_is_planned_as_training_plans_it(stack: str, file: Path, monkeypatch: pytest.MonkeyPatch):
    """With the same GPUs and the same memory of the machine, what `ithaca train` plans when it starts."""
    file.write_text(RUN + stack)
    loaded, hardware = load(file), replace(parse_gpus("2xA100"), host=10**12)
    monkeypatch.setattr(automatic, "hardware_here", lambda *_: hardware)
    monkeypatch.setattr(automatic, "kernels_here", lambda *_: ("cudnn", "flash"))
    config = loaded.config
    started = automatic.planned(config, hf_config("llama32_1b"), 2, torch.device("cuda", 0), config.stack.chosen)
    (part,) = parts_of(loaded)
    found = part.plan(gpus=hardware)
    assert found.stack == started.stack and found.memory == started.memory and found.speed == started.speed
    assert (found.job.lora, found.job.offload, found.job.rows, found.job.accumulation) == (8, True, 2, 2)
    assert bool(part.fixed) == (stack == FIXED) and found.too_long is None


def test_what_was_taken_and_from_where(file: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "run.yaml", "--gpus", "2xA100", "--rows", "4", "--stack.tile", "4K", "--host", "1TB")
    assert code == 0, out
    places = {line.split()[0]: line.split()[-1] for line in out.splitlines()[:8]}
    assert places == {
        "model": "run.yaml:1", "context": "run.yaml:2", "rows": "--train.rows", "accumulation": "run.yaml:3",
        "optimizer": "default", "offload_optimizer": "run.yaml:3", "lora": "run.yaml:1", "stack": "run.yaml:6",
    }  # fmt: skip
    assert "  GPUs               2xA100-80GB          --gpus\n" in out
    assert "    recompute: layer    run.yaml:6\n" in out and "    tile: 4096          --stack.tile\n" in out
    assert "    ring: 1             default of a stack that is given\n" in out
    code, out, _ = run(capsys, "run.yaml", "--gpus", "2xA100", "--json", "--context", "32K")
    said = json.loads(out)
    assert said["context"] == 2**15 and {"what": "context", "value": "32K", "from": "--data.context"} in said["taken"]


def test_options_of_the_plan_are_settings_of_the_run(file: Path, capsys: pytest.CaptureFixture[str]):
    file.write_text(RUN)
    options = "--accumulation 1 --optimizer adamw8bit --lora 4 --lora-targets q_proj,v_proj --synchronous --set tile=2K"
    _, out, _ = run(
        capsys, "run.yaml", "--gpus", "2xA100", "--json", "--deterministic", "--no-offload-optimizer", *options.split()
    )
    said = json.loads(out)
    assert (said["optimizer"], said["lora"], said["lora_targets"]) == ("adamw8bit", 4, ["q_proj", "v_proj"])
    assert (
        said["accumulation"] == 1
        and said["offload_optimizer"] is False
        and said["snapshot"] == 0
        and said["stack"]["tile"] == 2048
    )


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_planned_by_its_name(name: str, capsys: pytest.CaptureFixture[str]):
    """Where the name says the GPUs; without a network, and phase by phase."""
    code, out, err = run(capsys, name, "--json")
    if name == "tiny_cpu":
        assert code == 2 and "for 4 processes on a CPU (launch.cpu, recipe tiny_cpu:" in err and "--gpus" in err
        assert "model.dtype: fp32" in run(capsys, name, "--gpus", "4xH100")[2]
        code, out, _ = run(capsys, name, "--gpus", "4xH100", "--model.dtype", "bf16", "--json")
    elif found := re.search(r"_1x(\d+)gb", name):
        assert code == 2 and "The file says launch.workers: 1, but not which; give --gpus" in err
        assert {"24": "such as --gpus 1xRTX4090-24GB ", "48": "such as --gpus 1xL40S-48GB "}[found[1]] in err
        code, out, _ = run(capsys, name, "--gpus", "1xA6000", "--json")
        assert json.loads(out)["budget"] == int(found[1]) * 10**9, "launch.gpu_memory"
    said = json.loads(out)
    plans, config = said if isinstance(said, list) else [said], load(None, recipe=name).config
    assert code == 0 and [each["fits"] for each in plans] == [True] * max(1, len(config.phases))
    assert plans[-1]["context"] == config.data.context and all(each["too_long"] is None for each in plans)
    assert plans[0]["hardware"]["gpus"] == config.launch.world
    chosen = config.stack.chosen
    assert chosen is None or plans[0]["stack"]["recompute"] == chosen.recompute


def test_what_a_run_does_not_say_is_asked_for(file: Path, capsys: pytest.CaptureFixture[str]):
    assert "which GPUs is run for? The file says launch.workers: 2, but not which" in run(capsys, "run.yaml")[2]
    named = file.rename(file.with_name("mine_4xh100.yaml"))
    code, _, err = run(capsys, named.name)
    assert code == 2 and "says 4 GPUs, and launch.workers × launch.nodes are 2; give --gpus" in err
    named.write_text((RUN + FIXED).replace("workers: 2", "workers: 4").replace("ulysses: 2", "ulysses: 4"))
    assert "the name mine_4xh100" in run(capsys, named.name, "--rows", "2")[1]
    assert run(capsys, "gone.yaml")[2].startswith(
        "ithaca plan: the configuration cannot be used: gone.yaml: no such file"
    )
    assert "on which GPUs?" in run(capsys, "llama3_8b", "--context", "1M")[2]
    assert "at which length?" in run(capsys, "llama3_8b", "--gpus", "1xH100")[2]
    assert "has 3 phases" in run(capsys, "llama3_8b_64k_8xh100", "--max-context")[2]


def test_a_stack_that_does_not_fit_says_what_auto_would_do(file: Path, capsys: pytest.CaptureFixture[str]):
    file.write_text(RUN + "stack: {ulysses: 2, recompute: none, tile: null}\n")
    code, out, _ = run(capsys, "run.yaml", "--gpus", "2xRTX4090", "--host", "512GB")
    assert code == 5 and "does not fit: GPU memory" in out and "    --stack auto: " in out
    assert run(capsys, "run.yaml", "--gpus", "2xRTX4090", "--host", "512GB", "--stack", "auto")[0] == 0


def test_a_run_folder_and_the_longest_context_of_a_run(file: Path, capsys: pytest.CaptureFixture[str]):
    folder = file.parent / "runs" / "first"
    folder.mkdir(parents=True)
    file.rename(folder / "config.yaml")
    code, out, _ = run(capsys, "runs/first", "--gpus", "2xA100", "--max-context", "--json")
    found = json.loads(out)
    assert code == 0 and found["context"] > 2**20 and found["stack"]["recompute"] == "layer"


def test_published_names_are_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert {load(None, recipe=name).config.model.folder for name in recipe_names()} - set(PUBLISHED) == {"tiny_llama"}
    monkeypatch.chdir(tmp_path)
    Path("Qwen/Qwen3-8B").mkdir(parents=True)  # a folder of that name is what is meant
    assert parts_of(load(None, recipe="qwen3_8b_1m_8xh100"))[0].model == "Qwen/Qwen3-8B"


# -- several machines ----------------------------------------------------------------------------------------------------


def test_machines_side_by_side(capsys: pytest.CaptureFixture[str]):
    few = ["--stack.recompute", "layer", "--stack.store", "host", "--stack.tile", "4K"]  # or the search takes seconds
    code, out, _ = run(capsys, "llama32_3b", "--compare", "1xH200-141GB,1xRTX5090,8xMI300X", "--context", "128K", *few)
    rows = {line[:22].strip(): line[22:].split() for line in out.splitlines()[1:]}
    assert code == 0 and "1xRTX5090-32GB" in out.splitlines()[1] and rows["fits"] == ["yes", "no", "yes"]
    assert rows["rates"] == ["measured", "scaled", "not", "known"] and rows["longest context"][1:3] == ["below", "64K"]
    assert rows["tokens/s per GPU"][1:] == ["-", "not", "known"], (
        "no time of what does not fit, or of what nobody has run"
    )
    assert "  1xH200-141GB: assumed FlashAttention-4 is installed" in out
    assert "  8xMI300X-192GB: nobody has run this on MI300X" in out and "  1xRTX5090-32GB: would fit: " in out
    code, out, _ = run(capsys, "llama32_3b", "--compare", "8xH100-80GB,1xA100", "--context", "64K", "--json", *few)
    answers = json.loads(out)
    fields: Any = dict(recompute="layer", store="host", tile=4096)
    alone = plan("llama32_3b", gpus="8xH100-80GB", context="64K", **fields).json()
    assert (
        answers[0]["plan"] == json.loads(json.dumps(alone)) and answers[0]["longest"] > answers[1]["longest"] >= 2**16
    )
    assert [each["refused"] for each in answers] == [None] * 2


def test_a_machine_that_cannot_be_asked_is_a_column_that_says_so(file: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "run.yaml", "--compare", "1xA100,2xA100", "--host", "1TB")
    assert code == 0 and "  1xA100-80GB: cannot be asked: " in out and "2xA100" in out
    code, out, _ = run(capsys, "run.yaml", "--gpus", "2xH100", "--compare", "2xA100", "--json")
    assert [each["gpus"] for each in json.loads(out)] == ["2xH100-80GB", "2xA100-80GB"], "that of --gpus first"
    code, _, err = run(capsys, "run.yaml", "--compare", "1xA100,3xA100")
    assert code == 2 and "cannot be asked" not in err, "where none can, the reason is the error"
    assert "leave --max-context out" in run(capsys, "llama32_1b", "--max-context", "--compare", "1xA100,1xH100")[2]
    assert "'tile' is not in the table" in run(capsys, "llama32_1b", "--context", "8K", "--compare", "1xA100,tile")[2]


def test_fields_are_compared_as_before(file: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "run.yaml", "--gpus", "2xA100", "--host", "1TB", "--compare", "recompute=keep_attention")
    assert code == 0 and "this" in out and "keep_attention" in out
    assert "2048" not in out, "what is the same is not shown"


# -- GPUs ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("2xRTX A6000", "RTXA6000"), ("A6000", "RTXA6000"), ("NVIDIA RTX A6000-48GB", "RTXA6000"), ("RTX-A6000", "RTXA6000"),
        ("GeForce RTX 5090", "RTX5090"), ("4xRTX-5090", "RTX5090"), ("8xA100-SXM4-80GB", "A100"), ("AMD Instinct MI300X", "MI300X"),
        ("gh200-144GB", "GH200"), ("8xB200", "B200"), ("l40s", "L40S"),
    ],
)  # fmt: skip
def test_gpus_are_called_as_people_call_them(words: str, name: str):
    assert parse_gpus(words).gpu.name == name


@pytest.mark.parametrize("words", ["H100-PCIe", "H100 NVL", "RTX 6000 Ada", "A100X", "MI250X", "RTX A6000 Ada"])
def test_another_chip_is_not_taken_for_one_that_is_known(words: str):
    with pytest.raises(ValueError, match=r"is not in the table of GPUs: H100, .*; name the nearest with its memory"):
        parse_gpus(words)


def test_amd_has_memory_and_no_time(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "llama32_1b", "--gpus", "8xMI300X", "--context", "128K")
    assert code == 0 and "time    not predicted: nobody has run this on MI300X" in out and "tokens/s" not in out
    assert "assumed torch for ROCm holds on MI300X what" in out and "attention: flash" in out
    with pytest.raises(ValueError, match="kernel='fa4' is not made for MI300X, which has flash, math"):
        plan("llama32_1b", gpus="1xMI300X", context="8K", kernel="fa4")
    with pytest.raises(ValueError, match="kernel='fa4' is not made for A100"):
        plan("llama32_1b", gpus="1xA100", context="8K", kernel="fa4")
    assert main(["ladder", "llama32_1b", "--gpus", "1xMI300X", "--context", "8K"]) == 2
    assert "nobody has run this on MI300X" in capsys.readouterr().err
    short: Any = plan("llama31_70b", gpus="1xMI300X", context="1M")
    assert not short.fits and short.advice and not any("tokens/s" in each for each in short.advice)


def test_without_nvlink_what_is_sent_shares_pcie_with_the_copies():
    """And a plan says so. Ulysses over PCIe is never free: the same card with NVLink is faster by what it waits for."""
    job = Job(
        plan("llama32_3b", gpus="4xL40S", context="64K", stack=Stack(ulysses=4)).model, Stack(ulysses=4), 2**16, 4
    )
    hardware = parse_gpus("4xL40S")
    linked = replace(hardware, gpu=replace(hardware.gpu, link=NVLINK, nvlink=450e9))
    slow, fast = estimate(job, hardware), estimate(job, linked)
    assert slow.parts["links"] > 10 * fast.parts["links"] > 0
    # what is sent hides behind computation, but not behind the part of it that copies to the host have taken
    crowded = replace(hardware, gpu=replace(hardware.gpu, pcie=3e9, nvlink=3e9))
    alone = replace(crowded, gpu=replace(crowded.gpu, link=NVLINK))
    busy = replace(job, stack=Stack(ulysses=4, store="host"))
    assert estimate(busy, crowded).parts["links"] > estimate(busy, alone).parts["links"]
    words = {name: parse_gpus(f"2x{name}").about_links or "" for name in ("H100", "L40S", "RTX5090", "MI300X")}
    assert (
        words["H100"] == "links were not measured (ithaca doctor --links)" and parse_gpus("1xL40S").about_links is None
    )
    assert words["L40S"].startswith("no NVLink: GPUs talk over PCIe, 25 GB/s each way, beside the copies to the host; ")
    assert (
        "PCIe and host memory, 27 GB/s" in words["RTX5090"]
        and "Infinity Fabric, 448 GB/s each way; " in words["MI300X"]
    )
    assert all(GPUS[name].link != NVLINK for name in ("l40s", "rtxa6000", "a40", "rtx4090", "rtx5090"))
