"""The command line of a program: its flags are the fields of a dataclass, in their own words.

@dataclasses.dataclass(frozen=True)
class Options:
    input: str = flag("Files to read.")  # which must be given
    seed: int = flag("Of the draw.", default=1, lower_bound=0)
"""

import dataclasses

from absl import flags, logging

from data_tools.common import shards
from deepfm.errors import BadInput
from deepfm.runtime import program

FLAGS = flags.FLAGS
flags.disclaim_key_flags()  # those that are defined here are of the program that calls

REQUIRED = dataclasses.MISSING
_DEFINE = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
}


def flag(text: str, default=None, **limits):
    """A field that is a flag of the same name and type.

    Args:
        text: the help.
        default: of both; REQUIRED: none, it must be given.
        limits: lower_bound and upper_bound of a number, or enum_values, which a word is one of.
    """
    return dataclasses.field(default=default, metadata=dict(limits, help=text))


def _define(field):
    kind = getattr(field.type, "__args__", (field.type,))[0]  # of Optional[int], int
    define = flags.DEFINE_enum if "enum_values" in field.metadata else _DEFINE[kind]
    default = None if field.default is REQUIRED else field.default
    define(field.name, default=default, **field.metadata)


def run(main, options, sharded=True):
    """Runs `main(options with the values of the flags)` as a program.

    Args:
        main: the program.
        options: the dataclass of its flags.
        sharded: whether several hosts may do the job together, as the flags of `shards` say.
    """
    fields = [field for field in dataclasses.fields(options) if field.metadata]
    for field in fields:
        _define(field)
    if sharded:
        shards.define_flags()
    FLAGS.set_default("verbosity", logging.INFO)

    def run_main():
        for field in fields:
            if field.default is REQUIRED and not FLAGS[field.name].value:
                raise BadInput(f"--{field.name} must be given.")
        main(options(**{field.name: FLAGS[field.name].value for field in fields}))

    program.run(run_main, when_ended="; nothing was written")
