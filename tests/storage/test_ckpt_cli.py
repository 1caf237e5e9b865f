"""`ithaca ckpt ls | verify`: what people and programs are told about the checkpoints of a run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ithaca.cli.main import main
from ithaca.storage import files
from ithaca.storage.checkpoint import save

from .runs import started
from .test_files import make


def ckpt(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    code = main(["ckpt", *map(str, words)])
    heard = capsys.readouterr()
    return code, heard.out, heard.err


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """Two checkpoints of a real run on one rank."""
    folder = tmp_path / "run"
    run, optimizer = started(stack=dict(shard_parameters=False), num_hidden_layers=1)
    for step in (10, 20):
        save(folder / "checkpoints", run, optimizer, {}, step=step)
    return folder


def test_ls_says_what_is_there(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    checkpoints = run_folder / "checkpoints"
    (checkpoints / ".step-30.ab.tmp").mkdir()
    code, out, _ = ckpt(capsys, "ls", run_folder)
    lines = out.splitlines()
    assert code == 0 and lines[0].split() == ["checkpoint", "time", "size", "files", "ranks", "state", "run"]
    run = (checkpoints / "RUN").read_text().strip()
    assert lines[1].startswith("step-20 (LATEST)  20") and lines[1].endswith(f"4      1      as written  {run}")
    assert lines[2].startswith("step-10 ") and lines[3].startswith(".step-30.ab.tmp: a save under way")
    code, out, _ = ckpt(capsys, "ls", run_folder, "--json")
    found = json.loads(out)
    assert [each["step"] for each in found["checkpoints"]] == [20, 10] and len(found["unfinished"]) == 1
    newest = found["checkpoints"][0]
    assert newest["world"] == 1 and newest["latest"] and newest["state"] == "as written" and newest["run"] == run
    assert newest["bytes"] == sum(each.stat().st_size for each in (checkpoints / "step-20").iterdir())
    os.utime(checkpoints / "step-20/state.json")
    (checkpoints / "step-10/state.json").write_text("{}")
    code, out, _ = ckpt(capsys, "ls", checkpoints)
    assert "touched" in out.splitlines()[1] and "damaged" in out.splitlines()[2]
    assert "step-10 is damaged: state.json has 2 bytes, the manifest says" in out and "ckpt verify' reads it" in out


def test_verify_reads_every_byte_and_names_each_problem(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    checkpoints = run_folder / "checkpoints"
    code, out, _ = ckpt(capsys, "verify", run_folder)
    assert code == 0 and [line.split(" (")[0] for line in out.splitlines()] == ["step-20: ok", "step-10: ok"]
    shard = checkpoints / "step-20/__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    (checkpoints / "step-20/more").touch()
    code, out, _ = ckpt(capsys, "verify", run_folder)
    assert code == 4 and "step-20: DAMAGED" in out and "step-10: ok" in out
    assert "  __0_0.distcp has changed since it was saved (SHA-256 differs)\n  more is not in the manifest" in out
    assert out.splitlines()[-1] == f"1 of 2 damaged; newest good one: {checkpoints / 'step-10'}"
    code, out, _ = ckpt(capsys, "verify", checkpoints / "step-20", "--json")
    (found,) = json.loads(out)["checkpoints"]
    assert code == 4 and not found["ok"] and len(found["problems"]) == 2


def test_all_kinds_of_damage_are_found_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """F6"""
    for step in range(1, 6):
        make(tmp_path, step)
    (tmp_path / "step-1/shard").unlink()
    (tmp_path / "step-2/shard").write_bytes(b"")
    (tmp_path / "step-3/manifest.json").unlink()
    shutil.copy(tmp_path / "step-5/manifest.json", tmp_path / "step-4/manifest.json")
    (tmp_path / "LATEST").unlink()
    code, out, _ = ckpt(capsys, "verify", tmp_path, "--json")
    found = {each["step"]: " ".join(each["problems"]) for each in json.loads(out)["checkpoints"]}
    assert code == 4 and found[5] == "" and found[1] == "shard is missing"
    assert found[2] == "shard has 0 bytes, the manifest says 7" and "manifest.json does not exist" in found[3]
    assert "does not belong to this folder (step 5)" in found[4]
    assert files.latest(tmp_path) == tmp_path / "step-5"


def test_a_wrong_path_is_met_with_what_is_there(run_folder: Path, capsys: pytest.CaptureFixture[str]):
    for path, words in (
        (run_folder / "checkpoints/step-30", "step-30 does not exist; there are step-20, step-10; name a run folder"),
        (run_folder / "checkpoints/LATEST", "LATEST is a file; name a run folder"),
        (run_folder.parent, "has no checkpoints; it has runs with some: run; name a run folder"),
        (run_folder / "nowhere", "nowhere does not exist; name a run folder"),
    ):
        for action in ("ls", "verify"):
            code, out, err = ckpt(capsys, action, path)
            assert code == 4 and out == "" and words in err and err.startswith("ithaca ckpt: ")


def test_export_is_the_same_command_under_both_names(run_folder: Path, tmp_path: Path, capsys: Any):
    assert main(["ckpt", "export", str(run_folder), str(tmp_path / "one"), "--dtype", "fp32"]) == 0
    assert main(["export", str(run_folder), str(tmp_path / "two"), "--dtype", "fp32"]) == 0
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
    assert one == two and "wrote LlamaForCausalLM of step 20" in capsys.readouterr().out


def test_looking_needs_no_torch(run_folder: Path):
    program = "import sys; from ithaca.cli.main import main; code = main(sys.argv[1:]); print('torch' in sys.modules); exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", program, "ckpt", "ls", str(run_folder)], capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "False", done.stderr
