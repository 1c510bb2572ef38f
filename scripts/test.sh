#!/usr/bin/env bash
# Sets up, lints and tests. Arguments go to pytest:
#
#   scripts/test.sh
#   scripts/test.sh tests/test_model.py -k second_order
set -euo pipefail

[[ ${1:-} != --help ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
for word in "$@"; do
  if [[ $word == tests/* && ! -e ${word%%::*} ]]; then
    echo "test.sh: no such file: ${word%%::*}; the tests are tests/test_*.py." >&2
    exit 2
  fi
done
scripts/setup.sh --tests

echo "Lint"
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/shellcheck scripts/*.sh scripts/*/*.sh tests/*.sh .ci/run

echo "Tests"
export TF_CPP_MIN_LOG_LEVEL=2
unset PYTHONDONTWRITEBYTECODE  # or each of hundreds of runs compiles the project anew
# Four for two cores, because many tests wait for other processes. Exits 5 if no test was found.
exec .venv/bin/python -m pytest -n 4 --dist loadgroup "$@"
