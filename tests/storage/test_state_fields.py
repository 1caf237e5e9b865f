"""state.json and manifest.json of a checkpoint, field by field: what is wrong is named, and nothing ends in a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ithaca.cli.main import main
from ithaca.storage import files
from ithaca.storage.checkpoint import CheckpointError, load, save

from ..security.test_checkpoints import change_state
from .runs import started

ALONE = dict(shard_parameters=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Iterator[Path]:
    run, optimizer = started(stack=ALONE, num_hidden_layers=1)
    yield save(tmp_path / "checkpoints", run, optimizer, {}, step=1).wait()
    if dist.is_initialized():
        dist.destroy_process_group()


STATE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "seed": (lambda state: state.update(seed="x"), "seed is 'x', not a"),
    "no model": (lambda state: state.pop("model"), "model is missing"),
    "model": (lambda state: state.update(model=[]), "model is [], not an object"),
    "base": (lambda state: state["model"].update(base={"a": "float32-99x"}), "model.base.a is 'float32-99x'"),
    "world": (lambda state: state["world"].update(size=-1), "world.size is -1, not a whole number from 1 on"),
    "ranks": (lambda state: state["world"].update(size=3), "rng has 1 entries for 3 ranks"),
    "random": (lambda state: state.update(rng=[{"torch": 3}]), "rng[0] is"),
    "groups": (lambda state: state["optimizer"]["groups"][0].update(params=3), "optimizer.groups[0].params is 3, not a list"),
    "numbers": (lambda state: state["optimizer"].update(numbers={"z": {}}), "'z', which is in no group"),
}  # fmt: skip


@pytest.mark.parametrize("case", STATE)
def test_a_state_that_is_none(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str):
    change, words = STATE[case]
    change_state(checkpoint, change)
    with pytest.raises(CheckpointError) as error:
        files.read_state(checkpoint)
    assert words in str(error.value) and "state.json" in str(error.value)
    assert main(["ckpt", "verify", str(checkpoint)]) == 4 and words in capsys.readouterr().out
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 4 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state["optimizer"]["groups"][0]["options"].update(lr="fast"), "the optimizer's lr was 'fast'"),
        (lambda state: state["optimizer"]["groups"][0]["options"].update(betas=[0.9]), r"the optimizer's betas was \[0.9\]"),
        (lambda state: state["rng"][0].update(torch="AAAA"), "the random states cannot be restored"),
    ],
    ids=["rate", "betas", "random"],
)  # fmt: skip
def test_values_that_do_not_fit_the_run(checkpoint: Path, change: Callable[[Any], Any], words: str):
    change_state(checkpoint, change)
    run, optimizer = started(stack=ALONE, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=words):
        load(checkpoint, run, optimizer)


MODEL: dict[str, tuple[Callable[[Any], Any], str]] = {
    "layers": (lambda model: model["config"].update(num_hidden_layers=10**9), "num_hidden_layers=1000000000 must be"),
    "other shapes": (lambda model: model["config"].update(vocab_size=300), "which its model has not"),
    "adapters": (lambda model: model.update(adapters={"default": {"peft_type": "LORA", "r": "x"}}), "no model that can be built"),
    "a pattern": (
        lambda model: model.update(adapters={"default": {"peft_type": "LORA", "target_modules": "(a+)+$"}}),
        "refusing adapters with the pattern",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODEL)
def test_a_model_that_cannot_be_built(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str):
    change, words = MODEL[case]
    change_state(checkpoint, lambda state: change(state["model"]))
    assert main(["export", str(checkpoint), str(tmp_path / "out")]) == 4
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said and not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [-1, 10**20, "x", None, True, 1.5], ids=str)
def test_sizes_in_a_manifest(checkpoint: Path, capsys: pytest.CaptureFixture[str], value: Any):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"]["state.json"]["size"] = value
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert main(["ckpt", "verify", str(checkpoint)]) == 4
    assert "files.state.json.size is" in capsys.readouterr().out


def test_what_reading_would_refuse_is_not_written(tmp_path: Path):
    run, optimizer = started(stack=ALONE, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="extra cannot be written as JSON"):
        save(tmp_path, run, optimizer, {"best": float("inf")}, step=1)
    if dist.is_initialized():
        dist.destroy_process_group()
