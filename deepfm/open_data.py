"""Which data a job reads, from files or from SageMaker's channels, and which part this process.

`job` is a JobConfig everywhere, `flag` the name of the flag that names the data.
"""

from typing import Optional

from deepfm.data import data_check, datasets, pipe_mode
from deepfm.errors import BadInput
from deepfm.runtime import remote_files, sagemaker


def find(job, flag: str) -> datasets.DataSet:
    """The data set that a flag names, or in Pipe mode the channel that stands for it."""
    if job.sagemaker.pipe_mode:
        return _open_channel(job, flag)
    spec = getattr(job, flag)
    if not spec:
        channels = ", ".join(job.sagemaker.channels())
        channels = channels and f" (the job's channels are {channels})"
        raise BadInput(
            f"--{flag} is missing; give a directory, a glob or a list of files{channels}."
        )
    remote_files.check_readable(spec, flag)
    sharded = _is_sharded(job, flag)
    partial = sharded or (flag == "training_data_dir" and bool(job.sagemaker.enable_s3_shard))
    data = datasets.find(spec, flag, job.data_format, partial)
    data_check.check_gzip(data)
    divided = job.distribution.num_processes > 1
    if divided and not (flag == "val_data_dir" and evaluates_alone(job)):
        data = data_check.count_rows(data)
    return data._replace(sharded=sharded)


def evaluates_alone(job) -> bool:
    """Whether a process evaluates all records by itself."""
    return job.eval_on_all_ranks or not job.distribution.synchronous


def _is_sharded(job, flag):
    """Whether each host has its own part of the records."""
    if flag == "training_data_dir":
        return job.sagemaker.training_is_sharded()
    if flag == "infer_data_dir":  # which no channel is named after
        return False
    found = job.sagemaker.is_sharded(job.sagemaker.evaluation_channel_name)
    if found and evaluates_alone(job) and job.sagemaker.num_hosts > 1:
        raise BadInput(
            f"Channel {job.sagemaker.evaluation_channel_name} is ShardedByS3Key, but here a "
            "process evaluates all records by itself; make the channel FullyReplicated."
        )
    return found


def _open_channel(job, flag):
    found, mode = job.sagemaker, job.distribution
    if flag == "infer_data_dir":
        raise BadInput("--pipe_mode: --task_type=infer reads files; start it with input mode File.")
    for name, bad in (
        ("max_bad_records", job.max_bad_records > 0),
        ("data_format", job.data_format == "libsvm"),
        ("eval_on_all_ranks", job.eval_on_all_ranks and mode.num_processes > 1),
    ):
        if bad:
            raise BadInput(
                f"--pipe_mode cannot be used with --{name}={getattr(job, name)}: a channel is read "
                "once, as TFRecords; leave that flag out, or start the job with input mode File."
            )
    nothing = datasets.DataSet([], "tfrecord", None, None)
    channel, own = found.evaluation_channel_name, True
    if flag == "training_data_dir":
        channel, own = found.training_channel_name, found.enable_data_multi_path
        channel += f"-{mode.local_rank}" if mode.local_rank else ""
    elif mode.local_rank:
        return nothing  # the host's first process reads them
    pipe = pipe_mode.open_channel(found, channel)
    return nothing._replace(
        name=f"channel {channel}", pipe=pipe, own_channel=own, sharded=_is_sharded(job, flag)
    )


def find_validation(job) -> Optional[datasets.DataSet]:
    """The data set to evaluate on, or None."""
    if not job.sagemaker.pipe_mode:
        return find(job, "val_data_dir") if job.val_data_dir else None
    mode = job.distribution
    if job.sagemaker.evaluation_channel_name not in job.sagemaker.channels():
        return None
    return find(job, "val_data_dir") if mode.synchronous or mode.rank == 0 else None


def with_share(job, data: datasets.DataSet):
    """The job with the share of a data set that this process reads."""
    mode, of_job = job.distribution, job.sagemaker
    found = sagemaker.share(
        data.own_channel,
        data.sharded,
        everyone=sagemaker.Share(mode.num_processes, mode.rank),
        hosts=sagemaker.Share(of_job.num_hosts, of_job.host),
        of_host=sagemaker.Share(mode.local_size, mode.local_rank),
    )
    return job._replace(input=job.input._replace(num_shares=found.of, share=found.index))
