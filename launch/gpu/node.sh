#!/usr/bin/env bash
# Train on one machine with one or more NVIDIA GPUs: one process that drives all of them.
#
#   launch/gpu/node.sh -- --config configs/paper/0p5b_mars_b4.yaml output_dir=runs/mars
#
#   --gpus LIST     only these, such as 0,1 (default: all)
#   --dry-run       print the command and run nothing
#
# Stopped (Ctrl-C, SIGTERM) it saves and exits with 75; the same command resumes.

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

gpus=''
VALUES=(gpus)
parse_options "$@"
[[ $gpus =~ ^([0-9]+(,[0-9]+)*)?$ ]] || die "--gpus $gpus: expected numbers such as 0,1"
check_train_args
need nvidia-smi "this machine seems to have no NVIDIA GPU"

environment=(JAX_PLATFORMS=cuda)
if [[ -n $gpus ]]; then environment+=("CUDA_VISIBLE_DEVICES=$gpus"); fi
if ((DRY_RUN)); then
  run env "${environment[@]}" "$ROOT/launch/worker.sh" "${TRAIN_ARGS[@]}"
else
  exec env "${environment[@]}" PYTHON="$PYTHON" "$ROOT/launch/worker.sh" "${TRAIN_ARGS[@]}"
fi
