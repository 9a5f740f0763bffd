#!/usr/bin/env bash
# Runs with public models and tests, which others can repeat, a command each. docs/howto/paper.md has their costs.
# Usage: examples/proofs.sh [--list] NAME OUT [WORD...], with NAME mergebench, clip, tall20 or mteb. WORDs go to fusion_bench
# (mteb: none). --list prints the commands.
set -euo pipefail

list=''
[ "${1:-}" != --list ] || { list=yes && shift; }
name="${1:?is missing. Usage: proofs.sh [--list] mergebench|clip|tall20|mteb OUT [WORD...]}"
out="$(realpath -m -- "${2:?is missing: a folder for the results}")"
words=("${@:3}")

run() { # print a command, and run it unless --list is given
  printf '%q ' "$@" && echo
  [ -n "$list" ] || "$@"
}
compare() { # POOL METHODS: four mergers, and two repairs of the first one. Finished models are kept in OUT/cells
  common=(fusion_bench method=compare "modelpool=$1" "method.results_dir=$out/cells")
  run "${common[@]}" "path.log_dir=$out/mergers" 'method.upstreams=[task_arithmetic,ties_merging,swudi,regmean_plusplus]' \
    'method.post_merging=[]' "${words[@]}"
  run "${common[@]}" "path.log_dir=$out/repairs" 'method.upstreams=[task_arithmetic]' "method.post_merging=[$2]" "${words[@]}"
  run featcal report "$out/mergers" "$out/repairs" --out "$out/table"
}

case "$name" in
  mergebench) compare mergebench_llama-3.2-3b-instruct featcal_paper_llama_3b,featcal_plus ;;
  clip) compare clip-vit-base-patch32_TA8 featcal,featcal_plus ;;
  tall20) compare clip-vit-base-patch32_TALL20 featcal,featcal_plus ;;
  mteb)
    [ -n "$list" ] || mkdir -p "$out"
    here="$(dirname "$0")/public"
    run python "$here/bge_encoders.py" "$out/bge"
    run python "$here/mteb_tasks.py" "$out/bge"
    ;;
  *) echo "unknown proof $name" >&2 && exit 2 ;;
esac
