"""The requests that start SageMaker's jobs: those that its SDK would build.

https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateTrainingJob.html
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateHyperParameterTuningJob.html
https://docs.aws.amazon.com/sagemaker/latest/APIReference/API_CreateProcessingJob.html
"""

import datetime
import json
from typing import NamedTuple

CHECKPOINTS = "/opt/ml/checkpoints"
PROCESSING = "/opt/ml/processing"


class Job(NamedTuple):
    """What all jobs have.

    Attributes:
        name: its name, and that of its folder in the bucket.
        region: the AWS region.
        bucket: the s3:// address of the bucket for what is uploaded.
        role: the ARN of its IAM role.
        image: the container's address.
        type, count: of the hosts.
        volume_size: GB of each host's disk.
        max_run: seconds after which it is ended.
        tags: [{"Key": key, "Value": value}].
    """

    name: str
    region: str
    bucket: str
    role: str
    image: str
    type: str
    count: int
    volume_size: int
    max_run: int
    tags: list

    @property
    def hosts(self):
        return {
            "InstanceType": self.type, "InstanceCount": self.count,
            "VolumeSizeInGB": self.volume_size,
        }  # fmt: skip


def job_name(prefix, most=63, pattern="%Y-%m-%d-%H-%M-%S-{:03}"):
    """A prefix and the time, in at most so many characters."""
    now = datetime.datetime.now(datetime.timezone.utc)
    ending = now.strftime(pattern.format(now.microsecond // 1000))
    return f"{prefix[: most - len(ending) - 1].rstrip('-')}-{ending}"


def source_of(job, output):
    """Where train.py is uploaded to: the bucket of the job's output, if it has one."""
    bucket = "/".join(output.split("/")[:3]) if output else job.bucket
    return f"{bucket}/{job.name}/source/sourcedir.tar.gz"


def training(
    job, output, input_mode, channels, hyperparameters, metrics, model_dir=None, mpi=None,
    parameter_servers=False, max_wait=None, checkpoints=None,
):  # fmt: skip
    """CreateTrainingJob.

    Args:
        job: Job.
        output: the s3:// folder of the model; None: the bucket.
        input_mode: File, FastFile or Pipe.
        channels: {name: (s3:// prefix, how the hosts share it)}.
        hyperparameters: {flag of train.py: value}.
        metrics: {name: the expression that finds it in the log}.
        model_dir: the flag's value; "": train.py's default; None: a folder of the output, or of
            the host with MPI.
        mpi: (processes on each host, more options of mpirun).
        parameter_servers: whether each host runs one.
        max_wait: seconds that it may take on spot instances; None: not on these.
        checkpoints: s3:// folder that mirrors CHECKPOINTS.
    """
    folder = output or f"{job.bucket}/"
    if model_dir is None:
        model_dir = "/opt/ml/model" if mpi else f"{folder.rstrip('/')}/{job.name}/model"
    values = {
        **hyperparameters, "sagemaker_submit_directory": source_of(job, output),
        "sagemaker_program": "train.py", "sagemaker_container_log_level": 20,
        "sagemaker_job_name": job.name, "sagemaker_region": job.region,
    }  # fmt: skip
    if parameter_servers:
        values["sagemaker_parameter_server_enabled"] = True
    if mpi:
        values["sagemaker_mpi_enabled"] = True
        values["sagemaker_mpi_num_of_processes_per_host"] = mpi[0]
        values["sagemaker_mpi_custom_mpi_options"] = mpi[1]
    if model_dir:
        values["model_dir"] = model_dir
    wait = {"MaxWaitTimeInSeconds": max_wait} if max_wait else {}
    return _without_empty(
        TrainingJobName=job.name,
        RoleArn=job.role,
        AlgorithmSpecification={
            "TrainingImage": job.image, "TrainingInputMode": input_mode,
            "MetricDefinitions": [{"Name": n, "Regex": regex} for n, regex in metrics.items()],
            "EnableSageMakerMetricsTimeSeries": True,
        },
        HyperParameters={name: json.dumps(value) for name, value in values.items()},
        InputDataConfig=[
            {"ChannelName": name, "DataSource": {"S3DataSource": _of_s3(*source)}}
            for name, source in channels.items()
        ],
        OutputDataConfig={"S3OutputPath": folder},
        ResourceConfig=job.hosts,
        StoppingCondition={"MaxRuntimeInSeconds": job.max_run, **wait},
        EnableManagedSpotTraining=bool(max_wait),
        CheckpointConfig=checkpoints and {"S3Uri": checkpoints, "LocalPath": CHECKPOINTS},
        ProfilerConfig={"DisableProfiler": True},  # train.py has its own
        Tags=job.tags,
    )  # fmt: skip


def tuning(training, ranges, objective, minimize, max_jobs, max_parallel_jobs, prefix):
    """CreateHyperParameterTuningJob.

    Args:
        training: the request of one training.
        ranges: {flag of train.py: ("Integer" or "Continuous", (lowest, highest), the scale)}, or
            {flag of train.py: ("Categorical", values)}.
        objective: the metric that tells which training is best.
        minimize: whether the lowest is.
        max_jobs, max_parallel_jobs: how many trainings, and how many at a time.
        prefix: of the job's name.
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
        HyperParameterTuningJobName=job_name(prefix, 32, "%y%m%d-%H%M"),
        HyperParameterTuningJobConfig={
            "Strategy": "Bayesian", "TrainingJobEarlyStoppingType": "Off",
            "ResourceLimits": {
                "MaxNumberOfTrainingJobs": max_jobs, "MaxParallelTrainingJobs": max_parallel_jobs,
            },
            "HyperParameterTuningJobObjective": {
                "Type": "Minimize" if minimize else "Maximize", "MetricName": objective,
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
        job: Job.
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
        StoppingCondition={"MaxRuntimeInSeconds": job.max_run},
        Tags=job.tags,
    )


def _of_s3(uri, how):
    return {"S3DataType": "S3Prefix", "S3Uri": uri, "S3DataDistributionType": how}


def _without_empty(**parts):
    return {name: part for name, part in parts.items() if part}
