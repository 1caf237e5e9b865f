"""Chats: rendered with the tokenizer's chat template, supervised where the assistant speaks.

Which characters are the assistant's is known exactly in one of three ways:

- The template marks them with {% generation %} … {% endgeneration %}.
- A template of ours that does renders the chat to the same text (templates/).
- Otherwise by prefixes: the chat up to an assistant turn, with the header that asks for one, and the chat including it
  are rendered; the turn is what the second has more. This holds only if each rendering is the beginning of the whole
  one. Templates that change earlier turns when more follow (Qwen3 drops the reasoning of all but the last) break it and
  are refused: give a template that marks the turns.

A turn includes the token that ends it, which has to be learned too, and nothing behind that token: the newline that many templates
write there is never asked of a model.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from .chat_template import render as render_template

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Spans = list[tuple[int, int]]


def is_marked(template: str) -> bool:
    return _GENERATION.search(template) is not None


def render_chat(
    messages: Any, template: str, tokens: dict[str, Any], tools: Any = None, twin: str | None = None
) -> tuple[str, Spans]:
    """The text of a chat, and the ranges of its characters that the assistant says. tokens: the special tokens by name. twin: a
    template with marks that should render the same text."""
    # parquet gives every message every key; a template that asks "is there a tool call?" wants absent ones absent
    messages = [
        {name: value for name, value in message.items() if value is not None or name == "content"}
        for message in messages
    ]

    def render(part: list[dict[str, Any]], *, prompt: bool = False) -> tuple[str, Spans]:
        return render_template(template, part, tools, tokens, prompt=prompt, mark=False)

    if is_marked(template):
        return render_template(template, messages, tools, tokens, prompt=False, mark=True)
    whole, _ = render(messages)
    if twin is not None:
        with suppress(ValueError):  # it may refuse what the other takes
            text, spans = render_template(twin, messages, tools, tokens, prompt=False, mark=True)
            if text == whole:
                return text, spans
    spans = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, _ = render(messages[:at], prompt=True) if at else ("", [])
        if not whole.startswith(before):
            before, _ = render(messages[:at])  # a header that only the last turn gets: it counts as the assistant's
        after, _ = render(messages[: at + 1])
        if not (whole.startswith(after) and after.startswith(before)):
            raise ValueError(
                f"the chat template renders message {at} differently once others follow, so which tokens are the assistant's "
                "cannot be told; give a chat template that marks them with {% generation %} … {% endgeneration %}: a file, or "
                "one of ours (--chat-template)"
            )
        spans.append((len(before), len(after)))
    return whole, spans


def up_to_end(text: str, spans: Spans, ends: set[int]) -> Spans:
    """The spans without the blanks behind the token that ends a turn. ends: where the template's special tokens end."""
    trimmed = []
    for begin, end in spans:
        last = begin + len(text[begin:end].rstrip())
        trimmed.append((begin, last if last in ends and last > begin else end))
    return trimmed


def learned_spans(spans: Spans, messages: list[dict[str, Any]], learned: list[bool]) -> Spans:
    """Of the assistant's turns, those that are learned."""
    turns = [wanted for wanted, message in zip(learned, messages, strict=True) if message["role"] == "assistant"]
    if len(turns) != len(spans):
        raise ValueError(
            f"the chat template marks {len(spans)} turns of the assistant where there are {len(turns)}, so those that are not "
            "learned (of a prompt, or of weight 0) cannot be told apart; give another template (--chat-template)"
        )
    return [span for span, wanted in zip(spans, turns, strict=True) if wanted]
