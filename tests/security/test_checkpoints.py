"""A checkpoint from somebody else: nothing in it is run, whatever file it is in. F8; `.metadata` itself is in tests/storage."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ithaca.cli.main import main
from ithaca.storage import check, files
from ithaca.storage.checkpoint import CheckpointError, load, save
from ithaca.storage.digest import digests
from ithaca.storage.export import export_checkpoint
from ithaca.storage.safe_metadata import read_metadata

from ..storage.runs import started
from .payloads import Marker, Payload, code

ALONE = dict(shard_parameters=False)


def checkpoint(tmp_path: Path, **model: Any) -> Path:
    run, optimizer = started(stack=ALONE, num_hidden_layers=1, **model)
    return save(tmp_path / "checkpoints", run, optimizer, {}, step=1).wait()


def forge(path: Path, name: str, data: bytes) -> None:
    """Replace a file, and what the manifest says of it, as an attacker would."""
    (path / name).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    (digest,) = digests({name: path / name}).values()
    manifest["files"][name] = {"size": len(data), "sha256": digest, "modified": (path / name).stat().st_mtime_ns}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert files.changed(path, list(files.listed(path))) == [], "its bytes are what the manifest says"


def change_state(path: Path, change: Any) -> None:
    state = json.loads((path / "state.json").read_text())
    change(state)
    forge(path, "state.json", json.dumps(state).encode())


def test_a_shard_with_a_payload_in_the_place_of_a_tensor(tmp_path: Path, marker: Marker):
    path = checkpoint(tmp_path)
    metadata = read_metadata(path, files.listed(path))
    evil = io.BytesIO()
    torch.save(Payload(marker.path), evil)
    torch.load(io.BytesIO(evil.getvalue()), weights_only=False)
    marker.live()
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(evil.getvalue())
    forge(path, "__0_0.distcp", evil.getvalue())
    forge(path, ".metadata", pickle.dumps(metadata))
    run, optimizer = started(stack=ALONE, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match=r"reading .* failed"):
        load(path, run, optimizer)
    with pytest.raises(CheckpointError, match=r"reading .* failed"):
        export_checkpoint(path, tmp_path / "out")


def test_the_command_line_says_so_with_code_4(tmp_path: Path, marker: Marker, capsys: pytest.CaptureFixture[str]):
    path = checkpoint(tmp_path)
    pickle.loads(pickle.dumps(Payload(marker.path)))
    marker.live()
    forge(path, ".metadata", pickle.dumps(Payload(marker.path)))
    for words in (["export", str(path), str(tmp_path / "out")], ["ckpt", "export", str(path), str(tmp_path / "out")]):
        assert main(words) == 4
        heard = capsys.readouterr().err
        assert (
            "refusing to load" in heard and "posix.mkdir, which no checkpoint needs and which could run code" in heard
        )
    assert main(["ckpt", "verify", str(path)]) == 4 and "refusing to load" in capsys.readouterr().out
    assert main(["ckpt", "ls", str(path)]) == 0  # which does not look inside


def test_a_model_config_that_names_code_or_kernels(tmp_path: Path, marker: Marker, monkeypatch: pytest.MonkeyPatch):
    """auto_map, and names of kernels on the Hub, in state.json."""
    from transformers.integrations import hub_kernels

    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", lambda *_, **__: marker.path.touch())
    path = checkpoint(tmp_path)
    hub_kernels.load_and_register_attn_kernel("evil/kernel")
    marker.live()
    (tmp_path / "evil.py").write_text(code(marker.path, "class C: pass"))

    def change(state: Any) -> None:
        state["model"]["name_or_path"] = str(tmp_path)
        config = state["model"]["config"]
        config["auto_map"] = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}
        for key in ("attn_implementation", "_attn_implementation", "_attn_implementation_internal"):
            config[key] = "evil/kernel"

    change_state(path, change)
    export_checkpoint(path, tmp_path / "out")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert "auto_map" not in written and "evil" not in json.dumps(written)
    change_state(path, lambda state: state["model"]["config"].update(model_type="evil"))
    with pytest.raises(CheckpointError, match="holds a 'evil' model, which this ithaca does not know"):
        export_checkpoint(path, tmp_path / "again")


@pytest.mark.parametrize("key", ["megatron_core", "corda_config", "lora_ga_config", "peft_type"])
def test_adapter_settings_that_load_code(tmp_path: Path, marker: Marker, monkeypatch: pytest.MonkeyPatch, key: str):
    """PEFT imports the module that megatron_core names, and unpickles the caches that others name."""
    path = checkpoint(tmp_path, lora=True)
    (tmp_path / "evil_peft.py").write_text(code(marker.path))
    monkeypatch.syspath_prepend(tmp_path)
    __import__("evil_peft")
    marker.live()
    del sys.modules["evil_peft"]
    evil = {
        "megatron_core": {"megatron_core": "evil_peft", "megatron_config": {"a": 1}},
        "corda_config": {"corda_config": {"cache_file": str(tmp_path / "evil.pt")}, "init_lora_weights": "corda"},
        "lora_ga_config": {"lora_ga_config": {"cache_file": str(tmp_path / "evil.pt")}},
        "peft_type": {"peft_type": "ADALORA"},
    }[key]
    change_state(path, lambda state: state["model"]["adapters"]["default"].update(evil))
    with pytest.raises(
        CheckpointError, match=f"refusing to build a model with .*{'ADALORA' if key == 'peft_type' else key}"
    ):
        export_checkpoint(path, tmp_path / "out")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "..", "a/b", ""])
def test_names_that_lead_out_of_the_folder(tmp_path: Path, name: str):
    path = checkpoint(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"size": 1, "sha256": "0" * 64}
    (path / "manifest.json").write_text(json.dumps(manifest))
    run, _ = started(stack=ALONE, num_hidden_layers=1)
    with pytest.raises(CheckpointError, match="has a bad entry"):
        load(path, run)
    assert "has a bad entry" in check.verify(path)[0]


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"format": 2}', b"\xff\xfe", b"null", b'{"format": 2, "step": 1e400}']
)
@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
def test_odd_json_is_an_error_in_words(
    tmp_path_factory: pytest.TempPathFactory, whole: Path, name: str, content: bytes
):
    path = tmp_path_factory.mktemp("odd") / "step-1"
    shutil.copytree(whole, path)
    if name == "state.json":
        manifest = json.loads((path / "manifest.json").read_text())
        (path / name).write_bytes(content)
        (digest,) = digests({name: path / name}).values()
        manifest["files"][name] = {"size": len(content), "sha256": digest}
        (path / "manifest.json").write_text(json.dumps(manifest))
    else:
        (path / name).write_bytes(content)
    run, _ = started(stack=ALONE, num_hidden_layers=1)
    with pytest.raises(CheckpointError):
        load(path, run)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("whole"))
