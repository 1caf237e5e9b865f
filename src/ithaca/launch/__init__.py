"""From one command to the processes of a run: find out which job this is, or start one on this machine.

    environment · hosts      which job am I part of: torchrun, srun, mpirun
    rendezvous               its ranks find each other, or say who is missing
    local · process · cause  start and watch workers on this machine; why did it end
    decision                 the decision between all of these
    slurm                    a batch script
    exits                    exit codes

Light to import: torch comes in when a rank joins, or when GPUs have to be counted.
"""

from .decision import start
from .environment import Job, find_job
from .local import run_local
from .rendezvous import join, leave

__all__ = ["Job", "find_job", "join", "leave", "run_local", "start"]
