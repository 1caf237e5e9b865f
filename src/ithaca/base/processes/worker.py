"""A process that runs one function, and the pipe that its parent talks to it through: what the pool of ranks (pool.py) and the
packing of data (tasks.py) are made of.

    parent    Worker    starts it (fork_server.py); sends, receives; says how it died, or where it stands; ends it
    child     main      connects, becomes like its parent (folder, sys.path, what a script has at module level), calls the function

A worker dies with its parent, by whatever means the parent dies: the kernel sees to it, also in the middle of a computation. The
function must be importable by name. What goes through the pipe is pickled, tensors by value: nobody else has the pipe.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing.process
import multiprocessing.spawn
import multiprocessing.util
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from .fork_server import TEMPLATE, Template, serve, start
from .process import how_it_ended
from .signals import SIGNALS
from .system import DUMP, die_with, set_name

_PIPE, _STACKS = "ITHACA_PIPE", "ITHACA_STACKS"  # the variables with the numbers of its open files
START_SECONDS = 120.0  # for the imports, on a cold disk
_KILL_SECONDS = 10.0  # one that is still there then is stuck in the kernel: nothing more to do


def command(preload: Sequence[str] = ()) -> list[str]:
    """What a worker runs, or the template of workers, which imports `preload`."""
    line = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main({list(preload)!r})"
    flags = multiprocessing.util._args_from_interpreter_flags()  # pyright: ignore
    return [sys.executable, *flags, "-c", line]


_template: Template | None = None


def ready_template(preload: Sequence[str], environ: dict[str, str]) -> Template:
    """This process's, from which workers are forked. If it runs, its first preload list holds and the rest is slower."""
    global _template
    if _template is None:
        _template = Template(command(preload))
        atexit.register(_template.close)
    _template.prepare(environ, None, seconds=START_SECONDS)
    return _template


class Worker:
    """As its parent sees it."""

    def __init__(
        self, name: str, function: Callable[..., None], *args: Any, environ: Mapping[str, str], template: Template | None = None,
        files: Sequence[int] = (1, 2),
    ) -> None:  # fmt: skip
        """Calls function(pipe, *args). name: for ps; at most 15 characters. files: its stdout and stderr."""
        about = multiprocessing.spawn.get_preparation_data(name)
        del about["authkey"]  # for multiprocessing's own servers
        messages = [pickle.dumps(about), pickle.dumps((function, args))]
        self.pipe, theirs = Pipe()
        self._stacks = os.memfd_create(f"stacks of {name}")
        with theirs:
            named = {_PIPE: theirs.fileno(), _STACKS: self._stacks}
            self.process = start(command(), environ, name, named=named, template=template, files=files)
        with suppress(OSError):  # one that has died is noticed when it is listened to
            for message in messages:
                self.pipe.send_bytes(message)

    @property
    def idle(self) -> bool:
        """Alive, with nothing to say."""
        return not self.pipe.poll() and not self.process.ended()

    def cause_of_death(self, seconds: float) -> str:
        """Of one whose pipe has ended, which comes before its own end is known."""
        status = self.process.wait(seconds)
        return "it closed its pipe" if status is None else how_it_ended(status)

    def ask_for_stack(self) -> None:
        self.process.send(DUMP)

    def stack(self, seconds: float) -> str:
        """Where it stands, as its faulthandler tells, without the frames of this folder."""
        until, text = time.monotonic() + seconds, b""
        # where the main thread began, and that is the last one
        while not text.endswith(b" in <module>\n") and time.monotonic() < until and not self.process.ended():
            time.sleep(0.01)
            text = os.pread(self._stacks, os.fstat(self._stacks).st_size, 0)
        frames = [line for line in text.decode(errors="replace").splitlines() if line.startswith("  ")]
        ours = (f'"{Path(__file__).parent}{os.sep}', "/multiprocessing/", "<string>")
        return "\n".join(line for line in frames if not any(name in line for name in ours)) or "  (no Python stack)"


def stop(workers: Sequence[Worker]) -> None:
    """At once, with all they have started."""
    for worker in workers:
        worker.process.send(signal.SIGKILL, children=True)
    for worker in workers:
        worker.process.wait(_KILL_SECONDS)
        worker.pipe.close()
        os.close(worker._stacks)


def send(pipe: Connection, message: Any) -> None:
    pipe.send_bytes(pickle.dumps(message))


def receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def main(preload: Sequence[str]) -> None:
    """In the worker. In a template: returns in each of its forks."""
    if TEMPLATE in os.environ:
        serve(preload)
    else:
        die_with(os.getppid())  # if it is gone already, so is the other end of the pipe
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    pipe = Connection(int(os.environ.pop(_PIPE)))
    faulthandler.enable()
    faulthandler.register(DUMP, file=int(os.environ.pop(_STACKS)), all_threads=True)
    with suppress(EOFError, ConnectionError):  # the parent is done, or gone
        _become_like_the_parent(receive(pipe))
        function, args = receive(pipe)
        function(pipe, *args)
    os._exit(0)  # not through the interpreter's end: it would wait for threads


def _become_like_the_parent(about: dict[str, Any]) -> None:
    set_name(about["name"])
    process: Any = multiprocessing.process.current_process()
    process._inheriting = True  # a script that starts workers as it is imported is refused, in words of multiprocessing
    multiprocessing.spawn.prepare(about)
    del process._inheriting
