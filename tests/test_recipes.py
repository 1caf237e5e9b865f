"""The recipes that come with the package: every one loads, passes the checks and says what is measured; and the verb."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ithaca import Stack
from ithaca.cli.main import main
from ithaca.config import load, recipe_names, recipe_text
from ithaca.config.schema import Config
from ithaca.engine.model.sizes import read_sizes
from ithaca.planner.config import hf_config, requested
from ithaca.planner.dry_run.run import dry_run
from ithaca.planner.hardware import Hardware, parse_gpus
from ithaca.planner.search import plan
from ithaca.planner.text import describe

NAMES = [
    "llama31_70b_qlora_128k_2xh100", "llama31_8b_lora_128k_1x48gb", "llama31_8b_lora_256k_1x24gb",
    "llama31_8b_qlora_128k_1x24gb", "llama31_8b_qlora_256k_1x48gb", "llama32_3b_3m_8xh100", "llama3_8b_1m_8xh100",
    "llama3_8b_256k_1xh100", "llama3_8b_2m_1xh200", "llama3_8b_5m_8xh100", "llama3_8b_64k_8xh100",
    "qwen3_32b_4m_16xh100", "qwen3_32b_qlora_64k_1xh100", "qwen3_4b_512k_1xh200", "qwen3_8b_1m_8xh100", "tiny_cpu",
]  # fmt: skip
MODELS = {
    "Llama-3.1-8B-Instruct": "llama31_8b", "Llama-3.1-70B": "llama31_70b", "Llama-3.2-3B": "llama32_3b",
    "Meta-Llama-3-8B": "llama3_8b", "Qwen3-32B": "qwen3_32b", "Qwen3-4B": "qwen3_4b", "Qwen3-8B": "qwen3_8b",
}  # fmt: skip
CONTEXTS = {
    "2k": 2**11,
    "64k": 2**16,
    "128k": 2**17,
    "256k": 2**18,
    "512k": 2**19,
    "1m": 2**20,
    "2m": 2**21,
    "3m": 3 * 2**20,
    "4m": 2**22,
    "5m": 5 * 2**20,
}


def model_of(config: Config) -> str:
    return MODELS[Path(config.model.folder).name]


def hardware_of(name: str) -> Hardware:
    usual = {"1x24gb": "1xrtx4090", "1x48gb": "1xl40s", "16xh100": "2x8xh100"}
    gpus = name.rpartition("_")[2]
    return parse_gpus(usual.get(gpus, gpus))


def cli(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, str]:
    try:
        code: Any = main(arguments)
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_these_are_the_recipes():
    assert recipe_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_complete_and_says_what_is_measured(name: str):
    config = load(None, recipe=name).config  # every check passed
    comments = "\n".join(line for line in recipe_text(name).splitlines() if line.startswith("#"))
    assert comments.startswith("# ") and "easured" in comments and "ithaca train" in comments
    assert 10 < len(config.description) < 80 and (config.stack.chosen is not None or config.phases)
    if name == "tiny_cpu":
        return
    parts = name.split("_")
    hardware = parts[-1]
    assert config.data.context == CONTEXTS[parts[-2]]
    assert config.launch.world == int(hardware.partition("x")[0]) and config.data.packed is not None
    assert (config.model.rope is not None) == (config.data.context > (read_sizes(model_of(config)).longest or 0))
    assert (config.model.lora is not None) == bool({"lora", "qlora"} & set(parts))
    assert (config.model.quantize is not None) == ("qlora" in parts)


@pytest.mark.parametrize("name", [each for each in NAMES if each != "tiny_cpu" and "_128k_" not in each])
def test_the_stretch_of_the_positions_is_the_stretch_of_the_context(name: str):
    config = load(None, recipe=name).config
    rope = config.model.rope
    assert rope is not None and rope.factor is not None
    if rope.rope_type == "yarn":
        assert rope.factor * (rope.original_max_position_embeddings or 0) == config.data.context
    elif name.startswith("llama32"):
        assert rope.factor * 8192 == config.data.context
    else:  # Meta gives 8 for 128K
        assert rope.factor / 8 == config.data.context / 2**17


@pytest.mark.parametrize("name", [each for each in NAMES if each != "tiny_cpu"])
def test_a_recipe_fits_the_hardware_it_is_named_for(name: str):
    """With its own adapters, optimizer and stack, on machines as they usually are; a phase at a time."""
    config = load(None, recipe=name).config
    hardware = hardware_of(name)
    assert hardware.count == config.launch.world and config.launch.gpu_memory in (None, hardware.gpu.memory)
    contexts = [phase.context for phase in config.phases] or [config.data.context]
    for context in contexts:
        asked = {**requested(config), "context": context}
        found = plan(model_of(config), gpus=hardware, stack=config.stack.chosen, **asked)
        assert found.fits, describe(found)[0]
        assert (found.job.lora, found.job.offload) == (
            16 if config.model.lora else 0,
            bool(config.train.offload_optimizer),
        )
        assert found.job.quantize == config.model.quantize


@pytest.mark.skipif(os.environ.get("ITHACA_PLANS") != "long", reason="10 s to 3 minutes each: make plans")
@pytest.mark.parametrize("name", [each for each in NAMES if re.search("_(64|128|256)k_[12]x", each)])
def test_a_recipe_takes_what_its_plan_says(name: str):
    """Counted by the dry run."""
    config = load(None, recipe=name).config
    found = plan(model_of(config), gpus=hardware_of(name), stack=config.stack.chosen, **requested(config))
    ran = dry_run(found.job, hf_config(model_of(config)))
    assert -0.02 <= found.memory.peak / ran.peak - 1 <= 0.05
    assert found.memory.host == pytest.approx(ran.host, rel=0.02)


def test_the_demo_and_the_two_node_run():
    tiny = load(None, recipe="tiny_cpu").config
    assert tiny.stack.chosen == Stack(2, 2, 1, 1, "keep_attention", "host", 256)
    assert (tiny.model.folder, tiny.model.random_init, tiny.data.context, tiny.launch.cpu) == (
        "tiny_llama",
        True,
        2048,
        4,
    )
    assert tiny.data.sources[0].synthetic == "recall"
    two = load(None, recipe="qwen3_32b_4m_16xh100").config
    assert (two.stack.ulysses, two.stack.ring, two.launch.nodes, two.launch.workers) == (8, 2, 2, 8)


# The verb.


def test_ls(capsys):
    code, out, err = cli(capsys, "recipes", "ls")
    assert code == 0 and err == "" and all(name in out for name in NAMES) and "Qwen3 4B" in out
    assert len(out.strip().splitlines()) == 1 + len(NAMES)  # one line each
    code, out, _ = cli(capsys, "recipes", "ls", "--json")
    rows = json.loads(out)
    assert code == 0 and [row["name"] for row in rows] == NAMES
    assert rows[-1] == {
        "name": "tiny_cpu",
        "context": 2048,
        "description": load(None, recipe="tiny_cpu").config.description,
    }


def test_show(capsys):
    code, out, _ = cli(capsys, "recipes", "show", "tiny_cpu")
    assert code == 0 and out == recipe_text("tiny_cpu")
    code, out, err = cli(capsys, "recipes", "show", "tinycpu")
    assert (code, out, err) == (2, "", "ithaca recipes: recipe 'tinycpu' is unknown; did you mean tiny_cpu?\n")
    assert cli(capsys, "recipes", "show", "../config/x")[0] == 2


def test_cp_never_overwrites_by_itself(capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert cli(capsys, "recipes", "cp", "tiny_cpu")[0] == 0
    assert Path("tiny_cpu.yaml").read_text() == recipe_text("tiny_cpu")
    Path("tiny_cpu.yaml").write_text("mine")
    code, _, err = cli(capsys, "recipes", "cp", "tiny_cpu")
    assert code == 2 and "is there already, and nothing was changed; use --force" in err
    assert Path("tiny_cpu.yaml").read_text() == "mine"
    assert cli(capsys, "recipes", "cp", "tiny_cpu", "--force")[0] == 0
    assert Path("tiny_cpu.yaml").read_text() == recipe_text("tiny_cpu")
    Path("sub").mkdir()
    code, out, _ = cli(capsys, "recipes", "cp", "tiny_cpu", "sub")
    assert code == 0 and Path("sub/tiny_cpu.yaml").exists() and "ithaca train sub/tiny_cpu.yaml" in out
    assert cli(capsys, "recipes", "cp", "tiny_cpu", "sub/run.yaml")[0] == 0
    assert load("sub/run.yaml").config.run.name == "run"
    code, _, err = cli(capsys, "recipes", "cp", "tiny_cpu", "no/run.yaml")
    assert code == 2 and "no is not a folder; create it first" in err
    Path("link.yaml").symlink_to("nowhere.yaml")
    assert cli(capsys, "recipes", "cp", "tiny_cpu", "link.yaml")[0] == 2 and not Path("nowhere.yaml").exists()


def test_listing_is_light():
    program = "from ithaca.cli.main import main; import sys; main(['recipes', 'ls', '--json']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_usage(capsys):
    assert cli(capsys, "recipes")[0] == 2
    code, out, _ = cli(capsys, "recipes", "--help")
    assert code == 0 and "ls" in out and "cp" in out
