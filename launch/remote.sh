# Running on every host of a TPU slice over SSH; sourced by the roads that have no scheduler (tpu_vm/, gce/).
#
# The sourcing script defines `on_all COMMAND`, which runs COMMAND on all hosts of the slice and fails if one does,
# and `copy_to_all FILE`, which places FILE in every home directory. For `up` also `create`, `wait_ready` and `delete`;
# `lost`: whether a failure was a preemption after all; `make_way`: what must go before `create` can follow one;
# `slice_status`: what the cloud says of the slice.
# shellcheck shell=bash
# shellcheck disable=SC2034,SC2154  # options are read here and used by the scripts

# The trainer is a systemd unit there: it outlives the SSH session, and gets SIGTERM, with time to save, when the
# machine is preempted or shut down. libtpu locks memory, of which services may have little by default.
UNIT=mars-train

COMMANDS=(up create wait setup run status logs delete)
name='' zone='' slice='' project='' service_account='' network='' subnetwork=''
max_failures=3 poll=30 lines=200 keep=0

# Reads the options of both roads and the script's own, in VALUES and SWITCHES.
parse_remote_options() {
  VALUES+=(name zone slice project service-account network subnetwork max-failures poll lines)
  SWITCHES+=(keep)
  ESTIMATES=1
  parse_options "$@"
  require slice
  parse_slice "$slice"
}

# What only a real slice needs.
check_remote_options() {
  require name zone
  check_name "$name"
  whole_numbers max_failures poll lines
  need gcloud "install the Google Cloud CLI"
}

# The hosts get the committed files only, and the trainer runs in their copy of the checkout.
check_committed_config() {
  local i file
  for ((i = 0; i < ${#TRAIN_ARGS[@]} - 1; i++)); do
    [[ ${TRAIN_ARGS[i]} == --config ]] || continue
    file=${TRAIN_ARGS[i + 1]}
    git -C "$ROOT" cat-file -e "HEAD:$file" 2>/dev/null ||
      die "--config $file: not in this checkout's last commit, which is what the hosts get (name it from the top)"
  done
}

# Copies this checkout's commit to every host and installs it. A host that has that commit installed is left as it is.
setup_hosts() {
  local commit archive=$ROOT/build/mars_jax.tar.gz
  commit=$(git -C "$ROOT" rev-parse HEAD) || return
  run mkdir -p "$ROOT/build" &&
    run git -C "$ROOT" archive --format=tar.gz --output="$archive" HEAD &&
    copy_to_all "$archive" &&
    on_all "mkdir -p mars_jax && tar -xzf mars_jax.tar.gz -C mars_jax && bash mars_jax/launch/setup_host.sh $commit"
}

# Starts the run on every host, unless it is running there.
start_workers() {
  on_all "[ \"\$(systemctl show $UNIT -p SubState --value)\" = running ] && exit 0; \
sudo systemctl stop $UNIT 2>/dev/null; sudo systemctl reset-failed $UNIT 2>/dev/null; \
sudo systemd-run --unit=$UNIT --remain-after-exit --uid=\$(id -un) --working-directory=\$HOME/mars_jax \
-p KillMode=mixed -p TimeoutStopSec=300 -p LimitMEMLOCK=infinity -p LimitNOFILE=1048576 \
--setenv=HOME=\$HOME --setenv=PYTHON=\$HOME/mars_env/bin/python \
\$HOME/mars_jax/launch/worker.sh $(quoted "${TRAIN_ARGS[@]}" mesh.distributed=true)"
}

# One `worker-state=SubState:ExecMainStatus` a host, such as running:0, exited:0 (done) or failed:75 (stopped early).
print_worker_states() {
  on_all "echo worker-state=\$(systemctl show $UNIT -p SubState --value):\$(systemctl show $UNIT -p ExecMainStatus --value)"
}

# Waits until no host runs the trainer any more; returns 0 done, 2 wrong input, 75 stopped early or lost, 1 failed.
follow_workers() {
  local states cause='' unreachable=0
  if ((DRY_RUN)); then
    print_worker_states
    return
  fi
  while true; do
    if states=$(print_worker_states | grep -o 'worker-state=[a-z-]*:[0-9]*' | cut -d= -f2); then
      unreachable=0
      if [[ -z $cause && $states == *failed:* ]]; then
        # The others wait for that host in a collective until they are stopped, and then end with 75 themselves.
        cause=$(grep failed: <<<"$states")
        on_all "sudo systemctl stop $UNIT" || true
      fi
      [[ $states == *running:* || $states == *stop*:* ]] || break
    else
      unreachable=$((unreachable + 1))
      ((unreachable < 3)) || return "$EXIT_STOPPED"
    fi
    sleep "$poll"
  done
  if grep -qx 'failed:2' <<<"$cause"; then return 2; fi
  if [[ -n $cause ]] && ! grep -qvx 'failed:75' <<<"$cause"; then return "$EXIT_STOPPED"; fi
  [[ -z $cause ]] && ! grep -qvx 'exited:0' <<<"$states"
}

last_logs() { on_all "journalctl --unit=$UNIT --no-pager --output=cat --lines=${1:-200}"; }

run_workers() {
  check_train_args
  check_committed_config
  check_durable_output
  start_workers
  follow_workers
}

# From nothing to the end of the run on one slice, however it ends.
one_life() {
  create && wait_ready && setup_hosts && start_workers || return 1
  follow_workers
}

# Lives of the run until one ends by itself; `max_failures` of them may crash.
up() {
  local failures=0 code
  check_train_args
  check_committed_config
  check_durable_output
  ((keep)) || trap delete EXIT # a slice left behind costs money
  while true; do
    code=0
    one_life || code=$?
    case $code in
      0) log "done" && return ;;
      2) last_logs 20 >&2 || true && return 2 ;;
    esac
    if [[ $code == "$EXIT_STOPPED" ]] || lost; then
      log "preempted; starting again"
      make_way || return
    else
      failures=$((failures + 1))
      if ((failures > max_failures)); then
        last_logs 50 >&2 || true
        log "gave up after $failures failures"
        return 1
      fi
      log "failed, $failures of $max_failures; starting again"
    fi
    sleep "$poll"
  done
}

run_command() {
  case $command in
    up) up ;;
    create) create ;;
    wait) wait_ready ;;
    setup) setup_hosts ;;
    run) run_workers ;;
    status) slice_status && print_worker_states ;;
    logs) last_logs "$lines" ;;
    delete) delete ;;
  esac
}
