#!/usr/bin/env bash
# Builds the image and checks each of its uses, with a line and the seconds for each check:
#
#   scripts/check_image.sh           # about 10 minutes and 8 GB of disk, which it frees
#   scripts/check_image.sh --keep    # leaves the image deepfm:check, and layers for the next build
#
# ENGINE         docker, podman or buildah; by default the first of them that works.
# BASE           an image to start from instead of the Dockerfile's own; with buildah also a file,
#                such as oci-archive:base.tar, if the machine cannot pull.
# BUILD_OPTIONS  further options for the engine's build, such as "--volume /etc/pip.conf:/etc/pip.conf:ro".
#
# Exit codes: 0 all checks passed, 1 one failed, 2 something is missing.
set -euo pipefail

if [[ ${1:-} == --help ]]; then
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
  exit
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
image=deepfm:check
keep=$# # 1 if --keep, the only option, is given
failed=0

fail() {
  echo "check_image.sh: $1" >&2
  exit 2
}

works() { # works ENGINE: installed is not enough, Docker may have no daemon
  command -v "$1" >/dev/null && { [[ $1 == buildah ]] || "$1" info >/dev/null 2>&1; }
}

check() { # check SENTENCE COMMAND...: runs it, prints the seconds, shows the log only if it fails
  local sentence=$1 log=$work/log start=$SECONDS code
  shift
  printf '%s ... ' "$sentence"
  set +e # not "if COMMAND": in a condition bash would go on after a line of COMMAND that fails
  (set -e && "$@") >"$log" 2>&1 </dev/null
  code=$?
  set -e
  if [[ $code == 0 ]]; then
    echo "ok, $((SECONDS - start)) s"
  else
    echo "FAILED after $((SECONDS - start)) s; its last lines:"
    tail -n 30 "$log" >&2
    failed=1
  fi
}

end_if_failed() { if [[ $failed == 1 ]]; then exit 1; fi; }

# --- The engine.

build() {
  # shellcheck disable=SC2206 # words are what BUILD_OPTIONS holds
  local options=(${BUILD_OPTIONS:-} ${BASE:+--build-arg "BASE=$BASE"})
  "${engine[@]}" build --tag "$image" "${options[@]}" .
}

in_image() { # in_image USER COMMAND...: with $work/data as /data and $work/ml as /opt/ml
  local user=$1 container code=0
  local options=(--user "$user" --volume "$work/data:/data" --volume "$work/ml:/opt/ml")
  shift
  if [[ $ENGINE != buildah ]]; then
    "$ENGINE" run --rm "${options[@]}" "$image" "$@"
    return
  fi
  container=$("${engine[@]}" from "$image")
  # With its own network and processes, like docker run, so that no sshd stays behind.
  # shellcheck disable=SC2016
  unshare --net --pid --fork --kill-child bash -c 'ip link set lo up && exec "$@"' - \
    "${engine[@]}" run "${options[@]}" "$container" -- "$@" || code=$?
  "${engine[@]}" rm "$container" >/dev/null
  return "$code"
}

# --- What is checked.

make_data() { # 4,000 rows of 5 fields; the first one determines the label
  awk 'BEGIN {
    srand(1)
    for (row = 0; row < 4000; row++) {
      label = rand() < 0.3
      printf "%d %d:1", label, 1 + int(5 * rand()) + 3 * label
      for (field = 1; field < 5; field++) printf " %d:%.3f", 10 * field + int(10 * rand()), rand()
      print ""
    }
  }' >"$work/data/train.libsvm"
  chmod -R a+rwX "$work/data"
}

make_job() { # make_job [MORE]: a fresh /opt/ml; MORE: hyperparameters in JSON, after a comma
  rm -rf "$work/ml"
  mkdir -p "$work"/ml/{input/config,input/data,model,output}
  cp -r "$work/data/train" "$work/ml/input/data/training"
  local config=$work/ml/input/config
  echo '{"training_data_dir": "/opt/ml/input/data/training", "model_dir": "/opt/ml/model"' \
    ", \"deep_layers\": \"16,8\" ${1:-}}" >"$config/hyperparameters.json"
  echo '{"training": {"TrainingInputMode": "File"}}' >"$config/inputdataconfig.json"
  echo '{"current_host": "localhost", "hosts": ["localhost"], "network_interface_name": "lo"}' \
    >"$config/resourceconfig.json"
}

has_what_it_needs() { # but no compiler and no version that is not pinned
  # shellcheck disable=SC2016
  in_image root bash -c '! command -v g++ cmake make && python -c "
import horovod.tensorflow as hvd, mpi4py.MPI, sagemaker_tensorflow
from deepfm.kernels import compiled
assert hvd.mpi_built() and hvd.gloo_built() and compiled.built()" && pip check && pip freeze --all' | tee "$work/installed"
  grep -q '^sagemaker-training==' "$work/installed"
  cut -d' ' -f1 requirements*.txt | normalize | sort >"$work/pins"
  grep '==' "$work/installed" | normalize | sort | comm -23 - "$work/pins" >"$work/unpinned"
  echo "Not pinned:" && cat "$work/unpinned"
  [[ ! -s $work/unpinned ]]
}

normalize() { tr 'A-Z_' 'a-z-'; }

keeps_its_program() { # from users, who can write beside it
  # shellcheck disable=SC2016
  in_image deepfm bash -c 'touch mine && ! rm -f train.py && ! mv deepfm other \
    && ! mv mine train.py && ! touch deepfm/jobs.py'
}

shows_its_flags() {
  in_image deepfm python train.py --help | grep -- --training_data_dir
}

converts() { # as a user without a name, which is what --user "$(id -u)" often is
  in_image 12345:12345 python -m data_tools.libsvm_to_tfrecord --input=/data/train.libsvm \
    --output_dir=/data/train --num_files=2 --feature_size=60
  grep '"field_size": 5' "$work/data/train/dataset.json"
}

trains() {
  in_image deepfm python train.py --training_data_dir=/data/train --val_data_dir=/data/train \
    --model_dir=model --servable_model_dir=/data/servable --deep_layers=16,8 --num_epochs=5 \
    --learning_rate=0.01 2>&1 | tee "$work/trained"
  grep -E '^[0-9:]* ?Evaluation: step=20 examples=4000 auc=0\.[6-9]' "$work/trained"
  compgen -G "$work/data/servable/*/saved_model.pb"
}

trains_with_horovod() {
  in_image deepfm horovodrun -np 2 python train.py --training_data_dir=/data/train \
    --model_dir=/data/horovod --deep_layers=16,8
  grep '"num_processes": 2' "$work/data/horovod/report.json"
}

trains_with_mpirun() { # horovodrun would write to HOME, which a user without a name does not have
  in_image 12345:12345 mpirun -np 2 -bind-to none python train.py \
    --training_data_dir=/data/train --model_dir=/data/mpi --deep_layers=16,8
  grep '"num_processes": 2' "$work/data/mpi/report.json"
}

runs_the_images_program() {
  make_job
  in_image root train
  [[ -f $work/ml/output/success && -f $work/ml/model/report.json ]]
}

runs_the_jobs_program() {
  make_job ', "sagemaker_program": "own.py", "sagemaker_submit_directory": "/data/source"'
  mkdir -p "$work/data/source"
  echo 'open("/opt/ml/model/own", "w")' >"$work/data/source/own.py"
  in_image root train
  [[ -f $work/ml/output/success && -f $work/ml/model/own && ! -f $work/ml/model/report.json ]]
}

says_why_it_failed() {
  make_job ', "no_such_flag": "1"'
  in_image root train && echo "train exited 0." && return 1
  grep no_such_flag "$work/ml/output/failure"
}

runs_mpi() {
  make_job ', "sagemaker_mpi_enabled": "true", "sagemaker_mpi_num_of_processes_per_host": "2",
    "sagemaker_mpi_custom_mpi_options": ""'
  in_image root train
  grep '"num_processes": 2' "$work/ml/model/report.json"
}

lets_hosts_in() { # by sshd, which with -d ends after one visitor
  # shellcheck disable=SC2016
  in_image root bash -c '{ /usr/sbin/sshd -d -p 22022 & } && sleep 1 \
    && ssh -p 22022 localhost "command -v orted"'
}

hears_the_master() { # as the toolkit's worker does, for which 0 means alive
  in_image root python -c '
import subprocess, tensorflow as tf
server = tf.train.Server.create_local_server()
subprocess.check_call(["curl", server.target[len("grpc://"):]], stdout=subprocess.DEVNULL)'
}

# --- All of it.

if [[ $# -gt 0 && $* != --keep ]]; then
  fail "$* is not an option; the only one is --keep."
fi
if [[ -z ${ENGINE:-} ]]; then
  for ENGINE in docker podman buildah ''; do
    if works "$ENGINE"; then break; fi
  done
fi
if [[ -z $ENGINE ]]; then
  fail "found no docker, podman or buildah that works; install one, for example \
'apt-get install -y buildah', or start Docker's daemon."
fi
if [[ $ENGINE == buildah && $EUID -ne 0 ]]; then fail "buildah needs root here; run this script as root."; fi

work=$(mktemp -d)
storage=$work/storage
if [[ $keep == 1 ]]; then storage=${DEEPFM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/deepfm}/containers; fi
engine=("$ENGINE")
if [[ $ENGINE == buildah ]]; then # with its own storage, and a chroot in place of a runtime
  export BUILDAH_ISOLATION=chroot BUILDAH_LAYERS=true
  engine+=(--root "$storage/root" --runroot "$storage/run")
fi
clean_up() {
  if [[ $keep == 0 && $ENGINE == buildah ]]; then
    "${engine[@]}" rm --all >/dev/null 2>&1 || true
  elif [[ $keep == 0 ]]; then
    "$ENGINE" rmi --force "$image" >/dev/null 2>&1 || true
  fi
  rm -rf "$work"
}
trap clean_up EXIT
mkdir -p "$work"/{data,ml} "$storage"
make_data

echo "With $ENGINE:"
check "The image builds" build
end_if_failed
echo "Image size: $("${engine[@]}" images --format '{{.Size}}' "$image")"
check "It has what it needs, all pinned, and no compiler" has_what_it_needs
check "It shows train.py's flags" shows_its_flags
check "Users cannot change its program" keeps_its_program
check "It converts LibSVM, as a user without a name" converts
check "It trains, evaluates and exports, as deepfm" trains
check "It trains with horovodrun, 2 ranks, as deepfm" trains_with_horovod
check "It trains with mpirun, 2 ranks, as a user without a name" trains_with_mpirun
check "train runs the image's own train.py" runs_the_images_program
check "train runs the program that a job submits" runs_the_jobs_program
check "train says why a job failed" says_why_it_failed
check "train runs 2 ranks of MPI" runs_mpi
check "Hosts of an MPI job can log in to each other" lets_hosts_in
check "A worker sees that the master is alive" hears_the_master
end_if_failed
echo "All checks passed in $SECONDS s."
