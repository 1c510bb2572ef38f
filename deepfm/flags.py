"""Every flag of train.py. `python train.py --help` lists them with these words.

Names that the article's code has are kept, so that its launch notebooks keep working.
"""

import json
import math
import os

from absl import flags

from deepfm.config import CHOICES
from deepfm.distribution import CROSS_DEVICE_OPS, MODES

FLAGS = flags.FLAGS


class _WholeNumber(flags.IntegerParser):
    """An integer, also written 3.0, as hyperparameter tuning passes it."""

    def convert(self, argument):
        if isinstance(argument, str) and argument.endswith(".0"):
            argument = argument[:-2]
        return super().convert(argument)


def _integer(name, default, text, lower=None, upper=None):
    parser = _WholeNumber(lower, upper)
    flags.DEFINE(parser, name, default, text, serializer=flags.ArgumentSerializer())


class _Finite(flags.FloatParser):
    """A number; nan and inf are none."""

    def convert(self, argument):
        number = super().convert(argument)
        if not math.isfinite(number):
            raise ValueError(f"{argument!r} is not a finite number")
        return number


def _float(name, default, text, lower=None, upper=None):
    parser = _Finite(lower, upper)
    flags.DEFINE(parser, name, default, text, serializer=flags.ArgumentSerializer())


class _Numbers(flags.ArgumentParser):
    """A comma list of numbers of one type, as a tuple."""

    syntactic_help = "a comma separated list of numbers"

    def __init__(self, convert, check, wanted):
        self._convert, self._check, self._wanted = convert, check, wanted

    def parse(self, argument):
        if isinstance(argument, tuple):
            return argument
        try:
            numbers = tuple(self._convert(x) for x in str(argument).split(",") if x.strip())
        except ValueError as error:
            raise ValueError(f"{argument!r} is not {self._wanted}") from error
        if not numbers or not all(self._check(x) for x in numbers):
            raise ValueError(f"{argument!r} is not {self._wanted}")
        return numbers


def _choice(name, default, text):
    flags.DEFINE_enum(name, default, CHOICES[name], text)


def _numbers(name, default, text, convert, check, wanted):
    parser = _Numbers(convert, check, wanted)
    flags.DEFINE(parser, name, default, text, serializer=flags.ArgumentSerializer())


class _Names(flags.ArgumentParser):
    """A comma list of names, or a JSON list as in SM_HOSTS, as a tuple."""

    def parse(self, argument):
        if isinstance(argument, tuple):
            return argument
        if argument.startswith("["):
            return tuple(map(str, json.loads(argument)))
        return tuple(name.strip() for name in argument.split(",") if name.strip())


class _OptimizerName(flags.EnumParser):
    """An optimizer's name in any case; GD is the article's name of sgd."""

    def parse(self, argument):
        name = argument.lower()
        return super().parse({"gd": "sgd"}.get(name, name))


# Job
_choice("task_type", "train", "What to do.")
flags.DEFINE_string("model_dir", None, "Where checkpoints, summaries and report.json are kept.")
flags.DEFINE_alias("checkpoint_dir", "model_dir")
flags.DEFINE_string("servable_model_dir", None, "Where the model is exported to for serving.")
flags.DEFINE_bool(
    "clear_existing_model",
    False,
    "Delete the model in model_dir before training; files that train.py has not written stay.",
)
flags.DEFINE_bool(
    "abandon_interrupted_run",
    False,
    "Where the run in model_dir was interrupted and these are other data, give it up: begin a new "
    "run on these data with the weights so far.",
)
flags.DEFINE_string(
    "predictions_file", None, "Output of infer; default: predictions.txt in model_dir."
)
_integer(
    "seed",
    1,
    "Of the initial weights, the order of records and dropout.",
    0,
    (1 << 32) - 1,  # the largest that numpy takes, and the model's ops 1,000 times that
)

# Data
_DATA = "A directory, a glob, or a comma list of these; local or s3://."
flags.DEFINE_string("training_data_dir", None, f"Records to train on. {_DATA}")
flags.DEFINE_string("val_data_dir", None, f"Records to evaluate on. {_DATA}")
flags.DEFINE_string("infer_data_dir", None, f"Records to predict for. {_DATA}")
_choice("data_format", "auto", "auto: by file names and contents.")
_integer(
    "feature_size",
    None,
    "Rows of the embedding table: ids are below it. Default: from dataset.json, or the checkpoint.",
    1,
)
_integer(
    "field_size",
    None,
    "Fields of a record. Default: from dataset.json, the checkpoint, or the first record.",
    1,
)
flags.DEFINE_bool(
    "multi_valued",
    None,
    "Fields of a record may hold several values, or none (its feature `counts` tells). Default: "
    "from dataset.json, the checkpoint, or the first record.",
)
_integer("shuffle_buffer", 100000, "Records among which the next one is drawn; 0: in order.", 0)
flags.DEFINE_string("cache", "none", "none, memory, or the path of a cache file.")
_integer("num_parallel_reads", 4, "Files that are read at the same time.", 1, 1024)
_integer("read_buffer_bytes", 8 << 20, "Read buffer of each file, bytes.", 1)
_integer("max_bad_records", 0, "Unreadable records that training may pass over.", 0)

flags.DEFINE_bool("perform_shuffle", True, "False: in order, as with --shuffle_buffer=0.")

# SageMaker; the defaults come from its SM_* variables, where these are set
flags.DEFINE_bool(
    "pipe_mode", False, "Channels are FIFOs (input mode Pipe). Default: as the job's channels are."
)
flags.DEFINE_string(
    "training_channel_name",
    "training",
    "Channel to train on; in Pipe mode of a host's first process, the others read NAME-1, NAME-2 "
    "and so on.",
)
flags.DEFINE_string("evaluation_channel_name", "evaluation", "Channel to evaluate on.")
flags.DEFINE_bool(
    "enable_s3_shard",
    None,
    "Each host has its own part of the training channels (ShardedByS3Key). Default: as the "
    "channel's configuration says.",
)
flags.DEFINE_bool(
    "enable_data_multi_path", False, "The training channels of a host hold different records."
)
_integer("worker_per_host", 0, "Processes on each host, checked; 0: as many as there are.", 0)
flags.DEFINE(_Names(), "hosts", (), "All hosts of the job.", serializer=flags.ArgumentSerializer())
flags.DEFINE_string("current_host", None, "This host.")
flags.DEFINE_string("input_dir", "/opt/ml/input", "The folder of the channels' config/ and data/.")
_integer("num_cpus", 0, "CPU cores that the processes of this host may use; 0: all it gives.", 0)
_integer("num_gpus", 0, "GPUs that TensorFlow has to see on this host; with fewer it refuses.", 0)

# Model
_integer("embedding_size", 32, "K, the width of an embedding.", 1)
_numbers(
    "deep_layers",
    "256,128,64",
    "Width of each hidden layer.",
    int,
    lambda x: x > 0,
    "a list of layer widths such as 256,128,64",
)
_numbers(
    "dropout",
    "0.5",
    "The rate at which units are dropped (NOT a keep probability); one, or one per layer.",
    float,
    lambda x: 0 <= x < 1,
    "a rate of at least 0 and below 1, or one for each hidden layer",
)
flags.DEFINE_bool(
    "batch_norm", False, "Normalise each hidden layer over the global batch, before its ReLU."
)
_float("batch_norm_decay", 0.9, "Decay of batch norm's moving averages.", 0.0, 1.0)
_choice("loss_type", "log_loss", "The loss.")
_float("l2_reg", 0.0001, "Lambda of the L2 term, lambda/2 * sum of squares.", 0.0)
_choice(
    "l2_scope",
    "batch",
    "Table rows that L2 covers: each distinct row of the global batch, once per step; or all.",
)
_float("embedding_init_stddev", 0.01, "Of the initial embeddings.", 0.0)
_choice(
    "pooling",
    "sum",
    "What becomes of a field's values where it holds several: their embeddings, each scaled by its "
    "value, are added up, averaged, or of each element the largest is taken.",
)
flags.DEFINE_bool(
    "correct_calibration",
    False,
    "Correct predicted probabilities for the sampling by label of the training data, whose rates "
    "dataset.json records; model.json keeps the correction.",
)

# Optimizer
flags.DEFINE(
    _OptimizerName(CHOICES["optimizer"]),
    "optimizer",
    "adam",
    "The optimizer, in any case; GD is sgd.",
    serializer=flags.ArgumentSerializer(),
)
_float("learning_rate", 0.001, "The learning rate.", 0.0)
_float("learning_rate_scale", 1.0, "Multiplies learning_rate.", 0.0)
flags.DEFINE_bool("lazy_updates", True, "Update only the embedding rows of the batch.")
_float("clip_norm", 0.0, "Largest global norm of the gradients; 0: not clipped.", 0.0)
_float(
    "learning_rate_decay_on_plateau",
    1.0,
    "Multiplies the learning rate after an evaluation whose AUC is no better; 1: never.",
    0.0,
    1.0,
)
flags.DEFINE_bool(
    "use_amp", False, "Mixed precision on GPUs with tensor cores: float16 where it is safe."
)
flags.DEFINE_bool(
    "compiled_kernels",
    True,
    "Use the kernels that scripts/setup.sh compiles, where they are there.",
)

# Run
flags.DEFINE_enum("distribution", "auto", list(MODES), "How training is distributed.")
_integer(
    "replicas_per_process",
    0,
    "Devices of a process in tower, mirrored and ps; 0: all GPUs, else CPU cores - 1 (ps: one).",
    0,
)
flags.DEFINE_enum(
    "cross_device_ops",
    "reduction_to_one_device",
    CROSS_DEVICE_OPS,
    "How mirrored adds up the gradients of its devices; nccl: GPUs only.",
)
_integer("batch_size", 1024, "Records in a batch of each replica.", 1)
_integer(
    "global_batch_size",
    0,
    "Records in a batch of all replicas together, in place of batch_size.",
    0,
)
_integer("num_epochs", 1, "Times that each record is trained on, from the beginning of the run.", 1)
_integer("max_steps", 0, "Stop at this global step; 0: after num_epochs.", 0)
_integer("intra_op_threads", 0, "Threads inside one operator; 0: half the cores.", 0, 1024)
_integer("inter_op_threads", 0, "Operators side by side; 0: the number of cores.", 0, 1024)
_integer(
    "omp_num_threads", 0, "Of OpenMP, in TensorFlow builds with MKL; 0: its own choice.", 0, 1024
)
flags.DEFINE_string(
    "kmp_affinity",
    None,
    "How OpenMP binds threads, in TensorFlow builds with MKL: granularity=fine,compact,1,0, or "
    "disabled, or the like. Default: its own choice.",
)
_integer("log_steps", 100, "Steps between progress lines and between summaries.", 1)
_integer("save_checkpoints_steps", 0, "Steps between checkpoints; 0: by seconds.", 0)
_integer("save_checkpoints_secs", 600, "Seconds between checkpoints.", 1)
_integer("keep_checkpoint_max", 5, "Newest checkpoints that are kept; 0: all.", 0)
flags.DEFINE_bool(
    "eval_on_all_ranks",
    False,
    "Let every Horovod rank evaluate all records, in place of its share of them.",
)
_choice(
    "export",
    "last",
    "Which model training exports to servable_model_dir: that of the last step, or the best "
    "evaluated one by best_metric, as soon as it is there.",
)
_choice("best_metric", "auc", "What export=best and early stopping go by.")
_integer(
    "early_stopping_patience",
    0,
    "Stop after this many evaluations in a row that were not better than the best; 0: never.",
    0,
)
_integer("eval_every_steps", 0, "Steps between evaluations; 0: once per epoch and at the end.", 0)


def take_defaults_from(environment):
    """Sets the flags that were not given from SageMaker's SM_* variables.

    Args:
        environment: {name: value}, as os.environ.
    """

    def default(flag, value):
        # Another name of a flag sets its value and nothing else.
        given = not FLAGS[flag].using_default_value or FLAGS[flag].value != FLAGS[flag].default
        if value and not given:
            FLAGS[flag].parse(value)

    default("hosts", environment.get("SM_HOSTS"))
    default("current_host", environment.get("SM_CURRENT_HOST"))
    default("input_dir", environment.get("SM_INPUT_DIR"))
    default("num_cpus", environment.get("SM_NUM_CPUS"))
    default("num_gpus", environment.get("SM_NUM_GPUS"))
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
    """{name: value} of the flags that are not at their defaults."""
    ours = {flag.name: flag for flag in FLAGS.get_key_flags_for_module(__name__)}
    del ours["checkpoint_dir"]  # model_dir by another name
    return {name: flag.value for name, flag in ours.items() if flag.value != flag.default}
