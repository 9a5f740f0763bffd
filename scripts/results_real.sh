#!/usr/bin/env bash
# The runs behind docs/explanation/results: five suites of real pretrained weights, which $FEATCAL_REAL has.
# Finished cells are kept in FOLDER. Usage: scripts/results_real.sh [FOLDER [STUDY...]]
set -euo pipefail

folder="$(realpath -m "${1:-outputs/results-real}")"
studies=("${@:2}")
[ "${#studies[@]}" -gt 0 ] || studies=(minilm dinov2 smollm2 minilm-samples dinov2-samples unlike-minilm unlike-dinov2 unlike-smollm2)

compare() { # SUITE NAME SETTING...
  fusion_bench -m method=compare "modelpool=$1" "method.results_dir=$folder/cells/$1" "path.log_dir=$folder/$2" "${@:3}"
}

# FeatCal+ and the paper's rule with samples of some kind, few and many, in two draws.
draws="few: {samples_per_task: 8}, few_43: {samples_per_task: 8, seed: 43}, usual_43: {seed: 43}, paper: {rule: paper}"
many="many: {samples_per_task: 256}, many_43: {samples_per_task: 256, seed: 43}"
unlike() { # SUITE KIND PRESETS SETTING...
  [ -f "$folder/$1-$2/run.json" ] ||
    fusion_bench method=featcal/plus "modelpool=$1" method.samples_per_task=64 'method.compare_with=[merged]' \
      "method.presets={$3}" "path.log_dir=$folder/$1-$2" hydra.run.dir="$folder/$1-$2" "${@:4}"
}
samples_of() { # FIELD TASK=OTHER... Words that give a task the samples of another
  for pair in "${@:2}"; do echo "modelpool.train_datasets.${pair%=*}.$1=${pair#*=}"; done
}
unlike_texts() { # SUITE PRESETS PRESETS: right texts and those with words in random order, then two tasks' exchanged
  unlike "$1" clean "$2"
  python scripts/unlike_texts.py "$folder/shuffled"
  local words=() file
  for file in "$folder/shuffled"/*.jsonl; do
    words+=("+method.calibration_data.$(basename "$file" .jsonl)=$file")
  done
  unlike "$1" shuffled "$2" "${words[@]}"
  # shellcheck disable=SC2046 # one word a pair
  unlike "$1" exchanged "$3" $(samples_of name banking77=clinc_work clinc_work=banking77)
}

# Without WUDI, which optimises each matrix in turn: two hours of one core for DINOv2.
mergers=simple_average,task_arithmetic,ties_merging
closed=featcal,featcal_plus,ridge_surgery
trained=surgery_calibration,prob_surgery_calibration
# Both train the whole model: SurgeryV2's default of 1000 steps takes an hour, and distillation's rate is for small models.
slow=surgery_v2_calibration,distillation
# Settings for another kind of model, as a warning.
t5='{_target_: fusion_bench_featcal.lab.rivals.FeatCal, ridge_lambda: 1.0e-5, mix_alpha: 0.6, anchor_rho: 2.0, calibrate_norm: false}'
in_short=("+method.post_merging_methods.featcal_t5_settings=$t5" method.post_merging_methods.surgery_v2_calibration.steps=100 +method.post_merging_methods.distillation.learning_rate=1e-4)
grid() { # SUITE SEEDS MERGERS METHODS METHODS_ON_ONE_MERGER
  compare "$1" "$1-mergers" method.seed=42 method.samples_per_task=64 "method.upstreams=[$3]" \
    "method.post_merging=[$4]"
  compare "$1" "$1" "method.seed=$2" method.samples_per_task=64 'method.upstreams=[task_arithmetic]' \
    "method.post_merging=[$5]" "${in_short[@]}"
  compare "$1" "$1-with-data" "method.seed=$2" method.samples_per_task=64 \
    'method.upstreams=[regmean,regmean_plusplus,lot]' 'method.post_merging=[]'
  compare "$1" "$1-repaired" "method.seed=$2" method.samples_per_task=64 'method.upstreams=[featcal_plus]' \
    'method.post_merging=[ridge_surgery]'
}
samples() { # SUITE: a few and many samples
  compare "$1" "$1-samples" method.seed=42,43 method.samples_per_task=8,64,256 'method.upstreams=[task_arithmetic]' \
    "method.post_merging=[featcal,featcal_plus,ridge_surgery]"
}

for study in "${studies[@]}"; do
  case "$study" in
  minilm) grid minilm_TA6 42,43 "$mergers" "$closed" "$closed,featcal_t5_settings,$trained,$slow" ;;
  mpnet) # on task arithmetic alone, and what trains in one draw: four hours
    on_one=(method.samples_per_task=64 'method.upstreams=[task_arithmetic]')
    balance='+modelpool.featcal.presets.plus_balance={rule: plus, balance: 1}'
    compare mpnet_TA6 mpnet_TA6 method.seed=42,43 "${on_one[@]}" "method.post_merging=[$closed]"
    compare mpnet_TA6 mpnet_TA6-balance method.seed=42,43 "${on_one[@]}" 'method.post_merging=[featcal_plus_balance]' "$balance"
    compare mpnet_TA6 mpnet_TA6-with-data method.seed=42,43 method.samples_per_task=64 \
      'method.upstreams=[regmean_plusplus,lot]' 'method.post_merging=[]'
    compare mpnet_TA6 mpnet_TA6-trained method.seed=42 "${on_one[@]}" \
      "method.post_merging=[surgery_calibration,$slow]" "${in_short[@]:1}"
    compare mpnet_TA6 mpnet_TA6-few method.seed=42,43 "${on_one[@]}" "method.post_merging=[$closed]" method.samples_per_task=8
    compare mpnet_TA6 mpnet_TA6-many method.seed=42,43 "${on_one[@]}" "method.post_merging=[$closed]" method.samples_per_task=256
    ;;
  dinov2) grid dinov2_small_TA4 42,43 "$mergers" "$closed" "$closed,$trained,$slow" ;;
  smollm2) grid smollm2_TA4 42,43 "$mergers" "featcal_paper_llama_3b-targets,featcal_plus,ridge_surgery" "$closed,featcal_paper_llama_3b-targets,$trained" ;;
  whisper) # transcripts take most of the time: few rows, and mergers with data in one draw
    compare whisper_TA4 whisper_TA4 method.seed=42,43 method.samples_per_task=64 'method.upstreams=[task_arithmetic]' \
      'method.post_merging=[featcal,featcal_plus]'
    compare whisper_TA4 whisper_TA4-with-data method.seed=42 method.samples_per_task=64 \
      'method.upstreams=[regmean_plusplus,lot]' 'method.post_merging=[]'
    ;;
  minilm-samples) samples minilm_TA6 ;;
  dinov2-samples) samples dinov2_small_TA4 ;;
  unlike-minilm)
    unlike_texts minilm_TA6 "$draws, $many" "$draws"
    # shellcheck disable=SC2046 # one word a pair
    unlike minilm_TA6 others "$draws, $many" $(samples_of name snips_intent=banking77 banking77=clinc_domain \
      clinc_domain=clinc_home clinc_home=clinc_work clinc_work=clinc_auto clinc_auto=snips_intent)
    ;;
  unlike-mpnet)
    one="few: {samples_per_task: 8}, paper: {rule: paper}"
    unlike_texts mpnet_TA6 "$one" "$one"
    ;;
  unlike-dinov2)
    unlike dinov2_small_TA4 clean "$draws"
    for kind in fog gaussian_noise motion_blur; do
      unlike dinov2_small_TA4 $kind "$draws" "+method.calibration_corruption={kind: $kind, severity: 3}"
    done
    # shellcheck disable=SC2046
    unlike dinov2_small_TA4 one "$draws" $(samples_of task mini_fashion_mnist=mini_mnist mini_notmnist=mini_mnist mini_latin=mini_mnist)
    # shellcheck disable=SC2046
    unlike dinov2_small_TA4 exchanged "$draws" $(samples_of task mini_notmnist=mini_latin mini_latin=mini_notmnist)
    ;;
  unlike-smollm2) unlike smollm2_TA4 clean "few: {samples_per_task: 8}, usual_43: {seed: 43}" ;;
  *) echo "no study $study" >&2 && exit 1 ;;
  esac
done
