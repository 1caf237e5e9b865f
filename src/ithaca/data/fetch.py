"""Everything of a run that is on the Hub, fetched and pinned before any worker starts (base/hub.py).

Of a dataset those files are fetched that our readers read, as `find.py` would choose them in a folder: by suffix, by the pattern
that was given, and by split. What comes out is the same config, with a commit in every name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base.hub import Files, Name, fetch, fetch_dataset, find_dataset, find_name, pins
from ..config.schema import Config
from .find import choose_files, offsets_of
from .source import Source


def fetch_source(source: Any) -> Any:  # of `pack` or of a config: they have the same fields here
    """A source with its files here and its commit named. One that is not on the Hub, or that `datasets` reads, as it is."""
    path: str = source.path or ""
    named = None if source.format == "datasets" else find_dataset(path)
    if named is None:
        return source
    asked = Source(path, source.format, split=source.split)

    def choose(files: Files) -> list[str]:
        chosen, _ = choose_files(asked, named, files)
        beside = (offsets_of(Path(name)).as_posix() for name in chosen if name.endswith(".npy"))
        return [*chosen, *(name for name in beside if name in files)]

    return replace(source, path=fetch_dataset(named, choose))


def fetch_model(config: Config, *, weights: bool = True) -> Config:
    """The config with model and tokenizer pinned, and here. weights: those of the model too."""
    model, data = config.model, config.data
    named = find_name(model.folder)
    if named is not None:
        if model.trust_remote_code:
            raise ValueError(
                f"model.trust_remote_code runs Python files that come with a model, and of {named.repo} on the Hub none are "
                "fetched; download it, read them, and name the folder"
            )
        part = "model" if weights and not model.random_init else "tokenizer"
        model = replace(model, folder=fetch(model.folder, part))
    if data.tokenizer is not None:
        data = replace(data, tokenizer=fetch(data.tokenizer, "tokenizer"))
    return replace(config, model=model, data=data)


def fetch_run(config: Config) -> Config:
    """The same with everything that the run reads: its documents, and those it is evaluated on."""
    config = fetch_model(config)
    return replace(
        config,
        data=replace(config.data, sources=tuple(map(fetch_source, config.data.sources))),
        eval=replace(config.eval, sources=tuple(map(fetch_source, config.eval.sources))),
        phases=tuple(replace(phase, sources=tuple(map(fetch_source, phase.sources))) for phase in config.phases),
    )


def pins_of(config: Config) -> dict[str, str]:
    """Which commits the names of a config stand for. config: as it was asked for."""
    known = pins()
    return {name.asked: known[name.asked] for name in _names(config) if name.asked in known}


def _names(config: Config) -> Iterator[Name]:
    yield from filter(None, (find_name(text) for text in (config.model.folder, config.data.tokenizer) if text))
    for sources in (config.data.sources, config.eval.sources, *(phase.sources for phase in config.phases)):
        yield from filter(None, (find_dataset(s.path) for s in sources if s.path and s.format != "datasets"))
