"""Which share of a job this host does, where several hosts do it together.

SageMaker Processing tells each host who it is, in /opt/ml/config/resourceconfig.json:

    {"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}

and, in processingjobconfig.json beside it, whether the hosts see the same files.
https://docs.aws.amazon.com/sagemaker/latest/dg/build-your-own-processing-container.html
"""

import contextlib
import json
import os
from typing import Optional, Tuple

from absl import flags

from deepfm.data import datasets
from deepfm.errors import BadInput

FLAGS = flags.FLAGS


def define_flags():
    """Defines the flags that `share` reads."""
    flags.DEFINE_integer(
        "shard_index",
        None,
        "Which share of the job this host does, from 0. Default: its place in --resource_config.",
        lower_bound=0,
    )
    flags.DEFINE_integer(
        "num_shards",
        None,
        "Hosts that do the job together. Default: those of --resource_config, 1 without it.",
        lower_bound=1,
    )
    flags.DEFINE_string(
        "resource_config",
        "/opt/ml/config/resourceconfig.json",
        "Where SageMaker Processing tells the hosts of a job; it need not be there.",
    )
    flags.DEFINE_bool(
        "own_files",
        None,
        "Each host sees only its own files and does all of them. Default: true where SageMaker "
        "Processing says that the input is ShardedByS3Key.",
    )


def share() -> Tuple[int, int]:
    """(index of this host's share, number of shares) as the flags say, else SageMaker.

    Raises:
        BadInput: only one of the flags is given, no such share can be, or the file is broken.
    """
    index, number = FLAGS.shard_index, FLAGS.num_shards
    if index is None and number is None:
        path = FLAGS.resource_config
        if not os.path.exists(path):
            return 0, 1
        with _reading(path, "this host's share", "--shard_index and --num_shards") as found:
            host, hosts = found["current_host"], sorted(found["hosts"])
            if len(set(hosts)) < len(hosts):
                raise ValueError("a host is there twice")
            return hosts.index(host), len(hosts)
    if index is None:
        raise BadInput(f"--num_shards={number} needs --shard_index, one of 0 to {number - 1}.")
    if number is None:
        raise BadInput(f"--shard_index={index} needs --num_shards, at least {index + 1}.")
    if index >= number:
        raise BadInput(
            f"--shard_index={index} is not below --num_shards={number}; try {number - 1}."
        )
    return index, number


def own_files(*specs: Optional[str]) -> bool:
    """Whether a host does all the files that it sees, as no other host sees them.

    Args:
        specs: the flags that name them, comma lists; None for one that is not given.

    Raises:
        BadInput: some files are the host's own and others are not, or the file is broken.
    """
    if FLAGS.own_files is not None:
        return FLAGS.own_files
    path = os.path.join(os.path.dirname(FLAGS.resource_config), "processingjobconfig.json")
    if not os.path.exists(path):
        return False
    with _reading(path, "whether hosts see the same files", "--own_files or --noown_files") as said:
        inputs = [x["S3Input"] for x in said["ProcessingInputs"] if x.get("S3Input")]
        own = [x for x in inputs if x.get("S3DataDistributionType") == "ShardedByS3Key"]
        folders = [os.path.join(os.path.abspath(x["LocalPath"]), "") for x in own]
    names = [name.strip() for spec in specs if spec for name in spec.split(",")]
    inside = [os.path.join(os.path.abspath(x), "").startswith(tuple(folders)) for x in names]
    if any(inside) and not all(inside):
        raise BadInput(
            f"{names[inside.index(True)]} is ShardedByS3Key and {names[inside.index(False)]} is "
            "not; make both alike, or give --own_files or --noown_files."
        )
    return any(inside)


def part_of(data: datasets.DataSet, share: Tuple[int, int]) -> datasets.DataSet:
    """The data set with the files that are a host's share of it; BadInput where that is none."""
    index, number = share
    if len(data.files) < number:
        raise BadInput(
            f"{data.name}: has {len(data.files)} files, too few for {number} shards; try "
            f"--num_shards={len(data.files)}."
        )
    return data._replace(files=data.files[index::number])


def folder(output_dir: str, share: Tuple[int, int]) -> str:
    """Where a host puts its files: hosts that share a folder have one each in it."""
    index, number = share
    own = f"shard-{index:05d}-of-{number:05d}"
    return output_dir if number == 1 else os.path.join(output_dir, own)


@contextlib.contextmanager
def _reading(path, what, flags):
    """Yields the content of a file of SageMaker; BadInput where it does not tell `what`."""
    try:
        with open(path, encoding="utf-8") as f:
            yield json.load(f)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(f"{path}: does not tell {what} ({reason}); give {flags}.") from error
