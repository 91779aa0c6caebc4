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
VALUES=(name cluster location slice image project num-slices queue restarts grace manifest)
ESTIMATES=1
parse_options "$@"
check_submission name cluster location image
whole_numbers restarts
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
  --command "$(worker_command)"
