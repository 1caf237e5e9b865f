"""Chats: rendered with the tokenizer's chat template, supervised where the assistant speaks.

Which characters are the assistant's is known exactly in one of two ways:

- The template marks them with {% generation %} … {% endgeneration %}.
- Otherwise by prefixes: the chat up to an assistant turn, with the header that asks for one, and the chat including it
  are rendered; the turn is what the second has more. This holds only if each rendering is the beginning of the whole
  one. Templates that change earlier turns when more follow (Qwen3 drops the reasoning of all but the last) break it and
  are refused: give a template that marks the turns.

A turn includes the token that ends it, which has to be learned too.
"""

from __future__ import annotations

import re
from typing import Any

from .chat_template import render as render_template

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Spans = list[tuple[int, int]]


def render_chat(messages: Any, template: str, tokens: dict[str, Any], tools: Any = None) -> tuple[str, Spans]:
    """The text of a chat, and the ranges of its characters that the assistant says. tokens: the special tokens by name."""
    _check(messages)
    # parquet gives every message every key; a template that asks "is there a tool call?" wants absent ones absent
    messages = [
        {name: value for name, value in message.items() if value is not None or name == "content"}
        for message in messages
    ]

    def render(part: list[dict[str, Any]], *, prompt: bool = False, mark: bool = False) -> tuple[str, Spans]:
        return render_template(template, part, tools, tokens, prompt=prompt, mark=mark)

    if _GENERATION.search(template):
        return render(messages, mark=True)
    whole, _ = render(messages)
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
                "cannot be told; give a chat template that marks them with {% generation %} … {% endgeneration %} (--chat-template)"
            )
        spans.append((len(before), len(after)))
    return whole, spans


def _check(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        what = "empty" if messages == [] else f"a {type(messages).__name__}"
        raise ValueError(f"the chat is {what}; it must be a list of messages, each with 'role' and 'content'")
    for at, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"message {at} is a {type(message).__name__}, not an object with 'role' and 'content'")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"message {at} has no 'role'; it has {', '.join(map(repr, message)) or 'nothing'}")
        if "content" not in message and "tool_calls" not in message:
            raise ValueError(
                f"message {at} ({message['role']}) has no 'content'; it has {', '.join(map(repr, message))}"
            )
        content = message.get("content")
        if content is not None and not isinstance(content, (str, list)):
            raise ValueError(
                f"the content of message {at} ({message['role']}) is a {type(content).__name__}, not a text"
            )
