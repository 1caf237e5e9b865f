"""Weights out: a folder that `from_pretrained` loads, from a run or from a checkpoint.

Full models become safetensors with Hugging Face's names, in the layout transformers itself publishes (a matrix per expert where it
does so), with config.json as trained (rotary settings included), generation_config.json and the tokenizer's files. LoRA runs become
a PEFT adapter folder, or a full model with the adapters merged: of a base in NF4, into the numbers that come out of it, which are
those that were trained on. README.md names a base that came from the Hub, and its commit.

Memory: one parameter at a time. `export_model` is collective; every rank takes part in gathering a parameter, which is then whole
on each device for a moment, and rank 0 writes it. `export_checkpoint` needs no process group and no GPU: a parameter is read from
the shards of the checkpoint (which takes it twice), written, and forgotten. The largest is usually the embedding, or all experts
of a layer; merging takes three times that, in fp32.

The folder appears under its name when it is complete, and an existing one is never touched. In fp32 the round trip is exact;
bf16 rounds the fp32 masters once. What is not finite, before or after that, is not written (finite.py).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..base.hub import local
from ..base.versions import require_floors
from ..engine.mesh import Group, Mesh, whole_tensor
from ..engine.model.config import check_settings, harmless
from ..engine.model.nf4 import Nf4, unpacked
from ..engine.model.weights import Folder, named_tensors, saved_name
from ..engine.run import Run
from .check import verify
from .dcp import plainly
from .files import CheckpointError, damage, gone_error, is_checkpoint, latest, listed, named_best, newest, read_state
from .fingerprint import PACKED, fingerprint
from .finite import require_finite
from .hf_folder import Outgoing, empty_model, write_folder
from .listing import folder_of
from .place import place_of, step_of
from .ranks import on_all_ranks
from .safe_metadata import SafeReader, read_metadata
from .shards import like
from .state import at_rest, has_adapters


def export_model(
    run: Run,
    folder: Path,
    tokenizer_folder: Path | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: float = 5e9,
    merge_lora: bool = False,
) -> Path:
    """Write the run's model to a new folder. Collective; rank 0 writes. -> folder

    tokenizer_folder: where tokenizer files (and generation_config.json) are copied from; None = none are.
    merge_lora: of a LoRA run, the whole model with adapters added in, instead of a PEFT adapter folder.
    """
    mesh = run.mesh
    on_all_ranks(mesh.world, lambda: at_rest(run))
    named = named_tensors(run.model)
    trained = [name for name, parameter in named.items() if parameter.requires_grad]
    adapters = has_adapters(run) and not merge_lora
    on_all_ranks(mesh.world, lambda: require_finite({name: named[name] for name in (trained if adapters else named)}))

    def fetch(name: str, dtype: torch.dtype) -> Tensor:
        value = named[name].detach()
        if isinstance(value, DTensor):  # cast first: half the traffic; on the device: that is where ranks can talk
            rows: Any = like(unpacked(value.to_local()).to(mesh.device, dtype), value, value.shape)
            value = whole_tensor(rows)
        return value.to("cpu", dtype) if mesh.world.rank == 0 else value

    outgoing = Outgoing(
        model=run.model,
        config=run.decoder.model.config,
        generation=getattr(run.decoder.model, "generation_config", None),
        trained=trained,
        adapters=adapters,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        tokenizer_folder=tokenizer_folder,
    )
    return write_folder(outgoing, Path(folder), fetch, mesh)


def export_checkpoint(
    checkpoint: Path,
    folder: Path,
    tokenizer_folder: Path | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: float = 5e9,
    merge_lora: bool = False,
    base_folder: Path | None = None,
    chat_template: str | None = None,
) -> Path:
    """Write the model of a checkpoint to a new folder, in this one process. -> folder

    checkpoint: one of them (step-N), or a folder of checkpoints or a run, whose newest is taken.
    base_folder: of a LoRA checkpoint to be merged, the base model; None = where the run had it from. Another base is refused.
    chat_template: takes the place of the tokenizer's in the new folder.
    """
    require_floors("torch", "transformers", "safetensors")

    def write(path: Path) -> Path:
        return _export(path, folder, tokenizer_folder, dtype, max_shard_bytes, merge_lora, base_folder, chat_template)

    return newest(lambda: find_checkpoint(Path(checkpoint)), write, named=Path(checkpoint))


def _export(
    path: Path, folder: Path, tokenizer_folder: Path | None, dtype: torch.dtype, max_shard_bytes: float, merge_lora: bool,
    base_folder: Path | None, chat_template: str | None,
) -> Path:  # fmt: skip
    problems = verify(path)
    if problems:
        raise _damaged(path, problems)
    record = read_state(path)
    about = record["model"]
    try:
        model, config = _rebuild(about, path)
    except CheckpointError:
        raise
    except Exception as error:  # settings of a file: transformers and PEFT raise whatever their parts raise
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise CheckpointError(
            f"{path} has settings of no model that can be built: {cause}; export another one"
        ) from error
    adapters = bool(about["adapters"]) and not merge_lora
    if about["adapters"] and merge_lora:
        base_folder = local(base_folder or about["name_or_path"] or ".")
        if not base_folder.is_dir():
            raise CheckpointError(
                f"merging needs the base model, and {base_folder} is not a folder; name it with --base"
            )
    fetch = _FromCheckpoint(path, about, base_folder)
    known = named_tensors(model)
    _check_shapes(path, known, fetch)
    outgoing = Outgoing(
        model=model,
        config=config,
        generation=_generation(about),
        trained=[name for name in fetch.stored if name in known],
        adapters=adapters,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        tokenizer_folder=tokenizer_folder,
        chat_template=chat_template,
    )
    alone = Group(1, 0, None)
    return write_folder(outgoing, Path(folder), fetch, Mesh(torch.device("cpu"), alone, alone, alone, alone, None))


def find_checkpoint(path: Path, which: str = "latest") -> Path:
    """The checkpoint meant by a checkpoint, a folder of checkpoints or a run folder. which: of several, latest, best or step-N."""
    if which != "latest":
        path = _among(path, which)
    if is_checkpoint(path):
        problems = damage(path)
        if problems:
            raise gone_error(path) or _damaged(path, problems)
        return path
    named = step_of(path) is not None
    folder = path if named else folder_of(path)
    if not place_of(folder).has(folder):
        raise CheckpointError(f"{path} is not a folder; name a run folder or a checkpoint")
    checkpoint = None if named else latest(folder)
    if checkpoint is None:
        raise CheckpointError(f"{path} has no complete checkpoint; name a run folder or a checkpoint (step-N)")
    return checkpoint


def _among(path: Path, which: str) -> Path:
    folder = folder_of(path)
    if step_of(path) is not None:
        raise CheckpointError(f"{path} is one checkpoint already; leave --checkpoint out, or name its run folder")
    if step_of(Path(which)) is not None and which == Path(which).name:
        return folder / which
    if which != "best":
        raise CheckpointError(f"--checkpoint {which} is unknown; choose latest, best or step-N")
    best = named_best(folder)
    if best is None:
        raise CheckpointError(
            f"{path} has no best checkpoint: its run did not keep one (eval.keep_best), or has not evaluated yet; leave "
            "--checkpoint out for the newest"
        )
    return best


def _damaged(path: Path, problems: list[str]) -> CheckpointError:
    more = f"; {len(problems) - 5} more" if len(problems) > 5 else ""
    return CheckpointError(
        f"checkpoint {path} is damaged: {'; '.join(problems[:5])}{more}. Fix: export another one; "
        f"'ithaca ckpt verify {path.parent}' says which are good"
    )


def _check_shapes(path: Path, known: dict[str, Tensor], fetch: _FromCheckpoint) -> None:
    """Sizes come from files, and memory is taken for them: they must be those of the model."""
    frozen = {name: text.split("-")[1] for name, text in fetch.frozen.items()}
    entries: Any = {name: fetch.metadata.state_dict_metadata[f"model.{name}"] for name in fetch.stored}
    shapes = {**frozen, **{name: "x".join(map(str, entry.size)) for name, entry in entries.items()}}
    for name, shape in shapes.items():
        if name not in known or "x".join(map(str, known[name].shape)) != shape:
            raise CheckpointError(
                f"{path} has {name} of shape {shape[:100]}, which its model has not; export another one"
            )


class _FromCheckpoint:
    """Whole parameters, from the shards of a checkpoint or, frozen ones of a LoRA run, from the base's folder."""

    def __init__(self, path: Path, about: dict[str, Any], base: Path | None) -> None:
        self.path, self.base, self.frozen = path, base, about["base"]
        self.metadata = read_metadata(path, listed(path))
        self.files: Folder | None = None

    @property
    def stored(self) -> list[str]:
        keys = self.metadata.state_dict_metadata
        return [key.removeprefix("model.") for key in keys if key.startswith("model.")]

    def __call__(self, name: str, dtype: torch.dtype) -> Tensor:
        key = f"model.{name}"
        entry: Any = self.metadata.state_dict_metadata.get(key)
        if entry is None:
            return self._frozen(name).to(dtype)
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with plainly(f"reading {self.path}"):
            dcp.load({key: tensor}, storage_reader=SafeReader(self.path, self.metadata), no_dist=True)
        return tensor.to(dtype)

    def _frozen(self, name: str) -> Tensor:
        if name not in self.frozen:
            raise CheckpointError(f"{self.path} has no {name}; it is of another model")
        assert self.base is not None
        if self.files is None:
            self.files = Folder(self.base)
        kind, shape, _ = self.frozen[name].split("-")
        size = torch.Size(int(length) for length in shape.split("x"))
        tensor = torch.empty(size, dtype=getattr(torch, kind.removeprefix(PACKED)))
        plain = saved_name(name.removeprefix("base_model.model."))
        assert plain is not None
        self.files.read(plain, 0, tensor, size)
        if kind.startswith(PACKED):  # what was trained on is what comes out of four bits again
            tensor = Nf4.of(tensor)
        if fingerprint(tensor) != self.frozen[name]:
            raise CheckpointError(
                f"{plain} of {self.base} is not what the adapters were trained on; name the right base with --base"
            )
        require_finite({f"{plain} of {self.base}": tensor})
        return unpacked(tensor)


def _rebuild(about: dict[str, Any], path: Path) -> tuple[nn.Module, Any]:
    """The model of a checkpoint, without numbers, and its config."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    settings = _as_given(about["config"])
    kind = settings.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise CheckpointError(f"{path} holds a {kind!r} model, which this ithaca does not know")
    check_settings(settings, str(path / "state.json"))
    config = harmless(type(AutoConfig.for_model(kind)).from_dict(settings))
    config._name_or_path = about["name_or_path"]
    model = empty_model(config)
    if about["adapters"]:
        model = _with_adapters(model, about["adapters"])
    return model, config


def _as_given(settings: Any) -> Any:
    """A config as its class takes it: numbers that JSON has no word for are spelled by transformers; what is not of the model is
    left out, for a model inside of a model may refuse it."""
    if isinstance(settings, list):
        return [_as_given(value) for value in settings]
    if not isinstance(settings, dict):
        return settings
    if settings.keys() == {"__float__"}:
        return float(settings["__float__"])
    return {
        key: _as_given(value)
        for key, value in settings.items()
        if not key.startswith("_") and key not in ("auto_map", "output_attentions")
    }


def _with_adapters(model: nn.Module, adapters: dict[str, Any]) -> nn.Module:
    try:
        from peft import PeftConfig, PeftModel
    except ImportError:
        raise CheckpointError(
            "this checkpoint has PEFT adapters; install them with: pip install 'ithaca[peft]'"
        ) from None
    wrapped: Any = None
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")  # about patterns that match nothing
        for name, settings in adapters.items():
            _check_adapter(settings)
            config = PeftConfig.from_peft_type(**settings)
            config.inference_mode = False
            if wrapped is None:
                wrapped = PeftModel(model, config, adapter_name=name)  # pyright: ignore[reportArgumentType]
            else:
                wrapped.add_adapter(name, config)
    return wrapped


_LOADS = (
    "megatron_core",
    "megatron_config",
    "auto_mapping",
    "corda_config",
    "eva_config",
    "lora_ga_config",
    "loftq_config",
)


def _check_adapter(settings: dict[str, Any]) -> None:
    """These settings come from a file. PEFT imports modules that some of them name, and unpickles files that others do."""
    for text in _texts(settings):
        repeats = len(re.findall(r"[*+{]", text))
        if repeats > 4 or re.search(r"\)[*+{]", text):  # a pattern, which could be tried for years
            raise CheckpointError(f"refusing adapters with the pattern {text[:80]!r}; name the modules one by one")
    usual = settings.get("megatron_core") in (None, "megatron.core")
    named = [key for key in _LOADS if settings.get(key) and not (key == "megatron_core" and usual)]
    if settings.get("peft_type") != "LORA" or named:
        what = f"settings {', '.join(named)}" if named else f"adapters of type {settings.get('peft_type')!r}"
        raise CheckpointError(f"refusing to build a model with {what}: they can load code; LoRA alone is known here")


def _texts(value: Any) -> Iterator[str]:
    """All texts in settings, names too: PEFT takes many of them for patterns."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(item)


def _generation(about: dict[str, Any]) -> Any:
    from transformers import GenerationConfig

    settings = about["generation_config"]
    try:
        return None if settings is None else GenerationConfig.from_dict(settings)
    except Exception as error:
        raise CheckpointError(f"its generation settings are refused by transformers: {error!s:.300}") from error
