"""What takes longer than typing, in processes of their own: they can be ended in the middle, and typing is not slower beside them.

A page has a place for each of its set-ups; a new question there ends the one before. Processes are forks of one that has imported
the planner (base/processes), so that one more costs milliseconds. Answers that are whole are remembered.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import OrderedDict
from collections.abc import Iterator
from multiprocessing.connection import Connection

from ...base.processes.fork_server import Template
from ...base.processes.worker import Worker, command, receive, send, stop
from .answers import Piece, longest_counted, pieces
from .asking import Asked, read

MOST = 4  # at a time; beyond, the oldest is ended
REMEMBERED = 64
BEAT = 0.25  # seconds after which whoever listens is told that there is nothing new
_WORD_SECONDS = 2.0

Key = tuple[tuple[str, str], ...]


class Slow:
    """Start it where the process's main thread is: what it starts ends with the thread that started it."""

    def __init__(self) -> None:
        self._template = Template(command(["ithaca.observe.plans.slow"]))
        self._running: OrderedDict[str, Worker] = OrderedDict()
        self._known: OrderedDict[Key, list[Piece]] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        self._template.prepare(os.environ, None)

    def known(self, asked: Asked) -> list[Piece]:
        """What was found out about a question before."""
        with self._lock:
            return list(self._known.get(asked.question, []))

    def ask(self, place: str, asked: Asked, *, longest: bool = False) -> Iterator[Piece | None]:
        """Pieces of the answer as they come; None now and then, when there is nothing new. Ends early if another question takes its
        place. longest: of a model without arithmetic, the longest context alone."""
        found = [] if longest else self.known(asked)
        yield from found
        if found:
            return
        with self._lock:
            oldest = list(self._running)[: max(0, len(self._running) + 1 - MOST)]
            for other in [place] if place in self._running else oldest:
                self._running.pop(other).process.send(signal.SIGKILL, children=True)
            worker = Worker("ithaca plan", _work, asked.words, longest, environ=os.environ, template=self._template)
            self._running[place] = worker
        try:
            while True:
                if not worker.pipe.poll(BEAT):
                    yield None
                    continue
                piece = receive(worker.pipe)
                if piece["part"] == "end":
                    break
                if piece["part"] != "said":
                    found.append(piece)
                yield piece
        except (EOFError, OSError):
            if self._running.get(place) is worker:
                yield {
                    "part": "trouble",
                    "value": f"the planner's process ended: {worker.cause_of_death(_WORD_SECONDS)}",
                }
            return
        finally:
            with self._lock:
                if self._running.get(place) is worker:
                    del self._running[place]
            stop([worker])
        if not longest and not any(piece["part"] == "trouble" for piece in found):
            with self._lock:
                self._known[asked.question] = found
                while len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)

    def close(self) -> None:
        with self._lock:
            for worker in self._running.values():
                worker.process.send(signal.SIGKILL, children=True)
            self._running.clear()
        self._template.close()


def _work(pipe: Connection, words: dict[str, str], longest: bool) -> None:
    """In the process."""
    asked = read(words)

    def say(line: str) -> None:
        send(pipe, {"part": "said", "value": line})

    try:
        for piece in (longest_counted if longest else pieces)(asked, say):
            send(pipe, piece)
    except ValueError as error:
        send(pipe, {"part": "trouble", "value": str(error)})
    send(pipe, {"part": "end"})
