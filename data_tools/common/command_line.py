"""The command line of a program, and which of the hosts of a job this one is.

Each field of a dataclass is a flag:

    @dataclasses.dataclass(frozen=True)
    class Options:
        input: str = flag("Files to read.", REQUIRED)
        seed: int = flag("Seed of the shuffle.", default=1, lower_bound=0)

Several hosts work on files of their own. SageMaker Processing names each in
/opt/ml/config/resourceconfig.json:

    {"current_host": "algo-1", "hosts": ["algo-1", "algo-2"]}

processingjobconfig.json beside it says whether the hosts see the same files.
https://docs.aws.amazon.com/sagemaker/latest/dg/build-your-own-processing-container.html
"""

import contextlib
import dataclasses
import json
import math
import os
from typing import NamedTuple, Optional, Tuple

from absl import flags, logging

from deepfm.errors import BadInput, refusing
from deepfm.runtime import program

FLAGS = flags.FLAGS
flags.disclaim_key_flags()  # flags defined here belong to the program, so its --help lists them

REQUIRED = dataclasses.MISSING
_DEFINE = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}


def flag(text: str, default=None, **limits):
    """A dataclass field that becomes a flag with the same name and type.

    Args:
        text: the flag's help.
        default: the default of field and flag, or REQUIRED if the user must give a value.
        limits: lower_bound and upper_bound of a number, or enum_values, the choices for a string.
    """
    return dataclasses.field(default=default, metadata=dict(limits, help=text))


def _define(field):
    kind = getattr(field.type, "__args__", (field.type,))[0]  # int for Optional[int]
    define = flags.DEFINE_enum if "enum_values" in field.metadata else _DEFINE[kind]
    required = field.default is REQUIRED
    help_text = field.metadata["help"] + (" Required." if required else "")
    default = None if required else field.default
    define(field.name, **dict(field.metadata, default=default, help=help_text))
    if kind is float:
        finite = lambda x: x is None or math.isfinite(x)
        flags.register_validator(field.name, finite, "it is not a finite number")


def run(main, options, hosts=True, without=()):
    """Runs `main(options)` as a program; `options` is the dataclass of its flags.

    Args:
        hosts: whether several hosts can do it, each on its own files; adds those of `define_flags`.
        without: names of fields that are no flags of this program.
    """
    fields = [x for x in dataclasses.fields(options) if x.metadata and x.name not in without]
    for field in fields:
        _define(field)
    if hosts:
        define_flags()
    FLAGS.set_default("verbosity", logging.INFO)

    def run_main():
        for field in fields:
            if field.default is REQUIRED and not FLAGS[field.name].value:
                raise BadInput(f"--{field.name} is required; give --{field.name}=VALUE.")
        main(options(**{field.name: FLAGS[field.name].value for field in fields}))

    program.run(run_main, when_ended="; nothing was written", tensorflow=False)


class Host(NamedTuple):
    """A host of a job.

    Attributes:
        index: its place among the hosts.
        number: of hosts; each of several writes to a folder of its own.
        own_files: whether no other host sees its files, which may be a part of a data set.
    """

    index: int = 0
    number: int = 1
    own_files: bool = False

    def folder(self, output_dir: str) -> str:
        """Where this host writes: output_dir, or its own folder there if there are several."""
        own = f"shard-{self.index:05d}-of-{self.number:05d}"
        return output_dir if self.number == 1 else os.path.join(output_dir, own)


ALONE = Host()


def define_flags():
    """Defines the flags that `this_host` reads."""
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


def this_host(*specs: Optional[str], on_spark: str = "") -> Host:
    """What the flags and SageMaker say of this host.

    Args:
        specs: the flags that name the files, comma lists; None for a flag that is not given.
        on_spark: the job of data_tools.on_spark that does the same, if there is one.

    Raises:
        BadInput: several hosts see the same files, or SageMaker's settings are broken.
    """
    (index, number), own = _place(), bool(specs) and _own_files(*specs)
    if number > 1 and not own:
        ways = ["use one host"]
        if specs:
            ways.append("give each files of its own (ShardedByS3Key, --own_files)")
        if on_spark:
            ways.append(f"use 'python -m data_tools.on_spark {on_spark}' (docs/spark.md)")
        raise BadInput(
            f"{FLAGS.resource_config}: each of {number} hosts would process all records; "
            f"{', or '.join(ways)}."
        )
    return Host(index, number, own)


def _place() -> Tuple[int, int]:
    """(index of this host, number of hosts) as SageMaker says; (0, 1) elsewhere."""
    path = FLAGS.resource_config
    if not os.path.exists(path):
        return 0, 1
    with _reading(path, "which host this is", "--resource_config=FILE") as found:
        mine, hosts = found["current_host"], sorted(found["hosts"])
        if len(set(hosts)) < len(hosts):
            raise ValueError("it names a host twice")
        return hosts.index(mine), len(hosts)


def _own_files(*specs):
    """Whether this host processes all files that it sees, because no other host sees them."""
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


@contextlib.contextmanager
def _reading(path, what, flags):
    """Yields the content of a SageMaker config file; BadInput if it does not give `what`."""
    wrong = refusing(f"{path}: does not say {what}", f"give {flags}")
    with wrong, open(path, encoding="utf-8") as f:
        yield json.load(f)
