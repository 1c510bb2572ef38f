"""The modes of distribution: a handful of facts that a mode decides, and one function per mode.

TensorFlow is loaded only inside the functions, because flags.py needs the modes' names before
train.py has set the environment variables of TensorFlow's threads.
"""

import os
import re
from typing import Callable, Dict, List, Tuple

from absl import logging

from deepfm.cluster import peers
from deepfm.cluster import tf_config as clusters
from deepfm.config import Distribution, ModeFlags, Processes, Replicas, Servers
from deepfm.config.modes import CROSS_DEVICE_OPS
from deepfm.errors import BadInput
from deepfm.runtime.utilization import cores, gpus_of_host, has_mkl, why_no_gpus

_CPU_REPLICAS = 16  # replicas that may always share the cores of a machine


def local(flags: ModeFlags) -> Distribution:
    """One process, one replica."""
    return Distribution(session_config=_session_config(flags))


def tower(flags: ModeFlags) -> Distribution:
    """One process, one replica per device; CPU device 0 holds the variables and adds gradients."""
    devices = _devices(flags)
    return Distribution("tower", _session_config(flags, devices), replicas=_towers(devices))


def _towers(devices) -> Replicas:
    """One replica per device, built one after another into one graph."""
    import tensorflow as tf
    from tensorflow.contrib import estimator

    stacks = {}  # name -> (the stack, number of replicas that have put in their tensor)

    def stack(tensor, name):
        """The first replica fills the stack with its own tensor; each other replaces one entry.

        A collective operation would need a thread for each replica, or hang.
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
            with tf.name_scope("replicas"):  # leaves the name "loss" to Estimator's summary
                return replicated(features, labels, mode)

        return of_one_graph

    return Replicas(
        len(devices), len(devices), evaluate_on=_sharing(devices), wrap_model_fn=wrap_model_fn,
        stack=stack,
        wrap_optimizer=estimator.TowerOptimizer,
        owns_variables=lambda: not tf.compat.v1.get_variable_scope().reuse,
    )  # fmt: skip


def mirrored(flags: ModeFlags) -> Distribution:
    """One process, MirroredStrategy: a copy of the variables on each device."""
    import tensorflow as tf

    if flags.cross_device_ops == "nccl" and not _gpus():
        raise BadInput(
            "--cross_device_ops=nccl needs GPUs, but TensorFlow finds none: "
            f"{why_no_gpus()}; try --cross_device_ops=reduction_to_one_device."
        )
    devices = _devices(flags)
    how = flags.cross_device_ops or ("nccl" if _gpus() else "reduction_to_one_device")
    reduction = getattr(tf.distribute, CROSS_DEVICE_OPS[how])()
    logging.info("MirroredStrategy adds up gradients by %s.", how)

    def stack(tensor, name):
        def together(strategy, values):
            with tf.device("/cpu:0"):
                return tf.stack(strategy.experimental_local_results(values))

        return tf.distribute.get_replica_context().merge_call(together, args=(tensor,))

    config = _session_config(flags, devices)  # before the strategy looks for devices
    strategy = tf.distribute.MirroredStrategy(devices, reduction)
    number = len(devices)
    replicas = Replicas(number, number, _sharing(devices), strategy, stack=stack)
    return Distribution("mirrored", config, replicas=replicas)


def horovod(flags: ModeFlags) -> Distribution:
    """One process per GPU or per group of cores; gradients are all-reduced, table rows as rows.

    Every tensor that travels is named after its variable. With Horovod's own DistributedOptimizer
    about one two-rank start in five hung in its first step; with these names none did. The cause is
    unknown.
    """
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise BadInput(
            f"--distribution=horovod: Horovod cannot be loaded ({error}); run scripts/setup.sh, or "
            "choose --distribution=local."
        ) from error
    import tensorflow as tf

    from deepfm.model import gradients

    # Open MPI would otherwise busy-wait on a whole core, which the step needs.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    hvd.init()
    own = [f"/gpu:{hvd.local_rank()}"] if _gpus() else []
    config = _session_config(flags, own, hvd.local_size(), logs=bool(own) or hvd.local_rank() == 0)
    if own:
        config.gpu_options.visible_device_list = str(hvd.local_rank())

    def in_session(of_horovod, value, name):
        with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
            return of_horovod(value, session=session, name=name)

    agree = lambda value: in_session(hvd.broadcast_object, value, "agree")
    exchange = lambda value: in_session(hvd.allgather_object, value, "exchange")

    def stack(tensor, name):
        stacked = hvd.allgather(tensor[tf.newaxis], name=name)
        return tf.ensure_shape(stacked, [hvd.size(), *tensor.shape])

    finish = lambda: None
    if hvd.size() > 1:
        watch = peers.watch_ranks(hvd.rank(), exchange)

        def finish():
            agree(0)  # ranks watch each other until here: rank 0 may still fail on its own
            watch.stop()

    gather = lambda tensor, name: hvd.allgather(tensor, name=name)
    add_up = lambda tensor, name: hvd.allreduce(tensor, name=name, op=hvd.Sum)
    replicas = Replicas(
        in_step=hvd.size(),
        wrap_optimizer=lambda optimizer: gradients.Averaged(optimizer, add_up, gather, hvd.size()),
        stack=stack,
        average=lambda tensor, name: hvd.allreduce(tensor, name=name),
        gather=gather,
        make_hooks=lambda: [hvd.BroadcastGlobalVariablesHook(0)],
    )
    processes = Processes(
        hvd.size(), hvd.rank(), hvd.local_size(), hvd.local_rank(),
        agree=agree, exchange=exchange, finish=finish,
    )  # fmt: skip
    return Distribution("horovod", config, processes, replicas)


def ps(flags: ModeFlags) -> Distribution:
    """Parameter servers, a chief and workers that train asynchronously, with towers in each."""
    cluster = clusters.parse(os.environ.get("TF_CONFIG"))
    if not cluster or "ps" not in cluster.jobs:
        raise BadInput(
            "--distribution=ps needs a cluster with 'ps' in TF_CONFIG, or --ps_hosts; "
            "scripts/local_cluster.py starts one on this machine."
        )
    if flags.task_type != "train":
        if cluster.job == cluster.chief:
            return local(flags)
        idle = f"Only the chief runs --task_type={flags.task_type}; this process ends."
        return Distribution("ps", serve=lambda: logging.info(idle))
    import tensorflow as tf

    from deepfm.cluster import parameter_servers

    devices = []
    if flags.replicas_per_process > 1 or (not flags.replicas_per_process and len(_gpus()) > 1):
        devices = _devices(flags)
    config = _session_config(flags, devices)
    if cluster.job == "ps":
        return Distribution("ps", serve=lambda: parameter_servers.serve(cluster, config))
    member = parameter_servers.Member(cluster, config)
    config.device_filters.extend(member.device_filters)
    alone = cluster.num_processes == 1
    processes = Processes(
        cluster.num_processes, cluster.rank, synchronous=alone,
        agree=member.agree, exchange=member.exchange, finish=member.finish,
    )  # fmt: skip
    servers = Servers(
        tf_config=os.environ["TF_CONFIG"],
        device_fn=member.device_fn,
        partitioner=tf.compat.v1.fixed_size_partitioner(cluster.num_servers),
        make_hooks=member.make_hooks,
        steps_taken=member.steps_taken,
        begin_step=member.begin_step,
        end_step=member.end_step,
        count_steps=None if alone else member.count_steps,
        all_run=member.servers_run,
        saves_in_parts=member.servers_see,
        anyone_stops=member.anyone_stops,
    )
    replicas = _towers(devices) if devices else Replicas()
    return Distribution("ps", config, processes, replicas, servers)


def auto(flags: ModeFlags) -> Distribution:
    """The mode that the environment was set up for by its launcher."""
    cluster = clusters.parse(os.environ.get("TF_CONFIG"))
    if cluster and "ps" in cluster.jobs:
        return ps(flags)
    if cluster and cluster.num_processes > 1:
        raise BadInput(
            "TF_CONFIG holds a cluster without 'ps': add parameter servers to it, or start the "
            "processes with horovodrun and without TF_CONFIG."
        )
    # mpirun and horovodrun say here how many processes they have started.
    sizes = {os.environ.get(name) for name in ("OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE")}
    return horovod(flags) if sizes - {None, "", "1"} else local(flags)


def _gpus():
    import tensorflow as tf

    return tf.config.experimental.list_physical_devices("GPU")


def _log_devices(used):
    """Logs which devices there are and which this process uses; warns of GPUs left unused."""
    gpus = len(_gpus())
    logging.info(
        "Devices: found %g CPU cores and %d GPUs; using %s.",
        cores(), gpus, ", ".join(used) or ("/gpu:0" if gpus else "the CPU"),
    )  # fmt: skip
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # by the user
    if not (gpus or hidden) and gpus_of_host():
        logging.warning("Using the CPU: %s.", why_no_gpus())


def _sharing(devices) -> Tuple[str, ...]:
    """The devices that share each batch of evaluation: GPUs; one replica uses all cores."""
    return tuple(devices) if _gpus() else ()


def has_tensor_cores(session_config) -> bool:
    """Whether all GPUs of this process have tensor cores for float16 (capability 7.0 or above)."""
    if not _gpus():
        return False
    from tensorflow.python.client import device_lib

    found = device_lib.list_local_devices(session_config)
    gpus = [d.physical_device_desc for d in found if d.device_type == "GPU"]
    # "device: 0, name: Tesla V100-SXM2-16GB, ..., compute capability: 7.0"
    capabilities = [re.search(r"compute capability: (\d+)", gpu) for gpu in gpus]
    return bool(gpus) and all(found and int(found[1]) >= 7 for found in capabilities)


def warn_of_flags(
    mode: Distribution,
    given: Tuple[str, ...],
    replicas_per_process: int,
    learning_rate_scale: float = 1.0,
):
    """Warns of flags that have no effect in this mode, or trained worse when they were measured.

    Args:
        given: names of the flags that the user set.
        replicas_per_process: value of the flag; 0: not given.
    """
    if replicas_per_process and replicas_per_process != mode.replicas.per_process:
        logging.warning(
            "--replicas_per_process=%d has no effect with --distribution=%s; try tower or "
            "mirrored.",
            replicas_per_process, mode.name,
        )  # fmt: skip
    if "cross_device_ops" in given and not mode.replicas.strategy:
        logging.warning("--cross_device_ops has no effect without --distribution=mirrored.")
    if "ps_hosts" in given and mode.name != "ps":
        logging.warning("--ps_hosts has no effect without --distribution=ps.")
    what = ""
    if 1 < mode.replicas.in_step <= learning_rate_scale:
        what = "the number of replicas as factor trained no better with 4 and worse with 2"
    if mode.name == "ps" and learning_rate_scale <= 0.25:
        what = "a quarter of the rate trained worse with 1, 2 and 4 workers"
    if what:
        logging.warning(
            "--learning_rate_scale=%g: when it was measured, %s; see docs/distributed.md.",
            learning_rate_scale, what,
        )  # fmt: skip


def _devices(flags) -> List[str]:
    """The replicas' devices: GPUs, or all CPU devices but the first, which adds up gradients."""
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
            "--replicas_per_process=%d on %d CPU cores simulates as many GPUs; it does not "
            "train faster.",
            wanted, there,
        )  # fmt: skip
    if gpus:
        return [f"/gpu:{i}" for i in range(wanted or gpus)]
    return [f"/cpu:{i + 1}" for i in range(wanted or max(there - 1, 1))]


def _session_config(flags, devices=(), share_of=1, logs=True):
    """tf.ConfigProto for the devices, with the cores shared among `share_of` processes."""
    import tensorflow as tf
    from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

    if (flags.omp_num_threads or flags.kmp_affinity) and not has_mkl():
        logging.warning(
            "--omp_num_threads and --kmp_affinity have no effect: this TensorFlow is built "
            "without MKL. Use --intra_op_threads and --inter_op_threads."
        )
    if flags.num_gpus and len(_gpus()) < flags.num_gpus:
        raise BadInput(
            f"--num_gpus={flags.num_gpus}, but TensorFlow finds {len(_gpus())} GPUs on this host"
            f"{'' if _gpus() else ': ' + why_no_gpus()}; train on what is found with --num_gpus=0 "
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


MODES: Dict[str, Callable[[ModeFlags], Distribution]] = {
    mode.__name__: mode for mode in (auto, local, tower, mirrored, ps, horovod)
}
