"""What a mode of distribution decides: a handful of facts, and one function per mode.

TensorFlow is loaded only inside the functions, for flags.py needs the modes' names before the
environment of TensorFlow's threads is set.
"""

import json
import os
import re
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import numpy as np
from absl import logging

from deepfm.utilization import cores

_CPU_REPLICAS = 16  # that may share the cores of a machine


class Distribution(NamedTuple):
    """The facts of a mode; the defaults are those of `local`.

    Attributes:
        name: of the mode.
        num_processes: that train together, each on its share of the records.
        rank: of this process; 0 is the chief, which keeps checkpoints, reports and exports.
        local_size, local_rank: processes on this host, and which of them this one is, where a mode
            starts several on a host.
        replicas_per_process: copies of the model in a process, each with its part of a batch.
        synchronous: whether all processes take each step together. If not, a step is one process's,
            and the chief evaluates alone while the others go on.
        serve: what this process does in place of the job, or None.
        session_config: tf.ConfigProto.
        compiled: whether the step uses the compiled kernels, and not TensorFlow's own ops alone.
        tf_config: TF_CONFIG as Estimator reads it in training, or None.
        device_fn: the device of each operation of training, or None.
        partitioner: cuts the model's variables into parts, or None.
        strategy: tf.distribute.Strategy of Estimator's training, or None.
        split_batches: whether the input yields each replica's part of a batch by itself.
        wrap_optimizer: optimizer -> optimizer.
        wrap_model_fn: model_fn -> model_fn of training.
        make_hooks: () -> hooks of each session: training, evaluation and inference.
        make_training_hooks: (save_in_time: session -> None) -> further hooks of training, before
            the saving of checkpoints.
        agree: the chief's value, in all processes, which all must call; anything that JSON can
            hold.
        exchange: a value of each process -> those of all, by rank, likewise.
        steps_taken: (the steps of each process, by rank, which the chief knows) -> those of this
            process, likewise.
        begin_step: (features, labels, --max_steps) -> features, labels; no step is taken before.
        end_step: train_op -> train_op.
        count_steps: () -> int64 [num_processes], the steps that each process has taken, of which
            the weights that are read afterwards have all updates; None where all take each step.
        saves_in_parts: model_dir -> whether those that hold parts of variables write them there.
        anyone_stops: (whether this process is to stop) -> whether any is; called after each step.
            Where several processes take each step together, `average` tells them in the step.
        average: (tensor, name) -> its mean over all processes, in each step of training.
        gather: (tensor [n, ...], name) -> tensor [sum of n, ...], over all processes.
        stack: (tensor [...], name) -> tensor [replicas_in_step, ...], of the replicas that take a
            step of training together, in the same order on each, without gradient; None where
            a replica takes it alone. Each has to give all names, and each of them once.
        owns_variables: () -> whether the replica that is being built has variables of its own, and
            not those of one that has been built before it.
        finish: called when the job is done; returns when this process may end.
    """

    name: str = "local"
    num_processes: int = 1
    rank: int = 0
    local_size: int = 1
    local_rank: int = 0
    replicas_per_process: int = 1
    synchronous: bool = True
    serve: Optional[Callable[[], None]] = None
    session_config: Any = None
    compiled: bool = False
    tf_config: Optional[str] = None
    device_fn: Optional[Callable] = None
    partitioner: Optional[Callable] = None
    strategy: Any = None
    split_batches: bool = False
    wrap_optimizer: Callable = lambda optimizer: optimizer
    wrap_model_fn: Callable = lambda model_fn: model_fn
    make_hooks: Callable[[], list] = list
    make_training_hooks: Callable[[Callable], list] = lambda save_in_time: []
    agree: Callable = lambda value: value
    exchange: Callable = lambda value: [value]
    steps_taken: Callable = lambda of_processes: of_processes[0]
    begin_step: Callable = lambda features, labels, max_steps: (features, labels)
    end_step: Callable = lambda train_op: train_op
    count_steps: Optional[Callable] = None
    saves_in_parts: Callable[[str], bool] = lambda model_dir: True
    anyone_stops: Callable = lambda wanted: wanted
    average: Callable = lambda tensor, name: tensor
    gather: Callable = lambda tensor, name: tensor
    stack: Optional[Callable] = None
    owns_variables: Callable[[], bool] = lambda: True
    finish: Callable[[], None] = lambda: None

    def total(self, value):
        """The sum of a number over all processes, which all must call."""
        return sum(self.exchange(value))

    @property
    def num_replicas(self):
        """Copies of the model over all processes."""
        return self.num_processes * self.replicas_per_process

    @property
    def replicas_in_step(self):
        """Copies of the model that take a step together; the global batch is this many batches."""
        return self.num_replicas if self.synchronous else self.replicas_per_process


class ModeFlags(NamedTuple):
    """The flags that modes read.

    Attributes:
        intra_op_threads, inter_op_threads: threads inside one operator, and for operators side by
            side; 0: half the cores of this process, and all of them.
        omp_num_threads, kmp_affinity: of OpenMP; train.py has set them in the environment.
        replicas_per_process: devices that tower, mirrored and ps use; 0: all (ps: all GPUs).
        cross_device_ops: how mirrored adds gradients up; a key of CROSS_DEVICE_OPS.
        task_type: the job; parameter servers are for training alone.
        num_cpus: cores that the processes of this host may use; 0: all that it gives.
        num_gpus: GPUs that TensorFlow has to see.
    """

    intra_op_threads: int = 0
    inter_op_threads: int = 0
    omp_num_threads: int = 0
    kmp_affinity: Optional[str] = None
    replicas_per_process: int = 0
    cross_device_ops: str = "reduction_to_one_device"
    task_type: str = "train"
    num_cpus: int = 0
    num_gpus: int = 0


CROSS_DEVICE_OPS = ("nccl", "hierarchical_copy", "reduction_to_one_device")


def local(flags: ModeFlags) -> Distribution:
    """One process, one replica."""
    return Distribution(session_config=_session_config(flags))


def tower(flags: ModeFlags) -> Distribution:
    """One process, one replica per device; the variables lie on CPU device 0, which adds up."""
    devices = _devices(flags)
    return Distribution(
        name="tower", session_config=_session_config(flags, devices), **_towers(devices)
    )


def _towers(devices):
    """The facts of one replica per device; they are built one after another, into one graph."""
    import tensorflow as tf
    from tensorflow.contrib import estimator

    stacks = {}  # name -> (the stack, how many replicas have given theirs)

    def stack(tensor, name):
        """The first makes the stack, of its own in all places; each other puts in its own.

        A collective operation would need a thread for each replica, or wait for ever.
        """
        whole, given = stacks.get(name, (None, 0))
        if not given:
            with tf.device("/cpu:0"):
                whole = tf.raw_ops.Pack(values=[tensor] * len(devices))
        else:
            whole.op._update_input(given, tensor)
        stacks[name] = whole, given + 1
        return whole

    def wrap_model_fn(model_fn):
        replicated = estimator.replicate_model_fn(model_fn, devices=devices)

        def of_one_graph(features, labels, mode):
            stacks.clear()
            with tf.name_scope("replicas"):  # the name of the loss is for Estimator's summary of it
                return replicated(features, labels, mode)

        return of_one_graph

    return {
        "replicas_per_process": len(devices),
        "wrap_optimizer": estimator.TowerOptimizer,
        "wrap_model_fn": wrap_model_fn,
        "stack": stack,
        "owns_variables": lambda: not tf.compat.v1.get_variable_scope().reuse,
    }


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

    def stack(tensor, name):
        def together(strategy, values):
            with tf.device("/cpu:0"):
                return tf.stack(strategy.experimental_local_results(values))

        return tf.distribute.get_replica_context().merge_call(together, args=(tensor,))

    return Distribution(
        name="mirrored",
        replicas_per_process=len(devices),
        session_config=_session_config(flags, devices),
        strategy=tf.distribute.MirroredStrategy(devices, reduction),
        split_batches=True,
        stack=stack,
    )


def horovod(flags: ModeFlags) -> Distribution:
    """One process per GPU or per group of cores; gradients are all-reduced, table rows as rows.

    Every tensor that travels is named after its variable. With Horovod's own DistributedOptimizer
    about one start of two ranks in five waited for ever in its first step, with this none did; why
    is not known.
    """
    from deepfm.entry import BadInput

    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise BadInput(
            f"--distribution=horovod: Horovod cannot be loaded ({error}); run scripts/setup.sh, or "
            "choose --distribution=local."
        ) from error
    import tensorflow as tf

    from deepfm import optimizers
    from deepfm.watch import watch_ranks

    # Open MPI's waiting would keep a whole core busy, which the step needs.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    hvd.init()
    config = _session_config(flags, share_of=hvd.local_size())
    if _gpus():
        config.gpu_options.visible_device_list = str(hvd.local_rank())

    def agree(value):
        text = np.frombuffer(json.dumps(value).encode(), np.uint8)
        with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
            size = session.run(hvd.broadcast(tf.constant(len(text)), 0))
            text = np.resize(text, size)  # all but the chief's are overwritten
            return json.loads(session.run(hvd.broadcast(tf.constant(text), 0)).tobytes().decode())

    def exchange(value):
        with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
            return hvd.allgather_object(value, session)

    def stack(tensor, name):
        stacked = hvd.allgather(tensor[tf.newaxis], name=name)
        return tf.ensure_shape(stacked, [hvd.size(), *tensor.shape])

    finish = lambda: None
    if hvd.size() > 1:
        watch = watch_ranks(hvd.rank(), exchange)

        def finish():
            agree(0)  # until then all watch each other: what rank 0 still does alone may fail
            watch.stop()

    return Distribution(
        name="horovod",
        num_processes=hvd.size(),
        rank=hvd.rank(),
        local_size=hvd.local_size(),
        local_rank=hvd.local_rank(),
        session_config=config,
        wrap_optimizer=lambda optimizer: optimizers.Averaged(
            optimizer,
            add_up=lambda x, name: hvd.allreduce(x, name=name, op=hvd.Sum),
            gather=lambda x, name: hvd.allgather(x, name=name),
            size=hvd.size(),
        ),
        make_hooks=lambda: [hvd.BroadcastGlobalVariablesHook(0)],
        agree=agree,
        exchange=exchange,
        steps_taken=lambda of_processes: agree(of_processes[0]),
        anyone_stops=lambda wanted: False,
        average=lambda tensor, name: hvd.allreduce(tensor, name=name),
        gather=lambda tensor, name: hvd.allgather(tensor, name=name),
        stack=stack,
        finish=finish,
    )


def ps(flags: ModeFlags) -> Distribution:
    """Parameter servers, a chief and workers, which train asynchronously; several towers each."""
    from deepfm import cluster as clusters
    from deepfm.entry import BadInput

    cluster = clusters.parse(os.environ.get("TF_CONFIG"))
    if not cluster or "ps" not in cluster.jobs:
        raise BadInput(
            "--distribution=ps needs a cluster with 'ps' in TF_CONFIG; scripts/local_cluster.py "
            "starts one on this machine."
        )
    if flags.task_type != "train":
        if cluster.job == cluster.chief:
            return local(flags)
        idle = f"The chief alone does --task_type={flags.task_type}; this process ends."
        return Distribution(name="ps", serve=lambda: logging.info(idle))
    import tensorflow as tf

    from deepfm import parameter_servers

    devices = []
    if flags.replicas_per_process > 1 or (not flags.replicas_per_process and len(_gpus()) > 1):
        devices = _devices(flags)
    config = _session_config(flags, devices)
    if cluster.job == "ps":
        return Distribution(name="ps", serve=lambda: parameter_servers.serve(cluster, config))
    member = parameter_servers.Member(cluster, config)
    config.device_filters.extend(member.device_filters)
    alone = cluster.num_processes == 1
    return Distribution(
        name="ps",
        num_processes=cluster.num_processes,
        rank=cluster.rank,
        synchronous=alone,
        session_config=config,
        tf_config=os.environ["TF_CONFIG"],
        device_fn=member.device_fn,
        partitioner=tf.compat.v1.fixed_size_partitioner(cluster.num_servers),
        make_training_hooks=member.make_hooks,
        agree=member.agree,
        exchange=member.exchange,
        steps_taken=member.steps_taken,
        begin_step=member.begin_step,
        end_step=member.end_step,
        count_steps=None if alone else member.count_steps,
        saves_in_parts=member.servers_see,
        anyone_stops=member.anyone_stops,
        finish=member.finish,
        **(_towers(devices) if devices else {}),
    )


def auto(flags: ModeFlags) -> Distribution:
    """The mode that the environment asks for."""
    from deepfm import cluster as clusters
    from deepfm.entry import BadInput

    cluster = clusters.parse(os.environ.get("TF_CONFIG"))
    if cluster and "ps" in cluster.jobs:
        return ps(flags)
    if cluster and cluster.num_processes > 1:
        raise BadInput(
            "TF_CONFIG holds a cluster without 'ps': add parameter servers to it, or start the "
            "processes with horovodrun and without TF_CONFIG."
        )
    return horovod(flags) if _started_by_mpi() else local(flags)


def _started_by_mpi():
    """Whether mpirun or horovodrun started several processes."""
    sizes = [os.environ.get(name, "1") for name in ("OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE")]
    return any(size not in ("", "1") for size in sizes)


def _gpus():
    import tensorflow as tf

    return tf.config.experimental.list_physical_devices("GPU")


def has_tensor_cores(mode: Distribution) -> bool:
    """Whether the GPUs of this process multiply float16 in tensor cores (capability 7.0)."""
    if not _gpus():
        return False
    from tensorflow.python.client import device_lib

    found = device_lib.list_local_devices(mode.session_config)
    gpus = [d.physical_device_desc for d in found if d.device_type == "GPU"]
    # "device: 0, name: Tesla V100-SXM2-16GB, ..., compute capability: 7.0"
    capabilities = [re.search(r"compute capability: (\d+)", gpu) for gpu in gpus]
    return bool(gpus) and all(found and int(found[1]) >= 7 for found in capabilities)


def with_kernels(mode: Distribution, built: bool) -> Distribution:
    """The mode, with its steps on the compiled kernels where they are built and no GPU steps.

    Processes that take each step together do so all or none: their copies of the weights, which
    each updates by itself, have to stay the same to the bit.
    """
    if mode.synchronous and mode.num_processes > 1:
        built = bool(min(mode.exchange(int(built))))
    return mode._replace(compiled=built and not _gpus())


def _devices(flags) -> List[str]:
    """The devices of the replicas: GPUs, or CPU devices but the first, which adds up."""
    from deepfm.entry import BadInput

    gpus, wanted = len(_gpus()), flags.replicas_per_process
    there = gpus or max(int(min(cores(), flags.num_cpus or cores())), 1)
    most = gpus or max(there, _CPU_REPLICAS)
    if wanted > most:
        what = f"{gpus} GPUs" if gpus else f"{there} CPU cores, which {most} replicas may share"
        raise BadInput(
            f"--replicas_per_process={wanted}, but this machine has {what}; "
            f"try --replicas_per_process={most}."
        )
    if wanted > there:
        logging.warning(
            "--replicas_per_process=%d on %d CPU cores: as a trial of as many GPUs; it trains no "
            "faster.",
            wanted, there,
        )  # fmt: skip
    if gpus:
        return [f"/gpu:{i}" for i in range(wanted or gpus)]
    return [f"/cpu:{i + 1}" for i in range(wanted or max(there - 1, 1))]


def _session_config(flags, devices=(), share_of=1):
    """tf.ConfigProto for the devices, with the cores shared among `share_of` processes."""
    import tensorflow as tf
    from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
    from tensorflow.python import pywrap_tensorflow

    from deepfm.entry import BadInput

    if (flags.omp_num_threads or flags.kmp_affinity) and not pywrap_tensorflow.IsMklEnabled():
        logging.warning(
            "--omp_num_threads and --kmp_affinity do nothing here: this TensorFlow is built "
            "without MKL; --intra_op_threads and --inter_op_threads set its threads."
        )
    if flags.num_gpus and len(_gpus()) < flags.num_gpus:
        raise BadInput(
            f"TensorFlow sees {len(_gpus())} GPUs of the {flags.num_gpus} of this host "
            "(--num_gpus); install tensorflow-gpu for its CUDA, or give --num_gpus=0 to train on "
            "the CPU."
        )
    threads = max(int(min(cores(), flags.num_cpus or cores())) // share_of, 1)
    config = tf.compat.v1.ConfigProto(
        # A step has several operators to run at most times; more threads get in each other's way.
        intra_op_parallelism_threads=flags.intra_op_threads or max(threads // 2, 1),
        inter_op_parallelism_threads=flags.inter_op_threads or threads,
        allow_soft_placement=True,
        device_count={"GPU": 0},
    )
    # Constant folding, in both places, would compute initial values of whole tables to throw them
    # away. Level -1 is without the second one; what else belongs to level 0 is asked for.
    config.graph_options.rewrite_options.constant_folding = RewriterConfig.OFF
    config.graph_options.optimizer_options.opt_level = -1
    config.graph_options.optimizer_options.do_common_subexpression_elimination = True
    # All sessions of a process share the threads that its first one asks for.
    tf.compat.v1.Session(graph=tf.Graph(), config=config).close()
    config.device_count.clear()
    config.gpu_options.allow_growth = True
    if any("cpu" in device for device in devices):
        config.device_count["CPU"] = len(devices) + 1
    return config


MODES: Dict[str, Callable[[ModeFlags], Distribution]] = {
    "auto": auto,
    "local": local,
    "tower": tower,
    "mirrored": mirrored,
    "ps": ps,
    "horovod": horovod,
}
