"""The tokenizer: loaded from a folder, told apart by a fingerprint, and in the small form that workers need.

Packed tokens mean something with one tokenizer only. Its fingerprint is four SHA-256: of the vocabulary and rules
(tokenizer.json), of the special tokens, of the chat template, and of all of them. Training compares them with the
tokenizer of the model, and can then say what differs. The chat template counts only where chats were packed.

Workers get the Rust tokenizer and a few numbers, not the transformers object: `import transformers` brings torch, 300
MB per process.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.files import open_regular
from ..base.hub import local
from ..engine.model.config import read_settings
from .folder import Packed

LARGEST = 256 << 20  # bytes of a file of a tokenizer


@dataclass(frozen=True)
class TokenizerParts:
    """What it takes to turn records into token ids in another process."""

    backend: str  # tokenizer.json
    prefix: tuple[int, ...]  # what the tokenizer puts before a text, such as the begin-of-text token
    suffix: tuple[int, ...]
    eos: int | None
    vocabulary: int
    chat_template: str | None
    special_tokens: dict[str, Any]  # what a chat template may refer to
    special: dict[str, int]  # the text of every special token, and its id


def load_tokenizer(folder: str | Path) -> Any:
    """The fast tokenizer of a local folder, or of a name that was fetched. No code of the folder runs."""
    from transformers import AutoTokenizer

    path = local(folder)
    if not path.is_dir():
        raise ValueError(
            f"the tokenizer folder {folder} is not there; give the folder of a local checkpoint, with tokenizer.json in it"
        )
    _check_files(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its parts raise
        cause = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"{folder} holds no tokenizer that can be loaded: {cause[0][:300]}") from None
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"the tokenizer of {folder} ({type(tokenizer).__name__}) has no fast version (tokenizer.json), which packing needs; "
            "convert it, or tokenise yourself and pack the ids (ithaca docs data)"
        )
    return tokenizer


def _check_files(folder: Path) -> None:
    """What transformers would read of a folder, and how much of it: pipes are waited for, and devices never end."""
    for path in [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]:
        if path.suffix in (".json", ".jinja", ".txt", ".model"):
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
            if size > LARGEST:
                raise ValueError(f"{path} has {size:,} bytes, too many for a tokenizer; the limit is {LARGEST:,}")
    if (folder / "config.json").exists():  # transformers asks it which tokenizer the model has
        read_settings(folder / "config.json")


def tokenizer_parts(tokenizer: Any) -> TokenizerParts:
    """The parts of a loaded tokenizer."""
    from tokenizers import Tokenizer

    template = None if tokenizer.chat_template is None else tokenizer.get_chat_template()
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()  # tokenizer.json may carry both from somebody's last call
    backend.no_padding()
    prefix, suffix = _around(backend)
    added = max((int(number) for number in tokenizer.added_tokens_decoder), default=-1)
    return TokenizerParts(
        backend=backend.to_str(),
        prefix=prefix,
        suffix=suffix,
        eos=tokenizer.eos_token_id,
        vocabulary=max(len(tokenizer), added + 1, max(tokenizer.get_vocab().values()) + 1),
        chat_template=template,
        special_tokens=dict(tokenizer.special_tokens_map),
        special={
            token.content: number for number, token in backend.get_added_tokens_decoder().items() if token.special
        },
    )


def _around(backend: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer adds before and after a text, found by trying."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    raise ValueError(
        "this tokenizer changes a text when it adds its special tokens; tokenise yourself and pack the ids"
    )


def fingerprint(parts: TokenizerParts) -> dict[str, str]:
    """SHA-256 of each part and of all of them."""
    digests = {
        "vocabulary": _hash(json.loads(parts.backend)),
        "special_tokens": _hash([parts.special_tokens, parts.prefix, parts.suffix, parts.eos]),
        "chat_template": _hash(parts.chat_template),
    }
    return {**digests, "all": _hash(digests)}


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def differing(then: dict[str, str], now: dict[str, str], *, chats: bool) -> list[str]:
    """The parts of two fingerprints that differ, in words. The chat template matters only for chats."""
    words = {"vocabulary": "vocabulary or rules", "special_tokens": "special tokens", "chat_template": "chat template"}
    return [text for name, text in words.items() if then[name] != now[name] and (chats or name != "chat_template")]


def own_template(manifest: dict[str, Any]) -> bool:
    """Whether the tokenizer's own chat template rendered anything in a packed folder."""
    return any(source["chats"] and source["chat_template"] is None for source in manifest["sources"])


def check_tokenizer(packed: Packed, tokenizer: Any, name: str = "the model") -> None:
    """Refuse to read packed data with a tokenizer other than the one it was packed with."""
    about = packed.manifest["tokenizer"]
    if about is None:
        return  # ids were given, there is nothing to compare; check_vocabulary still holds
    now = fingerprint(tokenizer_parts(tokenizer))
    parts = differing(about["sha256"], now, chats=own_template(packed.manifest))
    if parts:
        import tokenizers

        versions = ""
        if about["tokenizers"] != tokenizers.__version__:
            versions = f" (tokenizers {about['tokenizers']} then, {tokenizers.__version__} now)"
        raise ValueError(
            f"{packed.folder} was packed with another tokenizer ({about['name']}) than that of {name}: {' and '.join(parts)} "
            f"differ{versions}. Its tokens would mean something else to the model; pack the data again with this tokenizer"
        )
