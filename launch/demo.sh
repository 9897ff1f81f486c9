#!/usr/bin/env bash
# From a fresh machine to the table of claims: bash launch/demo.sh
# Installs into .venv, trains the quick preset (12 runs), and reports into runs/mlp. The same command resumes.
source "$(dirname "$0")/setup.sh"
"$VENV/bin/gcjax" train --config configs/mlp_ablation.py:quick --workdir runs/mlp
