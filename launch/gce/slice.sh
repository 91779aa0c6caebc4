#!/usr/bin/env bash
# Train on a TPU slice of Compute Engine instances: a workload policy keeps them on one interconnect (v5p and newer).
#
#   launch/gce/slice.sh up --name mars --zone us-east5-a --slice v6e:4x4 --spot -- \
#     --config configs/paper/0p5b_mars_b4.yaml output_dir=gs://my-bucket/runs/mars
#
#   up        the whole loop: create, wait, setup, run; after a preemption again from create; delete at the end
#   create    workload policy, instance template and managed instance group; what exists is left as it is
#   wait      until all instances of the group are RUNNING
#   setup     copy this checkout's commit to every host and install it
#   run       start the trainer on every host and follow it until it ends
#   status    the instances, and each worker's state
#   logs      the last lines of every worker, to stdout
#   delete    group, template and policy; what is gone already is skipped
#
#   --name NAME  --zone ZONE  --slice GENERATION:TOPOLOGY   always
#   --project ID           default: gcloud's own
#   --spot                 cheaper, may be preempted        --reservation NAME   from your reservation
#   --network NAME --subnetwork NAME --service-account MAIL  as gcloud takes them
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

reservation='' spot=0
VALUES=(reservation)
SWITCHES=(spot)
parse_remote_options "$@"

case $GENERATION in
  v5p) machine=ct5p-hightpu-4t image=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e ;;
  v6e) machine=ct6e-standard-4t image=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e ;;
  tpu7x) machine=tpu7x-standard-4t image=ubuntu-accel-2404-amd64-tpu-tpu7x ;;
  *) die "--slice $slice: Compute Engine has v5p, v6e and tpu7x; take launch/gke/ or launch/tpu_vm/ for $GENERATION" ;;
esac
estimate_only "$slice" 1
((CHIPS >= 4)) || die "--slice $slice: the smallest group here is one host of 4 chips"
check_remote_options
((spot == 0)) || [[ -z $reservation ]] || die "--spot --reservation $reservation: choose one"
region=${zone%-*}
in_project=(${project:+--project="$project"})
in_zone=(--zone="$zone" "${in_project[@]}")
in_region=(--region="$region" "${in_project[@]}")
group=(gcloud compute instance-groups managed)

instances() { ask "${group[@]}" list-instances "$name" "${in_zone[@]}" --format="value(${1:-name})"; }

# All hosts at once: a collective needs every worker, so one after the other would wait for ever.
on_all() {
  local host pids=() pid failed=0
  if ((DRY_RUN)); then
    run gcloud compute ssh "$name-HOST" "${in_zone[@]}" --quiet --command="$1"
    return
  fi
  for host in $(instances); do
    run gcloud compute ssh "$host" "${in_zone[@]}" --quiet --command="$1" &
    pids+=($!)
  done
  ((${#pids[@]})) || return 1
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  return "$failed"
}

copy_to_all() {
  local host
  if ((DRY_RUN)); then
    run gcloud compute scp "$1" "$name-HOST:" "${in_zone[@]}" --quiet
    return
  fi
  for host in $(instances); do run gcloud compute scp "$1" "$host:" "${in_zone[@]}" --quiet || return; done
}

# exists KIND FLAG…: whether a resource of this name is there; an error of gcloud itself is passed on.
exists() {
  local kind=$1 found
  shift
  # shellcheck disable=SC2086  # KIND is one or more words
  found=$(ask gcloud compute $kind list "$@" --filter="name=$name" --format='value(name)') || exit 1
  [[ -n $found ]]
}

create() {
  local provisioning=()
  if ((spot)); then provisioning=(--provisioning-model=SPOT --instance-termination-action=STOP); fi
  if [[ -n $reservation ]]; then
    provisioning=(--provisioning-model=RESERVATION_BOUND --instance-termination-action=DELETE
      --reservation-affinity=specific --reservation="$reservation")
  fi
  exists resource-policies "${in_project[@]}" || run gcloud compute resource-policies create workload-policy "$name" \
    "${in_region[@]}" --type=HIGH_THROUGHPUT --accelerator-topology="$TOPOLOGY" || return
  exists instance-templates "${in_project[@]}" || run gcloud compute instance-templates create "$name" \
    "${in_project[@]}" --machine-type="$machine" --image-family="$image" --image-project=ubuntu-os-accelerator-images \
    --boot-disk-size=200GB --maintenance-policy=TERMINATE --scopes=cloud-platform "${provisioning[@]}" \
    ${service_account:+--service-account="$service_account"} ${network:+--network="$network"} \
    ${subnetwork:+--subnet="$subnetwork" --region="$region"} || return
  exists "instance-groups managed" "${in_project[@]}" || run "${group[@]}" create "$name" "${in_zone[@]}" \
    --size="$HOSTS" --template="$name" --workload-policy="$name" --default-action-on-vm-failure=do-nothing
}

# All instances RUNNING; a preempted one is STOPPED or gone, and a slice cannot go on without it.
running() {
  local states
  states=$(instances status) || return
  (($(grep -cx RUNNING <<<"$states") == HOSTS))
}

wait_ready() { run "${group[@]}" wait-until "$name" "${in_zone[@]}" --stable --timeout=3600; }

delete_group() {
  if ((DRY_RUN)) || exists "instance-groups managed" "${in_project[@]}"; then
    run "${group[@]}" delete "$name" "${in_zone[@]}" --quiet
  fi
}

delete() {
  delete_group
  if ((DRY_RUN)) || exists instance-templates "${in_project[@]}"; then
    run gcloud compute instance-templates delete "$name" "${in_project[@]}" --quiet
  fi
  if ((DRY_RUN)) || exists resource-policies "${in_project[@]}"; then
    run gcloud compute resource-policies delete "$name" "${in_region[@]}" --quiet
  fi
}

# A group of Spot instances does not come back by itself, nor without those that were preempted.
lost() { false; } # hosts that no longer answer have been noticed by then
make_way() { running || delete_group; }

slice_status() { instances 'name,status'; }

run_command
