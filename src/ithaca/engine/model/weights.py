"""Fill a sharded model from a folder of safetensors, one parameter at a time.

The model was built on the meta device and sharded, so a rank owns some rows of each parameter and no numbers yet. Each rank
reads just its rows, straight into its shards, through a buffer of a few megabytes where dtypes or devices differ: no rank ever
holds the whole model, or a whole parameter beside its shard. (Mapped files would do as well, but what was read stays in a
process's memory until the file is closed: a second copy of the shard.) A GPU is fed by several threads, since one reads slower
than a link copies. Nothing but safetensors is read.

Checkpoints of mixture-of-experts models store one matrix per expert, while the modules hold all experts in one tensor; the
rows are put together here. PEFT adapters are not in the folder: they start as PEFT starts them, from a seed, with values
that do not depend on the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...base.files import inside, open_regular, read_json
from ..mesh import Mesh, local_part
from ..ranks import on_all_ranks
from .adapter import Decoder
from .angles import rotary_modules
from .nf4 import Nf4
from .rope import check_against, rope_for

if TYPE_CHECKING:
    from ..own import OwnDecoder


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the weights, such as the bias by which DeepSeek-V3 balances its experts: loaded and saved too."""
    return {
        f"{name}.{key}" if name else key: buffer
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    }


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of the model holds."""
    return {**dict(model.named_parameters()), **kept_buffers(model)}


def is_meta(model: nn.Module) -> bool:
    return any(p.is_meta for p in model.parameters())


def fill_from_folder(
    decoder: Decoder | OwnDecoder, folder: Path, mesh: Mesh, *, seed: int = 0, gaussian: bool = False
) -> None:
    """seed, gaussian: how adapters start, if the model has any (PEFT's init_lora_weights: True or "gaussian")."""
    model: Any = decoder.model

    def check() -> Folder:
        files = Folder(folder)
        _check(model, files, folder)
        return files

    def fill() -> None:
        try:
            with files:
                _fill(model, files)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"reading {folder} failed: {error}") from error

    files = on_all_ranks(mesh.world, check)
    _allocate(decoder, mesh)
    on_all_ranks(mesh.world, fill)
    _start_adapters(model, seed, gaussian)
    _compute_buffers(decoder)


@torch.no_grad()
def fill_at_random(decoder: Decoder | OwnDecoder, mesh: Mesh) -> None:
    """Numbers of the usual size in every shard, for runs that measure and do not train: nothing is read, and no rank holds a
    whole parameter."""
    _allocate(decoder, mesh)
    for name, parameter in decoder.model.named_parameters():
        local = local_part(parameter)
        if name.endswith("bias"):
            local.zero_()
        elif parameter.dim() < 2:
            local.fill_(1.0)
        elif isinstance(local, Nf4):
            local.fill(torch.empty(local.shape, device=local.device).normal_(0.0, 0.02))
        else:
            # On the GPU also where shards wait on the host: its cores would take minutes.
            for piece in local.view(-1).split(2**26):
                piece.copy_(torch.empty_like(piece, device=mesh.device).normal_(0.0, 0.02))
        parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
    _compute_buffers(decoder)


def _allocate(decoder: Decoder | OwnDecoder, mesh: Mesh) -> None:
    decoder.model.to_empty(device=mesh.home)
    if decoder.tied:
        head: Any = getattr(decoder.head, "base_layer", decoder.head)
        head.weight = decoder.embedding.weight


def _compute_buffers(decoder: Decoder | OwnDecoder) -> None:
    """Buffers outside the state dict (rotary frequencies, Gemma's embedding scale) are computed, not loaded."""
    model: Any = decoder.model
    for module in rotary_modules(model):
        module.float()  # without numbers there was nothing to round yet: model.to(torch.bfloat16) on the meta device
    model.initialize_weights()
    if not isinstance(decoder, Decoder):
        return
    for layer_type in {layer.rope_type for layer in decoder.layers}:
        check_against(model.model.rotary_emb, rope_for(decoder.config, layer_type, 1), layer_type)


@torch.no_grad()
def _fill(model: nn.Module, files: Folder) -> None:
    for name, parameter in model.named_parameters():
        local = local_part(parameter)
        first, count = rows_of(parameter)
        source = saved_name(name)
        if isinstance(local, Nf4):  # packed as it is read: one shard at a time is whole, in host memory
            assert source is not None
            whole = torch.empty(local.shape, dtype=local.dtype)
            files.read(source, first, whole, parameter.shape)
            local.fill(whole)
        elif count and source is not None:
            files.read(source, first, local[:count].detach(), parameter.shape)
        parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
    for name, buffer in kept_buffers(model).items():
        files.read(name, 0, buffer if buffer.dim() else buffer[None], buffer.shape)
        buffer._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def _start_adapters(model: nn.Module, seed: int, gaussian: bool) -> None:
    """A random and B zero, as PEFT does it. Every rank draws a whole A, which is small, and keeps its rows."""
    for name, parameter in model.named_parameters():
        if saved_name(name) is not None:
            continue
        local = local_part(parameter)
        first, count = rows_of(parameter)
        local.zero_()
        if ".lora_A." in name:
            number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
            generator = torch.Generator().manual_seed(number % 2**63)
            whole = torch.empty(parameter.shape)
            if gaussian:
                nn.init.normal_(whole, std=1 / _rank(model, name), generator=generator)
            else:
                nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
            local[:count].copy_(whole[first : first + count])


def _rank(model: nn.Module, name: str) -> int:
    """The r of an adapter; A of several experts has more rows than that."""
    module, adapter = name.split(".lora_A.")
    layer: Any = model.get_submodule(module)
    return layer.r[adapter.split(".")[0]]


_ADAPTER = re.compile(r"\.lora_\w+\.")
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")


def saved_name(name: str) -> str | None:
    """What a parameter is called in the folder of the model, without what PEFT puts around it; None: it is an adapter's."""
    return None if _ADAPTER.search(name) else _WRAPPED.sub("", name)


def rows_of(parameter: Tensor) -> tuple[int, int]:
    """First row and number of rows of this rank (FSDP2 shards dim 0)."""
    if not isinstance(parameter, DTensor):
        return 0, parameter.shape[0]
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return offset[0], shape[0]


# -- the folder -------------------------------------------------------------------------------------------------------

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BUFFER = 1 << 22  # bytes read at once
_READERS = 4  # threads that feed a GPU


class Folder:
    """Parameters by their name in the model, from files that may store experts one by one. What is read into a GPU's memory is
    there when `with` ends."""

    def __init__(self, folder: Path) -> None:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.exists():
            contents = read_json(index)
            where = contents.get("weight_map") if isinstance(contents, dict) else None
            if not isinstance(where, dict) or not where:
                raise ValueError(f"{index} has no weight_map, a table of names and files; download it again")
            try:
                self.where = {name: inside(folder, file, links=True) for name, file in where.items()}
            except ValueError as error:
                raise ValueError(f"{index}: {error}") from None
        elif single.exists():
            self.where = dict.fromkeys(read_header(single), single)
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
        self._headers: dict[Path, dict[str, Any]] = {}
        self._opened: dict[Path, int] = {}
        self._readers: ThreadPoolExecutor | None = None
        self._reading: list[Future[None]] = []
        self._own = threading.local()  # a reader's buffer

    def __contains__(self, name: str) -> bool:
        return name in self.where

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                for piece in self._reading:
                    piece.result()
        finally:
            if self._readers is not None:
                self._readers.shutdown(cancel_futures=True)
            self._reading, self._readers = [], None
            self.close()

    def close(self) -> None:
        while self._opened:
            os.close(self._opened.popitem()[1])

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entry(name)["shape"])

    def read(self, name: str, first: int, out: Tensor, shape: torch.Size) -> None:
        """Rows from `first` on of the model's parameter `name`, of this whole shape, into `out` [rows, ...]."""
        sources = _sources(self, name, shape)
        assert sources is not None
        if name in self or not _EXPERTS.match(name):
            return self._read(sources[0][0], first, out)
        for row in range(out.shape[0]):
            at = 0
            for source in sources[first + row]:  # gate and up lie one behind the other
                height = self.shape(source)[0]
                self._read(source, 0, out[row, at : at + height])
                at += height

    def _read(self, name: str, first: int, out: Tensor) -> None:
        entry = self._entry(name)
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise OSError(f"{name} has dtype {entry['dtype']}, known are {', '.join(_DTYPES)}")
        flat, size, file = out.view(-1), dtype.itemsize, self._open(self.where[name])
        place = entry["start"] + first * math.prod(entry["shape"][1:]) * size
        direct = flat.dtype == dtype and flat.device.type == "cpu"
        step = _BUFFER // size
        for at in range(0, flat.numel(), step):
            into, begins = flat[at : at + step], place + at * size
            if direct:
                _fetch(file, begins, into)
            elif flat.is_cuda:
                self._readers = self._readers or ThreadPoolExecutor(_READERS, "reader")
                self._reading.append(self._readers.submit(self._fetch_over, file, begins, into, dtype))
            else:
                self._fetch_over(file, begins, into, dtype)

    @torch.no_grad()
    def _fetch_over(self, file: _File, place: int, into: Tensor, dtype: torch.dtype) -> None:
        """By way of a buffer, and in the stored dtype until it is there: a GPU casts faster than a host."""
        if not hasattr(self._own, "buffer"):
            self._own.buffer = torch.empty(_BUFFER, dtype=torch.uint8, pin_memory=into.is_cuda)
        piece = self._own.buffer.view(dtype)[: into.numel()]
        _fetch(file, place, piece)
        into.copy_(piece.to(into.device))

    def _open(self, path: Path) -> _File:
        if path not in self._opened:
            self._opened[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return _File(path, self._opened[path])

    def _entry(self, name: str) -> dict[str, Any]:
        path = self.where[name]
        if path not in self._headers:
            self._headers[path] = read_header(path)
        if name not in self._headers[path]:
            raise ValueError(f"{path} lacks {name}, which the index says it has; download it again")
        return self._headers[path][name]


class _File(NamedTuple):
    path: Path
    handle: int


def _fetch(file: _File, place: int, into: Tensor) -> None:
    bytes_of: Any = into.view(torch.uint8).numpy()
    view = memoryview(bytes_of)
    while view:
        count = os.preadv(file.handle, [view], place)
        if not count:
            raise OSError(f"{file.path} ends early")
        view, place = view[count:], place + count


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """What a safetensors file says about its tensors: dtype, shape, and at which byte each starts."""
    with open_regular(path) as file:  # the library would wait for a pipe
        length = int.from_bytes(file.read(8), "little")
        try:
            with safe_open(path, "pt"):  # it bounds the header, and checks that header and file belong together
                pass
        except SafetensorError as error:
            raise ValueError(f"{path} is no whole safetensors file ({error}); download it again") from None
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    for entry in header.values():
        entry["start"] = 8 + length + entry["data_offsets"][0]
    return header


_EXPERTS = re.compile(r"(.*\.mlp)\.experts\.(gate_up_proj|down_proj)$")


def _expert_names(name: str, expert: int) -> list[list[str]]:
    """The checkpoint names of one expert's matrices, for each layout in use."""
    match = _EXPERTS.match(name)
    assert match is not None
    base, part = match.groups()
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


def _sources(files: Folder, name: str, shape: torch.Size) -> list[list[str]] | None:
    """Checkpoint tensors a parameter is made of: one entry per row of experts, or a single one. None: not there."""
    for candidate in (name, _router_name(name)):
        if candidate in files:
            return [[candidate]]
    if _EXPERTS.match(name):
        per_expert = []
        for expert in range(shape[0]):
            layouts = [names for names in _expert_names(name, expert) if all(n in files for n in names)]
            if not layouts:
                return None
            per_expert.append(layouts[0])
        return per_expert
    return None


def _check(model: nn.Module, files: Folder, folder: Path) -> None:
    """Names and shapes of all parameters, by the files' headers: before any rank has filled anything."""
    wanted = {saved: p.shape for name, p in named_tensors(model).items() if (saved := saved_name(name)) is not None}
    sources = {name: _sources(files, name, shape) for name, shape in wanted.items()}
    missing = [name for name, groups in sources.items() if groups is None]
    if missing:
        raise ValueError(
            f"{folder} lacks {len(missing)} of the model's parameters, for example {missing[0]}; pass the folder this "
            "model's config came from"
        )
    for name, shape in wanted.items():
        for names in sources[name] or ():
            whole = names == [name] or not _EXPERTS.match(name)
            want = tuple(shape if whole else shape[1:])
            shapes = [files.shape(source) for source in names]
            stored_shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
            if stored_shape != want or len({shape[1:] for shape in shapes}) > 1:
                raise ValueError(
                    f"{' + '.join(names)} has shape {stored_shape} in {folder}, but {name} of the model needs {want}; pass the "
                    "folder this model's config came from"
                )


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """As from_pretrained(dtype=...) leaves a model: rotary frequencies stay in float32, which model.to(dtype) would round."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def randomize(model: nn.Module, seed: int) -> None:
    """Numbers of a useful scale in a small model: Hugging Face's own make attention nearly uniform and norms all ones, which
    hides mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):  # states that last some tokens: most of what models begin with forget at once
                value = 0.5 * noise - 2.0
            elif parameter.dim() == 1:
                value = 0.2 * noise if "bias" in name else parameter.cpu() + 0.2 * noise
            else:
                value = noise * parameter.shape[-1] ** -0.5
            parameter.copy_(value)
