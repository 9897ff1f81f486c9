#!/usr/bin/env bash
# Installs with the test extras into .venv and runs the checks and the tests: bash launch/test.sh [pytest arguments]
EXTRAS=test source "$(dirname "$0")/setup.sh"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/pyright" --pythonpath "$VENV/bin/python"
"$VENV/bin/lint-imports"
"$VENV/bin/python" -m pytest "$@"
