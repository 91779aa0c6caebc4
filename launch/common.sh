# Shared by every launch script, which sources it first. Needs bash 4.4 or later.
#
# A script's leading comment is its --help. Options come first, then `--`, then the arguments of
# `python -m mars_jax.train`: --config FILE key=value …
# shellcheck shell=bash
# shellcheck disable=SC2034  # the variables set here are used by the scripts

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

# set_option VARIABLE --name VALUE …: refuses `--name --zone x` and a trailing `--name`.
set_option() {
  [[ $# -ge 3 && -n $3 && $3 != --* ]] || die "$2 needs a value (--help shows an example)"
  printf -v "$1" %s "$3"
}

# estimate_option --prices FILE …: one of those that only `mars_jax.estimate` understands.
estimate_option() {
  local given
  set_option given "$@"
  ESTIMATE_ARGS+=("$1" "$given")
}

require() { [[ -n ${!1} ]] || die "--${1//_/-} is missing (--help shows an example)"; }

whole_number() { [[ ${!1} =~ ^[0-9]+$ ]] || die "--${1//_/-} ${!1}: expected a whole number"; }

# Cloud names: what GKE, Compute Engine and Slurm all accept.
check_name() {
  [[ $1 =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] || die "--name $1: use a-z, 0-9 and '-', at most 40, a letter first"
}

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

# --slice v5e:16x16 → GENERATION, TOPOLOGY, CHIPS, HOSTS (Google Cloud's multi-host slices have 4 chips a host).
parse_slice() {
  [[ $1 =~ ^(v4|v5e|v5p|v6e|tpu7x):([0-9]+(x[0-9]+){1,2})$ ]] ||
    die "--slice $1: expected GENERATION:TOPOLOGY, such as v5e:16x16 or v5p:4x4x4 (v4, v5e, v5p, v6e, tpu7x)"
  GENERATION=${BASH_REMATCH[1]}
  TOPOLOGY=${BASH_REMATCH[2]}
  CHIPS=$((${TOPOLOGY//x/*}))
  HOSTS=$((CHIPS > 4 ? CHIPS / 4 : 1))
}

# Fit, step time and device-hours of the run on one slice, before any money is spent.
estimate() {
  cd "$ROOT"
  run "$PYTHON" -m mars_jax.estimate --topology "$1" --slices "$2" "${ESTIMATE_ARGS[@]}" "${TRAIN_ARGS[@]}"
}
