"""Every decoder type of transformers, tried: which run exactly, by which engine, and which are refused and why.

    python -m ithaca.verify.families > docs/reference/families.md        # or: make families; some minutes
    python -m ithaca.verify.families gpt_oss glm4 falcon       # only these, as a table

Each is built from its default config, shrunk, with dropout and the like at zero, and proven as `prepare` proves a model that it
does not know (engine/proof.py): float32 (float64 where torch's own kernels round as much), whole rows and packed documents, one
rank and four simulated ones. A checkpoint's own config may differ from the default one, so `prepare` proves again what it gets.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from ..engine.model.families import FAMILIES
from ..engine.model.shrink import CANNOT, smallest
from ..engine.proof import LIMIT, RANKS, Proof, prove

_QUIET = ("dropout", "pdrop", "layerdrop")


@dataclass(frozen=True)
class Tried:
    model_type: str
    name: str  # of its class
    proof: Proof

    @property
    def engine(self) -> str:
        return "streamed, composed, module" if self.model_type in FAMILIES else "module"


def try_type(model_type: str) -> Tried:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    if model_type in CANNOT:
        return Tried(model_type, name, Proof(False, float("inf"), "", CANNOT[model_type]))
    try:
        config = smallest(model_type)
    except Exception as error:  # a config class raises whatever it likes
        first = str(error).strip().partition("\n")[0]
        return Tried(model_type, name, Proof(False, float("inf"), "", f"its default config cannot be made ({first})"))
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        without_dropout(part)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return Tried(model_type, name, prove(kind, config, ranks=(1, RANKS)))


def without_dropout(config: Any) -> None:
    """Without chance, which is refused by name."""
    for key, value in list(vars(config).items()):
        if any(word in key for word in _QUIET) and isinstance(value, float):
            setattr(config, key, 0.0)
    if getattr(config, "router_jitter_noise", 0.0):
        config.router_jitter_noise = 0.0


def all_types() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def page(tried: Iterable[Tried]) -> str:
    """docs/reference/families.md"""
    tried = list(tried)
    exact, refused = ([one for one in tried if one.proof.exact is wanted] for wanted in (True, False))
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("transformers", "torch"))
    lines = [
        "# Which models run, and which are refused",
        "",
        f"**{len(exact)} of {len(tried)}** decoder types of transformers run exactly, the others are refused before the first step",
        f"with the reason. Made by `make families` ({versions}); what was tried and how: `src/ithaca/verify/families.py`.",
        "",
        "A type stands here with its default config, shrunk. A model of yours is proven again with its own config when it is",
        "prepared, and the answer is kept; `ithaca verify FOLDER` shows every figure.",
        "",
        f"## Exact (largest relative error of loss, logits and every gradient; limit {LIMIT:.0e})",
        "",
        "| type | class | engines | error | |",
        "|---|---|---|---|---|",
    ]
    for one in exact:
        wide = f"in {one.proof.dtype}; in float32 another kernel of torch is as far away"
        notes = [] if one.proof.dtype == "float32" else [wide]
        notes += [] if one.proof.tiles else ["MLP not tiled"]
        notes += [] if one.proof.angles else ["rotary angles in float32"]
        lines.append(f"| {one.model_type} | {one.name} | {one.engine} | {one.proof.error:.1e} | {'; '.join(notes)} |")
    lines += ["", "## Refused", "", "| type | class | why |", "|---|---|---|"]
    lines += [f"| {one.model_type} | {one.name} | {_plain(str(one.proof))} |" for one in refused]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:240]


def main(types: list[str]) -> int:
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    begin, tried = time.monotonic(), []
    for number, model_type in enumerate(types or all_types(), 1):
        tried.append(try_type(model_type))
        mark = "exact" if tried[-1].proof.exact else "refused"
        print(
            f"{number:4d} {model_type:<28} {mark:<8} {_plain(str(tried[-1].proof))[:90]}", file=sys.stderr, flush=True
        )
    print(f"{len(tried)} types in {time.monotonic() - begin:.0f} s", file=sys.stderr)
    if not types:
        print(page(tried), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
