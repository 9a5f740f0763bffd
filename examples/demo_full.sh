#!/usr/bin/env bash
# The whole demonstration: two upstream mergers x three seeds of calibration samples, on the six
# tasks and on the two alphabets that no choice was ever made on; then a table of each with
# intervals over seeds and test images. Usage: examples/demo_full.sh [FOLDER]
set -euo pipefail

folder="${1:-outputs/demo-full}"

for pool in TA6 alphabets2; do
  for merger in task_arithmetic simple_average; do
    for seed in 42 43 44; do
      fusion_bench method=featcal "method@method.base_method=$merger" "method.seed=$seed" \
        "modelpool=clip-vit-mini_$pool" "path.log_dir=$folder/$pool/$merger-$seed"
    done
  done
done
for pool in TA6 alphabets2; do
  featcal report "$folder/$pool" --out "$folder/tables/$pool"
done
