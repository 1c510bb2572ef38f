"""Starts a SageMaker job: training, tuning, or converting data on many hosts or on Spark.

    .venv-sagemaker/bin/python scripts/launch_sagemaker.py --train_s3_uri=s3://bucket/train \\
        --eval_s3_uri=s3://bucket/val --role=SageMakerRole -- --num_epochs=2 --batch_size=4096
    .venv-sagemaker/bin/python scripts/launch_sagemaker.py --job=processing --instance_count=4 \\
        --input_s3_uri=s3://bucket/raw --output_path=s3://bucket/train --role=SageMakerRole -- \\
        --num_workers=16

docs/sagemaker.md has commands for Horovod, Pipe mode, spot instances, tuning and Spark.

The flags after `--` are train.py's (the job's hyperparameters) or the converter's; for Spark, the
words of data_tools.on_spark. They are checked before anything is uploaded. --dry_run prints the
request that would start the job, as JSON, and sends nothing.

Needs absl and version 2 of SageMaker's SDK, but not TensorFlow.
"""

import re

import programs  # first
from programs import BadInput, fail, program

# isort: split
import processing_jobs
import training_jobs
from absl import flags

FLAGS = flags.FLAGS
# fmt: off
flags.DEFINE_enum("job", "training", ["training", "tuning", "processing", "spark"],
    "Train a model; train many to find the best flags; convert data on many hosts, each its share; "
    "or run data_tools.on_spark.")
flags.DEFINE_bool("dry_run", False, "Print the request as JSON; send and upload nothing.")
flags.DEFINE_string("role", None, "IAM role of the job, a name or ARN. Default: the notebook's.")
flags.DEFINE_string("region", None,
    "AWS region. Default: the AWS configuration's; with --dry_run, if there is none, us-east-1.")
flags.DEFINE_string("instance_type", None,
    "Type of the hosts. Default: ml.p3.8xlarge with Horovod, ml.m5.4xlarge with Spark, else "
    "ml.c5.4xlarge.")
flags.DEFINE_integer("instance_count", None,
    "Number of hosts. Default: 2 with ps, else 1. Several with Spark need --image_uri.", 1)
flags.DEFINE_integer("volume_size", 100, "Disk of each host, in GB; raise it for more data.", 1)
flags.DEFINE_integer("max_run", 86400, "Seconds after which SageMaker ends the job.", 1)
flags.DEFINE_string("image_uri", None,
    "Your own image. Default: SageMaker's, TensorFlow 1.15.2 or Spark 3.3.")
flags.DEFINE_string("base_job_name", "deepfm", "Prefix of the job's name; the time follows.")
flags.DEFINE_string("output_path", None,
    "s3:// folder for the job's output: the model, or converted records. Default: SageMaker's own.")
flags.DEFINE_list("tags", [], "Tags of the job: KEY=VALUE,KEY=VALUE.")
flags.DEFINE_bool("wait", True, "Show the job's log until it ends; --nowait returns at once.")

# Training.
flags.DEFINE_enum("distribution", "ps", ["ps", "horovod", "none"],
    "How to distribute training: parameter servers, Horovod, or none (one host).")
flags.DEFINE_enum("input_mode", "File", ["File", "FastFile", "Pipe"],
    "File copies the data to the hosts first; FastFile streams the files that are opened, and Pipe "
    "all records, for data larger than their disks.")
flags.DEFINE_integer("processes_per_host", None, "Horovod ranks per host. Default: its GPUs.", 1)
flags.DEFINE_list("train_s3_uri", [],
    "s3:// records to train on. With Pipe also a comma list, one for each process of a host.")
flags.DEFINE_string("eval_s3_uri", None, "s3:// records to evaluate on. Default: no evaluation.")
flags.DEFINE_bool("s3_shard", False, "Give each host its own part of the training files, not all.")
flags.DEFINE_string("model_dir", None,
    "Where checkpoints go: s3://, a folder of the host, or none (train.py's default). Default: "
    "/opt/ml/checkpoints with --checkpoint_s3_uri, else a folder of the job on s3:// (Horovod: "
    "/opt/ml/model).")
flags.DEFINE_bool("spot", False, "Train on spot instances: cheaper, but AWS may interrupt them.")
flags.DEFINE_integer("max_wait", None,
    "Seconds that a --spot job may take, waits included; at least max_run. Default: 2 * max_run.")
flags.DEFINE_string("checkpoint_s3_uri", None, "s3:// folder that mirrors /opt/ml/checkpoints.")
flags.DEFINE_string("mpi_options", "", "More mpirun options, e.g. '-x HOROVOD_TIMELINE=t.json'.")

# Tuning.
flags.DEFINE_multi_string("tune", [],
    "A flag of train.py to tune, once for each: NAME=LOWEST..HIGHEST, with :log at its end to try "
    "small values as often as large ones, or NAME=VALUE|VALUE.")
flags.DEFINE_enum("objective", "eval:auc", ["eval:auc", "eval:gauc", "eval:log_loss", "train:loss"],
    "The metric that tells which training is best.")
flags.DEFINE_integer("max_jobs", 10, "Trainings of a tuning job.", 1)
flags.DEFINE_integer("max_parallel_jobs", 2, "How many of them at a time.", 1)

# Processing.
flags.DEFINE_enum("tool", "libsvm_to_tfrecord",
    ["libsvm_to_tfrecord", "prepare", "prepare_criteo", "rebalance"],
    "The program in data_tools; prepare_criteo is the former name of prepare.")
flags.DEFINE_string("input_s3_uri", None,
    "s3:// files to convert; each host gets some of them, Spark's gets all.")
# fmt: on

_OF_TRAINING = (
    "distribution", "input_mode", "processes_per_host", "train_s3_uri", "eval_s3_uri", "s3_shard",
    "model_dir", "mpi_options",
)  # fmt: skip
_OF_JOB = {
    "training": (*_OF_TRAINING, "spot", "max_wait", "checkpoint_s3_uri"),
    "tuning": (*_OF_TRAINING, "tune", "objective", "max_jobs", "max_parallel_jobs"),
    "processing": ("tool", "input_s3_uri"),
    "spark": ("input_s3_uri",),
}  # fmt: skip
_START = {
    "training": training_jobs.start,
    "tuning": training_jobs.start,
    "processing": processing_jobs.start,
    "spark": processing_jobs.start_on_spark,
}


def main(argv):
    try:
        _check_flags()
        _START[FLAGS.job](argv[1:])
    except KeyboardInterrupt:
        fail("interrupted; a job that has started goes on until you stop it in the console.", 130)


def _check_flags():
    for name in sorted(set().union(*_OF_JOB.values()) - set(_OF_JOB[FLAGS.job])):
        if FLAGS[name].present:
            jobs = " or ".join(f"--job={job}" for job in _OF_JOB if name in _OF_JOB[job])
            raise BadInput(f"--{name} needs {jobs}; add that, or leave --{name} out.")
    if "input_s3_uri" in _OF_JOB[FLAGS.job] and not FLAGS.input_s3_uri:
        raise BadInput("--input_s3_uri is missing; try --input_s3_uri=s3://bucket/raw.")
    for name in ("train_s3_uri", "eval_s3_uri", "input_s3_uri", "output_path", "checkpoint_s3_uri"):
        value = FLAGS[name].value or []
        for uri in value if isinstance(value, list) else [value]:
            if not uri.startswith("s3://"):
                raise BadInput(f"--{name}={uri} is not on S3; try --{name}=s3://bucket/folder.")
    type_ = FLAGS.instance_type or "ml.c5.4xlarge"
    if not re.fullmatch(r"ml\.[a-z]+[0-9][a-z0-9-]*\.(medium|large|[0-9]*xlarge)", type_):
        raise BadInput(f"--instance_type={type_} is not a SageMaker type; try ml.c5.4xlarge.")
    if not all(re.fullmatch(r"[\w .:/+@-]+=[\w .:/=+@-]*", tag) for tag in FLAGS.tags):
        raise BadInput(
            f"--tags={','.join(FLAGS.tags)}: give KEY=VALUE of letters, digits, blanks and "
            "_.:/=+-@, e.g. --tags=team=ads."
        )
    if not re.fullmatch("[a-zA-Z0-9](-*[a-zA-Z0-9])*", FLAGS.base_job_name):
        raise BadInput(
            f"--base_job_name={FLAGS.base_job_name} must be letters and digits, with hyphens only "
            "between them; try --base_job_name=deepfm."
        )


if __name__ == "__main__":
    programs.run_program(main, program.read_flags_before_words)
