#!/usr/bin/env bash
# The whole demonstration: two upstream mergers x three seeds of calibration samples, on the six
# image tasks, on the two alphabets that no choice was ever made on, on the text suites and on the
# convolutional network; then a table of each with intervals over seeds and test items.
# Usage: examples/demo_full.sh [FOLDER [SUITE...]], of the suites named below.
set -euo pipefail

folder="${1:-outputs/demo-full}"
suites=("${@:2}")
[ "${#suites[@]}" -gt 0 ] || suites=(TA6 alphabets2 flan-t5-mini llama-mini resnet-mini)

for suite in "${suites[@]}"; do
  case "$suite" in
    TA6 | alphabets2) pool="clip-vit-mini_$suite" ;;
    resnet-mini) pool="${suite}_TA3" ;;
    *) pool="${suite}_TA6" ;;
  esac
  for merger in task_arithmetic simple_average; do
    for seed in 42 43 44; do
      fusion_bench method=featcal "method@method.base_method=$merger" "method.seed=$seed" \
        "modelpool=$pool" "path.log_dir=$folder/$suite/$merger-$seed"
    done
  done
  featcal report "$folder/$suite" --out "$folder/tables/$suite"
done
