#!/usr/bin/env bash
# Runs the tests. The first call makes .venv; options go to pytest. `tests/run.sh --slow` runs the slow ones instead.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/.ci/setup_venv.sh"
setup_venv test,examples
cd "$root"
if [[ ${1:-} == --slow ]]; then
    shift
    set -- -m slow "$@"
fi
exec .venv/bin/python -m pytest "$@"
