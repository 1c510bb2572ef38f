"""The flags of train.py, each from the declaration of a setting. `train.py --help` lists them.

Flags that the article's code has keep their names, so that its launch notebooks keep working.
"""

import contextlib
import json
import math
import os
from typing import NamedTuple, Optional, Tuple

from absl import flags

from deepfm.config import InputConfig, JobConfig, ModeFlags, ModelConfig, OptimizerConfig
from deepfm.config.setting import OF_PROCESS, declares, setting
from deepfm.errors import words_of
from deepfm.modes import NAMES
from deepfm.runtime import sagemaker

FLAGS = flags.FLAGS

# fmt: off

_HOSTS = "instead of TF_CONFIG; a comma list of host:port."


@declares
class Start(NamedTuple):
    """What only train.py uses, before there is a job."""

    distribution: str = setting(OF_PROCESS, "auto",
        f"How to distribute training: {', '.join(NAMES)}; auto chooses ps or horovod if the "
        "environment was set up by their launchers, else local. The numbers of dist_mode: 0 auto, "
        "1 and 2 ps, 3 horovod.",
        choices=NAMES, spelled={"0": "auto", "1": "ps", "2": "ps", "3": "horovod"},
        alias="dist_mode")
    ps_hosts: Tuple[str, ...] = setting(OF_PROCESS, (), f"The parameter servers, {_HOSTS}")
    worker_hosts: Tuple[str, ...] = setting(OF_PROCESS, (),
        f"The processes that train, the chief first, {_HOSTS}")
    job_name: Optional[str] = setting(OF_PROCESS, None,
        "What this process is, with --ps_hosts: ps or worker.")
    task_index: int = setting(OF_PROCESS, 0,
        "Its number in --ps_hosts or --worker_hosts; worker 0 is the chief.", at_least=0)
    num_threads: int = setting(OF_PROCESS, 0,
        "Sets --intra_op_threads and --inter_op_threads, where these are not given.",
        at_least=0, at_most=1024)
    compiled_kernels: bool = setting(OF_PROCESS, True,
        "Use the compiled kernels. If they are missing, the job builds them first, in at most 300 "
        "s; without a compiler, and with False, it uses TensorFlow's own operators.")
    perform_shuffle: bool = setting(OF_PROCESS, True,
        "Shuffle the training records; False is the same as --shuffle_buffer=0.")
    learning_rate_scale: float = setting(OF_PROCESS, 1.0,
        "Factor for --learning_rate. With 4 ranks, 1.5 helped; their number as factor never did.",
        at_least=0)

# fmt: on

_CONFIGS = JobConfig, InputConfig, sagemaker.Job, ModelConfig, OptimizerConfig, ModeFlags, Start
SETTINGS = {x.flag: x for config in _CONFIGS for x in config.settings.values() if x.help}


class _WholeNumber(flags.IntegerParser):
    """An integer, also written 3.0, as hyperparameter tuning passes it."""

    def convert(self, argument):
        if isinstance(argument, str) and argument.endswith(".0"):
            argument = argument[:-2]
        with contextlib.suppress(ValueError):
            return super().convert(argument)
        raise ValueError(f"{argument!r} is not a whole number")


class _Finite(flags.FloatParser):
    """A number other than nan and inf."""

    def convert(self, argument):
        number = super().convert(argument)
        if not math.isfinite(number):
            raise ValueError(f"{argument!r} is not a finite number")
        return number


class _Numbers(flags.ArgumentParser):
    """A comma list of numbers, as a tuple."""

    syntactic_help = "a comma separated list of numbers"

    def __init__(self, each):
        self._setting = each

    def parse(self, argument):
        if isinstance(argument, tuple):
            return argument
        with contextlib.suppress(ValueError):
            words = filter(str.strip, str(argument).split(","))
            numbers = tuple(map(self._setting.type, words))
            if numbers and all(map(self._setting.allows, numbers)):
                return numbers
        raise ValueError(f"{argument!r} is not {self._setting.wanted}")


class _Names(flags.ArgumentParser):
    """A comma list of names, or a JSON list as in SM_HOSTS, as a tuple."""

    def parse(self, argument):
        return argument if isinstance(argument, tuple) else words_of(argument)


class _Name(flags.EnumParser):
    """One of some names, in any case, or what the article's scripts call it."""

    def __init__(self, each):
        super().__init__(each.choices)
        self._spelled = each.spelled

    def parse(self, argument):
        name = argument.lower()
        return super().parse(self._spelled.get(name, name))


def _define(each):
    """Defines the flag of a setting."""
    default = each.default if each.asked is ... else each.asked
    if each.type is bool:
        flags.DEFINE_bool(each.flag, default, each.help)
    elif each.choices and not each.spelled:
        flags.DEFINE_enum(each.flag, default, each.choices, each.help)
    else:
        if each.many and default:
            default = ",".join(map(str, default))
        as_text = flags.ArgumentSerializer()
        flags.DEFINE(_parser(each), each.flag, default, each.help, serializer=as_text)
    if each.alias:
        flags.DEFINE_alias(each.alias, each.flag)


def _parser(each):
    if each.spelled:
        return _Name(each)
    if each.many:
        return _Names() if each.type is str else _Numbers(each)
    if each.type is str:
        return flags.ArgumentParser()
    bounds = (x if x is None else each.type(x) for x in (each.at_least, each.at_most))
    return {int: _WholeNumber, float: _Finite}[each.type](*bounds)


for _setting in SETTINGS.values():
    _define(_setting)
flags.register_validator(
    "profile_steps",
    lambda x: not x or x == (min(x), max(x)),
    "give the first and the last step, such as --profile_steps=100,120.",
)


def values(config):
    """{field: value of its flag} of a config's fields that have one, declared here or elsewhere."""
    flag = lambda name: config.settings[name].flag if name in config.settings else name
    return {name: FLAGS[flag(name)].value for name in config._fields if flag(name) in SETTINGS}


def of_flags(config, **others):
    """A `config`, such as InputConfig, from the flags of its fields and from `others`."""
    return config(**{**values(config), **others})


def take_defaults_from(environment):
    """Sets the flags that were not given from SageMaker's SM_* variables in `environment`."""

    def default(flag, value):
        if value and not FLAGS[flag].present:
            FLAGS[flag].parse(value)

    for flag in ("hosts", "input_dir", "num_cpus", "num_gpus"):
        default(flag, environment.get(f"SM_{flag.upper()}"))
    # MPI gives all hosts the variables of the first one.
    resources = sagemaker.read_config(FLAGS.input_dir, "resourceconfig")
    default("current_host", resources.get("current_host", environment.get("SM_CURRENT_HOST")))
    default("intra_op_threads", FLAGS.num_threads)
    default("inter_op_threads", FLAGS.num_threads)
    default("servable_model_dir", environment.get("SM_MODEL_DIR"))
    output = environment.get("SM_OUTPUT_DATA_DIR")
    default("model_dir", output and os.path.join(output, "model"))
    folder = lambda channel: environment.get(f"SM_CHANNEL_{channel.upper()}")
    training = FLAGS.training_channel_name
    channels = json.loads(environment.get("SM_INPUT_DATA_CONFIG", "{}"))
    default("pipe_mode", channels.get(training, {}).get("TrainingInputMode", "File") == "Pipe")
    folders = [folder(training)]
    if FLAGS.enable_data_multi_path:
        names = json.loads(environment.get("SM_CHANNELS", "[]"))
        folders += map(folder, sagemaker.numbered(training, names))
    every, asked = ",".join(filter(None, folders)), FLAGS.training_data_dir
    if asked and folders[0] and asked.rstrip("/") == folders[0].rstrip("/"):
        FLAGS.training_data_dir = every  # the article's notebooks name the first, and mean all
    default("training_data_dir", every)
    default("val_data_dir", folder(FLAGS.evaluation_channel_name))


def changed():
    """{name: value} of the flags that differ from their defaults."""
    return {x: FLAGS[x].value for x in SETTINGS if FLAGS[x].value != FLAGS[x].default}
