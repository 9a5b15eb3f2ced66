#!/usr/bin/env bash
# From a fresh clone to the main job's table: sets up, builds, and turns SmolLM2-135M-Instruct into a linear-recurrent
# student. Results land in runs/demo/. Further arguments go to hostapp. What the demo does not need of graft is built
# once the table is there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh
scripts/build.sh hostapp gdn taylor projection_copy layer_alignment

text=data/text
build/release/bin/hostapp --mixer gdn --init taylor \
  --teacher data/teacher/SmolLM2-135M-Instruct \
  --text $text/emma.txt $text/mansfield_park.txt $text/sense___sensibility.txt $text/pride___prejudice.txt \
         $text/northanger_abbey.txt \
  --eval-text $text/persuasion.txt \
  --keep-attention none uniform:4 --compare all \
  --out runs/demo --force "$@"

echo "the other plugins:"
scripts/build.sh hostapp graft_plugins
