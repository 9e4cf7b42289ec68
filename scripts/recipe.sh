# Sourced by recipes, in the repository's root: sets `is_dry_run` and `here` from the recipe's arguments, and defines
# `choose_python`. A dry run plans, and installs nothing.

is_dry_run=false
for argument in "$@"; do
    case "$argument" in --dry-run | --help | -h) is_dry_run=true ;; esac
done

here=python
[[ -x .venv/bin/python ]] && here=.venv/bin/python # where scripts/install.sh puts it

# choose_python EXTRA ...: PYTHON if it is set; for a dry run `here`; otherwise what scripts/install.sh installs.
choose_python() {
    if [[ -n "${PYTHON:-}" ]]; then
        echo "$PYTHON"
    elif $is_dry_run; then
        "$here" -c 'import rlkit, tyro' 2>/dev/null || {
            echo "$here has no rlkit, and a dry run installs nothing: run bash scripts/install.sh first, or set PYTHON" >&2
            return 1
        }
        echo "$here"
    else
        bash scripts/install.sh "$@"
    fi
}
