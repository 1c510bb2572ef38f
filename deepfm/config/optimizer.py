"""What defines the optimizer."""

from typing import NamedTuple, Optional

from deepfm.config.setting import CHANGES, OF_RUN, declares, setting

# fmt: off


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
