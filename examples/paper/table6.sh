#!/usr/bin/env bash
# Table 6 of the paper, the ablation on WikiText-103: bash examples/paper/table6.sh CORPUS RUNS [TRAIN OPTIONS]
# At the end of a row: the paper's perplexity at training's attention length, the best one, and its attention length.
set -euo pipefail
source "$(dirname "$0")/row.sh"

row recurrence wt103-128m 128,192,256,320,384,448,500,576,640 "$cached" # 27.02 26.77 500
row recurrence-shaw wt103-128m-shaw 128,192,256,320,384 "$cached" # 27.94 27.94 256
row recurrence-half wt103-128m-half 128,192,256,320,384,460,512,576 "$cached" # 28.69 28.33 460
row no-recurrence wt103-128m-no-recurrence 64,128,192,260,320 "$sliding" # 29.59 29.02 260
row no-recurrence-half wt103-128m-no-recurrence-half 64,120,128,192,256 "$sliding" # 30.10 30.10 120
row no-recurrence-shaw wt103-128m-no-recurrence-shaw 64,120,128,192 "$sliding" # 29.75 29.75 120
row no-recurrence-shaw-half wt103-128m-no-recurrence-shaw-half 64,120,128,192 "$sliding" # 30.50 30.50 120
# Absolute positions reach no further than a segment.
row vaswani-half wt103-128m-vaswani-half 64,120,128 "$sliding" # 30.97 30.97 120
row al-rfou-half wt103-128m-al-rfou-half 64,120,128 "$sliding" # 31.16 31.16 120
row 151m wt103-base 240,300,360,450,512,576,640,704 "--segment 64 --clamp-len 400" # 23.43 23.09 640
