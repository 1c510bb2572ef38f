"""SageMaker's Pipe mode: a channel is one FIFO per epoch, read once and by one process.

SageMaker's own PipeModeDataset reads them. It keeps the number of the next FIFO in a file, waits
for hours if a FIFO is missing, and takes bytes away from any other process that reads it. So this
module first checks that the channel and its FIFO exist and that no other process reads them.
"""

import os
import time
from typing import NamedTuple

from absl import logging

from deepfm.config import JobConfig
from deepfm.errors import BadInput, listed
from deepfm.records import atomic_files
from deepfm.runtime.sagemaker import Job
from deepfm.runtime.tf import pipe_mode_dataset, tf

_PATIENCE = 25  # seconds to wait for the FIFO of an epoch


class Pipe(NamedTuple):
    """A channel that only this process reads.

    Attributes:
        channel: its name.
        input_dir: the folder that holds config/ and data/.
    """

    channel: str
    input_dir: str

    @property
    def state_dir(self):
        return os.path.join(os.path.dirname(self.input_dir.rstrip("/")), "pipe_state")

    def fifo(self):
        """The path of the FIFO to read next."""
        number = "0"
        path = os.path.join(self.state_dir, f".{self.channel}-pipe_mode-state")
        if os.path.exists(path):
            with open(path) as f:
                number = f.read().strip() or "0"
        return os.path.join(self.input_dir, "data", f"{self.channel}_{number}")


def open_channel(job: Job, channel: str) -> Pipe:
    """Reserves a channel for this process.

    Raises:
        BadInput: there is no such channel, it is not in Pipe mode, or another process reads it.
    """
    channels = job.channels()
    if channel not in channels:
        raise BadInput(
            f"--pipe_mode: channel {channel} is not among the job's "
            f"({', '.join(channels) or 'it has none'}); each process of a host needs its own: "
            f"{job.training_channel_name}, {job.training_channel_name}-1 and so on."
        )
    mode = channels[channel].get("TrainingInputMode", "File")
    if mode.lower() != "pipe":
        raise BadInput(
            f"--pipe_mode: channel {channel} has input mode {mode}; start the job with input mode "
            "Pipe, or give --pipe_mode=false."
        )
    pipe = Pipe(channel, job.input_dir)
    os.makedirs(pipe.state_dir, exist_ok=True)
    path = os.path.join(pipe.state_dir, f".{channel}-reader")
    lock = os.open(path, os.O_CREAT | os.O_WRONLY)  # for the life of this process
    if not atomic_files.lock(lock, if_unknown=True):
        raise BadInput(
            f"--pipe_mode: another process of this host reads channel {channel}, and a FIFO has "
            "one reader; give each process a channel of its own, or start one process."
        )
    _wait_for_fifo(pipe)
    return pipe


def check_flags(flag: str, job: JobConfig):
    """Refuses (BadInput) flags that do not go with a channel in the place of the data of `flag`."""
    asked, mode = job.input, job.distribution
    if flag == "infer_data_dir":
        raise BadInput("--pipe_mode: --task_type=infer reads files; start it with input mode File.")
    for name, bad in (
        ("max_bad_records", asked.max_bad_records > 0),
        ("eval_on_all_ranks", asked.eval_on_all_ranks and mode.size > 1),
        ("evaluate_first", job.evaluate_first and job.task_type == "train"),
    ):
        if bad:
            raise BadInput(
                f"--pipe_mode cannot be used with --{name}={job.flags.get(name)}: a channel is "
                "read once; leave that flag out, or start the job with input mode File."
            )
    if flag == "training_data_dir" and asked.cache not in ("none", "memory"):
        raise BadInput(
            f"--pipe_mode cannot be used with --cache={asked.cache}: a later job would read the "
            "records in that file, whatever the channel then has; try --cache=memory."
        )


def check_all_read(job: Job, processes: int):
    """Refuses (BadInput) more training channels, each with other records, than this host has
    processes that train."""
    channels = [job.training_channel_name, *job.more_training_channels()]
    if len(channels) > processes:
        raise BadInput(
            f"--enable_data_multi_path: each process of a host reads one training channel; the job "
            f"has {len(channels)} ({listed(channels)}) for {processes} process(es); let MPI start "
            f"{len(channels)} (processes_per_host of the job), or give it {processes} channel(s)."
        )


def _wait_for_fifo(pipe):
    started = time.monotonic()
    while not os.path.exists(pipe.fifo()):
        if time.monotonic() - started > _PATIENCE:
            raise BadInput(
                f"{pipe.fifo()}: still missing after {_PATIENCE} s; channel {pipe.channel} was not "
                "fed, or for fewer epochs than --num_epochs."
            )
        time.sleep(0.1)


def records(pipe: Pipe, record_format: str) -> tf.data.Dataset:
    """string []: the raw records of an epoch; every iteration reads the next FIFO."""
    PipeModeDataset = pipe_mode_dataset()

    def ready():
        _wait_for_fifo(pipe)
        logging.info("Reading %s.", pipe.fifo())
        return 0

    def read(_):
        with tf.control_dependencies([tf.compat.v1.py_func(ready, [], tf.int64)]):
            return PipeModeDataset(
                pipe.channel,
                record_format=record_format,
                state_dir=pipe.state_dir,
                pipe_dir=os.path.join(pipe.input_dir, "data"),
                config_dir=os.path.join(pipe.input_dir, "config"),
            )

    # Opens the FIFO only for the first record: repeat and shuffle make one iterator too many.
    return tf.data.Dataset.range(1).flat_map(read)
