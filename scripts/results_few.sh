#!/usr/bin/env bash
# The first table of docs/explanation/results/merging-methods.md: both rules over several mergers from few and many samples, in two
# draws. Usage: scripts/results_few.sh [FOLDER [SUITE...]]
set -euo pipefail

folder="$(realpath -m "${1:-outputs/few}")"
suites=("${@:2}")
[ "${#suites[@]}" -gt 0 ] || suites=(clip-vit-mini_TA6 flan-t5-mini_TA6 llama-mini_TA6 qwen3moe-mini_TA6)

for suite in "${suites[@]}"; do
  mergers=simple_average,task_arithmetic,ties_merging
  case "$suite" in clip*) mergers+=,svc,tsv_m,iso_c ;; esac
  fusion_bench -m method=compare "modelpool=$suite" method.seed=42,43 method.samples_per_task=8,64,256 \
    "method.upstreams=[$mergers]" 'method.post_merging=[featcal,featcal_plus]' \
    "method.results_dir=$folder/cells/$suite" "path.log_dir=$folder/$suite-few"
done
