"""The configs of the phases of a run (phases.py runs them). Without torch: a launcher looks here for data that has to be packed."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from ..base.run_folder import RunFolder
from .schema import Config, Phase


def phase_configs(config: Config) -> list[Config]:
    """A config for each phase; the config itself where there are none."""
    if not config.phases:
        return [config]
    ends = accumulate(phase.steps for phase in config.phases)
    return [
        _of_phase(config, *args) for args in zip(config.phases, range(1, 1 + len(config.phases)), ends, strict=True)
    ]


def _of_phase(config: Config, phase: Phase, number: int, end: int) -> Config:
    data = replace(config.data, context=phase.context)
    if phase.sources or phase.packed is not None:
        packed = phase.packed
        if packed is None and any(source.synthetic is None for source in phase.sources):
            packed = str(RunFolder(config.run.folder).path / f"data-phase-{number}")
        data = replace(data, sources=phase.sources, packed=packed)
    return replace(
        config,
        model=replace(config.model, rope=phase.rope or config.model.rope),
        data=data,
        stack=phase.stack or config.stack,
        train=replace(config.train, steps=end, schedule_steps=config.train.schedule_steps or config.train.steps),
        phases=(),
    )


def phase_at(config: Config, step: int) -> Config:
    """The phase that made a checkpoint of this step."""
    return next((phase for phase in phase_configs(config) if step <= phase.train.steps), phase_configs(config)[-1])
