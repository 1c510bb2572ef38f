#!/usr/bin/env bash
# From nothing to a prediction: set-up, synthetic data, conversion, training, evaluation, inference,
# export, and one prediction from the exported model. All of it goes into quickstart_output/, where
# it replaces what an earlier run left, and nothing else.
#
#   scripts/quickstart.sh [ROWS]     rows to train on; default: 1000000
set -euo pipefail

[[ ${1:-} != --help ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
rows=${1:-1000000}
if [[ $# -gt 1 || ! $rows =~ ^[1-9][0-9]*$ ]]; then
  echo "quickstart.sh: '$*' is not a number of rows to train on; try scripts/quickstart.sh 100000." >&2
  exit 2
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh --no_horovod
out=quickstart_output
python=.venv/bin/python
export PYTHONWARNINGS=ignore TF_CPP_MIN_LOG_LEVEL=2

step() {
  echo
  echo "== $1"
  shift
  echo "   $*"
  "$@"
}

# What an earlier run left.
rm -rf $out/{libsvm,train,val,test,model,servable,predictions.txt,saved_model_cli.log}
step "1. Synthetic data whose best possible AUC is known" \
  "$python" -m data_tools.make_synthetic --output_dir=$out/libsvm --feature_size=10000 \
  --train_rows="$rows" --val_rows=100000 --test_rows=100000

for split in train val test; do
  step "2. LibSVM to TFRecord: $split" \
    "$python" -m data_tools.libsvm_to_tfrecord --input=$out/libsvm/$split.libsvm \
    --output_dir=$out/$split --feature_size=10000 --num_files=2 --num_workers=2
done

step "3. Training, with an evaluation after each epoch, and export" \
  "$python" train.py --training_data_dir=$out/train --val_data_dir=$out/val \
  --model_dir=$out/model --servable_model_dir=$out/servable \
  --embedding_size=16 --deep_layers=128,64 --dropout=0.1 --l2_reg=3e-5 --num_epochs=2

step "4. Inference: one probability for each record, in their order" \
  "$python" train.py --task_type=infer --infer_data_dir=$out/test --model_dir=$out/model \
  --predictions_file=$out/predictions.txt

step "5. Evaluation on records that training has not seen" \
  "$python" train.py --task_type=eval --val_data_dir=$out/test --model_dir=$out/model

servable=$(find $out/servable -mindepth 1 -maxdepth 1 -name '[0-9]*' | sort | tail -n 1)
step "6. A prediction from the exported model" \
  .venv/bin/saved_model_cli run --dir "$servable" --tag_set serve --signature_def serving_default \
  --input_exprs "feat_ids=np.arange(1, 40).reshape(1, 39);feat_vals=np.ones((1, 39), 'f')" \
  2>$out/saved_model_cli.log

echo
"$python" - $out <<'END'
import json
import sys

out = sys.argv[1]
with open(f"{out}/libsvm/synthetic.json") as f:
    best = json.load(f)["splits"]["test"]
with open(f"{out}/model/report.eval.json") as f:
    found = json.load(f)["eval"]
with open(f"{out}/predictions.txt") as f:
    mean = sum(map(float, f)) / best["rows"]
print(f"AUC {found['auc']:.4f} of {best['best_auc']:.4f} possible,", end=" ")
print(f"log loss {found['log_loss']:.4f} of {best['best_log_loss']:.4f} possible.")
print(f"Mean prediction {mean:.4f}, positives {best['positives'] / best['rows']:.4f}.")
END
