"""Chat templates of our own, each with the turns of the assistant marked, and which of them a model's template is like.

The templates that models come with seldom say which part of a chat the assistant wrote. Where one does not, and renders probe
conversations exactly as one of ours does, ours tells the turns apart: every chat is rendered with both, and the marks count only if
the two texts are the same, letter by letter (chat.py). So what a model reads is always what its own template says.

Asked for by name, as in `chat_template: qwen3`, a template of ours takes the place of the tokenizer's.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

from ...base.files import read_text
from ..chat_template import render
from ..source import did_you_mean

MARKERS = {
    "qwen3": ("<|im_start|>", "<|im_end|>"),
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
}
"""Our templates, and what they write that has to be a token."""

# Spaces at the edges, which some templates take away, several turns, and reasoning, which Qwen3 shows in one place only.
_PROBES = [
    [("user", " one\n"), ("assistant", "two "), ("user", "three"), ("assistant", "\nfour")],
    [("user", "one"), ("assistant", "<think>\ntwo\n</think>\n\nthree"), ("user", "four")],
    [("user", "one"), ("assistant", "<think>\ntwo\n</think>\n\nthree")],
]


@cache
def shipped(name: str) -> str:
    return (Path(__file__).parent / f"{name}.jinja").read_text(encoding="utf-8")


def template_text(asked: str) -> str:
    """The text of a template: one of ours by name, a file, or the text itself."""
    if asked in MARKERS:
        return shipped(asked)
    if "{" in asked:
        return asked
    try:
        return read_text(Path(asked).expanduser())
    except OSError as error:
        hint = did_you_mean(asked, MARKERS) or f"; ours are {', '.join(MARKERS)}"
        raise ValueError(
            f"the chat template {asked!r} is neither one of ours nor a file that can be read ({error.strerror}){hint}"
        ) from None


def check_markers(asked: str | None, tokens: Collection[str]) -> None:
    """ValueError if a template of ours writes what the tokenizer has no token for."""
    for marker in MARKERS.get(asked or "", ()):
        if marker not in tokens:
            raise ValueError(
                f"the chat template {asked!r} writes {marker!r}, which is no token of this tokenizer, so it would be read as "
                "letters; choose a template that suits the tokenizer, or leave it out to use the tokenizer's own"
            )


def twin_of(template: str, tokens: dict[str, Any]) -> str | None:
    """Which of our templates renders the probes as this one does; None: none of them, or this one cannot be rendered."""

    def text(each: str, probe: list[tuple[str, str]]) -> str | None:
        messages = [{"role": role, "content": content} for role, content in probe]
        try:
            return render(each, messages, None, tokens, prompt=False, mark=False)[0]
        except ValueError:
            return None

    theirs = [text(template, probe) for probe in _PROBES]
    if None in theirs:
        return None
    return next(
        (
            name
            for name in MARKERS
            if all(text(shipped(name), probe) == wanted for probe, wanted in zip(_PROBES, theirs, strict=True))
        ),
        None,
    )
