#!/usr/bin/env bash
# Builds .venv from pinned requirements: scripts/install.sh base|dev. Run again, it only adds what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
set_name=${1:-base}
python=${PYTHON:-python3}
uv_version=0.13.8

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: Ullim needs Python 3.11 or newer; $("$python" --version) was found. Write: make PYTHON=python3.11 ..." >&2
    exit 2
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip >/dev/null  # a .venv made by uv has none
[ -x .venv/bin/uv ] && .venv/bin/uv --version | grep -q " $uv_version" || .venv/bin/python -m pip install --quiet "uv==$uv_version"

# uv does not read pip's configuration; hand it the folder of wheels that pip would use, where there is one.
options=()
if wheels=$(.venv/bin/python -m pip config get global.find-links 2>/dev/null) && [ -n "$wheels" ]; then
    options+=(--find-links "$wheels")
elif ! command -v nvidia-smi >/dev/null; then
    options+=(--torch-backend cpu)  # PyPI's torch carries several GB of CUDA that a CPU cannot use
fi

echo "installing pinned requirements ($set_name) into .venv"
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps "${options[@]}" -r "requirements/$set_name.txt"
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --editable .
touch ".venv/$set_name.installed"
