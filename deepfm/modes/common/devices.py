"""The devices of this machine: which a process uses, and how its sessions share their cores."""

import os
import re
from typing import List

from absl import logging

from deepfm.errors import BadInput
from deepfm.runtime.tf import IS_2, RewriterConfig, device_lib, tf
from deepfm.runtime.utilization import cores, gpus_of_host, has_mkl, why_no_gpus

_CPU_REPLICAS = 16  # replicas that may always share the cores of a machine


def gpus():
    """The GPUs that TensorFlow finds."""
    return tf.config.experimental.list_physical_devices("GPU")


def _log_devices(used):
    """Logs which devices there are and which this process uses; warns of GPUs left unused."""
    present = len(gpus())
    logging.info(
        "Devices: found %g CPU cores and %d GPU%s; using %s.",
        cores(), present, "s" * (present != 1),
        ", ".join(used) or ("/gpu:0" if present else "the CPU"),
    )  # fmt: skip
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # by the user
    if not (present or hidden) and gpus_of_host():
        logging.warning("Using the CPU: %s.", why_no_gpus())


def split_batch(features, labels, replicas: int) -> list:
    """Cuts a batch, of a multiple of `replicas` examples, into (features, labels) for each."""
    if replicas == 1:
        return [(features, labels)]  # which may come with more than the examples
    with tf.name_scope("split_inputs"), tf.device("/cpu:0"):
        shares = zip(*(tf.split(x, replicas) for x in (*features.values(), labels)))
        return [(dict(zip(features, x)), label) for *x, label in shares]


def has_tensor_cores(session_config) -> bool:
    """Whether all GPUs of this process have tensor cores for float16 (capability 7.0 or above)."""
    if not gpus():
        return False

    there = device_lib.list_local_devices(session_config)
    used = [d.physical_device_desc for d in there if d.device_type == "GPU"]
    # "device: 0, name: Tesla V100-SXM2-16GB, ..., compute capability: 7.0"
    capabilities = [re.search(r"compute capability: (\d+)", gpu) for gpu in used]
    return bool(used) and all(version and int(version[1]) >= 7 for version in capabilities)


def of_replicas(flags) -> List[str]:
    """The replicas' devices: GPUs, or all CPU devices but the first, which adds up gradients."""
    present, wanted = len(gpus()), flags.replicas_per_process
    there = present or max(int(min(cores(), flags.num_cpus or cores())), 1)
    most = present or max(there, _CPU_REPLICAS)
    if wanted > most:
        shared = f"{there} CPU cores, which {most} replicas may share"
        what = f"{present} GPUs" if present else shared
        raise BadInput(
            f"--replicas_per_process={wanted}, but this machine has {what}; "
            f"try --replicas_per_process={most}."
        )
    if wanted > there:
        logging.warning(
            "--replicas_per_process=%d on %d CPU cores simulates as many GPUs; it does not "
            "train faster.",
            wanted, there,
        )  # fmt: skip
    if present:
        return [f"/gpu:{i}" for i in range(wanted or present)]
    return [f"/cpu:{i + 1}" for i in range(wanted or max(there - 1, 1))]


def session_config(flags, devices=(), share_of=1, logs=True):
    """tf.ConfigProto for the devices, with the cores shared among `share_of` processes."""
    if (flags.omp_num_threads or flags.kmp_affinity) and not has_mkl():
        logging.warning(
            "--omp_num_threads and --kmp_affinity have no effect: this TensorFlow is built "
            "without MKL. Use --intra_op_threads and --inter_op_threads."
        )
    if flags.allow_onednn and not IS_2:
        logging.warning("--allow_onednn has no effect: TensorFlow 1.15 is built without oneDNN.")
    if flags.allow_tf32 and not gpus():
        logging.warning("--allow_tf32 has no effect without a GPU.")
    if flags.num_gpus and len(gpus()) < flags.num_gpus:
        raise BadInput(
            f"--num_gpus={flags.num_gpus}, but TensorFlow finds {len(gpus())} GPUs on this host"
            f"{'' if gpus() else ': ' + why_no_gpus()}; train on what is found with --num_gpus=0 "
            "(which does not check)."
        )
    if logs:
        _log_devices(devices)
    threads = max(int(min(cores(), flags.num_cpus or cores())) // share_of, 1)
    config = tf.compat.v1.ConfigProto(
        # A step mostly has several operators to run; more threads would get in each other's way.
        intra_op_parallelism_threads=flags.intra_op_threads or max(threads // 2, 1),
        inter_op_parallelism_threads=flags.inter_op_threads or threads,
        allow_soft_placement=True,
        device_count={"GPU": 0},
    )
    # Constant folding, which TensorFlow does in two places, would compute initial values of whole
    # tables and throw them away. Level -1 turns off the second; the rest of level 0 is set by hand.
    config.graph_options.rewrite_options.constant_folding = RewriterConfig.OFF
    config.graph_options.optimizer_options.opt_level = -1
    config.graph_options.optimizer_options.do_common_subexpression_elimination = True
    # All sessions of a process share the threads that the first one creates.
    tf.compat.v1.Session(graph=tf.Graph(), config=config).close()
    config.device_count.clear()
    config.gpu_options.allow_growth = True
    if any("cpu" in device for device in devices):
        config.device_count["CPU"] = len(devices) + 1
    return config
