"""Every flag of train.py. `python train.py --help` lists them with these words.

Flags that the article's code has keep their names, so that its launch notebooks keep working.
"""

import contextlib
import json
import math
import os

from absl import flags

from deepfm.config import CHOICES
from deepfm.distribution import CROSS_DEVICE_OPS, MODES

FLAGS = flags.FLAGS


def _define(parser, name, default, text):
    flags.DEFINE(parser, name, default, text, serializer=flags.ArgumentSerializer())


class _WholeNumber(flags.IntegerParser):
    """An integer, also written 3.0, as hyperparameter tuning passes it."""

    def convert(self, argument):
        if isinstance(argument, str) and argument.endswith(".0"):
            argument = argument[:-2]
        with contextlib.suppress(ValueError):
            return super().convert(argument)
        raise ValueError(f"{argument!r} is not a whole number")


def _integer(name, default, text, lower=None, upper=None):
    _define(_WholeNumber(lower, upper), name, default, text)


class _Finite(flags.FloatParser):
    """A number other than nan and inf."""

    def convert(self, argument):
        number = super().convert(argument)
        if not math.isfinite(number):
            raise ValueError(f"{argument!r} is not a finite number")
        return number


def _float(name, default, text, lower=None, upper=None):
    _define(_Finite(lower, upper), name, default, text)


class _Numbers(flags.ArgumentParser):
    """A comma list of numbers of one type, as a tuple."""

    syntactic_help = "a comma separated list of numbers"

    def __init__(self, convert, check, wanted):
        self._convert, self._check, self._wanted = convert, check, wanted

    def parse(self, argument):
        if isinstance(argument, tuple):
            return argument
        with contextlib.suppress(ValueError):
            numbers = tuple(self._convert(x) for x in str(argument).split(",") if x.strip())
            if numbers and all(map(self._check, numbers)):
                return numbers
        raise ValueError(f"{argument!r} is not {self._wanted}")


def _choice(name, default, text):
    flags.DEFINE_enum(name, default, CHOICES[name], text)


class _Names(flags.ArgumentParser):
    """A comma list of names, or a JSON list as in SM_HOSTS, as a tuple."""

    def parse(self, argument):
        if isinstance(argument, tuple):
            return argument
        if argument.startswith("["):
            return tuple(map(str, json.loads(argument)))
        return tuple(name.strip() for name in argument.split(",") if name.strip())


class _Name(flags.EnumParser):
    """One of some names, in any case, or what the article's scripts call it."""

    def parse(self, argument):
        name = argument.lower()
        theirs = {"gd": "sgd", "0": "auto", "1": "ps", "2": "ps", "3": "horovod"}
        return super().parse(theirs.get(name, name))


# A flag in two or three lines:
# fmt: off

# Job
_choice("task_type", "train",
    "The job: train (and evaluate), eval, infer (write predictions) or export (write a "
    "SavedModel).")
flags.DEFINE_string("model_dir", None,
    "Folder of checkpoints, summaries and report.json; local or s3://. The same command again "
    "resumes the model it holds.")
flags.DEFINE_string("servable_model_dir", None,
    "Folder for the exported SavedModels, each in a numbered folder of its own, as TensorFlow "
    "Serving expects.")
flags.DEFINE_string("checkpoint", "last",
    "Which checkpoint eval, infer and export use: last; best, which training keeps in "
    "model_dir/best by --best_metric; auto, the best one if it is of the present run, else the "
    "last; or a path such as model/model.ckpt-1200.")
flags.DEFINE_bool("clear_existing_model", False,
    "Delete the model in model_dir and train from scratch. Files that train.py did not write "
    "stay.")
flags.DEFINE_bool("abandon_interrupted_run", False,
    "Give up the interrupted run in model_dir and start a new run from its weights. Needed to "
    "train on other data than that run used.")
flags.DEFINE_string("predictions_file", None,
    "Where infer writes one probability per line, in the order of the records. Default: "
    "predictions.txt in model_dir.")
_integer("seed", 1,
    "Seed of the initial weights, the order of the records and dropout. The same seed and data "
    "give the same model.", 0, (1 << 32) - 1)

# Data
_DATA = "A directory, a glob, or a comma list of these; local or s3://."
flags.DEFINE_string("training_data_dir", None, f"Records to train on. {_DATA}")
flags.DEFINE_string("val_data_dir", None,
    f"Records to evaluate on, during training and in eval. {_DATA}")
flags.DEFINE_string("infer_data_dir", None,
    f"Records to predict. Default: those of --val_data_dir. {_DATA}")
_choice("data_format", "auto", "Format of the records; auto goes by file names and contents.")
_integer("feature_size", None,
    "Rows of the embedding tables; every feature id must be smaller. Default: from dataset.json or"
    " the checkpoint.", 1)
_integer("field_size", None,
    "Number of fields F of each record. Default: from dataset.json, the checkpoint or the first "
    "record.", 1)
flags.DEFINE_bool("multi_valued", None,
    "A field may have any number of values, as the feature `counts` says. Default: from "
    "dataset.json, the checkpoint or the first record.")
flags.DEFINE_bool("example_weights", None,
    "Weigh each example as its record says (feature `weight`; LibSVM: label:weight). False: ignore "
    "weights. Default: as dataset.json or the first record says; Pipe mode needs the flag.")
_integer("shuffle_buffer", 100000,
    "Records from which the next one is drawn at random; 0 keeps their order. Raise it if "
    "neighbouring records are alike.", 0)
flags.DEFINE_string("cache", "none",
    "Where to keep the records after the first epoch: none, memory, or the path of a cache file. "
    "Worth it where reading is slow, as from S3; files of this host gain nothing.")
_integer("num_parallel_reads", 4,
    "Files read at the same time. Raise it if the log says that training waits for input.", 1, 1024)
_integer("num_parsers", 0,
    "Batches parsed at the same time; 0: half the cores of a process, at least 1.", 0, 1024)
_integer("prefetch_batches", 0,
    "Parsed batches that wait for a step; 0: twice as many as parsers, at least 4.", 0, 1 << 20)
_integer("read_buffer_bytes", 8 << 20,
    "Bytes of the read buffer of each file. Raise it for slow disks and S3.", 1)
_integer("max_bad_records", 0,
    "Training skips up to this many unreadable records and lists them in report.json; one more "
    "ends it.", 0)

flags.DEFINE_bool("perform_shuffle", True,
    "Shuffle the training records; False is the same as --shuffle_buffer=0.")

# SageMaker; the defaults come from its SM_* variables, where these are set
flags.DEFINE_bool("pipe_mode", False,
    "Read SageMaker's channels as FIFOs (input mode Pipe). Default: as the job's channels are "
    "configured.")
flags.DEFINE_string("training_channel_name", "training",
    "SageMaker channel to train on. In Pipe mode the other processes of a host read NAME-1, NAME-2"
    " and so on.")
flags.DEFINE_string("evaluation_channel_name", "evaluation", "SageMaker channel to evaluate on.")
flags.DEFINE_bool("enable_s3_shard", None,
    "Each host has its own part of the training channels (ShardedByS3Key). Default: as the job's "
    "channels are configured.")
flags.DEFINE_bool("enable_data_multi_path", False,
    "The training channels NAME, NAME-1 and so on of a host hold different records, one channel "
    "per process.")
_integer("worker_per_host", 0,
    "Expected number of processes on each host; training refuses to start with another number. 0 "
    "accepts any.", 0)
_define(_Names(), "hosts", (),
    "Names of all hosts of the job: a comma list, or a JSON list as in SM_HOSTS.")
flags.DEFINE_string("current_host", None, "Name of this host, one of --hosts.")
flags.DEFINE_string("input_dir", "/opt/ml/input",
    "Folder with config/ and data/ of SageMaker's channels.")
_integer("num_cpus", 0, "CPU cores for the processes of this host; 0: all that the host grants.", 0)
_integer("num_gpus", 0,
    "Number of GPUs that TensorFlow must find on this host; with fewer, training refuses to start."
    " 0 does not check.", 0)

# Model
_integer("embedding_size", 32,
    "Width K of each embedding. Larger models fit more and cost more, in proportion.", 1)
_WIDTHS = "a list of layer widths such as 256,128,64"
_define(_Numbers(int, lambda x: x > 0, _WIDTHS), "deep_layers", "256,128,64",
    "Widths of the hidden layers of the MLP, a comma list.")
_RATES = "a rate of at least 0 and below 1, or one for each hidden layer"
_define(_Numbers(float, lambda x: 0 <= x < 1, _RATES), "dropout", "0.5",
    "Rate at which units of the hidden layers are dropped (NOT a keep probability), in [0, 1): one"
    " for all layers, or a comma list.")
flags.DEFINE_bool("batch_norm", False,
    "Apply batch normalisation to each hidden layer before its ReLU, over the global batch.")
_float("batch_norm_decay", 0.9,
    "Decay of batch norm's moving averages, in [0, 1]. Lower it for runs of few steps.", 0.0, 1.0)
_float("batch_norm_epsilon", 0.001,
    "What batch norm adds to the variance before its root. Lower it, as PyTorch does to 0.00001, "
    "where the embeddings start from a small --embedding_init_stddev.", 0.0)
_choice("loss_type", "log_loss", "Loss to minimise; use log_loss for clicks.")
_float("l2_reg", 0.0001,
    "Weight lambda of the L2 penalty, lambda/2 * sum of squares, over the embeddings and the MLP's"
    " kernels. The first thing to tune against overfitting.", 0.0)
_float("l2_reg_deep", None,
    "Weight lambda of the L2 penalty on the MLP's kernels alone. Default: --l2_reg. Lower it, down "
    "to 0, where the embeddings need a --l2_reg of 0.01 and more.", 0.0)
_choice("l2_scope", None,
    "Embedding rows that the L2 penalty covers in a step: batch, the distinct rows of the global "
    "batch; elapsed, the same rows for all steps since each was last in a batch, which does to rare"
    " ids what table does (Adam only); or table, all rows, which costs a pass over the tables. "
    "Default: elapsed with --optimizer=adam and --lazy_updates, else batch.")
_float("embedding_init_stddev", 0.01,
    "Standard deviation of the normal distribution that the embeddings start from.", 0.0)
_choice("pooling", "sum",
    "How a field with several values becomes one embedding: the sum, the mean or the element-wise "
    "maximum of its features' embeddings, each scaled by its value.")
flags.DEFINE_bool("correct_calibration", False,
    "Correct predictions for training data sampled by label, with the rates in dataset.json. The "
    "correction is kept in model.json.")

# Optimizer
_define(_Name(CHOICES["optimizer"]), "optimizer", "adam",
    "Optimizer, in upper or lower case; GD means sgd.")
_float("learning_rate", 0.001,
    "Learning rate, for any number of replicas; it is never scaled silently.", 0.0)
_float("learning_rate_scale", 1.0,
    "Factor for --learning_rate. With 4 ranks, 1.5 helped; their number as factor never did.", 0.0)
_float("embedding_learning_rate", None,
    "Learning rate of the embedding tables, without scale or warm-up. Default: as all other "
    "weights. Keep it where it is when larger batches need a larger --learning_rate.", 0.0)
_integer("learning_rate_warmup_steps", 0,
    "First steps of a run, over which --learning_rate rises linearly to its value; 0: none. Use it "
    "with large batches, for example one epoch.", 0)
flags.DEFINE_bool("lazy_updates", True,
    "Update only the embedding rows that a batch uses; False also applies momentum to all other "
    "rows, which costs a pass over the tables.")
_float("clip_norm", 0.0, "Clip the gradients to this global norm; 0 does not clip.", 0.0)
_float("cowclip_ratio", 0.0,
    "Clip the gradient of each embedding row to this times the row's norm, times the occurrences of"
    " its id in the global batch (CowClip); 0 does not clip. For large batches: try 0.0002 at "
    "16,384, and less at more. Its authors' 1 clips hardly any row.", 0.0)
_float("cowclip_min_norm", 1e-5,
    "With --cowclip_ratio, the least norm to clip to, per occurrence, above 0. Raise it if rows "
    "that start near 0 learn too slowly.", 0.0)
_float("learning_rate_decay_on_plateau", 1.0,
    "Multiply the learning rate by this after --learning_rate_decay_patience evaluations in a row "
    "that do not improve --learning_rate_decay_metric; 1 never does.", 0.0, 1.0)
_integer("learning_rate_decay_patience", 1,
    "Evaluations in a row without improvement before the learning rate decays.", 1)
_choice("learning_rate_decay_metric", "auc",
    "Metric that --learning_rate_decay_on_plateau goes by.")
_float("min_learning_rate", 0.0,
    "--learning_rate_decay_on_plateau does not lower --learning_rate below this.", 0.0)
flags.DEFINE_bool("use_amp", False,
    "Train in mixed precision: float16 where it is safe. Pays where large layers keep a GPU with "
    "tensor cores (capability 7.0 or above) busy; elsewhere it gains nothing.")
flags.DEFINE_bool("compiled_kernels", True,
    "Use the compiled kernels. If they are missing, the job builds them first, in at most 300 s; "
    "without a compiler, and with False, it uses TensorFlow's own operators.")

# Run
_define(_Name(list(MODES)), "distribution", "auto",
    f"How to distribute training: {', '.join(MODES)}; auto chooses ps or horovod if the environment"
    " was set up by their launchers, else local. The numbers of dist_mode: 0 auto, 1 and 2 ps, 3 "
    "horovod.")
_HOSTS = "instead of TF_CONFIG; a comma list of host:port."
_define(_Names(), "ps_hosts", (), f"The parameter servers, {_HOSTS}")
_define(_Names(), "worker_hosts", (), f"The processes that train, the chief first, {_HOSTS}")
flags.DEFINE_string("job_name", None, "What this process is, with --ps_hosts: ps or worker.")
_integer("task_index", 0, "Its number in --ps_hosts or --worker_hosts; worker 0 is the chief.", 0)
_integer("replicas_per_process", 0,
    "Devices that each process uses with tower, mirrored and ps; 0: all GPUs, or else CPU cores - "
    "1 (ps: one).", 0)
flags.DEFINE_enum("cross_device_ops", None, CROSS_DEVICE_OPS,
    "How mirrored adds up the gradients of its devices; nccl needs GPUs. Default: nccl on GPUs, "
    "reduction_to_one_device on CPUs.")
_integer("batch_size", 1024, "Records per batch of each replica.", 1)
_integer("global_batch_size", 0,
    "Records per step of all replicas together, divided evenly among them; 0: --batch_size for "
    "each.", 0)
_integer("num_epochs", 1,
    "How often to train on each record, counted from the start of the run.", 1)
flags.DEFINE_bool("reset_embeddings_each_epoch", False,
    "Start the embedding tables and what the optimizer keeps for them anew in each epoch after the "
    "first; the MLP goes on (MEDA). Use it if the second epoch overfits.")
_integer("max_steps", 0, "Stop at this global step; 0 stops after --num_epochs.", 0)
_integer("intra_op_threads", 0,
    "Threads inside one TensorFlow operator; 0: half the cores.", 0, 1024)
_integer("inter_op_threads", 0,
    "TensorFlow operators that run at the same time; 0: one per core.", 0, 1024)
_integer("num_threads", 0,
    "Sets --intra_op_threads and --inter_op_threads, where these are not given.", 0, 1024)
_integer("omp_num_threads", 0,
    "Threads of OpenMP, for builds of TensorFlow with MKL; 0: OMP_NUM_THREADS of the environment, "
    "or else the cores, divided by the ranks of this host.", 0, 1024)
flags.DEFINE_string("kmp_affinity", None,
    "KMP_AFFINITY of OpenMP, for builds of TensorFlow with MKL, for example "
    "verbose,disabled. Default: disabled, which binds no thread to a core.")
_float("price_per_hour", 0.0,
    "Price of a host for an hour. Report and verdict then say what a million examples cost.", 0.0)
_integer("log_steps", 100, "Steps between two progress lines, and between two summaries.", 1)
_define(_Numbers(int, lambda x: x > 0, "two steps such as 100,120"), "profile_steps", (),
    "First and last step of a timeline for Chrome, and of the operators' shares in report.html.")
flags.register_validator("profile_steps", lambda x: not x or x == (min(x), max(x)),
    "give the first and the last step, such as --profile_steps=100,120.")
_integer("save_checkpoints_steps", 0,
    "Steps between two checkpoints; 0: --save_checkpoints_secs decides.", 0)
_integer("save_checkpoints_secs", 600,
    "Seconds between two checkpoints: what a machine that dies can cost.", 1)
_integer("keep_checkpoint_max", 5, "Number of newest checkpoints to keep; 0 keeps all.", 0)
flags.DEFINE_bool("eval_on_all_ranks", False,
    "Every Horovod rank evaluates all records, instead of its share of them.")
_choice("export", "last",
    "Which model to export to --servable_model_dir: that of the last step, the best so far by "
    "--best_metric, exported at once, or auto: the best with --val_data_dir, else the last.")
_choice("best_metric", "auc",
    "Metric that the best checkpoint, --export=best and --early_stopping_patience go by.")
_float("min_improvement", 0.0,
    "An evaluation improves a metric only by more than this. Raise it, for example to 0.0001, to "
    "stop or decay the learning rate when the gains become small.", 0.0)
_integer("gauc_field", None,
    "Field, from 0 to F - 1, by whose values evaluations compute GAUC: the AUC within each feature "
    "id of it, weighted by its examples. Give the field of users. Default: none.", 0)
_define(_Numbers(int, lambda x: x >= 0, "a list of fields such as 0,3"), "slice_fields", (),
    "Fields, a comma list of numbers from 0 to F - 1, for whose 20 most frequent feature ids "
    "evaluations report AUC, log loss and calibration. Default: none.")
_integer("early_stopping_patience", 0,
    "Stop after this many evaluations in a row without a new best one; 0 never stops early.", 0)
_integer("eval_every_steps", 0,
    "Steps between two evaluations; 0: after each epoch and at the end.", 0)

# What the article's scripts call some flags
_ALIASES = {"checkpoint_dir": "model_dir", "dist_mode": "distribution", "num_CPUs": "num_cpus",
    "num_GPUs": "num_gpus"}
for _alias in _ALIASES.items():
    flags.DEFINE_alias(*_alias)

# fmt: on


def take_defaults_from(environment):
    """Sets the flags that were not given from SageMaker's SM_* variables in `environment`."""

    def default(flag, value):
        if value and not FLAGS[flag].present:
            FLAGS[flag].parse(value)

    for flag in ("hosts", "current_host", "input_dir", "num_cpus", "num_gpus"):
        default(flag, environment.get(f"SM_{flag.upper()}"))
    default("intra_op_threads", FLAGS.num_threads)
    default("inter_op_threads", FLAGS.num_threads)
    default("servable_model_dir", environment.get("SM_MODEL_DIR"))
    output = environment.get("SM_OUTPUT_DATA_DIR")
    default("model_dir", output and os.path.join(output, "model"))
    folder = lambda channel: environment.get(f"SM_CHANNEL_{channel.upper()}")
    training = FLAGS.training_channel_name
    channels = json.loads(environment.get("SM_INPUT_DATA_CONFIG", "{}"))
    default("pipe_mode", channels.get(training, {}).get("TrainingInputMode", "File") == "Pipe")
    folders = [folder(training)]
    if FLAGS.enable_data_multi_path:
        names = json.loads(environment.get("SM_CHANNELS", "[]"))
        others = (c for c in sorted(names) if c.startswith(f"{training}-"))
        folders += [folder(c) for c in others if c[len(training) + 1 :].isdigit()]
    default("training_data_dir", ",".join(filter(None, folders)))
    default("val_data_dir", folder(FLAGS.evaluation_channel_name))


def changed():
    """{name: value} of the flags that differ from their defaults."""
    ours = [f for f in FLAGS.get_key_flags_for_module(__name__) if f.name not in _ALIASES]
    return {flag.name: flag.value for flag in ours if flag.value != flag.default}
