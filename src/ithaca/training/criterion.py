"""From `objective` of a config to what a step learns, with its reference.

The reference of a run that compares with its own start is scored here, before a checkpoint is loaded: the weights are still those
that the run began with, however far it has come since. What was scored before is read again, so a resume compares with the same
numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from ..base.run_folder import RunFolder
from ..config.schema import Config, Objective
from ..data.batch import Scores as Reading
from ..data.folder import Packed
from ..data.rows import Stream
from ..engine.build import model_name
from ..engine.criterion import Criterion, Preferences, Reference, Rollouts, Supervised, by_the_base, summed
from ..engine.objective.policy import Policy
from ..engine.objective.preference import Preference
from ..engine.ranks import on_rank0
from ..engine.run import Run
from ..evaluation.reference import Scores, packed_of, samples_of, score, tokens_of_batch


@dataclass(frozen=True)
class Opened:
    criterion: Criterion
    reference: Reading | None = None  # scores that are read with the batches


def open_criterion(
    config: Config, run: Run, stream: Stream, samples: Sequence[int], folder: RunFolder, before: Callable[[str], None]
) -> Opened:
    """For these samples of a stream. Collective. before: called before each forward that scores the reference."""
    asked, train = config.objective, config.train
    if asked.kind == "sft":
        return Opened(Supervised(train.label_smoothing, train.z_loss))
    named = asked.reference_of(config.model.lora is not None)
    scores: Scores | None = None
    if named == "start":
        scores = _start(config, run, stream, samples, folder, before)
    elif named not in (None, "adapters"):
        scores = scored(asked, run.decoder.config.vocab_size, stream, samples)
    if asked.kind == "dpo":
        reference = summed(by_the_base()) if scores is None else scores.sums
        settings = Preference(
            loss=asked.loss or "sigmoid",
            beta=asked.beta,
            label_smoothing=asked.label_smoothing,
            by_length=asked.by_length,
        )
        return Opened(Preferences(settings, reference))
    tokens: Reference | None = None
    if named is not None:
        tokens = by_the_base(asked.temperature) if scores is None else tokens_of_batch
    settings = Policy(
        loss=asked.loss or "grpo", clip_low=asked.clip_low, clip_high=asked.clip_high, kl=asked.kl,
        unbiased_kl=asked.unbiased_kl, normalise=asked.normalise, longest=asked.longest, temperature=asked.temperature,
    )  # fmt: skip
    rewards = judged_by(packed_of(stream)) == "rewards"
    return Opened(Rollouts(settings, rewards=rewards, reference=tokens), None if scores is None else scores.tokens)


def check_units(config: Config, stream: Stream, vocabulary: int, steps: int) -> None:
    """ValueError for what files can tell before any rank starts. steps: of the run; 0 = not known yet."""
    asked = config.objective
    if asked.kind == "policy":
        judged_by(packed_of(stream))
    if asked.reference_of(config.model.lora is not None) not in (None, "adapters", "start"):
        scored(asked, vocabulary, stream, samples_of(stream, steps * config.train.rows))


def judged_by(packed: Packed) -> str:
    """What completions are judged by; the same in all sources, which are compared with one another in a step."""
    every = {source["values"] for source in packed.manifest["sources"]}
    if len(every) > 1:
        raise ValueError(f"some sources of {packed.folder} have rewards and others advantages; give one of them in all")
    if len({shard["old"] is None for shard in packed.manifest["shards"]}) > 1:
        raise ValueError(
            f"some sources of {packed.folder} have log-probabilities of who sampled and others none; give them in all, or in none"
        )
    return every.pop()


def scored(asked: Objective, vocabulary: int, stream: Stream, samples: Sequence[int]) -> Scores:
    """Scores that `ithaca score` wrote, of everything that the run will see."""
    assert asked.reference is not None
    scores = Scores(Path(asked.reference))
    scores.check(packed_of(stream), vocabulary, _temperature(asked))
    lacks = scores.unscored(stream, samples)
    if lacks:
        raise ValueError(
            f"the reference {asked.reference} has no scores of {len(lacks):,} of the {len(samples):,} rows of this run; score all: "
            f"ithaca score MODEL {packed_of(stream).folder} --context {stream.context}"
        )
    return scores


def _temperature(asked: Objective) -> float:
    return asked.temperature if asked.kind == "policy" else 1.0


def _start(
    config: Config, run: Run, stream: Stream, samples: Sequence[int], folder: RunFolder, before: Callable[[str], None]
) -> Scores:
    """Scores of the weights as they are, which is as the run began; what is there already is not scored again."""
    packed, temperature = packed_of(stream), _temperature(config.objective)
    # adapters add nothing yet; with other rotary settings, as phases have them, the same weights give other scores
    model = replace(config.model, lora=None, trust_remote_code=False)
    path = folder.reference / sha256(repr((packed.identity, model, temperature)).encode()).hexdigest()[:16]

    def lacking() -> list[int]:
        if not path.is_dir():
            return list(samples)
        scores = Scores(path)
        scores.check(packed, run.decoder.config.vocab_size, temperature)
        return scores.unscored(stream, samples)

    lacks = on_rank0(run.mesh.world, lacking)
    if lacks:
        tokens = config.data.context * max(1, config.train.rows // config.train.accumulation // run.mesh.data.size)
        name = f"{model_name(config.model)}, as the run began"
        score(run, path, stream, lacks, model=name, temperature=temperature, tokens=tokens, before=before)
    return Scores(path)
