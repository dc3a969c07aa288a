#!/bin/bash
# Training on four machines of eight GPUs under SLURM: sbatch examples/slurm.sh
# Ray joins the machines; the command after "--" runs only on the first one, and Ray ends with it.
# After a failure, submit it again with RESUME=--resume. All machines must have access to the folder.
#SBATCH --job-name=forage
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
set -euo pipefail
# Two environments, created once, since vLLM requires an older transformers than Forage:
#   python -m venv .venv && .venv/bin/pip install -e '.[gpu,ray]'
#   python -m venv .vllm && .vllm/bin/pip install 'vllm==0.32.*'
source .venv/bin/activate

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address="$(srun --nodes=1 --ntasks=1 -w "$head" hostname --all-ip-addresses | cut -d ' ' -f 1):6379"

# Without a number of CPUs srun gives each task one, whatever sbatch requested.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" ray symmetric-run --address "$address" --min-nodes "$SLURM_NNODES" -- \
  forage train configs/search-r1-grpo-32b.yaml ${RESUME:-} \
  placement.cluster.address="$address" placement.engine.program="$PWD/.vllm/bin/vllm" \
  search.url=http://retriever:8000
