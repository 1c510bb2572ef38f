"""What a mode of distribution decides: a handful of facts, and one function per mode.

TensorFlow is loaded only inside the functions, for flags.py needs the modes' names before the
environment of TensorFlow's threads is set.
"""

import json
import os
import re
from typing import Callable, Dict, List, Tuple

import numpy as np
from absl import logging

from deepfm.config import Distribution, ModeFlags
from deepfm.runtime.utilization import cores

_CPU_REPLICAS = 16  # that may share the cores of a machine


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
    from deepfm.errors import BadInput

    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise BadInput(
            f"--distribution=horovod: Horovod cannot be loaded ({error}); run scripts/setup.sh, or "
            "choose --distribution=local."
        ) from error
    import tensorflow as tf

    from deepfm.cluster.peers import watch_ranks
    from deepfm.model import gradients

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
        wrap_optimizer=lambda optimizer: gradients.Averaged(
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
    from deepfm.cluster import tf_config as clusters
    from deepfm.errors import BadInput

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

    from deepfm.cluster import parameter_servers

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
    from deepfm.cluster import tf_config as clusters
    from deepfm.errors import BadInput

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


def warn_of_idle_flags(mode: Distribution, given: Tuple[str, ...], replicas_per_process: int):
    """Says which flags of modes, of those that the user has set, change nothing in this one.

    Args:
        given: names of the flags that the user set.
        replicas_per_process: as the flag has it; 0: not given.
    """
    if replicas_per_process and replicas_per_process != mode.replicas_per_process:
        logging.warning(
            "--replicas_per_process=%d does nothing with --distribution=%s; try tower or mirrored.",
            replicas_per_process, mode.name,
        )  # fmt: skip
    if "cross_device_ops" in given and not mode.strategy:
        logging.warning("--cross_device_ops is of --distribution=mirrored; here it does nothing.")


def _devices(flags) -> List[str]:
    """The devices of the replicas: GPUs, or CPU devices but the first, which adds up."""
    from deepfm.errors import BadInput

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

    from deepfm.errors import BadInput

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
