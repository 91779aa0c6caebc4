#!/usr/bin/env bash
# Submit a run to a GKE cluster made with Google's Cluster Toolkit. A thin wrapper of `gcluster job submit`.
#
#   launch/gke/gcluster.sh --name mars --cluster my-cluster --project my-project --location us-east5-b \
#     --slice v6e:4x4 --image us-docker.pkg.dev/my-project/mars/mars-jax:latest -- \
#     --config configs/paper/0p5b_mars_b4.yaml output_dir=gs://my-bucket/runs/mars
#
#   --name NAME --cluster NAME --location REGION_OR_ZONE --slice GENERATION:TOPOLOGY --image IMAGE   always
#   --project ID         default: gcloud's own
#   --num-slices N       (default 1)
#   --queue NAME         Kueue LocalQueue (default: the cluster's)
#   --restarts N         of the whole job, preemptions included (default 100)
#   --grace TIME         from SIGTERM to SIGKILL (default 10m)
#   --manifest FILE      write the JobSet there instead of submitting it
#   --estimate           fit, step time and device-hours; asks the compiler, not the cloud
#                        [--rows N] [--architecture FILE] [--efficiency F] [--prices FILE]
#   --dry-run            print the command and run nothing
#
# gcluster itself refuses a second job of the same name. `gcluster job list|logs|cancel` do the rest.

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

name='' cluster='' location='' slice='' image='' project='' queue='' manifest=''
num_slices=1 restarts=100 grace=10m
while (($#)); do
  case $1 in
    --name) set_option name "$@" && shift ;;
    --cluster) set_option cluster "$@" && shift ;;
    --location) set_option location "$@" && shift ;;
    --slice) set_option slice "$@" && shift ;;
    --image) set_option image "$@" && shift ;;
    --project) set_option project "$@" && shift ;;
    --num-slices) set_option num_slices "$@" && shift ;;
    --queue) set_option queue "$@" && shift ;;
    --restarts) set_option restarts "$@" && shift ;;
    --grace) set_option grace "$@" && shift ;;
    --manifest) set_option manifest "$@" && shift ;;
    --prices | --rows | --architecture | --efficiency) estimate_option "$@" && shift ;;
    --estimate) ESTIMATE=1 ;;
    --dry-run) DRY_RUN=1 ;;
    --help) usage && exit 0 ;;
    --) shift && TRAIN_ARGS=("$@") && break ;;
    *) die "unknown option $1 (--help lists them)" ;;
  esac
  shift
done
require slice
parse_slice "$slice"
whole_number num_slices
check_train_args
if ((ESTIMATE)); then
  estimate "$slice" "$num_slices"
  exit
fi
for option in name cluster location image; do require "$option"; done
check_name "$name"
whole_number restarts
check_durable_output
need gcluster "install Cluster Toolkit"

# The machine type names generation and chips a host; gcluster derives the number of hosts from the topology.
case $GENERATION in
  v4) machine=ct4p-hightpu-4t ;;
  v5e) machine=ct5lp-hightpu-4t ;;
  v5p) machine=ct5p-hightpu-4t ;;
  v6e) machine=ct6e-standard-4t ;;
  tpu7x) machine=tpu7x-standard-4t ;;
esac
# On TPU7x gcluster would start two containers a host, each with half of its chips.
one_container=()
if [[ $GENERATION == tpu7x ]]; then one_container=(--gke-disable-parallel-containers); fi
run gcluster job submit --name "$name" --cluster "$cluster" --location "$location" ${project:+--project "$project"} \
  --image "$image" --compute-type "$machine" --topology "$TOPOLOGY" --num-slices "$num_slices" \
  --restarts "$restarts" --grace-period "$grace" ${queue:+--queue "$queue"} ${manifest:+--dry-run-out "$manifest"} \
  "${one_container[@]}" \
  --command "launch/worker.sh $(quoted "${TRAIN_ARGS[@]}" mesh.distributed=true)"
