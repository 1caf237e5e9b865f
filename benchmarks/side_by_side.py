"""ithaca beside what else a user can run on the same GPU: one command, one dated table.

    python benchmarks/side_by_side.py --shape llama32_1b --contexts 8K,16K,32K,64K
    python benchmarks/side_by_side.py --contexts 512K,1M --layers 2 --recipes hf+ckpt+liger+offload,alst,ithaca
    python benchmarks/side_by_side.py --rank-of 8 --shape llama3_8b --contexts 1M --layers 2
    python benchmarks/side_by_side.py --device cpu --shape tiny --contexts 64,128     # no GPU: does it still run?

Work: forward and backward of one row of random tokens, labels = tokens, bf16 weights (fp32 on a CPU), no optimizer, gradients
dropped before each step. Weights and tokens come from fixed seeds, so the losses of one context agree: a row whose loss differs
computes something else. The first step warms up (kernels are built, host memory is pinned), the median of the others counts.

A case is a recipe at a context and runs in a process of its own (a fork of one that has done the imports), so one that runs
out of memory or time is a row that says so, and the others go on; its later, longer contexts are left out. What every case printed
is in the .log beside the table.

With --layers below the model's real depth the rate is that of the whole depth. Time outside the layers (embedding, head, loss) is
measured by itself and not scaled; "at least" scales the whole step. Peak and host memory stay those of the layers that ran:
compare them with each other, not with the GPU's size.

--rank-of N measures ithaca's stacks as rank 0 of N on torch's fake process group (see rank_of_n.py): fp32 masters, bf16 compute,
communication takes no time, losses mean nothing.

Alternatives that are not installed are rows that say so. Where nothing can be installed, unpack into one folder and put it on
PYTHONPATH: liger-kernel; deepspeed (only its python package: no csrc, nothing is built), and for it pydantic, pydantic-core,
annotated-types, typing-inspection, typing-extensions, hjson, py-cpuinfo, msgpack.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_of_n import SHAPES, Marks, config_of, size, whole_depth
from rank_of_n import measure as measure_rank
from torch import Tensor, nn

import ithaca
from ithaca.base.processes.apart import run_apart
from ithaca.config import read_fields, split_words
from ithaca.stack import require

# -- what ithaca runs: edit here ---------------------------------------------------------------------------------------

SUITED: list[tuple[str, dict[str, Any]]] = [  # up to this context, this stack
    ("64K", dict(recompute="none", tile=None)),
    ("256K", dict(recompute="keep_attention", store="host", tile=65536)),
    ("1000M", dict(recompute="keep_attention", store="host", tile=8192, heads_per_stage=8)),
]
ONE_GPU: dict[str, dict[str, Any]] = {
    # Untied Ulysses as published, on one GPU
    "ithaca-composed-layer": dict(
        engine="composed", recompute="layer", store="host", tile=4096, heads_per_stage=4, attention="cudnn"
    ),
}
UPIPE: dict[str, Any] = dict(engine="composed", recompute="layer", store="host", tile=4096, heads_per_stage=1)
KEEP: dict[str, Any] = dict(recompute="keep_attention", store="host", tile=4096, heads_per_stage=1)
RANK_OF_N: dict[str, dict[str, Any]] = {  # the first is what the others are compared with
    "composed+layer+cudnn-one-call": dict(**UPIPE, attention="cudnn"),  # the published recipe on our kernels
    "composed+layer+cudnn": dict(**UPIPE, attention="cudnn"),
    "streamed+cudnn": dict(**KEEP, engine="streamed", attention="cudnn"),
    "streamed": dict(**KEEP, engine="streamed"),
}
PRELOAD = ("ithaca.engine.build", "ithaca.planner.search")  # imported once for all cases
ONE_CALL = "cudnn-one-call"  # in a name: cuDNN attends a whole stage in one call, not by tiles of queries
ALL_SHAPES = {
    **SHAPES,
    "tiny": ("llama", 2, dict(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=128
    )),
}  # fmt: skip


def suited(context: int) -> ithaca.Stack:
    """The stack that suits a length on one GPU. Nothing is sharded, so that weights are bf16 as everybody else's."""
    settings = next(settings for longest, settings in SUITED if context <= size(longest))
    return ithaca.Stack(**{"shard_parameters": False, **settings})


# -- the recipes -------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    recipe: str
    context: int
    shape: str
    layers: int
    device: torch.device

    @property
    def vocabulary(self) -> int:
        return ALL_SHAPES[self.shape][2]["vocab_size"]

    def model(self) -> Any:
        from transformers import AutoModelForCausalLM  # here: only a case needs it

        # no cache, as every trainer sets it: it would hold keys and values once more
        config = config_of(ALL_SHAPES[self.shape], self.layers, use_cache=False)
        torch.manual_seed(0)
        with self.device:
            dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").train()

    def tokens(self) -> Tensor:
        return torch.randint(0, self.vocabulary, (1, self.context), generator=torch.Generator().manual_seed(1))


@dataclass
class Work:
    """A recipe, ready to run. Backward of the loss runs inside `around` as well."""

    model: nn.Module
    loss: Callable[[], Tensor]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    held: Callable[[], int] = lambda: 0  # pinned bytes that torch's own allocator does not know of
    details: str = ""  # for the notes of the row
    marked: bool = True  # that time inside its layers can be told from the rest


def hugging_face(
    case: Case,
    *,
    checkpoint: bool = False,
    liger: bool = False,
    experts: bool = False,
    offload: bool = False,
    attention: str = "sdpa",
    compiled: bool = False,
) -> Work:
    if liger:  # before the model is built: it replaces classes
        kernels = importlib.import_module("liger_kernel.transformers")
        # for experts Liger has kernels of its own; transformers has grouped matrix products, and which is faster is to be seen
        getattr(kernels, f"apply_liger_kernel_to_{ALL_SHAPES[case.shape][0]}")(swiglu=not experts)
    model, ids = case.model(), case.tokens().to(case.device)
    model.set_attn_implementation(attention)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False}, offload=offload)
    if compiled:
        model.compile()
    return Work(model, lambda: model(input_ids=ids, labels=ids).loss, marked=not compiled)


def context_parallel(case: Case) -> Work:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    backend = "cpu:gloo,cuda:nccl" if case.device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(case.device.type, (1,))
    model, ids = case.model(), case.tokens().to(case.device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    labels = shifted(ids)
    positions = torch.arange(case.context, device=case.device)[None]
    buffers = [ids, labels, positions]

    def loss() -> Tensor:  # labels are shifted already: a rank does not see its neighbour's first token
        return model(input_ids=ids, position_ids=positions, labels=labels, shift_labels=labels).loss

    return Work(model, loss, lambda: context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1]))


def alst(case: Case) -> Work:
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP

    model, ids = case.model(), case.tokens().to(case.device)
    model.gradient_checkpointing_enable({"use_reentrant": False}, offload=case.device.type == "cuda")
    mlp: Any = type(model.model.layers[0].mlp)
    untiled = mlp.forward

    def tiled(self: nn.Module, x: Tensor) -> Tensor:  # as many tiles as DeepSpeed's own example takes
        return TiledMLP.apply(untiled, self, x, math.ceil(x.shape[1] / x.shape[2]), list(self.parameters()))  # pyright: ignore

    mlp.forward = tiled
    labels, head = shifted(ids), model.lm_head
    shards = math.ceil(case.context * case.vocabulary * 4 / 2**30)  # 1 GiB of fp32 logits each

    def part(_: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(x).float(), y, ignore_index=-100, reduction="sum") / (case.context - 1)

    def loss() -> Tensor:
        x = model.model(input_ids=ids).last_hidden_state
        return TiledFusedLogitsLoss.apply(part, model, x, labels, None, shards, [head.weight], "sum")  # pyright: ignore

    return Work(model, loss, details=f"deepspeed {deepspeed.__version__.strip()}, {shards} tiles of the loss")


def unsloth(case: Case) -> Work:
    """Full fine-tuning by Unsloth. It loads from a folder, and wants a tokenizer there."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    os.environ.update(HF_HUB_OFFLINE="1", UNSLOTH_DISABLE_STATISTICS="1")
    library = importlib.import_module("unsloth")
    with tempfile.TemporaryDirectory() as folder:
        case.model().save_pretrained(folder)
        words = Tokenizer(WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))  # pyright: ignore
        PreTrainedTokenizerFast(
            tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="</s>"
        ).save_pretrained(folder)
        model, _ = library.FastLanguageModel.from_pretrained(
            folder, dtype=torch.bfloat16 if case.device.type == "cuda" else torch.float32, max_seq_length=case.context,
            load_in_4bit=False, full_finetuning=True, use_gradient_checkpointing=False,
        )  # fmt: skip
    ids = case.tokens().to(case.device)
    model.train()
    return Work(model, lambda: model(input_ids=ids, labels=ids).loss, details=f"unsloth {library.__version__}")


def ours(case: Case, stack: ithaca.Stack) -> Work:
    run = ithaca.prepare(case.model(), stack, device=case.device)
    batch = run.shard(case.tokens())

    def held() -> int:
        return run.store.held_bytes if stack.offload == "host" else 0

    run.fingerprint = None  # it would refuse the marks on layers, which only look
    return Work(run.model, lambda: run.loss(batch), held=held, details=in_words(stack))


def shifted(ids: Tensor) -> Tensor:
    return F.pad(ids[:, 1:], (0, 1), value=-100)


@dataclass
class Recipe:
    what: str
    start: Callable[[Case], Work] | None  # None: a stack of ours
    needs: str = ""  # packages beside torch and transformers, comma between them
    cpu: bool = True  # runs without a GPU


HF = "Hugging Face model, SDPA"
FA4 = "Hugging Face model, attn_implementation=flash_attention_4"
CHECKPOINTED = partial(hugging_face, checkpoint=True)
RECIPES = {
    "hf": Recipe(f"{HF}, as it comes", hugging_face),
    "hf+ckpt": Recipe(f"{HF}, gradient checkpointing", CHECKPOINTED),
    "hf+liger": Recipe(
        f"{HF}, Liger kernels (fused head and loss, norms, MLP, rotary)",
        partial(hugging_face, liger=True), "liger_kernel", cpu=False,
    ),
    "hf+ckpt+liger": Recipe(f"{HF}, checkpointing, Liger", partial(CHECKPOINTED, liger=True), "liger_kernel", cpu=False),
    "hf+liger+fa4": Recipe(
        f"{FA4}, Liger",
        partial(hugging_face, liger=True, attention="flash_attention_4"), "liger_kernel,flash_attn.cute", cpu=False,
    ),
    "hf+ckpt+liger+fa4": Recipe(
        f"{FA4}, checkpointing, Liger",
        partial(CHECKPOINTED, liger=True, attention="flash_attention_4"), "liger_kernel,flash_attn.cute", cpu=False,
    ),
    "hf+ckpt+liger+fa4+experts": Recipe(
        f"{FA4}, checkpointing, Liger but for the experts, which are transformers' grouped matrix products",
        partial(CHECKPOINTED, liger=True, experts=True, attention="flash_attention_4"), "liger_kernel,flash_attn.cute", cpu=False,
    ),
    "hf+ckpt+liger+experts": Recipe(
        f"{HF}, checkpointing, Liger but for the experts, which are transformers' grouped matrix products",
        partial(CHECKPOINTED, liger=True, experts=True), "liger_kernel", cpu=False,
    ),
    "hf+compile": Recipe(f"{HF}, torch.compile of the whole model", partial(hugging_face, compiled=True), cpu=False),
    "hf+compile+fa4": Recipe(
        f"{FA4}, torch.compile of the whole model",
        partial(hugging_face, compiled=True, attention="flash_attention_4"), "flash_attn.cute", cpu=False,
    ),
    "hf+ckpt+liger+offload": Recipe(
        f"{HF}, checkpointing with offload=True (layer inputs in pinned host memory, copied on the compute stream), Liger",
        partial(CHECKPOINTED, liger=True, offload=True), "liger_kernel", cpu=False,
    ),
    "torch-cp": Recipe(
        f"{HF}, checkpointing, inside torch's context_parallel on a mesh of one rank. There the ring has one member and nothing "
        "is sharded: the same attention, by way of DTensor and with its output merged in fp32",
        context_parallel, cpu=False,
    ),
    "alst": Recipe(
        "the parts of DeepSpeed ALST that one GPU can use: TiledMLP and TiledFusedLogitsLoss on the Hugging Face model. Its own "
        "checkpoint with offload lives in another package; transformers' offload=True stands for it",
        alst, "deepspeed",
    ),
    "unsloth": Recipe("Unsloth's full fine-tuning, nothing checkpointed", unsloth, "unsloth"),
    "ithaca-composed-layer": Recipe("ithaca with the techniques of Untied Ulysses (UPipe), on one GPU", None),
    "ithaca": Recipe("ithaca with the stack that suits the length", None),
    "ithaca-auto": Recipe("ithaca with the stack that `ithaca plan` chooses for training what runs with AdamW on this GPU", None),
}  # fmt: skip


def settings_of(text: str) -> dict[str, Any]:
    """recompute=layer,tile=8192 -> the fields of a Stack"""
    fields, problems = read_fields(split_words("--recipes", text))
    require(problems, "this recipe cannot run")
    return fields


def stack_of(recipe: str, context: int, on: torch.device, ranks: int | None) -> ithaca.Stack:
    """The stack of a recipe by name; "ithaca:tile=8192,..." names its fields itself."""
    if recipe == "ithaca":
        return suited(context)
    known = RANK_OF_N if ranks else ONE_GPU
    settings = known[recipe] if recipe in known else settings_of(recipe.removeprefix("ithaca:"))
    base: dict[str, Any] = {"ulysses": ranks // settings.get("ring", 1)} if ranks else {"shard_parameters": False}
    stack = ithaca.Stack(**{**base, **settings})
    return stack if on.type == "cuda" else replace(stack, attention="auto")


def planned(case: Case) -> ithaca.Stack:
    """What the planner chooses for training what runs here, with weights as everybody else's."""
    from transformers import AutoConfig

    from ithaca.engine.attention.choice import kernels_here
    from ithaca.engine.model.sizes import sizes_of, sliced
    from ithaca.engine.offload.host import available_memory
    from ithaca.planner.hardware import Hardware, parse_gpus
    from ithaca.planner.search import plan
    from ithaca.training.automatic import gpu_here

    family, depth, sizes = ALL_SHAPES[case.shape]
    whole = sizes_of(AutoConfig.for_model(family, num_hidden_layers=depth, **sizes).to_dict(), case.shape)
    model = sliced(whole, case.layers)
    cuda = case.device.type == "cuda"
    hardware = parse_gpus("1xH200")
    if cuda:
        probed = kernels_here("auto", case.device, torch.bfloat16, model.head_dim)
        hardware = Hardware(replace(gpu_here(case.device), probed=probed), 1)
    found = plan(model, gpus=hardware, context=case.context, host=available_memory())
    return replace(found.stack, shard_parameters=False)


def in_words(stack: ithaca.Stack) -> str:
    values = {field.name: stack.words(field.name) for field in fields(stack)}
    return " ".join(
        f"{field.name}={values[field.name]}" for field in fields(stack) if values[field.name] != field.default
    )


# -- one case, in its own process --------------------------------------------------------------------------------------


def run_case(options: Namespace) -> None:
    """Measure one case and write what is known of it after every step, so that a killed case leaves something."""
    recipe, (context,) = options.case, options.contexts
    on = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    if on.type == "cpu":
        torch.set_num_threads(1)  # for tiny tensors a second thread costs more than it brings
    case = Case(recipe, context, options.shape, options.layers, on)
    record: dict[str, Any] = {"status": "no step ended", "machine": machine(on), "steps": []}

    def each(step: dict[str, Any]) -> bool:
        record["steps"].append(step)
        record.update(status="ok", **summary(record["steps"], case, options.rank_of))
        save(options.record, record)
        print({name: round(value, 3) for name, value in step.items() if isinstance(value, float)}, flush=True)
        spent = time.time() - psutil.Process().create_time()
        return spent + 1.1 * step["seconds"] > options.case_seconds  # the next step would not end in time

    try:
        if options.rank_of:
            stack = stack_of(recipe, context, on, options.rank_of)
            record["details"] = in_words(stack)
            measure_rank(
                ALL_SHAPES[options.shape],
                stack,
                tokens=context,
                ranks=options.rank_of,
                layers=options.layers,
                steps=options.steps,
                states=options.states,
                limit=options.limit,
                device=options.device,
                one_call=recipe.endswith(ONE_CALL),
                each=lambda step: each(flat(step)),
            )
        else:
            if options.limit and on.type == "cuda":
                whole = torch.cuda.get_device_properties(0).total_memory
                torch.cuda.set_per_process_memory_fraction(options.limit * 1e9 / whole)
            start = RECIPES[recipe].start if recipe in RECIPES else None
            stack = None if start else planned(case) if recipe == "ithaca-auto" else stack_of(recipe, context, on, None)
            work = start(case) if start else ours(case, stack)
            record["details"] = work.details
            steps(case, work, options.steps, each)
    except Exception as error:
        traceback.print_exc()
        record["status"] = "out of memory" if out_of_memory(error) else brief(error)
        record["status"] += f" in step {len(record['steps']) + 1}" if record["steps"] else ""
        save(options.record, record)
        raise SystemExit(1) from None


def save(path: Path, record: dict[str, Any]) -> None:
    """All or nothing: the time limit may strike while this writes."""
    path.with_suffix(".new").write_text(json.dumps(record))
    path.with_suffix(".new").replace(path)


def steps(case: Case, work: Work, count: int, each: Callable[[dict[str, Any]], bool]) -> None:
    cuda = case.device.type == "cuda"
    marks = Marks(work.model.model.layers if work.marked else (), case.device)  # pyright: ignore
    for _ in range(count):
        work.model.zero_grad(set_to_none=True)
        marks.clear()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with work.around():
            marks.mark("start")
            loss = work.loss()
            marks.mark("loss")
            loss.backward()
            marks.mark("end")
        if cuda:
            torch.cuda.synchronize()
        step = {"seconds": time.perf_counter() - start, **marks.seconds(), "loss": loss.item()}
        if cuda:
            step["peak"] = torch.cuda.max_memory_allocated()
            step["pinned"] = work.held() + torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)  # torch's own
        del loss
        if each(step):
            break


def flat(step: dict[str, Any]) -> dict[str, Any]:
    """A step of rank_of_n as plain numbers."""
    store = step["store"]
    pinned = store.held_bytes if store.kind == "host" else 0
    return {**step, "store": str(store), "pinned": pinned, "waited": store.exposed_seconds}


def summary(steps: list[dict[str, Any]], case: Case, ranks: int | None) -> dict[str, Any]:
    """The median of the steps after the first, and what it says about the whole depth."""
    timed = steps[1:] or steps
    names = [name for name in ("seconds", "forward", "backward", "fixed", "waited") if name in steps[0]]
    middle = {name: median(step[name] for step in timed) for name in names}
    whole = whole_depth(middle["seconds"], middle.get("fixed", 0.0), case.layers, ALL_SHAPES[case.shape][1])
    own = case.context / (ranks or 1)
    return {
        **middle,
        "loss": steps[-1].get("loss"),
        "per_layer": whole["per_layer"] if "fixed" in middle else None,
        "tokens_per_second": own / whole["whole"],
        "at_least": own / whole["at_most"],
        "peak": max(step.get("peak") or 0 for step in steps) or None,
        "pinned": max(step.get("pinned") or 0 for step in steps) or None,
        "note": "first step only" if len(steps) == 1 else "",
    }


def machine(on: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name() if on.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    versions = {"torch": torch.__version__, "transformers": importlib.metadata.version("transformers")}
    for package in ("liger-kernel", "flash-attn-4", "flash-linear-attention"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    allocator = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "as it comes"
    return {"device": name, "python": platform.python_version(), **versions, "allocator": allocator}


def out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def brief(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:117] + '...' if len(text) > 120 else text}"


# -- all cases, and the table ------------------------------------------------------------------------------------------


def main() -> None:
    options = read_options()
    recipes = applicable(options) if options.recipes is None else [each for each in options.recipes.split(",") if each]
    recipes += [f"ithaca:{text}" for text in options.stack]
    check(recipes, options)
    base = free_name(options)
    cases = [(context, recipe) for context in sorted(options.contexts) for recipe in recipes]
    records: list[dict[str, Any]] = []
    given_up: dict[str, str] = {}
    began = time.monotonic()
    for at, (context, recipe) in enumerate(cases):
        left = options.seconds - (time.monotonic() - began)
        record: dict[str, Any] = {"date": str(date.today()), "commit": commit(), "recipe": recipe, "context": context}
        record.update(shape=options.shape, layers=options.layers, rank_of=options.rank_of, steps=[])
        missing = (
            [name for name in RECIPES[recipe].needs.split(",") if not installed(name)] if recipe in RECIPES else []
        )
        if missing:
            record["status"] = f"not run: {' and '.join(missing)} not installed"
        elif recipe in given_up:
            record["status"] = f"not run: {given_up[recipe]}"
        elif left <= 0:
            record["status"] = f"not run: the {options.seconds:.0f} s for all cases were spent"
        else:
            limit = f"time limit ({options.case_seconds:.0f} s)"
            if left < options.case_seconds:
                limit = f"cut off: the {options.seconds:.0f} s for all cases were spent"
            log = base.with_suffix(".log")
            record.update(start_case(options, context, recipe, min(options.case_seconds, left), limit, log))
            became = record["status"] if not ran(record) else record["note"]
            if became.startswith(("out of memory", "time limit")):
                given_up[recipe] = f"{became.split(' (')[0]} at {short(context)}"
        records.append(record)
        base.with_suffix(".jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        base.with_suffix(".md").write_text(page(records, options))
        print(f"[{at + 1}/{len(cases)}] {short(context)} {recipe}: {progress(record)}", flush=True)
    print(f"\n{page(records, options)}\n{base.with_suffix('.md')}", flush=True)


def installed(package: str) -> bool:
    try:
        return not package or importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # what a part is of
        return False


def start_case(options: Namespace, context: int, recipe: str, seconds: float, limit: str, log: Path) -> dict[str, Any]:
    """Run a case in a process of its own. -> its record, with what became of it as status

    limit: what to call it when `seconds` are over.
    """
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        case = Namespace(
            **{**vars(options), "case": recipe, "record": record, "contexts": [context], "case_seconds": seconds}
        )
        # against fragmentation, the same for everybody; a setting of the caller's own stays
        environment = dict(os.environ)
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(environment):
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        start = time.monotonic()
        ended = run_apart(run_case, case, environ=environment, preload=PRELOAD, seconds=seconds)
        code, text = ended.status, ended.printed
        found = json.loads(record.read_text()) if record.exists() else {"status": "no step ended", "steps": []}
    if code is None and found["steps"]:
        found["note"] = f"{limit}: {found['note'] or 'fewer steps'}"
    elif code is None:
        found["status"] = limit
    elif code < 0:
        found["status"] = f"killed by signal {-code}" + (" (host memory?)" if code == -9 else "")
    elif code and found["status"] in ("ok", "no step ended"):
        found["status"] = f"exit code {code}"
    found["wall_seconds"] = time.monotonic() - start
    with log.open("a") as file:
        file.write(
            f"==== {short(context)} {recipe}: {found['status']}, {found['wall_seconds']:.0f} s\n{text[-20000:]}\n"
        )
    return found


def read_options() -> Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=ALL_SHAPES, default="llama32_1b")
    parser.add_argument(
        "--contexts", type=lambda text: [size(part) for part in text.split(",")], default="8K,16K,32K,64K"
    )
    parser.add_argument(
        "--recipes", help="names, comma between them; default: all that apply; '': only those of --stack"
    )
    parser.add_argument(
        "--stack", action="append", default=[], help="one more row of ithaca: recompute=layer,tile=8192,..."
    )
    parser.add_argument("--layers", type=int, help="default: the real depth of the shape")
    parser.add_argument("--steps", type=int, default=3, help="the first warms up")
    parser.add_argument("--limit", type=float, metavar="GB", help="what the allocator may have")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no more cases after this time")
    parser.add_argument("--case-seconds", type=float, default=300)
    parser.add_argument("--rank-of", type=int, metavar="N", help="rank 0 of N ranks that are not there")
    parser.add_argument("--states", action="store_true", help="with --rank-of: AdamW states of all layers resident")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    options.layers = options.layers or ALL_SHAPES[options.shape][1]
    return options


def applicable(options: Namespace) -> list[str]:
    if options.rank_of:
        return list(RANK_OF_N)
    return [name for name, recipe in RECIPES.items() if recipe.cpu or options.device == "cuda"]


def check(recipes: list[str], options: Namespace) -> None:
    """Before the first case runs: is every name known, and can every stack that was asked for work?"""
    known = RANK_OF_N if options.rank_of else RECIPES
    for recipe in recipes:
        if recipe.startswith("ithaca:"):
            try:
                stack = stack_of(recipe, 1, torch.device(options.device), options.rank_of)
                require(stack.violations(options.rank_of or 1), recipe)
            except ValueError as error:
                raise SystemExit(str(error)) from None
        elif recipe not in known:
            raise SystemExit(f"no recipe {recipe!r}; there are {', '.join(known)}")


def free_name(options: Namespace) -> Path:
    options.out.mkdir(parents=True, exist_ok=True)
    ranks = f"-rank-of-{options.rank_of}" if options.rank_of else ""
    stem = f"{date.today()}-side-by-side-{options.shape}{ranks}"
    names = [stem] + [f"{stem}-{count}" for count in range(2, 1000)]
    return next(options.out / name for name in names if not (options.out / f"{name}.md").exists())


def short(tokens: int) -> str:
    for unit, letter in ((2**20, "M"), (2**10, "K")):
        if tokens % unit == 0:
            return f"{tokens // unit}{letter}"
    return str(tokens)


def progress(record: dict[str, Any]) -> str:
    if record["status"] != "ok":
        return record["status"]
    peak = f", {record['peak'] / 1e9:.1f} GB" if record["peak"] else ""
    rate = f"{record['tokens_per_second']:,.0f} tokens/s, step {record['seconds']:.2f} s{peak}"
    return f"{rate} ({record['wall_seconds']:.0f} s in all)"


def page(records: list[dict[str, Any]], options: Namespace) -> str:
    depth = ALL_SHAPES[options.shape][1]
    where = next((record["machine"] for record in records if "machine" in record), {})
    run = f"{options.layers} of {depth} layers" if options.layers != depth else f"all {depth} layers"
    what = f"Rank 0 of {options.rank_of} on a fake process group" if options.rank_of else "One process"
    typed = [word for word in sys.argv[1:] if str(options.out) not in word and word != "--out"]
    notes = [
        f"{what}, forward and backward, one row, no optimizer",
        f"median of at most {max(options.steps - 1, 1)} steps after the first",
        f"allocator limited to {options.limit:g} GB" if options.limit else "",
        "AdamW states of all layers resident" if options.states else "",
    ]
    lines = [
        f"# Side by side: {options.shape}, {run}, {date.today()}",
        "",
        ", ".join(f"{name} {version}".removeprefix("device ") for name, version in where.items())
        + f"; commit {commit()}. {'; '.join(note for note in notes if note)}.",
        "",
        f"`python {shlex.join(['benchmarks/side_by_side.py', *typed])}`",
        "",
        *table(records, options),
        "",
    ]
    if options.layers != depth:
        lines += [
            f"Rates are those of all {depth} layers: time outside the layers once, time inside them × {depth} / "
            f'{options.layers}; "at least" scales both. Step, peak and host memory are those of {options.layers} layers.',
            "",
        ]
    used = dict.fromkeys(record["recipe"] for record in records)
    lines += [f"- `{name}`: {RECIPES[name].what}" for name in used if name in RECIPES and not options.rank_of]
    return "\n".join(lines) + "\n"


def table(records: list[dict[str, Any]], options: Namespace) -> list[str]:
    ranks, shortened = options.rank_of, options.layers != ALL_SHAPES[options.shape][1]
    reference = next(iter(RANK_OF_N)) if ranks else "best HF"
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("tokens/s/GPU" if ranks else "tokens/s", number("tokens_per_second", ",.0f")),
        (f"× {reference}", lambda record: ratio(record, records, ranks)),
        ("step s", number("seconds", ".2f")),
        ("a layer s", number("per_layer", ".3f")),
        ("outside layers s", number("fixed", ".3f")),
        ("peak GB", number("peak", ".1f", 1e-9)),
        ("pinned host GB", number("pinned", ".1f", 1e-9)),
        ("waited for copies s", number("waited", ".2f")) if ranks else ("loss", number("loss", ".4f")),
        ("notes", lambda r: "; ".join(w for w in (r.get("note"), r.get("details")) if w) if ran(r) else r["status"]),
    ]
    if shortened:
        columns.insert(1, ("at least", number("at_least", ",.0f")))
    lines = ["| " + " | ".join(["context", "recipe", *(title for title, _ in columns)]) + " |"]
    lines.append("|" + "---|" * (len(columns) + 2))
    for record in records:
        cells = [short(record["context"]), record["recipe"], *(cell(record) for _, cell in columns)]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return lines


def ran(record: dict[str, Any]) -> bool:
    return record["status"] == "ok"


def number(name: str, form: str, scale: float = 1.0) -> Callable[[dict[str, Any]], str]:
    def cell(record: dict[str, Any]) -> str:
        value = record.get(name) if ran(record) else None
        return "–" if value is None else format(value * scale, form)

    return cell


def ratio(record: dict[str, Any], records: list[dict[str, Any]], ranks: int | None) -> str:
    """This rate over that of the reference at the same context: the best Hugging Face row, or the first stack."""
    same = [other for other in records if ran(other) and other["context"] == record["context"]]
    if ranks:
        rates = [other["tokens_per_second"] for other in same if other["recipe"] == next(iter(RANK_OF_N))]
    else:
        rates = [other["tokens_per_second"] for other in same if other["recipe"].split("+")[0] == "hf"]
    return f"{record['tokens_per_second'] / max(rates):.2f}" if rates and ran(record) else "–"


def commit() -> str:
    """Of the repository; "+" means that files were changed since."""
    try:
        git = partial(subprocess.run, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
        head = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
        return head + ("+" if git(["git", "status", "--porcelain"]).stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    main()
