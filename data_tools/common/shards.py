"""Which share of a job this host does, when several hosts work on it together.

SageMaker Processing names each host in /opt/ml/config/resourceconfig.json:

    {"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}

processingjobconfig.json beside it says whether the hosts see the same files.
https://docs.aws.amazon.com/sagemaker/latest/dg/build-your-own-processing-container.html
"""

import contextlib
import json
import os
from typing import Optional, Tuple

from absl import flags

from deepfm.errors import BadInput

FLAGS = flags.FLAGS
flags.disclaim_key_flags()  # flags defined here belong to the program, so its --help lists them


def define_flags(sharded: bool = True):
    """Defines the flags that `host` and `own_files` read, and those of `share` if `sharded`."""
    if sharded:
        flags.DEFINE_integer(
            "shard_index",
            None,
            "Which share of the job this host does, 0 to num_shards - 1; set it with --num_shards "
            "on each host. Default: this host's place in --resource_config, else 0.",
            lower_bound=0,
        )
        flags.DEFINE_integer(
            "num_shards",
            None,
            "Number of hosts that share the job. Default: the hosts in --resource_config, else 1.",
            lower_bound=1,
        )
    flags.DEFINE_string(
        "resource_config",
        "/opt/ml/config/resourceconfig.json",
        "JSON file in which SageMaker Processing names the hosts of a job; may be missing.",
    )
    flags.DEFINE_bool(
        "own_files",
        None,
        "True: this host sees files that no other host sees, and processes all of them. False: "
        "all hosts see the same files. Default: true if SageMaker Processing reports the input as "
        "ShardedByS3Key.",
    )


def share() -> Tuple[int, int]:
    """(index of this host's share, number of shares) from the flags, else from SageMaker.

    Raises:
        BadInput: only one of the flags is given, they contradict, or the file is broken.
    """
    index, number = FLAGS.shard_index, FLAGS.num_shards
    if index is None and number is None:
        return host("--shard_index and --num_shards")
    if index is None:
        raise BadInput(f"--num_shards={number} needs --shard_index, from 0 to {number - 1}.")
    if number is None:
        raise BadInput(f"--shard_index={index} needs --num_shards, at least {index + 1}.")
    if index >= number:
        raise BadInput(
            f"--shard_index={index} must be below --num_shards={number}, so at most {number - 1}."
        )
    return index, number


def host(instead: str = "--resource_config=FILE") -> Tuple[int, int]:
    """(index of this host, number of hosts) as SageMaker says; (0, 1) elsewhere.

    Args:
        instead: the flags to give where its file is broken, which is a BadInput.
    """
    path = FLAGS.resource_config
    if not os.path.exists(path):
        return 0, 1
    with _reading(path, "this host's share", instead) as found:
        mine, hosts = found["current_host"], sorted(found["hosts"])
        if len(set(hosts)) < len(hosts):
            raise ValueError("it names a host twice")
        return hosts.index(mine), len(hosts)


def own_files(*specs: Optional[str]) -> bool:
    """Whether this host processes all files that it sees, because no other host sees them.

    Args:
        specs: the flags that name the files, comma lists; None for a flag that is not given.

    Raises:
        BadInput: some of the files are the host's alone and others not, or the config is broken.
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
            "not; distribute both alike, or give --own_files or --noown_files."
        )
    return any(inside)


def part_of(data, share: Tuple[int, int]):
    """The data set with only this host's share of the files; BadInput if there are too few."""
    index, number = share
    if len(data.files) < number:
        raise BadInput(
            f"{data.name}: has {len(data.files)} files, too few for {number} shards; try "
            f"--num_shards={len(data.files)}."
        )
    return data._replace(files=data.files[index::number])


def folder(output_dir: str, share: Tuple[int, int]) -> str:
    """Where this host writes: output_dir, or its own folder there if there are several hosts."""
    index, number = share
    own = f"shard-{index:05d}-of-{number:05d}"
    return output_dir if number == 1 else os.path.join(output_dir, own)


@contextlib.contextmanager
def _reading(path, what, flags):
    """Yields the content of a SageMaker config file; BadInput if it does not give `what`."""
    try:
        with open(path, encoding="utf-8") as f:
            yield json.load(f)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(f"{path}: does not say {what} ({reason}); give {flags}.") from error
