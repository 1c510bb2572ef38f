#!/usr/bin/env bash
# Sets up, lints and tests. Arguments go to pytest:
#
#   scripts/test.sh
#   scripts/test.sh tests/test_model.py -k second_order
#   scripts/test.sh --tf2   # on TensorFlow 2.15, the tests of what differs there
set -euo pipefail

[[ ${1:-} != --help ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
if [[ ${1:-} == --tf2 ]]; then
  shift
  venv=.venv-tf2
  [[ $# -gt 0 ]] || set -- \
    tests/test_{checkpoints,every_record_once,export,horovod,input_pipeline,jobs,kernels}.py \
    tests/test_{modes_agree,parameter_servers,pipe_mode,records,resume,two_runtimes}.py
fi
for word in "$@"; do
  if [[ $word == tests/* && ! -e ${word%%::*} ]]; then
    echo "test.sh: no such file: ${word%%::*}; the tests are tests/test_*.py." >&2
    exit 2
  fi
done
if [[ $venv == .venv ]]; then
  scripts/setup.sh --tests

  echo "Lint"
  .venv/bin/ruff format --check .
  .venv/bin/ruff check .
  .venv/bin/shellcheck scripts/*.sh scripts/*/*.sh tests/*.sh .ci/run
else
  scripts/setup.sh --tf2
fi

echo "Tests"
export TF_CPP_MIN_LOG_LEVEL=2
unset PYTHONDONTWRITEBYTECODE  # or each of hundreds of runs compiles the project anew
# Four for two cores, because many tests wait for other processes. Exits 5 if no test was found.
exec $venv/bin/python -m pytest -n 4 --dist loadgroup "$@"
