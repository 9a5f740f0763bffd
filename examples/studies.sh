#!/usr/bin/env bash
# Every study on the bundled image suite (`tasks` on that of eight tasks), `samples` and `ablation` on
# the text suites too. Finished cells are kept in outputs/comparison. Usage: examples/studies.sh [FOLDER]
set -euo pipefail

folder="${1:-outputs/studies}"
study() { # pool, study, words; $as: another folder than the study's name
  local pool="$1" name="$2"
  shift 2
  fusion_bench "method=study/$name" "modelpool=$pool" "path.log_dir=$folder/$pool/${as:-$name}" "$@"
}

study clip-vit-mini_TA6 samples
study clip-vit-mini_TA6 sweep 'method.seeds=[42]' 'method.pairs=[[ridge_lambda,mix_alpha]]'
study clip-vit-mini_TA6 ablation
as=ablation_fog study clip-vit-mini_TA6 ablation method.study=ablation_fog \
  '+method.axes.corruption={kinds: [fog], severities: [3]}' \
  "method.post_merging=[featcal,featcal:plus,\
plus:no_module_order,plus:no_rows,plus:no_drift_weights,plus:no_copies]"
study clip-vit-mini_all8 tasks method.subsets=4
study clip-vit-mini_TA6 cost
study clip-vit-mini_TA6 corruption 'method.post_merging=[surgery,prob_surgery,featcal,featcal:plus]'
study clip-vit-mini_TA6 severity 'method.seeds=[42]' 'method.post_merging=[featcal,featcal:plus]'
study clip-vit-mini_TA6 transfer 'method.seeds=[42]' \
  'method.post_merging=[surgery:calibration,featcal,featcal:plus]'
for pool in flan-t5-mini_TA6 llama-mini_TA6; do
  study "$pool" samples 'method.axes.samples_per_task=[8,32,128,512]'
  study "$pool" ablation 'method.seeds=[42]'
done
