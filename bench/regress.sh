#!/usr/bin/env bash
# regress.sh BEFORE [AFTER] [options of side_by_side.py...]: the kernels of two commits (AFTER: the working tree), in turn,
# in one run. "before x1.20" says that AFTER is 1.2 times as fast. PYTHON names an interpreter with PyTorch.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"; git -C "$root" worktree prune' EXIT

build() {  # build COMMIT FOLDER
  git -C "$root" worktree add --quiet --detach "$work/$2" "$1"
  [ -e "$work/$2/.deps" ] || ln -s "$root/.deps" "$work/$2/.deps"
  cmake -S "$work/$2" -B "$work/$2/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DGRAFT_BUILD_BENCHMARKS=ON \
    -DGRAFT_BUILD_TESTS=OFF >/dev/null
  cmake --build "$work/$2/build" --target graft_bench >/dev/null
}

before=${1:?usage: regress.sh BEFORE [AFTER] [options]}
shift
build "$before" before
library=$root/build/release/lib/libgraft_bench.so
if [ $# -gt 0 ] && [[ $1 != -* ]]; then
  build "$1" after
  library=$work/after/build/lib/libgraft_bench.so
  shift
fi
"${PYTHON:-python3}" "$root/bench/side_by_side.py" --library "$library" --against "$work/before/build/lib/libgraft_bench.so" "$@"
