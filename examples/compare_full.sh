#!/usr/bin/env bash
# The whole comparison on the bundled suites: on images once over every upstream merger; on every
# suite with 8, 64 and 256 samples per task and three draws; the field of other methods over four
# mergers; costs, with a process for each cell; ProbSurgery's KL weights. Hours on one core.
# Finished cells are kept in outputs/comparison. Usage: examples/compare_full.sh [FOLDER]
set -euo pipefail

folder="${1:-outputs/compare-full}"
pool=clip-vit-mini_TA6

fusion_bench method=compare "modelpool=$pool" "path.log_dir=$folder/grid"

# Every method by samples and draws. Distillation and a search over settings on texts: one draw.
corrections=surgery,prob_surgery,surgery:calibration,prob_surgery:calibration,ridge_surgery
free=anchored_regression,featcal,featcal:tuned,featcal:plus
images=prob_surgery:shared,surgery_v2:calibration,surgery:tuned,prob_surgery:tuned,distillation
drawn=()
llama=featcal:paper_flan_t5-targets,featcal:paper_llama_3b-targets
for suite in clip-vit-mini_TA6 clip-vit-mini_alphabets2 flan-t5-mini_TA6 llama-mini_TA6; do
  case "$suite" in
    clip*) own=",$images" ;;
    flan*) own=,featcal:paper_flan_t5 ;;
    *) own=",$llama" ;;
  esac
  for samples in 8 64 256; do
    drawn+=("draws-$suite-n$samples")
    for seed in 42 43 44; do
      more=
      [[ "$suite" == clip* || $samples-$seed != 64-42 ]] || more=,distillation,prob_surgery:tuned
      fusion_bench method=compare "modelpool=$suite" "method.seed=$seed" \
        "method.samples_per_task=$samples" 'method.upstreams=[task_arithmetic]' \
        'method.alone=[regmean,regmean_plusplus:tuned,lot:tuned]' \
        "method.post_merging=[$corrections,$free,featcal+ridge_surgery$own$more]" \
        "path.log_dir=$folder/draws-$suite-n$samples/seed-$seed"
    done
  done
done
# The field, and baselines whose settings are chosen on the same samples.
field=surgery:tuned,prob_surgery:tuned,anchored_regression,distillation
fusion_bench method=compare "modelpool=$pool" method.samples_per_task=64 \
  'method.upstreams=[task_arithmetic,svc,tsv_m,iso_c]' \
  'method.alone=[regmean_plusplus:tuned,lot:tuned,prodistill]' \
  "method.post_merging=[$field,featcal,featcal:tuned,featcal:plus]" "path.log_dir=$folder/field"
# What each row costs: every cell in its own process.
costs=surgery:calibration,surgery:recompute,prob_surgery:calibration,prob_surgery:recompute,ridge_surgery
fusion_bench method=compare "modelpool=$pool" method.backend=loky \
  method.samples_per_task=64 'method.upstreams=[task_arithmetic]' 'method.alone=[lot]' \
  "method.post_merging=[$costs,distillation,featcal,featcal:plus,featcal+ridge_surgery]" \
  "method.results_dir=$folder/costs-cells" "path.log_dir=$folder/costs"
# What the KL weight does on features of norm 1.
probe() {
  local target=fusion_bench_featcal.lab.compare.FeatureCorrection
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
for part in grid field costs kl flan-t5-mini llama-mini "${drawn[@]}"; do
  featcal report "$folder/$part" --out "$folder/tables/$part"
done
