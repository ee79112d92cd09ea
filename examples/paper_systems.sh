#!/usr/bin/env bash
# The systems of the paper's Table 6, tiny, each trained for the same minutes on the same words:
#   bash examples/paper_systems.sh CORPUS FOLDER [MINUTES]
# CORPUS: what `txl prepare --as words` wrote. FOLDER gets a run each. Prints perplexities of the test split.
set -euo pipefail
[ $# -ge 2 ] || { echo "usage: bash examples/paper_systems.sh CORPUS FOLDER [MINUTES]" >&2; exit 2; }
corpus=$1 folder=$2 minutes=${3:-3}
sizes="--cutoffs 2000,6000 --div-val 2 --tgt-len 128 --minutes $minutes"
recurrence="--mem-len 128" alone="--mem-len 0"
cached="--method cached --attn-len 256" sliding="--method sliding --attn-len 128 --segment 16"

# name: options of training: options of evaluation
systems=(
  "recurrence-ours-full: $recurrence: $cached"
  "recurrence-shaw-full: $recurrence --encoding shaw --table-len 256 --tie-r: $cached"
  "recurrence-ours-half: $recurrence --loss half: $cached"
  "alone-ours-full: $alone: $sliding"
  "alone-ours-half: $alone --loss half: $sliding"
  "alone-shaw-full: $alone --encoding shaw --table-len 128 --tie-r: $sliding"
  "alone-shaw-half: $alone --encoding shaw --table-len 128 --tie-r --loss half: $sliding"
  "alone-vaswani-half: $alone --encoding sinusoid --tie-r --loss half: $sliding"
  "alone-al-rfou-half: $alone --encoding learned --table-len 128 --tie-r --loss half: $sliding"
)
for system in "${systems[@]}"; do
  IFS=: read -r name training evaluation <<< "$system"
  echo "=== $name"
  # shellcheck disable=SC2086
  txl train --run "$folder/$name" --data "$corpus" $sizes $training
  # shellcheck disable=SC2086
  txl eval "$folder/$name" $evaluation
done
