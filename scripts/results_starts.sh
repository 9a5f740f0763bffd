#!/usr/bin/env bash
# The tables of starting points in docs/explanation/results/merging-methods.md: both rules after four merges of the same experts, one of which subtracts
# them (task arithmetic with -0.3). 64 samples per task, one draw. Usage: scripts/results_starts.sh [FOLDER [SUITE...]]
set -euo pipefail

folder="$(realpath -m "${1:-outputs/starts}")"
suites=("${@:2}")
[ "${#suites[@]}" -gt 0 ] || suites=(clip-vit-mini_TA6 llama-mini_TA6)

for suite in "${suites[@]}"; do
  fusion_bench method=compare "modelpool=$suite" method.seed=42 method.samples_per_task=64 \
    +method@method.upstream_mergers.negation=task_arithmetic method.upstream_mergers.negation.scaling_factor=-0.3 \
    'method.upstreams=[task_arithmetic,negation,simple_average,ties_merging]' \
    'method.post_merging=[featcal,featcal_plus]' \
    "method.results_dir=$folder/cells/$suite-starts" "path.log_dir=$folder/$suite-starts/seed-42"
done
