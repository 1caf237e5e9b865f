"""The plan counts with the attention kernel that the engine takes, and with no other."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ithaca import stack
from ithaca.base.kernels import KERNELS, fa4_installed, import_ahead, problem
from ithaca.cli.ladder import kernels_apart
from ithaca.cli.main import main
from ithaca.engine.attention.backends import BACKENDS
from ithaca.engine.attention.choice import kernels_here
from ithaca.engine.model.sizes import read_sizes
from ithaca.planner.gpus import GPUS
from ithaca.planner.hardware import Hardware, kernels_for
from ithaca.planner.search import plan
from ithaca.stack import Stack

LLAMA = read_sizes("llama3_8b")
H100, A100 = GPUS["h100"], GPUS["a100"]


def test_there_is_one_list_of_kernels_in_one_order():
    assert list(BACKENDS) == list(KERNELS) and ("auto", *KERNELS) == stack.ATTENTION
    assert [make().name for make in BACKENDS.values()] == list(KERNELS), "a row names the class of its own kernel"
    assert kernels_here("auto", torch.device("cpu"), torch.float32, 32, (False, True)) == ("cpu", "cpu")
    assert kernels_here("auto", torch.device("cpu"), torch.float32, 32) == ("cpu", "")
    assert kernels_apart(LLAMA, cpu=True) == ("cpu", "cpu")


def test_flash_attention_2_is_not_flash_attention_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both are called flash_attn; importing the wrong one may fail, and must not be tried."""
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    cuda = torch.device("cuda", 0)
    assert not fa4_installed() and "needs the package flash-attn-4" in str(
        BACKENDS["fa4"]().problem(cuda, torch.bfloat16, 128, False)
    )
    (package / "cute").mkdir()
    (package / "cute" / "interface.py").write_text("")
    assert fa4_installed() and "flash_attn" not in sys.modules


def test_what_it_is_built_on_is_imported_beside_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert import_ahead() is None, "it is not installed"
    for name, text in {"flash_attn/cute/interface.py": "", "cutlass.py": "from nowhere import something"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    thread = import_ahead()
    assert thread is not None
    thread.join()
    assert "cutlass" not in sys.modules, "what is broken stays for the kernel's own words"
    (tmp_path / "cutlass.py").write_text("here = 1")
    importlib.invalidate_caches()
    thread = import_ahead()
    assert thread is not None
    thread.join()
    assert sys.modules.pop("cutlass").here == 1 and "flash_attn" not in sys.modules


@pytest.mark.parametrize(
    ("gpu", "head_dim", "windows", "expected"),
    [
        (H100, 128, (None,), ("fa4", "fa4")),
        (H100, 80, (None,), ("cudnn", "flash")),  # where FlashAttention-4 was found wrong
        (A100, 128, (None,), ("cudnn", "flash")),
        (A100, 128, (None, 4096), ("cudnn", "flash")),
        (replace(H100, probed=("flash", "flash")), 128, (None,), ("flash", "flash")),  # this machine has said so itself
    ],
)
def test_what_the_engine_would_take(gpu, head_dim: int, windows: tuple[int | None, ...], expected: tuple[str, str]):
    model = replace(LLAMA, head_dim=head_dim, layers=len(windows), windows=windows)
    assert kernels_for(model, gpu, None) == expected
    found = plan(model, gpus=Hardware(gpu, 1), context="8K", stack=Stack())
    assert [found.job.kernel_of(layer) for layer in range(len(windows))] == [
        expected[window is not None] for window in windows
    ]


def test_a_window_and_a_head_that_no_kernel_has_are_refused():
    windowed = replace(LLAMA, windows=(4096,) * LLAMA.layers)
    with pytest.raises(ValueError, match="its layers with a sliding window: cudnn: has no sliding window"):
        plan(windowed, gpus="1xH100", context="8K", kernel="cudnn")
    with pytest.raises(ValueError, match="head_dim=264 is not a multiple of 8 up to 256"):
        plan(replace(LLAMA, head_dim=264), gpus="1xA100", context="8K", kernel="flash")
    assert plan(windowed, gpus="1xA100", context="8K", stack=Stack()).job.kernel_of(0) == "flash"


def test_plain_products_are_planned_where_no_kernel_is_known_and_the_plan_says_so():
    unusual = plan(replace(LLAMA, head_dim=264), gpus="1xA100", context="8K", stack=Stack())
    assert unusual.job.kernel_of(0) == "math" and any("speed was not measured" in each for each in unusual.assumed)
    usual = plan(LLAMA, gpus="1xA100", context="8K", stack=Stack())
    assert not any("not measured" in each for each in usual.assumed)


@pytest.mark.parametrize("name", KERNELS)
def test_what_rows_say_of_soft_caps_and_values(name: str):
    capped = problem(name, 128, False, softcapped=True)
    assert capped is None if name == "math" else capped == "has no soft cap of scores"
    assert problem(name, 192, False, value_dim=128) is None
    larger = problem(name, 128, False, value_dim=512)
    assert larger is None if name in ("cpu", "math") else "head_dim=512" in str(larger)


def test_layers_with_a_window_attend_at_the_rate_of_their_kernel():
    mixed = replace(LLAMA, windows=(None, 2**20) * 16)  # a window that hides nothing
    whole, other = (plan(model, gpus="1xA100", context="64K", stack=Stack()) for model in (LLAMA, mixed))
    assert whole.speed.parts["attention"] != other.speed.parts["attention"]


@pytest.mark.parametrize("name", ["abc", "cpu", "FA4", ""])
def test_an_unknown_kernel_is_refused_everywhere(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    for how in ({"kernel": name}, {"attention": name}):
        with pytest.raises(ValueError, match="is unknown; on a GPU it is one of fa4, cudnn, flash"):
            plan("llama32_1b", gpus="1xH200", context="8K", **how)
    asked = ["llama32_1b", "--gpus", "1xH200", "--context", "8K", "--kernel", name]
    for verb in (["plan"], ["ladder"], ["profile", "--cpu", "--out", str(tmp_path)]):
        assert main([*verb, *asked]) == 2
        err = capsys.readouterr().err
        assert f"kernel={name!r} is unknown; on a GPU it is one of fa4, cudnn, flash" in err
