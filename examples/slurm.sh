#!/bin/bash
# Training on four machines of eight GPUs under SLURM: sbatch examples/slurm.sh
# Ray joins the machines; the command after "--" runs on the first of them alone, and Ray ends with
# it. After a failure, submit it again with RESUME=--resume. The folder must be seen by all machines.
#SBATCH --job-name=forage
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
set -euo pipefail
source .venv/bin/activate  # pip install -e '.[gpu,ray]'

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address="$(srun --nodes=1 --ntasks=1 -w "$head" hostname --all-ip-addresses | cut -d ' ' -f 1):6379"

srun ray symmetric-run --address "$address" --min-nodes "$SLURM_NNODES" -- \
  forage train configs/search-r1-grpo-32b.yaml ${RESUME:-} \
  placement.cluster.address="$address" search.url=http://retriever:8000
