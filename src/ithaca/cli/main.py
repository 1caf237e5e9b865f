"""`ithaca`: the command line. A verb is a function; what it needs is imported when it runs.

Exit codes: 0 done, 1 a check failed, 2 the request cannot be carried out; all: docs/reference/exit_codes.md. A signal ends a verb
with 128 + its number and a line that says so (base/processes/signals.py), and `train` with 75, for the same command goes on.
"""

from __future__ import annotations

import argparse
import os
import select
import sys
from collections.abc import MutableMapping, Sequence
from contextlib import nullcontext, suppress

from ..base.exits import Failed
from ..base.processes.signals import Stop, StoppedEarly, listen
from ..base.processes.system import LAUNCHER
from .ask import add_ask
from .bench import add_bench
from .ckpt import add_ckpt
from .config import add_config
from .data import add_data
from .docs import add_docs
from .doctor import add_doctor
from .eval import add_eval
from .export import add_export
from .ladder import add_ladder
from .plan import add_plan
from .profile import add_profile
from .recipes import add_recipes
from .report import add_report
from .score import add_score
from .slurm import add_slurm
from .train import add_train
from .verify import add_verify

_ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ithaca",
        description="Trains Hugging Face decoder models at millions of tokens of context, exactly.",
        epilog="'ithaca VERB --help' has the options of a verb, 'ithaca docs tutorial' a first run, 'ithaca docs' every page.",
    )
    parser.add_argument(
        "--version", action=_Versions, nargs=0, default=argparse.SUPPRESS, help="print versions: ithaca, torch, others"
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    add_plan(verbs)
    add_ladder(verbs)
    add_profile(verbs)
    add_train(verbs)
    add_eval(verbs)
    add_ask(verbs)
    add_score(verbs)
    add_verify(verbs)
    add_data(verbs)
    add_ckpt(verbs)
    add_export(verbs)
    add_report(verbs)
    add_recipes(verbs)
    add_config(verbs)
    add_slurm(verbs)
    add_doctor(verbs)
    add_bench(verbs)
    add_docs(verbs)
    return parser


class _Versions(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from ..storage.record import versions

        ours, *others = (" ".join(item) for item in versions().items())
        print(f"{ours} ({', '.join(others)})")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """arguments: None = those of this process, which is then ours."""
    if arguments is None:
        set_allocator(os.environ)
    parser = build_parser()
    options = _parse(parser, sys.argv[1:] if arguments is None else arguments)
    stop = Stop()
    try:
        # workers of ours begin to listen when they can answer (training/launch/decision.py)
        with nullcontext(stop) if LAUNCHER in os.environ else listen() as stop:
            code = options.run(options)
            sys.stdout.flush()
            return code
    except StoppedEarly as stopped:
        return _stopped(options, stopped)
    except KeyboardInterrupt as error:
        _say(options, str(error) or "stopped")
        return getattr(error, "exit_code", 130)
    except (ValueError, OSError, Failed) as error:
        if stop.name is not None and stop.early:  # a process of ours had the signal too, and its end was noticed first
            return _stopped(options, StoppedEarly(stop.name))
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 141  # as if SIGPIPE had ended it: no success, for a run may have been cut off
        if options.traceback:
            raise
        _say(options, str(error))
        return getattr(error, "exit_code", 2)


def _stopped(options: argparse.Namespace, stopped: StoppedEarly) -> int:
    resumes = getattr(options, "resumes", False)
    _say(options, stopped.words(resumes))
    return stopped.exit_code if resumes else stopped.at_once


def _say(options: argparse.Namespace, words: str) -> None:
    with suppress(OSError):  # a terminal that was closed sends a signal, and takes no words
        print(f"ithaca {options.verb}: {words}", file=sys.stderr, flush=True)


def _nobody_reads() -> bool:
    """Whether whoever read our output has read enough (`ithaca plan ... | head`). Other pipes break too: those to other ranks."""
    try:
        ours = sys.stdout.fileno()
    except ValueError:  # not a file
        return False
    watch = select.poll()
    watch.register(ours, 0)
    if not any(events & select.POLLERR for _, events in watch.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), ours)  # or Python says so when it ends
    return True


def set_allocator(environ: MutableMapping[str, str]) -> None:
    """Let torch's CUDA allocator grow its segments, unless the user has settings of their own. Read when torch is imported.

    Its own segments have the sizes that were asked for first. Stages, tiles and gathered weights differ in size, and the holes
    between them add up to a shortage that no plan sees (docs/decisions/0024-allocator.md)."""
    if not _ALLOCATOR & environ.keys():
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def _parse(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Settings of a run (--train.steps 100) are taken out first; a verb that wants them has the default overrides=[]."""
    from ..config import split_overrides

    try:
        words, overrides = split_overrides(arguments)
    except ValueError as error:
        parser.error(str(error))
    for name in (word[:-3] for word in words[: words.index("--") if "--" in words else None] if word.endswith("=--")):
        parser.error(f"argument {name}: expected a value, not '--'")  # argparse would drop it and go on
    options = parser.parse_args(words)
    if overrides and not hasattr(options, "overrides"):
        parser.error(f"unrecognized arguments: {' '.join('--' + override for override in overrides)}")
    if overrides:
        options.overrides = overrides
    return options


if __name__ == "__main__":
    raise SystemExit(main())
