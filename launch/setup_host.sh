#!/usr/bin/env bash
# Installs mars_jax on a TPU host, in $HOME/mars_env. Run there, by the setup steps of tpu_vm/ and gce/.
#
#   launch/setup_host.sh COMMIT
#
# COMMIT only marks what is installed: with the same one again it does nothing. The images come with an older
# Python, so uv brings its own.

set -euo pipefail
case ${1:-} in
  --help | '') sed -n '2,/^$/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit 0 ;;
  --dry-run) echo "would install $(dirname "${BASH_SOURCE[0]}")/.. into $HOME/mars_env" && exit 0 ;;
esac

if [[ -f $HOME/mars_env/commit && $(cat "$HOME/mars_env/commit") == "$1" ]]; then
  echo "mars_jax $1 is installed"
  exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH=$HOME/.local/bin:$PATH
command -v uv >/dev/null || curl -LsSf https://astral.sh/uv/install.sh | sh
rm -rf "$HOME/mars_env"
uv venv --quiet --python 3.12 "$HOME/mars_env"
uv pip install --quiet --python "$HOME/mars_env/bin/python" --editable '.[data,tpu,gcs]'
echo "$1" >"$HOME/mars_env/commit"
