#!/usr/bin/env bash
# Installs stock SGLang for tests on a machine without a GPU (about 9 GB, several minutes):
#
#   bash scripts/install_sglang_cpu.sh .venv-sglang
#   RLKIT_SGLANG_PYTHON=.venv-sglang/bin/python pytest -m sglang tests/engines
#
# Needs Python 3.12 (PYTHON=... names another interpreter) and a C compiler. Running it again repairs what is missing.
set -euo pipefail

venv=${1:?usage: install_sglang_cpu.sh VENV}
python=${PYTHON:-python3.12}
version=0.5.17
files=$(cd "$(dirname "${BASH_SOURCE[0]}")/../tests/engines/sglang_cpu" && pwd)

[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
if ! "$venv/bin/python" -c "import importlib.metadata as m; assert m.version('sglang') == '$version'; m.version('accelerate')" 2>/dev/null; then
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "sglang==$version" accelerate
fi

mkdir -p "$venv/lib/libcuda_stub"
cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o "$venv/lib/libcuda_stub/libcuda.so.1" "$files/libcuda_stub.c"
site=$("$venv/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
cp "$files/sitecustomize.py" "$site/sitecustomize.py"

SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" -c "import sgl_kernel, torch_memory_saver"
echo "SGLang $version is ready: RLKIT_SGLANG_PYTHON=$venv/bin/python"
