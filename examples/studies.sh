#!/usr/bin/env bash
# The paper's tables and figures, a command each, on the bundled suites or with --paper on the paper's models.
# --list prints the commands. Finished cells are kept in FOLDER. Usage: examples/studies.sh [--list] [--paper] [FOLDER]
set -euo pipefail

list='' images=clip-vit-mini_TA6 many=clip-vit-mini_all8 numbers=2,4,6,8
clip=clip-vit-mini_TA6 texts=flan-t5-mini_TA6,llama-mini_TA6
while [[ "${1:-}" == --* ]]; do
  case "$1" in
    --list) list=yes ;;
    --paper)
      images=clip-vit-base-patch32_TA8 many=clip-vit-base-patch32_TALL20 numbers=2,5,10,20
      clip="$(echo clip-vit-{base-patch32,large-patch14}_{TA8,TALL14,TALL20} | tr ' ' ,)"
      texts="$(echo flan-t5-{base_glue,large_glue_lora} mergebench_llama-3.{2-3b,1-8b}-instruct | tr ' ' ,)"
      ;;
    *) echo "unknown option $1" >&2 && exit 2 ;;
  esac
  shift
done
folder="$(realpath -m "${1:-outputs/studies}")"

words() { # print a command's words, quoted where a shell needs it
  local word
  printf 'fusion_bench'
  for word in "$@"; do
    if [[ "$word" == *[][{}\ ]* ]]; then printf " '%s'" "$word"; else printf ' %s' "$word"; fi
  done
  echo
}
sweep() { # title, pools, words: a comparison, or a sweep of it
  local title="$1" pool="$2" name
  shift 2
  set -- -m method=compare "modelpool=$pool" "$@"
  if [ -n "$list" ]; then echo "# $title" && words "$@" && return; fi
  name="$folder/$(tr -cs '[:alnum:]\n' - <<< "$title")"
  fusion_bench "$@" "path.log_dir=$name/jobs" "method.results_dir=$name/cells"
  featcal report "$name/cells" --out "$name/table" --figures "$name/figures"
}
study() { # the same over one merger
  sweep "$@" 'method.upstreams=[task_arithmetic]'
}
methods='method.post_merging=[surgery,prob_surgery,surgery_calibration,prob_surgery_calibration,featcal,featcal_plus]'
few='method.post_merging=[featcal,featcal_plus]'
row=+method.post_merging_methods.featcal
noise='{kind: gaussian_noise, severity: 3}' blur='{kind: motion_blur, severity: 3}'
fog() { printf '{kind: fog, severity: %s}' "$1"; }

sweep 'Tables 1, 2, 7 to 11: CLIP, each merger with each method' "$clip" \
  'method.upstreams=[simple_average,task_arithmetic,ties_merging,wudi,adamerging,regmean,lot]'
sweep 'Tables 3, 4, 14: FLAN-T5 and Llama, each merger with each method' "$texts"
study 'Tables 5, 12, 13, Figure 3: samples per task, and costs' "$images" "$methods" \
  method.samples_per_task=8,16,32,64,128,256,512 method.seed=1,2,3
study 'Table 6: corrupted calibration images, clean tests' "$images" "$methods" \
  "method.calibration_corruption=null,$noise,$blur,$(fog 3)" method.seed=1,2,3
study 'Figure 4: severity of fog' "$images" "$few" \
  "method.calibration_corruption=$(fog 1),$(fog 2),$(fog 3),$(fog 4),$(fog 5)"
study 'Figure 5: lambda' "$images" 'method.post_merging=[featcal]' "$row.ridge_lambda=0.001,0.01,0.05,0.1,1,10"
study 'Figure 5: alpha' "$images" 'method.post_merging=[featcal]' "$row.mix_alpha=0,0.15,0.3,0.6,1"
study 'Figure 5: rho' "$images" 'method.post_merging=[featcal]' "$row.anchor_rho=1,1.5,2,2.5,3"
study 'Not in the paper: number of tasks' "$many" "$few" "method.tasks=$numbers"

set -- method=diagnose "modelpool=$images"
if [ -n "$list" ]; then
  echo '# Figures 1, 2, 6, 7: drift by block, cosines, principal components' && words "$@"
else
  fusion_bench "$@" "path.log_dir=$folder/Figures-1-2-6-7"
  featcal report "$folder/Figures-1-2-6-7" --figures "$folder/Figures-1-2-6-7/figures"
fi
