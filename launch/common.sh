# Shared by every launch script, which sources it first. Needs bash 4.4 or later.
#
# A script's leading comment is its --help. Options come first, then `--`, then the arguments of
# `python -m mars_jax.train`: --config FILE key=value …
# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154  # variables are set here and used by the scripts, and the other way round

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
DRY_RUN=0
ESTIMATE=0
ESTIMATE_ARGS=()
TRAIN_ARGS=()

# Exit codes: 0 done, 1 failed while running, 2 wrong input, and EX_TEMPFAIL: stopped early, start it again.
EXIT_STOPPED=75

log() { echo "$(basename "$0"): $*" >&2; }
die() {
  echo "error: $*" >&2
  exit 2
}

usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; }

# Words as one line that can be pasted into a shell; only those that need quotes get them.
quoted() {
  local word line=()
  for word; do
    if [[ $word =~ ^[][A-Za-z0-9_./:=,@%+-]+$ ]]; then line+=("$word"); else line+=("${word@Q}"); fi
  done
  echo "${line[*]}"
}

# Run a command, or only print it under --dry-run.
run() {
  if ((DRY_RUN)); then
    quoted "$@"
  else
    log "$(quoted "$@")"
    "$@"
  fi
}

# A command that only reads. Under --dry-run nothing is asked and the answer is empty: "not there yet".
ask() { ((DRY_RUN)) || "$@"; }

need() { ((DRY_RUN)) || command -v "$1" >/dev/null || die "$1 is not on PATH; $2"; }

check_train_args() {
  [[ " ${TRAIN_ARGS[*]} " == *" --config "* ]] || die "no --config FILE after '--' (--help shows an example)"
  local i file
  for ((i = 0; i < ${#TRAIN_ARGS[@]} - 1; i++)); do
    [[ ${TRAIN_ARGS[i]} == --config ]] || continue
    file=${TRAIN_ARGS[i + 1]}
    [[ -f $file || -f $ROOT/$file ]] || die "--config $file: no such file"
  done
}

# A place that outlives the machine. Workers of a preempted slice lose their disks.
check_durable_output() {
  local argument
  for argument in "${TRAIN_ARGS[@]}"; do
    [[ $argument == output_dir=gs://* ]] && return
  done
  die "output_dir is not on Cloud Storage, so other machines could not resume: add output_dir=gs://BUCKET/PATH after '--'"
}

# Under --estimate all that a script does: fit, step time and device-hours of the run, before any money is spent.
# estimate_only SLICE NUMBER_OF_SLICES
estimate_only() {
  ((ESTIMATE)) || return 0
  check_train_args
  cd "$ROOT"
  run "$PYTHON" -m mars_jax.estimate --topology "$1" --slices "$2" "${ESTIMATE_ARGS[@]}" "${TRAIN_ARGS[@]}"
  exit
}

# check_submission OPTION …: all that the wrappers of cluster tools check; these options must be given. With --estimate
# nothing but the slices is asked for.
check_submission() {
  require slice
  parse_slice "$slice"
  whole_numbers num_slices
  estimate_only "$slice" "$num_slices"
  check_train_args
  require "$@"
  check_name "$name"
  check_durable_output
}

# What the hosts of a cluster run.
worker_command() { echo "launch/worker.sh $(quoted "${TRAIN_ARGS[@]}" mesh.distributed=true)"; }

# shellcheck source=launch/options.sh
source "$ROOT/launch/options.sh"
