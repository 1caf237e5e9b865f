"""`ithaca ask RUN_OR_FOLDER --file book.txt "question"`: ask a model about a text that may be longer than one device holds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .eval import add_source, overrides_of

_HELP = """\
Reads file and question as one prompt, shared by all processes as in training, and writes the likeliest answer token by token.
Through the chat template where the tokenizer has one; special tokens that are written out in file or question are text. Not a
server: it is there to see what a model has learned.

examples:
  ithaca ask runs/mine --file book.txt "Who opened the gate?"
  ithaca ask models/exported --file log.txt "Which job failed first?" --tokens 32 --cpu 2
"""


def add_ask(verbs: Any) -> None:
    parser = verbs.add_parser(
        "ask",
        help="ask a model something about a long file",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any setting can be given as --section.name VALUE, such as --stack.ring 2 or --model.dtype fp32.",
    )
    add_source(parser)
    parser.add_argument("question")
    parser.add_argument("--file", type=Path, help="a text that the question is about")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of the answer (default: %(default)s)")
    parser.set_defaults(run=run_ask, overrides=[])


def run_ask(options: argparse.Namespace) -> int:
    from ..evaluation.generate.command import require_tokenizer
    from ..evaluation.generate.prompt import read_text
    from ..evaluation.opening import find_model
    from ..training.launch import start

    overrides = overrides_of(options)
    if options.tokens < 1:
        raise ValueError(f"--tokens {options.tokens}: an answer has at least one")
    opened = find_model(options.source, overrides)
    require_tokenizer(opened.config)  # said now, not by every worker
    text = None if options.file is None else read_text(options.file)

    def ask_here(config: Any) -> int:
        from ..evaluation.generate.command import ask

        return ask(opened, options.question, text, options.tokens)

    return start(opened.config, ask_here, resumes=False)
