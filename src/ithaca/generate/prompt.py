"""A file and a question as a prompt: through the chat template where the tokenizer has one, as plain text where it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PLAIN = "{text}\n\nQuestion: {question}\nAnswer:"


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from None


def prompt_ids(tokenizer: Any, question: str, text: str | None) -> list[int]:
    """text: what the question is about; None = the question alone, as it stands where there is no chat template."""
    asked = question if text is None else f"{text}\n\n{question}"
    if tokenizer.chat_template is not None:
        messages = [{"role": "user", "content": asked}]
        found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    else:
        found = tokenizer(question if text is None else PLAIN.format(text=text, question=question))["input_ids"]
    return [int(each) for each in found]


def stops(tokenizer: Any, generation: Any) -> set[int]:
    """Tokens that end an answer: the tokenizer's, and those the model's generation settings name."""
    named = getattr(generation, "eos_token_id", None)
    return {
        each
        for each in ([tokenizer.eos_token_id] + (named if isinstance(named, list) else [named]))
        if each is not None
    }
