"""The requests that start SageMaker's jobs: those that its SDK would build.

https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateHyperParameterTuningJob.html
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateProcessingJob.html
"""

import datetime
import json
import re
import sys
from typing import NamedTuple

import programs
import sagemaker_hosts
from absl import flags
from programs import BadInput

FLAGS = flags.FLAGS
CHECKPOINTS = "/opt/ml/checkpoints"
PROCESSING = "/opt/ml/processing"
# What SageMaker finds in the log: the progress lines, and the last line of an evaluation.
METRICS = {
    "train:loss": r"step [0-9]+  loss ([0-9.]+)",
    "train:examples_per_second": r"step [0-9]+  loss [0-9.]+  ([0-9]+) examples/s",
    "eval:auc": r"Evaluation: .* auc=([0-9.]+)",
    "eval:gauc": r"GAUC of field .+: gauc=([0-9.]+)",
    "eval:log_loss": r"Evaluation: .* log_loss=([0-9.]+)",
    "eval:calibration": r"Evaluation: .* calibration=([0-9.]+)",
}


class Job(NamedTuple):
    """What all jobs have. The name is also that of the job's folder in the bucket."""

    name: str
    region: str
    bucket: str  # its s3:// address
    role: str  # its ARN
    image: str  # the address of the container
    type: str  # of the hosts
    count: int
    tags: list

    @property
    def hosts(self):
        return {
            "InstanceType": self.type, "InstanceCount": self.count,
            "VolumeSizeInGB": FLAGS.volume_size,
        }  # fmt: skip


def job_of(aws, type_, count, image) -> Job:
    """A job in an account; image: the title of SageMaker's own."""
    uri = FLAGS.image_uri or sagemaker_hosts.image(image, aws.region, type_)
    role = aws.role(FLAGS.role)
    return Job(job_name(), aws.region, aws.bucket(), role, uri, type_, count, _tags())


def job_name(most=63, pattern="%Y-%m-%d-%H-%M-%S-{:03}"):
    """--base_job_name and the time, in at most so many characters."""
    now = datetime.datetime.now(datetime.timezone.utc)
    ending = now.strftime(pattern.format(now.microsecond // 1000))
    return f"{FLAGS.base_job_name[: most - len(ending) - 1].rstrip('-')}-{ending}"


def _tags():
    pairs = [tag.partition("=") for tag in FLAGS.tags]
    if not all(re.fullmatch(r"[\w .:/+@-]+=[\w .:/=+@-]*", "".join(pair)) for pair in pairs):
        raise BadInput(
            f"--tags={','.join(FLAGS.tags)}: give KEY=VALUE of letters, digits, blanks and "
            "_.:/=+-@, e.g. --tags=team=ads."
        )
    return [{"Key": key, "Value": value} for key, _, value in pairs] or None


def instance_type(default):
    """The type of the hosts; refuses what cannot be one."""
    type_ = FLAGS.instance_type or default
    if not re.fullmatch(r"ml\.[a-z]+[0-9][a-z0-9-]*\.(medium|large|[0-9]*xlarge)", type_):
        raise BadInput(f"--instance_type={type_} is not a SageMaker type; try {default}.")
    return type_


def check_flags(words_of_program, words):
    """Lets a program check its flags, and do nothing else."""
    done = programs.run_command(sys.executable, *words_of_program, "--only_check_args", *words)
    if done.returncode:
        lines = done.stderr.splitlines() or [f"{words_of_program[-1]} fails with {words}."]
        raise BadInput(lines[-1])


def source_of(job):
    """Where train.py is uploaded to: the bucket of the job's output, if it has one."""
    bucket = "/".join(FLAGS.output_path.split("/")[:3]) if FLAGS.output_path else job.bucket
    return f"{bucket}/{job.name}/source/sourcedir.tar.gz"


def training(job, channels, hyperparameters, model_dir, processes):
    """CreateTrainingJob.

    Args:
        job: a Job.
        channels: {name: (s3:// prefix, how the hosts share it)}.
        hyperparameters: {flag of train.py: value}.
        model_dir: the flag's value; "": train.py's default; None: a folder of the output, or of
            the host with Horovod.
        processes: of Horovod on each host.
    """
    folder, horovod = FLAGS.output_path or f"{job.bucket}/", FLAGS.distribution == "horovod"
    if model_dir is None:
        model_dir = "/opt/ml/model" if horovod else f"{folder.rstrip('/')}/{job.name}/model"
    values = {
        **hyperparameters,
        **programs.for_the_toolkit(
            source_of(job), job.name, job.region, FLAGS.distribution, processes, FLAGS.mpi_options
        ),
        **({"model_dir": model_dir} if model_dir else {}),
    }
    stop = {"MaxRuntimeInSeconds": FLAGS.max_run}
    if FLAGS.spot:
        stop["MaxWaitTimeInSeconds"] = FLAGS.max_wait or 2 * FLAGS.max_run
    mirror = FLAGS.checkpoint_s3_uri
    return _without_empty(
        TrainingJobName=job.name,
        RoleArn=job.role,
        AlgorithmSpecification={
            "TrainingImage": job.image, "TrainingInputMode": FLAGS.input_mode,
            "MetricDefinitions": [{"Name": n, "Regex": regex} for n, regex in METRICS.items()],
            "EnableSageMakerMetricsTimeSeries": True,
        },
        HyperParameters={name: json.dumps(value) for name, value in values.items()},
        InputDataConfig=[
            {"ChannelName": name, "DataSource": {"S3DataSource": _of_s3(*source)}}
            for name, source in channels.items()
        ],
        OutputDataConfig={"S3OutputPath": folder},
        ResourceConfig=job.hosts,
        StoppingCondition=stop,
        EnableManagedSpotTraining=FLAGS.spot,
        CheckpointConfig=mirror and {"S3Uri": mirror, "LocalPath": CHECKPOINTS},
        ProfilerConfig={"DisableProfiler": True},  # train.py has its own
        Tags=job.tags,
    )  # fmt: skip


def tuning(training, ranges):
    """CreateHyperParameterTuningJob.

    Args:
        training: the request of one training.
        ranges: {flag of train.py: ("Integer" or "Continuous", (lowest, highest), the scale)}, or
            {flag of train.py: ("Categorical", values)}.
    """
    found = {f"{kind}ParameterRanges": [] for kind in ("Integer", "Continuous", "Categorical")}
    for name, (kind, values, *scale) in ranges.items():
        if scale:
            low, high = map(str, values)
            entry = {"MinValue": low, "MaxValue": high, "ScalingType": scale[0]}
        else:
            entry = {"Values": [json.dumps(value) for value in values]}
        found[f"{kind}ParameterRanges"].append({"Name": name, **entry})
    algorithm = dict(training["AlgorithmSpecification"])
    del algorithm["EnableSageMakerMetricsTimeSeries"]
    same = ("RoleArn", "OutputDataConfig", "StoppingCondition", "InputDataConfig")
    return _without_empty(
        HyperParameterTuningJobName=job_name(32, "%y%m%d-%H%M"),
        HyperParameterTuningJobConfig={
            "Strategy": "Bayesian", "TrainingJobEarlyStoppingType": "Off",
            "ResourceLimits": {
                "MaxNumberOfTrainingJobs": FLAGS.max_jobs,
                "MaxParallelTrainingJobs": FLAGS.max_parallel_jobs,
            },
            "HyperParameterTuningJobObjective": {
                "Type": "Minimize" if FLAGS.objective.endswith("loss") else "Maximize",
                "MetricName": FLAGS.objective,
            },
            "ParameterRanges": found,
        },
        TrainingJobDefinition={
            "StaticHyperParameters": {
                **training["HyperParameters"], "sagemaker_estimator_class_name": '"TensorFlow"',
                "sagemaker_estimator_module": '"sagemaker.tensorflow.estimator"',
            },
            "AlgorithmSpecification": algorithm,
            "HyperParameterTuningResourceConfig": training["ResourceConfig"],
            **{name: training[name] for name in same if name in training},
        },
        Tags=training.get("Tags"),
    )  # fmt: skip


def processing(job, entrypoint, words, inputs, output=None, environment=None):
    """CreateProcessingJob.

    Args:
        job: a Job.
        entrypoint, words: the container's command and its arguments.
        inputs: {name: (s3:// prefix, how the hosts share it)}, folders of PROCESSING/input.
        output: the s3:// folder that PROCESSING/output is copied to at the end; None: none is.
        environment: {name: value} of the container.
    """

    def source(name, of_s3):
        more = {"S3InputMode": "File", "S3CompressionType": "None"}
        place = {**_of_s3(*of_s3), "LocalPath": f"{PROCESSING}/input/{name}", **more}
        return {"InputName": name, "AppManaged": False, "S3Input": place}

    target = {"S3Uri": output, "LocalPath": f"{PROCESSING}/output", "S3UploadMode": "EndOfJob"}
    records = {"OutputName": "records", "AppManaged": False, "S3Output": target}
    return _without_empty(
        ProcessingJobName=job.name,
        RoleArn=job.role,
        AppSpecification=_without_empty(
            ImageUri=job.image, ContainerEntrypoint=entrypoint, ContainerArguments=words
        ),
        ProcessingInputs=[source(*entry) for entry in inputs.items()],
        ProcessingOutputConfig=output and {"Outputs": [records]},
        ProcessingResources={"ClusterConfig": job.hosts},
        Environment=environment,
        StoppingCondition={"MaxRuntimeInSeconds": FLAGS.max_run},
        Tags=job.tags,
    )


def _of_s3(uri, how):
    return {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": how}


def _without_empty(**parts):
    return {name: part for name, part in parts.items() if part}
