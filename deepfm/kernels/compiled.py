"""The compiled operators, for the costliest work of a training step besides matrix products.

    python -m deepfm.kernels        builds them

TensorFlow's own operators (ops.py) do the same, more slowly.
"""

import os
import subprocess

from absl import logging

from deepfm.kernels import adam, build, dropout, first_layer, ftrl, parsing, reading, rows
from deepfm.kernels.build import library, raw_ops
from deepfm.kernels.ops import TENSORFLOW, Ops
from deepfm.records import library as of_records
from deepfm.runtime.tf import tf

_SECONDS = 300  # that building may take before a job starts, on a busy host


def built() -> bool:
    """Whether the library exists and can be loaded."""
    if not os.path.exists(library()):
        return False
    try:
        raw_ops()
    except tf.errors.NotFoundError:  # built for another system
        return False
    return True


def ready() -> bool:
    """Whether the library can be loaded, if need be after building it, once on each host."""
    seen = of_records.version(library())
    if built():
        return True
    logging.info("Building the compiled kernels, once on this host, in at most %d s.", _SECONDS)
    try:
        build.build(_SECONDS, seen)
        reason = "the library cannot be loaded"
    except (OSError, subprocess.SubprocessError) as error:
        reason = error
    if built():
        return True
    logging.warning(
        "The compiled kernels cannot be built (%s); training with TensorFlow's own operators takes "
        "about 3 times as long. Install g++, or build them before: `python -m deepfm.kernels`.",
        reason,
    )
    return False


class _Compiled(
    rows.Compiled, first_layer.Compiled, dropout.Compiled, adam.Compiled, ftrl.Compiled,
    reading.Compiled, parsing.Compiled, Ops,
):  # fmt: skip
    """The compiled operators; TensorFlow's take over what these cannot handle."""

    packed = adds_l2 = keeps_rows = True


class _OnServers(_Compiled):
    """The compiled operators for variables in parts, on parameter servers that have them too."""

    keeps_rows = False
    gather = Ops.gather


class _BesideServers(_OnServers):
    """The compiled operators for a worker of parameter servers that do not have them."""

    adds_l2 = False
    zeros, empty = Ops.zeros, Ops.empty
    clip_rows, adam, adam_rows = Ops.clip_rows, Ops.adam, Ops.adam_rows
    elapsed_adam, ftrl, ftrl_rows = Ops.elapsed_adam, Ops.ftrl, Ops.ftrl_rows


COMPILED = _Compiled()
ON_SERVERS, BESIDE_SERVERS = _OnServers(), _BesideServers()


def of_steps(ops, mode):
    """The Ops of training steps in a Mode, if data are read with `ops`."""
    ops = of_applied(ops)
    if not mode.partitioner or ops is not COMPILED:
        return ops
    return ON_SERVERS if mode.all_run(lambda: raw_ops().deepfm_zeros([0])) else BESIDE_SERVERS


def of_applied(ops):
    """The Ops of a model that is applied, if data are read with `ops`: GPUs have TensorFlow's."""
    return TENSORFLOW if tf.config.experimental.list_physical_devices("GPU") else ops
