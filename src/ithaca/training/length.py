"""How long a run is: `train.steps`, or as many steps as `train.epochs` takes, which is known once its data is packed.

From then on the run is one of so many steps like any other: its cursor is the step, so it stops and goes on in the middle of an
epoch, and epoch after epoch has an order of its own (data/order.py). What is written down is what was asked for.
"""

from __future__ import annotations

from dataclasses import replace

from ..base.exits import DATA, Failed
from ..config import violations
from ..config.schema import Config
from ..data.rows import Stream
from ..data.samples import open_stream, pack_sources
from ..engine.build import model_config
from ..engine.ranks import on_rank0, world_group
from ..stack import require
from .launch import heartbeat


def with_steps(config: Config, stream: Stream) -> Config:
    """The config with the number of its steps. ValueError where its schedule does not fit into them."""
    epochs = config.train.epochs
    if epochs is None:
        return config
    steps = -(-stream.order.until(epochs) // config.train.rows)
    alone = replace(config, train=replace(config.train, steps=steps, epochs=None))
    require(
        violations(alone), f"{epochs:g} epochs of this data are {steps:,} steps, and the configuration cannot be used"
    )
    return replace(config, train=replace(config.train, steps=steps))


def counted(config: Config) -> Config:
    """The same on every rank, which has no data yet: rank 0 packs what is not packed, and counts. Collective."""
    if config.train.epochs is None:
        return config

    def count() -> int:
        try:
            pack_sources(config, lambda line: None)
            stream = open_stream(config, model_config(config.model, config.data.context).vocab_size)
            return with_steps(config, stream).train.steps
        except ValueError as error:
            raise Failed(getattr(error, "exit_code", DATA), str(error)) from error

    heartbeat.section("pack")  # which may take hours, and has no limit
    steps = on_rank0(world_group(), count)
    heartbeat.section("setup")
    return replace(config, train=replace(config.train, steps=steps))


def as_asked(config: Config) -> Config:
    """As it is written down: with epochs, not with the steps they came to."""
    return config if config.train.epochs is None else replace(config, train=replace(config.train, steps=0))
