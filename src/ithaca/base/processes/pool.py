"""A persistent pool of local processes that share a real torch.distributed process group.

Problem. A claim about eight ranks is proven on eight ranks. Starting eight Python processes that each import torch and
transformers costs half a minute on a small machine, and then one rank that raises leaves the other seven waiting in a
collective for ever. Both together are why distributed code usually goes untested.

Method. Start once, reuse, and never wait without a limit.

- One process imports torch and transformers (seconds, once); each worker is a fork of it (milliseconds). All pools of
  this process share it (fork_server.py).
- `run(fn, *args, world=w)` calls a module-level function on ranks 0..w-1 and returns their results in rank order. The
  parent hosts one TCPStore on the loopback interface. Ranks form a default group of exactly w under a fresh prefix of
  that store, and keep it until w changes or a run fails. The parent alone keeps the time; the group has no timeout.
- A run leaves no group behind: those that `fn` made are destroyed before the next run. Without this, every device mesh
  of every test would keep its threads and sockets. DTensor's caches go too, because they remember meshes by value.
- A worker that raises answers with its traceback. If its peers are not done a few seconds later they wait for it in
  vain. Then, or when a rank dies or time is up, the parent asks every silent rank for its Python stack, kills
  all workers, raises one `WorkerError`, and starts new ones at the next run.
- When the parent dies, by whatever means, so do the workers (worker.py).

Arguments and results travel by pickle, tensors by value; return CPU tensors. Every run starts from seed 0.

Not supported: functions that cannot be imported by name (lambdas, closures), and several machines. Two ranks share a GPU only
if asked to (gpu_sharing.py). On CUDA any failure restarts the pool, because a CUDA context does not outlive its errors.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist

from ..gpu_sharing import sharing_variables, why_not_shared
from .fork_server import MODELS
from .rank import LOOPBACK, NEVER, Answer, Failure, call, join, settle, work
from .worker import START_SECONDS, Worker, ready_template, receive, stop

_GRACE_SECONDS = 5.0  # for the peers of a rank that raised
_WORD_SECONDS = 2.0  # for one that dies or hangs to say how or where
_LOOK_SECONDS = 0.5  # between two looks whether one has died that left its pipe to a child of its own
_PRELOAD = ("ithaca.base.processes.rank", *MODELS)


class WorkerError(RuntimeError):
    """A run failed. The first line says which ranks and why; tracebacks and stacks follow.

    `ranks` are the ranks at fault; `kind` is the name of the exception they raised, "died" or "timeout".
    """

    def __init__(self, text: str, ranks: Sequence[int], kind: str):
        super().__init__(text)
        self.ranks = list(ranks)
        self.kind = kind


class Workers:
    """`count` local workers. Use as a context manager; processes start at the first run that needs them."""

    def __init__(
        self,
        count: int,
        *,
        device: str = "cpu",
        threads: int = 1,
        timeout: float = 120.0,
        preload: Sequence[str] = (),
        share_gpu: bool = False,
    ):
        if count < 1:
            raise ValueError(f"count must be at least 1, not {count}")
        if device not in ("cpu", "cuda"):
            raise ValueError(f'device must be "cpu" or "cuda", not {device!r}')
        gpus = torch.cuda.device_count() if device == "cuda" else 0
        if device == "cuda" and share_gpu:
            why = why_not_shared()
            if why is not None:
                raise ValueError(f"{count} ranks cannot share {gpus} GPUs: {why}")
        elif device == "cuda" and gpus < count:
            raise ValueError(
                f'{count} CUDA workers need {count} GPUs, here are {gpus}: take fewer workers, device="cpu", or share_gpu=True for '
                "a rehearsal"
            )
        self.count = count
        self.device = device
        self.gpus = gpus
        self.share_gpu = share_gpu
        self.threads = threads
        self.timeout = timeout
        self.preload = tuple(preload)
        self._workers: list[Worker] = []
        self._store: dist.TCPStore | None = None
        self._generation = 0  # how many groups were formed
        self._world = 0  # size of the group that stands; 0: form a new one before the next run

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, fn: Callable[..., Any], *args: Any, world: int | None = None, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on ranks 0..world-1 (default: all); return the results in rank order."""
        world = self.count if world is None else world
        if not 1 <= world <= self.count:
            raise ValueError(f"world must be between 1 and the {self.count} workers of this pool, not {world}")
        try:
            task = pickle.dumps((fn, args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"cannot send {fn!r} to workers: {error}. The function must be at module level, its arguments picklable"
            ) from error
        seconds = self.timeout if timeout is None else timeout
        try:
            self._start(world)
            if self._world != world:
                self._form_group(world, seconds)
            self._send(range(world), call, sys.path, task)
            return self._collect(range(world), seconds)
        except WorkerError:
            raise  # _collect has judged whether the pool can go on
        except BaseException:  # Ctrl-C, a test's own timeout: nobody listens to the workers any more
            self._stop()
            raise

    def close(self) -> None:
        """End all workers. A later run starts new ones."""
        atexit.unregister(self.close)
        self._stop()
        self._store = None

    def _start(self, world: int) -> None:
        if not all(worker.idle for worker in self._workers):
            self._stop()  # one died between runs: nothing was lost, begin again
        missing = range(len(self._workers), world)
        if not missing:
            return
        if self._store is None:
            self._store = _host_store()
            atexit.register(self.close)
        self._world = 0
        # torch's own number of threads does not hold for the libraries below it, which then spin beside ranks that have work
        environ = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        if self.share_gpu:
            environ |= sharing_variables(self.count, self.gpus)
        template = ready_template([*_PRELOAD, *self.preload], environ)
        try:
            for rank in missing:
                self._workers.append(Worker(f"ithaca rank {rank}", work, rank, template=template, environ=environ))
            self._send(missing, settle, self.device, self.gpus, self.threads, self._store.port)
            self._collect(missing, START_SECONDS, "while starting")
        except WorkerError:
            self._stop()  # half a start is none
            raise

    def _form_group(self, world: int, seconds: float) -> None:
        everyone = range(len(self._workers))  # ranks beyond the world leave the group they were in
        self._world = 0
        self._generation += 1
        self._send(everyone, join, self._generation, world)
        self._collect(everyone, seconds, "while forming the process group")
        self._world = world

    def _stop(self) -> None:
        stop(self._workers)
        self._workers = []
        self._world = 0

    def _send(self, ranks: Sequence[int], do: Callable[..., Any], *args: Any) -> None:
        message = pickle.dumps((do, args))
        for rank in ranks:
            with suppress(OSError):  # a dead worker is reported by _collect
                self._workers[rank].pipe.send_bytes(message)

    def _collect(self, ranks: Sequence[int], seconds: float, phase: str = "") -> list[Any]:
        """One answer from each rank, or a WorkerError after which the pool is fit for the next run."""
        answers: dict[int, Answer] = {}
        died: dict[int, str] = {}
        silent = list(ranks)
        limit = time.monotonic() + seconds
        while silent and not died:
            workers = {rank: self._workers[rank] for rank in silent}
            seconds_left = max(0.0, min(limit - time.monotonic(), _LOOK_SECONDS))
            ready = wait([worker.pipe for worker in workers.values()], seconds_left)
            if not ready and time.monotonic() >= limit:
                break
            for rank, worker in workers.items():
                if worker.pipe not in ready and not worker.process.ended():
                    continue
                silent.remove(rank)
                try:
                    if not worker.pipe.poll():
                        raise EOFError  # it has died, and a child of its own has its pipe
                    answers[rank] = receive(worker.pipe)
                except (EOFError, OSError):
                    died[rank] = worker.cause_of_death(_WORD_SECONDS)
            if any(answer.failure for answer in answers.values()):
                limit = min(limit, time.monotonic() + _GRACE_SECONDS)

        failures = {rank: failure for rank in sorted(answers) if (failure := answers[rank].failure)}
        if failures or not all(answer.group_intact for answer in answers.values()):
            self._world = 0
        if not (failures or died or silent):
            return [answers[rank].value for rank in ranks]
        stacks = {} if died else self._stacks(silent)
        if died or silent or self.device == "cuda":
            self._stop()
        raise _error(len(ranks), failures, died, stacks, seconds, phase)

    def _stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        for rank in ranks:
            self._workers[rank].ask_for_stack()
        until = time.monotonic() + _WORD_SECONDS
        return {rank: self._workers[rank].stack(until - time.monotonic()) for rank in ranks}


def _error(
    world: int,
    failures: dict[int, Failure],
    died: dict[int, str],
    stacks: dict[int, str],
    seconds: float,
    phase: str,
) -> WorkerError:
    """Say first what happened first; put what probably followed from it below."""
    phase = f" {phase}" if phase else ""
    first = min(failures.values(), key=lambda failure: failure.moment, default=None)
    if died:
        ranks, kind = list(died), "died"
        headline = f"{_ranks(ranks, world)} died{phase}: {', '.join(dict.fromkeys(died.values()))}"
    elif first:
        ranks, kind = [rank for rank in failures if failures[rank].headline == first.headline], first.kind
        headline = f"{_ranks(ranks, world)} {first.headline}"
    else:
        ranks, kind = list(stacks), "timeout"
        headline = f"{_ranks(ranks, world)} did not answer within {seconds:g} s{phase}"
    parts = [headline]
    if first:
        origin = next(rank for rank in failures if failures[rank] is first)
        parts.append(f"Traceback of rank {origin}:\n{first.traceback}")
        for rank, failure in failures.items():
            if failure.headline != first.headline:
                parts.append(f"{_ranks([rank], world)} {failure.headline}")
    for stack in dict.fromkeys(stacks.values()):
        where = _ranks([rank for rank in stacks if stacks[rank] == stack], world)
        parts.append(f"{where} stood here (most recent call first) and had to be stopped:\n{stack}")
    return WorkerError("\n\n".join(parts), ranks, kind)


def _ranks(ranks: list[int], world: int) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == world:
        return f"all {world} ranks"
    return f"ranks {', '.join(map(str, ranks))}"


def _host_store() -> dist.TCPStore:
    """The store of all groups of a pool. It listens on loopback only; by itself TCPStore would listen everywhere."""
    listener = socket.create_server((LOOPBACK, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(), timeout=NEVER
    )
