"""docs/reference/config.md, made from the schema: `python -m ithaca.config.reference > docs/reference/config.md`.

A test compares the file with what this makes, so the page cannot fall behind the code.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from ..base.units import format_bytes, format_tokens
from .dump import as_yaml
from .option import about, default_of, expectation, has_default, kinds
from .schema import Config

_HEAD = """\
# Config: every setting of a run

<!-- Made by `python -m ithaca.config.reference > docs/reference/config.md`; edit src/ithaca/config/schema.py instead. -->

A run is one YAML file. Anything in it can be given on the command line too, by its dotted name:

```
ithaca train run.yaml --train.steps 100 --stack.ulysses 4 --data.context=1M
```

- **Precedence:** command line > file > recipe > default. A recipe is named by `recipe: NAME` at the top of the file or by
  `--recipe NAME`; `ithaca recipes ls` lists them.
- **Sections** merge key by key; a list replaces the list below it. `null` switches an optional section off
  (`--model.lora null`); `{}` switches it on with its defaults.
- **Sizes:** tokens count in powers of two: `1K` = 1,024, `1M` = 1,048,576. Bytes follow the labels on hardware: `80GB` = 80·10⁹,
  `64GiB` = 64·2³⁰.
- **On the command line** a list is `a,b,c`, or YAML in brackets: `--data.sources '[{path: a.jsonl, weight: 2}]'`.
- **Mistakes** come all at once, each with file and line; a key that does not exist is an error and says what you may have meant.
- **YAML:** `1e-5` is a number here; a quoted "5" is text. Python tags, merge keys (`<<`) and duplicate keys are refused.
- The resolved config, every field written out, is `config.yaml` in the [run folder](run_folder.md).
- A loss or gradient that is not finite always stops a run before the weights are touched. There is no switch for it.
"""


def reference() -> str:
    """The page as Markdown."""
    return "\n".join([_HEAD, *_section(Config, "")])


def _section(cls: type, path: str) -> Iterator[str]:
    yield f"## {path}" if path else "## The top"
    yield f"\n{' '.join((inspect.getdoc(cls) or '').split())}\n"
    yield "| key | takes | default | |"
    yield "|---|---|---|---|"
    inner: list[tuple[type, str]] = []
    for field in fields(cls):
        kind, facts = kinds(cls)[field.name], about(cls, field)
        where = f"{path}.{field.name}" if path else field.name
        if kind.section is not None:
            inner.append((kind.section, where))
        elif kind.items and kind.items[0].section is not None and path != "eval":  # eval.sources are like data.sources
            inner.append((kind.items[0].section, f"{where}[]"))
        takes = expectation(kind, facts)
        number = format_tokens if facts.get("unit") == "tokens" else str
        limits = [f"{words} {number(facts[name])}" for name, words in _LIMITS.items() if name in facts]
        help = facts["help"] or " ".join((inspect.getdoc(kind.section) or "").split())
        row = [f"`{where}`", takes + "".join(f", {limit}" for limit in limits), _default(field, facts), help]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
    yield ""
    for section, where in inner:
        yield from _section(section, where)


_LIMITS = {"least": "≥", "most": "≤", "above": ">", "below": "<"}


def _default(field: Any, facts: dict[str, Any]) -> str:
    if not has_default(field):
        return "**required**"
    value = default_of(field)
    if isinstance(value, int) and not isinstance(value, bool) and facts.get("unit"):
        return {"tokens": format_tokens, "bytes": format_bytes}[facts["unit"]](value)
    if isinstance(value, (str, int, float, tuple, type(None))):
        return f"`{as_yaml(value)}`" if value != "" else ""
    return ""


if __name__ == "__main__":
    print(reference(), end="")
