#!/usr/bin/env bash
# From a fresh machine to the tables of claims: bash launch/demo.sh
# Installs into .venv, measures a pretrained language model into runs/smollm2, trains the quick preset (12 runs) into runs/mlp,
# and reports on both. The same command resumes.
source "$(dirname "$0")/setup.sh"
"$VENV/bin/gcjax" measure smollm2-135m --workdir runs/smollm2
"$VENV/bin/gcjax" train --config configs/mlp_ablation.py:quick --workdir runs/mlp
