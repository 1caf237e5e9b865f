"""Hangs and lost hosts in a job that others have started: torchrun and srun watch processes, not progress.

There is no launcher of ours to listen, so each rank writes its signs of life (heartbeat.py) into the job's store, and the first
rank of each host reads those of all. What it may find:

    a rank that stands in a section for too long     -> HANG; the one that hangs is named (hang.py)
    no sign of life from ranks                       -> LOST where they are all of a host: it is down or cut off; else HANG
    no answer from the store                         -> LOST: this host is cut off, or that of rank 0 is down

The verdict goes into the store; every rank that reads it writes down its Python stacks and ends with its exit code, so the
scheduler sees it from all. Whoever cannot reach the store comes to a verdict of its own. Restarting is the scheduler's.

All of it happens in threads: a main thread that waits for a lost host would wait for minutes.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ...base import exits
from ...base.processes.system import say
from ...base.run_folder import RunFolder
from ...config.schema import Timeouts
from .environment import Job
from .hang import Sign, describe_hang, hanging_ranks
from .heartbeat import PERIOD, Beat

if TYPE_CHECKING:
    import torch.distributed as dist

_ANSWER_SECONDS = 5.0  # for the store
_OTHERS_SECONDS = 15.0  # after its own limit, a rank that does not judge waits so long for a verdict
_DONE = "done"


@dataclass
class Peers:
    """Carries this rank's beats into the store, and looks at those of the others."""

    job: Job
    timeouts: Timeouts
    folder: RunFolder
    open_store: Callable[[float], dist.Store]
    store: dist.Store | None = None
    answered: float = field(default_factory=time.monotonic)
    heard: dict[int, tuple[str, float]] = field(default_factory=dict)  # what each rank said last, and when that changed
    beat: Beat | None = None
    talker: threading.Thread | None = None
    count: int = 0

    def carry(self, beat: Beat) -> None:
        self.beat = beat
        if threading.current_thread() is threading.main_thread():
            return
        if self.talker is None:
            self.talker = threading.Thread(target=self._keep_talking, name="ithaca-peers", daemon=True)
            self.talker.start()
        if beat.section == _DONE:
            self.talker.join(_ANSWER_SECONDS)
            return
        now = time.monotonic()
        mute = now - self.answered
        if self.timeouts.silence is not None and mute > self.timeouts.silence:
            where = f"{self.job.address}:{self.job.port}"
            text = f"the host of rank 0 ({where}) gave no answer for {mute:.0f} s: it is down, or this host is cut off"
            self._end(exits.LOST, text)
        judge = self.job.local_rank == 0
        late = beat.limit is not None and beat.age > beat.limit + (0 if judge else _OTHERS_SECONDS)
        if judge and (verdict := self._verdict(late, now)):
            self._announce(*verdict)
        elif late:
            self._end(
                exits.HANG,
                describe_hang([Sign(self.job.rank, self._who(self.job.rank), now, beat)], now, self.job.world),
            )

    def _keep_talking(self) -> None:
        """A request to a store that is out of reach may never come back: hence a thread of its own."""
        period = PERIOD if self.timeouts.silence is None else min(5.0, max(PERIOD, self.timeouts.silence / 10))
        done = False
        while not done:
            assert self.beat is not None
            done = self.beat.section == _DONE
            try:
                self._talk(self.beat)
                self.answered = time.monotonic()
            except RuntimeError:  # torch's errors of a store
                self.store = None  # what it still sends would be taken for the answer to something else
            until = time.monotonic() + period
            while not done and time.monotonic() < until and self.beat.section != _DONE:
                time.sleep(0.05)

    def _talk(self, beat: Beat) -> None:
        if self.store is None:
            self.store = self.open_store(_ANSWER_SECONDS)
        self.count += 1
        about = {"beat": asdict(beat), "host": socket.gethostname(), "count": self.count}
        self.store.set(f"beat/{self.job.rank}", json.dumps(about))
        if self.store.check(["verdict"]):
            verdict = json.loads(self.store.get("verdict"))
            self._end(verdict["code"], verdict["text"], quiet=True)
        names = [f"beat/{rank}" for rank in range(self.job.world)]
        if self.job.local_rank == 0 and self.store.check(names):
            for rank, said in enumerate(self.store.multi_get(names)):
                text = said.decode()
                if self.heard.get(rank, ("", 0.0))[0] != text:
                    self.heard[rank] = (text, time.monotonic())

    def _verdict(self, late: bool, now: float) -> tuple[int, str] | None:
        signs, hosts = [], {}
        for rank, (text, when) in sorted(self.heard.items()):
            said = json.loads(text)
            if said["beat"]["section"] != _DONE:
                hosts[rank] = said["host"]
                signs.append(Sign(rank, self._who(rank), when, Beat(**said["beat"])))
        until = min(now, self.answered)  # since then nobody was heard: that is the store's silence, not theirs
        silent = [sign for sign in signs if sign.silent(until, self.timeouts.silence)]
        if silent:
            lost = {hosts[sign.rank] for sign in silent}
            alive = {hosts[sign.rank] for sign in signs if sign not in silent}
            text = describe_hang(silent, now, self.job.world, silent=True)
            if lost & alive:
                return exits.HANG, text
            return exits.LOST, f"{text}: {', '.join(sorted(lost))} is down or cut off"
        if late and signs:
            return exits.HANG, describe_hang(hanging_ranks(signs, now), now, self.job.world)
        return None

    def _who(self, rank: int) -> str:
        host = json.loads(self.heard[rank][0])["host"] if rank in self.heard else socket.gethostname()
        return f"rank {rank} on {host}"

    def _announce(self, code: int, text: str) -> None:
        """To all ranks that can still read it. The first of several judges is the one who speaks."""
        quiet = False
        with suppress(RuntimeError):
            store = self.open_store(_ANSWER_SECONDS)  # the other one may be stuck in a request
            quiet = store.add("judges", 1) > 1
            store.set("verdict", json.dumps({"code": code, "text": text}))
        if self.job.rank != 0:
            time.sleep(1.0)  # rank 0 writes the status, also where another host has found it
        self._end(code, text, quiet)

    def _end(self, code: int, text: str, quiet: bool = False) -> None:
        """The process ends here; its main thread may be stuck."""
        text += f"\n  stacks: {self.folder.stacks}"
        with suppress(OSError):
            self.folder.stacks.mkdir(parents=True, exist_ok=True)
            with open(self.folder.stacks / f"rank-{self.job.rank}.txt", "w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        if not quiet:
            say(text)
        if self.job.rank == 0:
            with suppress(OSError, ValueError):
                before: dict[str, Any] = self.folder.read_status() or {}
                kept = {name: before[name] for name in ("step", "steps", "checkpoint", "resume") if name in before}
                self.folder.write_status("failed", **kept, cause=text.partition("\n")[0], exit_code=code)
            time.sleep(2.0)  # rank 0 may host the store that the others read the verdict from
        os._exit(code)


def watch_self(folder: RunFolder) -> Callable[[Beat], None]:
    """For a run of one process: nobody else would notice that it hangs."""

    def carry(beat: Beat) -> None:
        if beat.limit is not None and beat.age > beat.limit:
            alone = Job(0, 0, 1, 1, 0, "", 0, "alone")
            now = time.monotonic()
            text = describe_hang([Sign(0, "the run", now, beat)], now, 1)
            Peers(alone, Timeouts(), folder, _no_store)._end(exits.HANG, text)

    return carry


def _no_store(_: float) -> dist.Store:
    raise RuntimeError("there is no job")


def watch_peers(job: Job, timeouts: Timeouts, folder: RunFolder) -> Callable[[Beat], None]:
    """-> what carries the beats of this rank, for `heartbeat.begin`. After `join`: the store is there."""
    import torch.distributed as dist

    def open_store(seconds: float) -> dist.Store:
        client = dist.TCPStore(
            job.address, job.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds)
        )
        return dist.PrefixStore(f"ithaca/{job.attempt}/heartbeat", client)

    return Peers(job, timeouts, folder, open_store).carry
