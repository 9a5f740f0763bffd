#!/usr/bin/env bash
# One line for each table and figure of the paper that a sweep makes, on the bundled suites, named by the
# paper's number. Finished cells are kept in FOLDER/cells. Usage: examples/studies.sh [FOLDER]
set -euo pipefail

folder="${1:-outputs/studies}"
sweep() { # name of the folder, pool, words
  local name="$1" pool="$2"
  shift 2
  fusion_bench -m method=compare "modelpool=$pool" "hydra.sweep.dir=$folder/$name" \
    "method.results_dir=$(realpath -m "$folder")/$name/cells" 'method.alone=[]' \
    'method.upstreams=[task_arithmetic]' "$@"
  featcal report "$folder/$name/cells" --out "$folder/$name/table" --figures "$folder/$name/figures"
}
images=clip-vit-mini_TA6
methods='[surgery,prob_surgery,surgery_calibration,prob_surgery_calibration,featcal,featcal_plus]'
corruptions='{kind: gaussian_noise, severity: 3},{kind: motion_blur, severity: 3},{kind: fog, severity: 3}'
fog='{kind: fog, severity: 1},{kind: fog, severity: 2},{kind: fog, severity: 3},{kind: fog, severity: 4},{kind: fog, severity: 5}'

sweep tables-5-12-13_figure-3 "$images" "method.post_merging=$methods" \
  method.samples_per_task=8,16,32,64,128,256,512 method.seed=1,2,3
for pool in flan-t5-mini_TA6 llama-mini_TA6; do
  sweep "table-12_$pool" "$pool" 'method.post_merging=[featcal,featcal_plus]' \
    method.samples_per_task=8,32,128,512 method.seed=1,2,3
done
sweep table-6 "$images" 'method.post_merging=[surgery,prob_surgery,featcal,featcal_plus]' \
  "method.calibration_corruption=null,$corruptions" method.seed=1,2,3
sweep figure-4 "$images" 'method.post_merging=[featcal,featcal_plus]' \
  "method.calibration_corruption=$fog"
row=+method.post_merging_methods.featcal
sweep figure-5_lambda "$images" 'method.post_merging=[featcal]' "$row.ridge_lambda=0.001,0.01,0.05,0.1,1,10"
sweep figure-5_alpha "$images" 'method.post_merging=[featcal]' "$row.mix_alpha=0,0.15,0.3,0.6,1"
sweep figure-5_rho "$images" 'method.post_merging=[featcal]' "$row.anchor_rho=1,1.5,2,2.5,3"
sweep number-of-tasks clip-vit-mini_all8 'method.post_merging=[surgery,featcal,featcal_plus]' \
  method.tasks=2,4,6,8
for pool in "$images" flan-t5-mini_TA6 llama-mini_TA6; do # Figures 1, 2, 6, 7
  fusion_bench method=diagnose "modelpool=$pool" method.items=128 "path.log_dir=$folder/diagnosis-$pool"
done
