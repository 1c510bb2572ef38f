#!/usr/bin/env bash
# Lists the known vulnerabilities of the pinned packages, according to OSV (osv.dev). It is for
# information: it always exits 0, within AUDIT_SECONDS (default 60).
#
#   scripts/audit.sh
#
# pip-audit only reads the pins, so it runs in its own Python, 3.8 or later. It does not ask PyPI's
# service: behind a mirror without that service, no package would seem to have a vulnerability.
set -euo pipefail

[[ ${1:-} != --help ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }
if [[ -n ${1:-} && $1 != --now ]]; then
  echo "audit.sh: $1 is not an option; audit.sh takes none." >&2
  exit 2
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
tool=pip-audit==2.7.3
folder=${DEEPFM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/deepfm}/$tool

if [[ ${1:-} != --now ]]; then
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  if ! timeout "${AUDIT_SECONDS:-60}" scripts/audit.sh --now 2>"$log"; then
    why=$(tail -n 1 "$log" | cut -c1-120)
    echo "Could not look up known vulnerabilities: ${why:-timeout; try a larger AUDIT_SECONDS}"
  fi
  exit 0
fi

if [[ ! -f $folder/ready ]]; then
  rm -rf "$folder"
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 8) and "there is no Python 3.8 or later")'
  python3 -m venv "$folder"
  "$folder/bin/pip" install --quiet --disable-pip-version-check "$tool"
  touch "$folder/ready"
fi
for file in requirements.txt requirements-sagemaker.txt; do
  found=$("$folder/bin/pip-audit" --vulnerability-service osv --disable-pip --no-deps --desc off \
    --progress-spinner off --requirement "$file") || [[ $? == 1 && -n $found ]]
  echo "Known vulnerabilities, $file:"
  echo "${found:-none}"
done
