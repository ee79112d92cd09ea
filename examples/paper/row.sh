# The function that table6.sh and table10.sh share: one row of a table, trained and scored.
# usage of both: bash SCRIPT CORPUS RUNS [OPTIONS OF TXL TRAIN FOR EVERY ROW]; $EVAL holds further options of txl eval.
# CORPUS: txl prepare CORPUS --data wikitext-103-v1.zip. A script that was interrupted continues where it stopped.
[ $# -ge 2 ] || { echo "usage: bash examples/paper/$(basename "$0") CORPUS RUNS [TRAIN OPTIONS]" >&2; exit 2; }
corpus=$1 runs=$2
shift 2
options=("$@")
cached="--batch 8" sliding="--method sliding --segment 1 --batch 64"

# row NAME RECIPE LENGTHS "EVAL OPTIONS" [TRAIN OPTIONS]: the last line that txl eval prints has the perplexity at
# training's attention length, the best one, and the shortest length within 0.1% of it, on the validation split.
row() {
  local name=$1 recipe=$2 lengths=$3 reading=$4 run=$runs/$1
  shift 4
  echo "=== $name"
  if [ -e "$run/last.safetensors" ]; then
    txl train --run "$run" --resume
  else
    txl train --run "$run" --data "$corpus" --recipe "$recipe" "$@" "${options[@]}"
  fi
  # shellcheck disable=SC2086
  txl eval "$run" --split valid --attn-len "$lengths" $reading ${EVAL:-}
}
