"""Training jobs and tuning jobs of launch_sagemaker.py, whose words are flags of train.py."""

import pathlib
import re
import tempfile

import programs
import sagemaker_hosts
from absl import flags, logging
from programs import BadInput
from sagemaker_jobs import check_flags, connect, follow, for_all_jobs

FLAGS = flags.FLAGS
_CHECKPOINTS = "/opt/ml/checkpoints"
_CHANNELS = 20  # at most, in a job
# Values of train.py's --distribution that fit the launcher's.
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
    "eval:gauc": r"GAUC of field .+: gauc=([0-9.]+)",
    "eval:log_loss": r"Evaluation: .* log_loss=([0-9.]+)",
    "eval:calibration": r"Evaluation: .* calibration=([0-9.]+)",
}


def start(words):
    """Starts a training or a tuning job."""
    check_flags(["train.py"], words)
    given = programs.flag_values(words)
    type_, count, processes = _hosts()
    data = _channels(given, processes)
    if FLAGS.input_mode == "Pipe":
        _check_pipe(given, data)
    added = _added(processes)
    model_dir = _model_dir(given, added)
    _check_spot(given, model_dir)
    ranges = _ranges(words, given) if FLAGS.job == "tuning" else {}
    values = {"servable_model_dir": "/opt/ml/model", **added, **given}
    with connect() as session, tempfile.TemporaryDirectory() as folder:
        from sagemaker.inputs import TrainingInput

        programs.copy_source(programs.TRAINING_SOURCE, pathlib.Path(folder))
        estimator = _estimator(session, folder, type_, count, processes, values, model_dir)
        shard = "ShardedByS3Key" if FLAGS.s3_shard else "FullyReplicated"
        how = {"evaluation": "FullyReplicated"}  # else as the flag says
        inputs = {n: TrainingInput(uri, how.get(n, shard)) for n, uri in data.items()} or None
        if ranges:
            tuner = _tuner(estimator, ranges)
            tuner.fit(inputs, wait=False)
            follow(session, "HyperParameterTuning", tuner.latest_tuning_job.name)
        else:
            estimator.fit(inputs, wait=False)
            follow(session, "Training", estimator.latest_training_job.name)


def _estimator(session, source, type_, count, processes, hyperparameters, model_dir):
    """The SDK's estimator, which uploads the folder `source`.

    Args:
        model_dir: train.py's flag; "": its default; None: a folder of the output, or of the host
            with Horovod.
    """
    from sagemaker.tensorflow import TensorFlow

    mpi = {"processes_per_host": processes, "custom_mpi_options": FLAGS.mpi_options}
    distributions = {
        "ps": {"parameter_server": {"enabled": True}},
        "horovod": {"mpi": {"enabled": True, **mpi}},
    }
    mirror = FLAGS.checkpoint_s3_uri
    return TensorFlow(
        entry_point="train.py", source_dir=source, framework_version="1.15.2", py_version="py37",
        image_uri=sagemaker_hosts.image(
            sagemaker_hosts.TENSORFLOW, session.boto_region_name, type_
        ),
        instance_type=type_, instance_count=count, volume_size=FLAGS.volume_size,
        input_mode=FLAGS.input_mode, distribution=distributions.get(FLAGS.distribution),
        hyperparameters=hyperparameters, model_dir=False if model_dir == "" else model_dir,
        output_path=FLAGS.output_path, max_run=FLAGS.max_run, use_spot_instances=FLAGS.spot,
        max_wait=(FLAGS.max_wait or 2 * FLAGS.max_run) if FLAGS.spot else None,
        checkpoint_s3_uri=mirror, checkpoint_local_path=mirror and _CHECKPOINTS,
        metric_definitions=[{"Name": name, "Regex": regex} for name, regex in _METRICS.items()],
        debugger_hook_config=False, disable_profiler=True,  # train.py has its own
        **for_all_jobs(session),
    )  # fmt: skip


def _tuner(estimator, ranges):
    """The SDK's tuner of {flag of train.py: programs.values_to_tune}."""
    from sagemaker import tuner

    kinds = {"Integer": tuner.IntegerParameter, "Continuous": tuner.ContinuousParameter}
    return tuner.HyperparameterTuner(
        estimator, FLAGS.objective,
        {
            name: kinds[kind](*values, *scale) if scale else tuner.CategoricalParameter(values)
            for name, (kind, values, *scale) in ranges.items()
        },
        estimator.metric_definitions, max_jobs=FLAGS.max_jobs,
        objective_type="Minimize" if FLAGS.objective.endswith("loss") else "Maximize",
        max_parallel_jobs=FLAGS.max_parallel_jobs, base_tuning_job_name=FLAGS.base_job_name,
        tags=estimator.tags,
    )  # fmt: skip


def _hosts():
    """(type, number, training processes of each) of the hosts, from the flags or by default."""
    horovod = FLAGS.distribution == "horovod"
    type_ = FLAGS.instance_type or ("ml.p3.8xlarge" if horovod else "ml.c5.4xlarge")
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
    found = sagemaker_hosts.gpus(type_)
    return type_, count, FLAGS.processes_per_host or (max(found, 1) if horovod else 1)


def _channels(given, processes):
    """{name: S3 URI}; with Pipe each process of a host has a channel to train on."""
    uris, pipe = FLAGS.train_s3_uri, FLAGS.input_mode == "Pipe"
    needed = {
        "train": ("train_s3_uri", "training_data_dir"),
        "eval": ("eval_s3_uri", "val_data_dir"),
        "importance": ("eval_s3_uri", "val_data_dir"),
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
        folder = _CHECKPOINTS
    if FLAGS.job == "tuning":
        if FLAGS.distribution == "ps" or str(folder).startswith("s3://"):
            raise BadInput(
                "the trainings of --job=tuning would go on from each other's checkpoints in one "
                "folder on S3; leave --model_dir out, and give --distribution=none or horovod."
            )
        folder = folder or "none"
    return "" if folder == "none" else folder


def _ranges(words, given):
    """What a tuning job tunes, {flag of train.py: programs.values_to_tune}."""
    if FLAGS.objective.startswith("eval:") and not (FLAGS.eval_s3_uri or "val_data_dir" in given):
        raise BadInput(f"--objective={FLAGS.objective} needs --eval_s3_uri=s3://bucket/val.")
    if FLAGS.objective == "eval:gauc" and "gauc_field" not in given:
        raise BadInput("--objective=eval:gauc needs -- --gauc_field, the field to group by.")
    found = {}
    for text in FLAGS.tune:
        name, _, asked = text.partition("=")
        if name in found or name in given:
            raise BadInput(f"--tune={text}: --{name} is given twice; leave one out.")
        found[name] = programs.values_to_tune(text, asked)
    if not found:
        raise BadInput("--tune is missing; try --tune=learning_rate=0.0001..0.01:log.")
    for i in range(max(len(values) for _, values, *_ in found.values())):
        tried = [f"--{n}={values[i % len(values)]}" for n, (_, values, *_) in found.items()]
        check_flags(["train.py"], [*words, *tried])
    return found


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
