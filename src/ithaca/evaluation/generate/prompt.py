"""A file and a question as a prompt: through the chat template where the tokenizer has one, as plain text where it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...base.files import read_text as read_limited
from ...data.render import Encoders
from ...data.render import prompt_ids as ids_of
from ...data.tokenizer import tokenizer_parts

LARGEST = 1 << 30  # bytes of a file to ask about
PLAIN = "{text}\n\nQuestion: {question}\nAnswer:"


def read_text(path: Path) -> str:
    try:
        return read_limited(path, LARGEST)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None


def prompt_ids(tokenizer: Any, question: str, text: str | None, *, parse: bool = False) -> list[int]:
    """text: what the question is about; None = the question alone, as it stands where there is no chat template.

    parse: `</s>` and its like in question and text are the special tokens. Otherwise they are text: what stands in a file cannot
    end the user's turn, or begin another."""
    encoders = Encoders(tokenizer_parts(tokenizer), parse=parse)
    if text is None:
        asked = question
    elif encoders.parts.chat_template is None:
        asked = PLAIN.format(text=text, question=question)
    else:
        asked = f"{text}\n\n{question}"
    return ids_of(asked, encoders)


def stops(tokenizer: Any, generation: Any) -> set[int]:
    """Tokens that end an answer: the tokenizer's, and those the model's generation settings name."""
    named = getattr(generation, "eos_token_id", None)
    return {
        token
        for token in ([tokenizer.eos_token_id] + (named if isinstance(named, list) else [named]))
        if token is not None
    }
