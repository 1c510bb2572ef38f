"""Processing jobs of launch_sagemaker.py: a converter on each host, or data_tools.on_spark."""

import shlex

import programs
import sagemaker_hosts
import sagemaker_requests
import zip_for_spark
from absl import flags
from programs import BadInput
from sagemaker_requests import PROCESSING, check_flags, instance_type, job_of
from sagemaker_session import connect

FLAGS = flags.FLAGS
_PLACES = [f"--input={PROCESSING}/input/data", f"--output_dir={PROCESSING}/output"]
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
    programs.need("botocore", "numpy")
    given = programs.flag_values(words)
    _check_places(given)
    type_, count = instance_type("ml.c5.4xlarge"), FLAGS.instance_count or 1
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
    with connect() as aws:
        job = job_of(aws, type_, count, sagemaker_hosts.TENSORFLOW)
        code = f"{job.bucket}/{job.name}/input/code"
        request = sagemaker_requests.processing(
            job, ["bash", f"{PROCESSING}/input/code/convert_on_sagemaker.sh", FLAGS.tool], words,
            {"data": (FLAGS.input_s3_uri, "ShardedByS3Key"), "code": (code, "FullyReplicated")},
            _output(job),
        )  # fmt: skip
        sources = programs.source_files(_SOURCE).items()
        files = {f"{code}/{name}": path.read_bytes() for name, path in sources}
        aws.start("Processing", request, files)


def _output(job):
    return FLAGS.output_path or f"{job.bucket}/{job.name}/output/records"


def start_on_spark(words):
    """Starts a processing job on SageMaker's Spark image; words: those of data_tools.on_spark."""
    programs.need("botocore", "numpy")
    if not words or words[0].startswith("-"):
        raise BadInput("the first word after the -- names the job on Spark; try -- rebalance.")
    count, type_ = FLAGS.instance_count or 1, instance_type("ml.m5.4xlarge")
    _check_places(programs.flag_values(words[1:]))
    if count > 1:  # which share no folder, so they read and write S3 themselves
        for name, why in _OF_SEVERAL.items():
            if not FLAGS[name].value:
                raise BadInput(f"--instance_count={count} needs --{name}{why}, or try one host.")
        places = [f"--input={FLAGS.input_s3_uri}", f"--output_dir={FLAGS.output_path}"]
    else:
        places = _PLACES
    check_flags(["-m", "data_tools.on_spark", words[0]], [*places, *words[1:]])
    driver, pins = "code/spark_on_sagemaker.py", programs.ROOT / "requirements-spark.txt"
    uploads = {
        "py-files/deepfm_spark.zip": zip_for_spark.zipped(zip_for_spark.libraries()),
        f"files/{pins.name}": pins.read_bytes(),
        driver: (programs.SCRIPTS / "sagemaker/spark_on_sagemaker.py").read_bytes(),
    }
    base = f"{PROCESSING}/input"
    entrypoint = [
        "smspark-submit", "--py-files", f"{base}/py-files", "--files", f"{base}/files",
        f"{base}/{driver}",
    ]  # fmt: skip
    with connect() as aws:
        job = job_of(aws, type_, count, sagemaker_hosts.SPARK)
        code, everywhere = f"{job.bucket}/{job.name}/input", "FullyReplicated"
        inputs = {"data": (FLAGS.input_s3_uri, everywhere)} if count == 1 else {}
        for name, of_s3 in (("py-files", "py-files"), ("files", "files"), ("code", driver)):
            inputs[name] = (f"{code}/{of_s3}", everywhere)
        request = sagemaker_requests.processing(
            job, entrypoint,
            # The image joins them with blanks, for a shell.
            [shlex.quote(word) for word in [words[0], *places, *words[1:]]],
            inputs, _output(job) if count == 1 else None, {"AWS_REGION": aws.region},
        )  # fmt: skip
        files = {f"{code}/{name}": content for name, content in uploads.items()}
        aws.start("Processing", request, files)


def _check_places(given):
    """Refuses flags of a converter that say where the data are, which the job decides."""
    for name in ("input", "output_dir", "master"):
        if name in given:
            raise BadInput(
                f"--{name} after the -- is set by the job; leave it out, and give --input_s3_uri "
                "and --output_path before the --."
            )
