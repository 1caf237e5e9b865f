"""Proof on the spot: a model that no table knows is run by its own code only after that was shown to be exact, on this machine.

Its class is built from its config, shrunk (model/shrink.py), in float32 on the CPU, with numbers of a useful scale. Then loss,
logits and every gradient of the module engine are compared with the untouched model's (eager attention): rows whole and packed
with documents, which the untouched model gets one by one. Ranks are rows of the batch: every module sees the tokens of one rank,
with their positions, and attention alone sees all of them. So whatever looks at its neighbours, counts tokens or has positions of
its own is found out, however it is written. What is refused is told with the first module where the two part.

Seconds, and kept: the answer is looked up by what was proven (class and its source, config, versions, our own source).
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib import metadata
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..base.files import cache_folder
from ..stack import Stack
from .assemble import assemble
from .attention.choice import Kernels
from .attention.interface import Unsupported, configs_of
from .batch import Batch
from .layer.mixer import by_formulas, doors_of
from .mesh import Group, Mesh
from .model.angles import FLOAT32_POSITIONS, Angles, rotary_modules
from .model.guard import owner_changes
from .model.norm import known_norms
from .model.shrink import TEXT, shrink_config
from .model.weights import randomize
from .objective.cross_entropy import IGNORE, LossKernel
from .offload.store import GpuStore
from .own import OwnDecoder, read_own
from .ranks import gather, on_rank0, world_group
from .run import Run

log = logging.getLogger("ithaca")

LIMIT, NEAR = 1e-5, 1e-3
RANKS, TOKENS = 4, 24  # of each rank
DOCUMENTS = [[41, 7, 48], [60, 36]]
MOST = 50_000_000  # parameters of a changed instance that is copied
ATTEMPTS = 3  # with experts: two that are equally good within rounding may change places
_ZERO = 1e-5  # of a usual gradient: a smaller one is rounding, as of a key's bias where positions do not turn keys


@dataclass(frozen=True)
class Proof:
    exact: bool
    error: float  # the largest, relative
    where: str  # what has it; where it is refused, what parts first
    why: str = ""
    seconds: float = 0.0
    tiles: bool = True  # MLP and experts bear being run by tiles of tokens
    unseen: bool = False  # no gradient depends on what they make, but through theirs
    dtype: str = "float32"
    angles: bool = True  # rotary modules bear being computed in float64
    norms: dict[str, float] = field(default_factory=dict)  # classes of norms that one kernel can be (model/norm.py)

    def __str__(self) -> str:
        if self.exact:
            whole = "" if self.tiles else ", MLP untiled"
            limit = f"{self.error:.1e} in {self.dtype} (limit {LIMIT:.0e})"
            return f"exact to {limit}{whole}, proven on a shrunk copy in {self.seconds:.1f} s"
        return self.why or f"off by {self.error:.1e} (limit {LIMIT:.0e}) in {self.where}"


# -- what prepare asks ------------------------------------------------------------------------------------------------------


def require_proof(decoder: OwnDecoder) -> Proof:
    """Collective: rank 0 decides for all. ValueError where the model is not exact."""
    model, kind, world = decoder.model, type(decoder.model).__name__, world_group()
    changes = owner_changes(model)
    for rank, others in enumerate(gather(world, changes)):
        if set(others) != set(changes):  # rank 0 proves what it has, for all
            raise ValueError(
                f"{kind} is another model on rank {world.rank} ({'; '.join(changes[:2]) or 'as its class makes it'}) than on rank "
                f"{rank} ({'; '.join(others[:2]) or 'as its class makes it'}); change it on every rank, or on none"
            )
    if changes:
        proof = on_rank0(world, lambda: prove_changed(model, changes))
    else:
        proof = on_rank0(world, lambda: kept_proof(type(model), model.config, parts_of(model)))
    if not proof.exact:
        if changes:
            raise ValueError(
                f"{kind} is not as its class makes it, and was not exact when its own code was tried with our attention, so it is "
                f"refused: {proof}. ithaca docs own_code says what is asked of a change"
            )
        raise ValueError(
            f"{kind} has no arithmetic of its own here, and its own code with our attention was not exact when tried on a small "
            f"copy, so it is refused: {proof}. Choose another model: ithaca docs families says which run, and why others do not"
        )
    decoder.tiles, decoder.wide_angles, decoder.norms = proof.tiles, proof.angles, proof.norms
    decoder.blank = 0.0 if proof.unseen else None
    log.info("%s by its own code: %s", kind, proof)
    if not proof.angles:
        log.warning(
            "%s has a rotary module that could not be computed in float64: documents over %s tokens will be refused "
            "(ithaca docs rope)",
            kind,
            f"{FLOAT32_POSITIONS:,}",
        )
    return proof


def prove_changed(model: nn.Module, changes: list[str]) -> Proof:
    """An instance that its owner changed: a fresh copy would not have the change, so it is proven on its own numbers."""
    said = "; ".join(changes[:3])
    size = sum(p.numel() for p in model.parameters())
    if size > MOST or any(p.is_meta for p in model.parameters()):
        why = (
            f"with what its owner changed ({said}) a copy to prove it on would be too large (over {MOST // 10**6}M parameters) or "
            "has no numbers yet; undo the change"
        )
        return Proof(False, float("inf"), "", why)
    begin = time.perf_counter()
    before = [(p, p.grad) for p in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    with _same_chance():
        proof = _instance(model)
    if any(parameter.grad is not None for parameter, _ in before):
        why = (
            "a function of its owner computes with this very object, not with the module it is called for, so that a copy cannot "
            "be tried; make it a method (types.MethodType) or a class of its own"
        )
        proof = Proof(False, float("inf"), "", why)
    for parameter, grad in before:
        parameter.grad = grad
    if not proof.exact:
        proof = replace(proof, why=f"with what its owner changed ({said}) {proof}")
    return replace(proof, seconds=round(time.perf_counter() - begin, 2))


def _instance(model: nn.Module) -> Proof:
    try:
        ids = torch.randint(
            0, _text(model.config).vocab_size, (2, RANKS * TOKENS), generator=torch.Generator().manual_seed(0)
        )
        return _judged(lambda: _copied(model), ids, tiles=True)
    except Refused as error:
        return Proof(False, float("inf"), "", str(error))


def _copied(model: nn.Module) -> nn.Module:
    copied = _try("it cannot be copied to be tried", lambda: copy.deepcopy(model).cpu().float().train())
    for config in configs_of(copied):
        config._attn_implementation_internal = "eager"
    return copied


def parts_of(model: nn.Module) -> set[str]:
    """Classes of modules and names of parameters, whatever their number; adapters aside."""
    names = [name.replace(".base_layer", "") for name, _ in model.named_parameters() if ".lora_" not in name]
    plain = [m for name, m in model.named_modules() if ".lora_" not in name and not hasattr(m, "base_layer")]
    return {type(module).__name__ for module in plain} | {re.sub(r"\d+", "N", name) for name in names}


def kept_proof(kind: type, config: Any, parts: set[str] | None = None) -> Proof:
    """As found in the cache, or made and kept there. parts: of the whole model; a copy that lacks one would prove nothing of it."""
    path = _path(kind, config, parts or set())
    if path is not None and path.exists():
        try:
            return Proof(**json.loads(path.read_text()))
        except (ValueError, TypeError, KeyError, OSError):
            log.warning("%s cannot be read, so the proof is made again", path)
    log.info("%s is not in the table of families: trying it on a shrunk copy (some seconds)", kind.__name__)
    proof = prove(kind, config, parts)
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.tmp")
            part.write_text(json.dumps(asdict(proof)))
            part.replace(path)
        except OSError as error:
            log.info("the proof could not be kept (%s), so it will be made again", error)
    return proof


def _path(kind: type, config: Any, parts: set[str]) -> Path | None:
    try:
        folder = cache_folder(os.environ)
    except RuntimeError:
        return None
    said = {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "source": _source(inspect.getsourcefile(kind)),
        "config": config.to_json_string(use_diff=False),
        "parts": sorted(parts),  # somebody may have put another one in
        "versions": [metadata.version(name) for name in ("torch", "transformers")],
        "ours": _ours(),
    }
    return folder / "proofs" / f"{hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]}.json"


def _source(file: str | None) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""


@cache
def _ours() -> str:
    """Of every line that takes part."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


# -- the proof --------------------------------------------------------------------------------------------------------------


def prove(kind: type, config: Any, parts: set[str] | None = None, ranks: tuple[int, ...] = (RANKS,)) -> Proof:
    """Build it small, run it twice, compare. ranks: how many rows stand for one sequence."""
    begin = time.perf_counter()
    with _same_chance():
        try:
            small = _try("its config cannot be shrunk", lambda: shrink_config(config))
            if parts and (missing := parts - parts_of(_build(kind, small, 0))):
                raise Refused(
                    f"the shrunk copy lacks a part of it ({', '.join(sorted(missing)[:3])}), so it would prove nothing"
                )
            try:
                proof = _compare(kind, small, True, ranks)
            except NotRun:
                proof = None
            if proof is None or not proof.exact:
                plain = _compare(kind, small, False, ranks)
                proof = plain if proof is None or plain.exact else proof
            if not proof.exact:
                proof = _parting(kind, small, proof)
        except Refused as error:
            proof = Proof(False, float("inf"), "", str(error))
    return replace(proof, seconds=round(time.perf_counter() - begin, 2))


def _compare(kind: type, config: Any, tiles: bool, ranks: tuple[int, ...]) -> Proof:
    """With experts several times: two that are equally good within rounding may change places, which proves nothing."""
    for seed in range(ATTEMPTS if _has_experts(config) else 1):
        proof = _judged(partial(_build, kind, config, seed), _ids(config, seed), tiles, ranks)
        if proof.exact:
            break
    return proof  # pyright: ignore[reportPossiblyUnboundVariable]


def _judged(build: Callable[[], nn.Module], ids: Tensor, tiles: bool, ranks: tuple[int, ...] = (RANKS,)) -> Proof:
    """In float64 where float32 is near the limit: there torch's own kernels are as far from the formula, by rounding."""
    proof = _worst(build(), ids, tiles, ranks)
    if LIMIT < proof.error < NEAR:
        with suppress(Refused):  # kernels of experts may have no float64
            proof = _worst(build().double(), ids, tiles, ranks)
    return proof


class Refused(Exception):
    """Why a proof cannot be made."""


class NotRun(Refused):
    """The model does not run in the engine."""


def _worst(model: nn.Module, ids: Tensor, tiles: bool, ranks: tuple[int, ...] = (RANKS,)) -> Proof:
    """The largest error of all that is compared."""
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    worst = Proof(True, 0.0, "", tiles=tiles, dtype=dtype)
    # a linear mixer goes by tiles where one rank has the whole row
    counts = sorted({*ranks, 1}) if any(doors_of(module) for module in model.modules()) else ranks
    for documents in (None, DOCUMENTS):
        theirs = _try("its own code does not run shrunk", partial(untouched, model, ids, documents))
        if not bool(torch.isfinite(theirs.loss)):
            raise Refused("its loss is not finite when shrunk, so nothing can be compared")
        for count in counts:
            ours = _try(
                "it cannot be run with our attention", partial(_engine, model, ids, documents, tiles, count), NotRun
            )
            for name, error in _errors(ours, theirs):
                error = inf if isnan(error) else error  # or every later one would seem larger, and be believed
                if error > worst.error:
                    said = name if documents is None else f"{name}, packed documents"
                    worst = replace(worst, exact=error <= LIMIT, error=error, where=said)
    if worst.exact and tiles:
        worst = replace(worst, unseen=_unseen(model, ids))
    text = _text(model.config)
    angles = all(Angles(m, text).sound(text.hidden_size) for m in rotary_modules(model))
    return replace(worst, angles=angles, norms=known_norms(model))


def _unseen(model: nn.Module, ids: Tensor) -> bool:
    """Whether NaN may stand for what tiled parts made when layers run again: it would be in every gradient that depends on it."""
    kept, blank = (_engine(model, ids, None, True, RANKS, filled) for filled in (None, nan))
    pairs = [(grad, blank.gradients[name]) for name, grad in kept.gradients.items()]
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


@dataclass
class Measured:
    loss: Tensor
    logits: Tensor
    gradients: dict[str, Tensor | None]


def _build(kind: type, config: Any, seed: int) -> nn.Module:
    def build() -> nn.Module:
        own = copy.deepcopy(config)
        own._attn_implementation = "eager"
        model = kind(own).float()
        randomize(model, seed)
        return model.train()

    torch.manual_seed(seed)
    return _try("it does not build from its config, shrunk", build)


def untouched(model: nn.Module, ids: Tensor, documents: list[list[int]] | None) -> Measured:
    """Every document by itself, as one sequence."""
    model = by_formulas(copy.deepcopy(model))
    rows = [ids[row].split(documents[row] if documents else [ids.shape[1]]) for row in range(len(ids))]
    logits = [[model(input_ids=part[None], use_cache=False).logits[0] for part in parts] for parts in rows]
    labels = torch.cat([torch.cat((part[1:], part.new_full((1,), IGNORE))) for parts in rows for part in parts])
    flat = torch.cat([part for parts in logits for part in parts])
    loss = F.cross_entropy(flat.float(), labels, ignore_index=IGNORE)
    loss.backward()
    return Measured(loss.detach(), flat.detach(), {name: p.grad for name, p in model.named_parameters()})


def _engine(
    model: nn.Module,
    ids: Tensor,
    documents: list[list[int]] | None,
    tiles: bool,
    ranks: int,
    blank: float | None = None,
) -> Measured:
    model = copy.deepcopy(model)
    run = small_run(model, tiles, blank)
    batch = folded(run.shard(ids, documents=documents), ranks)
    with torch.no_grad():
        logits = run.logits(batch)
    loss = run.loss(batch)
    loss.backward()
    return Measured(loss.detach(), logits.flatten(0, 1), {name: p.grad for name, p in model.named_parameters()})


def small_run(model: nn.Module, tiles: bool = True, blank: float | None = None) -> Run:
    """The module engine on one process, whatever group there is; with stages and tiles, so that they are part of what is proven."""
    alone, device = Group(1, 0, None), torch.device("cpu")
    stack = Stack(engine="module", heads_per_stage=1, tile=10, shard_parameters=False)
    store, decoder = GpuStore(device), read_own(model)
    decoder.tiles, decoder.blank, decoder.wide_angles = tiles, blank, False  # the untouched model's are float32
    return assemble(
        model, decoder, stack, Mesh(device, alone, alone, alone, alone, None), store=store, on_device=store,
        kernels=Kernels("auto"), loss_kernel=LossKernel(), dtype=next(model.parameters()).dtype, weights=None,
    )  # fmt: skip


def folded(batch: Batch, ranks: int = RANKS) -> Batch:
    """Rows of tokens that stand for ranks."""
    rows, length = batch.input_ids.shape
    cut = {
        name: getattr(batch, name).expand(rows, -1).reshape(rows * ranks, length // ranks)
        for name in ("input_ids", "labels", "positions")
    }
    return replace(batch, **cut, fold=ranks)


def _ids(config: Any, seed: int) -> Tensor:
    text = min(TEXT, _text(config).vocab_size)  # bytes or letters may be all there is
    return torch.randint(0, text, (2, RANKS * TOKENS), generator=torch.Generator().manual_seed(seed))


def _errors(ours: Measured, theirs: Measured) -> Iterator[tuple[str, float]]:
    yield "loss", apart(ours.loss, theirs.loss)
    yield "logits", apart(ours.logits, theirs.logits)
    sizes = {n: float(g.norm()) / g.numel() ** 0.5 for n, g in theirs.gradients.items() if g is not None}
    usual = sorted(sizes.values())[len(sizes) // 2] if sizes else 0.0
    for name, grad in theirs.gradients.items():
        own = ours.gradients[name]
        if grad is None or own is None:
            there = own if grad is None else grad
            yield name, 0.0 if there is None or not there.any() else float("inf")
        elif sizes[name] < _ZERO * usual:
            yield name, 0.0 if float(own.norm()) / own.numel() ** 0.5 < _ZERO * usual else float("inf")
        else:
            yield name, apart(own, grad)


def apart(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    size = float(b.norm())
    return float((a - b).norm()) / size if size else (0.0 if not a.any() else float("inf"))


def _parting(kind: type, config: Any, proof: Proof) -> Proof:
    """With the first module whose output differs, in the order in which the untouched model comes to them."""
    model = _build(kind, config, 0)
    ids = _ids(config, 0)
    other = copy.deepcopy(model)
    run = small_run(other, tiles=False)
    with torch.no_grad():
        theirs = _watched(model, lambda: by_formulas(model)(input_ids=ids, use_cache=False))
        ours = _watched(other, lambda: run.logits(folded(run.shard(ids))))
    names = {id(module): name for name, module in other.named_modules()}
    assert isinstance(run.decoder, OwnDecoder)
    alone = [f"{names[id(layer.module)]}." for layer in run.decoder.tokenwise]
    for name, value in theirs.items():
        mine = ours.get(name)
        if mine is not None and mine.numel() == value.numel() and apart(mine.reshape(value.shape), value) > 10 * LIMIT:
            if f"{name}.".startswith(tuple(alone)):
                numbers = ", ".join(str(layer.index) for layer in run.decoder.tokenwise)
                why = (
                    f"layers {numbers} of it never came to attention that can be replaced: they mix tokens in another way, or "
                    "attend by code of their own"
                )
                return replace(proof, why=why)
            return replace(
                proof, where=f"{name} ({type(model.get_submodule(name)).__name__}), the first module where the two part"
            )
    return proof


def _watched(model: nn.Module, run: Callable[[], Any]) -> dict[str, Tensor]:
    """The first tensor that every module returns, in the order in which they return."""
    found: dict[str, Tensor] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            value = (
                output
                if isinstance(output, Tensor)
                else next((t for t in _parts(output) if isinstance(t, Tensor)), None)
            )
            if value is not None and value.is_floating_point() and name not in found:
                found[name] = value.detach().clone()

        return hook

    hooks = [module.register_forward_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _parts(output: Any) -> Any:
    return output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()


def _try(what: str, act: Callable[[], Any], as_error: type[Refused] = Refused) -> Any:
    try:
        return act()
    except Refused:
        raise
    except Exception as error:  # a model's own code raises whatever it likes
        first = str(error).strip().partition("\n")[0]
        if "'Rule'" in first or "'Unread'" in first:
            said = f"its code works on the mask itself, so its attention cannot be replaced ({first})"
        elif isinstance(error, Unsupported) or " cannot be prepared: " in first or " cannot be run: " in first:
            said = first  # in our own words
        else:
            said = f"{what} ({type(error).__name__}: {first})"
        raise as_error(said) from error


def _text(config: Any) -> Any:
    return config.get_text_config()


def _has_experts(config: Any) -> bool:
    return any(
        "expert" in key and isinstance(value, int) and value > 1 for key, value in _text(config).to_dict().items()
    )


@contextmanager
def _same_chance() -> Iterator[None]:
    """The caller's random numbers are those it would have had without a proof."""
    state = torch.random.get_rng_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(state)
