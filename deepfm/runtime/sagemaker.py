"""What a process learns from SageMaker: its hosts and channels, and so its share of the records.

A channel is a data set that the service provides to each host: in File mode as a folder, in Pipe
mode as a FIFO for each epoch. Either every host gets all records of a channel (FullyReplicated), or
each host gets a part of its files (ShardedByS3Key). inputdataconfig.json says which.
"""

import json
import os
import re
from typing import Iterable, List, NamedTuple, Optional, Tuple

from deepfm.config.setting import OF_PROCESS, declares, setting
from deepfm.errors import BadInput

# fmt: off


@declares
class Job(NamedTuple):
    """The SageMaker job that this process belongs to; the defaults apply outside of a job."""

    hosts: Tuple[str, ...] = setting(OF_PROCESS, (),
        "Names of all hosts of the job: a comma list, or a JSON list as in SM_HOSTS.")
    current_host: Optional[str] = setting(OF_PROCESS, None, "Name of this host, one of --hosts.")
    pipe_mode: bool = setting(OF_PROCESS, False,
        "Read SageMaker's channels as FIFOs (input mode Pipe). Default: as the job's channels are "
        "configured.")
    training_channel_name: str = setting(OF_PROCESS, "training",
        "SageMaker channel to train on. In Pipe mode the other processes of a host read NAME-1, "
        "NAME-2 and so on.")
    evaluation_channel_name: str = setting(OF_PROCESS, "evaluation",
        "SageMaker channel to evaluate on.")
    enable_s3_shard: Optional[bool] = setting(OF_PROCESS, None,
        "Each host has its own part of the training channels (ShardedByS3Key). Default: as the "
        "job's channels are configured.")
    enable_data_multi_path: bool = setting(OF_PROCESS, False,
        "The training channels NAME, NAME-1 and so on of a host hold different records, one "
        "channel per process.")
    worker_per_host: int = setting(OF_PROCESS, 0,
        "Expected number of processes on each host; training refuses to start with another number. "
        "0 accepts any.", at_least=0)
    input_dir: str = setting(OF_PROCESS, "/opt/ml/input",
        "Folder with config/ and data/ of SageMaker's channels.")

    # fmt: on

    @property
    def num_hosts(self):
        return max(len(self.hosts), 1)

    @property
    def host(self):
        """Index of this host."""
        return self.hosts.index(self.current_host) if self.hosts else 0

    def channels(self):
        """{name: configuration} of the channels, {} if there is no inputdataconfig.json."""
        return read_config(self.input_dir, "inputdataconfig")

    def more_training_channels(self):
        """The names of the channels NAME-1, NAME-2 and so on, beside the training channel NAME."""
        return numbered(self.training_channel_name, self.channels())

    def is_sharded(self, channel: str, given: Optional[bool] = None) -> bool:
        """Whether each host has its own part of a channel's records; `given`: what a flag says.

        Raises:
            BadInput: that contradicts the channel's configuration, so all hosts would train on each
                record, or no host on some of them.
        """
        found = self.channels().get(channel, {}).get("S3DistributionType")
        sharded = found == "ShardedByS3Key"
        if given is None or self.num_hosts == 1:
            return sharded
        if found and given != sharded:
            harm = "train on each record again" if given else "lose records"
            raise BadInput(
                f"--enable_s3_shard={str(given).lower()}, but channel {channel} is {found}: the "
                f"{self.num_hosts} hosts would {harm}; "
                f"try --enable_s3_shard={str(not given).lower()}."
            )
        return given

    def check_divided_alike(self):
        """Refuses (BadInput) training channels of which not all give each host its own part."""
        names = [self.training_channel_name, *self.more_training_channels()]
        parts = [name for name in names if self.is_sharded(name)]
        whole = [name for name in names if name not in parts]
        if parts and whole and self.num_hosts > 1:
            raise BadInput(
                f"Channel {parts[0]} is ShardedByS3Key, but channel {whole[0]} is not, and hosts "
                "divide all training channels in the same way; make them all FullyReplicated."
            )

    def check(self, processes_of_host: int):
        """Refuses (BadInput) values that do not fit this process."""
        if self.hosts and self.current_host not in self.hosts:
            raise BadInput(
                f"--current_host={self.current_host} is not one of --hosts={','.join(self.hosts)}."
            )
        if self.worker_per_host and self.worker_per_host != processes_of_host:
            raise BadInput(
                f"--worker_per_host={self.worker_per_host}, but this host runs "
                f"{processes_of_host} processes; try --worker_per_host={processes_of_host}, or "
                f"let MPI start {self.worker_per_host} (processes_per_host of the job)."
            )


def numbered(name: str, channels: Iterable[str]) -> List[str]:
    """NAME-1, NAME-2 and so on among the names of channels."""
    return sorted(x for x in channels if re.fullmatch(rf"{re.escape(name)}-\d+", x))


def read_config(input_dir: str, name: str) -> dict:
    """What SageMaker says in a file of a job's configuration; {} if there is none."""
    path = os.path.join(input_dir, "config", f"{name}.json")
    try:
        with open(path) as f:
            return json.load(f)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise BadInput(f"{path} is not JSON ({error}).") from error
