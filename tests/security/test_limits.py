"""What is received is limited before it is believed: sizes of a model, templates that do not end, pipes and devices in the place of
files, numbers that are none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ithaca.base.files import read_json, read_text
from ithaca.base.run_folder import RunFolder
from ithaca.cli.main import main
from ithaca.config.nodes import load_plain
from ithaca.data import chat_template as template
from ithaca.data.chat import render_chat
from ithaca.data.tokenizer import load_tokenizer
from ithaca.engine.model.config import check_settings, read_config, read_settings
from ithaca.engine.model.presets import TINY, preset_config
from ithaca.engine.model.weights import Folder
from ithaca.storage.files import read_json as read_checkpoint_json
from ithaca.storage.files import run_of

from ..data.make import save_tokenizer

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well, hello"}]
LLAMA = dict(preset_config("llama3").to_dict())


@pytest.mark.parametrize("name", TINY)
def test_every_family_has_sizes_that_are_believed(name: str):
    check_settings(preset_config(name).to_dict(), name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 must be a whole number from 1 to"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"hidden_size": 64.0}, "hidden_size=64.0"),
        ({"vocab_size": -5}, "vocab_size=-5"),
        ({"vocab_size": 10**20}, "vocab_size=100000000000000000000"),
        ({"max_position_embeddings": 10**19}, "max_position_embeddings="),
        ({"num_labels": 10**9}, "num_labels=1000000000"),
        ({"num_attention_heads": 8, "num_key_value_heads": 3}, "is no multiple of num_key_value_heads=3"),
        ({"hidden_size": 100, "num_attention_heads": 8, "head_dim": None}, "is no multiple of num_attention_heads=8"),
        ({"hidden_act": "os.system"}, "hidden_act='os.system'"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x'"),
        ({"rope_parameters": {"rope_type": "\n", "rope_theta": 1e4}}, "rope_type='\\n' must be one of default, linear"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "rope_parameters.rope_theta=-1"),
        ({"rope_parameters": [1]}, "rope_parameters=[1]"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types has 7 entries"),
        ({"hidden_size": 1 << 18, "intermediate_size": 1 << 20, "num_hidden_layers": 2048}, "parameters; no model has more"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "text_config.num_hidden_layers=1000000000"),
    ],
)  # fmt: skip
def test_sizes_that_no_model_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], words: str
):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    for read in (lambda: read_settings(tmp_path / "config.json"), lambda: read_config(tmp_path)):
        with pytest.raises(ValueError) as error:
            read()
        assert words in str(error.value) and str(tmp_path / "config.json") in str(error.value)
    assert main(["plan", str(tmp_path), "--gpus", "1xH100", "--context", "1K"]) == 2
    assert words in capsys.readouterr().err


READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": lambda folder: read_settings(folder / "config.json"),
    "manifest.json": lambda folder: read_checkpoint_json(folder / "manifest.json"),
    "status.json": lambda folder: RunFolder(folder).read_status(),
    "model.safetensors.index.json": Folder,
    "model.safetensors": Folder,
    "tokenizer_config.json": load_tokenizer,
    "template.jinja": lambda folder: read_text(folder / "template.jinja"),
}


@pytest.mark.parametrize("kind", ["pipe", "endless"])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_not_waited_for(tmp_path: Path, name: str, kind: str):
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=rf"{name} is a (named pipe|device), not a file"):
        READERS[name](tmp_path)


def test_a_pipe_beside_checkpoints_names_no_run(tmp_path: Path):
    os.mkfifo(tmp_path / "RUN")
    assert run_of(tmp_path) is None


@pytest.mark.parametrize("text", ['{"a": NaN}', '{"a": 1e999}', '{"a": -1e999}', '{"a": Infinity}', "[" * 100_000])
def test_numbers_that_are_none_and_depths_without_end(tmp_path: Path, text: str):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"a\.json (cannot be read|is nested)"):
        read_json(tmp_path / "a.json")


def test_a_yaml_bomb_of_another_run(tmp_path: Path):
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{new}: &{new} [{', '.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    with pytest.raises(ValueError, match="expand to more than"):
        load_plain(bomb, "config.yaml")
    (tmp_path / "config.yaml").write_text(bomb)
    assert main(["report", str(tmp_path)]) == 2


TEMPLATES = {
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}", "still computing"),
    "range": ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
    "doubled": ("{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "too much memory"),
    "repeated": ("{{ 'a' * 10**11 }}", "too much memory"),
    "padded": ("{{ 'a'|center(10**11) }}", "too much memory"),
    "long": ("{{ 'a' * 30000000 }}", "it writes 30,000,000 characters"),
    "macros": ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "still computing"),
    "deep": ("{% macro f(n) %}{{ f(n+1) }}{% endmacro %}{{ f(1) }}", "recursion"),
    "division": ("{{ 1 / 0 }}", "division by zero"),
    "syntax": ("{% for", "unexpected"),
}  # fmt: skip


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_template_comes_to_an_end(monkeypatch: pytest.MonkeyPatch, case: str):
    evil, words = TEMPLATES[case]
    if words == "still computing":  # for ever; the others come to their own end, however slow the machine
        monkeypatch.setattr(template, "SECONDS", 0.5)
    with pytest.raises(ValueError, match=f"the chat template refuses this chat: .*{words}"):
        render_chat(CHAT, evil, {})
    monkeypatch.undo()
    text, spans = render_chat(CHAT, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", {})
    assert text == "user: hello\nassistant: well, hello\n" and len(spans) == 1, "the next one is rendered as always"


def test_a_template_of_a_tokenizer_that_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(template, "SECONDS", 0.5)
    monkeypatch.chdir(tmp_path)
    save_tokenizer(Path("tokenizer"), template=TEMPLATES["loops"][0])
    Path("chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    words = ["data", "pack", "chats.jsonl", "--tokenizer", "tokenizer", "--out", "packed", "--workers", "1"]
    assert main(words) in (2, 3)
    assert "still computing" in capsys.readouterr().err and not Path("packed").exists()
