#!/usr/bin/env bash
# Distillation on answers beside FeatCal+: rows seqkd and mopd on the suites of language models, after task arithmetic and
# after FeatCal+, 64 samples per task, two seeds. Usage: scripts/results_distilled.sh [FOLDER [SUITE...]]
set -euo pipefail

folder="$(realpath -m "${1:-outputs/distilled}")"
suites=("${@:2}")
[ "${#suites[@]}" -gt 0 ] || suites=(flan-t5-mini_TA6 llama-mini_TA6 qwen3moe-mini_TA6)

for suite in "${suites[@]}"; do
  fusion_bench -m method=compare "modelpool=$suite" method.seed=42,43 method.samples_per_task=64 \
    'method.upstreams=[task_arithmetic,featcal_plus]' 'method.post_merging=[seqkd,mopd]' \
    "method.results_dir=$folder/cells/$suite" "path.log_dir=$folder/$suite-distilled"
done
