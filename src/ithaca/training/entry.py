"""One door to training, for the command line (`ithaca train`) and for Python (`ithaca.train`): check, pack, start, or say why not.

    fetch       what is on the Hub, at the commits that the run began with
    check       the whole config and every problem that files can tell
    dry run     the same, what data there is, and the plan of memory and time; nothing is written, no step is made
    otherwise   data that is not packed yet is packed, then ranks are started, or joined where others have started them

Light to import: torch comes in with the first check.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.exits import CONFIG, DATA, STOPPED, Failed
from ..base.faults import Fault
from ..base.files import read_text, write_atomically
from ..base.hub import read_pins, remember
from ..base.kernels import import_ahead
from ..base.processes.fork_server import MODELS, TEMPLATE
from ..base.run_folder import RunFolder
from ..config import Config, Loaded, dump, load
from ..config.curriculum import phase_configs
from .launch import Job, find_job, start

PRELOAD = ("ithaca.training.phases", "ithaca.training.trainer", *MODELS)


@dataclass(frozen=True)
class Wishes:
    """How a run is to be started, beside its config."""

    quiet: bool = False
    allow_change: bool = False  # go on from a checkpoint though data or model are others
    injected: Sequence[Fault] = ()
    command: Sequence[str] | None = None  # what a worker runs; None = what this process was started with


def check_only(loaded: Loaded, wishes: Wishes) -> None:
    from .preflight import check_run, verdict

    loaded, _ = _fetched(loaded)
    preflight = check_run(loaded.config, loaded.text, allow_change=wishes.allow_change, trial=True)
    preflight.require()
    print(loaded.text, end="")
    print(verdict(preflight, loaded.config))


def dry_run(loaded: Loaded, wishes: Wishes) -> None:
    from .preflight import check_run, plans, verdict

    loaded, _ = _fetched(loaded)
    more: dict[str, Any] = dict(allow_change=wishes.allow_change, keep=False, trial=True, say=print)
    preflight = check_run(loaded.config, loaded.text, **more)
    preflight.require()
    for line in plans(loaded.config, preflight):
        print(line)
    print(f"{verdict(preflight, loaded.config)}; nothing was written")


def carry_out(loaded: Loaded, wishes: Wishes) -> int:
    """Train. -> exit code"""
    job = find_job(os.environ)
    if _computes(loaded.config, job):
        import_ahead()
    loaded, pinned = _fetched(loaded)
    config = loaded.config
    # workers that we start, or that others started, come here again as ranks
    if job is None and not _made_ready(loaded, wishes):
        return 0
    if job is None or job.rank == 0:
        _write_pins(config, pinned)
    return start(config, lambda config: _train(config, loaded.text, wishes), wishes.command, preload=PRELOAD)


def _computes(config: Config, job: Job | None) -> bool:
    """Whether this process will be a rank on a GPU, and not one that starts or forks others; torch is not there yet to be asked."""
    if config.launch.cpu is not None or TEMPLATE in os.environ:
        return False
    return job is not None or (config.launch.workers or len(list(Path("/dev").glob("nvidia[0-9]*")))) == 1


def _fetched(loaded: Loaded) -> tuple[Loaded, dict[str, str]]:
    """With all that is on the Hub here, at the commits that the run began with. -> and which commits those are"""
    from ..data.fetch import fetch_run, pins_of

    with suppress(OSError, ValueError):
        remember(read_pins(read_text(RunFolder(loaded.config.run.folder).hub)))
    config = fetch_run(loaded.config)
    return replace(loaded, config=config, text=dump(config, loaded.origins)), pins_of(loaded.config)


def _write_pins(config: Config, pinned: dict[str, str]) -> None:
    if pinned:
        folder = RunFolder(config.run.folder)
        folder.create()
        write_atomically(folder.hub, json.dumps(pinned, indent=1) + "\n")


def _made_ready(loaded: Loaded, wishes: Wishes) -> bool:
    """Check everything and pack what is not packed. -> whether there is anything left to train"""
    from .preflight import check_run, finished

    config = loaded.config
    preflight = check_run(config, loaded.text, allow_change=wishes.allow_change)
    preflight.require()
    if not preflight.finished:
        for part in phase_configs(config):
            _pack(part, wishes.quiet)
        if preflight.unpacked:  # now it can be opened, and its epochs counted
            preflight = check_run(config, loaded.text, allow_change=wishes.allow_change)
            preflight.require()
    if preflight.finished:
        print(finished(preflight, config))
    return not preflight.finished


def _train(config: Config, text: str, wishes: Wishes) -> int:
    from .phases import train_in_phases
    from .trainer import train

    def one(config: Config, text: str | None, *, first: bool, last: bool) -> int:
        more: dict[str, Any] = dict(allow_change=wishes.allow_change, injected=wishes.injected, first=first, last=last)
        return train(config, quiet=wishes.quiet, text=text, **more)

    return train_in_phases(config, text, one)


def _pack(config: Config, quiet: bool) -> None:
    said = (lambda line: None) if quiet else print
    if config.data.is_packed:
        from ..data.samples import pack_sources, packed_folder

        try:
            pack_sources(config, said)
        except (ValueError, OSError) as error:
            where = (
                f"packing into {packed_folder(config)}: " if isinstance(error, OSError) and not error.filename else ""
            )
            raise Failed(DATA, where + str(error)) from error
    if config.eval.every is not None:  # behind the data, of which a part may be held out
        from ..evaluation.held_out import check_evaluation

        check_evaluation(config, said)


# -- from Python ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """How a run ended."""

    folder: Path
    state: str  # finished, or stopped: the same call goes on
    step: int  # steps done
    steps: int  # of the whole run
    losses: tuple[float, ...]  # of the last logged steps, the newest last
    checkpoint: Path | None  # the newest
    best: Mapping[str, Any] | None  # the best evaluation (metric, value, step), where they are compared


_LAST = 10  # losses


def train(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    *,
    recipe: str | None = None,
    quiet: bool = True,
    allow_change: bool = False,
) -> Trained:
    """Train as `ithaca train` does, with the same checks and the same run folder; again on the same folder resumes.

    config: a YAML file, a dict like one, or a Config. recipe: what a file or dict lies over, as in `ithaca train --recipe`.
    quiet: only warnings and errors are said. allow_change: go on from a checkpoint though data or model are others.

    Where a process group is there, its ranks train, and all of them call this. Otherwise a worker is started for each GPU
    (launch.cpu: so many on the CPU), which runs `ithaca train` and not the script that calls this; where one is enough, this
    process trains. Under torchrun or srun without a group it joins the job, and a rank that fails ends its process, as that of the
    command line does.

    ValueError or ithaca's Failed (with `exit_code`, ithaca docs run_folder) say what is wrong and what to do.
    """
    with _loaded(config, recipe) as (loaded, words):
        command = [sys.executable, "-m", "ithaca", "train", *words]
        command += ["--quiet"] * quiet + ["--allow-change"] * allow_change
        wishes = Wishes(quiet=quiet, allow_change=allow_change, command=command)
        code = _in_group(loaded, wishes) if _has_group() else carry_out(loaded, wishes)
    return _outcome(loaded.config, code)


@contextmanager
def _loaded(config: Any, recipe: str | None) -> Iterator[tuple[Loaded, list[str]]]:
    """The config, and the words of a command line that reads the same; a dict becomes a file for that time."""
    recipes = ["--recipe", recipe] if recipe else []
    if isinstance(config, str | os.PathLike):
        yield load(config, recipe=recipe), [os.fspath(config), *recipes]
        return
    if not isinstance(config, Config | Mapping):
        raise ValueError(f"config is a {type(config).__name__}; give a YAML file, a dict like one, or an ithaca Config")
    if isinstance(config, Config):
        if recipe:
            raise ValueError("a Config is whole already; leave recipe out, or give a dict")
        text = dump(config)
    else:
        import yaml

        try:
            text = yaml.safe_dump(dict(config), sort_keys=False)
        except yaml.YAMLError as error:
            raise ValueError(
                f"config holds what YAML does not ({error.args[-1]!r}); give texts, numbers, lists and dicts"
            ) from None
    with tempfile.TemporaryDirectory(prefix="ithaca-") as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        yield load(path, recipe=recipe), [str(path), *recipes]


def _has_group() -> bool:
    """A group of one is no group: a run that trained in this process has left it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1


def _in_group(loaded: Loaded, wishes: Wishes) -> int:
    """As a rank of the group that is there; rank 0 checks and packs for all."""
    from ..engine.ranks import on_rank0, world_group

    world, wanted = world_group(), loaded.config.launch.world
    if wanted is not None and wanted != world.size:
        raise ValueError(
            f"launch asks for {wanted} processes, and this process group has {world.size}; make them agree"
        )
    loaded, pinned = _fetched(loaded)  # one rank of a machine fetches, the others wait for its lock
    if not on_rank0(world, lambda: _made_ready(loaded, wishes)):
        return 0
    on_rank0(world, lambda: _write_pins(loaded.config, pinned))
    return _train(loaded.config, loaded.text, wishes)


def _outcome(config: Config, code: int) -> Trained:
    from ..observe.metrics import read_metrics

    folder = RunFolder(config.run.folder)
    status = folder.read_status() or {}
    if code not in (0, STOPPED):
        raise Failed(
            code if code else CONFIG, status.get("cause") or f"the run ended with exit code {code}; see {folder.logs}"
        )
    lines = read_metrics(folder.metrics) if folder.metrics.is_file() else []
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}  # a step that came again counts once
    newest = status.get("checkpoint")
    return Trained(
        folder=folder.path,
        state=status.get("state", "stopped"),
        step=status.get("step") or 0,
        steps=status.get("steps") or 0,
        losses=tuple(losses[step] for step in sorted(losses)[-_LAST:]),
        checkpoint=folder.path / newest if newest else None,
        best=status.get("best"),
    )
