#!/usr/bin/env bash
# Builds the release preset quietly: targets as arguments, everything without. GRAFT_CMAKE_ARGS is passed to cmake.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

log=build/release/build.log
mkdir -p build/release
fail() {
  tail -n 40 "$log"
  echo "build.sh: the build failed; the whole log is in $log" >&2
  exit 1
}

echo "building (release)"
# shellcheck disable=SC2086  # several arguments in one variable
cmake --preset release ${GRAFT_CMAKE_ARGS:-} >"$log" 2>&1 || fail
if [ $# -gt 0 ]; then
  cmake --build --preset release --target "$@" >>"$log" 2>&1 || fail
else
  cmake --build --preset release >>"$log" 2>&1 || fail
fi
