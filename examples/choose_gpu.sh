#!/usr/bin/env bash
# Which GPU to rent for a job, before anything is rented: a table, a picture, and a SkyPilot task with the best candidates.
#
#     examples/choose_gpu.sh [JOB] [FOLDER]      # examples/job.json by default; no GPU and no network are needed
set -euo pipefail
job="${1:-"$(dirname "${BASH_SOURCE[0]}")/job.json"}"
folder="${2:-.}"

ftcost compare "$job" --plot "$folder/compare.svg"

# The task: the candidates in the order of their cost, then what to run there.
{
  ftcost compare "$job" --format skypilot
  cat <<'TASK'
setup: |
  pip install 'ftcost[callback,wandb]' trl peft datasets
run: |
  export FTCOST_BILLING_STARTED_AT="$(date -d "$(uptime -s)" +%s)"
  python train.py
TASK
} >"$folder/task.yaml"
echo "wrote $folder/compare.svg and $folder/task.yaml: sky launch $folder/task.yaml"
