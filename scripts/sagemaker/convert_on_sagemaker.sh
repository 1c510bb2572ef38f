#!/usr/bin/env bash
# Each host of a processing job runs this: a program of data_tools, which knows by itself that the
# input is divided among the hosts, and writes into one folder per host if there are several.
#
#   bash convert_on_sagemaker.sh libsvm_to_tfrecord --num_workers=16
#
# launch_sagemaker.py uploads this file beside data_tools and deepfm, and checks its arguments.
set -euo pipefail

base=/opt/ml/processing
config=/opt/ml/config/resourceconfig.json
tool=$1
shift
if [ -z "$(find "$base/input/data" -type f -size +0 ! -name '[._]*' 2>/dev/null || true)" ]; then
  echo "This host has no file to convert: there are fewer files than hosts." >&2
  exit 0
fi
cd "$base/input/code"
if [ "${tool%_criteo}" = prepare ] && ! python -c 'import pyarrow' 2>/dev/null; then
  python -m pip install --quiet pyarrow==12.0.1 # SageMaker's image has none
fi
exec python -m "data_tools.$tool" --input="$base/input/data" --output_dir="$base/output" \
  --resource_config="$config" "$@"
