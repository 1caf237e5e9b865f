"""What is exported is what was trained: transformers loads it, and every bit is the same."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

import ithaca
from ithaca.base.processes.pool import Workers
from ithaca.cli.main import main
from ithaca.engine.model.presets import TINY, preset_config
from ithaca.engine.model.shrink import smallest
from ithaca.storage.checkpoint import CheckpointError, save
from ithaca.storage.export import _rebuild, export_checkpoint, export_model
from ithaca.storage.safetensors_shards import Entry, Shards
from ithaca.verify.families import without_dropout

from .runs import started, tiny, tokens, train

FP32 = torch.float32
PAGE = Path(__file__).parents[2] / "docs/reference/families.md"


@pytest.fixture(autouse=True)
def no_group_is_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def tensors_in(folder: Path, stem: str = "model") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob(f"{stem}*.safetensors")):
        found.update(load_file(path))
    return found


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def loaded(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **options).eval()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of bytes, saved as transformers saves one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    raw = Tokenizer(models.BPE(vocabulary, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    made.save_pretrained(folder)
    (folder / "code.py").write_text("raise SystemExit")
    return folder


@pytest.mark.parametrize("preset", TINY)
def test_every_family_round_trips(preset: str, tmp_path: Path):
    """Published by transformers, filled from the folder, exported: the same names and bits, and the same logits."""
    from transformers import AutoModelForCausalLM

    model = tiny(preset)
    model.save_pretrained(tmp_path / "source")
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(preset_config(preset))
    run = ithaca.prepare(empty, ithaca.Stack(shard_parameters=False), device="cpu", weights=tmp_path / "source")
    export_model(run, tmp_path / "out", dtype=FP32, max_shard_bytes=100e3)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert equal(tensors_in(tmp_path / "out"), tensors_in(tmp_path / "source"))
    again = loaded(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(again(tokens(0)).logits, model.eval()(tokens(0)).logits)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == [type(model).__name__] and config["dtype"] == "float32"
    assert config["rope_parameters"] == json.loads((tmp_path / "source/config.json").read_text())["rope_parameters"]


@pytest.mark.parametrize("kind", ["bamba", "dbrx"])
def test_configs_that_json_does_not_give_back(kind: str):
    """A limit of Mamba-2 is infinite, for which JSON has no word; DBRX's parts refuse what is not theirs."""
    config = smallest(kind)
    written = json.loads(json.dumps(json.loads(config.to_json_string(use_diff=False)), allow_nan=False))
    _, again = _rebuild({"config": written, "name_or_path": "", "adapters": {}}, Path("checkpoint"))
    mine, theirs = (
        {
            key: value
            for key, value in given.to_dict().items()
            if not key.startswith("_") and not key.endswith("_config")
        }
        for given in (config, again)
    )
    assert mine == theirs


# Qwen2-MoE's window is 0; Fuyu has more parts than a decoder.
KINDS = ["qwen2_moe", "fuyu"]
if os.environ.get("ITHACA_FAMILIES") == "long":  # make families
    KINDS = [
        found[1] for found in re.finditer(r"^\| (\w+) \| \w+ \| (?:module|streamed)", PAGE.read_text(), re.MULTILINE)
    ]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # that GPT-BigCode still has
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_any_type_is_exported(kind: str, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = smallest(kind)
    for part in (config, config.get_text_config()):
        without_dropout(part)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "source")
    stack = ithaca.Stack(engine="module", shard_parameters=kind != "zamba2")  # whose layers share parameters
    run = ithaca.prepare(model, stack, device="cpu")
    save(tmp_path / "checkpoints", run, torch.optim.AdamW(run.model.parameters()), {}, step=1)
    export_checkpoint(tmp_path / "checkpoints", tmp_path / "out", dtype=FP32)
    export_model(run, tmp_path / "online", dtype=FP32)
    for out in ("out", "online"):
        assert equal(tensors_in(tmp_path / out), tensors_in(tmp_path / "source"))
        assert loaded(tmp_path / out).config.model_type == model.config.model_type


def trained_export(folder: str, preset: str, stack: dict[str, Any]) -> float:
    """Train, save, export from the run. -> the loss that a reader of the export should see"""
    run, optimizer = started(preset, stack)
    train(run, optimizer, range(1))
    save(Path(folder) / "checkpoints", run, optimizer, {}, step=1)
    export_model(run, Path(folder) / "online", dtype=FP32, max_shard_bytes=50e3)
    with torch.no_grad():
        return run.loss(run.shard(tokens(9))).item()


@pytest.mark.parametrize(("preset", "stack"), [("qwen3", dict(replicate=2)), ("mixtral", dict(ulysses=2))])
def test_a_trained_model_leaves_its_shards(workers: Workers, tmp_path: Path, tokenizer: Path, preset: str, stack: Any):
    """From a run on two ranks, and from its checkpoint without any."""
    loss = workers.run(trained_export, str(tmp_path), preset, stack, world=2)[0]
    export_checkpoint(tmp_path, tmp_path / "offline", tokenizer, dtype=FP32, max_shard_bytes=50e3)
    assert not dist.is_initialized()
    online, offline = tensors_in(tmp_path / "online"), tensors_in(tmp_path / "offline")
    assert equal(online, offline) and not any("gate_up" in name for name in online)
    model = loaded(tmp_path / "offline")
    with torch.no_grad():
        again = model(tokens(9), labels=tokens(9), output_router_logits=preset == "mixtral").loss.item()
    assert again == pytest.approx(loss, rel=1e-5)
    assert (tmp_path / "online/config.json").read_text() == (tmp_path / "offline/config.json").read_text()


@pytest.mark.parametrize(
    ("preset", "dtype"),
    [("llama3", torch.bfloat16), ("llama3", torch.float32), ("gemma3", torch.float16)],
    ids=str,
)
def test_the_config_states_the_dtype_of_the_tensors(tmp_path: Path, preset: str, dtype: torch.dtype):
    """Or whoever loads it with dtype="auto" holds numbers of another size. From a run and from its checkpoint."""
    from transformers import AutoModelForCausalLM

    run, _ = started(preset, dict(shard_parameters=False))
    before = run.decoder.config.to_dict()
    save(tmp_path / "checkpoints", run, None, {}, step=1)
    for out in (
        export_model(run, tmp_path / "online", dtype=dtype),
        export_checkpoint(tmp_path, tmp_path / "out", dtype=dtype),
    ):
        assert {value.dtype for value in tensors_in(out).values()} == {dtype}
        assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
        model = AutoModelForCausalLM.from_pretrained(out, dtype="auto", local_files_only=True)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert run.decoder.config.to_dict() == before, "the run's own config is as it was"


def test_the_folder_is_all_that_is_needed_to_generate(tmp_path: Path, tokenizer: Path):
    from transformers import AutoTokenizer

    run, _ = started(stack=dict(shard_parameters=False))
    run.decoder.config.use_cache = False  # as trainers set it
    export_model(run, tmp_path / "out", tokenizer, dtype=torch.bfloat16)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} <= names
    assert "code.py" not in names and not list(tmp_path.glob(".*"))
    assert {value.dtype for value in tensors_in(tmp_path / "out").values()} == {torch.bfloat16}
    model, words = loaded(tmp_path / "out"), AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    assert model.config.use_cache and run.decoder.config.use_cache is False
    ids = words("Tell me, Muse", return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert made.shape[1] == ids.shape[1] + 5 and isinstance(words.decode(made[0]), str)


@pytest.mark.parametrize("out", ["full", "file"])
def test_nothing_is_overwritten(tmp_path: Path, out: str):
    run, _ = started(stack=dict(shard_parameters=False))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious").write_text("here")
    (tmp_path / "file").write_text("here")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="exists already, and nothing in it was changed; choose a new folder"):
        export_model(run, tmp_path / out)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path):
    run, optimizer = started(stack=dict(shard_parameters=False))
    path = save(tmp_path / "checkpoints", run, optimizer, {}, step=0).wait()
    shard = next(path.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"is damaged: .* has changed since it was saved"):
        export_checkpoint(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_is_written_piece_by_piece_as_the_library_reads_it(tmp_path: Path):
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(7).to(torch.bfloat16), "c": torch.randn(2, 2, 2).double()}
    entries = [Entry(name, tuple(value.shape), value.dtype) for name, value in tensors.items()]
    shards = Shards(tmp_path, "model", entries, 70)
    for name, value in tensors.items():
        shards.add(name, value)
    shards.close()
    assert equal(tensors_in(tmp_path), tensors)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 30, "total_size": 60 + 14 + 64}
    assert set(index["weight_map"].values()) == {path.name for path in tmp_path.glob("*.safetensors")}


def test_the_command(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]):
    run, optimizer = started(stack=dict(shard_parameters=False))
    save(tmp_path / "run/checkpoints", run, optimizer, {}, step=7)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "fp32"]) == 0
    said = capsys.readouterr().out
    assert "wrote LlamaForCausalLM of step 7" in said and "no tokenizer was found" in said
    assert equal(tensors_in(tmp_path / "out"), dict(tiny().state_dict()))
    step = str(tmp_path / "run/checkpoints/step-7")
    assert main(["export", step, str(tmp_path / "again"), "--tokenizer", str(tokenizer)]) == 0
    assert "no tokenizer" not in capsys.readouterr().out
    assert main(["export", step, str(tmp_path / "again")]) != 0
    assert main(["export", str(tmp_path / "nowhere"), str(tmp_path / "other")]) != 0
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and "exists already" in errors[0] and "is not a folder; name a run folder" in errors[1]
