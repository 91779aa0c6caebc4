#!/usr/bin/env bash
# Train on GKE TPU slices: a JobSet rendered from a small values file.
#
#   launch/gke/gke.sh submit --values launch/gke/values.yaml --set name=mars --set slice=v6e:4x4 -- \
#     --config configs/paper/0p5b_mars_b4.yaml output_dir=gs://my-bucket/runs/mars
#
#   submit    render and apply; a job of this name that has not ended is left alone, one that failed is replaced
#   wait      until the job has completed or failed
#   status    the JobSet and its pods
#   logs      the last lines of every worker, to stdout
#   delete    remove the job; its pods get SIGTERM and save
#
#   --values FILE      what to know about cluster and job (default launch/gke/values.yaml)
#   --set KEY=VALUE    a value that differs from the file's; may be repeated
#   --context NAME     kubectl context (default: the current one)
#   --lines N          of `logs`, per worker (default 200)
#   --timeout TIME     of `wait`, as kubectl takes it (default 168h)
#   --estimate         fit, step time and device-hours; asks the compiler, not the cluster
#                      [--rows N] [--architecture FILE] [--efficiency F] [--prices FILE]
#   --dry-run          print the manifest and the commands and touch nothing
#
# The cluster needs the JobSet controller (0.6 or later) and a node pool per slice. Exit codes: 0 done, 1 failed,
# 2 wrong input.

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

values=$ROOT/launch/gke/values.yaml overrides=() context='' lines=200 timeout=168h
option_set() { overrides+=("$1"); }
COMMANDS=(submit wait status logs delete)
VALUES=(values set context lines timeout)
ESTIMATES=1
parse_options "$@"
whole_numbers lines

# One value, after overrides.
value() { "$PYTHON" "$ROOT/launch/gke/render.py" --values "$values" --get "$1" "${overrides[@]}"; }

if ((ESTIMATE)); then
  slice=$(value slice)
  slices=$(value num_slices)
  estimate_only "$slice" "$slices"
fi
name=$(value name)
namespace=$(value namespace)
need kubectl "install it and point it at the cluster"
kubectl=(kubectl ${context:+--context="$context"} --namespace="$namespace")

# Completed, Failed, empty while it runs; fails if there is no such job.
terminal_state() { ask "${kubectl[@]}" get jobset "$name" --output=jsonpath='{.status.terminalState}' 2>/dev/null; }

submit() {
  local manifest state
  manifest=$("$PYTHON" "$ROOT/launch/gke/render.py" --values "$values" "${overrides[@]}" -- "${TRAIN_ARGS[@]}")
  check_train_args
  if ! ((DRY_RUN)) && state=$(terminal_state); then
    if [[ $state != Failed ]]; then
      log "job $name is there: ${state:-not ended}"
      return
    fi
    log "job $name had failed; replacing it, the run resumes from its last checkpoint"
    delete
  fi
  if ((DRY_RUN)); then echo "$manifest"; fi
  run "${kubectl[@]}" apply --filename=- <<<"$manifest"
}

wait_end() {
  local state
  run "${kubectl[@]}" wait "jobset/$name" --for=jsonpath='{.status.terminalState}' --timeout="$timeout" || return 1
  ((DRY_RUN)) && return
  state=$(terminal_state)
  log "job $name: $state"
  [[ $state == Completed ]]
}

delete() { run "${kubectl[@]}" delete jobset "$name" --ignore-not-found --cascade=foreground --wait; }

case $command in
  submit) submit ;;
  wait) wait_end ;;
  status)
    run "${kubectl[@]}" get jobset "$name"
    run "${kubectl[@]}" get pods --selector="jobset.sigs.k8s.io/jobset-name=$name" --output=wide
    ;;
  logs)
    run "${kubectl[@]}" logs --selector="jobset.sigs.k8s.io/jobset-name=$name" --container=trainer --prefix \
      --tail="$lines" --max-log-requests=1024
    ;;
  delete) delete ;;
esac
