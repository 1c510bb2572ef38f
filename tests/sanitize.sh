#!/usr/bin/env bash
# Tests the compiled kernels and the codec under AddressSanitizer and UndefinedBehaviorSanitizer,
# which stop at the first access outside memory and the first undefined operation:
#
#   tests/sanitize.sh
#   tests/sanitize.sh -k first_layer
#
# The test of memory use is left out: the sanitizer keeps freed memory back.
set -euo pipefail

[[ ${1:-} != --help ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }

if [[ $# -gt 0 && $1 != -k ]]; then
  echo "sanitize.sh: '$1' is unknown; give nothing, or -k and an expression of pytest." >&2
  exit 2
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export DEEPFM_SANITIZE=1 TF_CPP_MIN_LOG_LEVEL=2
.venv/bin/python -c "
from deepfm.kernels import build
from deepfm.records import build as of_codec
of_codec.build()
build.build()"
library() { "${CXX:-g++}" -print-file-name="$1"; }
# Python is not instrumented: the sanitizers have to be loaded before it, and it frees little.
export ASAN_OPTIONS=detect_leaks=0:handle_segv=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
LD_PRELOAD="$(library libasan.so) $(library libubsan.so)" \
  exec .venv/bin/python -m pytest -n 0 tests/test_{kernels,codec,codec_lines}.py \
  --deselect=tests/test_kernels.py::test_a_few_long_records_do_not_make_a_shuffle_buffer_large "$@"
