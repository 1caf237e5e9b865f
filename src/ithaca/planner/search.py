"""The plan: the fastest stack that fits, with what it holds, how long it takes, and why.

    plan("llama3_8b", gpus="8xH100-80GB", context="1M")

Every combination of the stack's fields that can work is timed by arithmetic (speed.py), and in that order asked for its memory
(memory.py) until one fits the GPU, the host and the disk; of a family whose leanest does not, no other is asked. Where only the
host or the disk is too small, upper layers keep theirs on the GPU, as many as it takes. Where the winner has no room to keep the
attention output of every layer, it keeps that of as many as there is room for; where it has, and room for all activations of some
layers, it keeps those. Fields that are given stay as they are. Where nothing fits and nobody has said where weights and states
wait (offload_optimizer), all is asked once more with them on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from math import ceil
from pathlib import Path
from typing import Any

from ..base.units import format_bytes, format_tokens, parse_room, parse_tokens
from ..config.schema import LINEARS
from ..engine.job import OPTIMIZERS, Job
from ..engine.limits import BF16, NF4_BLOCK
from ..engine.model.families import FAMILIES
from ..engine.model.presets import PRESETS
from ..engine.model.sizes import ModelSizes, read_sizes, said_of
from ..stack import Stack, require
from .candidates import candidates
from .config import hf_config
from .hardware import Hardware, kernels_for, parse_gpus
from .memory import predict
from .own import counted, first_that_fits, longest, own_sizes
from .plan import HOST_SHARE, Plan
from .reasons import reasons_of
from .speed import Speed, estimate

NEARLY = 1.25  # where the last candidate is so much too large, none fits
LEANER = 1.02  # the leanest of a family that was looked for needs at most so much more than the leanest there is
AT_EASE = 0.95  # of a GPU: what saves a few percent of the time is not worth the risk that a plan is off by as much
CONTEXT_STEP = 2**16  # tokens: the longest context is found to this


def plan(
    model: str | ModelSizes,
    *,
    gpus: str | Hardware,
    context: int | str,
    rows: int = 1,
    host: int | str | None = None,
    disk: int | str | None = None,
    optimizer: str = "adamw",
    offload_optimizer: bool | None = None,
    lora: int = 0,
    lora_targets: tuple[str, ...] = LINEARS,
    quantize: str | None = None,
    accumulation: int = 1,
    asynchronous: bool = True,
    deterministic: bool = False,
    objective: str = "sft",
    reference: bool = False,
    trees: bool = False,
    kernel: str | None = None,
    stack: Stack | None = None,
    advise: bool = True,
    only_fit: bool = False,
    config: Any = None,
    say: Callable[[str], object] = lambda line: None,
    **pinned: Any,
) -> Plan:
    """The fastest stack that fits. Of a model without arithmetic here the first of a list that does, by a dry run (own.py).

    model: a preset's name, a folder with config.json, or its sizes. gpus: "8xH100-80GB". host, disk: memory and scratch space of
    one machine; not given, what is usual is assumed and said (`Plan.assumed`), and no disk is used unless the stack asks for one.
    rows: of an optimizer step, over all GPUs and `accumulation` micro-batches. offload_optimizer: None = where a search finds that
    nothing else fits. optimizer, lora (the rank), lora_targets, quantize, asynchronous (checkpoints), deterministic, objective: as
    in a run's config. reference: whether the base scores the rows of every step. trees: whether answers share their prompt. kernel:
    attention kernel; None = the engine's choice. stack: a whole stack to look at instead of searching. advise: where nothing fits,
    look for what would. only_fit: whether something fits, not the fastest. config: Hugging Face's, where `model` is but a name.
    say: told of each dry run. pinned: fields of Stack that must stay as given.
    """
    given = stack or Stack(**_known(pinned))
    if isinstance(model, str) and (config is not None or is_own(model, given)):
        config = config or hf_config(model)
        sizes = own_sizes(config, model if model in PRESETS else Path(model).name)
    else:
        sizes = read_sizes(model) if isinstance(model, str) else model
    hardware = parse_gpus(gpus) if isinstance(gpus, str) else gpus
    tokens = parse_tokens(context) if isinstance(context, str) else context
    problems = [*given.layer_violations(sizes.layers), *_violations(tokens, rows, accumulation, optimizer, lora)]
    problems += [] if stack is None else stack.violations(hardware.count)
    if offload_optimizer and not given.shard_parameters:
        problems.append(
            "offload_optimizer moves shards to the host, but shard_parameters=False keeps weights whole on the GPU"
        )
    if quantize is not None:
        problems += _packing(sizes, given, hardware.count, quantize, lora, bool(offload_optimizer))
    if optimizer == "muon" and (lora or offload_optimizer or sizes.experts):
        problems.append(
            "optimizer='muon' works on whole matrices on the GPU: not of adapters or experts, nor with offload_optimizer"
        )
    if optimizer == "adamw8bit" and offload_optimizer:
        problems.append("optimizer='adamw8bit' makes states small on the GPU, and offload_optimizer takes them off it")
    require(problems, f"no plan for {sizes.name}")
    hardware = (
        replace(
            hardware,
            host=parse_room(host) if isinstance(host, str) else host if host is not None else hardware.host,
            disk=parse_room(disk) if isinstance(disk, str) else disk if disk is not None else hardware.disk,
        )
        .completed(disk=given.offload == "disk")
        .with_links()
    )
    if given.attention not in ("auto", *(hardware.gpu.probed or ())):
        kernel = given.attention  # the stack's word, as in a run
    whole, windowed = kernels_for(sizes, hardware.gpu, kernel)
    job = Job(
        sizes, given, tokens, hardware.count, rows, whole, windowed, optimizer=optimizer, lora=lora,
        targets=tuple(lora_targets), quantize=quantize, offload=bool(offload_optimizer), accumulation=accumulation,
        asynchronous=asynchronous, units=objective != "sft", reference=reference, trees=trees,
        processors=hardware.gpu.processors if deterministic else 0,
    )  # fmt: skip
    may_offload = _may_offload(
        stack=stack, offload_optimizer=offload_optimizer, optimizer=optimizer, quantize=quantize, **pinned
    )
    if config is not None:
        require(given.violations(), f"no plan for {sizes.name}")
        if stack is not None:
            return counted(replace(job, stack=replace(stack, engine="module")), hardware, config)
        found = first_that_fits(job, hardware, config, pinned, kernel=kernel, only_fit=only_fit, say=say)
        if found.fits or not may_offload or found.shares["GPU memory"] <= 1:
            return found
        away = first_that_fits(
            replace(job, offload=True), hardware, config, pinned, kernel=kernel, only_fit=only_fit, say=say
        )
        return _moved(away) if away.fits else found
    _ = job.trained  # a target that the model does not have is refused here
    if stack is not None:
        found = look(job, hardware)
    else:
        found = fastest(
            job, hardware, kernel=kernel, advise=advise, only_fit=only_fit, may_offload=may_offload, **pinned
        )
    return (
        found if hardware.gpu.cuda else replace(found, predicted=None)
    )  # scaled rates may order stacks, not tell a time


def look(job: Job, hardware: Hardware) -> Plan:
    """What a job takes with the stack it has."""
    plan = Plan(job, hardware, predict(job), estimate(job, hardware), False)
    plan.fits = not plan.excess
    return plan


def fastest(
    job: Job,
    hardware: Hardware,
    *,
    kernel: str | None = None,
    advise: bool = True,
    only_fit: bool = False,
    may_offload: bool = False,
    **pinned: Any,
) -> Plan:
    """The fastest stack that fits, for a job with any. kernel: the attention kernel, where somebody has named it. may_offload:
    where nothing fits, weights and states may wait on the host."""
    asked = _Asked(job, hardware, may_mix="store" not in pinned)
    stacks = list(candidates(job.model, hardware, job.context, job.batch, pinned))
    if not stacks:
        given = ", ".join(f"{name}={value}" for name, value in pinned.items())
        raise ValueError(
            f"no stack is possible for {hardware.count} GPUs and rows={job.batch}{' with ' + given if given else ''}; free a "
            "field, or use another number of GPUs or rows"
        )
    if only_fit and (lean := asked.fit(stacks[-1])).fits:
        return lean
    best = asked.search(stacks)
    if not best.fits and may_offload:
        away = fastest(replace(job, offload=True), hardware, kernel=kernel, advise=False, only_fit=only_fit, **pinned)
        if away.fits:
            return _moved(away)
    if only_fit:
        return best
    if best.fits and best.stack.recompute == "layer" and "recompute" not in pinned:
        best = asked.keep_some(best, stacks)
    if best.fits and best.stack.recompute == "keep_attention" and "recompute" not in pinned:
        best = asked.keep_all_of_some(best, stacks)
    if not best.fits:
        best = asked.nearest(best, stacks)
        best.may_offload = may_offload
        if advise:
            best.advice = [words for words, _ in what_would_fit(best, pinned)]
    best.reasons = reasons_of(best, pinned, kernel)
    return best


def _moved(plan: Plan) -> Plan:
    """With the reason why its weights and states wait on the host."""
    room = format_bytes(plan.memory.offloaded)
    why = f"{room} of weights, gradients and states a GPU wait in host memory: with them on it nothing fits"
    plan.reasons = [*plan.reasons, ("train.offload_optimizer", True, why)]
    return plan


def what_would_fit(plan: Plan, pinned: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """For a plan that does not: what to change, in words and as arguments of `plan`. pinned: fields of the stack that were
    given."""
    asked = _Asked(plan.job, plan.hardware, may_mix="store" not in pinned)
    return list(_advice(asked, pinned, plan.may_offload)) or [(_hopeless(asked), {})]


def max_context(model: str | ModelSizes, *, gpus: str | Hardware, step: int = CONTEXT_STEP, **options: Any) -> Plan:
    """The plan of the longest context that fits, in multiples of `step` tokens."""
    given = options.get("stack") or Stack(engine=options.get("engine", "auto"))
    if isinstance(model, str) and is_own(model, given):
        ranks = (parse_gpus(gpus) if isinstance(gpus, str) else gpus).count
        options["only_fit"] = True
        if not _may_offload(**options):
            return longest(lambda tokens: plan(model, gpus=gpus, context=tokens, **options), ranks, step)
        here, there = ({**options, "offload_optimizer": away} for away in (False, True))
        return longest(
            lambda tokens: plan(model, gpus=gpus, context=tokens, **here), ranks, step,
            lambda tokens: _moved(plan(model, gpus=gpus, context=tokens, **there)),
        )  # fmt: skip

    def fits(steps: int) -> bool:
        return plan(model, gpus=gpus, context=steps * step, only_fit=True, **options).fits

    low, high = 0, 1
    while high * step <= 2**30 and fits(high):
        low, high = high, high * 2
    while high - low > 1 and low:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return plan(model, gpus=gpus, context=max(low, 1) * step, **options)


def _may_offload(
    *, stack: Stack | None = None, offload_optimizer: bool | None = None, optimizer: str = "adamw",
    quantize: str | None = None, shard_parameters: bool = True, **_: Any,
) -> bool:  # fmt: skip
    """Whether a search may leave weights and states on the host. Four bits make it needless."""
    return stack is None and offload_optimizer is None and optimizer == "adamw" and not quantize and shard_parameters


def is_own(model: str, stack: Stack) -> bool:
    """Whether a model of this name or folder runs by its own code."""
    return stack.engine == "module" or (stack.engine == "auto" and said_of(model)[0].get("model_type") not in FAMILIES)


def _known(pinned: dict[str, Any]) -> dict[str, Any]:
    unknown = [name for name in pinned if name not in {field.name for field in fields(Stack)}]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no such field of Stack")
    return pinned


def _violations(context: int, rows: int, accumulation: int, optimizer: str, lora: int) -> Iterator[str]:
    if context < 2:
        yield f"context={context} must be at least 2 tokens"
    if rows < 1 or accumulation < 1 or rows % max(accumulation, 1):
        yield f"rows={rows} cannot be split into {accumulation} micro-batches of the same number of rows"
    if optimizer not in OPTIMIZERS:
        yield f"optimizer={optimizer!r} is unknown; choose one of {', '.join(OPTIMIZERS)}"
    if lora < 0:
        yield f"lora={lora} must be a rank of at least 1, or 0 for none"


def _packing(
    sizes: ModelSizes, given: Stack, world: int, quantize: str, lora: int, offload_optimizer: bool
) -> Iterator[str]:
    """What keeps a base from being packed (engine/model/nf4.py), as far as sizes tell."""
    if quantize != "nf4":
        yield f"quantize={quantize!r} is unknown; there is nf4"
    if not lora:
        yield "quantize is for a frozen base under adapters, and without lora all weights are trained; give a rank"
    if offload_optimizer:
        yield "quantize and offload_optimizer both make weights small on the GPU; drop one of them"
    if not given.shard_parameters and world == 1:
        yield "FSDP2 unpacks a layer when it gathers it, and shard_parameters=False does without on one GPU; leave it True"
    if sizes.parameters:
        return  # a dry run looks at its layers
    columns = {sizes.hidden, sizes.heads * sizes.head_dim, sizes.intermediate}
    yield from (
        f"quantize: rows of {width} are no multiple of {NF4_BLOCK}" for width in sorted(columns) if width % NF4_BLOCK
    )
    shards = world // given.replicate if given.shard_parameters else 1
    rows = {
        sizes.heads * sizes.head_dim,
        sizes.kv_heads * sizes.head_dim,
        sizes.hidden,
        sizes.experts or sizes.intermediate,
    }
    yield from (
        f"quantize: {count} rows cannot be shared evenly by {shards} GPUs" for count in sorted(rows) if count % shards
    )


@dataclass
class _Asked:
    """A search: the question, and the steps towards its answer."""

    job: Job  # with any stack
    hardware: Hardware
    may_mix: bool = True  # layers may have different stores
    looked: dict[Stack, Plan] = field(default_factory=dict, init=False)  # at what so far: steps ask for the same again

    @property
    def model(self) -> ModelSizes:
        return self.job.model

    @property
    def layer_input(self) -> float:
        """Bytes of a layer's input on a rank."""
        return self.job.context * self.job.batch / self.hardware.count * self.model.hidden * BF16

    @property
    def crowded(self) -> bool:
        """Whether the inputs of all layers, the least that waits for backward, are more than GPU, host and disk could take."""
        hardware = self.hardware
        if hardware.host is None:
            return False
        outside = (HOST_SHARE * hardware.host + (hardware.disk or 0)) / hardware.ranks_per_node
        return self.model.layers * self.layer_input > hardware.gpu.memory + outside

    def time(self, stack: Stack) -> Speed:
        return estimate(replace(self.job, stack=stack), self.hardware)

    def look(self, stack: Stack) -> Plan:
        if stack not in self.looked:
            self.looked[stack] = look(replace(self.job, stack=stack), self.hardware)
        return self.looked[stack]

    def fit(self, stack: Stack) -> Plan:
        """Like `look`; where only the host or the disk is too small, upper layers keep theirs on the GPU, as few as it takes.

        The upper ones: backward reaches them first, so that the GPU has their room again for the rest of it.
        """
        plan = tried = self.look(stack)
        layers, on_gpu = self.model.layers, 0
        if plan.fits or plan.shares["GPU memory"] > 1 or stack.offload == "gpu" or not self.may_mix:
            return plan
        kept = self.layer_input  # and attention output, of one of the upper layers
        if stack.recompute_of(layers - 1) != "layer":
            kept *= 1 + self.model.heads * self.model.head_dim / self.model.hidden
        while not tried.fits:
            too_much = tried.misplaced
            on_gpu += ceil(too_much / kept)
            if not too_much or on_gpu >= layers or on_gpu * kept > plan.budget - plan.peak:
                return plan
            tried = self.look(replace(stack, store=(stack.offload,) * (layers - on_gpu) + ("gpu",) * on_gpu))
            if tried.misplaced >= too_much:  # not what layers keep: weights on the host, say
                return plan
        return tried

    def search(self, stacks: list[Stack]) -> Plan:
        """The fastest that fits, or else one that comes near."""
        last = self.look(stacks[-1])
        if last.peak > NEARLY * last.budget:
            return last
        if self.look(replace(last.stack, store="gpu")).shares.get("host memory", 0) > 1:
            return last  # weights and states alone are too much for the host, wherever activations wait
        too_large, within_reach = [], []
        for family in _families(stacks):
            leanest = self.leanest(family)
            if self.out_of_reach(leanest):
                too_large.append(leanest)
            else:
                within_reach += family
        for stack in sorted(within_reach, key=lambda stack: self.time(stack).order):
            plan = self.fit(stack)
            if plan.fits:
                return plan
            too_large.append(plan)
        return min(too_large, key=lambda plan: plan.excess)

    def leanest(self, family: list[Stack]) -> Plan:
        """One head at a time may hold more than two: more stages wait for one another."""
        return min(map(self.look, family[-2:]), key=lambda plan: plan.peak)

    def out_of_reach(self, leanest: Plan) -> bool:
        """Whether none of a family can fit, given its leanest: the host and the disk hold the same for all of them."""
        too_much = leanest.misplaced
        if too_much and (leanest.stack.offload == "gpu" or not self.may_mix):
            return True
        return leanest.peak / LEANER + too_much > leanest.budget

    def nearest(self, plan: Plan, stacks: list[Stack]) -> Plan:
        """Nothing fits, and `plan` comes near: of its family the one that comes nearest, and of those the fastest."""
        family = next(family for family in _families(stacks) if plan.stack in family)
        return min(map(self.look, family), key=lambda candidate: (candidate.excess, candidate.speed.order))

    def keep_all_of_some(self, best: Plan, stacks: list[Stack]) -> Plan:
        """`best` computes all but attention again: compute nothing again in as many of the upper layers as fit. -> the fastest"""
        layers = self.model.layers
        for stack in (stack for stack in stacks if stack.recompute == "none"):
            low, high = 0, layers  # with all layers it did not fit
            while high - low > 1:
                some = (low + high) // 2
                mixed = replace(stack, recompute=("keep_attention",) * (layers - some) + ("none",) * some)
                if self.time(mixed).seconds >= best.speed.seconds:
                    low = some  # too few to be worth a look
                elif (tried := self.look(mixed)).fits and tried.peak <= AT_EASE * tried.budget:
                    low, best = some, tried
                else:
                    high = some
        return best

    def keep_some(self, best: Plan, stacks: list[Stack]) -> Plan:
        """`best` attends twice in every layer: keep attention in as many as fit. -> the fastest of all

        The upper layers keep: backward reaches them first, and has freed what they kept by the time it computes a lower one again.
        Fewer heads at a time leave room for more of them, so all are tried, each with the longest tiles that fit.
        """
        layers, seen = self.model.layers, set()

        def keeping(stack: Stack, some: int) -> Stack:
            return replace(stack, recompute=("layer",) * (layers - some) + ("keep_attention",) * some)

        again = [stack for stack in stacks if stack.recompute == "layer"]
        for stack in sorted(again, key=lambda stack: self.time(stack).order):
            kind = replace(stack, tile=None)
            if kind in seen or self.time(keeping(stack, layers - 1)).seconds >= best.speed.seconds:
                continue
            if not self.fit(stack).fits:
                continue
            seen.add(kind)
            low, few = 0, layers - 1  # the fewest that are worth a look: where those do not fit, more do not either
            while few - low > 1:
                middle = (low + few) // 2
                slower = self.time(keeping(stack, middle)).seconds >= best.speed.seconds
                low, few = (middle, few) if slower else (low, middle)
            if not (tried := self.fit(keeping(stack, few))).fits:
                continue
            best = min(best, tried, key=lambda plan: plan.speed.seconds)
            low, high = few, layers  # with all layers it did not fit, or was not faster
            while high - low > 1:
                middle = (low + high) // 2
                mixed = keeping(stack, middle)
                if self.time(mixed).seconds >= best.speed.seconds:
                    low = middle  # too few to be worth a look
                elif (tried := self.fit(mixed)).fits:
                    low = middle
                    best = min(best, tried, key=lambda plan: plan.speed.seconds)
                else:
                    high = middle
        return best


def _families(stacks: list[Stack]) -> list[list[Stack]]:
    """Those that differ in nothing but tiles and heads at a time."""
    families: dict[Stack, list[Stack]] = {}
    for stack in stacks:
        families.setdefault(replace(stack, tile=None, heads_per_stage=None), []).append(stack)
    return list(families.values())


def _hopeless(asked: _Asked) -> str:
    states = asked.model.weights * (8 + asked.job.optimizer_bytes) / asked.hardware.count
    return (
        "nothing that was tried (64 times the GPUs, shorter contexts, the disk, 8-bit or offloaded states, LoRA): weights, "
        f"gradients and states alone are {format_bytes(states)} a GPU; take GPUs with more memory, or a smaller model"
    )


def _advice(asked: _Asked, pinned: dict[str, Any], may_offload: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """The nearest things that would fit, with numbers."""

    def tried(recompute: str | None = None, hardware: Hardware = asked.hardware, **changes: Any) -> Plan | None:
        found = tried_so(recompute, hardware, **changes)
        if found is None and may_offload and changes.get("optimizer") != "adamw8bit":
            return tried_so(recompute, hardware, offload=True, **changes)
        return found

    def tried_so(recompute: str | None, hardware: Hardware, **changes: Any) -> Plan | None:
        job = replace(asked.job, world=hardware.count, **changes)
        other = replace(asked, job=job, hardware=hardware)
        if other.crowded:
            return None
        fixed = pinned if recompute is None else {**pinned, "recompute": recompute}
        stacks = list(candidates(job.model, hardware, job.context, job.batch, fixed))
        plan = other.search(stacks) if stacks else None
        return plan if plan is not None and plan.fits else None

    job, hardware = asked.job, asked.hardware
    if not pinned.get("ulysses"):
        for factor in (2, 4, 8, 16, 32, 64):
            more = replace(hardware, count=hardware.count * factor)
            if "host" in hardware.assumed:  # more GPUs of a machine come with more memory
                more = replace(more, host=more.gpu.host * more.ranks_per_node)
            if plan := tried(hardware=more):
                rate = f", {plan.speed.tokens_per_second:,.0f} tokens/s each" if more.gpu.cuda else ""
                yield f"{more.words}: {format_bytes(plan.peak)} a GPU{rate}", {"gpus": more}
                break
    shorter = job.context
    while shorter > 2048:
        shorter //= 2
        if plan := tried(context=shorter):
            for longer in (shorter * 3 // 2, shorter * 5 // 4):  # twice as much did not
                if nearer := tried(context=longer):
                    shorter, plan = longer, nearer
                    break
            yield f"a context of {format_tokens(shorter)}: {format_bytes(plan.peak)} a GPU", {"context": shorter}
            break
    if hardware.host is not None and "store" not in pinned:
        roomy = replace(hardware, host=None)
        if plan := tried(None if "recompute" in pinned else "layer", hardware=roomy):
            need = ceil(plan.host / HOST_SHARE)
            words = f"{format_bytes(need)} of host memory a machine (--host): {format_bytes(plan.peak)} a GPU"
            yield words, {"host": need}
    if hardware.disk is None and "store" not in pinned:
        roomy = replace(hardware, disk=10**15)
        if plan := tried(hardware=roomy):
            words = f"store: disk with {format_bytes(plan.disk)} of scratch space a machine (--disk)"
            yield f"{words}: {format_bytes(plan.peak)} a GPU", {"disk": plan.disk}
    if job.optimizer == "adamw" and not job.lora and not job.offload and (plan := tried(optimizer="adamw8bit")):
        yield f"train.optimizer: adamw8bit: {format_bytes(plan.peak)} a GPU", {"optimizer": "adamw8bit"}
    movable = job.optimizer == "adamw" and not job.quantize and pinned.get("shard_parameters", True)
    if not job.offload and not may_offload and movable and (plan := tried(offload=True)):
        room = f"{format_bytes(plan.peak)} a GPU, {format_bytes(plan.host)} of host memory a machine"
        yield f"train.offload_optimizer: true: {room}", {"offload_optimizer": True}
    if not job.lora and job.optimizer != "muon" and (plan := tried(lora=16)):
        yield f"LoRA of rank 16 (model.lora): {format_bytes(plan.peak)} a GPU", {"lora": 16}
        return
    packs = not job.quantize and not job.offload and job.optimizer != "muon"
    packs = packs and not any(_packing(job.model, job.stack, hardware.count, "nf4", 16, False))
    if packs and (plan := tried(lora=job.lora or 16, quantize="nf4")):
        words = "model.quantize: nf4" if job.lora else "QLoRA of rank 16 (model.lora, model.quantize: nf4)"
        change = {"quantize": "nf4"} if job.lora else {"lora": 16, "quantize": "nf4"}
        yield f"{words}: {format_bytes(plan.peak)} a GPU", change
