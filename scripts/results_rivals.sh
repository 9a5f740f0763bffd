#!/usr/bin/env bash
# The closed forms of 2026 beside both rules: ASWUDI (row swudi), LARV and ReACT on every suite, with ridge surgery, and
# SWUDI with its authors' settings alone (row swudi_published). 64 samples per task, two seeds. Usage: scripts/results_rivals.sh [FOLDER [SUITE...]], real suites with $FEATCAL_REAL
set -euo pipefail

folder="$(realpath -m "${1:-outputs/rivals}")"
suites=("${@:2}")
[ "${#suites[@]}" -gt 0 ] || suites=(clip-vit-mini_TA6 clip-vit-mini_all8 clip-vit-mini_alphabets2 flan-t5-mini_TA6
  llama-mini_TA6 qwen3moe-mini_TA6 resnet-mini_TA3 minilm_TA6 dinov2_small_TA4 smollm2_TA4)

for suite in "${suites[@]}"; do
  mergers=task_arithmetic,swudi,larv,larv_task_arithmetic,iso_c_linear
  methods=featcal,featcal_plus,react,react_task_id,ridge_surgery
  case "$suite" in
    resnet*) mergers=task_arithmetic,swudi methods=featcal,featcal_plus ;;
    minilm* | dinov2* | smollm2*) mergers=task_arithmetic,swudi,larv ;;
  esac
  fusion_bench -m method=compare "modelpool=$suite" method.seed=42,43 method.samples_per_task=64 \
    +method@method.upstream_mergers.iso_c_linear=featcal_mergers/larv method.upstream_mergers.iso_c_linear.strength=0 \
    "method.upstreams=[$mergers]" "method.post_merging=[$methods]" \
    "method.results_dir=$folder/cells/$suite" "path.log_dir=$folder/$suite-rivals"
  fusion_bench method=compare "modelpool=$suite" method.samples_per_task=64 \
    'method.upstreams=[swudi_published]' 'method.post_merging=[]' \
    "method.results_dir=$folder/cells/$suite" "path.log_dir=$folder/$suite-rivals/published"
done
