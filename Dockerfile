# Trains DeepFM, by hand or as SageMaker's `train`, and converts data:
#
#   docker build -t deepfm .
#   docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD/data:/data" deepfm \
#     python train.py --training_data_dir=/data/train --model_dir=/data/model
#   docker run --rm --user "$(id -u):$(id -g)" --volume "$PWD/data:/data" deepfm \
#     python -m data_tools.libsvm_to_tfrecord --input=/data/raw.libsvm --output_dir=/data/train
#   docker run --rm --volume "$PWD/ml:/opt/ml" deepfm train
#
# Every version but the base's is the one of the requirements files.

# Debian 12: Horovod is built and run with its Open MPI 4.1.
ARG BASE=python:3.7.17-slim-bookworm
# TensorFlow 2.15, without SageMaker's toolkit (docs/tensorflow_2.md):
#   --build-arg BASE=python:3.10.13-slim-bookworm --build-arg PYTHON=python3.10
#   --build-arg REQUIREMENTS=requirements-tf2.txt
ARG PYTHON=python3.7
ARG REQUIREMENTS=requirements.txt

# --- The packages, and the compilers that Horovod and mpi4py need.
FROM ${BASE} AS packages
ARG PYTHON
ARG REQUIREMENTS
# hadolint ignore=DL3008  # Debian keeps one version of each package, and replaces it
RUN apt-get update \
    && apt-get install -qy --no-install-recommends cmake g++ libopenmpi-dev make openmpi-bin \
    && rm -rf /var/lib/apt/lists/*
RUN "$PYTHON" -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /build

# GPU=1: a TensorFlow for GPUs; CUDA and cuDNN are mounted (docs/gpu.md).
ARG GPU=0
COPY ${REQUIREMENTS} requirements.txt
RUN if [ "$GPU" = 1 ]; then sed -i 's/^tensorflow==/tensorflow-gpu==/' requirements.txt; fi \
    && grep -v '^horovod==' requirements.txt >before_horovod.txt \
    && pip install --constraint requirements.txt pip setuptools wheel \
    && pip install -r before_horovod.txt
# Horovod is compiled against the TensorFlow that is there; 45 of its 47 MB are symbols.
RUN HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 \
    HOROVOD_WITH_GLOO=1 HOROVOD_WITH_MPI=1 \
    pip install --no-build-isolation --no-deps --constraint requirements.txt horovod \
    && strip --strip-unneeded /opt/venv/lib/python3.*/site-packages/horovod/tensorflow/*.so

# What deepfm compiles for the step and for reading; it lies beside TensorFlow.
COPY deepfm deepfm
RUN python -m deepfm.kernels

# The toolkit without the SDK and the S3 server that requirements-sagemaker.txt also pins; its scipy
# and Pillow are pinned in requirements-dev.txt. Its "sklearn" refuses to install without the word.
COPY requirements-sagemaker.txt requirements-dev.txt ./
RUN if [ "$REQUIREMENTS" != requirements.txt ]; then exit; fi \
    && grep -hv '^-r ' requirements.txt requirements-sagemaker.txt requirements-dev.txt >pins.txt \
    && SKLEARN_ALLOW_DEPRECATED_SKLEARN_PACKAGE_INSTALL=True pip install --no-build-isolation \
    --constraint pins.txt sagemaker-training sagemaker-tensorflow-training mpi4py \
    && pip check

# --- The image.
FROM ${BASE}
# ca-certificates: s3:// paths; curl: the toolkit's worker asks with it whether the master lives;
# openssh-server: how the hosts of an MPI job reach one another.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -qy --no-install-recommends ca-certificates curl openmpi-bin openssh-server \
    && rm -rf /var/lib/apt/lists/*

# The keys are the same in all containers of this image, for that is what lets the hosts of a job
# in; they open nothing else. pam_loginuid must not be required: a container may not set it.
RUN mkdir -p /etc/curl /run/sshd && install -d -m 700 /root/.ssh \
    && ssh-keygen -q -t ed25519 -N '' -C deepfm -f /root/.ssh/id_ed25519 \
    && cp /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys \
    && printf 'Host *\n  StrictHostKeyChecking no\n  LogLevel ERROR\n' >/root/.ssh/config \
    && sed -i 's/required *pam_loginuid/optional pam_loginuid/' /etc/pam.d/sshd \
    && echo http0.9 >/etc/curl/.curlrc

COPY --from=packages /opt/venv /opt/venv

# Any user may write to the folder, as in /tmp, for --model_dir may be relative: none but root can
# change or replace what root has put there.
RUN useradd --create-home --shell /bin/bash deepfm && install -d -m 1777 /opt/deepfm \
    && echo /opt/deepfm/docker >"$(echo /opt/venv/lib/python3.*/site-packages)/deepfm_docker.pth"
WORKDIR /opt/deepfm
COPY docker/sagemaker_main.py docker/
COPY data_tools data_tools
COPY deepfm deepfm
COPY train.py .

# CURL_HOME: the master answers curl in gRPC, which newer curls take for HTTP/0.9 and refuse, and
#   the worker then takes the master for dead.
# OMPI_*: MPI refuses root, copies between processes in a way that Docker forbids, and does not
#   notice that another host is gone.
# LD_LIBRARY_PATH, NVIDIA_*: where CUDA is mounted, and what NVIDIA's runtime adds; of GPU=1.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    CURL_HOME=/etc/curl \
    LD_LIBRARY_PATH=/usr/local/cuda/lib64 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all \
    OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
    OMPI_MCA_btl_vader_single_copy_mechanism=none \
    OMPI_MCA_oob_tcp_keepalive_time=5 \
    OMPI_MCA_oob_tcp_keepalive_intvl=2 \
    OMPI_MCA_oob_tcp_keepalive_probes=6 \
    SAGEMAKER_TRAINING_MODULE=sagemaker_main:main

# The user stays root, because SageMaker's `train` starts sshd and writes to /etc/environment and to
# /opt/ml, which SageMaker mounts as root's. Nothing else needs it: --user deepfm, or any other, runs
# train.py and data_tools.
CMD ["python", "train.py", "--help"]
