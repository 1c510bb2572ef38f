"""The plain values that everything else takes, each made once, from flags, in train.py.

F: fields. K: embedding size.
"""

from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

# What a flag, or the field of its name, may be, where that is one of some words.
CHOICES = {
    "task_type": ("train", "eval", "infer", "export"),
    "data_format": ("auto", "tfrecord", "libsvm"),  # and the names of data.formats
    "loss_type": ("log_loss", "square_loss"),
    "l2_scope": ("batch", "table"),
    "pooling": ("sum", "mean", "max"),
    "optimizer": ("adam", "adagrad", "sgd", "momentum", "ftrl"),  # of model.optimizers
    "export": ("last", "best"),
    "best_metric": ("auc", "log_loss"),
}


class ModelConfig(NamedTuple):
    """What defines the model.

    Attributes:
        field_size: F.
        feature_size: rows of the embedding tables; ids lie in [0, feature_size).
        embedding_size: K.
        deep_layers: width of each hidden layer.
        dropout: for each hidden layer the rate at which units are dropped (NOT a keep probability).
        batch_norm: Linear -> batch norm -> ReLU -> dropout, instead of Linear -> ReLU -> dropout.
        batch_norm_decay: of the moving statistics.
        loss_type: log_loss or square_loss.
        l2_reg: lambda of the L2 terms, each lambda/2 * sum of squares, not divided by B.
        l2_scope: batch (each distinct table row of the global batch, once per step) or table (whole
            tables). The MLP's kernels are covered in both.
        lazy_updates: update only the table rows of the batch.
        embedding_init_stddev: of the normal distribution that both tables start from.
        seed: of the initial weights and of dropout.
        pooling: what becomes of a field's values: their sum, mean or (element by element) max, each
            value being its feature's row, scaled. Of one value all are the same, which is why the
            mean is over the number of values, and not over their sum.
        multi_valued: whether exported models take fields of several values.
        hash_buckets: of the strings that ids are hashes of, and that exported models take too; 0:
            ids are no hashes; None: not known.
        logit_offset: added to the logits in all but training; see `logit_offset`.
        feature_map: fingerprint of the feature map whose ids the model learns; None: not known.
    """

    field_size: int
    feature_size: int
    embedding_size: int = 32
    deep_layers: Tuple[int, ...] = (256, 128, 64)
    dropout: Tuple[float, ...] = (0.5, 0.5, 0.5)
    batch_norm: bool = False
    batch_norm_decay: float = 0.9
    loss_type: str = "log_loss"
    l2_reg: float = 0.0
    l2_scope: str = "batch"
    lazy_updates: bool = True
    embedding_init_stddev: float = 0.01
    seed: int = 1
    pooling: str = "sum"
    multi_valued: bool = False
    hash_buckets: Optional[int] = None
    logit_offset: float = 0.0
    feature_map: Optional[str] = None


# Fields of ModelConfig that decide which variables a model has, and what they mean.
STAYS = (
    "field_size", "feature_size", "embedding_size", "deep_layers", "batch_norm", "loss_type",
    "pooling",
)  # fmt: skip
# Those that may be others when a run goes on, which then says so.
MAY_CHANGE = ("dropout", "l2_reg", "l2_scope", "batch_norm_decay", "lazy_updates")


class ModelAsked(NamedTuple):
    """What the user asks of a model.

    Attributes:
        model_dir: the folder that holds it, or will.
        fields: {field of ModelConfig: value of the flag}, sizes None where they are not given.
        given: names of the flags that the user set.
        correct_calibration: whether predictions are corrected for sampling by label.
    """

    model_dir: str
    fields: Dict[str, Any]
    given: Tuple[str, ...] = ()
    correct_calibration: bool = False


class OptimizerConfig(NamedTuple):
    """What defines the optimizer.

    Attributes:
        name: a key of OPTIMIZERS.
        learning_rate: as used, --learning_rate_scale multiplied in.
        clip_norm: largest global norm of the gradients; 0 does not clip.
        l2_rows: lambda of the L2 term of the batch's distinct table rows; 0 where tables have none
            or carry it whole.
        lazy_updates: update only the table rows of the batch.
        use_amp: scale the loss, for gradients in float16.
    """

    name: str = "adam"
    learning_rate: float = 0.001
    clip_norm: float = 0.0
    l2_rows: float = 0.0
    lazy_updates: bool = True
    use_amp: bool = False


class Processes(NamedTuple):
    """The processes that train together, and how they talk; the defaults are those of one alone.

    Attributes:
        size: how many there are, each with its share of the records.
        rank: of this process; 0 is the chief, which keeps checkpoints, reports and exports.
        local_size, local_rank: processes on this host, and which of them this one is, where a mode
            starts several on a host.
        synchronous: whether all take each step together. If not, a step is one process's, and the
            chief evaluates alone while the others go on.
        agree: the chief's value, in all processes, which all must call; anything that JSON can
            hold.
        exchange: a value of each process -> those of all, by rank, likewise.
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
        """Whether this process takes part in evaluations: all in step, else the chief alone."""
        return self.synchronous or self.chief

    def total(self, value):
        """The sum of a number over all processes, which all must call."""
        return sum(self.exchange(value))


class Replicas(NamedTuple):
    """The copies of the model that take a step together: what they change in the graph.

    Attributes:
        per_process: copies in a process, each with its part of a batch.
        in_step: copies, of all processes, that take a step together; the global batch is this many
            batches.
        strategy: tf.distribute.Strategy of Estimator's training, or None. The input then yields
            each replica's part of a batch by itself.
        wrap_model_fn: model_fn -> model_fn of training.
        wrap_optimizer: optimizer -> optimizer.
        owns_variables: () -> whether the replica that is being built has variables of its own, and
            not those of one that has been built before it.
        stack: (tensor [...], name) -> tensor [in_step, ...], of the replicas that take a step of
            training together, in the same order on each, without gradient; None where a replica
            takes it alone. Each has to give all names, and each of them once.
        average: (tensor, name) -> its mean over the processes that take each step together.
        gather: (tensor [n, ...], name) -> tensor [sum of n, ...], over the same.
        make_hooks: () -> hooks of each session: training, evaluation and inference.
    """

    per_process: int = 1
    in_step: int = 1
    strategy: Any = None
    wrap_model_fn: Callable = lambda model_fn: model_fn
    wrap_optimizer: Callable = lambda optimizer: optimizer
    owns_variables: Callable[[], bool] = lambda: True
    stack: Optional[Callable] = None
    average: Callable = lambda tensor, name: tensor
    gather: Callable = lambda tensor, name: tensor
    make_hooks: Callable[[], list] = list


class Servers(NamedTuple):
    """What parameter servers change in training; the defaults are those of training without.

    Attributes:
        tf_config: TF_CONFIG as Estimator reads it.
        device_fn: the device of each operation, or None.
        partitioner: cuts the model's variables into parts, or None.
        make_hooks: (save_in_time: session -> None) -> further hooks, before the saving of
            checkpoints.
        steps_taken: (the steps of each process, by rank) -> those of this process; all must call.
        begin_step: (features, labels, --max_steps) -> features, labels; no step is taken before.
        end_step: train_op -> train_op.
        count_steps: () -> int64 [processes], the steps that each process has taken, of which the
            weights that are read afterwards have all updates; None where all take each step.
        saves_in_parts: model_dir -> whether those that hold parts of variables write them there.
        anyone_stops: (whether this process is to stop) -> whether any is; called after each step.
            Where several processes take each step together, Replicas.average tells them in it.
    """

    tf_config: str = "{}"
    device_fn: Optional[Callable] = None
    partitioner: Optional[Callable] = None
    make_hooks: Callable[[Callable], list] = lambda save_in_time: []
    steps_taken: Callable = lambda of_processes: of_processes[0]
    begin_step: Callable = lambda features, labels, max_steps: (features, labels)
    end_step: Callable = lambda train_op: train_op
    count_steps: Optional[Callable] = None
    saves_in_parts: Callable[[str], bool] = lambda model_dir: True
    anyone_stops: Callable[[bool], bool] = lambda wanted: wanted


class Distribution(NamedTuple):
    """The facts of a mode; the defaults are those of `local`.

    Attributes:
        name: of the mode.
        session_config: tf.ConfigProto.
        serve: what this process does in place of the job, or None.
    """

    name: str = "local"
    session_config: Any = None
    processes: Processes = Processes()
    replicas: Replicas = Replicas()
    servers: Servers = Servers()
    serve: Optional[Callable[[], None]] = None


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


class InputConfig(NamedTuple):
    """What the user asks of the reading of records; the fields are the flags of the same names.

    Attributes:
        batch_size: B, of a replica.
        num_epochs: times that each record is read.
        shuffle_buffer: records among which the next is drawn; 0 keeps the order.
        cache: none, memory, or the path of a cache file.
        num_parallel_reads: files read at the same time; 1 where the order matters.
        read_buffer_bytes: of each file that is read.
        seed: of the order.
        training_data_dir, val_data_dir, infer_data_dir: a folder, a glob, or a list of these.
        data_format: auto, or a name of formats.
        max_bad_records: bad records of the training data that are passed over at the most.
        eval_on_all_ranks: whether each process evaluates all records, in place of its share.
    """

    batch_size: int
    num_epochs: int = 1
    shuffle_buffer: int = 0
    cache: str = "none"
    num_parallel_reads: int = 1
    read_buffer_bytes: int = 8 << 20
    seed: int = 1
    training_data_dir: Optional[str] = None
    val_data_dir: Optional[str] = None
    infer_data_dir: Optional[str] = None
    data_format: str = "auto"
    max_bad_records: int = 0
    eval_on_all_ranks: bool = False


class Share(NamedTuple):
    """Which of the records that a process sees it reads: part number `index` of `of`."""

    of: int = 1
    index: int = 0


class Position(NamedTuple):
    """Where a run is in its data.

    Attributes:
        epoch: its number, from 0.
        step: batches of that epoch that this process has used already; where the rows are not
            known, of all epochs.
        rows_of_processes: the records of an epoch that each process reads, by rank; None where
            that is not known.
        by_rows: whether files are divided into groups by their rows; False where these were not
            known when the run began.
    """

    epoch: int = 0
    step: int = 0
    rows_of_processes: Optional[Tuple[int, ...]] = None
    by_rows: bool = True

    def used(self, size: int, rank: int) -> int:
        """Records of the epoch that a process has used, `size` a step; 0 where not known."""
        return min(self.step * size, self.rows_of_processes[rank]) if self.rows_of_processes else 0


class JobConfig(NamedTuple):
    """What a job is asked to do; the fields are the flags of the same names.

    Attributes:
        model, correct_calibration: of ModelAsked.
        given: names of the flags that the user set.
        optimizer: OptimizerConfig.
        input: InputConfig.
        ops: kernels.ops.Ops that read, shuffle, batch and parse records.
        distribution: Distribution.
        flags: {name: value} of all flags that are not at their defaults, for report.json.
    """

    task_type: str
    model_dir: Optional[str]
    servable_model_dir: Optional[str]
    predictions_file: Optional[str]
    clear_existing_model: bool
    abandon_interrupted_run: bool
    max_steps: int
    log_steps: int
    save_checkpoints_steps: int
    save_checkpoints_secs: int
    keep_checkpoint_max: int
    eval_every_steps: int
    learning_rate_decay_on_plateau: float
    export: str
    best_metric: str
    early_stopping_patience: int
    global_batch_size: int
    model: Dict[str, Any]
    correct_calibration: bool
    given: Tuple[str, ...]
    optimizer: OptimizerConfig
    input: InputConfig
    ops: Any
    distribution: Distribution
    flags: Dict[str, Any]

    @property
    def batch_of_process(self):
        """Records of a step, of the replicas of this process together."""
        return self.input.batch_size * self.distribution.replicas.per_process

    @property
    def global_batch(self):
        """Records of a step, of all replicas together."""
        return self.input.batch_size * self.distribution.replicas.in_step

    @property
    def asked_model(self):
        """What the user asks of the model: ModelAsked."""
        return ModelAsked(self.model_dir, self.model, self.given, self.correct_calibration)
