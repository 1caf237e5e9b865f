"""Names on the Hugging Face Hub, wherever a folder is taken: `owner/name`, or `owner/name@revision`.

A name is looked up once, by the command a user typed, before any worker starts. The Hub says which commit a branch or tag is now,
and from then on the name is `owner/name@COMMIT`: that is what a run writes down, and what it goes on with, whatever becomes of the
branch. The files go where transformers keeps its own (HF_HOME), and the rest of the code reads the folder there, `local`. A commit
never changes, so what is in the cache whole is used without asking anybody.

    text in a config        model.folder: Qwen/Qwen3-8B
    fetch                   Qwen/Qwen3-8B@9c925d64...      the Hub was asked, or the cache, or what asked before (ITHACA_HUB)
    local                   HF_HOME/hub/models--Qwen--Qwen3-8B/snapshots/9c925d64...

Only what is read is fetched: settings, tokenizer, and the safetensors that the index names. No pickles, no Python files. Processes
that share a cache do not fetch the same twice: one does, the others wait for its lock and take the commit it found. What a
repository has is listed beside the snapshot (ithaca/COMMIT.json), so that half a download is never taken for a whole one. Snapshots
that others made (`hf download`) have no list; of a model their index says what belongs to it.

A folder that is there always wins. So does one that is meant: with a folder `models` here, `models/llama` is a path, and
`hf:models/llama` the name. Light to import: huggingface_hub, which comes with transformers, is imported when a name is met.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import inside, read_json, write_atomically
from .processes.system import say
from .units import format_bytes

PINS = "ITHACA_HUB"
"""Environment variable: which commits this process, or the one that started it, has found. {name as asked for: commit}"""
PREFIX = "hf:"
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt",
    "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_REPO = r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}"
_REVISION = r"refs/pr/\d+|refs/convert/\w+|\w[\w.+-]{0,200}"
_MODEL = re.compile(rf"(?:{PREFIX})?(?P<repo>{_REPO})(?:@(?P<revision>{_REVISION}))?", re.ASCII)
_DATASET = re.compile(rf"{PREFIX}(?P<repo>{_REPO})(?:@(?P<revision>{_REVISION}))?(?:/(?P<inner>[^\0]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SMALL = 10e6  # bytes that are fetched without a word

Files = Mapping[str, int | None]  # of a repository, with their sizes, where those are known


@dataclass(frozen=True)
class Name:
    """A repository at a revision. inner: what is meant of a dataset, a file, a folder or a glob."""

    repo: str
    revision: str
    kind: str = "model"
    inner: str = ""

    @property
    def asked(self) -> str:
        return f"{self.kind}s/{self.repo}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        return _COMMIT.fullmatch(self.revision) is not None

    @property
    def commit(self) -> str | None:
        """Which one it is; None: nobody has asked yet."""
        return self.revision if self.is_pinned else pins().get(self.asked)

    @property
    def store(self) -> Path:
        """Where the cache keeps this repository."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE).expanduser() / f"{self.kind}s--{self.repo.replace('/', '--')}"

    def snapshot(self, commit: str) -> Path:
        return self.store / "snapshots" / commit

    def at(self, commit: str) -> str:
        """As it is written down."""
        prefix, inner = (PREFIX, f"/{self.inner}" if self.inner else "") if self.kind == "dataset" else ("", "")
        return f"{prefix}{self.repo}@{commit}{inner}"


def find_name(text: str) -> Name | None:
    """The model that a text names; None: it is a path."""
    match = _MODEL.fullmatch(text)
    if match is None or text.endswith((".json", ".yaml", ".git")):
        return None
    name = Name(match["repo"], match["revision"] or "main")
    if text.startswith(PREFIX):
        return name
    meant = name.is_pinned or not os.path.lexists(text.partition("/")[0])
    return name if meant and not os.path.lexists(text) else None


def find_dataset(text: str) -> Name | None:
    """The dataset that a source names, hf:owner/name[@revision][/file, folder or glob]; None: it is a path."""
    match = _DATASET.fullmatch(text)
    if match is None:
        if text.startswith(PREFIX):
            raise ValueError(
                f"{text[:200]!r} is no dataset of the Hub; write hf:OWNER/NAME, hf:OWNER/NAME@REVISION/data/*.parquet"
            )
        return None
    inner = (match["inner"] or "").rstrip("/")
    if ".." in inner.split("/") or inner.startswith("/"):
        raise ValueError(
            f"{text[:200]!r} leads out of the repository; name files of it, as in hf:OWNER/NAME/data/*.parquet"
        )
    return Name(match["repo"], match["revision"] or "main", "dataset", inner)


def local(text: str | os.PathLike[str]) -> Path:
    """Where the files are: the folder itself, or that of a name that was fetched."""
    name = find_name(os.fspath(text))
    commit = None if name is None else name.commit
    return Path(text).expanduser() if name is None or commit is None else name.snapshot(commit)


def short(text: str) -> str:
    """What to call a model: the last part of its path or name."""
    name = find_name(text)
    return Path(text).name if name is None else name.repo.partition("/")[2]


def pins() -> dict[str, str]:
    """Which commits were found so far."""
    return read_pins(os.environ.get(PINS, "{}"))


def read_pins(text: str) -> dict[str, str]:
    with suppress(ValueError):
        known = json.loads(text)
        if isinstance(known, dict):
            return {name: commit for name, commit in known.items() if _COMMIT.fullmatch(str(commit))}
    return {}


def remember(found: Mapping[str, str]) -> None:
    """For this process and those it starts. What was found first stays: a branch may move while a run begins."""
    os.environ[PINS] = json.dumps({**found, **pins()})


# -- fetching ---------------------------------------------------------------------------------------------------------


def folder(text: str, part: str = "config") -> Path:
    """The local folder of what a user named, fetched if need be."""
    return local(fetch(text, part))


def fetch(text: str, part: str = "model") -> str:
    """Have this part of a model here: its config; or with its tokenizer; or all of it. -> the name with its commit

    A path is returned as it is. ValueError says in one paragraph what is in the way."""
    name = find_name(text)
    if name is None:
        return text
    model = name

    def stages(files: Files, snapshot: Path) -> Iterator[list[str]]:
        if CONFIG not in files and part != "tokenizer":
            raise ValueError(
                f"{model.repo} on the Hub has no config.json, so it is no model that transformers knows; name another"
            )
        wanted = [CONFIG] if part == "config" else [CONFIG, GENERATION, *TOKENIZER]
        if part != "config":
            wanted += [
                file for file in files if file.startswith("additional_chat_templates/") and file.endswith(".jinja")
            ]
        if part == "model":
            _require_safetensors(model, files)
            wanted.append(INDEX)
        yield [file for file in wanted if file in files]
        if part == "model":  # last, as the index says which
            yield _weights(snapshot) if INDEX in files else [WEIGHTS]

    return name.at(_have(name, stages, lambda snapshot: _belongs(snapshot, part)))


def fetch_dataset(name: Name, choose: Callable[[Files], list[str]]) -> str:
    """Have those files of a dataset here that `choose` chooses. -> the source with its commit"""
    return name.at(_have(name, lambda files, snapshot: iter([choose(files)])))


def listing(name: Name) -> dict[str, int | None]:
    """All files of a repository that was fetched."""
    with suppress(OSError, ValueError):
        files = read_json(_list(name, name.commit or ""))
        if isinstance(files, dict):
            return files
    raise ValueError(f"{name.at(name.revision)} was not fetched; name it in the config or on the command line")


Stages = Callable[[Files, Path], Iterator[list[str]]]
"""What is wanted of a repository's files, one after the other: the later may depend on what is in the earlier."""


def _have(name: Name, stages: Stages, otherwise: Callable[[Path], bool] = lambda snapshot: False) -> str:
    """-> the commit, with its files in the cache. otherwise: whether a snapshot without a list is whole"""

    def whole(commit: str) -> bool:
        snapshot, files = name.snapshot(commit), None
        with suppress(OSError, ValueError):
            files = read_json(_list(name, commit))
        if not isinstance(files, dict):
            return otherwise(snapshot)
        every = stages(files, snapshot)  # the next is looked at when those before are there
        return all(file in files and _there(snapshot / file, files[file]) for wanted in every for file in wanted)

    commit = name.commit
    if commit is None or not whole(commit):
        with _alone(name) as notes:
            commit = name.commit or notes.get(name.asked)
            if commit is None or not whole(commit):
                commit, files = _ask(name, commit, whole)
                if files is not None:
                    with _explained(name):
                        for wanted in stages(files, name.snapshot(commit)):
                            _download(name, commit, wanted, files)
            notes[name.asked] = commit
    if commit != name.revision:
        remember({name.asked: commit})
    return commit


def _ask(name: Name, commit: str | None, whole: Callable[[str], bool]) -> tuple[str, Files | None]:
    """-> commit and files of a revision, as the Hub says; no files: it cannot be reached, and the cache has all of them"""
    from huggingface_hub import HfApi

    known = commit or _known(name)
    try:
        with _explained(name):
            about: Any = HfApi().repo_info(
                name.repo, repo_type=name.kind, revision=commit or name.revision, files_metadata=True
            )
    except Unreachable:
        if known is None or not whole(known):
            raise
        say(f"the Hub cannot be reached; {name.repo} is taken from the cache, at {known}")
        return known, None
    files = {file.rfilename: file.size for file in about.siblings or ()}
    if not _COMMIT.fullmatch(about.sha or ""):
        raise ValueError(
            f"the Hub does not say which commit {name.repo}@{name.revision} is; try again, or name a local folder"
        )
    notes = {_list(name, about.sha): json.dumps(files, indent=1) + "\n"}
    if not name.is_pinned:  # so that it is known without a network too, to others as well
        notes[name.store / "refs" / name.revision] = about.sha
    for path, text in notes.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return about.sha, files


def _known(name: Name) -> str | None:
    """The commit that the cache knows for a branch or tag."""
    with suppress(OSError, ValueError):
        commit = (name.store / "refs" / name.revision).read_text().strip()
        return commit if _COMMIT.fullmatch(commit) else None
    return None


def _download(name: Name, commit: str, wanted: list[str], files: Files) -> None:
    from huggingface_hub import snapshot_download

    here = name.snapshot(commit)
    if stray := next((file for file in wanted if file not in files), None):
        raise ValueError(
            f"the index of {name.repo} names {stray}, which the repository does not have; take another revision"
        )
    missing = [file for file in wanted if not _there(here / file, files[file])]
    if not missing:
        return
    size = sum(files[file] or 0 for file in missing)
    if size > _SMALL:
        say(f"fetching {name.repo} at {commit}: {len(missing)} files, {format_bytes(size)}, into {name.store}")
    # a name is a pattern here: what is special in one is quoted
    snapshot_download(name.repo, repo_type=name.kind, revision=commit, allow_patterns=[*map(glob.escape, missing)])
    short_of = [file for file in missing if not _there(here / file, files[file])]
    if short_of:
        raise ValueError(
            f"{short_of[0]} of {name.repo} did not arrive whole ({len(short_of)} files); start again, it goes on there"
        )


def _there(path: Path, size: int | None) -> bool:
    try:
        return path.stat().st_size == size or size is None
    except OSError:
        return False


def _require_safetensors(name: Name, files: Files) -> None:
    if INDEX in files or WEIGHTS in files:
        return
    others = sorted(file for file in files if file.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors")))
    has = f"it has {', '.join(others[:3])}" if others else "it has no weights at all"
    raise ValueError(
        f"{name.repo} on the Hub has neither {WEIGHTS} nor {INDEX} ({has}). Only safetensors is read, as other formats can run "
        "code; look for a conversion (often in refs/pr/1: OWNER/NAME@refs/pr/1), or convert it and name the folder"
    )


def _weights(snapshot: Path) -> list[str]:
    """The files that an index names."""
    contents = read_json(snapshot / INDEX)
    where = contents.get("weight_map") if isinstance(contents, dict) else None
    if not isinstance(where, dict) or not where:
        raise ValueError(f"{snapshot / INDEX} has no weight_map, a table of names and files; take another revision")
    names = sorted({inside(snapshot, file, links=True).relative_to(snapshot).as_posix() for file in where.values()})
    if bad := next((file for file in names if not file.endswith(".safetensors")), None):
        raise ValueError(f"{snapshot / INDEX} names {bad}, which is no safetensors file; take another revision")
    return names


def _belongs(snapshot: Path, part: str) -> bool:
    """Of a model that others put into the cache: whether all of it is there."""
    if part == "tokenizer":
        return any((snapshot / file).is_file() for file in ("tokenizer.json", "tokenizer.model"))
    if not (snapshot / CONFIG).is_file():
        return False
    with suppress(OSError, ValueError):
        needed = [] if part == "config" else _weights(snapshot) if (snapshot / INDEX).is_file() else [WEIGHTS]
        return all((snapshot / file).is_file() for file in needed)
    return False


# -- what is beside the snapshots: the lists of files, and the lock -----------------------------------------------------------


def _list(name: Name, commit: str) -> Path:
    return name.store / "ithaca" / f"{commit}.json"


@contextmanager
def _alone(name: Name) -> Iterator[dict[str, str]]:
    """One process of those that share a cache at a time. -> commits that the one found which this one has waited for"""
    path = name.store.parent / ".locks" / name.store.name / "ithaca.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ValueError(
            f"the cache {name.store.parent} cannot be written ({error.strerror}), so {name.repo} cannot be fetched; set HF_HOME to "
            "a folder that can, or name a local folder"
        ) from None
    notes: dict[str, str] = {}
    try:
        with suppress(OSError):  # a file system without locks: huggingface_hub then takes care of each file
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process fetches {name.repo}; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
                with suppress(ValueError):
                    notes = json.loads(os.pread(file, 1 << 16, 0))
        os.ftruncate(file, 0)
        yield notes
        os.pwrite(file, json.dumps(notes).encode(), 0)
    finally:
        os.close(file)


# -- what went wrong, in words ----------------------------------------------------------------------------------------


class Unreachable(ValueError):
    """The Hub, for now."""


@contextmanager
def _explained(name: Name) -> Iterator[None]:
    import httpx
    from huggingface_hub import constants, errors

    where = f"{constants.ENDPOINT}/{'' if name.kind == 'model' else 'datasets/'}{name.repo}"
    download = (
        f"hf download {name.repo}{'' if name.kind == 'model' else ' --repo-type dataset'} --revision {name.revision}"
    )
    try:
        yield
    except errors.GatedRepoError:
        raise ValueError(
            f"{name.repo} is gated: its owners want you to accept their terms first. Open {where}, ask for access, and let the "
            "Hub know who you are: hf auth login, or HF_TOKEN in the environment"
        ) from None
    except errors.RevisionNotFoundError:
        raise ValueError(
            f"{name.repo} on the Hub has no revision {name.revision!r}; {where} lists branches, tags and commits"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"{name.repo!r} is neither a folder here nor a {name.kind} on the Hub that you may see ({where}: not found). Check the "
            "spelling; if it is private, let the Hub know who you are: hf auth login, or HF_TOKEN in the environment"
        ) from None
    except errors.OfflineModeIsEnabled:
        raise Unreachable(
            f"{name.repo} at {name.revision} is not whole in the cache ({name.store}), and HF_HUB_OFFLINE forbids to ask the Hub. "
            f"Unset it; or fetch it where there is a network, into the same HF_HOME: {download}"
        ) from None
    except (httpx.TransportError, errors.HfHubHTTPError, errors.LocalEntryNotFoundError) as error:
        cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
        why = (str(cause).strip().splitlines() or [type(cause).__name__])[0][:200]
        raise Unreachable(
            f"the Hub ({constants.ENDPOINT}) cannot be reached for {name.repo} ({why}). Check the network and try again; or fetch "
            f"it elsewhere, into the same HF_HOME: {download}; or name a local folder"
        ) from None
