#!/usr/bin/env bash
# Table 10 of the paper, with the same memory of a GPU: bash examples/paper/table10.sh CORPUS RUNS [TRAIN OPTIONS]
# At the end of a row: the paper's perplexity at training's attention length, the best one, and its attention length.
set -euo pipefail
source "$(dirname "$0")/row.sh"

row recurrence wt103-128m 128,192,256,320,384,448,500,576,640 "$cached" # 27.02 26.77 500
row recurrence-half wt103-128m-half 128,192,256,320,384,460,512,576 "$cached" # 28.69 28.33 460
row no-recurrence-176 wt103-128m-no-recurrence 120,176,240,304,400,464 "$sliding" --tgt-len 176 # 28.43 27.98 400
row no-recurrence-half-172 wt103-128m-no-recurrence-half 64,120,172,236 "$sliding" --tgt-len 172 # 28.83 28.83 120
