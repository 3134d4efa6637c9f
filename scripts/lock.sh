#!/usr/bin/env bash
# Resolves requirements/base.txt and requirements/dev.txt together, so that both pin the same versions.
set -euo pipefail
cd "$(dirname "$0")/.."
uv=.venv/bin/uv
options=(--quiet --python-version 3.11 --no-header --no-annotate --overrides requirements/overrides.txt)
if wheels=$(.venv/bin/python -m pip config get global.find-links 2>/dev/null) && [ -n "$wheels" ]; then
    options+=(--find-links "$wheels" --no-emit-find-links)
fi
"$uv" pip compile pyproject.toml --extra demo requirements/dev.in "${options[@]}" -o requirements/dev.txt
# A local build such as 2.13.0+cpu is one machine's choice; the pin names the release.
sed -i 's/+cpu$//' requirements/dev.txt
"$uv" pip compile pyproject.toml --extra demo "${options[@]}" -c requirements/dev.txt -o requirements/base.txt
sed -i 's/+cpu$//' requirements/base.txt
