"""Processing jobs of launch_sagemaker.py: a converter on each host, or data_tools.on_spark."""

import pathlib
import shlex
import tempfile

import programs
import sagemaker_hosts
import zip_for_spark
from absl import flags
from programs import BadInput
from sagemaker_jobs import check_flags, connect, follow, for_all_jobs

FLAGS = flags.FLAGS
_BASE = "/opt/ml/processing"
_INPUT, _OUTPUT = f"{_BASE}/input/data", f"{_BASE}/output"
_PLACES = [f"--input={_INPUT}", f"--output_dir={_OUTPUT}"]
_SOURCE = ("data_tools", "deepfm", "scripts/sagemaker/convert_on_sagemaker.sh")
# What a job of several hosts on Spark needs, and why.
_OF_SEVERAL = {
    "output_path": ", the s3:// folder that the hosts write to",
    "image_uri": ", an image with Spark and the packages of requirements-spark.txt on every host",
}
# The flag with which several hosts may run a tool that needs the others' files without it.
_ALONE = {"prepare": "feature_map", "prepare_criteo": "feature_map", "rebalance": "own_files"}


def start(words):
    """Starts a job in which each host converts its files; words: the flags of the converter."""
    given = programs.flag_values(words)
    _check_places(given)
    type_, count = FLAGS.instance_type or "ml.c5.4xlarge", FLAGS.instance_count or 1
    alone = _ALONE.get(FLAGS.tool)
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
    check_flags(["-m", f"data_tools.{FLAGS.tool}"], [*_PLACES, *words])
    with connect() as session, tempfile.TemporaryDirectory() as folder:
        from sagemaker.processing import ProcessingInput, Processor

        programs.copy_source(_SOURCE, pathlib.Path(folder))
        code = f"{_BASE}/input/code"
        processor = Processor(
            entrypoint=["bash", f"{code}/convert_on_sagemaker.sh", FLAGS.tool],
            **_hosts(session, sagemaker_hosts.TENSORFLOW, type_, count),
        )
        processor.run(
            [_data("ShardedByS3Key"), ProcessingInput(folder, code, "code")], _records(),
            words or None, wait=False, logs=False,
        )  # fmt: skip
        follow(session, "Processing", processor.latest_job.job_name)


def _hosts(session, image, type_, count):
    """The arguments that the SDK's processors share."""
    return {
        "image_uri": sagemaker_hosts.image(image, session.boto_region_name, type_),
        "instance_type": type_,
        "instance_count": count,
        "volume_size_in_gb": FLAGS.volume_size,
        "max_runtime_in_seconds": FLAGS.max_run,
        **for_all_jobs(session),
    }


def _data(how):
    """What SageMaker copies to the hosts; how: how they share it."""
    from sagemaker.processing import ProcessingInput

    return ProcessingInput(FLAGS.input_s3_uri, _INPUT, "data", s3_data_distribution_type=how)


def _records():
    """What SageMaker copies from the hosts."""
    from sagemaker.processing import ProcessingOutput

    return [ProcessingOutput(_OUTPUT, FLAGS.output_path, "records")]


def start_on_spark(words):
    """Starts a processing job on SageMaker's Spark image; words: those of data_tools.on_spark."""
    if not words or words[0].startswith("-"):
        raise BadInput("the first word after the -- names the job on Spark; try -- rebalance.")
    count, type_ = FLAGS.instance_count or 1, FLAGS.instance_type or "ml.m5.4xlarge"
    given = programs.flag_values(words[1:])
    _check_places(given)
    if count > 1:  # which share no folder, so they read and write S3 themselves
        for name, why in _OF_SEVERAL.items():
            if not FLAGS[name].value:
                raise BadInput(f"--instance_count={count} needs --{name}{why}, or try one host.")
        for name in ("valid_input", "test_input"):
            paths = str(given.get(name, "s3://")).split(",")
            if not all(path.strip().startswith("s3://") for path in paths):
                raise BadInput(f"--{name}: {count} hosts share no folder; give s3://, or one host.")
        places = [f"--input={FLAGS.input_s3_uri}", f"--output_dir={FLAGS.output_path}"]
    else:
        places = _PLACES
    check_flags(["-m", "data_tools.on_spark", words[0]], [*places, *words[1:]])
    with connect() as session, tempfile.TemporaryDirectory() as folder:
        from sagemaker.spark.processing import PySparkProcessor

        archive = pathlib.Path(folder, "deepfm_spark.zip")
        archive.write_bytes(zip_for_spark.zipped(zip_for_spark.libraries()))
        processor = PySparkProcessor(
            env={"AWS_REGION": session.boto_region_name},
            **_hosts(session, sagemaker_hosts.SPARK, type_, count),
        )
        processor.run(
            str(programs.SCRIPTS / "sagemaker/spark_on_sagemaker.py"),
            submit_py_files=[str(archive)],
            submit_files=[str(programs.ROOT / "requirements-spark.txt")],
            # The image joins them with blanks, for a shell.
            arguments=[shlex.quote(word) for word in [words[0], *places, *words[1:]]],
            inputs=[_data("FullyReplicated")] if count == 1 else [],
            outputs=_records() if count == 1 else [], wait=False, logs=False,
        )  # fmt: skip
        follow(session, "Processing", processor.latest_job.job_name)


def _check_places(given):
    """Refuses flags of a converter that say where the data are, which the job decides."""
    for name in ("input", "output_dir", "master"):
        if name in given:
            raise BadInput(
                f"--{name} after the -- is set by the job; leave it out, and give --input_s3_uri "
                "and --output_path before the --."
            )
