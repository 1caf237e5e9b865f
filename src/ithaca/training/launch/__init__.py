"""From one command to the processes of a run: find out which job this is, or start one on this machine.

    decision                 which of these: here, in workers of our own, or as a rank of a job
    environment              which job am I part of: torchrun, srun, mpirun
    rendezvous               its ranks find each other, or say who is missing
    supervise                a run on this machine: attempts, and whether to make another
    local · process          one attempt: start workers, watch them, end them
    cause                    why did it end
    heartbeat · hang         what a rank says while it runs; which one hangs
    peers                    the same in jobs that others started
    slurm                    a batch script

What it shares with others is in base: exit codes, signals, and how processes are started, forked and ended.
Light to import: torch comes in when a rank joins, or when GPUs have to be counted.
"""

from .decision import start
from .environment import Job, find_job
from .local import run_local
from .rendezvous import join, leave

__all__ = ["Job", "find_job", "join", "leave", "run_local", "start"]
