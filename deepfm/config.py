"""The plain values that everything else takes, each made once, from flags, in train.py.

F: fields. K: embedding size.
"""

from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

MAX_FIELDS = 100000
MAX_NUMBER = 2**31 - 1  # beyond it TensorFlow 1.15 overflows 32-bit numbers

# What a flag, or the field of its name, may be, where that is one of some words.
CHOICES = {
    "task_type": ("train", "eval", "infer", "export"),
    "data_format": ("auto", "tfrecord", "libsvm"),  # and the names of data.formats
    "loss_type": ("log_loss", "square_loss"),
    "l2_scope": ("batch", "elapsed", "table"),
    "pooling": ("sum", "mean", "max"),
    "optimizer": ("adam", "adagrad", "sgd", "momentum", "ftrl"),  # of model.optimizers
    "export": ("last", "best", "auto"),
    "best_metric": ("auc", "log_loss", "auc_minus_log_loss", "gauc"),
    "learning_rate_decay_metric": ("auc", "log_loss", "auc_minus_log_loss", "gauc"),
}


class ModelConfig(NamedTuple):
    """What defines the model.

    Attributes:
        field_size: F.
        feature_size: rows of the embedding tables; feature ids are in [0, feature_size).
        embedding_size: K.
        deep_layers: width of each hidden layer.
        dropout: for each hidden layer the rate at which units are dropped (NOT a keep probability).
        batch_norm: Linear -> batch norm -> ReLU -> dropout, instead of Linear -> ReLU -> dropout.
        batch_norm_decay, batch_norm_epsilon: of the moving statistics; added to the variance.
        loss_type: log_loss or square_loss.
        l2_reg: lambda of the L2 terms, each lambda/2 * sum of squares, not divided by B.
        l2_reg_deep: lambda of the MLP's kernels; None: l2_reg.
        l2_scope: batch (each distinct table row of the global batch, once per step), elapsed (the
            same rows, for all steps since each was last in a batch) or table (whole tables). The
            MLP's kernels are covered whole in each.
        lazy_updates: update only the table rows of the batch.
        embedding_init_stddev: of the normal distribution that both tables start from.
        seed: seed of the initial weights and of dropout.
        pooling: how a field's values, each its feature's row times its value, become one: their
            sum, mean or element-wise max. The mean divides by the number of values, not by their
            sum, so all three agree for a field with a single value.
        multi_valued: whether exported models accept fields with several values.
        ids: how the ids that the model learns were made (plain/made.py); None: not known.
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
    batch_norm_epsilon: float = 0.001
    loss_type: str = "log_loss"
    l2_reg: float = 0.0
    l2_reg_deep: Optional[float] = None
    l2_scope: str = "batch"
    lazy_updates: bool = True
    embedding_init_stddev: float = 0.01
    seed: int = 1
    pooling: str = "sum"
    multi_valued: bool = False
    ids: Optional[Dict[str, Any]] = None
    hash_buckets: Optional[int] = None
    logit_offset: float = 0.0
    feature_map: Optional[str] = None


# Fields of ModelConfig that decide which variables a model has, and what they mean.
STAYS = (
    "field_size", "feature_size", "embedding_size", "deep_layers", "batch_norm", "loss_type",
    "pooling",
)  # fmt: skip
# Those that may be others when a run goes on, which then says so.
MAY_CHANGE = (
    "dropout", "l2_reg", "l2_reg_deep", "l2_scope", "batch_norm_decay", "lazy_updates",
    "batch_norm_epsilon",
)  # fmt: skip


class ModelAsked(NamedTuple):
    """What the user asks for in a model.

    Attributes:
        model_dir: the folder that holds the model, or will.
        fields: {field of ModelConfig: value of the flag}; a size that was not given is None.
        given: names of the flags that the user set.
        correct_calibration: whether predictions are corrected for sampling by label.
    """

    model_dir: str
    fields: Dict[str, Any]
    given: Tuple[str, ...] = ()
    correct_calibration: bool = False


class OptimizerConfig(NamedTuple):
    """What defines the optimizer; other fields are the flags of the same names (flags.py).

    Attributes:
        name: a key of OPTIMIZERS.
        learning_rate: the rate as applied, including --learning_rate_scale.
        cowclip_ratio, cowclip_min_norm: r and zeta of CowClip.
        l2_rows: lambda of the L2 term of the batch's distinct table rows; 0 if there is no L2 term
            or it covers the whole tables.
        elapsed: l2_rows, and Adam's moments, cover all steps since a row was last in a batch.
        run_step: global step at which the run began.
        start_step: global step from which this process trains.
        use_amp: scale the loss, because gradients are float16.
    """

    name: str = "adam"
    learning_rate: float = 0.001
    embedding_learning_rate: Optional[float] = None
    learning_rate_warmup_steps: int = 0
    clip_norm: float = 0.0
    cowclip_ratio: float = 0.0
    cowclip_min_norm: float = 1e-5
    l2_rows: float = 0.0
    elapsed: bool = False
    run_step: int = 0
    start_step: int = 0
    lazy_updates: bool = True
    use_amp: bool = False


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


class InputConfig(NamedTuple):
    """How the user wants records read; the fields are the flags of the same names (flags.py).

    Attributes:
        batch_size: B, the records per batch of a replica.
        data_format: auto, or a name in formats.FORMATS.
    """

    batch_size: int
    num_epochs: int = 1
    shuffle_buffer: int = 0
    cache: str = "none"
    num_parallel_reads: int = 1
    num_parsers: int = 0
    prefetch_batches: int = 0
    read_buffer_bytes: int = 8 << 20
    seed: int = 1
    training_data_dir: Optional[str] = None
    val_data_dir: Optional[str] = None
    infer_data_dir: Optional[str] = None
    data_format: str = "auto"
    max_bad_records: int = 0
    eval_on_all_ranks: bool = False
    example_weights: Optional[bool] = None


class Share(NamedTuple):
    """Which of the records that a process can see it reads: part `index` of `of` parts."""

    of: int = 1
    index: int = 0


class Position(NamedTuple):
    """Where a run is in its data.

    Attributes:
        epoch: number of the epoch, from 0.
        step: batches of that epoch that this process has already used; batches of all epochs if
            the rows are unknown.
        rows_of_processes: the records that each process reads in an epoch, by rank; None if
            unknown.
        by_rows: whether files are grouped by their rows; False if these were unknown when the run
            began.
    """

    epoch: int = 0
    step: int = 0
    rows_of_processes: Optional[Tuple[int, ...]] = None
    by_rows: bool = True

    def used(self, size: int, rank: int) -> int:
        """Records of the epoch that a process has used, `size` per step; 0 if unknown."""
        return min(self.step * size, self.rows_of_processes[rank]) if self.rows_of_processes else 0


class JobConfig(NamedTuple):
    """What a job is asked to do; the fields are the flags of the same names.

    Attributes:
        model, correct_calibration: fields and correct_calibration of ModelAsked.
        given: names of the flags that the user set.
        optimizer, input: OptimizerConfig and InputConfig.
        ops: kernels.ops.Ops to read, shuffle, batch and parse records with.
        distribution: Distribution.
        flags: {name: value} of all flags that differ from their defaults, for report.json.
    """

    task_type: str
    model_dir: Optional[str]
    servable_model_dir: Optional[str]
    predictions_file: Optional[str]
    checkpoint: str
    clear_existing_model: bool
    abandon_interrupted_run: bool
    max_steps: int
    log_steps: int
    price_per_hour: float
    profile_steps: Tuple[int, ...]
    save_checkpoints_steps: int
    save_checkpoints_secs: int
    keep_checkpoint_max: int
    eval_every_steps: int
    learning_rate_decay_on_plateau: float
    learning_rate_decay_patience: int
    learning_rate_decay_metric: str
    min_learning_rate: float
    min_improvement: float
    reset_embeddings_each_epoch: bool
    export: str
    best_metric: str
    gauc_field: Optional[int]
    slice_fields: Tuple[int, ...]
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
        """Records per step of this process's replicas together."""
        return self.input.batch_size * self.distribution.replicas.per_process

    @property
    def global_batch(self):
        """Records per step of all replicas together."""
        return self.input.batch_size * self.distribution.replicas.in_step

    @property
    def asked_model(self):
        """What the user asks for in the model, as ModelAsked."""
        fields = dict(self.model)
        if not fields["l2_scope"]:
            lazy_adam = self.optimizer.name == "adam" and fields["lazy_updates"]
            fields["l2_scope"] = "elapsed" if lazy_adam else "batch"
        return ModelAsked(self.model_dir, fields, self.given, self.correct_calibration)
