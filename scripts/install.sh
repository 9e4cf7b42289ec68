#!/usr/bin/env bash
# Installs rlkit into a virtual environment of its own and prints the environment's python as its last line.
#
#   scripts/install.sh [EXTRA ...]      extras of pyproject.toml, e.g. dev smollm2
#
# Environment:
#   RLKIT_VENV         where (default: .venv in the repository)
#   RLKIT_PYTHON       which Python >= 3.11 makes it (default: python3)
#   RLKIT_TORCH        which torch (default: torch==2.13.0)
#   RLKIT_TORCH_INDEX  index for torch alone; https://download.pytorch.org/whl/cpu has the small CPU build for Linux
#
# A second call with the same pyproject.toml and extras installs nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${RLKIT_VENV:-.venv}
torch=${RLKIT_TORCH:-torch==2.13.0}
stamp="$(sha256sum pyproject.toml | cut -d' ' -f1) $torch $*"
if [[ -f "$venv/.rlkit_installed" && "$(cat "$venv/.rlkit_installed")" == "$stamp" ]]; then
    echo "$venv/bin/python"
    exit
fi

say() { echo "install: $*" >&2; }
started=$SECONDS
python=${RLKIT_PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    say "$python is $("$python" --version 2>&1); rlkit needs Python 3.11 or later (set RLKIT_PYTHON)"
    exit 1
}
[[ -x "$venv/bin/python" ]] || "$python" -m venv "$venv"
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet)

# torch first and by itself: resolved together with the rest, a newer CUDA build of several GB could be chosen.
say "$torch into $venv"
"${pip[@]}" ${RLKIT_TORCH_INDEX:+--index-url "$RLKIT_TORCH_INDEX"} "$torch" 2> >(grep -v '^WARNING: Location' >&2 || true)
extras=$(IFS=,; echo "$*")
say "rlkit${extras:+[$extras]} and what it needs"
"${pip[@]}" --editable ".${extras:+[$extras]}" "$torch" 2> >(grep -v '^WARNING: Location' >&2 || true)
echo "$stamp" > "$venv/.rlkit_installed"
say "done in $((SECONDS - started)) s"
echo "$venv/bin/python"
