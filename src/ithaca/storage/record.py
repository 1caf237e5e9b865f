"""What state.json and manifest.json of a checkpoint must hold, whoever wrote them: every field that is used later on. And what a
save says about its model: enough to build it again. No torch here."""

from __future__ import annotations

import base64
import binascii
import json
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..base.fields import ANYTHING, COUNT, NUMBER, OBJECT, POSITIVE, TEXT, WHOLE, OrNull, Rule, Table, wrong

if TYPE_CHECKING:
    from ..engine.run import Run


def _is_base64(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(base64.b64decode(value, validate=True))
    except (binascii.Error, ValueError):
        return False


_SEED = Rule("a seed of 64 bits", lambda value: type(value) is int and -(1 << 63) <= value < 1 << 64)
_SHA256 = Rule("a SHA-256", lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None)
_BYTES = Rule("bytes as base64", _is_base64)
_BASE = Rule(
    "the fingerprint of a parameter",
    lambda value: (
        isinstance(value, str) and re.fullmatch(r"\w{1,20}-(\d{1,18}(x\d{1,18}){0,7})?-[0-9a-f]{16}", value) is not None
    ),
)
_STATES = Rule(
    "the states of Python's, numpy's and torch's random numbers",
    lambda value: (
        isinstance(value, dict)
        and _is_base64(value.get("torch"))
        and (value.get("cuda") is None or _is_base64(value["cuda"]))
        and _like(value.get("python"), (WHOLE, _BYTES, OrNull(NUMBER)))
        and _like(value.get("numpy"), (TEXT, _BYTES, COUNT, COUNT, NUMBER))
    ),
)
MANIFEST_FIELDS = {
    "run": TEXT,
    "save": TEXT,
    "step": COUNT,
    "block": COUNT,
    "time?": OrNull(TEXT),
    "files": Table({"size": COUNT, "sha256": _SHA256, "modified?": OrNull(WHOLE)}),
}
STATE_FIELDS = {
    "run": TEXT,
    "save": TEXT,
    "step": COUNT,
    "seed": _SEED,
    "extra": OBJECT,
    "model": {
        "class": TEXT,
        "name_or_path": TEXT,
        "config": OBJECT,
        "generation_config": OrNull(OBJECT),
        "adapters": Table(OBJECT),
        "base": Table(_BASE),
    },
    "optimizer": OrNull(
        {"class": TEXT, "groups": [{"params": [TEXT], "options": Table(ANYTHING)}], "numbers": Table(OBJECT)}
    ),
    "world": {"size": POSITIVE, "stack": OBJECT},
    "rng": [_STATES],
}


def wrong_state(state: dict[str, Any]) -> str | None:
    """What is wrong with a state.json, in words; None: nothing."""
    problem = wrong(state, STATE_FIELDS)
    if problem is None and len(state["rng"]) != state["world"]["size"]:
        problem = f"rng has {len(state['rng'])} entries for {state['world']['size']} ranks"
    if problem is None and state["optimizer"] is not None:
        known = {name for group in state["optimizer"]["groups"] for name in group["params"]}
        stray = next((name for name in state["optimizer"]["numbers"] if name not in known), None)
        problem = None if stray is None else f"optimizer.numbers has {stray[:100]!r}, which is in no group"
    return problem


def _like(value: Any, rules: tuple[Any, ...]) -> bool:
    return (
        isinstance(value, list)
        and len(value) == len(rules)
        and all(wrong(item, rule) is None for item, rule in zip(value, rules, strict=True))
    )


def describe_model(run: Run) -> dict[str, Any]:
    """What is needed to build the model again, without its weights."""
    config: Any = run.decoder.model.config  # of the whole, where it has more parts than the decoder
    generation = getattr(run.decoder.model, "generation_config", None)
    adapters = {name: settings.to_dict() for name, settings in getattr(run.model, "peft_config", {}).items()}
    return {
        "class": type(run.decoder.model).__name__.removeprefix("FSDP"),
        "name_or_path": str(getattr(config, "_name_or_path", "") or ""),
        "config": json.loads(config.to_json_string(use_diff=False)),
        "generation_config": json.loads(generation.to_json_string()) if generation is not None else None,
        "adapters": json.loads(json.dumps(adapters, default=_simple)),
    }


def _simple(value: Any) -> Any:
    """PEFT's configs hold sets and enums."""
    return sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", str(value))


def versions() -> dict[str, str]:
    """Of what wrote it. From the installed files: importing torch takes seconds."""
    known = {"ithaca": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "torchao"):
        try:
            known[name] = version(name)
        except PackageNotFoundError:
            continue
    return known
