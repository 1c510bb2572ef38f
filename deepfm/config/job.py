"""What a job is asked to do, and where in the data a training begins."""

import os
from typing import Any, Dict, NamedTuple, Optional, Tuple

from deepfm.config.input import InputConfig
from deepfm.config.model import OptimizerConfig
from deepfm.config.setting import ALIKE, CHANGES, OF_PROCESS, OF_RUN, declares, setting

METRICS = "auc", "log_loss", "auc_minus_log_loss", "gauc"

# fmt: off


@declares
class JobConfig(NamedTuple):
    """What a job is asked to do.

    Attributes:
        model: {field of ModelConfig: value of its flag}; what was not given may be None.
        given: names of the flags that the user set.
        ops: kernels.ops.Ops to read, shuffle, batch and parse records with.
        distribution: the modes.common.mode.Mode.
        sagemaker: the sagemaker.Job around it; its defaults outside of SageMaker.
        flags: {name: value} of all flags that differ from their defaults, for report.json.
    """

    model: Dict[str, Any]
    given: Tuple[str, ...]
    optimizer: OptimizerConfig
    input: InputConfig
    ops: Any
    distribution: Any
    sagemaker: Any
    flags: Dict[str, Any]
    task_type: str = setting(OF_PROCESS, "train",
        "The job: train (and evaluate), eval, importance (how much each field matters), infer "
        "(write predictions) or export (write a SavedModel or, with --export_format, the weights).",
        choices=("train", "eval", "importance", "infer", "export"))
    feature_map: Optional[str] = setting(OF_PROCESS, None,
        "The feature_map.json that made the ids of the records, or a channel of input mode File "
        "that brings it, where no dataset.json lies beside them, as in Pipe mode. It gives "
        "--field_size and --feature_size.")
    model_dir: Optional[str] = setting(OF_PROCESS, None,
        "Folder of checkpoints, summaries and report.json; local or s3://. The same command again "
        "resumes the model it holds.", alias="checkpoint_dir")
    servable_model_dir: Optional[str] = setting(OF_PROCESS, None,
        "Folder for exports, each in a numbered folder of its own, as TensorFlow Serving expects.",
        tasks=("train", "export"))
    export_format: str = setting(OF_PROCESS, "saved_model",
        "What export, and train with --servable_model_dir, write: saved_model, for servers; or "
        "npz, the weights as a NumPy file for other frameworks (docs/other_frameworks.md), into a "
        "--servable_model_dir that no server watches.",
        choices=("saved_model", "npz"), tasks=("train", "export"))
    predictions_file: Optional[str] = setting(OF_PROCESS, None,
        "Where infer writes its predictions, in the order of the records. Default: predictions.txt "
        "in model_dir; by the format predictions.csv, or the folder predictions.parquet.",
        tasks=("infer",))
    predictions_format: str = setting(OF_PROCESS, "plain",
        "plain: one probability per line; csv: with a header and the record's key before it, or "
        "without keys its file and its number there, from 0; parquet: these columns, a file for "
        "each rank in a folder.", choices=("plain", "csv", "parquet"), tasks=("infer",))
    checkpoint: str = setting(OF_PROCESS, "last",
        "Which checkpoint the jobs after training use: last; best, which training keeps in "
        "model_dir/best by --best_metric; auto, the best one if it is of the present run, else the "
        "last; or a path such as model/model.ckpt-1200.",
        tasks=("eval", "importance", "infer", "export"))
    clear_existing_model: bool = setting(OF_PROCESS, False,
        "Delete the model in model_dir and train from scratch. Files that train.py did not write "
        "stay.", tasks=("train",))
    abandon_interrupted_run: bool = setting(OF_PROCESS, False,
        "Give up the interrupted run in model_dir and start a new run from its weights. Needed to "
        "train on other data than that run used.", tasks=("train",))
    move_rows: bool = setting(OF_PROCESS, False,
        "Move the model's rows by name to the ids of data whose feature map did not grow from the "
        "model's. At least half of the rows must be there.", tasks=("train",))
    evaluate_first: bool = setting(ALIKE, False,
        "Evaluate the training data by the weights that a run begins with, before its first step: "
        "how good yesterday's model is on today's log.", tasks=("train",))
    auto: bool = setting(ALIKE, False,
        "Choose, by the number of records, what you do not give of --global_batch_size, "
        "--num_epochs, --embedding_size, --deep_layers, --dropout, --l2_reg, --learning_rate, "
        "--early_stopping_patience, --best_metric and --export: below 20,000 records a small "
        "model, batches of 64 or 128 and up to 30 epochs; from 200,000 the default model and 3 to "
        "10. The log has all as flags to copy. horovodrun takes --auto for its --autotune: "
        "write --auto_settings there.", alias="auto_settings", tasks=("train",))
    max_steps: int = setting(OF_RUN, 0,
        "Stop at this global step; 0 stops after --num_epochs.", at_least=0)
    log_steps: int = setting(OF_PROCESS, 100,
        "Steps between two progress lines, and between two summaries.", at_least=1)
    price_per_hour: float = setting(OF_PROCESS, 0.0,
        "Price of a host for an hour. Report and verdict then say what a million examples cost.",
        at_least=0)
    profile_steps: Tuple[int, ...] = setting(OF_PROCESS, (),
        "First and last step of a timeline for Chrome, and of the operators' shares in "
        "report.html.", tasks=("train",), at_least=1, wanted="two steps such as 100,120")
    save_checkpoints_steps: int = setting(OF_PROCESS, 0,
        "Steps between two checkpoints; 0: --save_checkpoints_secs decides.", at_least=0)
    save_checkpoints_secs: int = setting(OF_PROCESS, 600,
        "Seconds between two checkpoints: what a machine that dies can cost.", at_least=1)
    keep_checkpoint_max: int = setting(OF_PROCESS, 5,
        "Number of newest checkpoints to keep; 0 keeps all.", at_least=0)
    eval_every_steps: int = setting(ALIKE, 0,
        "Steps between two evaluations; 0: after each epoch and at the end.", at_least=0)
    learning_rate_decay_on_plateau: float = setting(CHANGES, 1.0,
        "Multiply the learning rate by this after --learning_rate_decay_patience evaluations in a "
        "row that do not improve --learning_rate_decay_metric; 1 never does.",
        at_least=0, at_most=1)
    learning_rate_decay_patience: int = setting(CHANGES, 1,
        "Evaluations in a row without improvement before the learning rate decays.", at_least=1)
    min_learning_rate: float = setting(CHANGES, 0.0,
        "--learning_rate_decay_on_plateau does not lower --learning_rate below this.", at_least=0)
    learning_rate_decay_metric: str = setting(CHANGES, "auc",
        "Metric that --learning_rate_decay_on_plateau goes by.", choices=METRICS)
    min_improvement: float = setting(CHANGES, 0.0,
        "An evaluation improves a metric only by more than this. Raise it, for example to 0.0001, "
        "to stop or decay the learning rate when the gains become small.", at_least=0)
    reset_embeddings_each_epoch: bool = setting(CHANGES, False,
        "Start the embedding tables and what the optimizer keeps for them anew in each epoch after "
        "the first; the MLP goes on (MEDA). Use it if the second epoch overfits.")
    export: str = setting(OF_PROCESS, "last",
        "Which model to export to --servable_model_dir at the end: that of the last step, the best "
        "by --best_metric, or auto: the best with --val_data_dir, else the last.",
        choices=("last", "best", "auto"))
    best_metric: str = setting(ALIKE, "auc",
        "Metric that the best checkpoint, --export=best and --early_stopping_patience go by.",
        choices=METRICS)
    gauc_field: Optional[str] = setting(ALIKE, None,
        "Field, by its column's name or its number from 0 to F - 1, by whose values evaluations "
        "compute GAUC: the AUC within each feature id of it, weighted by its examples. Give the "
        "field of users. Default: none.", tasks=("train", "eval"))
    slice_fields: Tuple[str, ...] = setting(ALIKE, (),
        "Fields, a comma list of names or numbers as for --gauc_field, for whose 20 most frequent "
        "feature ids evaluations report AUC, log loss and calibration. Default: none.",
        tasks=("train", "eval"))
    item_fields: Tuple[str, ...] = setting(OF_PROCESS, (),
        "Columns of the items, names or numbers as for --gauc_field, a comma list or JSON. Exports "
        "then have the signature candidates, which takes these for each item, and all others, "
        "those of the user, once. Default: none.", tasks=("train", "export"))
    importance_repeats: int = setting(OF_PROCESS, 1,
        "How often importance permutes each field, each time anew; the mean counts.",
        at_least=1, at_most=1000, tasks=("importance",))
    early_stopping_patience: int = setting(OF_RUN, 0,
        "Stop after this many evaluations in a row without a new best one; 0 never stops early.",
        at_least=0)
    global_batch_size: int = setting(OF_PROCESS, 0,
        "Records per step of all replicas together, divided evenly among them; 0: --batch_size for "
        "each.", at_least=0)
    correct_calibration: bool = setting(ALIKE, False,
        "Correct predictions for training data sampled by label, with the rates in dataset.json. "
        "The correction is kept in model.json.")

    # fmt: on

    @property
    def predictions_path(self):
        """Where infer writes."""
        ending = "txt" if self.predictions_format == "plain" else self.predictions_format
        return self.predictions_file or os.path.join(self.model_dir, f"predictions.{ending}")

    @property
    def batch_of_process(self):
        """Records per step of this process's replicas together."""
        return self.input.batch_size * self.distribution.replicas_per_process

    @property
    def global_batch(self):
        """Records per step of all replicas together."""
        return self.input.batch_size * self.distribution.replicas_in_step


class Share(NamedTuple):
    """Which of the records that a process can see it reads: part `index` of `of` parts."""

    of: int = 1
    index: int = 0


class Position(NamedTuple):
    """Where a run is when a training goes on with it.

    Attributes:
        epoch: number of the epoch, from 0.
        step: batches of that epoch that this process has already used; batches of all epochs if
            the rows are unknown.
        rows_of_processes: the records that each process reads in an epoch, by rank; None if
            unknown.
        by_rows: whether files are grouped by their rows; False if these were unknown when the run
            began.
        global_step: the step from which training continues.
        run_step: the global step at which the run began.
    """

    epoch: int = 0
    step: int = 0
    rows_of_processes: Optional[Tuple[int, ...]] = None
    by_rows: bool = True
    global_step: int = 0
    run_step: int = 0

    def used(self, size: int, rank: int) -> int:
        """Records of the epoch that a process has used, `size` per step; 0 if unknown."""
        return min(self.step * size, self.rows_of_processes[rank]) if self.rows_of_processes else 0
