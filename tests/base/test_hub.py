"""Names on the Hub, against a real HTTP server with its routes: what is fetched, at which commit, and what is said if it is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save

from ithaca.base import hub as names
from ithaca.base.hub import fetch, find_dataset, find_name, folder, local, pins
from ithaca.cli.main import main
from ithaca.data.fetch import fetch_source
from ithaca.data.find import OTHER_SPLIT, find_files
from ithaca.data.source import Source
from ithaca.engine.model.presets import preset_config
from ithaca.storage.push import push

from ..data.make import byte_level, save_tokenizer, words
from .hub import TOKEN, Hub, Repo, point, serving, variables

SHARDS = {"model-00001-of-00002.safetensors": ["a"], "model-00002-of-00002.safetensors": ["b"]}


@pytest.fixture(scope="module")
def served() -> Iterator[Hub]:
    with serving() as hub:
        yield hub


@pytest.fixture
def hub(served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    served.repos.clear()
    served.asked.clear()
    point(monkeypatch, served, tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    return served


def sharded(**more: bytes) -> dict[str, bytes]:
    """A model as people publish them: shards and their index, and much that is not to be fetched."""
    index = {name: file for file, inside in SHARDS.items() for name in inside}
    return {
        "config.json": b'{"model_type": "llama"}',
        "generation_config.json": b"{}",
        "tokenizer.json": b"{ }",
        "model.safetensors.index.json": json.dumps({"weight_map": index}).encode(),
        **{file: save({name: torch.ones(2) for name in inside}) for file, inside in SHARDS.items()},
        "consolidated.safetensors": b"x" * 50,
        "original/model.safetensors": b"x" * 50,
        "pytorch_model.bin": b"pickle",
        "modeling_evil.py": b"raise SystemExit",
        "README.md": b"# a model",
        **more,
    }


NAMES = {
    "owner/name": "models/owner/name@main",
    "owner/name@v1.0": "models/owner/name@v1.0",
    "owner/name@refs/pr/3": "models/owner/name@refs/pr/3",
    "hf:here/name": "models/here/name@main",
    f"here/name@{'0' * 40}": f"models/here/name@{'0' * 40}",  # as a run writes it down
    "here/name": None,  # a folder `here` is there: a path that was mistyped
    "here": None,
    "./owner/name": None,
    "/owner/name": None,
    "~/name": None,
    "a/b/c": None,
    "owner/config.json": None,
    "llama3_8b": None,
    "owner/name@../x": None,
    "": None,
}


@pytest.mark.parametrize("text", NAMES)
def test_a_name_or_a_path(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(names.PINS, "{}")
    (tmp_path / "here").mkdir()
    found = find_name(text)
    assert (None if found is None else found.asked) == NAMES[text]
    if found is None:
        assert fetch(text) == text and local(text) == Path(text).expanduser()


def test_only_what_is_read_comes_and_at_one_commit(hub: Hub):
    first = hub.add("models/owner/name", sharded())
    assert fetch("owner/name", "config") == f"owner/name@{first}"
    assert hub.fetched() == ["config.json"]
    pinned = fetch("owner/name")
    assert pinned == f"owner/name@{first}" and local("owner/name") == local(pinned)
    wanted = ["config.json", "generation_config.json", *SHARDS, "model.safetensors.index.json", "tokenizer.json"]
    assert sorted(hub.fetched()) == sorted(wanted)
    assert sorted(path.name for path in local(pinned).iterdir()) == sorted(wanted)
    assert load_file(local(pinned) / "model-00002-of-00002.safetensors")["b"].tolist() == [1, 1]
    # the branch moves on: this process, and those it starts, stay; another one finds the new commit
    second = hub.add("models/owner/name", sharded())
    hub.asked.clear()
    assert fetch("owner/name") == pinned and not hub.asked
    os.environ[names.PINS] = "{}"
    assert fetch("owner/name", "tokenizer") == f"owner/name@{second}" != pinned
    hub.asked.clear()
    assert fetch(pinned) == pinned and not hub.asked  # a commit that is whole in the cache asks nobody
    assert pins() == {"models/owner/name@main": second}


def test_a_file_that_is_gone_comes_again(hub: Hub):
    hub.add("models/owner/name", sharded())
    gone = folder("owner/name", "model") / "model-00001-of-00002.safetensors"
    gone.resolve().write_bytes(b"half")
    hub.asked.clear()
    with pytest.raises(ValueError, match=r"model-00001-of-00002.safetensors of owner/name did not arrive whole"):
        fetch("owner/name")  # huggingface_hub believes its cache; we do not
    gone.resolve().unlink()
    gone.unlink()
    assert gone == folder("owner/name", "model") / gone.name and gone.stat().st_size > 4
    assert hub.fetched() == [gone.name]


REFUSED: dict[str, tuple[dict[str, bytes] | None, str, list[str]]] = {
    "nobody": (None, "owner/name", ["'owner/name' is neither a folder here nor a model on the Hub", "hf auth login"]),
    "no revision": ({}, "owner/name@v9", ["has no revision 'v9'", "lists branches"]),
    "no config": ({"config.json": b""}, "owner/name", ["has no config.json"]),
    "pickles": (
        {**dict.fromkeys([*SHARDS, "model.safetensors.index.json"], b"")},
        "owner/name",
        ["has neither model.safetensors nor", "pytorch_model.bin", "can run code"],
    ),
    "an index that lies": (
        {"model.safetensors.index.json": b'{"weight_map": {"a": "x.safetensors"}}'},
        "owner/name",
        ["names x.safetensors, which the repository does not have"],
    ),
    "an index that leads out": (
        {"model.safetensors.index.json": b'{"weight_map": {"a": "../x.safetensors"}}'},
        "owner/name",
        ["leads out of"],
    ),
    "an index of pickles": (
        {"model.safetensors.index.json": b'{"weight_map": {"a": "pytorch_model.bin"}}'},
        "owner/name",
        ["pytorch_model.bin, which is no safetensors file"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, hub: Hub, capsys: pytest.CaptureFixture[str]):
    changed, name, said = REFUSED[case]
    if changed is not None:
        files = {file: data for file, data in {**sharded(), **changed}.items() if data}
        hub.add("models/owner/name", files)
    with pytest.raises(ValueError) as refusal:
        fetch(name)
    assert all(words in str(refusal.value) for words in said) and "\n" not in str(refusal.value)
    assert not any(file.endswith((".bin", ".py")) for file in hub.fetched())


def test_a_gated_model(hub: Hub):
    hub.add("models/owner/name", sharded())
    hub.repos["models/owner/name"].gated = True  # its list is public, its files are not
    with pytest.raises(
        ValueError, match=r"owner/name is gated: .* Open http://.*/owner/name, ask for access, .* HF_TOKEN"
    ):
        fetch("owner/name")


def test_without_a_network(hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    commit = hub.add("models/owner/name", sharded())
    fetch("owner/name", "config")
    for offline in (True, False):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        if not offline:
            monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        os.environ[names.PINS] = "{}"
        assert fetch("owner/name", "config") == f"owner/name@{commit}"  # what is there is used, and that is said
        assert f"owner/name is taken from the cache, at {commit}" in capsys.readouterr().err
        why = "HF_HUB_OFFLINE forbids to ask the Hub" if offline else "cannot be reached for owner/"
        for name in ("owner/name", "owner/other"):
            with pytest.raises(ValueError, match=f"{why}.*hf download {name} --revision main"):
                fetch(name)


def test_a_snapshot_of_others(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`hf download` has been there: no list of ours, and no network."""
    from huggingface_hub import snapshot_download

    commit = hub.add("models/owner/name", sharded())
    there = Path(snapshot_download("owner/name"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("owner/name") == f"owner/name@{commit}" and local("owner/name") == there.resolve()
    (there / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="is not whole in the cache"):
        fetch("owner/name")


def test_one_of_several_processes_fetches(hub: Hub, tmp_path: Path):
    hub.add("models/owner/name", sharded())
    code = "import sys; from ithaca.base.hub import fetch; sys.stdin.read(1); print(fetch('owner/name'))"
    environ = {
        **os.environ,
        **variables(hub, tmp_path / "home"),
        "PYTHONPATH": os.pathsep.join(sys.path),
        names.PINS: "{}",
    }
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        for _ in range(2)
    ]
    answers = {process.communicate("x")[0] for process in started}
    assert len(answers) == 1 and answers.pop().startswith("owner/name@")
    assert len(hub.fetched()) == len(set(hub.fetched())) == 6


# -- documents --------------------------------------------------------------------------------------------------------

DATA = {
    "README.md": b"---\n---",
    ".gitattributes": b"",
    "data/train-00000-of-00002.jsonl": b'{"text": "a"}\n',
    "data/train-00001-of-00002.jsonl": b'{"text": "b"}\n',
    "data/test-00000-of-00001.jsonl": b'{"text": "c"}\n',
    "more/deep/x.jsonl": b'{"text": "d"}\n',
    "loader.py": b"raise SystemExit",
}
CHOSEN = {
    "hf:owner/data": (None, ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]),
    "hf:owner/data@main": ("test", ["data/test-00000-of-00001.jsonl"]),
    "hf:owner/data/data": ("train", ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"]),
    "hf:owner/data/data/*-00000-*": ("train", ["data/train-00000-of-00002.jsonl"]),
    "hf:owner/data/more": (None, ["more/deep/x.jsonl"]),
    "hf:owner/data/**/x.jsonl": (None, ["more/deep/x.jsonl"]),
    "hf:owner/data/more/deep/x.jsonl": (None, ["more/deep/x.jsonl"]),
}


@pytest.mark.parametrize("path", CHOSEN)
def test_the_files_of_a_dataset(path: str, hub: Hub):
    split, wanted = CHOSEN[path]
    commit = hub.add("datasets/owner/data", DATA)
    source = fetch_source(Source(path, split=split))
    assert sorted(hub.fetched()) == wanted and f"hf:owner/data@{commit}" in source.path
    files = find_files(source)
    root = names.Name("owner/data", commit, "dataset").snapshot(commit)
    assert [entry.relative_to(root).as_posix() for entry in files.paths] == wanted and files.format == "jsonl"
    if path == "hf:owner/data":
        assert files.left_out[OTHER_SPLIT] == ["data/test-00000-of-00001.jsonl", "more/deep/x.jsonl"]
        # another split in the same folder changes nothing
        fetch_source(Source(path, split="test"))
        assert find_files(source) == files


def test_what_a_dataset_has_not(hub: Hub):
    hub.add("datasets/owner/data", DATA)
    with pytest.raises(
        ValueError, match=r"no file to read there .*left out: 4 files, not of the split .*refs/convert/parquet"
    ):
        fetch_source(Source("hf:owner/data", split="nightly"))
    with pytest.raises(ValueError, match="nor a dataset on the Hub"):
        fetch_source(Source("hf:owner/nothing"))
    for bad in ("hf:owner", "hf:owner/data/../../etc", "hf:a/b@c d"):
        with pytest.raises(ValueError, match=r"is no dataset of the Hub|leads out of the repository"):
            find_dataset(bad)
    assert not hub.fetched()


# -- from a name to an exported model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer, as save_pretrained leaves it."""
    from transformers import AutoModelForCausalLM

    place = save_tokenizer(tmp_path_factory.mktemp("published"), byte_level(size=300))
    config = preset_config("tiny_llama", vocab_size=320, num_hidden_layers=1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(place)
    return place


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(each) for each in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


RUN = """\
model: {folder: owner/tiny, dtype: fp32, lora: {rank: 2}}
data: {context: 64, sources: [hf:owner/texts]}
stack: {tile: 64}
train: {steps: 1, rows: 1, lr: 1e-3, warmup: 0}
run: {folder: run}
launch: {cpu: 1}
"""


@pytest.mark.filterwarnings(
    "ignore:Use 'content=:DeprecationWarning"
)  # huggingface_hub 1.33 uploads in httpx's old words
def test_from_a_name_to_a_pushed_model(
    hub: Hub, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    commit = hub.add("models/owner/tiny", published)
    lines = "".join(json.dumps({"text": words(40, seed=i)}) + "\n" for i in range(4))
    texts = hub.add("datasets/owner/texts", {"train.jsonl": lines.encode(), "test.jsonl": b'{"text": "x"}\n'})
    (tmp_path / "run.yaml").write_text(RUN)
    code, out, err = run(capsys, "train", "run.yaml")
    assert code == 0 and "trains tiny at 64 tokens" in out, err
    pinned = {"models/owner/tiny@main": commit, "datasets/owner/texts@main": texts}
    assert json.loads((tmp_path / "run" / "hub.json").read_text()) == pinned
    written = (tmp_path / "run" / "config.yaml").read_text()
    assert f"owner/tiny@{commit}" in written and f"hf:owner/texts@{texts}" in written
    manifest = json.loads((tmp_path / "run" / "data" / "manifest.json").read_text())
    assert manifest["tokenizer"]["name"] == f"owner/tiny@{commit}"
    assert [(each["name"], [file["name"] for file in each["files"]]) for each in manifest["sources"]] == [
        (f"hf:owner/texts@{texts}", ["train.jsonl"])
    ]
    # both branches move on; the run does not
    hub.add("models/owner/tiny", {"config.json": b"{}"})
    hub.add("datasets/owner/texts", {"train.jsonl": b'{"text": "other"}\n'})
    monkeypatch.setenv(names.PINS, "{}")
    code, out, err = run(capsys, "train", "run.yaml", "--train.steps", 2, "--check")
    assert code == 0 and "trains step 2 of 2, from step-1" in out, err
    assert f"owner/tiny@{commit}" in out and f"hf:owner/texts@{texts}" in out
    assert json.loads((tmp_path / "run" / "hub.json").read_text()) == pinned
    monkeypatch.setenv(names.PINS, "{}")
    code, out, err = run(capsys, "train", "run.yaml", "--model.folder", "owner/tiny@v2", "--train.steps", 3)
    assert code == 2 and "owner/tiny on the Hub has no revision 'v2'" in err

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.repos["models/me/mine"] = Repo()
    hub.repos["models/me/mine"].commit(
        {"adapter_model.safetensors": b"old", "model.safetensors": b"old", "notes.md": b"mine"}
    )
    refused: Any = {
        ("--push", "mine"): "no name on the Hub",
        ("--push", "me/mine", "--private"): "me/mine is there already and public",
        ("--private",): "give --push OWNER/NAME too",
    }
    for options, why in refused.items():
        code, _, err = run(capsys, "export", "run", "out", *options)
        assert code == 2 and why in err and not (tmp_path / "out").exists()
    code, out, err = run(capsys, "export", "run", "out", "--push", "me/mine")
    assert code == 0 and f"pushed to {hub.address}/me/mine" in out, err
    files = hub.files("models/me/mine")
    assert {
        "notes.md",
        "adapter_model.safetensors",
        "tokenizer.json",
    } <= files.keys() and "model.safetensors" not in files
    assert files["adapter_model.safetensors"] == (tmp_path / "out" / "adapter_model.safetensors").read_bytes()
    adapter = json.loads(files["adapter_config.json"])
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("owner/tiny", commit)
    card = files["README.md"].decode()
    assert "base_model: owner/tiny\nbase_model_relation: adapter" in card and commit in card

    # merged, somewhere else: the base is fetched at the commit the adapters were trained on
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    code, out, err = run(capsys, "export", "run", "merged", "--merge", "--push", "me/new", "--private")
    assert code == 0 and hub.repos["models/me/new"].private, err
    assert "base_model_relation: finetune" in hub.files("models/me/new")["README.md"].decode()
    assert hub.files("models/me/new")["model.safetensors"] == (tmp_path / "merged" / "model.safetensors").read_bytes()
    assert "_name_or_path" not in json.loads(hub.files("models/me/new")["config.json"])
    with pytest.raises(
        ValueError, match=r"does not let you write to others/new \(HTTP 403\).* is complete; push it with: hf upload"
    ):
        push(tmp_path / "out", "others/new", message="step 2")
    # a path of a run that is not there any more is not looked for on the Hub
    (tmp_path / "run" / "config.yaml").write_text(written.replace(f"owner/tiny@{commit}", "owner/tiny"))
    hub.asked.clear()
    code, _, err = run(capsys, "eval", "run", "--cpu", 1)
    assert code == 2 and "owner/tiny, the model of run, is not a folder here; name it with --model.folder" in err
    assert not hub.asked
    hub.full = True
    with pytest.raises(ValueError, match=r"the Hub refuses me/full \(HTTP 413"):
        push(tmp_path / "out", "me/full", message="step 2")
    hub.full = False
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    code, _, err = run(capsys, "export", "run", "never", "--push", "me/new")
    assert code == 2 and "needs a token that may write" in err and not (tmp_path / "never").exists()


def test_the_other_verbs_take_names_too(
    hub: Hub, published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    commit = hub.add("models/owner/tiny", published)
    code, out, err = run(capsys, "plan", "owner/tiny", "--gpus", "1xH100", "--context", "1K", "--host", "64GB")
    assert code == 0 and out.startswith("tiny (") and hub.fetched() == ["config.json"], err
    code, out, err = run(capsys, "ladder", "owner/tiny", "--gpus", "1xH100", "--context", "1K")
    assert code == 0 and hub.fetched() == ["config.json"], err
    (tmp_path / "text.txt").write_text(words(50))
    code, out, err = run(capsys, "data", "pack", "text.txt", "--tokenizer", "owner/tiny", "--out", "packed")
    assert code == 0 and "model.safetensors" not in hub.fetched() and "tokenizer.json" in hub.fetched(), err
    assert (
        json.loads((tmp_path / "packed" / "manifest.json").read_text())["tokenizer"]["name"] == f"owner/tiny@{commit}"
    )
    code, out, err = run(capsys, "ask", "owner/tiny", "who?", "--cpu", 1, "--tokens", 1)
    assert code == 0 and "1 written" in out and "model.safetensors" in hub.fetched(), err
    code, _, err = run(capsys, "ask", "owner/tiny", "who?", "--cpu", 1, "--model.trust_remote_code", "true")
    assert code == 2 and "download it, read them, and name the folder" in err
    (tmp_path / "owner").mkdir()
    code, _, err = run(capsys, "plan", "owner/tiny", "--gpus", "1xH100", "--context", "1K")
    assert code == 2 and "owner/tiny is no folder with a config.json" in err
