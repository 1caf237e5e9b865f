"""The run itself, as every rank executes it: build, resume, step, log, save, stop.

All ranks walk through the same calls in the same order; whatever only one of them can know (a signal, a file called SAVE, a full
disk) is agreed on between steps, before anyone acts on it. The state of a run is its checkpoint and nothing else: step n
trains on the same samples with the same learning rate whether or not the run was stopped before it.

Before the first step a signal ends a rank at once (base/processes/signals.py). From then on it is looked at after each step, after
each batch of an evaluation and after each save, so none of these has to be waited for twice.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from ..base import faults
from ..base.exits import DATA, MEMORY, STOPPED, Failed, code_of, from_peers
from ..base.files import write_atomically
from ..base.processes.signals import Stop, StoppedEarly, listen
from ..base.processes.system import LAUNCHER
from ..base.redact import redacted
from ..base.run_folder import RunFolder, unclean
from ..config.dump import dump, origins
from ..config.nodes import Place, load_plain
from ..config.schema import Config, StackOptions
from ..data.report import about
from ..data.rows import Stream, places_of
from ..data.samples import Loader, open_stream, pack_sources
from ..engine.build import DTYPES, device_of, model_config, model_name, prepared
from ..engine.criterion import Criterion, check_criterion
from ..engine.optimizer import build_optimizer
from ..engine.ranks import on_rank0, world_group
from ..evaluation.held_out import open_suite, pack_held_out
from ..evaluation.publish import publish
from ..evaluation.reference import samples_of
from ..evaluation.suite import Suite, run_suite
from ..evaluation.suite import headline as headline_of
from ..observe.display import Display
from ..observe.environment import environment
from ..observe.logs import log_to
from ..observe.metrics import Metrics
from ..observe.rates import Gauge, StepTimer, largest, tokens_per_second
from ..observe.record import NUMBERS, StepRecord
from ..observe.report import write_report
from ..observe.stragglers import Stragglers
from ..observe.text import facts_of, headline
from ..planner.flops import mfu, model_flops
from ..planner.gpus import peak_flops
from ..planner.plan import Plan
from ..planner.shortage import gpu_shortage, host_shortage
from ..planner.text import beside
from ..stack import Stack
from .agreement import Agreement
from .automatic import automatic_stack, has_arithmetic, planned
from .best import Best
from .criterion import Opened, open_criterion
from .launch import heartbeat
from .launch.environment import ATTEMPT, find_job
from .length import as_asked
from .resume import flat, resume
from .saving import Saver, grace_of
from .step import NotFinite, Stepped, train_step

log = logging.getLogger("ithaca")
LONG_STEP = 5.0  # seconds: of such steps the second tells enough


def train(
    config: Config,
    *,
    quiet: bool = False,
    text: str | None = None,
    allow_change: bool = False,
    injected: Sequence[faults.Fault] = (),
    first: bool = True,
    last: bool = True,
) -> int:
    """Train as this rank of the process group, or alone where there is none. -> exit code

    text: the resolved config as it is to be written down; None = as `dump` writes it. allow_change: go on from a checkpoint
    though data or model are others. injected: faults to rehearse. first, last: of the phases that this process trains.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    folder = RunFolder(config.run.folder)
    with ExitStack() as closing:
        if rank == 0 and LAUNCHER not in os.environ:  # our launcher holds it for all attempts
            closing.enter_context(folder.claim())
        stop = closing.enter_context(listen())
        display = Display(config.run.name, config.train.steps, folder=config.run.folder, quiet=quiet, rank=rank)
        closing.enter_context(log_to(folder, rank, display))
        closing.enter_context(display)
        if rank == 0 and first and unclean(folder.read_status()):
            display.say("Previous run ended without a clean stop.")
        faults.arm(injected, rank, folder.path)
        closing.callback(faults.arm, (), rank, None)
        trainer = Trainer(config, folder, display, rank, text, stop)
        try:
            return trainer.run(allow_change, last)
        except StoppedEarly as stopped:
            trainer.stopped_early(str(stopped))
            raise
        except torch.OutOfMemoryError as error:
            shortage = Failed(MEMORY, gpu_shortage(trainer.plan, torch.cuda.max_memory_allocated(trainer.device)))
            trainer.failed(shortage)
            raise shortage from error
        except MemoryError as error:
            shortage = Failed(MEMORY, host_shortage(trainer.plan, str(error)))
            trainer.failed(shortage)
            raise shortage from error
        except BaseException as error:
            trainer.failed(error)
            raise


class Trainer:
    def __init__(
        self, config: Config, folder: RunFolder, display: Display, rank: int, text: str | None, stop: Stop
    ) -> None:
        self.folder, self.display, self.rank, self.stop = folder, display, rank, stop
        self.device = device_of(config)
        self.hf = model_config(config.model, config.data.context)
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.plan: Plan | None = None
        stack, offload = config.stack.chosen, bool(config.train.offload_optimizer)
        if stack is None:
            stack, offload = on_rank0(world_group(), lambda: self._automatic(config, world))
        self.stack = stack
        moved = offload and not config.train.offload_optimizer  # by auto
        config = replace(config, train=replace(config.train, offload_optimizer=offload))
        if not has_arithmetic(self.hf) and self.stack.engine == "auto":
            self.stack = replace(self.stack, engine="module")  # what auto comes to, said where the run is described
        if self.plan is None and rank == 0 and self.device.type == "cuda" and has_arithmetic(self.hf):
            self.plan = planned(config, self.hf, world, self.device, self.stack)
        self.config = replace(config, stack=StackOptions.of(self.stack, config.stack.scratch))
        if text is None or config.stack.chosen is None:  # with what auto became, and where the rest came from
            chosen = {f"stack.{field.name}": Place("auto") for field in fields(Stack)} if config.stack.auto else {}
            chosen |= {"train.offload_optimizer": Place("auto")} if moved else {}
            text = dump(as_asked(self.config), {**origins(text or ""), **chosen})
        self.text = redacted(text)
        self.step = 0
        self.tokens = 0
        self.stopping: str | None = None
        self.best = Best.of(config)
        self.saver: Saver | None = None
        self.stragglers = Stragglers()

    def _automatic(self, config: Config, world: int) -> tuple[Stack, bool]:
        """-> the stack, and whether weights and states wait on the host"""
        stack, self.plan = automatic_stack(config, self.hf, world, self.device)
        return stack, bool(config.train.offload_optimizer) if self.plan is None else self.plan.job.offload

    # -- from start to end ----------------------------------------------------------------------------------------------

    def run(self, allow_change: bool, last: bool) -> int:
        config = self.config
        self._status("starting")
        self.display.doing("building the model")
        if config.train.deterministic:
            torch.use_deterministic_algorithms(True)
        run = self.model = prepared(config, self.hf, self.stack, self.device)
        try:
            stream, suite = self._data()
        except ValueError as error:
            raise Failed(DATA, str(error)) from error
        self.optimizer = build_optimizer(run.model, config.train, DTYPES[config.model.dtype], self.device)
        learned, suite = self._criterion(stream, suite)
        self.agreement = Agreement(self.folder, self.stop, run.mesh.world, self.device)
        self.loader = Loader(
            stream, run, config.train.rows, config.train.accumulation, units=config.objective.kind != "sft",
            reference=learned.reference,
        )  # fmt: skip
        self.display.doing("looking for a checkpoint")
        resumed = resume(
            self.folder.checkpoints, run, self.optimizer, config, text=self.text, contents=stream.contents,
            allow_change=allow_change,
        )  # fmt: skip
        if resumed is not None:
            self.step, self.tokens = resumed.step, resumed.tokens
            self.best = self.best and self.best.resumed(resumed.best)
        if self.rank == 0:
            write_atomically(self.folder.config, self.text)
            if self.plan is not None:
                write_atomically(self.folder.plan, json.dumps(self.plan.json(), indent=1) + "\n")
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU process"
        if self.rank == 0:
            where = environment(device, world_group().size, config.launch.nodes)
            record = {"about": 1, "environment": where, "data": about(stream)}
            write_atomically(self.folder.about, json.dumps(record, indent=1) + "\n")
        shared = torch.cuda.device_count() if self.config.launch.share_gpu else 0
        facts = facts_of(
            self.model, self.config, model=model_name(self.config.model), device=device, shared=shared, done=self.step,
            checkpoint=resumed and resumed.name, data=stream.name,
        )  # fmt: skip
        self.display.say("\n".join([headline(facts), *(resumed.lines if resumed else ())]))
        settings = flat(load_plain(self.text, "the config"))
        metrics = Metrics(self.folder, config.log, self.rank, name=config.run.name, settings=settings)
        with metrics:
            metrics.event("resume" if resumed else "start", from_step=self.step, attention=facts.kernel)
            self.saver = Saver(config, self.folder, run, self.optimizer, metrics, resumed and resumed.name)
            if self.best is not None and self.best.step is not None and config.eval.keep_best:
                self.saver.keep(self.best.step)
            planned = on_rank0(world_group(), lambda: self.plan and self.plan.seconds)
            if planned is not None:
                heartbeat.expect(planned)
            self.stop.early = False
            self._loop(metrics, suite, self.saver, learned.criterion)
            cause = self.stopping or self._given_up()
            if cause is not None:
                metrics.event("stop", cause=cause, at_step=self.step)
        self.loader.close()
        where = self.saver.newest or "nowhere: it had nothing new"
        if self.stopping is not None:
            self._status("stopped", cause=self.stopping, exit_code=STOPPED)
            self.display.ended("stopped", self.step)
            self.display.say(
                f"stopped after step {self.step} by {self.stopping}; saved: {where}. The same command goes on"
            )
            return STOPPED
        if not last:
            self._status("running")
            return 0
        early = self._given_up()
        self._status("finished", exit_code=0, **({} if early is None else {"cause": early}))
        self.display.ended("finished", self.step)
        best = "" if self.best is None or self.best.step is None else f"\n  best: {self.best.words()}"
        self.display.say(
            f"finished {self.step:,} steps{'' if early is None else f' ({early})'}; checkpoint: {where}{best}\n"
            f"  export: ithaca export {self.folder.path} OUT{' --checkpoint best' if self.config.eval.keep_best else ''}"
            f"{self._report()}"
        )
        return 0

    def _given_up(self) -> str | None:
        """Why the run ends before its last step, where evaluations say so."""
        if self.best is None or self.step >= self.config.train.steps or not self.best.enough(self.config.eval):
            return None
        return f"{self.best.since} evaluations without improvement, eval.stop_after={self.config.eval.stop_after}"

    def _report(self) -> str:
        """The page of the run; a run that is done does not fail for it."""
        if self.rank != 0:
            return ""
        try:
            page = write_report(run=self.folder.path)
        except (OSError, ValueError) as error:
            log.warning("no report was written: %s", error)
            return ""
        return f"\n  report: {page}"

    def _loop(self, metrics: Metrics, suite: Suite | None, saver: Saver, criterion: Criterion) -> None:
        train, timer = self.config.train, StepTimer()
        gauge = Gauge(self.device, self.model.store)
        peak = peak_flops(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        while self.step < train.steps and self.stopping is None and self._given_up() is None:
            logged = metrics.due(self.step + 1)
            if logged:
                gauge.begin()
            self._enter("data", f"step {self.step + 1}", self.step + 1)
            self._status("running")
            samples = self.loader.samples(self.step)
            waited = time.perf_counter()
            batches = self._batches()
            waited = time.perf_counter() - waited
            self._enter("step", f"step {self.step + 1}", self.step + 1)
            self.model.own.take()  # what an evaluation has measured is not part of a step
            timer.begin()
            try:
                done = train_step(self.model, self.optimizer, batches, train, self.step, samples, criterion)
            except NotFinite as error:  # on every rank: what is being written is good, and will be wanted
                saver.finish()
                error.write(self.folder.bad_batch, self.loader.stream.documents, self.rank == 0, saver.way_back())
                raise
            seconds = timer.end()
            self.step += 1
            self.tokens += done.tokens
            own = waited + self.model.own.take()
            evaluated = self._evaluate(suite, metrics, saver)
            if logged or evaluated is not None or self.step == train.steps:
                record = self._record(done, seconds, gauge, peak, samples, evaluated)
                metrics.step(record)
                left = timer.eta(train.steps - self.step)
                self.display.step(record, eta=left, typical=timer.typical, next_save=saver.next(self.step))
                self._compare(record, timer, samples)
            self._after_step(metrics, saver, seconds, own)
            if text := saver.too_slow(grace_of(self.config.launch.grace, os.environ), timer.typical):
                log.warning("%s", text)
        saver.finish()

    def _enter(self, section: str, words: str, step: int) -> None:
        """Something else begins: for the person at the display, for whoever watches for hangs, and for faults."""
        faults.at(step)
        heartbeat.section(section, step)
        self.display.doing(words, self.step)

    def _compare(self, record: StepRecord, timer: StepTimer, samples: range) -> None:
        """What was planned beside what came, once: after the second step, when nothing is built or pinned any more; short steps
        vary, so of them after the tenth, or the last."""
        if self.plan is None or record.gpu_peak is None or self.compared or timer.count < 2:
            return
        took = timer.typical or record.seconds
        if took < LONG_STEP and timer.count < 10 and self.step < self.config.train.steps:
            return
        self.compared = True
        longest = max(max(self.loader.stream.documents(sample)) for sample in samples)
        self.display.say(beside(self.plan, record.gpu_peak, took, longest))

    compared = False

    # -- parts of it ----------------------------------------------------------------------------------------------------

    def _data(self) -> tuple[Stream, Suite | None]:
        evaluates = self.config.eval.every is not None

        def pack_all() -> None:
            if self.config.data.is_packed:
                # done already, and said, unless others than we started this job
                theirs = find_job(os.environ) is not None and LAUNCHER not in os.environ
                pack_sources(self.config, self.display.say if theirs else log.info)
            if evaluates:
                pack_held_out(self.config, self.display.say)

        if self.config.data.is_packed:
            heartbeat.section("pack")  # which may take hours, and has no limit
        on_rank0(self.model.mesh.world, pack_all)
        heartbeat.section("setup")
        stream = open_stream(self.config, self.hf.vocab_size)
        return stream, open_suite(self.config, self.hf, self.model.mesh.data.size) if evaluates else None

    def _criterion(self, stream: Stream, suite: Suite | None) -> tuple[Opened, Suite | None]:
        """What is learned, and what evaluations measure of it. A reference that is the start is scored here: the weights are still
        those of the start."""
        config = self.config
        check_criterion(config.objective.kind, self.model.decoder)

        def opened(stream: Stream, samples: Sequence[int]) -> Opened:
            return open_criterion(
                config, self.model, stream, samples, self.folder, lambda words: self._enter("eval", words, self.step)
            )

        try:
            if config.objective.kind == "sft":
                return opened(stream, ()), suite
            learned = opened(stream, samples_of(stream, config.train.steps * config.train.rows))
            if suite is not None and suite.held_out is not None:
                measured = opened(suite.held_out, range(suite.rows))
                suite = replace(suite, criterion=measured.criterion, reference=measured.reference)
            return learned, suite
        except ValueError as error:
            raise Failed(DATA, str(error)) from error

    def _batches(self):
        try:
            return self.loader.batches(self.step, last=self.step + 1 == self.config.train.steps)
        except (ValueError, OSError) as error:
            raise Failed(DATA, str(error)) from error

    def _record(
        self, done: Stepped, seconds: float, gauge: Gauge, peak: float | None, samples: range, evaluated: float | None
    ) -> StepRecord:
        world = self.model.mesh.world
        stream = self.loader.stream
        lengths = [stream.documents(sample) for sample in samples]
        places = [places_of(row, stream.parents(sample)) for row, sample in zip(lengths, samples, strict=True)]
        trained = sum(p.numel() for p in self.model.model.parameters() if p.requires_grad)
        work = model_flops(
            self.hf, chain(*lengths), places=chain(*places), adapters=trained if self.config.model.lora else None
        )
        return StepRecord(
            step=self.step,
            loss=done.loss,
            lr=done.lr,
            grad_norm=done.grad_norm,
            tokens=self.tokens,
            samples=samples.stop,
            seconds=seconds,
            tokens_per_second=tokens_per_second(done.tokens, seconds, world.size),
            mfu=mfu(work, seconds, world.size, peak),
            eval_loss=evaluated,
            **{name: done.numbers.get(name) for name in NUMBERS},
            **largest(gauge.read(), world, self.device),
        )

    def _evaluate(self, suite: Suite | None, metrics: Metrics, saver: Saver) -> float | None:
        """After every n-th step: everything `eval` asks for, on the same texts every time. -> loss on held-out data"""
        every = self.config.eval.every
        if suite is None or every is None or self.step % every:
            return None
        record = run_suite(self.model, suite, self.step, before=self._before_forward)
        if record is None:  # the step was trained, and can be saved; the evaluation comes again at its next time
            return None
        saver.check(self.step, record)
        publish(record, self.folder, metrics, self.rank)
        self._compare_with_best(headline_of(record), metrics, saver)
        return record["held_out"]["loss"] if "held_out" in record else None

    def _compare_with_best(self, scores: dict[str, float], metrics: Metrics, saver: Saver) -> None:
        if self.best is None:
            return
        before, options = self.best, self.config.eval
        self.best = on_rank0(world_group(), lambda: before.after(scores, self.step, options.improvement))
        if self.best.step == self.step:
            metrics.event("best", at_step=self.step, metric=self.best.metric, value=self.best.value)
            if options.keep_best:
                saver.keep(self.step)

    def _before_forward(self, words: str) -> bool:
        """Each forward of an evaluation begins here. -> whether to leave off"""
        self._enter("eval", words, self.step)
        faults.reach("eval")
        return self._agree_to_stop(self.agreement.to_stop())

    # -- saving and stopping --------------------------------------------------------------------------------------------

    def _agree_to_stop(self, asked: str | None) -> bool:
        """asked: a signal, the same on every rank."""
        if asked is not None and self.stopping is None:
            self.stopping = asked
            about = f" (about {self.saver.seconds:.0f} s)" if self.saver and self.saver.seconds else ""
            self.display.say(f"{asked} at step {self.step}: saving{about} and stopping")
        return self.stopping is not None

    def _after_step(self, metrics: Metrics, saver: Saver, seconds: float, own: float) -> None:
        """What one rank wants, all do: stop, or save now."""
        agreed = self.agreement.after_step(saver.writing(), own)
        slow = self.stragglers.add(agreed.own, seconds)
        if slow is not None and self.rank == 0:
            log.warning("%s", slow)
            metrics.event("straggler", rank=slow.rank, ratio=round(slow.ratio, 2), at_step=self.step)
        last = self.step == self.config.train.steps or self._given_up() is not None
        needed = self._agree_to_stop(agreed.stop) or last
        if not (needed or agreed.save or saver.due(self.step) or saver.wanted(self.step)):
            if not agreed.writing:
                saver.finish()
            return
        self._save(saver, wait=needed or agreed.save, needed=needed)
        if self.rank == 0 and agreed.save:
            with suppress(OSError):  # no rank may fail alone
                self.folder.wish.unlink(missing_ok=True)
        if not needed and self._agree_to_stop(self.agreement.to_stop()):  # asked while saving
            saver.finish(needed=True)
            if not saver.has(self.step):
                self._save(saver, wait=True, needed=True)

    def _save(self, saver: Saver, *, wait: bool, needed: bool) -> None:
        self._status("saving")
        self._enter("save", "saving", self.step)
        extra = {
            "step": self.step,
            "tokens": self.tokens,
            "samples": self.step * self.config.train.rows,
            "config": self.text,
            "data": self.loader.stream.contents,
            **({} if self.best is None else {"best": self.best.json()}),
        }
        saver.save(self.step, extra, wait=wait, needed=needed)

    # -- words ----------------------------------------------------------------------------------------------------------

    def _status(self, state: str, **about: Any) -> None:
        if self.rank == 0:
            newest = None if self.saver is None else self.saver.newest
            about = {"step": self.step, "steps": self.config.train.steps, "checkpoint": newest, **about}
            if self.best is not None and self.best.step is not None:
                about["best"] = {name: getattr(self.best, name) for name in ("metric", "value", "step")}
            about["attempts"] = int(os.environ.get(ATTEMPT, 1))
            self.folder.write_status(state, resume=f"ithaca train {self.folder.config}", **about)

    def stopped_early(self, cause: str) -> None:
        self._status("stopped", cause=cause, exit_code=STOPPED)

    def failed(self, error: BaseException) -> None:
        if not isinstance(error, SystemExit | KeyboardInterrupt):
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            if from_peers(type(error).__name__, cause):
                cause = f"lost another rank ({cause})"
            self._status("failed", cause=cause, exit_code=code_of(error))
