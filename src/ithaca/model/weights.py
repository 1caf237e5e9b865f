"""Fill a sharded model from a folder of safetensors, one parameter at a time.

The model was built on the meta device and sharded, so a rank owns some rows of each parameter and no numbers yet. Each rank
opens the files lazily and reads just its rows; no rank ever holds the whole model, and nothing but safetensors is read.
Checkpoints of mixture-of-experts models store one matrix per expert, while the modules hold all experts in one tensor; the
rows are put together here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..mesh import Mesh
from .adapter import Decoder
from .rope import check_against, rope_for


def is_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def fill_from_folder(decoder: Decoder, folder: Path, mesh: Mesh) -> None:
    model: Any = decoder.model
    error = None
    try:
        files = _Files(folder)
        _check(model, files, folder)
    except (ValueError, OSError, SafetensorError) as problem:
        error = str(problem)
    mesh.agree(error)
    model.to_empty(device=mesh.home)
    if decoder.tied:
        model.tie_weights()
    try:
        _fill(model, files)
    except (OSError, SafetensorError) as problem:
        error = f"reading {folder} failed: {problem}"
    mesh.agree(error)
    # buffers outside the state dict (rotary frequencies, Gemma's embedding scale) are computed, not loaded
    model.initialize_weights()
    for layer_type in {layer.rope_type for layer in decoder.layers}:
        check_against(model.model.rotary_emb, rope_for(decoder.config, layer_type, 1), layer_type)


@torch.no_grad()
def _fill(model: nn.Module, files: _Files) -> None:
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        first, count = _rows(parameter)
        if count:
            local[:count].copy_(_read(files, name, first, count, parameter))
        parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]


class _Files:
    """Which file holds which tensor."""

    def __init__(self, folder: Path) -> None:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.exists():
            where: dict[str, str] = json.loads(index.read_text()).get("weight_map", {})
            self.where = {name: folder / Path(file).name for name, file in where.items()}
        elif single.exists():
            with safe_open(single, "pt") as opened:
                self.where = dict.fromkeys(opened.keys(), single)
        else:
            raise ValueError(
                f"{folder} has neither model.safetensors nor model.safetensors.index.json; pass a folder saved with "
                "save_pretrained (only safetensors is read, as other formats can run code)"
            )
        missing = sorted({str(path) for path in self.where.values() if not path.exists()})
        if missing:
            raise ValueError(
                f"{folder} lists {missing[0]}, which does not exist ({len(missing)} missing); download it again"
            )
        self.opened: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.where

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.slice(name).get_shape())

    def slice(self, name: str):
        path = self.where[name]
        if path not in self.opened:
            self.opened[path] = safe_open(path, "pt").__enter__()
        return self.opened[path].get_slice(name)


def _rows(parameter: Tensor) -> tuple[int, int]:
    """First row and number of rows of this rank (FSDP2 shards dim 0)."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape[0]
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0], shape[0]


_EXPERTS = re.compile(r"(.*\.mlp)\.experts\.(gate_up_proj|down_proj)$")


def _expert_names(name: str, expert: int) -> list[list[str]]:
    """The checkpoint names of one expert's matrices, for each layout in use."""
    found = _EXPERTS.match(name)
    assert found is not None
    base, part = found.groups()
    mixtral = base.removesuffix(".mlp") + f".block_sparse_moe.experts.{expert}"
    qwen = f"{base}.experts.{expert}"
    if part == "gate_up_proj":
        return [
            [f"{qwen}.gate_proj.weight", f"{qwen}.up_proj.weight"],
            [f"{mixtral}.w1.weight", f"{mixtral}.w3.weight"],
        ]
    return [[f"{qwen}.down_proj.weight"], [f"{mixtral}.w2.weight"]]


def _router_name(name: str) -> str:
    """Mixtral's checkpoints call the router's module differently."""
    return name.replace(".mlp.gate.", ".block_sparse_moe.gate.")


def _sources(files: _Files, name: str, parameter: Tensor) -> list[list[str]] | None:
    """Checkpoint tensors a parameter is made of: one entry per row of experts, or a single one. None: not there."""
    for candidate in (name, _router_name(name)):
        if candidate in files:
            return [[candidate]]
    if _EXPERTS.match(name):
        per_expert = []
        for expert in range(parameter.shape[0]):
            layouts = [names for names in _expert_names(name, expert) if all(n in files for n in names)]
            if not layouts:
                return None
            per_expert.append(layouts[0])
        return per_expert
    return None


def _check(model: nn.Module, files: _Files, folder: Path) -> None:
    """Names and shapes of all parameters, by the files' headers: before any rank has filled anything."""
    sources = {name: _sources(files, name, parameter) for name, parameter in model.named_parameters()}
    missing = [name for name, found in sources.items() if found is None]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the model's parameters, for example {missing[0]}; pass the folder this "
            "model's config came from"
        )
    for name, parameter in model.named_parameters():
        for names in sources[name] or ():
            whole = names == [name] or not _EXPERTS.match(name)
            want = tuple(parameter.shape if whole else parameter.shape[1:])
            shapes = [files.shape(source) for source in names]
            found = (sum(shape[0] for shape in shapes), *shapes[0][1:])
            if found != want or len({shape[1:] for shape in shapes}) > 1:
                raise ValueError(
                    f"{' + '.join(names)} has shape {found} in {folder}, but {name} of the model needs {want}; pass the "
                    "folder this model's config came from"
                )


def _read(files: _Files, name: str, first: int, count: int, parameter: Tensor) -> Tensor:
    sources = _sources(files, name, parameter)
    assert sources is not None
    if name in files or not _EXPERTS.match(name):
        return files.slice(sources[0][0])[first : first + count]
    rows = [torch.cat([files.slice(n)[:] for n in sources[expert]]) for expert in range(first, first + count)]
    return torch.stack(rows)
