#!/usr/bin/env bash
# The quick grid behind the tables of docs/explanation/results.md: each bundled suite merged by task arithmetic, 64 samples
# per task, three seeds. Finished cells are kept in FOLDER. Usage: scripts/results.sh [FOLDER [SUITE...]]
set -euo pipefail

folder="$(realpath -m "${1:-outputs/results}")"
suites=("${@:2}")
[ "${#suites[@]}" -gt 0 ] ||
  suites=(clip-vit-mini_TA6 clip-vit-mini_alphabets2 flan-t5-mini_TA6 llama-mini_TA6 qwen3moe-mini_TA6
    resnet-mini_TA3)

for suite in "${suites[@]}"; do
  mergers=regmean methods=surgery_calibration,prob_surgery_calibration,distillation,featcal,featcal_plus
  case "$suite" in # the ResNet has no rows for Surgery and distillation, text pools have the paper's presets
  resnet*) methods=featcal,featcal_plus ;;
  flan-t5*) methods+=,featcal_paper_flan_t5 ;;
  llama*) methods+=,featcal_paper_llama_3b ;;
  qwen3moe*) mergers+=,lot methods+=,featcal_paper_llama_3b,harc ;;
  esac
  fusion_bench -m method=compare "modelpool=$suite" method.seed=42,43,44 method.samples_per_task=64 \
    'method.upstreams=[task_arithmetic]' "method.post_merging=[$methods]" \
    "method.results_dir=$folder/cells/$suite" "path.log_dir=$folder/$suite"
  fusion_bench -m method=compare "modelpool=$suite" method.seed=42,43,44 method.samples_per_task=64 \
    "method.upstreams=[$mergers]" 'method.post_merging=[]' \
    "method.results_dir=$folder/cells/$suite" "path.log_dir=$folder/$suite-regmean"
  [[ "$suite" == qwen3moe* ]] || continue
  # What routed experts and routers add: FeatCal without the first, and both repairs in both orders.
  fusion_bench -m method=compare "modelpool=$suite" method.seed=42,43 method.samples_per_task=8,64,256 \
    '+modelpool.featcal.presets.without_experts={modules: ["!experts.*"]}' \
    '+modelpool.featcal.presets.plus_without_experts={rule: plus, modules: ["!experts.*"]}' \
    'method.upstreams=[task_arithmetic]' \
    'method.post_merging=[featcal_without_experts,featcal,featcal_plus_without_experts,featcal_plus]' \
    "method.results_dir=$folder/cells/$suite" "path.log_dir=$folder/$suite-slots"
  for rows in harc:featcal_plus featcal_plus:harc; do
    fusion_bench -m method=compare "modelpool=$suite" method.seed=42,43,44 method.samples_per_task=64 \
      "method.upstreams=[${rows%:*}]" "method.post_merging=[${rows#*:}]" \
      "method.results_dir=$folder/cells/$suite" "path.log_dir=$folder/$suite-${rows%:*}"
  done
done
