#!/usr/bin/env bash
# The runs behind docs/results.md: three suites of real pretrained weights, which $FEATCAL_REAL has.
# Finished cells are kept in FOLDER. Usage: scripts/results_real.sh [FOLDER [STUDY...]]
set -euo pipefail

folder="$(realpath -m "${1:-outputs/results-real}")"
studies=("${@:2}")
[ "${#studies[@]}" -gt 0 ] || studies=(minilm dinov2 smollm2 minilm-samples dinov2-samples unlike)

compare() { # SUITE NAME SETTING...
  fusion_bench -m method=compare "modelpool=$1" "method.results_dir=$folder/cells/$1" "path.log_dir=$folder/$2" "${@:3}"
}

calibrate() { # SUITE NAME SETTING...
  [ -f "$folder/$2/run.json" ] ||
    fusion_bench method=featcal "modelpool=$1" method.samples_per_task=64 "path.log_dir=$folder/$2" \
      hydra.run.dir="$folder/$2" "${@:3}"
}

# WUDI optimises each matrix in turn: minutes for MiniLM, hours for SmolLM2, which goes without.
some=simple_average,task_arithmetic,ties_merging
mergers=$some,wudi
closed=featcal,featcal_plus,ridge_surgery,featcal_plus_ridge_surgery
trained=surgery_calibration,prob_surgery_calibration
# Both train the whole model: SurgeryV2's default of 1000 steps takes an hour, and distillation's rate is for small models.
slow=surgery_v2_calibration,distillation
# Settings for another kind of model, as a warning.
t5='{_target_: fusion_bench_featcal.lab.rivals.FeatCal, ridge_lambda: 1.0e-5, mix_alpha: 0.6, anchor_rho: 2.0, calibrate_norm: false, samples_per_task: 64, seed: ${method.seed}}'
in_short=("+method.post_merging_methods.featcal_t5_settings=$t5" method.post_merging_methods.surgery_v2_calibration.steps=100 +method.post_merging_methods.distillation.learning_rate=1e-4)
grid() { # SUITE SEEDS MERGERS METHODS METHODS_ON_ONE_MERGER
  compare "$1" "$1-mergers" method.seed=42 method.samples_per_task=64 "method.upstreams=[$3]" \
    'method.alone=[]' "method.post_merging=[$4]"
  compare "$1" "$1" "method.seed=$2" method.samples_per_task=64 'method.upstreams=[task_arithmetic]' \
    'method.alone=[regmean,regmean_plusplus,lot]' "method.post_merging=[$5]" "${in_short[@]}"
}
samples() { # SUITE: a few and many samples
  compare "$1" "$1-samples" method.seed=42,43 method.samples_per_task=8,64,256 'method.upstreams=[task_arithmetic]' \
    'method.alone=[]' "method.post_merging=[featcal,featcal_plus,ridge_surgery]"
}

for study in "${studies[@]}"; do
  case "$study" in
  minilm) grid minilm_TA6 42,43 "$mergers" "$closed" "$closed,featcal_t5_settings,$trained,$slow" ;;
  dinov2) grid dinov2_small_TA4 42,43 "$mergers" "$closed" "$closed,$trained,$slow" ;;
  smollm2) grid smollm2_TA4 42,43 "$some" "featcal_paper_llama_3b-targets,featcal_plus,ridge_surgery" "$closed,featcal_paper_llama_3b-targets,$trained" ;;
  minilm-samples) samples minilm_TA6 ;;
  dinov2-samples) samples dinov2_small_TA4 ;;
  unlike)
    # Texts whose words are shuffled, and texts of two tasks exchanged.
    python scripts/unlike_texts.py "$folder/unlike"
    for kind in shuffled exchanged; do
      words=()
      for file in "$folder/unlike/$kind"/*.jsonl; do
        words+=("+method.calibration_data.$(basename "$file" .jsonl)=$file")
      done
      calibrate minilm_TA6 "minilm_TA6-$kind" "${words[@]}"
    done
    calibrate dinov2_small_TA4 dinov2_small_TA4-fog '+method.calibration_corruption={kind: fog, severity: 3}'
    ;;
  *) echo "no study $study" >&2 && exit 1 ;;
  esac
done
