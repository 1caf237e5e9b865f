"""Workers as forks of one process that has done the imports.

A worker spends its first seconds importing torch and transformers, and again at every restart, and so does each of its neighbours.
So the launcher starts the command once, as a template: it goes as far as `serve`, imports what workers need, and waits. A worker is
a fork of it (milliseconds) that goes on from there with variables and open files of its own, as if it had been started by itself.

    launcher    Template     starts the process; asks it for workers
                start        a worker: forked, or where that cannot be, by the command
    template    serve        imports, waits, forks; returns in each worker

The launcher is that of a run (training/launch), or whoever has a pool of ranks (pool.py).

Whose child     A worker is forked twice, so that the launcher adopts it: it is waited for and signalled, and dies with the launcher
                like one that was started by itself. The death of the template harms nobody.
When not        The template must be fit to be forked: one thread, no GPU touched. If it is not, or fails, or is slow, or a signal
                comes meanwhile, it ends, and workers are started one by one. The log of rank 0 says why.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from .process import Process, adopting_orphans
from .signals import held_back
from .system import die_with, set_name

TEMPLATE = "ITHACA_TEMPLATE"  # the variable that says where orders come from
READY_SECONDS = 120.0  # for its imports, on a cold disk
_ANSWER_SECONDS = 10.0  # for a fork
_CUDA_ERROR_NOT_INITIALIZED = 3  # cuda.h
_READY = b"ready"
# What every process imports that computes. Of transformers the submodules that model files are built from, no model file.
MODELS = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.modeling_rope_utils",
    "transformers.masking_utils",
)
# Without these, imports start threads or touch a GPU. They hold in the template, and forks get them as they were.
FIT = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy's and scipy's; torch has threads of its own
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator; pandas brings it in, and so may transformers
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # transformers asks whether there is a GPU; CUDA would begin, to answer
}


class Template:
    """In the launcher: the process that workers are forked from. It is kept from attempt to attempt."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self.environ: dict[str, str] = {}
        self.log: Path | None = None
        self.refused = False  # it would be again
        self.ready = False  # not if its start was interrupted
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None

    def prepare(
        self, environ: Mapping[str, str], log: Path | None, signals: Sequence[int] = (), seconds: float | None = None
    ) -> bool:
        """Start it, unless it waits already. False: workers have to be started one by one.

        environ: that of the workers, as far as they have the same. log: for what it says; None = stderr.
        signals: those that have arrived, which end the waiting.
        """
        if self._answers() or self.refused:
            return not self.refused
        self.close()
        self.log = log
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.environ = {**environ, **FIT, TEMPLATE: str(theirs.fileno())}
        with theirs, open(self.log or os.dup(2), "ab") as file, held_back():
            self.process = subprocess.Popen(
                self.command, env=self.environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        until, said = time.monotonic() + (seconds or READY_SECONDS), None
        while said is None and time.monotonic() < until and not signals:
            said = self._receive() if self._hears(0.05) else None
        self.ready = said == _READY
        if self.ready:
            return True
        if signals:
            self.close()
        else:
            self.refused = True
            self._give_up("took too long" if said is None else "could not be used")
        return False

    def fork(self, environ: Mapping[str, str], name: str, files: Sequence[int], named: Mapping[str, int]) -> int | None:
        """-> its process id; None: there is none, start it in another way. files: stdout, stderr, and what `start` says."""
        if self.control is None:
            return None
        order = {
            "set": {variable: value for variable, value in environ.items() if self.environ.get(variable) != value},
            "unset": [variable for variable in self.environ if variable not in environ],
            "named": list(named),
            "name": name,
            "launcher": os.getpid(),
        }
        try:
            with _forking, adopting_orphans():
                socket.send_fds(self.control, [json.dumps(order).encode()], [*files[:2], *named.values(), *files[2:]])
                answer = self._receive() if self._hears(_ANSWER_SECONDS) else b""
        except OSError:
            answer = b""
        if not answer:
            self._give_up("has failed")
            return None
        return int(answer)

    def _give_up(self, why: str) -> None:
        self.close()
        with open(self.log or os.dup(2), "a") as file:
            file.write(f"ithaca: the process that workers are forked from {why}; they are started one by one\n")

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.ready = False
        if self.control is not None:
            self.control.close()
            self.control = None
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _answers(self) -> bool:
        return self.ready and self.process is not None and self.process.poll() is None and not self._hears(0.0)

    def _hears(self, seconds: float) -> bool:
        """Has it said something, or hung up?"""
        assert self.control is not None
        return bool(select.select([self.control], [], [], seconds)[0])

    def _receive(self) -> bytes:
        assert self.control is not None
        with suppress(OSError):
            return self.control.recv(64)
        return b""


_forking = threading.Lock()  # whether this process adopts orphans is one switch for all its threads


def start(
    command: Sequence[str], environ: Mapping[str, str], name: str, *, named: Mapping[str, int], files: Sequence[int] = (1, 2),
    template: Template | None = None, listening: bool = False,
) -> Process:  # fmt: skip
    """A child with these variables: a fork of the template, or a process that runs `command`, which is the template's too.

    name: for ps; one that is not forked gives it to itself. named: variables that get the number which a file has there.
    files: its stdout, its stderr, and others that it gets too. listening: it calls `signals.listen`, and may start with signals
    blocked. Forks do.
    """
    pid = template and template.fork(environ, name, files, named)
    if pid is None:
        environ = {**environ, **{variable: str(file) for variable, file in named.items()}}
        with held_back() if listening else nullcontext():
            child = subprocess.Popen(
                list(command), env=environ, stdin=subprocess.DEVNULL, stdout=files[0], stderr=files[1],
                pass_fds=[*named.values(), *files[2:]], start_new_session=True,
            )  # fmt: skip
        pid, child.returncode = child.pid, 0  # not for `subprocess` to wait for
    return Process(pid)


def serve(preload: Sequence[str]) -> None:
    """In the template: import `preload`, then fork workers for as long as the launcher asks. Returns in each of them."""
    control = socket.socket(fileno=int(os.environ.pop(TEMPLATE)))
    die_with(os.getppid())  # if it is gone already, so is the other end of `control`
    set_name("ithaca template")
    for module in preload:
        importlib.import_module(module)
    why = _unfit()
    if why is not None:
        print(f"ithaca: this process cannot be forked: {why}", file=sys.stderr, flush=True)
        os._exit(1)
    gc.collect()
    gc.freeze()  # the collector would touch every object, and so copy the pages that workers share
    control.send(_READY)
    while True:
        order, files, _, _ = socket.recv_fds(control, 1 << 20, 64, socket.MSG_CMSG_CLOEXEC)
        if not order:
            os._exit(0)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            try:
                worker = os.fork()
            except OSError:
                os._exit(1)
            if worker:
                os._exit(0)  # the launcher adopts the other
            _become_worker(json.loads(order), files, between)
            control.send(str(os.getpid()).encode())
            control.close()
            return
        if os.waitpid(between, 0)[1]:
            os._exit(1)  # no worker has come of it
        for file in files:
            os.close(file)


def _become_worker(order: dict, files: list[int], between: int) -> None:
    os.setsid()
    while os.getppid() == between:
        time.sleep(0.0005)
    for number, file in enumerate(files[:2], start=1):
        os.dup2(file, number)
        os.close(file)
    for name in order["unset"]:
        os.environ.pop(name, None)
    os.environ.update(order["set"])
    os.environ.update({name: str(file) for name, file in zip(order["named"], files[2:], strict=False)})
    die_with(order["launcher"])
    set_name(order["name"])
    if "numpy" in sys.modules:  # it drew its seed when it was imported, the same for all forks
        sys.modules["numpy"].random.seed()


def _unfit() -> str | None:
    """Why this process must not be forked."""
    if _cuda_has_begun():
        return "something that was imported has initialised CUDA"
    others = [thread for thread in os.listdir("/proc/self/task") if int(thread) != os.getpid()]
    names = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in others]
    # NVML, with which torch counts GPUs because it may be forked, has a thread that waits for events; a fork needs none.
    names = [name for name in names if not name.startswith("cuda")]
    return f"something that was imported has started threads ({', '.join(names)})" if names else None


def _cuda_has_begun() -> bool:
    """By torch or by anybody else, of whom torch does not know."""
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError:  # nobody has loaded it
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_ERROR_NOT_INITIALIZED
