"""An exported folder to the Hugging Face Hub.

Who may write is asked before hours of work, not after them. What a repository had of weights before goes in the same commit: a
`model.safetensors` of yesterday beside the shards of today is what transformers would load.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_OLD = ["*.safetensors", "*.safetensors.index.json"]


def check_push(name: str, *, private: bool = False) -> None:
    """ValueError if nothing could be pushed there."""
    from huggingface_hub import HfApi

    if not _NAME.fullmatch(name):
        raise ValueError(f"--push {name[:200]!r} is no name on the Hub; write OWNER/NAME, such as my-name/my-model")
    api = HfApi()
    with _explained(name):
        api.whoami()
        if private and api.repo_exists(name) and not api.repo_info(name).private:
            raise ValueError(f"{name} is there already and public; make it private on the Hub, or leave --private out")


def push(folder: Path, name: str, *, private: bool = False, message: str) -> str:
    """Upload a folder as a model, made if it is not there yet. private: a new one is for its owner alone. -> its address"""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        with _explained(name):
            address = api.create_repo(name, private=private or None, exist_ok=True)
            api.upload_folder(repo_id=name, folder_path=folder, commit_message=message, delete_patterns=_OLD)
    except ValueError as error:
        raise ValueError(
            f"{error}. The export in {folder} is complete; push it with: hf upload {name} {folder} ."
        ) from None
    return str(address)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    import httpx
    from huggingface_hub import errors

    known = (errors.LocalTokenNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, httpx.TransportError)
    try:
        yield
    except (
        *known,
        RuntimeError,
    ) as error:  # what a thread met that uploads a file comes as the cause of a RuntimeError
        cause = error.__cause__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, known):
            raise
        raise ValueError(_words(name, cause)) from None


def _words(name: str, error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalTokenNotFoundError):
        return (
            f"pushing to {name} needs a token that may write; let the Hub know who you are: hf auth login, or HF_TOKEN in the "
            "environment"
        )
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE forbids to push to {name}; unset it, or export without --push"
    if not isinstance(error, errors.HfHubHTTPError):
        return f"the Hub ({constants.ENDPOINT}) cannot be reached ({_first_line(error)})"
    status = error.response.status_code
    if status in (401, 403):
        return (
            f"the Hub does not let you write to {name} (HTTP {status}): is the token (hf auth whoami) one that may write, and is "
            "the owner you, or an organisation you may write for?"
        )
    return f"the Hub refuses {name} (HTTP {status}: {_first_line(error)})"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
