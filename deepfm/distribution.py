"""What a mode of distribution decides: a handful of facts, and one function per mode.

TensorFlow is loaded only inside the functions, for flags.py needs the modes' names before the
environment of TensorFlow's threads is set.
"""

import json
import os
from typing import Any, Callable, Dict, NamedTuple


class Distribution(NamedTuple):
    """The facts of a mode; the defaults are those of `local`.

    Attributes:
        name: of the mode.
        num_processes: that train together.
        rank: of this process; 0 is the chief, which keeps checkpoints, reports and exports.
        num_replicas: copies of the model over all processes; the global batch is this many batches.
        session_config: tf.ConfigProto.
        wrap_optimizer: optimizer -> optimizer.
        wrap_model_fn: model_fn -> model_fn.
    """

    name: str = "local"
    num_processes: int = 1
    rank: int = 0
    num_replicas: int = 1
    session_config: Any = None
    wrap_optimizer: Callable = lambda optimizer: optimizer
    wrap_model_fn: Callable = lambda model_fn: model_fn


class Threads(NamedTuple):
    """Threads of a process: inside one operator, and for operators side by side; 0: a default."""

    intra_op: int = 0
    inter_op: int = 0


def local(threads: Threads) -> Distribution:
    """One process, one replica."""
    import tensorflow as tf

    cores = len(os.sched_getaffinity(0))
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threads.intra_op or cores,
        inter_op_parallelism_threads=threads.inter_op or cores,
        allow_soft_placement=True,
    )
    config.gpu_options.allow_growth = True
    return Distribution(session_config=config)


def auto(threads: Threads) -> Distribution:
    """The mode that the environment asks for."""
    from deepfm.records import BadInput

    if _in_a_cluster():
        raise BadInput(
            "--distribution=auto found several processes (TF_CONFIG or MPI), and only "
            "--distribution=local is there to choose."
        )
    return local(threads)


def _in_a_cluster():
    try:
        cluster = json.loads(os.environ.get("TF_CONFIG") or "{}").get("cluster")
    except (ValueError, AttributeError):
        cluster = None
    ranks = [os.environ.get(k, "1") for k in ("OMPI_COMM_WORLD_SIZE", "HOROVOD_SIZE")]
    return bool(cluster) or any(r not in ("", "1") for r in ranks)


MODES: Dict[str, Callable[[Threads], Distribution]] = {"auto": auto, "local": local}
