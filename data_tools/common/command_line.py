"""The command line of a program: each field of a dataclass is a flag.

@dataclasses.dataclass(frozen=True)
class Options:
    input: str = flag("Files to read.", REQUIRED)
    seed: int = flag("Seed of the shuffle.", default=1, lower_bound=0)
"""

import dataclasses
import math
from typing import Dict, Optional

from absl import flags, logging

from data_tools.common import shards
from deepfm.errors import BadInput
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


def run(
    main,
    options,
    hosts=True,
    removed: Optional[Dict[str, str]] = None,
):
    """Runs `main(options)` as a program, with the options read from the flags.

    Args:
        main: the program.
        options: the dataclass of its flags.
        hosts: whether several hosts can do it, each on its own files; adds the flags of `shards`.
        removed: for each flag that the program had once, the sentence that refuses it.
    """
    fields = [field for field in dataclasses.fields(options) if field.metadata]
    for field in fields:
        _define(field)
    if hosts:
        shards.define_flags()
        removed = {**shards.REMOVED, **(removed or {})}
    FLAGS.set_default("verbosity", logging.INFO)

    def run_main():
        for field in fields:
            if field.default is REQUIRED and not FLAGS[field.name].value:
                raise BadInput(f"--{field.name} is required; give --{field.name}=VALUE.")
        main(options(**{field.name: FLAGS[field.name].value for field in fields}))

    program.run(run_main, when_ended="; nothing was written", tensorflow=False, removed=removed)
