#!/usr/bin/env bash
# Checks and times every kernel, the runner and a model on this machine's GPU; see device_check.py. Needs nothing
# installed but torch and what comes with it, and no network.
#
#   PYTHON=python3.12   which interpreter has torch
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH}"
export OCTAVO_CACHE="${OCTAVO_CACHE:-$PWD/build/device_cache}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
exec timeout 480 "${PYTHON:-python3}" -m benchmarks.device_check "$@"
