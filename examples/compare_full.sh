#!/usr/bin/env bash
# The whole comparison on the bundled suites. On images: once over every upstream merger, then
# FeatCal against the corrections of final features with 256 and with 8 samples per task, three
# seeds each, then the field of other methods with 64, and ProbSurgery's KL weights. On texts: over
# two mergers.
# Finished cells are kept in outputs/comparison. Usage: examples/compare_full.sh [FOLDER]
set -euo pipefail

folder="${1:-outputs/compare-full}"
pool=clip-vit-mini_TA6
cells=surgery,surgery:calibration,prob_surgery,prob_surgery:calibration,ridge_surgery
cells="[$cells,featcal,featcal:plus,featcal+ridge_surgery]"

fusion_bench method=compare "modelpool=$pool" "path.log_dir=$folder/grid"
for samples in 256 8; do
  for seed in 42 43 44; do
    fusion_bench method=compare "modelpool=$pool" "method.seed=$seed" \
      "method.samples_per_task=$samples" 'method.upstreams=[simple_average,task_arithmetic]' \
      'method.alone=[]' "method.post_merging=$cells" "path.log_dir=$folder/n$samples/seed-$seed"
  done
done
# The field, and baselines whose settings are chosen on the same samples.
field=surgery:tuned,prob_surgery:tuned,svc:any,larv,magic,anchored_regression,distillation
fusion_bench method=compare "modelpool=$pool" method.samples_per_task=64 \
  'method.upstreams=[task_arithmetic,svc,tsv_m,iso_c]' \
  'method.alone=[regmean_plusplus:tuned,lot:tuned,prodistill]' \
  "method.post_merging=[$field,featcal,featcal:tuned,featcal:plus]" "path.log_dir=$folder/field"
# What the KL weight does on features of norm 1.
probe() {
  local target=fusion_bench_featcal.comparison.FeatureCorrection
  echo "+method.post_merging_methods.$1={_target_: $target, method: prob_surgery, $2}"
}
fusion_bench method=compare "modelpool=$pool" "path.log_dir=$folder/kl" 'method.alone=[]' \
  'method.upstreams=[task_arithmetic]' \
  "$(probe kl 'normalize: none')" "$(probe kl_scaled 'normalize: none, kl_weight: scaled')" \
  "$(probe kl_norm_1 'normalize: pre')" \
  "$(probe kl_scaled_norm_1 'normalize: pre, kl_weight: scaled')" \
  'method.post_merging=[kl,kl_scaled,kl_norm_1,kl_scaled_norm_1]'
for suite in flan-t5-mini llama-mini; do
  fusion_bench method=compare "modelpool=${suite}_TA6" "path.log_dir=$folder/$suite" \
    'method.upstreams=[simple_average,task_arithmetic]'
done
for part in grid n256 n8 field kl flan-t5-mini llama-mini; do
  featcal report "$folder/$part" --out "$folder/tables/$part"
done
