"""`ithaca plan`: will it fit, how fast will it be, and with which stack. No GPU is needed; torch only for a dry run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.kernels import GPU_KERNELS
from ..base.units import format_tokens
from ..config import add_stack_options, read_fields, read_stack, split_words
from ..engine.model.presets import PRESETS
from ..stack import require
from .measuring import at_least, going_on, say

_HELP = """\
Says before a run whether it fits, what holds the memory, how long a step takes and what bounds it, and chooses the fastest stack
that fits. Any field of the stack can be fixed with --stack.FIELD VALUE. Of a run it plans what its file says; options win.

  ithaca plan run.yaml --gpus 8xH100-80GB            # or a run folder, or a recipe: ithaca plan llama3_8b_1m_8xh100
  ithaca plan llama3_8b --context 128K --compare 8xH100-80GB,1xH200,4xA100-80GB,1xRTX5090
  ithaca plan llama3_8b --gpus 8xH100-80GB --context 1M --host 1TB
  ithaca plan Qwen/Qwen3-8B --gpus 1xH200 --max-context --host 512GB
  ithaca plan llama3_8b --gpus 8xH100-80GB --context 1M --stack.recompute layer --stack.tile 8K
  ithaca plan llama3_8b --gpus 8xH100 --context 3M --host 2TB --compare engine=composed,recompute=layer
  ithaca plan llama32_1b --gpus 1xH200 --context 64K --dry-run
  ithaca plan llama3_8b --gpus 8xH100-80GB --max-context --dry-run   # executed at that length, and one step further
  ithaca plan --web                                                  # the same questions in the browser

MODEL is a folder with config.json, that file, a model on the Hub (owner/name; only its config is fetched), or a preset:
{presets}.
RUN is a YAML file, a run folder, or a recipe (ithaca recipes ls); then every setting of it is an option too (--train.rows 8).
"""
FIXED = "fields that stay as given; the planner chooses the others. Values are as in YAML (ithaca docs config)"
RANK = 16  # of adapters, where nobody says it
OBJECTIVES = ("sft", "dpo", "policy")
GPUS = "such as 8xH100-80GB, 1xH200, 2x8xA100-40GB (machines x GPUs)"


def add_plan(verbs: Any) -> None:
    parser = verbs.add_parser(
        "plan",
        help="say whether a run fits and how fast it will be, and choose its stack",
        description=_HELP.format(presets=", ".join(PRESETS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_plan, traceback=False)
    add_request(parser, run=True)
    parser.add_argument(
        "--objective", choices=OBJECTIVES,
        help="what is learned (default sft). dpo with --lora: the base scores every step; dpo and policy: answers share prompts",
    )  # fmt: skip
    parser.add_argument(
        "--compare", metavar="GPUS,... | FIELD=VALUE,...",
        help="the same on each of these machines; or a second plan with these fields of the stack, side by side",
    )  # fmt: skip
    parser.add_argument("--explain", action="store_true", help="memory of every phase, and every part of the time")
    parser.add_argument(
        "--dry-run", action="store_true", help="execute the real code on fake tensors and count (needs no GPU)"
    )
    parser.add_argument("--layers", type=int, help="with --dry-run: run only so many layers, and count only those")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write the plan as a page, in one file")
    parser.add_argument("--web", action="store_true", help="ask in the browser: a page on this machine, until Ctrl-C")
    parser.add_argument("--port", type=int, help="with --web: where it listens (default: any port that is free)")
    parser.add_argument("--no-open", action="store_true", help="with --web: print the address, open no browser")


def add_request(parser: Any, *, run: bool = False) -> None:
    """What a plan is asked for, and a profile with the same words. run: a run may be given, which says most of it, or none, where a
    page asks."""
    what = "a folder with config.json, that file, owner/name, or a preset"
    parser.add_argument(
        "model",
        metavar="MODEL|RUN" if run else "MODEL",
        nargs="?" if run else None,
        help=what + ("; or a run" if run else ""),
    )
    parser.add_argument("--gpus", help=GPUS if run else f"{GPUS}; not given: the GPU that is here")
    length = parser.add_mutually_exclusive_group(required=not run)
    length.add_argument("--context", help="tokens of a row, such as 1M (1,048,576) or 1_000_000")
    length.add_argument("--max-context", action="store_true", help="the longest context that fits")
    parser.add_argument("--rows", type=int, help="rows of a step, over all GPUs and micro-batches (default 1)")
    parser.add_argument("--accumulation", type=int, help="micro-batches that those rows are split into (default 1)")
    parser.add_argument("--host", help="memory of one machine, such as 1TB; not given: what is usual, and said")
    parser.add_argument(
        "--disk", help="scratch space of one machine; not given: no disk is used unless you fix store=disk"
    )
    parser.add_argument("--optimizer", help="adamw, adamw8bit or muon (default adamw)")
    parser.add_argument(
        "--offload-optimizer",
        action=argparse.BooleanOptionalAction,
        help="weights, gradients and states wait in host memory (default: where nothing else fits)",
    )
    parser.add_argument(
        "--lora", type=int, nargs="?", const=RANK, default=0, metavar="RANK",
        help=f"train adapters of this rank only ({RANK} if no number is given)",
    )  # fmt: skip
    parser.add_argument(
        "--lora-targets", metavar="NAME,...", help="linear layers that get an adapter (default: all of a layer)"
    )
    parser.add_argument(
        "--quantize", choices=("nf4",), help="with --lora: the frozen base in four bits a weight (QLoRA)"
    )
    parser.add_argument(
        "--synchronous", action="store_false", dest="asynchronous",
        help="checkpoints are written while the run waits: no copy in host memory",
    )  # fmt: skip
    parser.add_argument("--deterministic", action="store_true", help="the same bits on every run (train.deterministic)")
    parser.add_argument("--kernel", help=f"attention kernel: {', '.join(GPU_KERNELS)} (default: what the engine takes)")
    add_stack_options(parser, FIXED, older="set")


# Words of `add_request` that are arguments of the planner's functions, under the same names: of the machines, and of the run
MACHINES = ("host", "disk", "kernel")
ASKED = (
    *MACHINES, "gpus", "rows", "accumulation", "optimizer", "offload_optimizer", "lora", "quantize", "asynchronous",
    "deterministic",
)  # fmt: skip


def request(options: argparse.Namespace) -> dict[str, Any]:
    """Those words as arguments of the planner's functions; what is not given is left to them."""
    pinned, problems = read_stack(options)
    asked = {name: value for name in ASKED if (value := getattr(options, name)) is not None}
    if options.lora_targets:
        asked["lora_targets"] = tuple(name.strip() for name in options.lora_targets.split(","))
        if not options.lora:
            problems.append("--lora-targets says where adapters go, but there are none; give --lora RANK too")
    require(problems, "this cannot be planned")
    objective = getattr(options, "objective", None) or "sft"
    if objective != "sft":
        asked |= {"objective": objective, "reference": bool(options.lora) and objective == "dpo", "trees": True}
    return {**asked, **pinned}


def find(options: argparse.Namespace) -> Any:
    """The plan of a model that was asked for."""
    from ..planner.search import max_context, plan

    options.model = known_model(options.model)
    if options.max_context:
        return max_context(options.model, say=say, **request(options))
    return plan(options.model, context=options.context, say=say, **request(options))


@dataclass(frozen=True)
class Question:
    """What is to be planned: a model, or a part of a run."""

    model: str  # what a dry run is built from
    ask: Callable[
        ..., Any
    ]  # -> the plan. gpus: other machines; longest: at the longest context; changed: other fields of the stack
    gpus: Any = None  # those that were named, if any
    title: str = ""
    context: int = 0  # of a part of a run
    taken: Sequence[tuple[str, str, str]] = ()  # what, its value, and where that was said


def _questions(options: argparse.Namespace, named: bool) -> list[Question]:
    """named: GPUs are named elsewhere, so that --gpus may be left out."""
    from ..planner.run import find_run

    if options.model is None:
        raise ValueError(
            "of which model? Give a preset, a folder, owner/name or a run; or --web, to be asked in the browser"
        )
    if find_run(options.model) is not None:
        return _of_run(options, named)
    if options.gpus is None and not named:
        raise ValueError(f"on which GPUs? Give --gpus, {GPUS}, or several machines with --compare")
    if options.context is None and not options.max_context:
        raise ValueError("at which length? Give --context, such as 1M, or --max-context for the longest that fits")
    rope = _take_rope(options)
    _take_objective(options)
    asked = request(options)  # what is wrong with it is said now
    model = known_model(options.model)

    def ask(longest: bool = False, changed: Mapping[str, Any] | None = None, **machine: Any) -> Any:
        from ..planner.search import max_context, plan

        whole = {**asked, **machine, **(changed or {})}
        if longest:
            found = max_context(model, say=say, **whole)
        else:
            found = plan(model, say=say, **{"context": options.context, **whole})
        if rope:  # positions beyond the model's own are taken care of, and cost nothing
            found.job = replace(found.job, model=replace(found.model, longest=None))
        return found

    return [Question(model, ask, options.gpus)]


def known_model(name: str) -> str:
    """What is planned: of a name on the Hub whose sizes a preset has that preset, which needs no network, and it is said."""
    from ..planner.run import preset_of

    preset = preset_of(name)
    if preset is not None:
        say(f"{name} is planned as the preset {preset} has it")
    return preset or name


def _take_rope(options: argparse.Namespace) -> list[str]:
    """Rotary settings among the options, which are not of the stack. ValueError where a run with them would be refused."""
    from ..config import load

    rope = [text for text in options.overrides if text.startswith("model.rope.")]
    options.overrides = [text for text in options.overrides if text not in rope]
    if rope:
        context = [f"data.context={options.context}"] if options.context else []
        load(
            None,
            [*rope, *context, f"model.folder={options.model}", "data.sources=[{synthetic: recall}]", "train.steps=1"],
        )
    return rope


def _take_objective(options: argparse.Namespace) -> None:
    """--objective is a setting of a run, too, and came as one."""
    for text in [text for text in options.overrides if text.partition("=")[0] in ("objective", "objective.kind")]:
        options.overrides.remove(text)
        options.objective = text.partition("=")[2]
        if options.objective not in OBJECTIVES:
            raise ValueError(f"--objective {options.objective!r} is unknown; choose one of {', '.join(OBJECTIVES)}")


def _of_run(options: argparse.Namespace, named: bool) -> list[Question]:
    from ..planner.run import hardware_of, load_run, overrides_of, parts_of, taken

    loaded = load_run(options.model, overrides_of(options))
    hardware, said = (None, "--compare") if named and options.gpus is None else hardware_of(loaded, options.gpus)
    parts, took = parts_of(loaded), taken(loaded, hardware, said)
    took += [] if (saved := _shared(loaded.config)) is None else [saved]
    machine = {name: getattr(options, name) for name in MACHINES}
    if options.max_context and len(parts) > 1:
        raise ValueError(
            f"{options.model} has {len(parts)} phases of different lengths; --max-context is of a run with one"
        )

    def question(part: Any) -> Question:
        def ask(**more: Any) -> Any:
            return part.plan(say=say, **{**machine, "gpus": hardware, **more})

        context = part.asked["context"]
        return Question(part.model, ask, hardware, part.title, context, took)

    return [question(part) for part in parts]


def _shared(config: Any) -> tuple[str, str, str] | None:
    """What units of packed data save by sharing what they begin with; None where that is not known, or nothing."""
    folder = Path(config.data.packed or Path(config.run.folder) / "data")
    if config.data.share_prefixes == "off" or not (folder / "manifest.json").is_file():
        return None
    from ..data.folder import Packed

    found = Packed(folder).pairs_of_tokens()
    if found is None:
        return None
    tokens, pairs = ((1 - shared / whole) for shared, whole in found)
    words = f"{tokens:.0%} fewer tokens, {pairs:.0%} fewer pairs in attention, than each answer by itself"
    return "shared prefixes", words, str(folder)


def run_plan(options: argparse.Namespace) -> int:
    at_least(1, layers=options.layers, port=options.port)
    if options.web:
        return _web(options)
    if options.port is not None or options.no_open:
        raise ValueError("--port and --no-open are of the page in the browser; give --web too")
    machines, changed = _compared(options.compare)
    questions = _questions(options, bool(machines))
    if options.html and options.objective and not questions[0].taken:
        raise ValueError("--html writes the page of plain training; with --objective, plan the YAML file of the run")
    if machines:
        return _compare(questions, machines, options)
    answers = [_answer(question, changed, options) for question in questions]
    if options.html:
        _write_page(answers[-1], options)
    if options.json:
        shown = [part for answer in answers for part in answer.json()]
        print(json.dumps(shown if len(shown) > 1 else shown[0], indent=1))
    else:
        print(
            "\n".join([*_taken(questions[0]), *(line for answer in answers for line in answer.lines(options.explain))])
        )
    return 0 if all(answer.plan.fits for answer in answers) else 5


def _compared(text: str | None) -> tuple[list[Any], dict[str, Any]]:
    """What --compare names: machines, or fields of the stack."""
    from ..planner.hardware import parse_gpus

    if text is None or "=" in text:
        changed, problems = read_fields(split_words("--compare", text) if text else [])
        require(problems, "there is nothing to compare with")
        return [], changed
    return [parse_gpus(words) for words in text.split(",")], {}


def _compare(questions: list[Question], machines: list[Any], options: argparse.Namespace) -> int:
    from ..planner.compare import compare, table
    from ..planner.hardware import parse_gpus

    unused = [name for name in ("max_context", "dry_run", "html") if getattr(options, name)]
    if unused:
        raise ValueError(
            f"--compare of machines shows one context by arithmetic; leave --{unused[0].replace('_', '-')} out"
        )
    question = max(questions, key=lambda each: each.context)
    if question.gpus is not None:
        machines = [parse_gpus(question.gpus) if isinstance(question.gpus, str) else question.gpus, *machines]
    answers = compare(machines, question.ask)
    if options.json:
        print(json.dumps([answer.json() for answer in answers], indent=1))
    else:
        print("\n".join([*_taken(question), *table(answers)]))
    return 0 if any(answer.plan and answer.plan.fits for answer in answers) else 5


@dataclass
class Answer:
    """A plan, and what was found out beside it."""

    question: Question
    plan: Any
    other: Any = None  # with fields that --compare names
    counted: dict[str, Any] | None = None  # by a dry run
    tried: Sequence[Any] = ()  # contexts that were counted to find the longest

    def json(self) -> list[dict[str, Any]]:
        shown = self.plan.json()
        if self.question.taken:
            shown["taken"] = [{"what": what, "value": value, "from": said} for what, value, said in self.question.taken]
        if self.counted is not None:
            shown["dry_run"] = self.counted
        if self.tried:
            shown["tried"] = [
                {"context": attempt.context, "peak": attempt.peak, "fits": not attempt.excess} for attempt in self.tried
            ]
        return [shown] if self.other is None else [shown, self.other.json()]

    def lines(self, explain: bool) -> list[str]:
        from ..planner.text import describe, side_by_side

        title = [self.question.title] if self.question.title else []
        if self.other is not None:
            return [*title, *side_by_side(self.plan, self.other)]
        return [*title, *describe(self.plan, explain=explain, dry=self.counted, tried=self.tried)]


def _taken(question: Question) -> list[str]:
    wide, value = (max((len(row[at]) for row in question.taken), default=0) for at in (0, 1))
    return [f"  {what:{wide}}  {said:{value}}  {place}" for what, said, place in question.taken]


def _answer(question: Question, changed: dict[str, Any], options: argparse.Namespace) -> Answer:
    planned = question.ask(longest=True) if options.max_context else question.ask()
    other = question.ask(context=planned.context, changed=changed) if changed else None
    answer = Answer(question, planned, other)
    if planned.executed and (options.layers is None or options.max_context):
        answer.counted = _shown(planned.memory) if options.dry_run else None  # which is what the plan was made by
    elif options.dry_run and options.max_context and planned.fits:
        answer.plan, answer.tried = _confirm(question, planned, options)
        at = (_shown(attempt.memory) for attempt in answer.tried if attempt.context == answer.plan.context)
        answer.counted = next(at, None)
    elif options.dry_run:
        answer.counted = _shown(_counted(question, planned, planned.context, options))
    return answer


FIRST = {"model": "llama3_8b", "gpus": "8xH100-80GB", "context": "1M", "tokens": "1B"}  # what a page begins with


def _words(options: argparse.Namespace, context: int | None = None, more: str | None = None) -> dict[str, str]:
    """The command as the words of a page (observe/plans/asking.py). more: fields of the stack beside those given."""
    pairs = [text.removeprefix("stack.") for text in options.overrides] + [pair for _, pair in options.stack_words]
    words = {name: getattr(options, name) for name in ("model", *ASKED, "lora_targets")}
    words |= {"context": options.context if context is None else format_tokens(context)}
    words |= {"synchronous": not words.pop("asynchronous"), "stack": ",".join([*pairs, *([more] if more else [])])}
    usual = {"rows": 1, "accumulation": 1, "optimizer": "adamw"}
    words["offload_optimizer"] = {True: "yes", False: "no", None: None}[words["offload_optimizer"]]
    return {
        name: "yes" if value is True else str(value)
        for name, value in words.items()
        if value and value != usual.get(name)
    }


def _web(options: argparse.Namespace) -> int:
    from ..observe.plans import serve

    others = ("objective", "compare", "explain", "dry_run", "layers", "json", "html", "max_context")
    if given := [f"--{name.replace('_', '-')}" for name in others if getattr(options, name)]:
        raise ValueError(f"{', '.join(given)}: not with --web, whose page has it or does without")
    return serve({**FIRST, **_words(options)}, port=options.port or 0, show=not options.no_open)


def _write_page(answer: Answer, options: argparse.Namespace) -> None:
    if answer.question.taken:  # of a run, whose words are not those of the page
        from ..observe.report import write_report

        write_report(options.html, plan=answer.plan.json())
        return
    from ..observe.plans import file_of, write_plans

    plans = [(answer.plan, None), *([(answer.other, options.compare)] if answer.other else [])]
    write_plans(options.html, [file_of(_words(options, plan.context, more), plan) for plan, more in plans])


def _confirm(question: Question, plan: Any, options: argparse.Namespace) -> tuple[Any, list[Any]]:
    """The longest context by the dry run. -> the plan there, and what was tried"""
    from ..planner.confirm import confirmed
    from ..planner.search import look

    if options.layers:
        raise ValueError("--max-context --dry-run counts every layer; leave --layers out")
    context, tried = confirmed(plan, lambda tokens: _counted(question, plan, tokens, options), say)
    if context is None:
        return replace(plan, fits=False), tried
    there = look(replace(plan.job, context=context), plan.hardware)
    return replace(there, fits=True, reasons=plan.reasons), tried


def _shown(counted: Any) -> dict[str, Any]:
    return {
        "layers": counted.layers, "executed": counted.executed, "phases": counted.phases, "lines": counted.lines,
        "peak": counted.peak, "peak_phase": counted.peak_phase, "host": counted.host, "disk": counted.disk,
    }  # fmt: skip


def _counted(question: Question, plan: Any, context: int, options: argparse.Namespace) -> Any:
    """The plan's stack, executed on fake tensors."""
    from ..planner.config import hf_config
    from ..planner.dry_run.run import dry_run

    with going_on(f"dry run at {format_tokens(context)}"):
        return dry_run(replace(plan.job, context=context), hf_config(question.model), layers=options.layers)
