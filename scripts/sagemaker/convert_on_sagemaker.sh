#!/usr/bin/env bash
# Each host of a processing job runs this: a program of data_tools, which knows by itself that the
# input is divided among the hosts, and writes into one folder per host if there are several.
#
#   bash convert_on_sagemaker.sh libsvm_to_tfrecord --num_workers=16
#
# The arguments are the name of a program in data_tools and its flags. launch_sagemaker.py uploads
# this file beside data_tools and deepfm.
set -euo pipefail

[[ ${1:-} != --help ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }

base=/opt/ml/processing
config=/opt/ml/config/resourceconfig.json
tool=${1:-}
if [[ ! $tool =~ ^[a-z_]+$ || ! -f $base/input/code/data_tools/$tool.py ]]; then
  echo "convert_on_sagemaker.sh: '$tool' is not a program in data_tools; try libsvm_to_tfrecord." >&2
  exit 2
fi
shift

host=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["current_host"])' "$config")
files=$(find "$base/input/data" -type f -size +0 ! -name '[._]*' 2>/dev/null || true)
if [ -z "$files" ]; then
  echo "$host has no file to convert: there are fewer files than hosts." >&2
  exit 0
fi
cd "$base/input/code"
if [ "${tool%_criteo}" = prepare ] && ! python -c 'import pyarrow' 2>/dev/null; then
  python -m pip install --quiet pyarrow==12.0.1 # SageMaker's image has none
fi
exec python -m "data_tools.$tool" --input="$base/input/data" --output_dir="$base/output" \
  --resource_config="$config" "$@"
