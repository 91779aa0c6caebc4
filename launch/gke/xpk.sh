#!/usr/bin/env bash
# Submit a run to a GKE cluster made with XPK. A thin wrapper of `xpk workload create`.
#
#   launch/gke/xpk.sh --name mars --cluster my-cluster --project my-project --zone us-east5-b \
#     --slice v6e:4x4 --image us-docker.pkg.dev/my-project/mars/mars-jax:latest -- \
#     --config configs/paper/0p5b_mars_b4.yaml output_dir=gs://my-bucket/runs/mars
#
#   --name NAME --cluster NAME --zone ZONE --slice GENERATION:TOPOLOGY --image IMAGE   always
#   --project ID         default: gcloud's own
#   --num-slices N       (default 1)
#   --max-restarts N     of the whole job, preemptions included (default 100)
#   --grace SECONDS      from SIGTERM to SIGKILL (default 600)
#   --priority P         very-low, low, medium, high or very-high (default medium)
#   --estimate           fit, step time and device-hours; asks the compiler, not the cloud
#                        [--rows N] [--architecture FILE] [--efficiency F] [--prices FILE]
#   --dry-run            print the command and run nothing
#
# Google is moving XPK's users to Cluster Toolkit: for a new cluster take launch/gke/gcluster.sh. xpk itself refuses
# a second workload of the same name. `xpk workload list|delete` do the rest.

# shellcheck source=launch/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

name='' cluster='' zone='' slice='' image='' project='' num_slices=1 max_restarts=100 grace=600 priority=medium
VALUES=(name cluster zone slice image project num-slices max-restarts grace priority)
ESTIMATES=1
parse_options "$@"
check_submission name cluster zone image
whole_numbers max_restarts grace
need xpk "pip install xpk"

# XPK names slices by cores for generations with two cores a chip, by chips for the others.
case $GENERATION in
  v5e) tpu_type=v5litepod-$CHIPS ;;
  v6e) tpu_type=v6e-$CHIPS ;;
  *) tpu_type=$GENERATION-$((2 * CHIPS)) ;;
esac
# worker.sh exits with 75 when it was stopped early, which XPK takes for a failure of user code: that must restart too.
run xpk workload create --workload "$name" --cluster "$cluster" --zone "$zone" ${project:+--project "$project"} \
  --tpu-type "$tpu_type" --num-slices "$num_slices" --docker-image "$image" --max-restarts "$max_restarts" \
  --restart-on-user-code-failure --termination-grace-period-seconds "$grace" --priority "$priority" \
  --command "$(worker_command)"
