#!/usr/bin/env bash
# Trains a small GPT on two processes. The first call makes .venv; options go to train_gpt.py, see --help there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$root/.ci/setup_venv.sh"
setup_venv examples
cd "$root"
export OMP_NUM_THREADS=1
exec .venv/bin/python -m torch.distributed.run --nproc-per-node 2 examples/train_gpt.py "$@"
