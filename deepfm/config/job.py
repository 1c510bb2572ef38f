"""What a job is asked to do."""

from typing import Any, Dict, NamedTuple, Optional, Tuple

from deepfm.config.input import InputConfig
from deepfm.config.optimizer import OptimizerConfig
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
        "The job: train (and evaluate), eval, infer (write predictions) or export (write a "
        "SavedModel).", choices=("train", "eval", "infer", "export"))
    model_dir: Optional[str] = setting(OF_PROCESS, None,
        "Folder of checkpoints, summaries and report.json; local or s3://. The same command again "
        "resumes the model it holds.", alias="checkpoint_dir")
    servable_model_dir: Optional[str] = setting(OF_PROCESS, None,
        "Folder for the exported SavedModels, each in a numbered folder of its own, as TensorFlow "
        "Serving expects.", tasks=("train", "export"))
    predictions_file: Optional[str] = setting(OF_PROCESS, None,
        "Where infer writes one probability per line, in the order of the records. Default: "
        "predictions.txt in model_dir.", tasks=("infer",))
    checkpoint: str = setting(OF_PROCESS, "last",
        "Which checkpoint eval, infer and export use: last; best, which training keeps in "
        "model_dir/best by --best_metric; auto, the best one if it is of the present run, else the "
        "last; or a path such as model/model.ckpt-1200.", tasks=("eval", "infer", "export"))
    clear_existing_model: bool = setting(OF_PROCESS, False,
        "Delete the model in model_dir and train from scratch. Files that train.py did not write "
        "stay.", tasks=("train",))
    abandon_interrupted_run: bool = setting(OF_PROCESS, False,
        "Give up the interrupted run in model_dir and start a new run from its weights. Needed to "
        "train on other data than that run used.", tasks=("train",))
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
    gauc_field: Optional[int] = setting(ALIKE, None,
        "Field, from 0 to F - 1, by whose values evaluations compute GAUC: the AUC within each "
        "feature id of it, weighted by its examples. Give the field of users. Default: none.",
        at_least=0, tasks=("train", "eval"))
    slice_fields: Tuple[int, ...] = setting(ALIKE, (),
        "Fields, a comma list of numbers from 0 to F - 1, for whose 20 most frequent feature ids "
        "evaluations report AUC, log loss and calibration. Default: none.",
        tasks=("train", "eval"), at_least=0, wanted="a list of fields such as 0,3")
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
    def batch_of_process(self):
        """Records per step of this process's replicas together."""
        return self.input.batch_size * self.distribution.replicas_per_process

    @property
    def global_batch(self):
        """Records per step of all replicas together."""
        return self.input.batch_size * self.distribution.replicas_in_step
