"""The facts of a mode of distribution, and the flags that it reads."""

from typing import Any, Callable, NamedTuple, Optional, Tuple

from deepfm.config.setting import OF_PROCESS, declares, setting

CROSS_DEVICE_OPS = {  # value of the flag: class in tf.distribute
    "nccl": "NcclAllReduce",
    "hierarchical_copy": "HierarchicalCopyAllReduce",
    "reduction_to_one_device": "ReductionToOneDevice",
}

# fmt: off


@declares
class ModeFlags(NamedTuple):
    """The flags that modes read.

    train.py has put omp_num_threads and kmp_affinity in the environment.

    Attributes:
        task_type: as in JobConfig.
    """

    intra_op_threads: int = setting(OF_PROCESS, 0,
        "Threads inside one TensorFlow operator; 0: half the cores.", at_least=0, at_most=1024)
    inter_op_threads: int = setting(OF_PROCESS, 0,
        "TensorFlow operators that run at the same time; 0: one per core.",
        at_least=0, at_most=1024)
    omp_num_threads: int = setting(OF_PROCESS, 0,
        "Threads of OpenMP, for builds of TensorFlow with MKL; 0: OMP_NUM_THREADS of the "
        "environment, or else the cores, divided by the ranks of this host.",
        at_least=0, at_most=1024)
    kmp_affinity: Optional[str] = setting(OF_PROCESS, None,
        "KMP_AFFINITY of OpenMP, for builds of TensorFlow with MKL, for example verbose,disabled. "
        "Default: disabled, which binds no thread to a core.")
    replicas_per_process: int = setting(OF_PROCESS, 0,
        "Devices that each process uses with tower, mirrored and ps; 0: all GPUs, or else CPU "
        "cores - 1 (ps: one).", at_least=0)
    cross_device_ops: Optional[str] = setting(OF_PROCESS, None,
        "How mirrored adds up the gradients of its devices; nccl needs GPUs. Default: nccl on "
        "GPUs, reduction_to_one_device on CPUs.", choices=tuple(CROSS_DEVICE_OPS))
    num_cpus: int = setting(OF_PROCESS, 0,
        "CPU cores for the processes of this host; 0: all that the host grants.",
        at_least=0, alias="num_CPUs")
    num_gpus: int = setting(OF_PROCESS, 0,
        "Number of GPUs that TensorFlow must find on this host; with fewer, training refuses to "
        "start. 0 does not check.", at_least=0, alias="num_GPUs")
    task_type: str = "train"

# fmt: on


class Processes(NamedTuple):
    """The processes that train together, and how they talk; the defaults describe a single process.

    Attributes:
        size: number of processes; each has its share of the records.
        rank: rank of this process; 0 is the chief, which writes checkpoints, reports and exports.
        local_size, local_rank: number of processes on this host and the rank of this one among
            them, in modes that start several per host.
        synchronous: whether all take each step together. If not, each process takes steps of its
            own, and the chief evaluates alone while the others go on training.
        agree: value -> the chief's value, the same in all processes. All must call it, with
            anything that JSON can hold.
        exchange: value of this process -> the values of all, by rank; called likewise.
        finish: called when the job is done; returns when this process may end.
    """

    size: int = 1
    rank: int = 0
    local_size: int = 1
    local_rank: int = 0
    synchronous: bool = True
    agree: Callable = lambda value: value
    exchange: Callable = lambda value: [value]
    finish: Callable[[], None] = lambda: None

    @property
    def chief(self):
        """Whether this process is the chief."""
        return self.rank == 0

    @property
    def in_step(self):
        """Whether several processes take each step together."""
        return self.synchronous and self.size > 1

    @property
    def evaluates(self):
        """Whether this process takes part in evaluations: all if synchronous, else the chief."""
        return self.synchronous or self.chief

    def total(self, value):
        """The sum of a number over all processes; all of them must call this."""
        return sum(self.exchange(value))


class Replicas(NamedTuple):
    """The copies of the model that take a step together, and what they change in the graph.

    Attributes:
        per_process: replicas in this process; each takes its part of a batch.
        in_step: replicas, over all processes, whose batches make up the global batch of a step.
        evaluate_on: devices that share the batches of evaluation; (): TensorFlow places them.
        strategy: tf.distribute.Strategy for Estimator's training, or None. With a strategy the
            input yields each replica's part of a batch separately.
        wrap_model_fn: model_fn -> the model_fn to train with.
        wrap_optimizer: optimizer -> the optimizer to train with.
        owns_variables: () -> whether the replica being built creates variables of its own, rather
            than sharing those of a replica built before it.
        stack: (tensor [...], name) -> tensor [in_step, ...], this tensor of every replica in the
            training step, in the same order on each, without gradient; None if a replica steps
            alone. Every replica must call it exactly once for each name.
        average: (tensor, name) -> its mean over the processes that take each step together.
        gather: (tensor [n, ...], name) -> tensor [sum of n, ...], concatenated over the same.
        make_hooks: () -> hooks for each session: training, evaluation and inference.
    """

    per_process: int = 1
    in_step: int = 1
    evaluate_on: Tuple[str, ...] = ()
    strategy: Any = None
    wrap_model_fn: Callable = lambda model_fn: model_fn
    wrap_optimizer: Callable = lambda optimizer: optimizer
    owns_variables: Callable[[], bool] = lambda: True
    stack: Optional[Callable] = None
    average: Callable = lambda tensor, name: tensor
    gather: Callable = lambda tensor, name: tensor
    make_hooks: Callable[[], list] = list


class Servers(NamedTuple):
    """What parameter servers change in training; the defaults describe training without them.

    Attributes:
        tf_config, device_fn: TF_CONFIG as Estimator reads it; operation -> its device, or None.
        partitioner: cuts the model's variables into parts, or None.
        make_hooks: (save_in_time: session -> None) -> more hooks, which run before the one that
            saves checkpoints.
        steps_taken: (steps of each process, by rank) -> steps of this process; all must call it.
        begin_step: (features, labels, --max_steps) -> features, labels; a step starts no sooner.
        end_step: train_op -> train_op.
        count_steps: () -> int64 [processes], the steps that each process has taken; weights read
            after it include all of their updates. None if all take each step together.
        all_run: (() -> tensor) -> whether every server has the operator that makes the tensor.
        saves_in_parts: model_dir -> whether the holders of a variable's parts write them there.
        anyone_stops: (whether this process wants to stop) -> whether any does, after each step.
            Processes that take each step together learn it from Replicas.average instead.
    """

    tf_config: str = "{}"
    device_fn: Optional[Callable] = None
    partitioner: Optional[Callable] = None
    make_hooks: Callable[[Callable], list] = lambda save_in_time: []
    steps_taken: Callable = lambda of_processes: of_processes[0]
    begin_step: Callable = lambda features, labels, max_steps: (features, labels)
    end_step: Callable = lambda train_op: train_op
    count_steps: Optional[Callable] = None
    all_run: Callable[[Callable], bool] = lambda make: False
    saves_in_parts: Callable[[str], bool] = lambda model_dir: True
    anyone_stops: Callable[[bool], bool] = lambda wanted: wanted


class Distribution(NamedTuple):
    """The facts of a mode; the defaults describe `local`.

    Attributes:
        name: the mode's name.
        session_config: tf.ConfigProto.
        serve: what this process does instead of the job, or None.
    """

    name: str = "local"
    session_config: Any = None
    processes: Processes = Processes()
    replicas: Replicas = Replicas()
    servers: Servers = Servers()
    serve: Optional[Callable[[], None]] = None
