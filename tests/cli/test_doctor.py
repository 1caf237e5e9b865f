"""`ithaca doctor`: what is there is told, what is broken is told as such, and nobody is named."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ithaca.cli import doctor, doctor_parts


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ithaca", "doctor", *arguments],
        capture_output=True, text=True, env={**os.environ, **environment},
    )  # fmt: skip


def test_the_block_for_real(tmp_path: Path):
    (tmp_path / "rich.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'rich'\", name='rich')"
    )  # nothing is drawn
    done = run("--json", HOME=str(tmp_path), PYTHONPATH=f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    assert done.returncode == 0, done.stderr
    block = json.loads(done.stdout)
    assert list(block) == ["ithaca", "packages", "cuda", "gpus", "host", "attention", "hints"]
    assert "broken" not in done.stdout
    assert block["packages"]["torch"] == torch.__version__ and block["gpus"]["count"] == torch.cuda.device_count()
    assert set(block["attention"]) == {"fa4", "cudnn", "flash", "cpu", "math", "auto takes"}
    if not torch.cuda.is_available():
        assert block["attention"]["cpu"] == "ok" and block["attention"]["auto takes"] == "cpu"
        assert "needs a CUDA device" in block["attention"]["flash"]
    for name in ("memory", "memory speed", "states", "cpus", "locked memory", "/dev/shm", "temporary disk"):
        assert block["host"][name]
    host = socket.gethostname()
    assert str(tmp_path) not in done.stdout and (host == "localhost" or host not in done.stdout)


def test_a_torch_that_cannot_be_imported_is_printed_as_such(tmp_path: Path):
    (tmp_path / "torch").mkdir()
    cause = f"libcudart.so.13: cannot open {tmp_path}/lib on {socket.gethostname()}\nand more"
    (tmp_path / "torch" / "__init__.py").write_text(f"raise OSError({cause!r})")
    for name in ("yaml", "psutil", "rich"):  # nor does it lean on anything else that may be broken
        (tmp_path / f"{name}.py").write_text("raise ImportError('no')")
    for words in ([], ["--json"]):
        done = run(*words, HOME=str(tmp_path), PYTHONPATH=str(tmp_path))
        assert done.returncode == 0 and done.stderr == ""
        assert done.stdout.count("OSError: libcudart.so.13: cannot open ~/lib on ") == 3  # cuda, gpus, attention
        assert str(tmp_path) not in done.stdout and "and more" not in done.stdout and "memory" in done.stdout
        if socket.gethostname() != "localhost":
            assert "~/lib on <host>" in done.stdout
    block = json.loads(done.stdout)
    assert block["host"]["memory"] == "broken: ImportError: no" and block["host"]["/dev/shm"]
    assert block["gpus"]["broken"].startswith("OSError") and block["packages"]["torch"] == torch.__version__


def test_names_are_taken_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/data/alice")
    monkeypatch.setenv("LOGNAME", "alice")
    said = {"a": ["/data/alice/x failed for alice", "/home/bob/lib"], "b": 3, "malice": "malice /data/alices"}
    assert doctor.without_names(said) == {
        "a": ["~/x failed for <user>", "~/lib"],
        "b": 3,
        "malice": "malice /data/alices",
    }


def test_hints_name_a_command():
    packages = {name: None for name, _, _ in doctor_parts.OPTIONAL}
    small = {"/dev/shm": "67.1 MB (67.1 MB free)", "locked memory": "8.4 MB", "infiniband": 8}
    hopper = {"gpus": {"count": 8, "capability": "9.0"}, "packages": packages, "host": small}
    found = doctor_parts.hints(hopper)
    commands = [hint["command"] for hint in found if "is not installed" in hint["what"]]
    assert "pip install --pre flash-attn-4" in commands and "pip install torchao" in commands and len(commands) == 8
    assert [hint["what"] for hint in found[8:]] == ["/dev/shm is small", "locked memory is limited"]
    ampere = {**hopper, "gpus": {"count": 1, "capability": "8.6"}}
    assert not any("flash-attn-4" in hint["what"] for hint in doctor_parts.hints(ampere))  # it would not run there
    assert doctor_parts.hints({"cuda": {"driver": "580.1"}})[0]["what"] == "torch sees no GPU"
    assert [hint["what"] for hint in doctor_parts.hints({})] == ["no GPU"]
    assert (
        doctor_parts.hints({"gpus": {"count": 1, "capability": "9.0"}, "host": {"/dev/shm": "16.0 GB (1 GB free)"}})
        == []
    )


def test_nvidia_smi_that_is_missing_or_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor_parts._nvidia_smi("--query-gpu=name") == [] and doctor_parts._driver() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    assert doctor_parts._links() == {}
    tool.write_text(
        "#!/bin/sh\n"
        "if [ \"$1\" = nvlink ]; then printf 'GPU 0: NVIDIA H100 (UUID: x)\\n\\t Link 0: 26.5 GB/s\\n\\t Link 1: 26.5 GB/s\\n'\n"
        "else echo '0, 5, 16'; fi\n"
    )
    assert doctor_parts._links() == {0: "PCIe 5 x16, 2 NVLinks"}
