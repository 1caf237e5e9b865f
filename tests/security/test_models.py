"""A model folder from somebody else: config, weights and tokenizer are data."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ithaca.config.schema import Model
from ithaca.data.chat import render_chat
from ithaca.data.tokenizer import load_tokenizer, tokenizer_parts
from ithaca.engine.build import build_model, model_config
from ithaca.engine.model.weights import Folder
from ithaca.planner.config import hf_config
from ithaca.stack import Stack
from ithaca.verify.case import Case, Session
from ithaca.verify.presets import config_of

from ..data.make import save_tokenizer
from .payloads import Marker, Payload, code

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32,
}  # fmt: skip
READERS = {
    "train": lambda folder: build_model(*_built(folder), 0),
    "plan": lambda folder: hf_config(str(folder)),
    "verify": lambda folder: config_of(str(folder), full=True),
}


def _built(folder: Path) -> tuple[Model, Any]:
    options = Model(folder=str(folder), random_init=True)
    return options, model_config(options, 64)


def write(folder: Path, **settings: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **settings}))
    return folder


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["llama", "evil"])
def test_auto_map(tmp_path: Path, marker: Marker, reader: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    """Python files of the folder, under a known kind of model and under one that only they define."""
    lines = ("from transformers import PretrainedConfig", "class C(PretrainedConfig):", f"    model_type = {kind!r}")
    (tmp_path / "evil.py").write_text(code(marker.path, *lines))
    write(tmp_path, model_type=kind, auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"})
    from transformers import AutoConfig

    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked whether to run it"))
    if kind == "llama":
        READERS[reader](tmp_path)
    else:
        with pytest.raises(ValueError):
            READERS[reader](tmp_path)
    assert not marker.there
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    AutoConfig.from_pretrained(tmp_path, trust_remote_code=True)
    marker.live()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "key",
    [
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "_experts_implementation_internal",
    ],
)
def test_kernels_named_by_a_config(
    tmp_path: Path, marker: Marker, reader: str, key: str, monkeypatch: pytest.MonkeyPatch
):
    """CVE-2026-4372 and its relatives: transformers would fetch the kernel from the Hub and run it."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations import hub_kernels

    def fetched(*_: Any, **__: Any) -> None:
        marker.path.touch()
        raise ImportError("the kernel ran")

    monkeypatch.setattr(hub_kernels, "load_and_register_attn_kernel", fetched)
    write(tmp_path, **{key: f"kernels-community/evil-{reader}"})  # another name each time: a tried one is remembered
    READERS[reader](tmp_path)
    assert not marker.there
    assert model_config(Model(folder=str(tmp_path), random_init=True), 64)._attn_implementation is None
    if key == "attn_implementation":
        with pytest.raises(ImportError):
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
        marker.live()


def test_pickled_weights_are_not_looked_at(tmp_path: Path, marker: Marker):
    write(tmp_path)
    torch.save({"model.embed_tokens.weight": Payload(marker.path)}, tmp_path / "pytorch_model.bin")
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    marker.live()
    with pytest.raises(ValueError, match="only safetensors is read, as other formats can run code"):
        Folder(tmp_path)
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        Session(Case(model=str(tmp_path), stack=Stack(), full=True))


@pytest.mark.parametrize("name", ["../weights.safetensors", "/etc/passwd", "..", "a/../../weights.safetensors"])
def test_an_index_cannot_point_elsewhere(tmp_path: Path, name: str):
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "weights.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match=r"index\.json: .* leads out of"):
        Folder(folder)


def test_a_tokenizer_with_code(tmp_path: Path, marker: Marker, monkeypatch: pytest.MonkeyPatch):
    from transformers import AutoTokenizer

    folder = save_tokenizer(tmp_path / "tokenizer")
    (folder / "evil.py").write_text(
        code(marker.path, "from transformers import PreTrainedTokenizerFast as T", "class C(T): pass")
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.update(tokenizer_class="C", auto_map={"AutoTokenizer": [None, "evil.C"]})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked whether to run it"))
    with pytest.raises(ValueError, match="holds no tokenizer that can be loaded"):
        load_tokenizer(folder)
    assert not marker.there
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    marker.live()


def test_a_chat_template_with_code(tmp_path: Path, marker: Marker):
    """Templates are programs too; they run in jinja's sandbox."""
    import jinja2

    evil = "{{ cycler.__init__.__globals__.os.mkdir('" + str(marker.path) + "') }}{{ messages[0]['content'] }}"
    chat = [{"role": "user", "content": "hello"}]
    jinja2.Environment().from_string(evil).render(messages=chat)
    marker.live()
    with pytest.raises(ValueError, match=r"the chat template refuses this chat: .*unsafe"):
        render_chat(chat, evil, {})
    folder = save_tokenizer(tmp_path / "tokenizer")
    (folder / "chat_template.jinja").write_text(evil)
    parts = tokenizer_parts(load_tokenizer(folder))
    with pytest.raises(ValueError, match="unsafe"):
        render_chat(chat, parts.chat_template or "", parts.special_tokens)


def test_a_tokenizer_pickle_in_the_folder(tmp_path: Path, marker: Marker):
    folder = save_tokenizer(tmp_path / "tokenizer")
    for name in ("tokenizer.pkl", "vocab.pkl", "added_tokens.pkl"):
        (folder / name).write_bytes(pickle.dumps(Payload(marker.path)))
    pickle.loads((folder / "vocab.pkl").read_bytes())
    marker.live()
    assert load_tokenizer(folder).is_fast
