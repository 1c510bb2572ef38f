"""Which share of a job this host does, where several hosts do it together.

SageMaker Processing tells each host who it is, in /opt/ml/config/resourceconfig.json:

    {"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}

https://docs.aws.amazon.com/sagemaker/latest/dg/build-your-own-processing-container.html
"""

import json
import os
from typing import Tuple

from absl import flags

from deepfm.entry import BadInput

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


def share() -> Tuple[int, int]:
    """(index of this host's share, number of shares) as the flags say, else SageMaker.

    Raises:
        BadInput: only one of the flags is given, no such share can be, or the file is broken.
    """
    index, number = FLAGS.shard_index, FLAGS.num_shards
    if index is None and number is None:
        path = FLAGS.resource_config
        return _from_sagemaker(path) if os.path.exists(path) else (0, 1)
    if index is None:
        raise BadInput(f"--num_shards={number} needs --shard_index, one of 0 to {number - 1}.")
    if number is None:
        raise BadInput(f"--shard_index={index} needs --num_shards, at least {index + 1}.")
    if index >= number:
        raise BadInput(
            f"--shard_index={index} is not below --num_shards={number}; try {number - 1}."
        )
    return index, number


def _from_sagemaker(path):
    try:
        with open(path, encoding="utf-8") as f:
            found = json.load(f)
        host, hosts = found["current_host"], sorted(found["hosts"])
        if len(set(hosts)) < len(hosts):
            raise ValueError("a host is there twice")
        return hosts.index(host), len(hosts)
    except (ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise BadInput(
            f"{path}: does not tell this host's share ({reason}); give --shard_index and "
            "--num_shards."
        ) from error
