# Reading the words that a launch script is given; sourced by common.sh.
#
# A script names its commands in COMMANDS, its options with a value in VALUES and those without in SWITCHES, gives each
# its default, and calls `parse_options "$@"`. Then `--num-slices 2` is num_slices=2, `--spot` is spot=1, the command is
# `command`, and what follows `--` is TRAIN_ARGS. An option that may be repeated has a function option_NAME, which gets
# its value. Every script takes --dry-run and --help; ESTIMATES=1 adds --estimate and what goes with it.
# shellcheck shell=bash
# shellcheck disable=SC2034  # the variables set here are used by the scripts

COMMANDS=()
VALUES=()
SWITCHES=()
ESTIMATES=0
ESTIMATE_OPTIONS=(rows architecture efficiency prices) # only mars_jax.estimate understands these

parse_options() {
  local option
  if ((${#COMMANDS[@]})); then
    command=${1:---help}
    if [[ $command != --* ]]; then shift; fi
  fi
  while (($#)); do
    option=${1#--}
    if [[ $1 == -- ]]; then
      TRAIN_ARGS=("${@:2}")
      break
    elif [[ $1 == --dry-run ]]; then
      DRY_RUN=1
    elif [[ $1 == --help ]]; then
      usage && exit 0
    elif ((ESTIMATES)) && [[ $1 == --estimate ]]; then
      ESTIMATE=1
    elif [[ $1 == --* ]] && among "$option" "${SWITCHES[@]}"; then
      printf -v "${option//-/_}" 1
    elif [[ $1 == --* ]] && { among "$option" "${VALUES[@]}" || is_estimate_option "$option"; }; then
      # Neither `--name --zone x` nor a trailing `--name`.
      [[ $# -ge 2 && -n $2 && $2 != --* ]] || die "$1 needs a value (--help shows an example)"
      take_value "$option" "$2"
      shift
    else
      die "unknown option $1 (--help lists them)"
    fi
    shift
  done
  ((${#COMMANDS[@]} == 0)) || check_command
}

among() {
  local word
  for word in "${@:2}"; do [[ $word != "$1" ]] || return 0; done
  return 1
}

is_estimate_option() { ((ESTIMATES)) && among "$1" "${ESTIMATE_OPTIONS[@]}"; }

take_value() {
  if is_estimate_option "$1"; then
    ESTIMATE_ARGS+=("--$1" "$2")
  elif declare -F "option_$1" >/dev/null; then
    "option_$1" "$2"
  else
    printf -v "${1//-/_}" %s "$2"
  fi
}

check_command() {
  if [[ $command == --help ]]; then usage && exit 0; fi
  [[ $command != --* ]] || die "no command: expected one of ${COMMANDS[*]}"
  among "$command" "${COMMANDS[@]}" || die "unknown command $command: expected one of ${COMMANDS[*]}"
}

# require NAME …: options that have no default.
require() {
  local option
  for option; do [[ -n ${!option} ]] || die "--${option//_/-} is missing (--help shows an example)"; done
}

whole_numbers() {
  local option
  for option; do [[ ${!option} =~ ^[0-9]+$ ]] || die "--${option//_/-} ${!option}: expected a whole number"; done
}

# Cloud names: what GKE, Compute Engine and Slurm all accept.
check_name() {
  [[ $1 =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] || die "--name $1: use a-z, 0-9 and '-', at most 40, a letter first"
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
