"""The config of a model folder, read as data.

A config.json comes with a model from somewhere, and transformers takes more from it than shapes: `auto_map` names Python files of
the folder, and `attn_implementation` may name a kernel on the Hub, which is downloaded and run while the model is built. The first
needs `trust_remote_code`; the second is dropped here, as attention is ours. Nothing is ever downloaded.
"""

from __future__ import annotations

import os
from typing import Any

from ..floors import require_floors


def read_config(folder: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """The Hugging Face config of a local folder."""
    from transformers import AutoConfig

    require_floors("transformers")
    return harmless(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True))


def harmless(config: Any) -> Any:
    """The same config, without what it says about kernels; transformers then takes its own defaults."""
    config._attn_implementation = None
    config._experts_implementation = None
    return config
