"""Data, settings and results from somebody else: read, never run; and no secret leaves with ours."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ithaca.base.files import inside
from ithaca.base.redact import redacted
from ithaca.base.versions import FLOORS, too_old
from ithaca.cli.main import main
from ithaca.config import load
from ithaca.data.folder import Packed
from ithaca.data.manifest import content_of
from ithaca.data.pack import pack
from ithaca.data.plan import open_plan
from ithaca.data.source import Source
from ithaca.observe.report.page import render

from .payloads import Marker, Payload, code

ROOT = Path(__file__).parents[2]


def objects(marker: Marker) -> bytes:
    """A .npy file with a payload in it."""
    data = io.BytesIO()
    np.save(data, np.array([Payload(marker.path)], dtype=object), allow_pickle=True)
    np.load(io.BytesIO(data.getvalue()), allow_pickle=True)
    marker.live()
    return data.getvalue()


def test_an_array_of_objects_as_data(tmp_path: Path, marker: Marker):
    (tmp_path / "a.npy").write_bytes(objects(marker))
    with pytest.raises(ValueError, match="it holds Python objects"):
        pack([Source(str(tmp_path / "a.npy"))], tmp_path / "out", vocabulary=10, eos=False, quiet=True, workers=1)


def test_an_array_of_objects_in_a_packed_folder(tmp_path: Path, marker: Marker):
    np.save(tmp_path / "a.npy", np.arange(64))
    pack([Source(str(tmp_path / "a.npy"))], tmp_path / "out", vocabulary=100, eos=False, quiet=True, workers=1)
    packed = Packed(tmp_path / "out")
    open_plan(packed, 16)
    plans = list((tmp_path / "out/rows").rglob("*.npy"))
    assert plans
    for path in plans:
        path.write_bytes(objects(marker))
    with suppress(ValueError, OSError):  # refused, or made again
        open_plan(Packed(tmp_path / "out"), 16)


def test_a_parquet_file_with_a_pickled_type(tmp_path: Path, marker: Marker):
    """CVE-2023-47248: the type of a column, as a pickle in the file."""
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    evil = pickle.dumps(Payload(marker.path))
    pickle.loads(evil)
    marker.live()
    about = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": evil}
    field = pyarrow.field("input_ids", pyarrow.list_(pyarrow.int64()), metadata=about)
    table = pyarrow.table(
        [pyarrow.array([[1, 2, 3]] * 4, pyarrow.list_(pyarrow.int64()))], schema=pyarrow.schema([field])
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    assert evil in parquet.read_schema(tmp_path / "a.parquet").field(0).metadata.values()
    pack([Source(str(tmp_path / "a.parquet"))], tmp_path / "out", vocabulary=10, eos=False, quiet=True, workers=1)
    assert Packed(tmp_path / "out").manifest["tokens"] == 12


@pytest.mark.parametrize("name", ["../secret.txt", "/secret.txt", "tokenizer/../../secret.txt", "link"])
def test_a_packed_folder_that_names_files_of_others(tmp_path: Path, capsys: Any, name: str):
    """Its tokens would be somebody's file, and `inspect` would print them."""
    np.save(tmp_path / "a.npy", np.arange(64))
    pack([Source(str(tmp_path / "a.npy"))], tmp_path / "out", vocabulary=70_000, eos=False, quiet=True, workers=1)
    path = tmp_path / "out/manifest.json"
    manifest = json.loads(path.read_text())
    secret = "the secret is 4711".encode("utf-16-le")
    (tmp_path / "secret.txt").write_bytes(secret.ljust(256, b"\0"))
    (tmp_path / "out/link").symlink_to(tmp_path / "secret.txt")
    named = name if name != "/secret.txt" else str(tmp_path / "secret.txt")
    manifest["files"][named] = manifest["files"].pop("tokens-00000.bin")
    manifest["shards"][0]["file"] = named
    digests = {name: about["sha256"] for name, about in manifest["files"].items() if "tokenizer/" not in name}
    manifest["content"] = content_of(digests)
    path.write_text(json.dumps(manifest))
    assert main(["data", "inspect", str(tmp_path / "out")]) == 2
    heard = capsys.readouterr()
    assert f"{named!r} leads out of {tmp_path / 'out'}" in heard.err and "Traceback" not in heard.err
    assert str(secret[0]) not in heard.out and heard.out == ""


def test_names_stay_in_their_folder(tmp_path: Path):
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/a").touch()
    (folder / "near").symlink_to("sub/a")
    (folder / "far").symlink_to(tmp_path)
    (folder / "circle").symlink_to("circle")
    for name in ("sub/a", "near", "new", "sub/./a"):
        assert inside(folder, name) == folder / name
    outside = [
        "..",
        "../x",
        "sub/../../x",
        "/etc/passwd",
        "",
        ".",
        "a\0b",
        "..\\x",
        "far/x",
        "far",
        "circle",
        "\ud800",
        None,
        5,
        ["x"],
    ]
    for name in outside:
        with pytest.raises(ValueError, match=r"leads out of|is not the name of a file of"):
            inside(folder, name)
    assert inside(folder, "far", links=True) == folder / "far"  # as in the Hugging Face cache
    with pytest.raises(ValueError, match="leads out of"):
        inside(folder, "../x", links=True)


def test_a_dataset_folder_with_a_script(tmp_path: Path, marker: Marker):
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "mine"
    datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 4}).save_to_disk(str(folder))
    for name in ("mine.py", "dataset.py", "__init__.py"):
        (folder / name).write_text(code(marker.path))
    subprocess.run([sys.executable, str(folder / "mine.py")], check=True)
    marker.live()
    pack([Source(str(folder))], tmp_path / "out", vocabulary=10, eos=False, quiet=True, workers=1)


def test_a_line_of_json_is_text(tmp_path: Path, marker: Marker):
    """Python in a string stays one."""
    evil = f"__import__('os').mkdir({str(marker.path)!r})"
    subprocess.run([sys.executable, "-c", evil], check=True)
    marker.live()
    (tmp_path / "a.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3], "text": evil, "__class__": evil}) + "\n")
    pack(
        [Source(str(tmp_path / "a.jsonl"), kind="tokens")],
        tmp_path / "out",
        vocabulary=9,
        eos=False,
        quiet=True,
        workers=1,
    )


def test_yaml_with_python_in_it(tmp_path: Path, marker: Marker):
    """As a config, and as the config of a run that a report is made of."""
    evil = f"description: !!python/object/apply:os.mkdir ['{marker.path}']\n"
    yaml.load(evil, Loader=yaml.UnsafeLoader)
    marker.live()
    (tmp_path / "config.yaml").write_text(evil)
    with pytest.raises(ValueError, match=r"the tag !!python/object/apply:os\.mkdir is refused"):
        load(tmp_path / "config.yaml")
    with pytest.raises(ValueError, match=r"the tag !!python/object/apply:os\.mkdir is refused"):
        render(run=tmp_path)


def test_a_page_with_markup_in_the_names_of_a_run(tmp_path: Path):
    """The page itself is tried in a browser (tests/observe/report); here: a model's name, from a config and from a plan."""
    evil = "<script>fetch('//evil')</script><img src=x onerror=alert(1)>"
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"model": {"folder": evil}, "run": {"name": evil}, "description": evil})
    )
    page = render(run=tmp_path)
    assert evil in yaml.safe_load((tmp_path / "config.yaml").read_text())["model"]["folder"]
    assert "<script>fetch" not in page and "<img" not in page and "\\u003cscript>fetch" in page


# -- what leaves this machine -----------------------------------------------------------------------------------------

SECRETS = {
    "HF_TOKEN": "hf_" + "a1B2" * 8,
    "WANDB_API_KEY": "0123456789abcdef" * 2 + "01234567",
    "MY_PASSWORD": "correct horse",
}


def test_secrets_are_taken_out_of_texts():
    text = f"{SECRETS['HF_TOKEN']} {SECRETS['WANDB_API_KEY']} correct horse https://me:secret@host/x hf_{'Z' * 30}"
    assert redacted(text, SECRETS) == "<redacted> <redacted> <redacted> https://<redacted>@host/x <redacted>"
    harmless = "data.tokenizer: models/hf_llama  # 40 hex digits: " + "ab" * 20
    assert redacted(harmless, {"TOKENIZERS_PARALLELISM": "false--yes", "TOKEN": "short"}) == harmless


def test_no_secret_in_the_environment_block_or_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any):
    from ithaca.cli import doctor_parts
    from ithaca.training.trainer import train

    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)

    def broken() -> dict[str, Any]:
        raise RuntimeError("no login with " + " and ".join(SECRETS.values()))

    monkeypatch.setattr(doctor_parts, "PARTS", {"packages": doctor_parts.packages, "broken": broken})
    for words in (["doctor"], ["doctor", "--json"]):
        assert main(words) == 0
        heard = capsys.readouterr().out
        assert "no login with <redacted> and <redacted> and <redacted>" in heard
        assert not any(value in heard for value in SECRETS.values())
    settings = [
        "data.context=64", "train.rows=1", "train.steps=1", "train.warmup=0", "launch.cpu=1", f"run.folder={tmp_path}",
        f"description=with {SECRETS['HF_TOKEN']}", "stack.shard_parameters=false", "stack.ulysses=1", "stack.ring=1",
        "stack.store=gpu", "stack.recompute=none", "stack.tile=null",
    ]  # fmt: skip
    loaded = load(None, settings, "tiny_cpu")
    assert SECRETS["HF_TOKEN"] in loaded.text
    assert train(loaded.config, quiet=True, text=loaded.text) == 0
    for path in (tmp_path / "config.yaml", tmp_path / "checkpoints/step-1/state.json", tmp_path / "report/index.html"):
        text = path.read_text()
        assert SECRETS["HF_TOKEN"] not in text and "redacted" in text


# -- versions ---------------------------------------------------------------------------------------------------------


def test_what_we_ask_for_is_above_the_floors():
    if sys.version_info < (3, 11):
        pytest.skip("tomllib came with Python 3.11")
    import tomllib

    about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*about["dependencies"], *about["optional-dependencies"]["data"]]
    given = dict(each.split(">=") for each in asked if ">=" in each)
    assert FLOORS.keys() <= given.keys() and too_old(given) == []


def test_an_old_version_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch):
    import ithaca.base.versions as floors
    from ithaca.cli.doctor_parts import hints

    assert too_old({"torch": "2.13.0+cpu", "transformers": "5.17.0", "pyarrow": None, "other": "0.1"}) == []
    (text,) = too_old({"torch": "2.9.1+cu130"})
    assert (
        "torch 2.9.1+cu130 is too old" in text and "CVE-2026-24747" in text and "pip install -U 'torch>=2.10'" in text
    )
    block = {"packages": {"torch": "2.9.1", "peft": "1", "flash-attn-4": "1"}, "gpus": {"count": 0}, "host": {}}
    hint = next(each for each in hints(block) if each["what"].startswith("torch 2.9.1"))
    assert hint["command"] == "pip install -U 'torch>=2.10'" and "CVE" in hint["why"]
    monkeypatch.setattr(floors.metadata, "version", lambda name: "1.0")
    floors.require_floors.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"transformers 1\.0 is too old to read files of others"):
            floors.require_floors("transformers")
    finally:
        floors.require_floors.cache_clear()
