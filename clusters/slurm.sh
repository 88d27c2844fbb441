#!/bin/bash
# A run on SLURM, which goes on until it has made its last step: after its time limit, after it was
# preempted, after a node died. What follows the script goes to `python -m runner`:
#
#     sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12 --time=24:00:00 \
#       clusters/slurm.sh --fdl_config=experiments/llama_1b --workdir=$HOME/runs/llama_1b
#
#SBATCH --signal=TERM@300  # five minutes before the time limit: save, and be requeued
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x_%j.out

# The others have time to say whom they missed.
srun --kill-on-bad-exit=0 --wait=120 \
  python -m runner --distributed=on --lock_seconds=300 "$@"
status=$?

# srun returns the highest exit code; 75 is a stop on a signal. After a mistake (2) another start would
# end the same way.
if [ $status -ne 0 ] && [ $status -ne 2 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
