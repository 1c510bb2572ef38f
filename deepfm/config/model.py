"""What defines a model, and the optimizer that trains it."""

from typing import Any, Dict, NamedTuple, Optional, Tuple

from deepfm.config.setting import CHANGES, OF_DATA, OF_RUN, STAYS, declares, setting

# A setting in two or three lines:
# fmt: off

SEED = setting(OF_RUN, 1,
    "Seed of the initial weights, the order of the records and dropout. The same seed and data "
    "give the same model.", at_least=0, at_most=(1 << 32) - 1)


@declares
class ModelConfig(NamedTuple):
    """What defines the model.

    `dropout` has a rate for each hidden layer. L2 is lambda/2 * sum of squares, not divided by B,
    and covers the MLP's kernels whole. The mean of `pooling` divides by the number of values, not
    by their sum, so all three agree for a field with a single value.

    Attributes:
        ids: how the ids that the model learns were made (records/dataset_json.py); None: not known.
        hash_buckets: of the strings that ids are hashes of, and that exported models take too; 0:
            ids are no hashes; None: not known.
        logit_offset: added to the logits in all but training; see `logit_offset`.
        feature_map: fingerprint of the feature map whose ids the model learns; None: not known.
    """

    field_size: int = setting(STAYS, None,
        "Number of fields F of each record. Default: from dataset.json, the checkpoint or the "
        "first record.", at_least=1)
    feature_size: int = setting(STAYS, None,
        "Rows of the embedding tables; every feature id must be smaller. Default: from "
        "dataset.json or the checkpoint. Without a feature map, a larger one adds fresh rows to a "
        "trained model.", at_least=1)
    embedding_size: int = setting(STAYS, 32,
        "Width K of each embedding. Larger models fit more and cost more, in proportion.",
        at_least=1)
    deep_layers: Tuple[int, ...] = setting(STAYS, (256, 128, 64),
        "Widths of the hidden layers of the MLP, a comma list.",
        at_least=1, wanted="a list of layer widths such as 256,128,64")
    dropout: Tuple[float, ...] = setting(CHANGES, (0.5, 0.5, 0.5),
        "Rate at which units of the hidden layers are dropped (NOT a keep probability), in [0, 1): "
        "one for all layers, or a comma list.",
        asked=(0.5,), at_least=0, below=1,
        wanted="a rate of at least 0 and below 1, or one for each hidden layer")
    batch_norm: bool = setting(STAYS, False,
        "Apply batch normalisation to each hidden layer before its ReLU, over the global batch.")
    batch_norm_decay: float = setting(CHANGES, 0.9,
        "Decay of batch norm's moving averages, in [0, 1]. Lower it for runs of few steps.",
        at_least=0, at_most=1)
    batch_norm_epsilon: float = setting(CHANGES, 0.001,
        "What batch norm adds to the variance before its root. Lower it, as PyTorch does to "
        "0.00001, where the embeddings start from a small --embedding_init_stddev.", at_least=0)
    loss_type: str = setting(STAYS, "log_loss",
        "Loss to minimise; use log_loss for clicks.", choices=("log_loss", "square_loss"))
    l2_reg: float = setting(CHANGES, 0.0,
        "Weight lambda of the L2 penalty, lambda/2 * sum of squares, over the embeddings and the "
        "MLP's kernels. The first thing to tune against overfitting.", at_least=0, asked=0.0001)
    l2_reg_deep: Optional[float] = setting(CHANGES, None,
        "Weight lambda of the L2 penalty on the MLP's kernels alone. Default: --l2_reg. Lower it, "
        "down to 0, where the embeddings need a --l2_reg of 0.01 and more.", at_least=0)
    l2_scope: str = setting(CHANGES, "batch",
        "Embedding rows that the L2 penalty covers in a step: batch, the distinct rows of the "
        "global batch; elapsed, the same rows for all steps since each was last in a batch, which "
        "does to rare ids what table does (Adam only); or table, all rows, which costs a pass over "
        "the tables. Default: elapsed with --optimizer=adam and --lazy_updates, else batch.",
        asked=None, choices=("batch", "elapsed", "table"))
    lazy_updates: bool = setting(CHANGES, True,
        "Update only the embedding rows that a batch uses; False also applies momentum to all "
        "other rows, which costs a pass over the tables.")
    embedding_init_stddev: float = setting(OF_RUN, 0.01,
        "Standard deviation of the normal distribution that the embeddings start from.", at_least=0)
    seed: int = SEED
    pooling: str = setting(STAYS, "sum",
        "How a field with several values becomes one embedding: the sum, the mean or the "
        "element-wise maximum of its features' embeddings, each scaled by its value.",
        choices=("sum", "mean", "max"))
    multi_valued: bool = setting(OF_DATA, False,
        "A field may have any number of values, as the feature `counts` says. Default: from "
        "dataset.json, the checkpoint or the first record.", asked=None)
    ids: Optional[Dict[str, Any]] = setting(OF_DATA, None)
    hash_buckets: Optional[int] = setting(OF_DATA, None, at_least=0)
    logit_offset: float = setting(OF_DATA, 0.0)
    feature_map: Optional[str] = setting(OF_DATA, None)


@declares
class OptimizerConfig(NamedTuple):
    """What defines the optimizer.

    The learning rate is the one that is applied, including --learning_rate_scale.

    Attributes:
        l2_rows: lambda of the L2 term of the batch's distinct table rows; 0 if there is no L2 term
            or it covers the whole tables.
        elapsed: l2_rows, and Adam's moments, cover all steps since a row was last in a batch.
        run_step: global step at which the run began.
        start_step: global step from which this process trains.
        lazy_updates: as in ModelConfig.
    """

    name: str = setting(CHANGES, "adam",
        "Optimizer, in upper or lower case; GD means sgd.",
        flag="optimizer", spelled={"gd": "sgd"},
        choices=("adam", "adagrad", "sgd", "momentum", "ftrl"))  # of model.optimizers
    learning_rate: float = setting(CHANGES, 0.001,
        "Learning rate, for any number of replicas; it is never scaled silently.", at_least=0)
    embedding_learning_rate: Optional[float] = setting(CHANGES, None,
        "Learning rate of the embedding tables, without scale or warm-up. Default: as all other "
        "weights. Keep it where it is when larger batches need a larger --learning_rate.",
        at_least=0)
    learning_rate_warmup_steps: int = setting(CHANGES, 0,
        "First steps of a run, over which --learning_rate rises linearly to its value; 0: none. "
        "Use it with large batches, for example one epoch.", at_least=0)
    clip_norm: float = setting(CHANGES, 0.0,
        "Clip the gradients to this global norm; 0 does not clip.", at_least=0)
    cowclip_ratio: float = setting(CHANGES, 0.0,
        "Clip the gradient of each embedding row to this times the row's norm, times the "
        "occurrences of its id in the global batch (CowClip); 0 does not clip. For large batches: "
        "try 0.0002 at 16,384, and less at more. Its authors' 1 clips hardly any row.", at_least=0)
    cowclip_min_norm: float = setting(CHANGES, 1e-05,
        "With --cowclip_ratio, the least norm to clip to, per occurrence, above 0. Raise it if "
        "rows that start near 0 learn too slowly.", at_least=0)
    use_amp: bool = setting(OF_RUN, False,
        "Train in mixed precision: float16 where it is safe. Pays where large layers keep a GPU "
        "with tensor cores (capability 7.0 or above) busy; elsewhere it gains nothing.")
    l2_rows: float = 0.0
    elapsed: bool = False
    run_step: int = 0
    start_step: int = 0
    lazy_updates: bool = True
