"""What a mode of distribution decides: a handful of facts, and one function per mode.

TensorFlow is loaded only inside the functions, for flags.py needs the modes' names before the
environment of TensorFlow's threads is set.
"""

import json
import os
from typing import Any, Callable, Dict, List, NamedTuple

from absl import logging


class Distribution(NamedTuple):
    """The facts of a mode; the defaults are those of `local`.

    Attributes:
        name: of the mode.
        num_processes: that train together, each on its share of the records.
        rank: of this process; 0 is the chief, which keeps checkpoints, reports and exports.
        replicas_per_process: copies of the model in a process, each with its part of a batch.
        session_config: tf.ConfigProto.
        strategy: tf.distribute.Strategy of Estimator's training, or None.
        split_batches: whether the input yields each replica's part of a batch by itself.
        wrap_optimizer: optimizer -> optimizer.
        wrap_model_fn: model_fn -> model_fn of training.
        make_hooks: () -> hooks of each session: training, evaluation and inference.
        agree: the chief's value of a number, in all processes, which all must call.
        total: the sum of a number over all processes, likewise.
        average: (tensor, name) -> its mean over all processes, in each step of training.
        gather: (tensor [n, ...], name) -> tensor [sum of n, ...], over all processes.
    """

    name: str = "local"
    num_processes: int = 1
    rank: int = 0
    replicas_per_process: int = 1
    session_config: Any = None
    strategy: Any = None
    split_batches: bool = False
    wrap_optimizer: Callable = lambda optimizer: optimizer
    wrap_model_fn: Callable = lambda model_fn: model_fn
    make_hooks: Callable[[], list] = list
    agree: Callable = lambda value: value
    total: Callable = lambda value: value
    average: Callable = lambda tensor, name: tensor
    gather: Callable = lambda tensor, name: tensor

    @property
    def num_replicas(self):
        """Copies of the model over all processes; the global batch is this many batches."""
        return self.num_processes * self.replicas_per_process


class ModeFlags(NamedTuple):
    """The flags that modes read.

    Attributes:
        intra_op_threads, inter_op_threads: threads inside one operator, and for operators side by
            side; 0: the cores of this process.
        replicas_per_process: devices that tower and mirrored use; 0: all.
        cross_device_ops: how mirrored adds gradients up; a key of CROSS_DEVICE_OPS.
    """

    intra_op_threads: int = 0
    inter_op_threads: int = 0
    replicas_per_process: int = 0
    cross_device_ops: str = "reduction_to_one_device"


CROSS_DEVICE_OPS = ("nccl", "hierarchical_copy", "reduction_to_one_device")


def local(flags: ModeFlags) -> Distribution:
    """One process, one replica."""
    return Distribution(session_config=_session_config(flags))


def tower(flags: ModeFlags) -> Distribution:
    """One process, one replica per device; the variables lie on CPU device 0, which adds up."""
    from tensorflow.contrib import estimator

    devices = _devices(flags)
    return Distribution(
        name="tower",
        replicas_per_process=len(devices),
        session_config=_session_config(flags, devices),
        wrap_optimizer=estimator.TowerOptimizer,
        wrap_model_fn=lambda model_fn: estimator.replicate_model_fn(model_fn, devices=devices),
    )


def mirrored(flags: ModeFlags) -> Distribution:
    """One process, MirroredStrategy: a copy of the variables on each device."""
    import tensorflow as tf

    devices = _devices(flags)
    reduction = {
        "nccl": tf.distribute.NcclAllReduce,
        "hierarchical_copy": tf.distribute.HierarchicalCopyAllReduce,
        "reduction_to_one_device": tf.distribute.ReductionToOneDevice,
    }[flags.cross_device_ops]()
    logging.info("MirroredStrategy on %s, %s.", ", ".join(devices), flags.cross_device_ops)
    return Distribution(
        name="mirrored",
        replicas_per_process=len(devices),
        session_config=_session_config(flags, devices),
        strategy=tf.distribute.MirroredStrategy(devices, reduction),
        split_batches=True,
    )


def horovod(flags: ModeFlags) -> Distribution:
    """One process per GPU or per group of cores; gradients are all-reduced, table rows as rows.

    Every tensor that travels is named after its variable. With Horovod's own DistributedOptimizer
    about one start of two ranks in five waited for ever in its first step, with this none did; why
    is not known.
    """
    from deepfm.records import BadInput

    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise BadInput(
            f"--distribution=horovod: Horovod cannot be loaded ({error}); run scripts/setup.sh, or "
            "choose --distribution=local."
        ) from error
    import tensorflow as tf

    from deepfm import optimizers

    hvd.init()
    config = _session_config(flags, share_of=hvd.local_size())
    if _gpus():
        config.gpu_options.visible_device_list = str(hvd.local_rank())

    def agree(value):
        with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
            return type(value)(session.run(hvd.broadcast(tf.constant(value, tf.float64), 0)))

    def total(value):
        with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
            summed = hvd.allreduce(tf.constant(value, tf.float64), op=hvd.Sum)
            return type(value)(session.run(summed))

    def average(grad, name):
        """The mean of a gradient; of rows, every rank's, divided by the ranks."""
        if not isinstance(grad, tf.IndexedSlices):
            return hvd.allreduce(grad, name=name)
        return tf.IndexedSlices(
            hvd.allgather(grad.values, name=f"{name}_rows") / hvd.size(),
            hvd.allgather(grad.indices, name=f"{name}_ids"),
            grad.dense_shape,
        )

    return Distribution(
        name="horovod",
        num_processes=hvd.size(),
        rank=hvd.rank(),
        session_config=config,
        wrap_optimizer=lambda optimizer: optimizers.Averaged(optimizer, average),
        make_hooks=lambda: [hvd.BroadcastGlobalVariablesHook(0)],
        agree=agree,
        total=total,
        average=lambda tensor, name: hvd.allreduce(tensor, name=name),
        gather=lambda tensor, name: hvd.allgather(tensor, name=name),
    )


def auto(flags: ModeFlags) -> Distribution:
    """The mode that the environment asks for."""
    from deepfm.records import BadInput

    if _cluster():
        raise BadInput(
            "--distribution=auto found a cluster in TF_CONFIG; parameter servers are not there to "
            "choose yet: unset TF_CONFIG, or start with horovodrun."
        )
    return horovod(flags) if _started_by_mpi() else local(flags)


def _cluster():
    try:
        return json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster")
    except (ValueError, AttributeError):
        return None


def _started_by_mpi():
    """Whether mpirun or horovodrun started several processes."""
    sizes = [os.environ.get(name, "1") for name in ("OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE")]
    return any(size not in ("", "1") for size in sizes)


def cores() -> float:
    """CPU cores that this process may use, by its affinity and its control group's quota."""
    allowed = float(len(os.sched_getaffinity(0)))
    try:
        with open("/sys/fs/cgroup/cpu.max") as f:
            quota, period = f.read().split()
        if quota != "max":
            allowed = min(allowed, float(quota) / float(period))
    except (OSError, ValueError):
        pass  # no control groups, or their first version
    return allowed


def _gpus():
    import tensorflow as tf

    return tf.config.experimental.list_physical_devices("GPU")


def _devices(flags) -> List[str]:
    """The devices of the replicas: GPUs, or CPU devices but the first, which adds up."""
    from deepfm.records import BadInput

    gpus, wanted = len(_gpus()), flags.replicas_per_process
    there = gpus or max(int(cores()), 1)
    if wanted > there:
        what = "GPUs" if gpus else "CPU cores"
        raise BadInput(
            f"--replicas_per_process={wanted}, but this machine has {there} {what}; "
            f"try --replicas_per_process={there}."
        )
    if gpus:
        return [f"/gpu:{i}" for i in range(wanted or gpus)]
    return [f"/cpu:{i + 1}" for i in range(wanted or max(there - 1, 1))]


def _session_config(flags, devices=(), share_of=1):
    """tf.ConfigProto for the devices, with the cores shared among `share_of` processes."""
    import tensorflow as tf

    threads = max(int(cores()) // share_of, 1)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=flags.intra_op_threads or threads,
        inter_op_parallelism_threads=flags.inter_op_threads or threads,
        allow_soft_placement=True,
    )
    config.gpu_options.allow_growth = True
    if any("cpu" in device for device in devices):
        config.device_count["CPU"] = len(devices) + 1
    return config


MODES: Dict[str, Callable[[ModeFlags], Distribution]] = {
    "auto": auto,
    "local": local,
    "tower": tower,
    "mirrored": mirrored,
    "horovod": horovod,
}
