from __future__ import annotations

from pathlib import Path

import pytest

from .make import save_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small byte-level tokenizer with a chat template."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
