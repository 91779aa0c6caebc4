#!/usr/bin/env bash
# One worker of a run: starts the trainer, hands SIGTERM on to it, and tells "stopped early" from "done".
#
#   launch/worker.sh --config FILE [key=value …]
#
# The trainer answers SIGTERM by saving and exiting with 0, which is also how a finished run ends. Only the
# first must be started again, so a worker that was told to stop exits with 75 (EX_TEMPFAIL). Every road in
# launch/ ends here, and so in `python -m mars_jax.train --config FILE key=value …`. PYTHON names the
# interpreter. --dry-run first prints that command and stops.

set -uo pipefail

case ${1:-} in
  --help | '')
    sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    [[ ${1:-} == --help ]] && exit 0
    exit 2
    ;;
  --dry-run)
    shift
    echo "${PYTHON:-python3} -m mars_jax.train $*"
    exit 0
    ;;
esac

"${PYTHON:-python3}" -m mars_jax.train "$@" &
trainer=$!
stopped=0
interrupted=0
trap 'stopped=1; interrupted=1; kill -TERM "$trainer" 2>/dev/null' TERM INT

# A trapped signal ends `wait` early with a status above 128; the trainer is still saving then.
while true; do
  interrupted=0
  wait "$trainer"
  status=$?
  ((interrupted && status > 128)) || break
done

# 143: the signal came before the trainer could handle it. 127: it was already reaped when asked again.
if ((stopped)) && [[ $status == 0 || $status == 143 || $status == 127 ]]; then
  exit 75
fi
exit "$status"
