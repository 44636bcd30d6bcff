#!/usr/bin/env bash
# Prints the path of a supported Python interpreter.
#
#   scripts/find_python.sh               python3 if its version is supported, else the newest that is
#   scripts/find_python.sh newest        the newest of the supported versions that this machine has
#   scripts/find_python.sh 3.11          that version
#
# Looks on PATH and where pyenv and uv keep theirs. Every candidate is run: a pyenv shim may exist for a version that
# is not selected, and some systems ship a python3 that cannot make virtual environments.
set -uo pipefail

supported=(3.13 3.12 3.11)

usable() { # usable COMMAND VERSION: prints the interpreter's own path
    "$1" -c '
import ensurepip, sys, venv
sys.exit(f"{sys.version_info[0]}.{sys.version_info[1]}" != sys.argv[1]) if sys.argv[1] else None
' "$2" >/dev/null 2>&1 && "$1" -c 'import sys; print(sys.executable)'
}

candidates() { # candidates VERSION
    printf '%s\n' "python$1" python3
    local places=("${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python
        "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}/cpython-$1".*/bin/python3)
    printf '%s\n' "${places[@]}" | sort --version-sort --reverse
}

find_version() { # find_version VERSION
    local candidate
    while read -r candidate; do
        usable "$candidate" "$1" && return
    done < <(candidates "$1")
    return 1
}

wanted=${1:-}
case $wanted in
newest) versions=("${supported[@]}") ;;
"")
    versions=("${supported[@]}")
    for version in "${supported[@]}"; do
        usable python3 "$version" && exit
    done
    ;;
*) versions=("$wanted") ;;
esac
for version in "${versions[@]}"; do
    find_version "$version" && exit
done
echo "No usable Python ${versions[*]} found. Install one, or put it on PATH." >&2
exit 1
