"""`stack: auto` on GPUs: the planner is asked about the hardware that is there. None is here: torch's answers are given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ithaca.base.exits import Failed
from ithaca.base.run_folder import RunFolder
from ithaca.cli.main import main
from ithaca.config import load
from ithaca.config.schema import Lora, Model, StackOptions
from ithaca.engine import build
from ithaca.engine.attention.choice import kernels_here
from ithaca.engine.job import Job
from ithaca.engine.model.shrink import shrink_config, smallest
from ithaca.engine.model.sizes import read_sizes
from ithaca.planner.config import hf_config
from ithaca.stack import Stack
from ithaca.training import automatic, trainer
from ithaca.training.automatic import automatic_stack, hardware_here, planned
from ithaca.training.preflight import check_run

CUDA = torch.device("cuda", 0)


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch):
    """A machine of eight GPUs, as torch describes it."""

    def of(name: str, memory: float, major: int = 9) -> None:
        found = SimpleNamespace(name=name, total_memory=int(memory), major=major, multi_processor_count=100)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
        monkeypatch.setattr(
            automatic, "available_memory", lambda: 512 * 2**30
        )  # not what this machine has left just now
        # only a call on the GPU tells which kernels run there
        monkeypatch.setattr(automatic, "kernels_here", lambda *_: ("cudnn", "flash"))

    return of


def config(tmp_path: Path, **data):
    (tmp_path / "run.yaml").write_text(
        f"model: {{folder: llama3_8b, lora: {data.get('lora', 'null')}}}\n"
        f"data: {{context: {data.get('context', '1M')}, sources: [{{synthetic: recall}}]}}\n"
        f"train: {{steps: 1, rows: {data.get('rows', 1)}, {data.get('train', '')}}}\n"
        f"launch: {{gpu_memory: {data.get('memory', 'null')}}}\n"
    )
    return load(str(tmp_path / "run.yaml")).config


def test_the_hardware_is_recognised(tmp_path: Path, eight):
    eight("NVIDIA H200", 150.1e9)
    found = hardware_here(config(tmp_path), 8, CUDA)
    assert (found.gpu.name, found.gpu.memory, found.count, found.per_node) == ("H200", 150_100_000_000, 8, 8)
    assert found.gpu.measured and found.host and found.disk
    assert hardware_here(config(tmp_path, memory="80GB"), 8, CUDA).gpu.memory == 80_000_000_000
    eight("NVIDIA A100-SXM4-40GB", 42.4e9, major=8)
    assert hardware_here(config(tmp_path), 8, CUDA).gpu.hopper is False
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


def test_a_dry_run_shows_the_plan(tmp_path: Path, eight, capsys: pytest.CaptureFixture[str]):
    eight("NVIDIA H100 80GB HBM3", 84.9e9)
    words = (
        "train --dry-run --recipe tiny_cpu --model.folder llama3_8b --train.steps 9 --train.rows 1 --launch.cpu null"
    )
    words = [*words.split(), "--stack", "auto", "--run.folder", str(tmp_path / "run"), "--data.context"]
    assert main([*words, "64K"]) == 0
    out = capsys.readouterr().out
    assert "synthetic recall: rows of 65,536 tokens, made to order" in out
    assert (
        "llama3_8b (8.03B parameters), all weights in bf16 over fp32, at 64K tokens on 8xH100-85GB: fits" in out
        and "    ulysses: 8" in out
    )
    assert out.endswith(f"this run can start: it trains step 1 of 9, in {tmp_path / 'run'}; nothing was written\n")
    assert main([*words, "64M"]) == 5
    assert "this run does not fit" in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_what_a_run_is_asked_for_reaches_the_planner(tmp_path: Path, eight, monkeypatch: pytest.MonkeyPatch):
    eight("NVIDIA GeForce RTX 4090", 25.3e9, major=8)
    hf, asked = hf_config("llama3_8b"), dict(context="64K", lora="{rank: 8, targets: [q_proj, lm_head]}")
    with pytest.raises(Failed, match="does not fit"):
        automatic_stack(config(tmp_path, context="64K", train="offload_optimizer: false"), hf, 1, CUDA)
    found = planned(config(tmp_path, **asked, rows=4, train="accumulation: 2, offload_optimizer: true"), hf, 1, CUDA)
    job = found.job
    assert found.fits and (job.lora, job.targets, job.offload) == (8, ("q_proj", "lm_head"), True)
    assert (job.rows, job.accumulation, job.batch) == (4, 2, 2) and job.model.name == "llama3_8b"
    assert (job.kernel, job.windowed) == ("cudnn", "flash"), "what the engine takes here"
    assert found.hardware.assumed == (), "this machine's memory and disk are known"
    # two machines of four workers each, whatever the machines have
    for name, value in dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=8, LOCAL_WORLD_SIZE=4, MASTER_PORT=1).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert hardware_here(config(tmp_path), 8, CUDA).ranks_per_node == 4


def test_a_kernel_that_the_engine_refuses_is_refused_by_the_plan(
    tmp_path: Path, eight, monkeypatch: pytest.MonkeyPatch
):
    """The same choice: without a GPU there is none."""
    eight("NVIDIA H100 80GB HBM3", 84.9e9)
    monkeypatch.setattr(automatic, "kernels_here", kernels_here)
    with pytest.raises(ValueError, match="no attention kernel for head_dim=128, bfloat16, cuda"):
        planned(config(tmp_path, context="64K"), hf_config("llama3_8b"), 8, CUDA)


def test_adapters_on_layers_that_are_not_there_are_refused():
    hf = hf_config("llama32_1b")
    hf.num_hidden_layers = 1
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    with pytest.raises(
        ValueError, match=r"targets names qkv_proj, which this model does not have; .*down_proj.*q_proj"
    ):
        build.with_lora(model, Lora(targets=("q_proj", "qkv_proj")), 0)


@pytest.mark.parametrize("name", ["phi4", "glm4_9b"])
def test_adapters_on_all_linears_where_some_are_one(name: str):
    """And the plan counts them so."""
    hf = hf_config(name)
    hf.num_hidden_layers = 1
    with torch.device("meta"):
        model = build.with_lora(AutoModelForCausalLM.from_config(hf), Lora(rank=4), 0)
    adapted = {n.rpartition(".")[2] for n, module in model.named_modules() if hasattr(module, "lora_A")}
    heads = {"qkv_proj"} if name == "phi4" else {"q_proj", "k_proj", "v_proj"}
    assert adapted == {*heads, "o_proj", "gate_up_proj", "down_proj"}
    job = Job(replace(read_sizes(name), layers=1), Stack(), 4096, lora=4)
    assert job.trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    with pytest.raises(ValueError, match="has no linear layer called up_proj"):
        _ = replace(job, targets=("o_proj", "up_proj")).adapters


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "llama32_1b"])
def test_adapters_are_those_that_are_planned(name: str, caplog: pytest.LogCaptureFixture):
    """Experts have none unless somebody wraps the model so: theirs would be a billion weights."""
    hf = hf_config(name)
    hf.num_hidden_layers = 1
    with torch.device("meta"):
        model = build.with_lora(AutoModelForCausalLM.from_config(hf), Lora(rank=4), 0)
    sizes = read_sizes(name)
    job = Job(replace(sizes, layers=1, windows=sizes.windows[:1]), Stack(), 4096, lora=4)
    assert job.trained == sum(p.numel() for p in model.parameters() if p.requires_grad) > 0
    assert ("no adapters on gate_proj, up_proj, down_proj: its experts have none" in caplog.text) == bool(sizes.experts)


def test_names_that_peft_takes_for_experts(caplog: pytest.LogCaptureFixture):
    """A shared expert has linears of these names, but PEFT turns them into parameters of the others and adapts none."""

    def wrapped(**more: Any) -> torch.nn.Module:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shrink_config(hf_config("qwen3_next_80b_a3b"), 4))
        return build.with_lora(model, Lora(rank=2, **more), 0)

    adapted = {n.rpartition(".")[2] for n, module in wrapped().named_modules() if hasattr(module, "lora_A")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert "no adapters on gate_proj, up_proj, down_proj: its experts have none, and PEFT knows no other" in caplog.text
    for targets in (("q_proj", "down_proj"), ("gate_proj",)):
        with pytest.raises(ValueError, match=f"targets names {targets[-1]}, which PEFT takes for experts"):
            wrapped(targets=targets)


@pytest.mark.parametrize("dense", [False, True])
def test_adapters_on_latent_attention(dense: bool, caplog: pytest.LogCaptureFixture):
    """DeepSeek's q, k and v are made by two linears each. Its MLPs have none where all of them are dense either."""
    hf = smallest("deepseek_v3")
    hf.first_k_dense_replace = hf.num_hidden_layers if dense else hf.first_k_dense_replace
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf)
    wrapped = build.with_lora(model, Lora(rank=2), 0)
    adapted = {n.rpartition(".")[2] for n, module in wrapped.named_modules() if hasattr(module, "lora_A")}
    assert adapted == {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    assert "no adapters on gate_proj, up_proj, down_proj: its experts" in caplog.text and "q_proj" not in caplog.text


@pytest.mark.parametrize("trial", [True, False])
def test_what_a_run_will_say_again_is_not_said_before(trial: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A look that no run follows says it, once for all phases."""
    phases = "[{context: 64, steps: 2}, {context: 128, steps: 2}]"
    given = [
        "model.folder=tiny_qwen3_moe",
        "model.random_init=false",
        "model.lora={rank: 2}",
        f"phases={phases}",
        f"run.folder={tmp_path / 'run'}",
    ]
    loaded = load(None, [*given, "data.context=128", "train.steps=4"], "tiny_cpu")
    check_run(loaded.config, loaded.text, keep=False, trial=trial).require()
    assert caplog.text.count("its experts have none") == trial


def test_what_takes_time_before_a_run_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A proof is made here and kept, so a run does not say it."""
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(smallest("deepseek_v3")).save_pretrained(folder)
    given = [
        f"model.folder={folder}",
        "model.random_init=false",
        "model.lora={rank: 2}",
        f"run.folder={tmp_path / 'run'}",
    ]
    more = ["stack={engine: module}", "data.context=128", "train.steps=4"]
    loaded = load(None, [*given, *more], "tiny_cpu")
    with caplog.at_level("INFO", "ithaca"):
        check_run(loaded.config, loaded.text, keep=False).require()
    assert "by its own code" in caplog.text and "its experts have none" not in caplog.text


def test_a_model_without_the_usual_linears_is_told_to_name_its_own():
    model = torch.nn.ModuleDict({"query_key_value": torch.nn.Linear(4, 4), "dense": torch.nn.Linear(4, 4)})
    with pytest.raises(
        ValueError, match=r"none of the linear layers q_proj, .* model.lora.targets: dense, query_key_value"
    ):
        build.with_lora(model, Lora(rank=2), 0)


def test_a_frozen_base_is_as_small_as_it_is_planned():
    """Also of a preset, whose weights are random."""
    options = Model(folder="tiny_llama", lora=Lora(rank=2))
    model, _ = build.build_model(options, build.model_config(options, 64), 0)
    kinds = {p.requires_grad: p.dtype for p in model.parameters()}
    assert kinds[False] == torch.bfloat16


def test_what_does_not_fit_is_said_before_anything_starts(tmp_path: Path, eight):
    eight("NVIDIA GeForce RTX 4090", 25.3e9, major=8)
    with pytest.raises(Failed, match="does not fit") as error:
        automatic_stack(config(tmp_path), hf_config("llama31_70b"), 8, CUDA)
    assert error.value.exit_code == 5 and "what would fit" in str(error.value)


def test_a_model_without_arithmetic_is_planned_by_a_dry_run(tmp_path: Path, eight, monkeypatch: pytest.MonkeyPatch):
    """What is asked reaches the process that counts (tests/planner/test_own.py runs one): kernels and machine as they are."""
    eight("NVIDIA H100 80GB HBM3", 84.9e9)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(automatic, "planned_apart", lambda name, **given: asked.update(given, name=name))
    assert planned(config(tmp_path, rows=2), smallest("exaone4"), 8, CUDA) is None
    assert asked["config"].model_type == "exaone4" and asked["gpus"].gpu.probed == ("cudnn", "flash")
    assert (asked["context"], asked["rows"], asked["gpus"].count, asked["stack"]) == (2**20, 2, 8, None)


def test_states_wait_on_the_host_where_nothing_else_fits(tmp_path: Path, eight, monkeypatch: pytest.MonkeyPatch):
    """And the run is written down so. With a stack that is given they stay where they are."""
    eight("NVIDIA H100 80GB HBM3", 84.9e9)
    monkeypatch.setattr(trainer, "device_of", lambda config: CUDA)
    unused: Any = None
    asked = config(tmp_path, context="64K")
    run = trainer.Trainer(asked, RunFolder(tmp_path), unused, 0, None, unused)
    assert run.plan is not None and run.plan.fits and run.plan.job.offload
    assert run.config.train.offload_optimizer is True and run.config.stack.chosen == run.plan.stack
    assert "offload_optimizer: true  # auto" in run.text
    given = replace(asked, stack=StackOptions.of(run.stack, None))
    run = trainer.Trainer(given, RunFolder(tmp_path), unused, 0, None, unused)
    assert run.config.train.offload_optimizer is False and run.plan is not None and not run.plan.fits
