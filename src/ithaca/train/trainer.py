"""The run itself, as every rank executes it: build, resume, step, log, save, stop.

All ranks walk through the same calls in the same order; whatever only one of them can know (a signal, a file called SAVE, a full
disk) is agreed on at the end of a step, before anyone acts on it. The state of a run is its checkpoint and nothing else: step n
trains on the same samples with the same learning rate whether or not the run was stopped before it.
"""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..config import dump
from ..config.schema import Config, StackOptions
from ..config.sizes import format_bytes
from ..data.rows import Stream
from ..evaluate.held_out import open_suite, pack_held_out
from ..evaluate.publish import publish
from ..evaluate.suite import Suite, run_suite
from ..files import write_atomically
from ..launch.exits import CHECKPOINT, CONFIG, DATA, MEMORY, STOPPED, code_of
from ..observe.display import Display
from ..observe.flops import mfu, model_flops, peak_flops
from ..observe.logs import log_to
from ..observe.metrics import Metrics
from ..observe.rates import Gauge, StepTimer, largest, tokens_per_second
from ..observe.record import StepRecord
from ..observe.text import Facts, headline
from ..planner.search import Plan
from ..planner.shortage import gpu_shortage, host_shortage
from ..report import write_report
from ..stack import Stack
from ..storage import checkpoint as checkpoints
from .build import automatic_stack, is_preset, model_config, planned, prepared
from .device import device_of
from .ends import Failed
from .folder import RunFolder
from .optim import build_optimizer
from .samples import Loader, needs_packing, open_stream, pack_sources
from .step import NotFinite, Stepped, train_step

log = logging.getLogger("ithaca")


def train(config: Config, *, quiet: bool = False, text: str | None = None) -> int:
    """Train as this rank of the process group, or alone where there is none. -> exit code

    text: the resolved config as it is to be written down; None = as `dump` writes it.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    folder = RunFolder(config.run.folder)
    with ExitStack() as closing:
        if rank == 0:
            closing.enter_context(folder.claim())
        display = Display(config.run.name, config.train.steps, folder=config.run.folder, quiet=quiet, rank=rank)
        closing.enter_context(log_to(folder, rank, display))
        closing.enter_context(display)
        trainer = Trainer(config, folder, display, rank, text)
        try:
            with stop_signals(trainer.ask_to_stop):
                return trainer.run()
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
    def __init__(self, config: Config, folder: RunFolder, display: Display, rank: int, text: str | None) -> None:
        self.folder, self.display, self.rank = folder, display, rank
        self.device = device_of(config)
        self.hf = model_config(config.model, config.data.context)
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.plan: Plan | None = None
        self.stack = config.stack.chosen or self._agreed_stack(config, world)
        if self.plan is None and rank == 0 and self.device.type == "cuda":
            self.plan = planned(config, self.hf, world, self.device, self.stack)
        self.config = replace(config, stack=StackOptions.of(self.stack, config.stack.scratch))
        self.text = text if text is not None and config.stack.chosen else dump(self.config)
        self.step = 0
        self.tokens = 0
        self.stopping: str | None = None
        self.saving: checkpoints.Saving | None = None
        self.newest: str | None = None

    def _agreed_stack(self, config: Config, world: int) -> Stack:
        """What rank 0 chooses, on every rank: hosts differ in free memory and disk, and must not choose differently."""
        answer: list[Any] = [None]
        if self.rank == 0:
            try:
                stack, self.plan = automatic_stack(config, self.hf, world, self.device)
                answer = [(stack, None)]
            except (Failed, ValueError) as error:
                answer = [(None, (getattr(error, "exit_code", CONFIG), str(error)))]
        if world > 1:
            dist.broadcast_object_list(answer, src=0, device=_objects_on(self.device))
        stack, problem = answer[0]
        if problem is not None:
            raise Failed(*problem)
        return stack

    # -- from start to end ----------------------------------------------------------------------------------------------

    def run(self) -> int:
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
        self.optimizer = build_optimizer(run.model, config.train)
        self.loader = Loader(stream, run, config.train.rows, config.train.accumulation)
        resumed = self._resume()
        if self.rank == 0:
            self.folder.config.write_text(self.text)
            if self.plan is not None:
                write_atomically(self.folder.plan, json.dumps(self.plan.json(), indent=1) + "\n")
        self.display.say(headline(self._facts(stream, resumed)))
        metrics = Metrics(self.folder, config.log, self.rank, name=config.run.name)
        with metrics:
            metrics.event("resume" if resumed else "start", from_step=self.step)
            self._loop(metrics, suite)
            if self.stopping is not None:
                metrics.event("stop", cause=self.stopping, at_step=self.step)
        self.loader.close()
        where = self.newest or "nowhere: it had nothing new"
        if self.stopping is not None:
            self._status("stopped", cause=self.stopping, exit_code=STOPPED)
            self.display.say(
                f"stopped after step {self.step} by {self.stopping}; saved: {where}. The same command goes on"
            )
            return STOPPED
        self._status("finished", exit_code=0)
        self.display.say(
            f"finished {self.step:,} steps; checkpoint: {where}\n  export: ithaca export {self.folder.path} OUT"
            f"{self._report()}"
        )
        return 0

    def _report(self) -> str:
        """The page of the run; a run that is done does not fail for it."""
        if self.rank != 0:
            return ""
        try:
            page = write_report(self.folder.report / "index.html", run=self.folder.path)
        except (OSError, ValueError) as error:
            log.warning("no report was written: %s", error)
            return ""
        return f"\n  report: {page}"

    def _loop(self, metrics: Metrics, suite: Suite | None) -> None:
        train, timer = self.config.train, StepTimer()
        gauge = Gauge(self.device, self.model.store)
        peak = peak_flops(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        while self.step < train.steps and self.stopping is None:
            logged = metrics.due(self.step + 1)
            if logged:
                gauge.begin()
            self.display.doing(f"step {self.step + 1}")
            self._status("running")
            samples = self.loader.samples(self.step)
            batches = self._batches()
            timer.begin()
            try:
                done = train_step(self.model, self.optimizer, batches, train, self.step, samples)
            except NotFinite:  # on every rank: what is being written is good, and will be wanted
                self._finish_save(metrics)
                raise
            seconds = timer.end()
            self.step += 1
            self.tokens += done.tokens
            evaluated = self._evaluate(suite, metrics)
            if logged or evaluated is not None or self.step == train.steps:
                record = self._record(done, seconds, gauge, peak, samples, evaluated)
                metrics.step(record)
                left = timer.eta(train.steps - self.step)
                self.display.step(record, eta=left, typical=timer.typical, next_save=self._next_save())
                self._compare(record)
            self._after_step(metrics)
        self._finish_save(metrics)

    def _compare(self, record: StepRecord) -> None:
        """What was planned beside what came, once: after the second step, when nothing is built or pinned any more."""
        if self.plan is None or record.gpu_peak is None or self.compared or record.step < 2:
            return
        self.compared = True
        memory, seconds = self.plan.allocated, self.plan.speed.seconds * self.config.train.accumulation
        self.display.say(
            f"plan: {format_bytes(memory)} and {seconds:.1f} s a step; measured: {format_bytes(record.gpu_peak)} "
            f"({record.gpu_peak / memory - 1:+.1%}) and {record.seconds:.1f} s ({record.seconds / seconds - 1:+.1%})"
        )

    compared = False

    # -- parts of it ----------------------------------------------------------------------------------------------------

    def _data(self) -> tuple[Stream, Suite | None]:
        problem, evaluates = None, self.config.eval.every is not None
        try:
            if self.rank == 0 and needs_packing(self.config):
                pack_sources(self.config, self.display.say)  # done already, unless others than we started this job
            if self.rank == 0 and evaluates:
                pack_held_out(self.config, self.display.say)
        except (ValueError, OSError) as error:
            problem = str(error)
        self.model.mesh.agree(problem)
        stream = open_stream(self.config, self.hf.vocab_size)
        return stream, open_suite(self.config, self.hf, self.model.mesh.data.size) if evaluates else None

    def _batches(self):
        try:
            return self.loader.batches(self.step, last=self.step + 1 == self.config.train.steps)
        except (ValueError, OSError) as error:
            raise Failed(DATA, str(error)) from error

    def _resume(self) -> str | None:
        """Load the newest checkpoint, if there is one. -> its name"""
        if self.rank == 0:
            checkpoints.remove_unfinished(self.folder.checkpoints)
        found = self._from_first(lambda: _name(checkpoints.latest(self.folder.checkpoints)))
        if found is None:
            return None
        self.display.doing(f"loading {found}")
        try:
            extra = checkpoints.load(self.folder.checkpoints / found, self.model, self.optimizer)
        except ValueError as error:
            raise Failed(CHECKPOINT, str(error)) from error
        self.step, self.tokens, self.newest = extra["step"], extra["tokens"], f"checkpoints/{found}"
        if extra["samples"] != self.step * self.config.train.rows:
            raise Failed(
                CHECKPOINT,
                f"{found} was made with train.rows={extra['samples'] // max(self.step, 1)}, this run has {self.config.train.rows}: "
                "samples would be skipped or repeated; keep train.rows, or start in another run.folder",
            )
        return found

    def _from_first(self, ask: Callable[[], Any]) -> Any:
        """What rank 0 says, on every rank."""
        answer = [ask() if self.rank == 0 else None]
        if self.model.mesh.world.size > 1:
            dist.broadcast_object_list(answer, src=0, device=_objects_on(self.device))
        return answer[0]

    def _record(
        self, done: Stepped, seconds: float, gauge: Gauge, peak: float | None, samples: range, evaluated: float | None
    ) -> StepRecord:
        world = self.model.mesh.world
        lengths = [length for sample in samples for length in self.loader.stream.documents(sample)]
        trained = sum(p.numel() for p in self.model.model.parameters() if p.requires_grad)
        work = model_flops(self.hf, lengths, adapters=trained if self.config.model.lora else None)
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
            **largest(gauge.read(), world, self.device),
        )

    def _evaluate(self, suite: Suite | None, metrics: Metrics) -> float | None:
        """After every n-th step: everything `eval` asks for, on the same texts every time. -> loss on held-out data"""
        every = self.config.eval.every
        if suite is None or every is None or self.step % every:
            return None
        record = run_suite(self.model, suite, self.step, before=self._before_forward)
        if record is None:
            return None
        publish(record, self.folder, metrics, self.rank)
        return record["held_out"]["loss"] if "held_out" in record else None

    def _before_forward(self, words: str) -> bool:
        """Each forward of an evaluation begins here. -> whether to leave off"""
        self.display.doing(words)
        return False

    # -- saving and stopping --------------------------------------------------------------------------------------------

    def ask_to_stop(self, name: str) -> None:
        self.asked = name

    asked: str | None = None

    def _after_step(self, metrics: Metrics) -> None:
        """What one rank wants, all do: stop, or save now."""
        wish = self.folder.path / "SAVE"
        wants = {"stop": float(self.asked is not None), "save": float(self.rank == 0 and wish.exists())}
        agreed = largest(wants, self.model.mesh.world, self.device)
        every = self.config.checkpoint.every
        last = self.step == self.config.train.steps
        if agreed["stop"]:
            self.stopping = self._from_first(lambda: self.asked) or "a signal to another rank"
        if agreed["stop"] or agreed["save"] or last or (every is not None and self.step % every == 0):
            self._finish_save(metrics)
            self._save(metrics)
            if self.rank == 0:
                wish.unlink(missing_ok=True)
        elif self.saving is not None:
            late = {"late": float(not self.saving.done())}
            if not largest(late, self.model.mesh.world, self.device)["late"]:
                self._finish_save(metrics)

    def _next_save(self) -> int | None:
        every, steps = self.config.checkpoint.every, self.config.train.steps
        return steps if every is None else min(steps, (self.step // every + 1) * every)

    def _save(self, metrics: Metrics) -> None:
        self._status("saving")
        self.display.doing("saving")
        extra = {
            "step": self.step,
            "tokens": self.tokens,
            "samples": self.step * self.config.train.rows,
            "config": self.text,
        }
        now = self.stopping is None and self.step < self.config.train.steps and self.config.checkpoint.asynchronous
        self.saving = checkpoints.save(
            self.folder.checkpoints, self.model, self.optimizer, extra, step=self.step, asynchronous=now
        )
        if not now:
            self._finish_save(metrics)

    def _finish_save(self, metrics: Metrics) -> None:
        """Publish what is being written; it counts from here on."""
        if self.saving is None:
            return
        begin = time.perf_counter()
        path, self.saving = self.saving.wait(), None
        self.newest = f"checkpoints/{path.name}"
        if self.rank == 0:
            options = self.config.checkpoint
            checkpoints.prune(self.folder.checkpoints, options.keep_last, options.keep_every)
        metrics.event("save", checkpoint=path.name, waited=round(time.perf_counter() - begin, 3))
        log.info("saved %s", path)

    # -- words ----------------------------------------------------------------------------------------------------------

    def _facts(self, stream: Stream, resumed: str | None) -> Facts:
        run, config = self.model, self.config
        parameters = list(run.model.parameters())
        kernels = {kernel.name for kernel in run.kernels.chosen.values()}
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU process"
        return Facts(
            name=config.run.name, folder=config.run.folder, model=_model_name(config),
            parameters=sum(p.numel() for p in parameters), trained=sum(p.numel() for p in parameters if p.requires_grad),
            dtype=config.model.dtype, context=config.data.context, rows=config.train.rows, steps=config.train.steps,
            devices=run.mesh.world.size, device=device, stack=self.stack, kernel=", ".join(sorted(kernels)),
            nodes=config.launch.nodes, done=self.step, checkpoint=resumed, data=stream.name,
            save_every=config.checkpoint.every, eval_every=config.eval.every,
        )  # fmt: skip

    def _status(self, state: str, **about: Any) -> None:
        if self.rank == 0:
            about = {"step": self.step, "steps": self.config.train.steps, "checkpoint": self.newest, **about}
            self.folder.write_status(state, resume=f"ithaca train {self.folder.config}", **about)

    def failed(self, error: BaseException) -> None:
        if not isinstance(error, SystemExit | KeyboardInterrupt):
            self._status(
                "failed", cause=(str(error).splitlines() or [type(error).__name__])[0], exit_code=code_of(error)
            )


@contextmanager
def stop_signals(ask: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGUSR1 ask the run to save and stop after this step; a second one stops at once. Within two seconds
    they count as one: schedulers signal the launcher and its ranks together, and the launcher passes its own on."""
    asked: list[float] = []

    def handle(number: int, _: Any) -> None:
        if not asked:
            asked.append(time.monotonic())
            ask(signal.Signals(number).name)
        elif time.monotonic() - asked[0] > 2.0:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _objects_on(device: torch.device) -> torch.device:
    return device if device.type == "cuda" else torch.device("cpu")


def _name(path: Path | None) -> str | None:
    return None if path is None else path.name


def _model_name(config: Config) -> str:
    return config.model.folder if is_preset(config.model) else Path(config.model.folder).name
