"""One case of verification: a model, a stack, and the checks that must hold between the two.

Runs inside a process group, the same call on every rank. Rank 0 also runs the untouched Hugging Face model on the whole
batch, in one process, and compares. In float32 an item is a relative error, ‖ours - theirs‖ / ‖theirs‖, and must stay below 1e-5,
plus what float32 angles alone make of the untouched model (reference.py).
In bfloat16 both are measured against the untouched model in float32: an item is our distance over the untouched bf16 model's
own, and must stay below 1.2 (a single parameter's gradient below 1.5).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..base.hub import local
from ..engine.batch import Batch
from ..engine.mesh import whole_tensor
from ..engine.model.config import read_config
from ..engine.model.presets import TINY, find_preset
from ..engine.model.weights import cast_parameters
from ..engine.parallelize import prepare
from ..stack import Stack
from .presets import add_lora, build, config_of
from .reference import Item, Measured, Reference

FLOAT32_LIMIT = 1e-5
BFLOAT16_LIMIT = 1.2


@dataclass(frozen=True)
class Case:
    """What to verify. Plain data, so that it can travel to workers."""

    model: str  # preset name or model folder
    stack: Stack
    world: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    length: int = 1021
    rows: int = 1  # per data-parallel group
    packed: bool = False
    lora: bool = False
    full: bool = False
    seed: int = 0
    changes: tuple[tuple[str, Any], ...] = ()  # config fields to override
    scratch: str | None = None

    @property
    def limit(self) -> float:
        return FLOAT32_LIMIT if self.dtype == "float32" else BFLOAT16_LIMIT

    def __str__(self) -> str:
        parts = [f"{name}={getattr(self.stack, name)}" for name in Stack.__dataclass_fields__]
        extra = [name for name in ("packed", "lora", "full") if getattr(self, name)]
        return f"{self.model} on {self.world} ranks, {self.length} tokens, {self.dtype}: {' '.join(parts + extra)}"


@dataclass(frozen=True)
class Data:
    """A global batch."""

    input_ids: Tensor
    labels: Tensor
    documents: list[list[int]] | None


def run_case(case: Case, checks: tuple[str, ...] | None = None) -> list[Item]:
    """All checks (or those named) of a case. Collective; the result is complete on rank 0 and empty elsewhere."""
    session = Session(case)
    items: list[Item] = []
    for name in ALL if checks is None else checks:
        items += CHECKS[name](session)
    return items if session.first else []


class Session:
    """The prepared model, the untouched one beside it, and ways to compare them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.first = not dist.is_initialized() or dist.get_rank() == 0
        self.config = self._config()
        own = self._model(self.config)
        self.reference = Reference(own, case.dtype, case.device) if self.first else None  # has a copy of its own
        dtype = getattr(torch, case.dtype)
        if case.world == 1 and not case.stack.shard_parameters:
            cast_parameters(own, dtype)  # without FSDP2 nothing casts them while computing
        self.run = prepare(own, case.stack, device=case.device, dtype=dtype, scratch=case.scratch)

    def _config(self) -> Any:
        changes = dict(self.case.changes)
        if find_preset(self.case.model) in TINY and not local(self.case.model).is_dir():
            return config_of(self.case.model, self.case.full, **changes)
        config = config_of(self.case.model, self.case.full)
        for name, value in changes.items():
            setattr(config, name, value)
        return config

    def _model(self, config: Any) -> nn.Module:
        folder = local(self.case.model)
        if self.case.full and folder.is_dir():
            from transformers import AutoModelForCausalLM

            model = AutoModelForCausalLM.from_pretrained(
                folder, config=read_config(folder), dtype=torch.float32, trust_remote_code=False,
                use_safetensors=True, local_files_only=True,
            )  # fmt: skip
        else:
            model = build(config, self.case.seed)
        if self.case.dtype != "float32":
            # one set of weights for all three models: those that bf16 can hold
            cast_parameters(cast_parameters(model, getattr(torch, self.case.dtype)), torch.float32)
        model = model.to(self.case.device)  # pyright: ignore[reportArgumentType]
        return add_lora(model, self.case.seed + 1) if self.case.lora else model

    def other(self, **changes: Any) -> Session:
        """The same case on a changed config."""
        return Session(replace(self.case, changes=(*self.case.changes, *changes.items())))

    def data(self, length: int | None = None, packed: bool | None = None, seed: int = 0) -> Data:
        """A batch that looks like training data: the first tokens of a row are a prompt, without loss.

        Routing to experts is a discrete choice: where two experts are equally good within rounding, any two computations
        may differ by a whole expert. In float32 such batches prove nothing and are drawn again.
        """
        length = length or self.case.length
        packed = self.case.packed if packed is None else packed
        for attempt in range(100):
            data = self._draw(length, packed, 1000 * attempt + seed)
            clear = [self.reference is None or self._clear(data)]
            if self.run.mesh.world.size > 1:
                dist.broadcast_object_list(clear, src=0)
            if clear[0]:
                return data
        raise RuntimeError("no batch without a tie between experts in 100 draws; the router may be constant")

    def _clear(self, data: Data) -> bool:
        assert self.reference is not None
        return self.case.dtype != "float32" or self.reference.routing_margin(data.input_ids, data.documents) > 3e-5

    def _draw(self, length: int, packed: bool, seed: int) -> Data:
        rows = self.case.rows * self.run.mesh.data.size
        generator = torch.Generator().manual_seed(1000 + self.case.seed + seed)
        ids = torch.randint(0, self.config.vocab_size, (rows, length), generator=generator)
        labels = ids.clone()
        labels[:, : length // 8] = -100
        documents = [_cut(length, row) for row in range(rows)] if packed else None
        return Data(ids, labels, documents)

    def shard(self, data: Data) -> Batch:
        return self.run.shard(data.input_ids, labels=data.labels, documents=data.documents)

    def loss_and_gradients(self, batches: list[Data], name: str, angles: bool = False) -> list[Item]:
        """Parity of loss and every gradient, over one or several micro-batches."""
        ours = self.measure(batches)
        if self.reference is None:
            return []
        raw = [(d.input_ids, d.labels, d.documents) for d in batches]
        return self.reference.compare(ours, raw, name, self.case.limit, angles)

    def measure(self, batches: list[Data]) -> Measured:
        """Our loss and gradients."""
        run = self.run
        run.model.zero_grad(set_to_none=True)
        shards = [self.shard(data) for data in batches]
        count = sum(batch.supervised for batch in shards)
        value = 0.0
        for batch in shards:
            loss = run.loss(batch, supervised=count)
            loss.backward()
            value += loss.detach()
        return Measured(value, full_gradients(run.model))  # pyright: ignore[reportArgumentType]

    def logits(self, data: Data) -> Tensor | None:
        """Our logits of the whole batch, on rank 0."""
        run = self.run
        with torch.no_grad():
            local = run.logits(self.shard(data)).cpu()
        parts: list[Any] = [None] * run.mesh.world.size
        place = (run.mesh.data.rank, run.mesh.ring.rank, run.mesh.ulysses.rank)
        if run.mesh.world.size > 1:
            dist.all_gather_object(parts, (place, local))
        else:
            parts = [(place, local)]
        if not self.first:
            return None
        layout = self.shard(data).layout
        whole = torch.empty(data.input_ids.shape[0], layout.padded, local.shape[-1], dtype=local.dtype)
        for (data_rank, ring_rank, ulysses_rank), part in parts:
            rows = slice(data_rank * part.shape[0], (data_rank + 1) * part.shape[0])
            whole[rows, layout.tokens(ring_rank, ulysses_rank)] = part
        return whole[:, : layout.length]


def full_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by name, whole, on every rank (a shard's gradient is gathered)."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = None if parameter.grad is None else whole_tensor(parameter.grad)
    return gradients


def _cut(length: int, row: int) -> list[int]:
    """Document lengths: uneven, one of a single token, different in each row."""
    if length < 8:
        return [length]
    first, third = length // 3 + row, length // 5
    return [first, 1, third, length - first - 1 - third]


def _check_plain(session: Session) -> list[Item]:
    return session.loss_and_gradients([session.data(packed=False)], "", angles=True)


def _check_packed(session: Session) -> list[Item]:
    return session.loss_and_gradients([session.data(packed=True)], "packed ")


def _check_case(session: Session) -> list[Item]:
    """As the case says, packed or not."""
    return session.loss_and_gradients([session.data()], "")


def _check_logits(session: Session) -> list[Item]:
    data = session.data()
    ours = session.logits(data)
    if session.reference is None or ours is None:
        return []
    return session.reference.compare_logits(ours, data.input_ids, data.documents, session.case.limit)


def _check_short(session: Session) -> list[Item]:
    """Fewer tokens than ranks, and an odd number: mostly padding."""
    return session.loss_and_gradients([session.data(length=5, packed=False)], "5 tokens: ")


def _check_unsupervised(session: Session) -> list[Item]:
    """Only the first tokens carry loss, so most ranks have none."""
    data = session.data(packed=False)
    labels = torch.full_like(data.labels, -100)
    labels[:1, :9] = data.input_ids[:1, :9]
    return session.loss_and_gradients([replace(data, labels=labels)], "ranks without loss: ")


def _check_accumulation(session: Session) -> list[Item]:
    """Two micro-batches with different numbers of supervised tokens."""
    one, two = session.data(seed=1), session.data(length=session.case.length // 2, seed=2)
    labels = one.labels.clone()
    labels[:, : session.case.length // 2] = -100
    return session.loss_and_gradients([replace(one, labels=labels), two], "accumulation: ")


def _check_leak(session: Session) -> list[Item]:
    """Change one document; the logits of all others must not move by a single bit."""
    data = session.data(packed=True)
    before = session.logits(data)
    ids = data.input_ids.clone()
    assert data.documents is not None
    changed = [slice(0, row[0]) for row in data.documents]
    for row, where in enumerate(changed):
        ids[row, where] = (ids[row, where] + 1) % session.config.vocab_size
    after = session.logits(replace(data, input_ids=ids))
    if before is None or after is None:
        return []
    moved = torch.stack([(before[r, w.stop :] - after[r, w.stop :]).abs().max() for r, w in enumerate(changed)]).max()
    alive = torch.stack([(before[r, w] - after[r, w]).abs().max() for r, w in enumerate(changed)]).max()
    # experts see batches of other sizes when routing changes, and matrix products of other sizes round differently
    limit = 1e-5 * float(before.abs().max()) if _has_experts(session) else 0.0
    error = float(moved) if float(alive) > 0 else float("nan")
    return [Item("document leak", error, limit, "largest change outside the changed document")]


def _has_experts(session: Session) -> bool:
    family = session.run.decoder.family
    return family is None or family.experts


def _windows(session: Session) -> set[int | None]:
    """Of the layers; what a model's own code does is not known, and its proof has looked at it."""
    return {getattr(layer, "window", None) for layer in session.run.decoder.layers}


def _check_window(session: Session) -> list[Item]:
    """A token must move logits within its window's reach and none beyond."""
    windows = _windows(session)
    if windows == {None}:
        return []
    if None in windows:  # mixed layers reach everywhere: probe a model in which every layer slides
        session = session.other(layer_types=["sliding_attention"] * len(session.run.decoder.layers))
        windows = _windows(session)
    layers = len(session.run.decoder.layers)
    reach = layers * (max(w for w in windows if w) - 1)
    at = 3
    if at + reach + 2 >= session.case.length:
        note = f"not probed: {session.case.length} tokens are within reach of every token ({reach})"
        return [Item("sliding window", 0.0, 0.0, note)] if session.first else []
    data = session.data(packed=False)
    before = session.logits(data)
    ids = data.input_ids.clone()
    ids[:, at] = (ids[:, at] + 1) % session.config.vocab_size
    after = session.logits(replace(data, input_ids=ids))
    if before is None or after is None:
        return []
    change = (before - after).abs().amax((0, 2))
    beyond = float(change[at + reach + 1 :].max())
    alive = bool(change[at] > 0) and bool(change[at + 1 : at + reach].max() > 0)
    limit = 1e-5 * float(before.abs().max()) if _has_experts(session) else 0.0
    return [Item("sliding window", beyond if alive else float("nan"), limit, f"largest change beyond {reach} tokens")]


CHECKS: dict[str, Callable[[Session], list[Item]]] = {
    "logits": _check_logits,
    "case": _check_case,
    "plain": _check_plain,
    "packed": _check_packed,
    "short": _check_short,
    "unsupervised": _check_unsupervised,
    "accumulation": _check_accumulation,
    "leak": _check_leak,
    "window": _check_window,
}
ALL = tuple(name for name in CHECKS if name != "case")  # "plain" and "packed" are the case both ways
