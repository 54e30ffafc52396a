# Sourced by examples/quickstart.sh, tests/run.sh and .ci/run, which set `root` to the repository.
# shellcheck shell=bash

# setup_venv EXTRAS: makes $root/.venv if it is missing and installs the package into it, editable, with the extras.
# A stamp holds a checksum of what was installed; while it fits, nothing is done.
setup_venv() {
    local extras=$1 python="$root/.venv/bin/python" stamp="$root/.venv/stamp-$1" checksum candidate
    checksum=$(cat "$root/pyproject.toml" "$root/.ci/constraints.txt" | cksum)
    if [[ -x $python && -f $stamp && $(<"$stamp") == "$checksum" ]]; then
        return
    fi
    if [[ ! -x $python ]]; then
        for candidate in python3.11 python3; do
            if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
                break
            fi
            candidate=
        done
        if [[ -z $candidate ]]; then
            echo "megabuf_fx needs Python 3.11 or later; neither python3.11 nor python3 is one" >&2
            return 1
        fi
        echo "making .venv with $("$candidate" --version)" >&2
        "$candidate" -m venv "$root/.venv"
    fi
    echo "installing megabuf_fx[$extras] into .venv" >&2
    "$python" -m pip install --quiet --constraint "$root/.ci/constraints.txt" --editable "$root[$extras]"
    echo "$checksum" >"$stamp"
}
