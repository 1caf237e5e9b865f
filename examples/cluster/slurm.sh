#!/bin/bash
# run: 2 nodes × 8 GPUs.
# Made by: ithaca slurm run.yaml
# Submit it with: sbatch THIS_FILE    Watch it in the log below and in status.json of the run folder.

#SBATCH --job-name=run
#SBATCH --nodes=2
# One task is one rank; it has one GPU.
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
# CPU cores of a rank: data, optimizer offload, copies.
#SBATCH --cpus-per-task=8
# Host memory of a node; 0 is all of it, which store: host needs.
#SBATCH --mem=0
#SBATCH --time=2-00:00:00
##SBATCH --account=YOUR_ACCOUNT
##SBATCH --partition=YOUR_PARTITION
# In the folder where sbatch is called. Every rank has a log of its own in the run folder.
#SBATCH --output=slurm-%x-%j.log
#SBATCH --open-mode=append
# 300 s before the time limit: a signal to this script, so that the run can save. Longer than a
# step and a checkpoint take together.
#SBATCH --signal=B:TERM@300
# The job may start again: after a time limit (below), a preemption, the failure of a node.
#SBATCH --requeue

set -u
source .venv/bin/activate
export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"

# srun passes SIGUSR1 on to every rank as it is. SIGTERM it would turn into SIGKILL: nothing saved.
step= stopping=no
stop() {
    trap '' TERM
    stopping=yes
    echo "job $SLURM_JOB_ID: asked to stop; the run saves and ends"
    [ -n "$step" ] && kill -USR1 "$step"
}
trap stop TERM

# Blocks: ranks fill one node after the other. A rank that fails takes the others with it after 60 s, not at once: ranks
# that end together with 75 must not be killed by the first of them.
srun --distribution=block --kill-on-bad-exit=0 --wait=60 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \
    ithaca train run.yaml &
step=$!
wait "$step"
code=$?
if [ "$stopping" = yes ]; then  # the signal ended the first wait, not srun
    wait "$step"
    again=$?
    [ "$again" -ne 127 ] && code=$again
fi

# 75: saved, start again. A job that somebody has cancelled is not RUNNING any more.
if [ "$code" -eq 75 ] && [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
