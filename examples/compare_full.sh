#!/usr/bin/env bash
# The whole comparison on the bundled suites: on images over every upstream merger; on every suite with
# 8, 64 and 256 samples per task and three seeds; other methods over four mergers. Hours on one core.
# Finished cells are kept. Usage: examples/compare_full.sh [FOLDER]
set -euo pipefail

folder="${1:-outputs/compare-full}"
pool=clip-vit-mini_TA6

fusion_bench method=compare "modelpool=$pool" "path.log_dir=$folder/grid"
drawn=()
for suite in clip-vit-mini_TA6 clip-vit-mini_alphabets2 flan-t5-mini_TA6 llama-mini_TA6; do
  for samples in 8 64 256; do
    drawn+=("draws-$suite-n$samples")
    for seed in 42 43 44; do
      fusion_bench method=compare "modelpool=$suite" "method.seed=$seed" \
        "method.samples_per_task=$samples" 'method.upstreams=[task_arithmetic]' \
        "path.log_dir=$folder/draws-$suite-n$samples/seed-$seed"
    done
  done
done
# The field.
fusion_bench method=compare "modelpool=$pool" method.samples_per_task=64 \
  'method.upstreams=[task_arithmetic,svc,tsv_m,iso_c]' \
  'method.alone=[regmean_plusplus,lot,prodistill]' \
  'method.post_merging=[surgery_calibration,prob_surgery_calibration,distillation,featcal,featcal_plus]' \
  "path.log_dir=$folder/field"
for suite in flan-t5-mini llama-mini; do
  fusion_bench method=compare "modelpool=${suite}_TA6" "path.log_dir=$folder/$suite" \
    'method.upstreams=[simple_average,task_arithmetic]'
done
for part in grid field flan-t5-mini llama-mini "${drawn[@]}"; do
  featcal report "$folder/$part" --out "$folder/tables/$part"
done
