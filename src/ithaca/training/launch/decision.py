"""`start`: where does this run take place? In this process, in workers that we start, or in a job that we are part of.

    variables of a job (torchrun, srun, mpirun, our own launcher)  ->  join it, run, leave
    one device                                                     ->  run here; no process group is needed
    more devices on this machine                                   ->  start one worker for each, with the same command
    several nodes, and no job                                      ->  say which command starts one

In each rank `function(config)` is called; it returns the exit code. A rank that fails writes its traceback to its log in the run
folder, not to the terminal, tells the launcher why, and leaves without waiting for the others: they may be stuck.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shlex
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ...base import exits
from ...base.gpu_sharing import why_not_shared
from ...base.processes.fork_server import TEMPLATE, Template, serve
from ...base.processes.signals import Stop, StoppedEarly, listen
from ...base.processes.system import say, set_name, tie_to_launcher
from ...base.run_folder import RunFolder
from ...config import Config, dump, violations
from ...stack import require
from . import heartbeat
from .cause import Failure, last_line, report
from .environment import Job, find_job
from .peers import watch_peers, watch_self
from .supervise import supervise

Function = str | Callable[[Config], int]


@dataclass(frozen=True)
class Plan:
    """What a run needs on this machine."""

    device: str
    workers: int


def start(
    config: Config,
    function: Function,
    command: Sequence[str] | None = None,
    *,
    timeout: float = 600.0,
    preload: Sequence[str] = ("torch.distributed",),
    resumes: bool = True,
) -> int:
    """Call `function(config)`, which returns an exit code, in every process of the run; return the exit code of all.

    function: a callable, or "module:name", which the launcher itself then need not import.
    command: what a worker runs: a command that comes back here with the same arguments. Default: what this process was started
    with, flags of Python included. timeout: seconds until all ranks must have found each other.
    preload: modules that every rank needs: workers are forks of one process that has imported them. That must start no thread and
    touch no GPU. Without any, each is a process of its own.
    resumes: whether the same command goes on where a signal has stopped this one: then it ends with 75, else with 128 + N.
    """
    if TEMPLATE in os.environ:
        serve(preload)  # from here on a worker
    job = find_job(os.environ)
    if job is not None:
        return _as_rank(config, function, job, timeout, resumes)
    command = [sys.executable, *sys.orig_argv[1:]] if command is None else list(command)
    if config.launch.nodes > 1:
        raise ValueError(_needs_a_job(config, command))
    plan = plan_workers(config)
    sized = replace(config.launch, workers=None if config.launch.cpu else plan.workers)
    require(violations(replace(config, launch=sized)), f"the configuration cannot be used on {plan.workers} devices")
    if plan.workers == 1:
        return _alone(config, function)
    template = Template(command) if preload else None
    return supervise(command, RunFolder(config.run.folder), config.launch, plan.workers, template, resumes)


def plan_workers(config: Config) -> Plan:
    """Device and number of processes on this machine. Imports torch only where GPUs have to be counted."""
    launch = config.launch
    if launch.cpu is not None:
        return Plan("cpu", launch.cpu)
    import torch

    visible = torch.cuda.device_count()
    if visible == 0:
        raise ValueError(
            "torch sees no GPU here; use the CPU with --cpu N (in a file launch.cpu: N), or see: ithaca doctor"
        )
    if launch.share_gpu:
        why = why_not_shared()
        if why is not None:
            raise ValueError(f"launch.share_gpu: {why}")
    elif launch.workers is not None and launch.workers > visible:
        raise ValueError(
            f"launch.workers={launch.workers} needs as many GPUs, but torch sees {visible}; lower it, look at "
            "CUDA_VISIBLE_DEVICES, or rehearse it on the GPUs there are with launch.share_gpu=true"
        )
    return Plan("cuda", launch.workers or visible)


def _alone(config: Config, function: Function) -> int:
    try:
        with listen():
            heartbeat.begin(config.launch.timeouts, watch_self(RunFolder(config.run.folder)))
            return _load(function)(config)
    except Exception as error:
        if isinstance(error, ValueError | OSError) or hasattr(error, "exit_code"):
            raise  # it says all there is to say: the command line prints it as it is
        say(Failure.of(error, _log_traceback(config, 0, error)).text)
        return exits.code_of(error)
    finally:
        heartbeat.stop()


def _as_rank(config: Config, function: Function, job: Job, timeout: float, resumes: bool) -> int:
    if job.kind in ("local", "torchrun"):
        tie_to_launcher(os.environ)
        set_name(f"ithaca rank {job.rank}")
    stop = Stop()
    try:
        with listen(to_the_end=True) as stop:
            if job.kind == "local":
                heartbeat.begin(config.launch.timeouts)
            _check_numbers(config, job)
            device = "cpu" if config.launch.cpu is not None else "cuda"
            from .rendezvous import join, leave

            digest = hashlib.sha256(dump(config).encode()).hexdigest()
            join(job, device, timeout, same=digest, share_gpu=config.launch.share_gpu)
            if job.kind != "local":
                heartbeat.begin(
                    config.launch.timeouts, watch_peers(job, config.launch.timeouts, RunFolder(config.run.folder))
                )
            code = _load(function)(config)
            if code in (exits.DONE, exits.STOPPED):
                heartbeat.stop()
                leave()
                return code
    except BaseException as error:
        if stop.name is not None and stop.early:  # whatever else went wrong then, it did because ranks were leaving
            stopped = StoppedEarly(stop.name)
            code = exits.STOPPED if job.kind == "local" or resumes else stopped.at_once
            if job.kind != "local" and job.rank == 0:  # our launcher says it for all
                say(stopped.words(resumes))
        else:
            failure, code = Failure.of(error, _log_traceback(config, job.rank, error)), exits.code_of(error)
            if not report(failure, os.environ):
                say(
                    f"rank {job.rank} on {socket.gethostname()}: {failure.short if failure.from_peers else failure.text}"
                )
    # Not through the interpreter's end: it would wait for threads and collectives that wait for other ranks.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _check_numbers(config: Config, job: Job) -> None:
    """The job that runs must be the job that the config was written for."""
    launch, nodes = config.launch, None
    if job.world % job.local_world == 0:
        nodes = job.world // job.local_world
    if launch.world is not None and launch.world != job.world:
        per_node = f"launch.cpu={launch.cpu}" if launch.cpu else f"launch.workers={launch.workers}"
        raise ValueError(
            f"launch.nodes={launch.nodes} × {per_node} are {launch.world} processes, but {job.kind} has started {job.world}; "
            "make them agree"
        )
    if launch.nodes > 1 and nodes is not None and launch.nodes != nodes:
        raise ValueError(f"launch.nodes={launch.nodes}, but {job.kind} has started {nodes} nodes; make them agree")
    sized = replace(launch, nodes=1, workers=None if launch.cpu else job.world, cpu=job.world if launch.cpu else None)
    require(violations(replace(config, launch=sized)), f"the configuration cannot be used on {job.world} processes")


def _needs_a_job(config: Config, command: Sequence[str]) -> str:
    launch = config.launch
    per_node = launch.cpu or launch.workers
    words = list(command[1:])
    if words and Path(words[0]).name == "ithaca":
        shown = shlex.join(["ithaca", *words[1:]])
    else:
        shown = shlex.join(["python", *words])
    gpus = "" if launch.cpu else f" --gpus-per-node={per_node or 'GPUS'}"
    return (
        f"launch.nodes={launch.nodes} needs a job that has started on all nodes; use one of\n"
        f"  on every node, I = 0..{launch.nodes - 1}:  torchrun --nnodes={launch.nodes} --nproc-per-node={per_node or 'gpu'} "
        f"--node-rank=I --master-addr=HOST_OF_NODE_0 --master-port=29500 {shlex.join(words)}\n"
        f"  once, in a Slurm allocation:  srun --nodes={launch.nodes} --ntasks-per-node={per_node or 'GPUS'}{gpus} {shown}\n"
        "  a whole Slurm script:  ithaca slurm CONFIG > job.sh"
    )


def _load(function: Function) -> Callable[[Config], int]:
    if not isinstance(function, str):
        return function
    module, colon, name = function.partition(":")
    if not colon:
        raise ValueError(f"{function!r} does not name a function; write module:function")
    return getattr(importlib.import_module(module), name)


def _log_traceback(config: Config, rank: int, error: BaseException) -> Path:
    """Append it to the rank's log, unless the run has done so already."""
    log = RunFolder(config.run.folder).log(rank)
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    if isinstance(error, KeyboardInterrupt | SystemExit) or last_line(log, 0) == lines[-1].strip()[:300]:
        return log
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "a", encoding="utf-8") as file:
            file.write("".join(lines))
    except OSError:
        print("".join(lines), file=sys.stderr, flush=True)
    return log
