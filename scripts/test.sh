#!/usr/bin/env bash
# From a fresh clone to passing tests: sets up, builds everything, runs ctest. Arguments go to ctest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
scripts/build.sh
# Tests run side by side; an idle OpenMP thread must not spin on the other's core.
export OMP_WAIT_POLICY=passive
exec ctest --preset release --parallel "$(nproc)" --timeout 900 "$@"
