#!/usr/bin/env bash
# The quick grid behind the tables of docs/results.md: each bundled suite merged by task arithmetic, 64 samples
# per task, three seeds. Finished cells are kept in FOLDER. Usage: examples/results.sh [FOLDER [SUITE...]]
set -euo pipefail

folder="$(realpath -m "${1:-outputs/results}")"
suites=("${@:2}")
[ "${#suites[@]}" -gt 0 ] ||
  suites=(clip-vit-mini_TA6 clip-vit-mini_alphabets2 flan-t5-mini_TA6 llama-mini_TA6 resnet-mini_TA3)

for suite in "${suites[@]}"; do
  methods=surgery_calibration,prob_surgery_calibration,distillation,featcal,featcal_plus
  [ "$suite" != resnet-mini_TA3 ] || methods=featcal,featcal_plus
  fusion_bench -m method=compare "modelpool=$suite" method.seed=42,43,44 method.samples_per_task=64 \
    'method.upstreams=[task_arithmetic]' 'method.alone=[regmean]' "method.post_merging=[$methods]" \
    "method.results_dir=$folder/cells/$suite" "path.log_dir=$folder/$suite"
done
