#!/usr/bin/env bash
# Train on a Cloud TPU slice through queued resources (v6e and older).
#
#   launch/tpu_vm/tpu_vm.sh up --name mars --zone us-west4-a --slice v5e:4x4 --spot -- \
#     --config configs/paper/0p5b_mars_b4.yaml output_dir=gs://my-bucket/runs/mars
#
# This is Google Cloud's older way to TPUs; for new projects take launch/gke/ or launch/gce/. TPU7x has no other.
#
#   up        the whole loop: create, wait, setup, run; after a preemption again from create; delete at the end
#   create    ask for the slice; does nothing if it exists
#   wait      until the slice is ACTIVE
#   setup     copy this checkout's commit to every host and install it
#   run       start the trainer on every host and follow it until it ends
#   status    the slice's state and each worker's
#   logs      the last lines of every worker, to stdout
#   delete    give the slice back; does nothing if it is gone
#
#   --name NAME  --zone ZONE  --slice GENERATION:TOPOLOGY   always
#   --project ID           default: gcloud's own
#   --spot                 cheaper, may be preempted        --reserved   from your reservation
#   --runtime VERSION      TPU software version (default: the generation's)
#   --service-account MAIL --network NAME --subnetwork NAME  as gcloud takes them
#   --max-failures N       crashes after which `up` gives up; preemptions do not count (default 3)
#   --poll SECONDS         between two looks at a state (default 30)
#   --lines N              of `logs`, per worker (default 200)
#   --keep                 `up` leaves the slice when it ends
#   --estimate             fit, step time and device-hours; asks the compiler, not the cloud
#                          [--rows N] [--architecture FILE] [--efficiency F] [--prices FILE]
#   --dry-run              print the commands and run none
#
# Exit codes: 0 done, 1 failed, 2 wrong input, 75 stopped before the end (`run`): start it again to resume.

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"
# shellcheck source=launch/remote.sh
source "$ROOT/launch/remote.sh"

runtime='' spot=0 reserved=0
VALUES=(runtime)
SWITCHES=(spot reserved)
parse_remote_options "$@"

case $GENERATION in
  v4) type=v4 default_runtime=tpu-ubuntu2204-base ;;
  v5e) type=v5litepod default_runtime=v2-alpha-tpuv5-lite ;;
  v5p) type=v5p default_runtime=v2-alpha-tpuv5 ;;
  v6e) type=v6e default_runtime=v2-alpha-tpuv6e ;;
  *) die "--slice $slice: queued resources end with v6e; take launch/gke/ or launch/gce/ for $GENERATION" ;;
esac
estimate_only "$slice" 1
check_remote_options
((spot + reserved < 2)) || die "--spot --reserved: choose one"
capacity=()
if ((spot)); then capacity=(--spot); fi
if ((reserved)); then capacity=(--reserved); fi
where=(--zone="$zone" ${project:+--project="$project"})

on_all() { run gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all --quiet --command="$1"; }
copy_to_all() { run gcloud compute tpus tpu-vm scp "$1" "$name": "${where[@]}" --worker=all --quiet; }

# WAITING_FOR_RESOURCES, PROVISIONING, ACTIVE, SUSPENDED, FAILED …; nothing if the slice does not exist.
slice_state() {
  ask gcloud compute tpus queued-resources list "${where[@]}" --filter="name~(^|/)$name\$" --format='value(state.state)'
}

create() {
  local state
  state=$(slice_state) || return
  case $state in
    '') ;;
    SUSPENDED | SUSPENDING | FAILED)
      log "slice $name is $state: preempted or never granted; asking anew"
      delete || return
      ;;
    *)
      log "slice $name is there: $state"
      return
      ;;
  esac
  run gcloud compute tpus queued-resources create "$name" "${where[@]}" --node-id="$name" --type="$type" \
    --topology="$TOPOLOGY" --runtime-version="${runtime:-$default_runtime}" "${capacity[@]}" \
    ${service_account:+--service-account="$service_account"} ${network:+--network="$network"} \
    ${subnetwork:+--subnetwork="$subnetwork"}
}

wait_ready() {
  local state
  if ((DRY_RUN)); then
    quoted gcloud compute tpus queued-resources describe "$name" "${where[@]}" --format='value(state.state)'
    return
  fi
  while true; do
    state=$(slice_state) || return
    case $state in
      ACTIVE) return ;;
      FAILED | SUSPENDED | '')
        log "slice $name: ${state:-gone} before it was ever active"
        return 1
        ;;
    esac
    log "slice $name: $state"
    sleep "$poll"
  done
}

delete() {
  local state
  state=$(slice_state) || return
  if [[ -z $state ]] && ! ((DRY_RUN)); then
    log "slice $name is gone already"
    return
  fi
  run gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet
}

# A preempted request stays, SUSPENDED; `create` replaces it.
lost() { [[ $(slice_state) == SUSPEND* ]]; }
make_way() { :; }

slice_status() { slice_state; }

run_command
