#!/usr/bin/env bash
# Makes .venv at the root of the checkout: Python 3.7 and every package of requirements.txt and
# requirements-dev.txt, with Horovod and the kernels of deepfm/kernels built for this machine. Run
# again, it does only what is missing.
#
#   scripts/setup.sh
#   scripts/setup.sh --no_horovod   # only what --distribution=local, tower, mirrored and ps need
#   scripts/setup.sh --gpu          # with tensorflow-gpu (docs/gpu.md); may be one of several
#   scripts/setup.sh --sagemaker    # also .venv-sagemaker: SageMaker's toolkit and SDK
#   scripts/setup.sh --spark        # only .venv-spark: pyspark, without TensorFlow; needs Java
#   scripts/setup.sh --peers        # only .venv-peers: what scripts/benchmark.py compares with, 3 GB;
#                                   # needs a Python 3.9 to 3.11
#   scripts/setup.sh --tf2          # only .venv-tf2: TensorFlow 2.15 (docs/tensorflow_2.md), and
#                                   # what tests need; needs a Python 3.10
#   scripts/setup.sh --tests        # all of these but --gpu and --peers, and --tf2 without Horovod,
#                                   # where there is a Python 3.10; .venv-mkl, .venv-search, Chromium,
#                                   # where apt-get can install it, and .venv-spark-newer, where
#                                   # there is a Python 3.9 to 3.11
#   PYTHON=/path/to/python3.7 DEEPFM_CACHE=/big/disk/deepfm scripts/setup.sh
#
# DEEPFM_CACHE (default ~/.cache/deepfm) keeps what is expensive to make: Horovod's wheel, a
# downloaded Python, and the logs. With --gpu, Horovod uses NCCL where it finds nvcc and nccl.h:
# HOROVOD_NCCL_HOME names NCCL's folder, and HOROVOD_GPU_OPERATIONS (NCCL, MPI) decides otherwise.
# A .venv made with --gpu stays one, and --gpu replaces one made without. Exit codes: 0 ready, 1 a
# step failed, 2 something is missing.
set -euo pipefail

[[ ${1:-} != --help ]] || { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$(pwd -P)
cache=${DEEPFM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/deepfm}
venv_python=.venv/bin/python
listed=requirements.txt abi=cp37 # of $venv_python; make_tf2 has others

fail() { # something is missing that this script cannot get
  echo "setup.sh: $1" >&2
  exit 2
}

step() { # step SENTENCE COMMAND...: runs it, prints the seconds, shows the log only if it fails
  local sentence=$1 log start=$SECONDS
  shift
  log=$(mktemp "$cache/logs/$(date +%Y%m%d-%H%M%S)-XXXX")
  if "$@" >"$log" 2>&1 </dev/null; then
    echo "$sentence ... $((SECONDS - start)) s"
  else
    echo "$sentence ... failed after $((SECONDS - start)) s; the last lines of $log:"
    tail -n 20 "$log" >&2
    return 1
  fi
}

beside=()
begin() { # begin PART COMMAND...: starts it, if the part is to be made; `finish` waits for all
  if to_do "$1"; then
    "${@:2}" &
    beside+=($!)
  fi
}

finish() {
  local failed=0 job
  # bash before 4.4 takes an empty array for an unset one.
  for job in ${beside[@]+"${beside[@]}"}; do wait "$job" || failed=1; done
  beside=()
  return $failed
}

is_python() { # is_python MINOR PROGRAM: runs it, as pyenv has shims even for what it will not run
  [[ $("$2" -c 'import ensurepip, sys, venv; print(sys.version_info[:2])' 2>/dev/null) == "(3, $1)" ]]
}

find_python() { # find_python MINOR...: sets $python to the first that runs
  local minor IFS=$'\n'
  for minor in "$@"; do
    for python in "${PYTHON:-}" $(type -aP "python3.$minor") \
      "${PYENV_ROOT:-$HOME/.pyenv}/versions/3.$minor".*/bin/python \
      "$cache"/uv-python/*/bin/"python3.$minor"; do
      if is_python "$minor" "$python"; then return 0; fi
    done
  done
  return 1
}

get_python() { # sets $python to a Python 3.7; uv 0.5 is the last series that knows it
  if find_python 7; then return; fi
  if command -v python3 >/dev/null; then
    if step "Getting uv" python3 -m pip install --target "$cache/uv" uv==0.5.31; then
      UV_PYTHON_INSTALL_DIR=$cache/uv-python \
        step "Getting Python 3.7.9 with uv" "$cache/uv/bin/uv" python install 3.7.9 || true
    fi
    if find_python 7; then return; fi
  fi
  fail "found no Python 3.7 (with venv) and could not fetch one: install one, for example with \
'pyenv install 3.7.17' or 'conda create -p ~/python37 python=3.7', and run \
'PYTHON=/path/to/python3.7 scripts/setup.sh'."
}

has_python() { # has_python PART MINOR...: sets ${pythons[PART]}, if the part is to be made
  is_ready "$1" || { find_python "${@:2}" && pythons[$1]=$python; }
}

need_python() { # need_python PART VERSIONS MINOR...
  has_python "$1" "${@:3}" || fail "found no Python $2 with venv, which --$1 needs; \
install one, for example with 'pyenv install 3.$3'."
}

missing() { # missing COMMAND...: prints those that are missing
  local command
  for command in "$@"; do
    command -v "$command" >/dev/null || echo "$command"
  done
}

can_install() { [[ $EUID -eq 0 ]] && command -v apt-get >/dev/null; }

apt_install() { # apt_install PACKAGE...
  step "Installing $* with apt-get" apt-get install -qy --no-install-recommends "$@"
}

install_wanted() {
  export DEBIAN_FRONTEND=noninteractive
  step "Updating apt's package lists" apt-get update -q
  if [[ ${#wanted[@]} -gt 0 ]]; then apt_install "${wanted[@]}"; fi
  local package
  for package in $skipped_without; do apt_install "$package" || true; done
}

pip_install() { # the toolkit's "sklearn" refuses to install without the word
  SKLEARN_ALLOW_DEPRECATED_SKLEARN_PACKAGE_INSTALL=True \
    "$venv_python" -m pip install --disable-pip-version-check "$@"
}

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

requirements() { sed "s/^tensorflow==/$tensorflow==/" "$listed"; } # either, never both

pin() { requirements | grep -Eo "^$1==[^ ]+"; }

is_gpu_venv() { grep -qs '^tensorflow-gpu==' .venv/requirements.txt; }

find_nccl() { # sets what Horovod's build reads, if nvcc and NCCL are there
  local home
  command -v nvcc >/dev/null || return 0
  for home in ${HOROVOD_NCCL_HOME:-} "${CUDA_HOME:-/usr/local/cuda}" /usr; do
    if [[ -f $home/include/nccl.h ]]; then
      export HOROVOD_GPU_OPERATIONS=${HOROVOD_GPU_OPERATIONS:-NCCL} HOROVOD_NCCL_HOME=$home
      return
    fi
  done
}

# The parts of the set-up, and the files that they are made of.
parts=(packages kernels development horovod sagemaker)
sources() {
  case $1 in
  packages | horovod) echo requirements.txt ;;
  kernels) echo requirements.txt deepfm/{kernels/{build.py,csrc/*},records/{build.py,library.py,csrc/*}} ;;
  development) echo requirements.txt requirements-dev.txt ;;
  sagemaker) echo requirements.txt requirements-dev.txt requirements-sagemaker.txt ;;
  mkl | search) echo requirements.txt "requirements-$1.txt" ;;
  tf2*) echo requirements-tf2.txt requirements-dev.txt ;;
  peers | spark*) echo "requirements-$1.txt" ;;
  esac
}

stamp() {
  case $1 in
  sagemaker | mkl | search | peers | tf2 | spark*) echo ".venv-$1/deepfm-setup" ;;
  tf2_horovod) echo ".venv-tf2/deepfm-setup-horovod" ;;
  *) echo ".venv/deepfm-setup-$1" ;;
  esac
}

fingerprint() { # fingerprint PART: if it changes, the part is made again
  local python=$venv_python
  case $1 in peers | tf2* | spark*) python=$(dirname "$(stamp "$1")")/bin/python ;; esac
  # shellcheck disable=SC2046  # names of files, without spaces
  { cat $(sources "$1") && "$python" -VV && echo "$root" &&
    if [[ $1 == horovod ]]; then echo -n "${HOROVOD_GPU_OPERATIONS:-}"; fi; } | sha256sum
}

is_ready() { [[ -f $(stamp "$1") && $(<"$(stamp "$1")") == "$(fingerprint "$1")" ]]; }

ready() { fingerprint "$1" >"$(stamp "$1")"; }

to_do() { [[ $left == *" $1 "* ]]; }

spare_another_venv() { # a new .venv only replaces one that this script has made
  if [[ -L .venv ]]; then
    fail ".venv is a link, and its target would be emptied; remove the link and try again."
  elif [[ -e .venv && ! -f .venv/requirements.txt ]]; then
    fail ".venv was not made by setup.sh, or its making was cut short; move it away or \
delete it, and try again."
  fi
}

new_venv() { # new_venv FOLDER PYTHON: in place of what is there
  rm -rf "$1"
  step "Making $1 with $2" "$2" -m venv --clear "$1" || { rm -rf "$1" && return 1; }
}

install_pip() {
  step "Installing pip, setuptools and wheel into ${venv_python%/bin/python}" \
    pip_install "$(pin pip)" "$(pin setuptools)" "$(pin wheel)"
}

make_venv() { # and its pip; there may be one already
  if ! is_python 7 "$venv_python" || ! grep -qsF "$root/.venv" .venv/bin/activate; then
    spare_another_venv
    get_python # no .venv, or its Python is gone, or it was moved here
    new_venv .venv "$python"
  fi
  rm -f "$(stamp packages)"
  requirements | grep -vE '^horovod==' >.venv/requirements.txt
  install_pip
}

make_packages() {
  step "Installing TensorFlow and the other packages of train.py" pip_install -r .venv/requirements.txt
  step "Trying the imports" "$venv_python" -c 'import tensorflow, sagemaker_tensorflow'
  ready packages
}

make_kernels() { # training works without them, so it is no error if they cannot be built
  if step "Compiling the kernels" "$venv_python" -m deepfm.kernels; then
    ready kernels
  else
    echo "setup.sh: training works without the kernels, but takes about 3 times as long;" \
      "'$venv_python -m deepfm.kernels' tries again." >&2
  fi
}

make_development() {
  grep -vhE '^-r ' requirements-dev.txt >.venv/requirements-dev.txt
  step "Installing the packages of tests and scripts" pip_install -r .venv/requirements-dev.txt
  ready development
}

horovod_wheels() { # the folder of the wheel that fits this machine
  local mpi built_for
  mpi=$(mpirun --version)
  built_for="$(pin "$tensorflow")-$abi-${mpi%%$'\n'*}-$(uname -m)-$(getconf GNU_LIBC_VERSION)"
  echo "$cache/$(pin horovod)-${built_for//[^[:alnum:]._=-]/}-${HOROVOD_GPU_OPERATIONS:-CPU}"
}

has_wheel() { compgen -G "$(horovod_wheels)/horovod-*.whl" >/dev/null; }

make_horovod() { # make_horovod PART: into the .venv of $venv_python
  wheels=$(horovod_wheels)
  has_wheel || step "Building Horovod for ${HOROVOD_GPU_OPERATIONS:-CPUs}" build_wheel
  step "Installing Horovod" pip_install --no-index --no-deps --force-reinstall "$wheels"/*.whl
  step "Trying Horovod" "$venv_python" -c '
import horovod.tensorflow as hvd
assert hvd.mpi_built() and hvd.gloo_built(), "Horovod was built without MPI or Gloo"'
  ready "$1"
}

make_tf2() {
  local venv_python=.venv-tf2/bin/python listed=requirements-tf2.txt abi=cp310 tensorflow=tensorflow
  if to_do tf2; then
    new_venv .venv-tf2 "${pythons[tf2]}"
    install_pip
    requirements | grep -vE '^horovod==' >.venv-tf2/requirements.txt
    grep -vhE '^-r ' requirements-dev.txt >.venv-tf2/constraints.txt
    step "Installing TensorFlow 2.15" pip_install --no-deps -r .venv-tf2/requirements.txt
    step "Installing what its tests need" pip_install -c .venv-tf2/constraints.txt \
      pytest pytest-timeout pytest-xdist hypothesis
    step "Compiling its kernels" "$venv_python" -m deepfm.kernels
    ready tf2
  fi
  if to_do tf2_horovod; then make_horovod tf2_horovod; fi
}

make_own() { # make_own PART PYTHON [MODULES]: .venv-PART, tried by an import of MODULES
  local venv_python=.venv-$1/bin/python pinned=--no-deps # whatever the packages bring along
  new_venv ".venv-$1" "$2"
  if [[ $2 == .venv/* ]]; then # it sees .venv's packages after its own
    echo "$root/.venv/lib/python3.7/site-packages" >".venv-$1/lib/python3.7/site-packages/venv.pth"
  fi
  install_pip
  if [[ $1 == peers ]]; then pinned=--prefer-binary; fi
  step "Installing the packages of .venv-$1" \
    pip_install "$pinned" --no-build-isolation -r "requirements-$1.txt"
  if [[ -n ${3:-} ]]; then
    step "Trying the packages of .venv-$1" "$venv_python" -c "import $3"
  fi
  if [[ $1 != sagemaker ]]; then ready "$1"; fi # which is tried at the end
}

declare -A package_of=(
  [mpirun]=openmpi-bin [mpicxx]=libopenmpi-dev [sshd]=openssh-server [ip]=iproute2
  [java]=openjdk-17-jre-headless
) # Debian's, where it is called otherwise than the command
find_what_is_missing() { # sets $wanted to the Debian packages that have to be installed, and
  # $skipped_without to those without which tests are skipped
  local commands=() found command
  if to_do horovod || to_do tf2_horovod; then
    commands+=(mpirun)
    if [[ -n $(missing mpirun) ]] || to_do tf2_horovod || ! has_wheel; then
      commands+=(g++ make cmake mpicxx)
    fi
  elif to_do kernels && can_install; then
    commands+=(g++)
  fi
  if to_do sagemaker; then commands+=(sshd ip curl); fi
  if to_do spark; then commands+=(java); fi
  wanted=() skipped_without='' found=$(missing ${commands[@]+"${commands[@]}"})
  for command in $found; do wanted+=("${package_of[$command]:-$command}"); done
  if [[ -n $found ]] && ! can_install; then
    fail "the set-up needs ${found//$'\n'/, }: run 'sudo apt-get install -y ${wanted[*]}' (or your \
system's equivalent), then scripts/setup.sh again."
  fi
  if [[ $tests == 1 ]] && can_install; then skipped_without=$(missing strace chromium); fi
}

declare -A pythons=()
tests=0 python='' tensorflow=tensorflow
if is_gpu_venv; then tensorflow="tensorflow-gpu"; fi
asked=(packages kernels development horovod)
for word in "$@"; do
  case $word in
  --gpu) tensorflow="tensorflow-gpu" ;;
  --no_horovod) asked=(packages kernels) ;;
  --sagemaker) asked=("${parts[@]}") ;;
  --spark) asked=(spark) ;;
  --peers) asked=(peers) ;;
  --tf2) asked=(tf2 tf2_horovod) ;;
  --tests) asked=("${parts[@]}" mkl search spark) tests=1 ;;
  *) fail "$word is not an option; give --gpu, --no_horovod, --sagemaker, --spark, --peers, --tf2, --tests or none." ;;
  esac
done
if [[ -n ${PYTHON:-} ]] && ! is_python 7 "$PYTHON"; then
  fail "PYTHON=$PYTHON is not a Python 3.7 that runs and has venv; name one that does, or unset it."
fi
exec 9<"$root" # one set-up of a checkout at a time
flock --nonblock 9 || { echo "Set-up: waiting for another set-up of this checkout." && flock 9; }
if [[ $tensorflow == tensorflow-gpu ]]; then
  find_nccl
  is_gpu_venv || { spare_another_venv && rm -rf .venv; } # the two TensorFlows share their folders
fi
if [[ $tests == 1 ]]; then
  if has_python tf2 10; then
    asked+=(tf2)
  else
    echo "Set-up: found no Python 3.10 with venv; tests/test_two_runtimes.py will skip all."
  fi
  if has_python spark-newer 11 10 9; then
    asked+=(spark-newer)
  else
    echo "Set-up: found no Python 3.9 to 3.11 with venv; tests/test_spark_python.py will skip what needs one."
  fi
fi
if [[ ${asked[0]} == peers ]]; then need_python peers "3.9 to 3.11" 11 10 9; fi
if [[ ${asked[0]} == tf2 ]]; then need_python tf2 3.10 10; fi
made=.venv left=' '
if [[ ${asked[0]} != packages ]]; then made=.venv-${asked[0]}; fi
for part in "${asked[@]}"; do is_ready "$part" || left+="$part "; done
if [[ $left == ' ' ]]; then
  echo "Set-up: $made is ready."
  exit
fi

mkdir -p "$cache/logs" 2>/dev/null || fail "cannot write to $cache; set DEEPFM_CACHE to a folder that you can write to."
echo "Set-up: making $root/$made, a few minutes the first time. Cache and logs: $cache"
find_what_is_missing
if to_do packages; then make_venv; fi
if [[ ${#wanted[@]} -gt 0 || -n $skipped_without ]]; then
  install_wanted &
  beside+=($!)
fi
if to_do packages; then make_packages; fi
finish
# From here on all of it works on TensorFlow alone, side by side.
if to_do tf2_horovod || { to_do horovod && ! has_wheel; }; then echo "Horovod is built now, once per machine: 2 to 5 minutes."; fi
begin kernels make_kernels
begin development make_development
begin horovod make_horovod horovod
for part in sagemaker mkl search; do begin "$part" make_own "$part" "$venv_python"; done
if to_do spark; then get_python; fi
begin spark make_own spark "$python" 'numpy, pandas, pyarrow, pyspark'
begin spark-newer make_own spark-newer "${pythons[spark-newer]:-}" 'numpy, pandas, pyarrow'
begin peers make_own peers "${pythons[peers]:-}" \
  'fbgemm_gpu, onnxruntime, pandas, polars, sklearn, tensorflow'
if to_do tf2 || to_do tf2_horovod; then
  make_tf2 &
  beside+=($!)
fi
finish
if to_do sagemaker; then
  step "Trying SageMaker's packages" .venv-sagemaker/bin/python -c \
    'import sagemaker, sagemaker_tensorflow_container.training'
  ready sagemaker
fi
echo "Set-up: done in $SECONDS s."
