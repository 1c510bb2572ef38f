"""Starts a SageMaker job: training, tuning, or converting data on many hosts or on Spark.

    .venv-sagemaker/bin/python scripts/launch_sagemaker.py --train_s3_uri=s3://bucket/train \\
        --eval_s3_uri=s3://bucket/val --role=SageMakerRole -- --num_epochs=2 --batch_size=4096
    .venv-sagemaker/bin/python scripts/launch_sagemaker.py --distribution=horovod \\
        --input_mode=Pipe --train_s3_uri=s3://bucket/train --role=SageMakerRole --dry_run
    .venv-sagemaker/bin/python scripts/launch_sagemaker.py --job=tuning --distribution=none \\
        --tune=learning_rate=0.0001..0.01:log --tune='deep_layers=128,64|256,128' \\
        --train_s3_uri=s3://bucket/train --eval_s3_uri=s3://bucket/val --role=SageMakerRole
    .venv-sagemaker/bin/python scripts/launch_sagemaker.py --job=processing --instance_count=4 \\
        --input_s3_uri=s3://bucket/raw --output_path=s3://bucket/train --role=SageMakerRole -- \\
        --num_workers=16
    .venv-sagemaker/bin/python scripts/launch_sagemaker.py --job=spark \\
        --input_s3_uri=s3://bucket/train --output_path=s3://bucket/shuffled --role=SageMakerRole \\
        -- rebalance --num_files=64

The flags after `--` are train.py's (the job's hyperparameters) or the converter's; for Spark, the
words of data_tools.on_spark. They are checked before anything is uploaded. --dry_run prints the
request that would start the job, as JSON, and sends nothing.

Needs Python 3.7 or later with absl and botocore, and numpy to convert data, but not TensorFlow.
"""

import contextlib
import io
import pathlib
import re
import shlex
import sys
import tarfile
import tempfile

import programs  # first
from programs import BadInput, fail, flag_values, program, run_program

# isort: split
import sagemaker_hosts
import sagemaker_requests
import zip_for_spark
from absl import flags, logging
from sagemaker_requests import CHECKPOINTS, PROCESSING
from sagemaker_session import connect

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
    ["libsvm_to_tfrecord", "prepare_criteo", "rebalance"], "The program in data_tools.")
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
_PLACES = [f"--input={PROCESSING}/input/data", f"--output_dir={PROCESSING}/output"]
PROCESSING_SOURCE = ("data_tools", "deepfm", "scripts/sagemaker/convert_on_sagemaker.sh")
# What a job of several hosts on Spark needs, and why.
_OF_SEVERAL = {
    "output_path": ", the s3:// folder that the hosts write to",
    "image_uri": ", an image with Spark and the packages of requirements-spark.txt on every host",
}
_CHANNELS = 20  # at most, in a job
# How to read a tool's flags without the packages of the tool, by its folder in data_tools.
_READ_FLAGS = (
    "from data_tools.common import command_line; from data_tools.{}.options import Options; "
    "command_line.run(None, Options, tensorflow=False)"
)
_TOOLS = {
    "libsvm_to_tfrecord": "libsvm",
    "prepare_criteo": "click_logs",
    "rebalance": "rebalancing",
}
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
            start = {"processing": _convert, "spark": _run_spark}.get(FLAGS.job, _train)
            start(argv[1:], pathlib.Path(folder))
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
    if not re.fullmatch("[a-zA-Z0-9](-*[a-zA-Z0-9])*", FLAGS.base_job_name):
        raise BadInput(
            f"--base_job_name={FLAGS.base_job_name} must be letters and digits, with hyphens only "
            "between them; try --base_job_name=deepfm."
        )


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
    ranges = _ranges(words, given) if FLAGS.job == "tuning" else {}
    programs.copy_source(programs.TRAINING_SOURCE, folder)
    shard = "ShardedByS3Key" if FLAGS.s3_shard else "FullyReplicated"
    how = {"evaluation": "FullyReplicated"}  # else as the flag says
    with connect(FLAGS.region, FLAGS.dry_run) as aws:
        job = _job(aws, type_, count, sagemaker_hosts.TENSORFLOW)
        request = sagemaker_requests.training(
            job, FLAGS.output_path, FLAGS.input_mode,
            channels={name: (uri, how.get(name, shard)) for name, uri in data.items()},
            hyperparameters={"servable_model_dir": "/opt/ml/model", **added, **given},
            metrics=_METRICS, model_dir=model_dir,
            mpi=(processes, FLAGS.mpi_options) if FLAGS.distribution == "horovod" else None,
            parameter_servers=FLAGS.distribution == "ps",
            max_wait=(FLAGS.max_wait or 2 * FLAGS.max_run) if FLAGS.spot else None,
            checkpoints=FLAGS.checkpoint_s3_uri,
        )  # fmt: skip
        kind = "Training"
        if ranges:
            kind = "HyperParameterTuning"
            request = sagemaker_requests.tuning(
                request, ranges, FLAGS.objective, FLAGS.objective.endswith("loss"), FLAGS.max_jobs,
                FLAGS.max_parallel_jobs, FLAGS.base_job_name,
            )  # fmt: skip
        source = {sagemaker_requests.source_of(job, FLAGS.output_path): _tar(folder)}
        _start(aws, kind, request, source, ServerSideEncryption="aws:kms")


def _tar(folder):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, path.name)
    return content.getvalue()


def _job(aws, type_, count, image):
    """What the flags say of a job; image: the title of SageMaker's own."""
    name = sagemaker_requests.job_name(FLAGS.base_job_name)
    uri = FLAGS.image_uri or sagemaker_hosts.image(image, aws.region, type_)
    return sagemaker_requests.Job(
        name, aws.region, aws.bucket(), aws.role(FLAGS.role), uri, type_, count, FLAGS.volume_size,
        FLAGS.max_run, _tags(),
    )  # fmt: skip


def _start(aws, kind, request, files, **options):
    aws.start(kind, request, files, **options)
    if not FLAGS.dry_run:
        name = request[f"{kind}JobName"]
        logging.info("Started %s.", name)
        if FLAGS.wait:
            aws.follow(kind, name)


def _convert(words, folder):
    """Starts a processing job; words: the flags of the converter."""
    programs.need("botocore", "numpy")
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
    _check(["-c", _READ_FLAGS.format(_TOOLS[FLAGS.tool])], [*_PLACES, *words])
    programs.copy_source(PROCESSING_SOURCE, folder)
    with connect(FLAGS.region, FLAGS.dry_run) as aws:
        job = _job(aws, type_, count, sagemaker_hosts.TENSORFLOW)
        code = f"{job.bucket}/{job.name}/input/code"
        request = sagemaker_requests.processing(
            job, ["bash", f"{PROCESSING}/input/code/convert_on_sagemaker.sh", FLAGS.tool], words,
            {"data": (FLAGS.input_s3_uri, "ShardedByS3Key"), "code": (code, "FullyReplicated")},
            _output(job),
        )  # fmt: skip
        paths = [path for path in folder.rglob("*") if path.is_file()]
        files = {f"{code}/{path.relative_to(folder)}": path.read_bytes() for path in paths}
        _start(aws, "Processing", request, files)


def _output(job):
    return FLAGS.output_path or f"{job.bucket}/{job.name}/output/records"


def _run_spark(words, folder):
    """Starts a processing job on SageMaker's Spark image; words: those of data_tools.on_spark."""
    programs.need("botocore", "numpy")
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
        places = _PLACES
    _check(["-m", "data_tools.on_spark", words[0]], [*places, *words[1:]])
    zip_for_spark.write_zip(folder / "deepfm_spark.zip")
    uploads = {
        "py-files": folder / "deepfm_spark.zip",
        "files": programs.ROOT / "requirements-spark.txt",
        "code": programs.SCRIPTS / "sagemaker/spark_on_sagemaker.py",
    }
    driver = f"code/{uploads['code'].name}"
    base = f"{PROCESSING}/input"
    entrypoint = [
        "smspark-submit", "--py-files", f"{base}/py-files", "--files", f"{base}/files",
        f"{base}/{driver}",
    ]  # fmt: skip
    with connect(FLAGS.region, FLAGS.dry_run) as aws:
        job = _job(aws, type_, count, sagemaker_hosts.SPARK)
        code, everywhere = f"{job.bucket}/{job.name}/input", "FullyReplicated"
        inputs = {"data": (FLAGS.input_s3_uri, everywhere)} if count == 1 else {}
        for name in uploads:
            inputs[name] = (f"{code}/{driver if name == 'code' else name}", everywhere)
        request = sagemaker_requests.processing(
            job, entrypoint,
            # The image joins them with blanks, for a shell.
            [shlex.quote(word) for word in [words[0], *places, *words[1:]]],
            inputs, _output(job) if count == 1 else None, {"AWS_REGION": aws.region},
        )  # fmt: skip
        files = {f"{code}/{name}/{path.name}": path.read_bytes() for name, path in uploads.items()}
        _start(aws, "Processing", request, files)


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
        raise BadInput(lines[-1].replace("-c: ", f"{FLAGS.tool}.py: "))


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
    found = sagemaker_hosts.gpus(type_, bool(FLAGS.image_uri), FLAGS.processes_per_host)
    return type_, count, FLAGS.processes_per_host or (max(found, 1) if horovod else 1)


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
    lines = r"s3://.*\.(libsvm|svm|txt|libffm|ffm)(\.gz)?"
    if given.get("data_format") != "libsvm" and any(re.fullmatch(lines, x) for x in data.values()):
        raise BadInput(
            "In Pipe mode train.py reads TFRecords; to read lines of LibSVM, add --data_format="
            "libsvm after the --."
        )
    for uri in sorted(set(data.values())):
        if not uri.endswith(("-", ".tfrecords")):
            logging.warning(
                "Pipe mode sends every object whose name begins with %s, also dataset.json; if "
                "there is one, end the URI with 'part-'.",
                uri,
            )


def _model_dir(given, added):
    """What the job passes as --model_dir: a folder; None: the usual one; "": none."""
    mode = given.get("distribution", "auto")
    if mode not in _MODES[FLAGS.distribution]:
        raise BadInput(
            f"--distribution={mode} after the -- does not fit --distribution={FLAGS.distribution} "
            "before it; leave it out after the --."
        )
    clash = [name for name in (*added, "dist_mode", "ps_hosts", "job_name") if name in given]
    if clash:
        raise BadInput(f"--{clash[0]} after the -- is set by the flags before it; leave it out.")
    if "checkpoint_dir" in given:
        given["model_dir"] = given.pop("checkpoint_dir")
    folder = given.pop("model_dir", FLAGS.model_dir)
    if folder is None and FLAGS.checkpoint_s3_uri:
        folder = CHECKPOINTS
    if FLAGS.job == "tuning":
        if FLAGS.distribution == "ps" or str(folder).startswith("s3://"):
            raise BadInput(
                "the trainings of --job=tuning would go on from each other's checkpoints in one "
                "folder on S3; leave --model_dir out, and give --distribution=none or horovod."
            )
        folder = folder or "none"
    return "" if folder == "none" else folder


def _ranges(words, given):
    """What a tuning job tunes, as sagemaker_requests.tuning takes it."""
    if FLAGS.objective.startswith("eval:") and not (FLAGS.eval_s3_uri or "val_data_dir" in given):
        raise BadInput(f"--objective={FLAGS.objective} needs --eval_s3_uri=s3://bucket/val.")
    if FLAGS.objective == "eval:gauc" and "gauc_field" not in given:
        raise BadInput("--objective=eval:gauc needs -- --gauc_field, the field to group by.")
    found = {}
    for text in FLAGS.tune:
        name, _, asked = text.partition("=")
        if name in found or name in given:
            raise BadInput(f"--tune={text}: --{name} is given twice; leave one out.")
        found[name] = _range(text, asked)
    if not found:
        raise BadInput("--tune is missing; try --tune=learning_rate=0.0001..0.01:log.")
    for i in range(max(len(values) for _, values, *_ in found.values())):
        tried = [f"--{n}={values[i % len(values)]}" for n, (_, values, *_) in found.items()]
        _check(["train.py"], [*words, *tried])
    return found


def _range(text, asked):
    if "|" in asked:
        return "Categorical", asked.split("|")
    low, _, high = asked.partition("..")
    high, _, scale = high.partition(":")
    for kind, number in (("Integer", int), ("Continuous", float)):
        with contextlib.suppress(ValueError):
            ends = number(low), number(high)
            if ends[0] < ends[1] and (not scale or (scale == "log" and ends[0] > 0)):
                return kind, ends, "Logarithmic" if scale else "Auto"
    raise BadInput(
        f"--tune={text} is not a range or a choice; try --tune=learning_rate=0.0001..0.01:log or "
        "--tune=embedding_size=16|32."
    )


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
    mirrored = FLAGS.checkpoint_s3_uri and folder.startswith(CHECKPOINTS)
    if not (mirrored or folder.startswith("s3://")):
        raise BadInput(
            "--spot would lose its checkpoints, which are on the host's disk; try "
            "--checkpoint_s3_uri=s3://bucket/checkpoints."
        )


def _tags():
    pairs = [tag.partition("=") for tag in FLAGS.tags]
    if not all(re.fullmatch(r"[\w .:/+@-]+=[\w .:/=+@-]*", "".join(pair)) for pair in pairs):
        raise BadInput(
            f"--tags={','.join(FLAGS.tags)}: give KEY=VALUE of letters, digits, blanks and "
            "_.:/=+-@, e.g. --tags=team=ads."
        )
    return [{"Key": key, "Value": value} for key, _, value in pairs] or None


if __name__ == "__main__":
    run_program(main, program.read_flags_before_words)
