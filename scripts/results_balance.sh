#!/usr/bin/env bash
# The table of docs/explanation/results/balance.md: FeatCal+ with weights by distances, with a polish, and ridge surgery
# behind each, in two draws. Usage: scripts/results_balance.sh [FOLDER [SUITE...]], real suites with $FEATCAL_REAL
set -euo pipefail

folder="$(realpath -m "${1:-outputs/balance}")"
suites=("${@:2}")
[ "${#suites[@]}" -gt 0 ] || suites=(clip-vit-mini_TA6 clip-vit-mini_all8 flan-t5-mini_TA6 llama-mini_TA6
  qwen3moe-mini_TA6 minilm_TA6 dinov2_small_TA4 smollm2_TA4)

balanced=(+method@method.upstream_mergers.balanced=featcal/plus)
for word in balance=1 samples_per_task=64; do
  balanced+=("method.upstream_mergers.balanced.$word")
done
for suite in "${suites[@]}"; do
  compare=(fusion_bench -m method=compare "modelpool=$suite" method.samples_per_task=64
    "method.results_dir=$folder/cells/$suite")
  "${compare[@]}" method.seed=42,43 '+modelpool.featcal.presets.plus_half={rule: plus, balance: 0.5}' \
    '+modelpool.featcal.presets.plus_balance={rule: plus, balance: 1}' 'method.upstreams=[task_arithmetic]' \
    'method.post_merging=[featcal_plus,featcal_plus_half,featcal_plus_balance]' "path.log_dir=$folder/$suite"
  rows=polish,ridge_surgery # which corrects no convolutional networks
  case "$suite" in smollm2*) rows=ridge_surgery ;; esac # a polish takes hours
  for seed in 42 43; do
    "${compare[@]}" "method.seed=$seed" "${balanced[@]}" "method.upstream_mergers.balanced.seed=$seed" \
      'method.upstreams=[featcal_plus,balanced]' "method.post_merging=[$rows]" "path.log_dir=$folder/$suite-polish/seed-$seed"
  done
done
