"""Secrets do not belong in files that are shared: a config beside a checkpoint, a block in a bug report.

Nothing in ithaca asks for a secret, but they get into texts: a token in a path, a key on a command line, an error message that
quotes both. Two kinds are found: values of environment variables whose name says that they are one, and words that look like one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

HIDDEN = "<redacted>"
_NAMES = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
_NOT_NAMES = re.compile(r"TOKENIZERS?_", re.IGNORECASE)
_LOOKS = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|\b(sk|pk|rk)-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bAKIA[A-Z0-9]{16}\b"
    r"|\bwandb_v\d_\w{16,}"
    r"|(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"  # https://user:password@host
)
_SHORTEST = 8  # a shorter value may be any word of the text


def redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """The text without secrets. environ: where their values are looked up (default: this process's)."""
    for value in secrets(os.environ if environ is None else environ):
        text = text.replace(value, HIDDEN)
    return _LOOKS.sub(HIDDEN, text)


def secrets(environ: Mapping[str, str]) -> list[str]:
    """Longest first, so that none is left of which another is a part."""
    values = {
        value
        for name, value in environ.items()
        if _NAMES.search(name) and not _NOT_NAMES.match(name) and len(value) >= _SHORTEST
    }
    return sorted(values, key=len, reverse=True)
