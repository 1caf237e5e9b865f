"""`ithaca score MODEL DATA --out FOLDER`: what a reference says of the answers of packed preferences or rollouts."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from .eval import add_source, overrides_of

_HELP = """\
Log-probabilities of every answer of a packed folder, for runs that compare with another model than their own start:
objective: {kind: dpo, reference: FOLDER}. Its vocabulary must be that of the model that is trained. All processes share each row,
and the numbers are the same on any number of them.

examples:
  ithaca data pack pairs.jsonl --tokenizer ./Qwen3-8B --out packed
  ithaca score ./Qwen3-8B packed --out scores
  ithaca score runs/sft packed --out scores --context 64K --cpu 2
"""


def add_score(verbs: Any) -> None:
    parser = verbs.add_parser(
        "score",
        help="score packed preferences or rollouts with a reference model",
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any setting can be given as --section.name VALUE, such as --stack.ring 2 or --model.dtype fp32.",
    )
    add_source(parser)
    parser.add_argument("data", type=Path, help="a folder that `ithaca data pack` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for the scores; it must not be there yet")
    parser.add_argument(
        "--context", help="tokens in a row (default: the longest pair or group, so that none is left out)"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="logits are divided by it; for objective: policy (default: 1)"
    )
    parser.set_defaults(run=run_score, overrides=[])


def run_score(options: argparse.Namespace) -> int:
    from ..base.units import parse_tokens
    from ..data.folder import Packed
    from ..data.samples import shares_prefixes
    from ..evaluation.opening import find_model
    from ..training.launch import find_job, start

    if not 0 < options.temperature < float("inf"):
        raise ValueError(f"--temperature {options.temperature} must be a finite number above 0")
    packed = Packed(options.data)
    if not packed.has_answers():
        raise ValueError(f"{options.data} holds no preferences or rollouts, so there are no answers to score")
    if options.out.exists() and find_job(os.environ) is None:
        raise ValueError(f"{options.out} is there already; choose another folder with --out, or remove it")

    def found(share: bool) -> Any:
        longest = int(packed.lengths(share=share).max())
        context = longest if options.context is None else parse_tokens(options.context)
        return find_model(options.source, [f"data.context={context}", *overrides_of(options)])

    opened = found(True)
    if not shares_prefixes(opened.config, packed):
        opened = found(False)

    def score_here(config: Any) -> int:
        from ..evaluation.reference import score_alone

        return score_alone(opened, packed, options.out, options.temperature)

    return start(opened.config, score_here, resumes=False)
