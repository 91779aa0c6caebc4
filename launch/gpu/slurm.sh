#!/usr/bin/env bash
# Train on a Slurm cluster: one task a GPU on N nodes, put back into the queue after a preemption or the time limit.
#
#   launch/gpu/slurm.sh --nodes 2 --gpus-per-node 8 --time 24:00:00 -- \
#     --config configs/paper/7b_mars_b4.yaml output_dir=/shared/runs/mars
#
#   --nodes N  --gpus-per-node N  --time LIMIT        always
#   --name NAME            of the job (default mars)
#   --partition P  --account A  --qos Q  --constraint C   as sbatch takes them
#   --grace SECONDS        from SIGTERM to the end of the time limit (default 300)
#   --log-dir DIR          where NAME-JOBID.out goes (default: here)
#   --dry-run              print the sbatch command and submit nothing
#
# Prints the job's number; a job of the same name that is queued or running is left alone and its number printed.
# output_dir must be on a file system that all nodes share, or a gs:// path.

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

name=mars nodes='' gpus_per_node='' time='' partition='' account='' qos='' constraint='' grace=300 log_dir=$PWD
VALUES=(name nodes gpus-per-node time partition account qos constraint grace log-dir)
parse_options "$@"
require nodes gpus_per_node time
check_name "$name"
whole_numbers nodes gpus_per_node grace
check_train_args
need sbatch "log in to a node of the cluster that can submit jobs"

running=$(ask squeue --me --name="$name" --noheader --format=%i)
if [[ -n $running ]]; then
  log "job $name is there"
  echo "$running"
  exit 0
fi
# --signal reaches the tasks before the time limit does; a preemption with GraceTime sends SIGTERM by itself.
run sbatch --parsable --job-name="$name" --nodes="$nodes" --gpus-per-node="$gpus_per_node" \
  --ntasks-per-node="$gpus_per_node" --time="$time" --signal=TERM@"$grace" --requeue --open-mode=append \
  --output="$log_dir/%x-%j.out" ${partition:+--partition="$partition"} ${account:+--account="$account"} \
  ${qos:+--qos="$qos"} ${constraint:+--constraint="$constraint"} --export=ALL,MARS_ROOT="$ROOT",PYTHON="$PYTHON" \
  "$ROOT/launch/gpu/job.sbatch" "${TRAIN_ARGS[@]}" mesh.distributed=true
