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
# A second call with the same pyproject.toml and no other extras installs nothing. About 1.7 GB, two to four minutes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${RLKIT_VENV:-.venv}
torch=${RLKIT_TORCH:-torch==2.13.0}
# The stamp's first line says for which pyproject.toml and torch; every further line is an extra that is there.
base="$(sha256sum pyproject.toml | cut -d' ' -f1) $torch"
stamp="$venv/.rlkit_installed"
if [[ -f "$stamp" && "$(head -n 1 "$stamp")" == "$base" ]]; then
    is_complete=true
    for extra in "$@"; do
        grep -qx "$extra" <(tail -n +2 "$stamp") || is_complete=false
    done
    if $is_complete; then
        echo "$venv/bin/python"
        exit
    fi
    set -- $(printf '%s\n' "$@" $(tail -n +2 "$stamp") | sort -u)
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
printf '%s\n' "$base" "$@" > "$stamp"
say "done in $((SECONDS - started)) s"
echo "$venv/bin/python"
