#!/usr/bin/env bash
# The table "Four bits" of docs/explanation/results/smollm2.md: SmolLM2, merged and repaired, with weights in 16 and in 4 bits.
# Finished cells are kept in FOLDER. It needs constraints/after.txt, and $FEATCAL_REAL with the fetched weights.
# Usage: scripts/results_four_bits.sh [FOLDER]
set -euo pipefail

folder="$(realpath -m "${1:-outputs/four-bits}")"
PYTHONPATH="$(cd "$(dirname "$0")/../benchmarks" && pwd)${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH

row() { # NAME ROUNDING
  echo "+method.post_merging_methods.$1={_target_: four_bits.RoundedWeights, rounding: $2}"
}

# A repair is an upstream here, so that the gain of a row below it is what its rounding costs.
fusion_bench method=compare modelpool=smollm2_TA4 method.seed=42 method.samples_per_task=64 \
  +method@method.upstream_mergers.featcal_paper_llama_3b-targets=featcal \
  'method.upstream_mergers.featcal_paper_llama_3b-targets={ridge_lambda: 1.0e-5, mix_alpha: 0.15, anchor_rho: 0.5, calibrate_norm: false, decoder_rows: targets, samples_per_task: 64, seed: 42}' \
  'method.upstreams=[task_arithmetic,featcal_plus,featcal_paper_llama_3b-targets,featcal]' \
  "$(row bits_16 bfloat16)" "$(row bits_4 gptq)" "$(row bits_4_nearest nearest)" \
  'method.post_merging=[bits_16,bits_4,bits_4_nearest]' \
  "method.results_dir=$folder/cells" "path.log_dir=$folder/smollm2_TA4-four-bits"
