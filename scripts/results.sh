#!/usr/bin/env bash
# The tables of docs/results.md on the demo's teacher and text, one by one. scripts/demo.sh must have run before.
#
#   scripts/results.sh ablation     what each part of Taylor-Calibrate is worth
#   scripts/results.sh distil       perplexity against distillation tokens, from each start
#   scripts/results.sh hedgemamba   splits of one budget, the mixer's parts, the direct control
#   scripts/results.sh layers       policies that choose which layers keep their attention
#   scripts/results.sh experiments  other ways to convert: student-forced, corrected MLPs, a cheaper decay
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

# Smaller measurements than the demo's: there are many.
quick=(--eval.windows 6 --agreement.prompts 8 --agreement.tokens 24)

# convert OUT ARGUMENT...: the main job.
convert() {
  local out=$1
  shift
  "$hostapp" --mixer gdn --init taylor "${data[@]}" "${quick[@]}" --out "runs/$out" --force "$@"
}

# train OUT RECIPE ARGUMENT...
train() {
  local out=$1 recipe=$2
  shift 2
  "$hostapp" train "$recipe" "${data[@]}" --out "runs/$out" --force --set eval.windows=6 "$@"
}

# select POLICY OUT ARGUMENT...: which 8 layers keep their attention.
select_layers() {
  local policy=$1 out=$2
  shift 2
  mkdir -p "runs/$(dirname "$out")"
  "$hostapp" select-layers --policy "$policy" --keep 8 --mixer gdn --init taylor "${data[@]}" \
    --out "runs/$out.json" --force "$@"
}

table() { .deps/venv/bin/python scripts/results_table.py "$@"; }

ablation() { convert ablation --keep-attention none uniform:4 --config recipes/baselines/ablation.toml --compare all; }

distil() {
  convert distil-start/naive --init projection_copy --recipe none --calibrate.enabled false
  convert distil-start/taylor --calibrate.enabled false
  local runs=() start
  for start in naive taylor calibrated; do
    local student=runs/distil-start/$start/student lr=7e-4
    [ $start = calibrated ] && student=runs/demo/student lr=2e-4
    train "distil/$start" distil --student "$student" --set stage.distil.tokens=10240 \
      --set stage.distil.lr=$lr --set stage.distil.eval_every=5
    runs+=("runs/distil/$start")
  done
  table "${runs[@]}"
}

# Short rows, so that the smallest share is a few steps still.
hedgemamba() {
  local mamba=(--set budget=4096 --set stage.mamba.batch=1 --set stage.mamba.context=256
    --set stage.mamba.eval_every=0 --set stage.mamba.checkpoint_every=0)
  local two_stages=("${mamba[@]}" --set stage.linearise.batch=1 --set stage.linearise.context=256)
  local runs=() split part
  for split in 100-0 0-100 50-50 10-90; do
    local scale=()
    [ $split = 10-90 ] || scale=(--set scale=$split)
    train "hedgemamba/$split" hedgemamba "${scale[@]}" "${two_stages[@]}"
    runs+=("runs/hedgemamba/$split")
  done
  for part in mixer.options.decay=false mixer.options.short_conv=0 mixer.options.output_gate=false init.options.half_life=1024; do
    local name=${part%=*}
    train "hedgemamba/10-90-${name##*.}" hedgemamba "${two_stages[@]}" --set "stage.mamba.$part"
    runs+=("runs/hedgemamba/10-90-${name##*.}")
  done
  train hedgemamba/direct hedgemamba-direct "${mamba[@]}"
  table "${runs[@]}" runs/hedgemamba/direct
}

layers() {
  local lists=() policy
  for policy in ar ga-s2 swap-kl; do
    select_layers $policy layers/$policy --select.windows 2 --select.context 256
    lists+=("runs/layers/$policy.json")
  done
  convert layers/students --keep-attention uniform:4 "${lists[@]}" --calibrate.enabled false
}

# The default beside them is the row "taylor" of the ablation.
experiments() {
  local closed=(--keep-attention none --calibrate.enabled false)
  convert experiments/student-mlp "${closed[@]}" --convert.inputs student --convert.mlp_ridge 0.3
  convert experiments/student "${closed[@]}" --convert.inputs student
  convert experiments/median "${closed[@]}" --init.options.decay median
}

best() {
  select_layers swap-kl best/layers --select.windows 2 --init.tokens 8192
  convert best/hybrid-start --keep-attention runs/best/layers.json
  train best/hybrid distil --student runs/best/hybrid-start/student --set stage.distil.tokens=33792 --set stage.distil.lr=3e-4
  train best/all distil --student runs/demo/student --set eval.windows=16
  table runs/best/hybrid runs/best/all
}

case ${1:-} in
  ablation | distil | hedgemamba | layers | experiments | best) "$1" ;;
  *) sed -n '2,12s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
