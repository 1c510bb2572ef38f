#!/usr/bin/env bash
# Makes .venv at the root of the checkout: Python 3.7 and every package of requirements.txt and
# requirements-dev.txt, Horovod and the kernels of deepfm/kernels built for this machine. A second run
# finds it ready and does nothing.
#
#   scripts/setup.sh
#   PYTHON=/path/to/python3.7 DEEPFM_CACHE=/big/disk/deepfm scripts/setup.sh
#   scripts/setup.sh --sagemaker    # also .venv-sagemaker: SageMaker's toolkit and SDK
#   scripts/setup.sh --tests        # that, and Chromium, where apt-get can install it
#
# DEEPFM_CACHE (default ~/.cache/deepfm) keeps what is expensive to make: Horovod's wheel, a
# downloaded Python, and the logs. Exit codes: 0 ready, 1 a step failed, 2 something is missing.
set -euo pipefail

if [[ ${1:-} == --help ]]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$(pwd -P)
cache=${DEEPFM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/deepfm}
venv_python=.venv/bin/python
stamp=.venv/deepfm-setup
sagemaker_stamp=.venv-sagemaker/deepfm-setup
debian_packages=(g++ make cmake openmpi-bin libopenmpi-dev)
hosts_packages=(openssh-server iproute2 curl)

fail() { # something is missing that this script cannot get
  echo "setup.sh: $1" >&2
  exit 2
}

step() { # step SENTENCE COMMAND...: runs it, prints the seconds, shows the log only where it fails
  local sentence=$1 log start=$SECONDS
  shift
  log=$(mktemp "$cache/logs/$(date +%Y%m%d-%H%M%S)-XXXX")
  printf '%s ... ' "$sentence"
  if "$@" >"$log" 2>&1 </dev/null; then
    echo "$((SECONDS - start)) s"
  else
    echo "failed after $((SECONDS - start)) s; the last lines of $log:"
    tail -n 20 "$log" >&2
    return 1
  fi
}

is_python37() { # executed to be believed: pyenv's shim is there for versions that it will not run
  [[ $("$1" -c 'import ensurepip, sys, venv; print(sys.version_info[:2])' 2>/dev/null) == "(3, 7)" ]]
}

find_python() { # sets $python to the first that runs
  for python in "${PYTHON:-}" "$(type -P python3.7)" \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.7*/bin/python3.7 \
    "$HOME"/.pyenv/versions/3.7*/bin/python3.7 \
    "$cache/conda/bin/python3.7" "$cache"/uv-python/*/bin/python3.7; do
    if is_python37 "$python"; then return 0; fi
  done
  return 1
}

fetch_python() { # for a machine that has none
  if command -v conda >/dev/null; then
    step "Getting Python 3.7 with conda" conda create -qy -p "$cache/conda" python=3.7 || true
    if find_python; then return; fi
  fi
  if command -v python3 >/dev/null; then
    step "Getting Python 3.7.9 with uv" install_python_with_uv || true
    if find_python; then return; fi
  fi
  fail "found no Python 3.7 (with venv) and could not fetch one: install one, for example with \
'pyenv install 3.7.17' or 'conda create -p ~/python37 python=3.7', and run \
'PYTHON=/path/to/python3.7 scripts/setup.sh'."
}

install_python_with_uv() { # uv 0.5 is the last series that knows Python 3.7
  python3 -m pip install --target "$cache/uv" uv==0.5.31 &&
    UV_PYTHON_INSTALL_DIR=$cache/uv-python "$cache/uv/bin/uv" python install 3.7.9
}

need() { # need PURPOSE COMMAND...: installs ${packages[@]} where a command is missing and root may
  local purpose=$1 missing=() command
  shift
  for command in "$@"; do
    command -v "$command" >/dev/null || missing+=("$command")
  done
  [[ ${#missing[@]} -gt 0 ]] || return 0
  if [[ $EUID -ne 0 ]] || ! command -v apt-get >/dev/null; then
    fail "$purpose needs ${missing[*]}: run 'sudo apt-get install -y ${packages[*]}' (or \
your system's equivalent), then scripts/setup.sh again."
  fi
  export DEBIAN_FRONTEND=noninteractive
  step "Updating apt's package lists" apt-get update -q
  step "Installing ${packages[*]} with apt-get" \
    apt-get install -qy --no-install-recommends "${packages[@]}"
}

pip_install() { "$venv_python" -m pip install --disable-pip-version-check "$@"; }

build_wheel() { # under its final name only when it is complete
  local unfinished=$wheels.unfinished-$$
  trap 'rm -rf "$wheels.unfinished-$$"' EXIT
  # --no-cache-dir: pip's own cache would not ask which TensorFlow and MPI it was built for.
  # CMAKE_POLICY_VERSION_MINIMUM: CMake 4 refuses the Gloo in Horovod without it.
  CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
    HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1 "$venv_python" -m pip wheel --no-build-isolation \
    --no-deps --no-binary horovod --no-cache-dir --wheel-dir "$unfinished" "$(pin horovod)" &&
    rm -rf "$wheels" && mv "$unfinished" "$wheels"
}

pin() { grep -Eo "^$1==[^ ]+" requirements.txt; }

fingerprint() { # fingerprint REQUIREMENTS...: what .venv has to be made again for
  { cat requirements.txt requirements-dev.txt deepfm/kernels/build.py deepfm/kernels/csrc/* "$@" && "$venv_python" -VV && echo "$root"; } | sha256sum
}

spare_another_venv() { # a new .venv takes the place of one that this script has made, and no other
  if [[ -L .venv ]]; then
    fail ".venv is a link, and what it leads to would be emptied; remove the link and try again."
  elif [[ -e .venv && ! -f .venv/requirements.txt ]]; then
    fail ".venv is none that setup.sh has made, or its making was cut short; move it away or \
delete it, and try again."
  fi
}

new_venv() { "$python" -m venv --clear .venv || { rm -rf .venv && return 1; }; }

make_venv() {
  local packages=("${debian_packages[@]}")
  if ! is_python37 "$venv_python" || ! grep -qsF "$root/.venv" .venv/bin/activate; then
    spare_another_venv
    find_python || fetch_python # no .venv, or its Python is gone, or it was moved here
    step "Making .venv with $python" new_venv
  fi
  rm -f "$stamp"
  grep -vhE '^(horovod==|-r )' requirements.txt requirements-dev.txt >.venv/requirements.txt
  step "Installing pip, setuptools and wheel" \
    pip_install "$(pin pip)" "$(pin setuptools)" "$(pin wheel)"
  step "Installing TensorFlow and the other packages" pip_install -r .venv/requirements.txt

  need Horovod mpirun
  mpi=$(mpirun --version)
  built_for="$(pin tensorflow)-cp37-${mpi%%$'\n'*}-$(uname -m)-$(getconf GNU_LIBC_VERSION)"
  wheels=$cache/$(pin horovod)-${built_for//[^[:alnum:]._=-]/}-${HOROVOD_GPU_OPERATIONS:-CPU}
  if ! compgen -G "$wheels/horovod-*.whl" >/dev/null; then
    need Horovod g++ make cmake mpicxx
    step "Building Horovod (2 to 5 minutes, once per machine)" build_wheel
  fi
  step "Installing Horovod" pip_install --no-index --no-deps --force-reinstall "$wheels"/*.whl
  step "Trying the imports" "$venv_python" -c '
import tensorflow, sagemaker_tensorflow, horovod.tensorflow as hvd
assert hvd.mpi_built() and hvd.gloo_built(), "Horovod was built without MPI or Gloo"'
  make_kernels
  fingerprint >"$stamp"
}

make_kernels() { # training goes without them as well, so it is no error where they cannot be built
  if [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; then need "Compiling the kernels" g++; fi
  step "Compiling the kernels" "$venv_python" -m deepfm.kernels ||
    echo "setup.sh: training goes without them, in about 1.5 times the time;" \
      "'$venv_python -m deepfm.kernels' tries again." >&2
}

make_venv_sagemaker() { # sees .venv's packages behind its own: TensorFlow and Horovod are there
  local packages=("${hosts_packages[@]}") python=.venv-sagemaker/bin/python
  rm -rf .venv-sagemaker
  step "Making .venv-sagemaker" "$venv_python" -m venv --clear .venv-sagemaker
  echo "$root/.venv/lib/python3.7/site-packages" >.venv-sagemaker/lib/python3.7/site-packages/venv.pth
  step "Installing SageMaker's toolkit and SDK" env \
    SKLEARN_ALLOW_DEPRECATED_SKLEARN_PACKAGE_INSTALL=True "$python" -m pip install \
    --disable-pip-version-check --no-deps --no-build-isolation -r requirements-sagemaker.txt
  need "scripts/sagemaker_local.py" sshd ip curl
  step "Trying the imports" "$python" -c 'import sagemaker, sagemaker_tensorflow_container.training'
  fingerprint requirements-sagemaker.txt >"$sagemaker_stamp"
}

wants_chromium() { # without it one test is skipped
  [[ $tests == 1 && $EUID -eq 0 ]] && command -v apt-get >/dev/null && ! command -v chromium >/dev/null
}

is_ready() { # is_ready STAMP REQUIREMENTS...
  [[ -f $1 && $(<"$1") == "$(fingerprint "${@:2}")" ]]
}

sagemaker=0 tests=0
for word in "$@"; do
  case $word in
  --sagemaker) sagemaker=1 ;;
  --tests) sagemaker=1 tests=1 ;;
  *) fail "$word is not an option; give --sagemaker, --tests or none." ;;
  esac
done
if [[ -n ${PYTHON:-} ]] && ! is_python37 "$PYTHON"; then
  fail "PYTHON=$PYTHON is not a Python 3.7 that runs and has venv; name one that does, or unset it."
fi
exec 9<"$root" # one set-up of a checkout at a time
flock --nonblock 9 || { echo "Set-up: waiting for another one to end." && flock 9; }
if is_ready "$stamp" && ! wants_chromium &&
  { [[ $sagemaker == 0 ]] || is_ready "$sagemaker_stamp" requirements-sagemaker.txt; }; then
  echo "Set-up: .venv is ready."
  exit
fi

mkdir -p "$cache/logs" 2>/dev/null || fail "cannot write to $cache; set DEEPFM_CACHE to a folder that can be."
echo "Set-up: making $root/.venv, a few minutes the first time. Cache and logs: $cache"
if ! is_ready "$stamp"; then make_venv; fi
if [[ $sagemaker == 1 ]] && ! is_ready "$sagemaker_stamp" requirements-sagemaker.txt; then
  make_venv_sagemaker
fi
if wants_chromium; then
  packages=(chromium)
  need "The test of scripts/report.py" chromium || true
fi
echo "Set-up: done in $SECONDS s."
