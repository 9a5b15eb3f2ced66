#!/usr/bin/env bash
# The tables of docs/results.md on the demo's teacher and text, one by one. scripts/demo.sh must have run before.
#
#   scripts/results.sh ablation     what each part of Taylor-Calibrate is worth
#   scripts/results.sh distil       perplexity against distillation tokens, from each start
#   scripts/results.sh hedgemamba   splits of one budget, the mixer's parts, the direct control
#   scripts/results.sh layers       policies that choose which layers keep their attention
#   scripts/results.sh best         the best hybrid and all-recurrent student of 60,000 tokens (the latter from the demo's)
#
# Runs land in runs/NAME. Figures are from persuasion; the other five novels are what is read.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

hostapp=build/release/bin/hostapp
teacher=data/teacher/SmolLM2-135M-Instruct
novels=(emma mansfield_park sense___sensibility pride___prejudice northanger_abbey)
text=()
for novel in "${novels[@]}"; do text+=("data/text/$novel.txt"); done
data=(--teacher "$teacher" --text "${text[@]}" --eval-text data/text/persuasion.txt)

# convert OUT ARGUMENT...: the main job.
convert() {
  local out=$1
  shift
  "$hostapp" --mixer gdn --init taylor "${data[@]}" --out "runs/$out" --force "$@"
}

# train OUT RECIPE ARGUMENT...
train() {
  local out=$1 recipe=$2
  shift 2
  "$hostapp" train "$recipe" "${data[@]}" --out "runs/$out" --force --set eval.windows=6 "$@"
}

table() { .deps/venv/bin/python scripts/results_table.py "$@"; }

ablation() { convert ablation --keep-attention none uniform:4 --config recipes/baselines/ablation.toml --compare all; }

distil() {
  local quick=(--keep-attention uniform:4 --agreement.prompts 0 --eval.windows 1)
  convert distil-start/naive "${quick[@]}" --init projection_copy --recipe none --calibrate.enabled false
  convert distil-start/taylor "${quick[@]}" --calibrate.enabled false
  convert distil-start/calibrated "${quick[@]}"
  local runs=()
  for start in naive taylor calibrated; do
    local lr=7e-4
    [ "$start" = calibrated ] && lr=2e-4
    train "distil/$start" distil --student "runs/distil-start/$start/student" --set stage.distil.tokens=20480 \
      --set stage.distil.lr=$lr --set stage.distil.eval_every=10
    runs+=("runs/distil/$start")
  done
  table "${runs[@]}"
}

hedgemamba() {
  local budget=(--set budget=12288) runs=()
  for split in 100-0 0-100 50-50 10-90; do
    local scale=()
    [ $split = 10-90 ] || scale=(--set scale=$split)
    train "hedgemamba/$split" hedgemamba "${scale[@]}" "${budget[@]}"
    runs+=("runs/hedgemamba/$split")
  done
  local part
  for part in decay=false short_conv=0 output_gate=false; do
    train "hedgemamba/10-90-${part%=*}" hedgemamba "${budget[@]}" --set "stage.mamba.mixer.options.$part"
    runs+=("runs/hedgemamba/10-90-${part%=*}")
  done
  train hedgemamba/direct hedgemamba-direct "${budget[@]}"
  table "${runs[@]}" runs/hedgemamba/direct
}

layers() {
  local lists=() policy
  for policy in ar ga-s2 swap-kl; do
    "$hostapp" select-layers --policy $policy --keep 8 --mixer gdn --init taylor "${data[@]}" \
      --out "runs/layers/$policy.json" --force
    lists+=("runs/layers/$policy.json")
  done
  convert layers/students --keep-attention uniform:4 "${lists[@]}" --calibrate.enabled false
}

best() {
  "$hostapp" select-layers --policy swap-kl --keep 8 --mixer gdn --init taylor "${data[@]}" \
    --out runs/best/layers.json --force
  convert best/hybrid-start --keep-attention runs/best/layers.json
  train best/hybrid distil --student runs/best/hybrid-start/student
  train best/all distil --student runs/demo/student --set eval.windows=16
  table runs/best/hybrid runs/best/all
}

case ${1:-} in
  ablation | distil | hedgemamba | layers | best) "$1" ;;
  *) sed -n '2,11s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
