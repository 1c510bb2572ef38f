"""Starts a SageMaker job: training, or the conversion of data on many hosts or on Spark.

    .venv-sagemaker/bin/python scripts/launch_sagemaker.py --train_s3_uri=s3://bucket/train \\
        --eval_s3_uri=s3://bucket/val --role=SageMakerRole -- --num_epochs=2 --batch_size=4096
    .venv-sagemaker/bin/python scripts/launch_sagemaker.py --distribution=horovod \\
        --input_mode=Pipe --train_s3_uri=s3://bucket/train --role=SageMakerRole --dry_run
    .venv-sagemaker/bin/python scripts/launch_sagemaker.py --job=processing --instance_count=4 \\
        --input_s3_uri=s3://bucket/raw --output_path=s3://bucket/train --role=SageMakerRole -- \\
        --num_workers=16
    .venv-sagemaker/bin/python scripts/launch_sagemaker.py --job=spark \\
        --input_s3_uri=s3://bucket/train --output_path=s3://bucket/shuffled --role=SageMakerRole \\
        -- rebalance --num_files=64

The flags after `--` are train.py's (the job's hyperparameters) or the converter's; for Spark, the
words of data_tools.on_spark. They are checked before anything is uploaded. --dry_run prints the
request that would start the job, as JSON, and sends nothing.
"""

import pathlib
import re
import shlex
import sys
import tempfile

import programs  # first
from programs import BadInput, fail, flag_values, program, run_program

# isort: split
import zip_for_spark
from absl import flags, logging
from sagemaker_session import open_session, role_of

FLAGS = flags.FLAGS
# fmt: off
flags.DEFINE_enum("job", "training", ["training", "processing", "spark"],
    "Train a model; convert data on many hosts, each its share; or run data_tools.on_spark.")
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
    "s3:// folder for the job's output: the model, or converted records. Default: the SDK's.")
flags.DEFINE_list("tags", [], "Tags of the job: KEY=VALUE,KEY=VALUE.")
flags.DEFINE_bool("wait", True, "Show the job's log until it ends; --nowait returns at once.")

# Training.
flags.DEFINE_enum("distribution", "ps", ["ps", "horovod", "none"],
    "How to distribute training: parameter servers, Horovod, or none (one host).")
flags.DEFINE_enum("input_mode", "File", ["File", "Pipe"],
    "File copies the data to the hosts first; Pipe streams it, for data larger than their disks.")
flags.DEFINE_integer("processes_per_host", None, "Horovod ranks per host. Default: its GPUs.", 1)
flags.DEFINE_list("train_s3_uri", [],
    "s3:// records to train on. With Pipe also a comma list, one for each process of a host.")
flags.DEFINE_string("eval_s3_uri", None, "s3:// records to evaluate on. Default: no evaluation.")
flags.DEFINE_bool("s3_shard", False, "Give each host its own part of the training files, not all.")
flags.DEFINE_string("model_dir", None,
    "Where checkpoints go: s3://, a folder of the host, or none (train.py's default). Default: "
    "/opt/ml/checkpoints with --checkpoint_s3_uri, else the SDK's (s3://; Horovod: /opt/ml/model).")
flags.DEFINE_bool("spot", False, "Train on spot instances: cheaper, but AWS may interrupt them.")
flags.DEFINE_integer("max_wait", None,
    "Seconds that a --spot job may take, waits included; at least max_run. Default: 2 * max_run.")
flags.DEFINE_string("checkpoint_s3_uri", None, "s3:// folder that mirrors /opt/ml/checkpoints.")
flags.DEFINE_string("mpi_options", "", "More mpirun options, e.g. '-x HOROVOD_TIMELINE=t.json'.")

# Processing.
flags.DEFINE_string("tool", "libsvm_to_tfrecord", "The program in data_tools that converts.")
flags.DEFINE_string("input_s3_uri", None,
    "s3:// files to convert; each host gets some of them, Spark's gets all.")
# fmt: on

_OF_JOB = {
    "training": (
        "distribution", "input_mode", "processes_per_host", "train_s3_uri", "eval_s3_uri",
        "s3_shard", "model_dir", "spot", "max_wait", "checkpoint_s3_uri", "mpi_options",
    ),
    "processing": ("tool", "input_s3_uri"),
    "spark": ("input_s3_uri",),
}  # fmt: skip
PROCESSING_SOURCE = ("data_tools", "deepfm", "scripts/convert_on_sagemaker.sh")
_FRAMEWORK = {"framework_version": "1.15.2", "py_version": "py37"}
_SPARK = "3.3"  # the newest that the SDK knows
# What a job of several hosts on Spark needs, and why.
_OF_SEVERAL = {
    "output_path": ", the s3:// folder that the hosts write to",
    "image_uri": ", an image with Spark and the packages of requirements-spark.txt on every host",
}
_CHECKPOINTS = "/opt/ml/checkpoints"
_PROCESSING = "/opt/ml/processing"
_CHANNELS = 20  # at most, in a job
_GPUS = {
    "ml.p2.8xlarge": 8, "ml.p2.16xlarge": 16, "ml.p3.8xlarge": 4, "ml.p3.16xlarge": 8,
    "ml.p3dn.24xlarge": 8, "ml.g4dn.12xlarge": 4,
}  # fmt: skip
# Values of train.py's --distribution that fit this program's.
_MODES = {
    "ps": ("auto", "ps"),
    "horovod": ("auto", "horovod"),
    "none": ("auto", "local", "tower", "mirrored"),
}
# What SageMaker finds in the log: the progress lines, and the last line of an evaluation.
_METRICS = {
    "train:loss": r"step [0-9]+  loss ([0-9.]+)",
    "train:examples_per_second": r"step [0-9]+  loss [0-9.]+  ([0-9]+) examples/s",
    "eval:auc": r"Evaluation: .* auc=([0-9.]+)",
    "eval:gauc": r"GAUC of field [0-9]+: gauc=([0-9.]+)",
    "eval:log_loss": r"Evaluation: .* log_loss=([0-9.]+)",
    "eval:calibration": r"Evaluation: .* calibration=([0-9.]+)",
}


def main(argv):
    try:
        _check_flags()
        with tempfile.TemporaryDirectory() as folder:
            start = {"training": _train, "processing": _convert, "spark": _run_spark}[FLAGS.job]
            start(argv[1:], pathlib.Path(folder))
    except ValueError as error:  # the SDK's too
        fail(error)
    except KeyboardInterrupt:
        fail("interrupted; a job that has started goes on until you stop it in the console.", 130)


def _check_flags():
    for name in sorted(set().union(*_OF_JOB.values()) - set(_OF_JOB[FLAGS.job])):
        if FLAGS[name].present:
            jobs = " or ".join(f"--job={job}" for job in _OF_JOB if name in _OF_JOB[job])
            raise BadInput(f"--{name} needs {jobs}; add that, or leave --{name} out.")
    if FLAGS.job != "training" and not FLAGS.input_s3_uri:
        raise BadInput("--input_s3_uri is missing; try --input_s3_uri=s3://bucket/raw.")
    for name in ("train_s3_uri", "eval_s3_uri", "input_s3_uri", "output_path", "checkpoint_s3_uri"):
        value = FLAGS[name].value or []
        for uri in value if isinstance(value, list) else [value]:
            if not uri.startswith("s3://"):
                raise BadInput(f"--{name}={uri} is not on S3; try --{name}=s3://bucket/folder.")


def _train(words, folder):
    """Starts a training job; words: the flags of train.py."""
    _check(["train.py"], words)
    given = flag_values(words)
    type_, count, processes = _hosts()
    data = _channels(given, processes)
    if FLAGS.input_mode == "Pipe":
        _check_pipe(given, data)
    added = _added(processes)
    model_dir = _model_dir(given, added)
    _check_spot(given, model_dir)
    programs.copy_source(programs.TRAINING_SOURCE, folder)
    mpi = {
        "enabled": True, "processes_per_host": processes, "custom_mpi_options": FLAGS.mpi_options,
    }  # fmt: skip
    distributions = {"ps": {"parameter_server": {"enabled": True}}, "horovod": {"mpi": mpi}}
    with _session() as session:
        from sagemaker.inputs import TrainingInput
        from sagemaker.tensorflow import TensorFlow

        estimator = TensorFlow(
            entry_point="train.py", source_dir=str(folder), **_FRAMEWORK, image_uri=FLAGS.image_uri,
            role=role_of(session, FLAGS.role), sagemaker_session=session,
            base_job_name=FLAGS.base_job_name, instance_type=type_, instance_count=count,
            volume_size=FLAGS.volume_size, input_mode=FLAGS.input_mode,
            distribution=distributions.get(FLAGS.distribution),
            model_dir=model_dir, output_path=FLAGS.output_path, tags=_tags(),
            hyperparameters={"servable_model_dir": "/opt/ml/model", **added, **given},
            metric_definitions=[{"Name": n, "Regex": r} for n, r in _METRICS.items()],
            max_run=FLAGS.max_run, use_spot_instances=FLAGS.spot,
            max_wait=(FLAGS.max_wait or 2 * FLAGS.max_run) if FLAGS.spot else None,
            checkpoint_s3_uri=FLAGS.checkpoint_s3_uri,
            checkpoint_local_path=FLAGS.checkpoint_s3_uri and _CHECKPOINTS,
            # They would add hooks to training, which has its own.
            debugger_hook_config=False, disable_profiler=True,
        )  # fmt: skip
        how = {"evaluation": "FullyReplicated"}  # else as the flag says
        shard = "ShardedByS3Key" if FLAGS.s3_shard else "FullyReplicated"
        inputs = {n: TrainingInput(uri, distribution=how.get(n, shard)) for n, uri in data.items()}
        estimator.fit(inputs or None, wait=FLAGS.wait and not FLAGS.dry_run)


def _convert(words, folder):
    """Starts a processing job; words: the flags of the converter."""
    given = flag_values(words)
    _check_places(given)
    type_, count = _instance_type("ml.c5.4xlarge"), FLAGS.instance_count or 1
    alone = {"prepare_criteo": "feature_map", "rebalance": "own_files"}.get(FLAGS.tool)
    if count > 1 and alone and not given.get(alone):
        raise BadInput(
            f"{FLAGS.tool} on {count} hosts would see only each host's own files; try one large "
            f"host (--instance_count=1), all cores of which --job=spark uses, or -- --{alone} if a "
            "host needs no others. docs/spark.md says how a cluster does it."
        )
    if count > 1 and "pad" in given and "field_size" not in given:
        raise BadInput(
            f"--pad on {count} hosts would pad each host's rows to a length of their own; give "
            "the length too, e.g. --field_size=39."
        )
    _check(["-m", f"data_tools.{FLAGS.tool}"], ["--input=raw", "--output_dir=out", *words])
    programs.copy_source(PROCESSING_SOURCE, folder)
    with _session() as session:
        from sagemaker.image_uris import retrieve
        from sagemaker.processing import ProcessingInput, ProcessingOutput, Processor

        image = FLAGS.image_uri or retrieve(
            "tensorflow", session.boto_region_name, *_FRAMEWORK.values(), type_,
            image_scope="training",
        )  # fmt: skip
        processor = Processor(
            image_uri=image, instance_count=count, instance_type=type_,
            entrypoint=["bash", f"{_PROCESSING}/input/code/convert_on_sagemaker.sh", FLAGS.tool],
            **_of_processing(session),
        )  # fmt: skip
        data = ProcessingInput(
            FLAGS.input_s3_uri, f"{_PROCESSING}/input/data", "data",
            s3_data_distribution_type="ShardedByS3Key",
        )  # fmt: skip
        code = ProcessingInput(str(folder), f"{_PROCESSING}/input/code", "code")
        records = ProcessingOutput(f"{_PROCESSING}/output", FLAGS.output_path, "records")
        wait = FLAGS.wait and not FLAGS.dry_run
        processor.run([data, code], [records], words or None, wait=wait, logs=wait)


def _run_spark(words, folder):
    """Starts a processing job on SageMaker's Spark image; words: those of data_tools.on_spark."""
    if not words or words[0].startswith("-"):
        raise BadInput("the first word after the -- names the job on Spark; try -- rebalance.")
    count, type_ = FLAGS.instance_count or 1, _instance_type("ml.m5.4xlarge")
    _check_places(flag_values(words[1:]))
    if count > 1:  # which share no folder, so they read and write S3 themselves
        for name, why in _OF_SEVERAL.items():
            if not FLAGS[name].value:
                raise BadInput(f"--instance_count={count} needs --{name}{why}, or try one host.")
        places = [f"--input={FLAGS.input_s3_uri}", f"--output_dir={FLAGS.output_path}"]
    else:
        places = [f"--input={_PROCESSING}/input/data", f"--output_dir={_PROCESSING}/output"]
    _check(["-m", "data_tools.on_spark", words[0]], [*places, *words[1:]])
    zip_for_spark.write_zip(folder / "deepfm_spark.zip")
    with _session() as session:
        from sagemaker.processing import ProcessingInput, ProcessingOutput
        from sagemaker.spark.processing import PySparkProcessor

        processor = PySparkProcessor(
            framework_version=_SPARK, image_uri=FLAGS.image_uri, instance_count=count,
            instance_type=type_, env={"AWS_REGION": session.boto_region_name},
            **_of_processing(session),
        )  # fmt: skip
        data = ProcessingInput(FLAGS.input_s3_uri, f"{_PROCESSING}/input/data", "data")
        records = ProcessingOutput(f"{_PROCESSING}/output", FLAGS.output_path, "records")
        wait = FLAGS.wait and not FLAGS.dry_run
        processor.run(
            str(programs.ROOT / "scripts" / "spark_on_sagemaker.py"),
            submit_py_files=[str(folder / "deepfm_spark.zip")],
            submit_files=[str(programs.ROOT / "requirements-spark.txt")],
            inputs=[data] if count == 1 else [], outputs=[records] if count == 1 else [],
            # The image joins them with blanks, for a shell.
            arguments=[shlex.quote(word) for word in [words[0], *places, *words[1:]]],
            wait=wait, logs=wait,
        )  # fmt: skip


def _of_processing(session):
    """The arguments that all processors have."""
    return {
        "role": role_of(session, FLAGS.role), "volume_size_in_gb": FLAGS.volume_size,
        "max_runtime_in_seconds": FLAGS.max_run, "base_job_name": FLAGS.base_job_name,
        "sagemaker_session": session, "tags": _tags(),
    }  # fmt: skip


def _check_places(given):
    """Refuses flags of a converter that say where the data are, which the job decides."""
    for name in ("input", "output_dir", "master"):
        if name in given:
            raise BadInput(
                f"--{name} after the -- is set by the job; leave it out, and give --input_s3_uri "
                "and --output_path before the --."
            )


def _check(words_of_program, words):
    """Lets a program check its flags, and do nothing else."""
    done = programs.run_command(sys.executable, *words_of_program, "--only_check_args", *words)
    if done.returncode:
        lines = done.stderr.splitlines() or [f"{words_of_program[-1]} fails with {words}."]
        raise BadInput(lines[-1])


def _hosts():
    """(type, number, training processes of each) of the hosts, from the flags or by default."""
    horovod = FLAGS.distribution == "horovod"
    type_ = _instance_type("ml.p3.8xlarge" if horovod else "ml.c5.4xlarge")
    count = FLAGS.instance_count or (2 if FLAGS.distribution == "ps" else 1)
    if FLAGS.distribution == "none" and count > 1:
        raise BadInput(
            f"--instance_count={count} with --distribution=none would train {count} models; try "
            "--distribution=ps."
        )
    if FLAGS.mpi_options and not horovod:
        raise BadInput("--mpi_options needs Horovod; leave it out, or add --distribution=horovod.")
    if not horovod and (FLAGS.processes_per_host or 1) > 1:
        raise BadInput(
            f"--processes_per_host={FLAGS.processes_per_host} needs Horovod; try "
            f"--distribution=horovod, or --instance_count={FLAGS.processes_per_host}."
        )
    return type_, count, FLAGS.processes_per_host or (_GPUS.get(type_, 1) if horovod else 1)


def _instance_type(default):
    """The type of the hosts; refuses what cannot be one."""
    type_ = FLAGS.instance_type or default
    if not re.fullmatch(r"ml\.[a-z]+[0-9][a-z0-9-]*\.(medium|large|[0-9]*xlarge)", type_):
        raise BadInput(f"--instance_type={type_} is not a SageMaker type; try {default}.")
    return type_


def _channels(given, processes):
    """{name: S3 URI}; with Pipe each process of a host has a channel to train on."""
    uris, pipe = FLAGS.train_s3_uri, FLAGS.input_mode == "Pipe"
    needed = {
        "train": ("train_s3_uri", "training_data_dir"),
        "eval": ("eval_s3_uri", "val_data_dir"),
    }
    flag, folder = needed.get(given.get("task_type", "train"), (None, None))
    if flag and not FLAGS[flag].value and folder not in given:
        raise BadInput(f"--{flag} is missing; try --{flag}=s3://bucket/data.")
    count = processes if pipe else 1
    if len(uris) > 1 and len(uris) != count:
        raise BadInput(
            f"--train_s3_uri lists {len(uris)} URIs, but a host has {count} training channel(s); "
            "give one URI that holds all records, or try --input_mode=Pipe --distribution=horovod "
            f"--processes_per_host={len(uris)}."
        )
    most = _CHANNELS - bool(FLAGS.eval_s3_uri)
    if count > most:
        raise BadInput(
            f"--processes_per_host={count} with Pipe needs {count} training channels, but a job "
            f"has at most {most}; try --processes_per_host={most} or --input_mode=File."
        )
    return programs.channels(uris, count, FLAGS.eval_s3_uri)


def _added(processes):
    """Hyperparameters that tell train.py how its data reaches it."""
    asked = {
        "pipe_mode": FLAGS.input_mode == "Pipe",
        "enable_s3_shard": FLAGS.s3_shard,
        "enable_data_multi_path": len(FLAGS.train_s3_uri) > 1,
    }
    return {"worker_per_host": processes, **{name: True for name in asked if asked[name]}}


def _check_pipe(given, data):
    """Refuses what Pipe mode cannot do: find sizes in dataset.json, or tell it from records."""
    lacks = [name for name in ("feature_size", "field_size") if name not in given]
    if lacks and given.get("task_type", "train") == "train":
        raise BadInput(
            f"--{lacks[0]} is missing after the --, and Pipe mode has no dataset.json to read it "
            "from; try -- --feature_size=117581 --field_size=39, with the sizes of your data."
        )
    for uri in sorted(set(data.values())):
        if not uri.endswith(("-", ".tfrecords")):
            logging.warning(
                "Pipe mode sends every object whose name begins with %s, also dataset.json; if "
                "there is one, end the URI with 'part-'.",
                uri,
            )


def _model_dir(given, added):
    """What the SDK passes as --model_dir: a folder, None for its own choice, False for nothing."""
    mode = given.get("distribution", "auto")
    if mode not in _MODES[FLAGS.distribution]:
        raise BadInput(
            f"--distribution={mode} after the -- does not fit --distribution={FLAGS.distribution} "
            "before it; leave it out after the --."
        )
    clash = [name for name in added if name in given]
    if clash:
        raise BadInput(f"--{clash[0]} after the -- is set by the flags before it; leave it out.")
    if "checkpoint_dir" in given:
        given["model_dir"] = given.pop("checkpoint_dir")
    folder = given.pop("model_dir", FLAGS.model_dir)
    if folder is None and FLAGS.checkpoint_s3_uri:
        folder = _CHECKPOINTS
    return False if folder == "none" else folder


def _check_spot(given, model_dir):
    """Refuses flags with which an interrupted training would lose its checkpoints."""
    if not FLAGS.spot:
        if FLAGS.max_wait:
            raise BadInput("--max_wait needs --spot; leave it out, or add --spot.")
        return
    if (FLAGS.max_wait or FLAGS.max_run) < FLAGS.max_run:
        raise BadInput(
            f"--max_wait={FLAGS.max_wait} is less than --max_run={FLAGS.max_run}; try "
            f"--max_wait={2 * FLAGS.max_run}."
        )
    if str(given.get("clear_existing_model")).lower() == "true":
        raise BadInput("--clear_existing_model deletes what --spot resumes from; leave it out.")
    default = "/opt/ml/model" if FLAGS.distribution == "horovod" else "s3://"
    folder = default if model_dir is None else str(model_dir)
    mirrored = FLAGS.checkpoint_s3_uri and folder.startswith(_CHECKPOINTS)
    if not (mirrored or folder.startswith("s3://")):
        raise BadInput(
            "--spot would lose its checkpoints, which are on the host's disk; try "
            "--checkpoint_s3_uri=s3://bucket/checkpoints."
        )


def _session():
    return open_session(FLAGS.region, FLAGS.role, FLAGS.dry_run)


def _tags():
    pairs = [tag.partition("=") for tag in FLAGS.tags]
    if not all(key and equals for key, equals, _ in pairs):
        raise BadInput(f"--tags={','.join(FLAGS.tags)}: give KEY=VALUE, e.g. --tags=team=ads.")
    return [{"Key": key, "Value": value} for key, _, value in pairs] or None


if __name__ == "__main__":
    run_program(main, program.read_flags_before_words)
