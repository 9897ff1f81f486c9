# Sourced by the other scripts: makes .venv beside this folder (PYTHON chooses the interpreter) and installs the package with
# the extras in EXTRAS. Needs Python >= 3.11, pip and a package index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "gcjax needs Python >= 3.11; set PYTHON" >&2; exit 1; }
VENV=${VENV:-.venv}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
"$VENV/bin/python" -m pip install --quiet --upgrade pip
"$VENV/bin/python" -m pip install --quiet --editable ".${EXTRAS:+[$EXTRAS]}"
