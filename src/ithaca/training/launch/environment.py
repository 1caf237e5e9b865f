"""Who am I? Which job this process belongs to, read from the variables that its launcher has set.

    torchrun         RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT   (also accelerate launch, and our own)
    mpirun           OMPI_COMM_WORLD_* and, from you, MASTER_ADDR MASTER_PORT
    srun             SLURM_PROCID SLURM_LOCALID SLURM_STEP_*; MASTER_ADDR and MASTER_PORT win where they are given

The complete set that was set last wins: torchrun or mpirun under srun is a job of torchrun or mpirun. Half a set is an error,
and so are numbers that contradict each other: a process that guesses its rank would train something else without a word.

Slurm sets SLURM_PROCID=0 and SLURM_NTASKS=8 also in the batch script itself, where no srun has run. Only srun's own steps have a
SLURM_STEP_ID that counts from 0, so that is what we go by. A step of one task (`srun --pty bash`) is nothing to join.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from ...base.processes.system import LAUNCHER

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_MASTER = ("MASTER_ADDR", "MASTER_PORT")
_OPEN_MPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE"))
_SPECIAL_STEP = 0xFFFFFFF0  # Slurm's numbers for batch scripts and interactive shells lie above
_ITEM = r"(?:[^,\[\]\s]|\[[^\[\]]+\])+"  # a name, parts of which stand in brackets
_MOST = 100_000  # hosts: more than any cluster has, and a bound on what a broken variable can cost

LISTENER, REPORT, STACKS, ATTEMPT = "ITHACA_LISTENER", "ITHACA_REPORT", "ITHACA_STACKS", "ITHACA_ATTEMPT"
"""What local.py adds beside LAUNCHER: rank 0's listening socket; the pipe on which a rank says what it does and why it failed; a
file for its Python stacks; how many times the workers have been started."""


@dataclass(frozen=True)
class Job:
    """One process of a job."""

    rank: int
    local_rank: int  # on this machine
    world: int
    local_world: int
    node: int
    address: str  # where the store listens through which ranks find each other
    port: int
    kind: str  # local, torchrun, mpirun, srun
    attempt: int = 0  # restarts by torchrun so far
    hosted: bool = False  # the store is torchrun's; otherwise rank 0 opens it
    listener: int | None = None  # rank 0 of a local job: a socket that listens already

    @property
    def one_machine(self) -> bool:
        return self.local_world == self.world


def find_job(environ: Mapping[str, str]) -> Job | None:
    """The job that these variables describe, or None. ValueError names variables that are missing or contradict each other."""
    if all(name in environ for name in (*_TORCHRUN, *_MASTER)):
        return _torchrun(environ)
    if any(name in environ for name in _OPEN_MPI):
        return _mpirun(environ)
    job = _srun(environ)
    if job is not None:
        return job
    given = [name for name in _TORCHRUN if name in environ]
    if given:
        missing = [name for name in (*_TORCHRUN, *_MASTER) if name not in environ]
        raise ValueError(
            f"{_list(given)} {_is(given)} set, but not {_list(missing)}, so this process cannot tell which job it belongs to; "
            f"start it with torchrun or srun, or unset {_list(given)}"
        )
    return None


def _torchrun(environ: Mapping[str, str]) -> Job:
    rank, local_rank, world, local_world = (_number(environ, name) for name in _TORCHRUN)
    _check(rank, local_rank, world, local_world, _TORCHRUN)
    node = _number(environ, "GROUP_RANK") if "GROUP_RANK" in environ else rank // local_world
    ours = LAUNCHER in environ
    return Job(
        rank, local_rank, world, local_world, node, environ["MASTER_ADDR"], _port(environ),
        kind="local" if ours else "torchrun",
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT") if "TORCHELASTIC_RESTART_COUNT" in environ else 0,
        hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        listener=_number(environ, LISTENER) if LISTENER in environ else None,
    )  # fmt: skip


def _mpirun(environ: Mapping[str, str]) -> Job | None:
    missing = [name for name in _OPEN_MPI if name not in environ]
    if missing:
        raise ValueError(f"Open MPI's variables are there, but not {_list(missing)}; start this process with mpirun")
    rank, local_rank, world, local_world = (_number(environ, name) for name in _OPEN_MPI)
    _check(rank, local_rank, world, local_world, _OPEN_MPI)
    if world == 1:
        return None
    missing = [name for name in _MASTER if name not in environ]
    if missing:
        raise ValueError(
            f"mpirun does not say where the ranks of a job can meet, and {_list(missing)} {_is(missing)} not set; run: mpirun "
            "-x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500 ..."
        )
    _agree(environ, rank, local_rank, world, local_world, "mpirun")
    address, port = environ["MASTER_ADDR"], _port(environ)
    return Job(rank, local_rank, world, local_world, rank // local_world, address, port, "mpirun")


def _srun(environ: Mapping[str, str]) -> Job | None:
    if "SLURM_STEP_ID" not in environ:
        if environ.get("SLURM_PROCID", "0") != "0":
            raise ValueError(
                f"SLURM_PROCID={environ['SLURM_PROCID']} is set, but not SLURM_STEP_ID, so this process cannot tell whether it "
                "is a task of srun; start it with srun, or unset SLURM_PROCID"
            )
        return None
    step = _whole(environ, "SLURM_STEP_ID")
    if not 0 <= step < _SPECIAL_STEP:
        return None
    world = _number(environ, _first(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    if world == 1:
        return None
    rank, local_rank = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_LOCALID")
    listed = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    hosts = expand_hosts(environ[listed], listed)
    counts = _counts(environ, world, len(hosts))
    if len(counts) != len(hosts) or sum(counts) != world:
        raise ValueError(
            f"Slurm's variables contradict each other: {world} tasks, {listed}={environ[listed]} with {len(hosts)} nodes, and "
            f"{' + '.join(map(str, counts))} tasks on the nodes; start this process with srun --nodes and --ntasks-per-node"
        )
    node = _number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else _node_of(rank, counts)
    if node >= len(hosts) or rank != sum(counts[:node]) + local_rank:
        raise ValueError(
            f"SLURM_PROCID={rank} is task {local_rank} of node {node}, so ranks do not fill one node after the other, and "
            "neighbours in a sequence would talk across nodes; run: srun --distribution=block ..."
        )
    _agree(environ, rank, local_rank, world, counts[node], "srun")
    alone = len(hosts) == 1
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if alone else hosts[0])
    port = _port(environ) if "MASTER_PORT" in environ else _port_of(_number(environ, "SLURM_JOB_ID"), step)
    return Job(rank, local_rank, world, counts[node], node, address, port, "srun")


def _counts(environ: Mapping[str, str], world: int, nodes: int) -> list[int]:
    """Tasks on each node."""
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if name in environ:
            return tasks_per_node(environ[name], name)
    if "SLURM_NTASKS_PER_NODE" in environ:
        return [_number(environ, "SLURM_NTASKS_PER_NODE")] * nodes
    if nodes == 1:
        return [world]
    raise ValueError(
        "neither SLURM_STEP_TASKS_PER_NODE nor SLURM_NTASKS_PER_NODE is set, so this process cannot tell who shares its node; "
        "run: srun --ntasks-per-node=N ..."
    )


def _node_of(rank: int, counts: list[int]) -> int:
    return next((node for node in range(len(counts)) if rank < sum(counts[: node + 1])), len(counts))


def _port_of(job: int, step: int) -> int:
    """The same on every rank, rarely the same for two steps on one node, below the ports that the system hands out."""
    return 15000 + (job * 31 + step) % 15000


def _check(rank: int, local_rank: int, world: int, local_world: int, names: tuple[str, ...]) -> None:
    r, lr, w, lw = names
    if rank >= world:
        raise ValueError(f"{r}={rank} must be below {w}={world}; start this process with its launcher, or unset both")
    if local_rank >= local_world or local_world > world or (local_world == world and local_rank != rank):
        raise ValueError(
            f"{lr}={local_rank}, {lw}={local_world}, {r}={rank} and {w}={world} contradict each other; start this process with "
            "its launcher, or unset them"
        )


def _agree(environ: Mapping[str, str], rank: int, local_rank: int, world: int, local_world: int, launcher: str) -> None:
    """Torch's variables that a script exported by hand must say what the launcher says."""
    for name, value in zip(_TORCHRUN, (rank, local_rank, world, local_world), strict=True):
        if name in environ and _number(environ, name) != value:
            raise ValueError(f"{name}={environ[name]} contradicts {launcher}, which says {value}; unset {name}")


def _first(environ: Mapping[str, str], *names: str) -> str:
    name = next((known for known in names if known in environ), None)
    if name is None:
        raise ValueError(f"SLURM_STEP_ID is set, but not {' or '.join(names)}; start this process with srun")
    return name


def _whole(environ: Mapping[str, str], name: str) -> int:
    if name not in environ:
        raise ValueError(f"{name} is not set, though other variables of its launcher are; start this process with it")
    if not re.fullmatch(r"-?\d{1,18}", environ[name], re.ASCII):
        raise ValueError(
            f"{name}={environ[name]!r} is not a whole number; unset it, or start this process with its launcher"
        )
    return int(environ[name])


def _number(environ: Mapping[str, str], name: str) -> int:
    value = _whole(environ, name)
    if value < 0:
        raise ValueError(f"{name}={value} is below 0; unset it, or start this process with its launcher")
    return value


def _port(environ: Mapping[str, str]) -> int:
    port = _number(environ, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ValueError(f"MASTER_PORT={port} is no port; choose one between 1024 and 65535")
    return port


def _list(names: list[str]) -> str:
    return ", ".join(names)


def _is(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


# -- Slurm's short forms, read without Slurm: `node[003-005,9]` is four hosts, `8(x2),4` is 8, 8 and 4 tasks -----------------------


def expand_hosts(text: str, name: str = "the node list") -> list[str]:
    """The hosts of a list in Slurm's short form, in order. Ranges keep their leading zeros; brackets may repeat (r[1-2]n[1-4])."""
    if not re.fullmatch(rf"{_ITEM}(,{_ITEM})*", text):
        raise ValueError(f"{name}={text!r} is not a list of hosts")
    hosts: list[str] = []
    for part in re.finditer(_ITEM, text):
        pieces = re.findall(r"\[([^\]]*)\]|([^\[\]]+)", part[0])
        choices = [_ranges(inside, text, name) if inside else [plain] for inside, plain in pieces]
        if prod(map(len, choices)) > _MOST:
            raise ValueError(f"{name}={text!r} has more than {_MOST} hosts")
        hosts += map("".join, product(*choices))
    return hosts


def _ranges(inside: str, text: str, name: str) -> list[str]:
    """What stands in brackets: `003-005,9` -> 003 004 005 9"""
    names: list[str] = []
    for item in inside.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", item, re.ASCII)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first) or int(last) - int(first) > _MOST:
            raise ValueError(f"{name}={text!r} has a range that cannot be read: [{inside}]")
        names += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return names


def tasks_per_node(text: str, name: str) -> list[int]:
    """`8(x2),4` -> [8, 8, 4]"""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", item, re.ASCII)
        if match is None:
            raise ValueError(f"{name}={text!r} cannot be read; it should look like 8(x2),4")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
