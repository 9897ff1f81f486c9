#!/usr/bin/env bash
# gcjax on a Cloud TPU slice, a process on every host of it. gcjax's own arguments come after this file's name:
#
#   export PROJECT=my-project ZONE=us-west4-a NFS=10.0.0.2:/runs
#   bash launch/tpu_vm.sh train --config configs/llama_wikitext.py:34m --workdir runs/34m --config.executor.data_devices=16
#
# Asks for the slice as a queued resource, waits until it is there, copies and installs gcjax, runs it. The same command goes
# on with a slice that is there already, and after a preemption asks for a new one and resumes. Needs gcloud, logged in.
#
# To edit, or to set in the environment. NFS, a share that is mounted as runs/ (Filestore, say), is not needed on one host.
NAME=${NAME:-gcjax}
TYPE=${TYPE:-v5litepod-16}
VERSION=${VERSION:-v2-alpha-tpuv5-lite} # the software that goes with TYPE: https://cloud.google.com/tpu/docs/runtimes
SPOT=${SPOT---spot}                     # SPOT= in the environment: not preemptible

set -euo pipefail
cd "$(dirname "$0")/.."
: "${PROJECT:?is the Google Cloud project to run in}" "${ZONE:?is the zone to run in}"
NFS=${NFS:-}

tpus() { gcloud compute tpus "$@" --project="$PROJECT" --zone="$ZONE" --quiet; }
state() { tpus queued-resources describe "$NAME" --format='value(state.state)' 2>/dev/null || echo NONE; }
on_all() { tpus tpu-vm ssh "$NAME" --worker=all --command="$1"; }

now=$(state)
case "$now" in FAILED | SUSPENDED) tpus queued-resources delete "$NAME" --force && now=NONE ;; esac
if [ "$now" = NONE ]; then
  tpus queued-resources create "$NAME" --node-id="$NAME" --accelerator-type="$TYPE" --runtime-version="$VERSION" ${SPOT:+"$SPOT"}
fi
trap 'echo "To delete the slice: gcloud compute tpus queued-resources delete $NAME --force --project=$PROJECT --zone=$ZONE"' EXIT
while now=$(state) && [ "$now" != ACTIVE ]; do
  case "$now" in FAILED | SUSPEND* | NONE) echo "no slice: the queued resource $NAME is $now" >&2 && exit 1 ;; esac
  echo "$(date +%T) $NAME is $now"
  sleep 30
done

archive=$(mktemp)
tar -czf "$archive" pyproject.toml README.md gcjax configs
tpus tpu-vm scp "$archive" "$NAME:gcjax.tar.gz" --worker=all
rm "$archive"
on_all "set -e; mkdir -p gcjax/runs; tar -xzf gcjax.tar.gz -C gcjax; cd gcjax
  sudo apt-get -qq update; sudo apt-get -qq -o DPkg::Lock::Timeout=300 install -y python3.11-venv nfs-common
  [ -z '$NFS' ] || mountpoint -q runs || sudo mount -t nfs '$NFS' runs
  python3.11 -m venv .venv; .venv/bin/pip install --quiet . 'jax[tpu]'"
on_all "cd gcjax && .venv/bin/gcjax $(printf '%q ' "$@") --distributed" || {
  code=$?
  echo "ended with code $code; the same command resumes" >&2
  exit "$code"
}
