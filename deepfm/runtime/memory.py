"""How large a model may be: what TensorFlow can hold, and what fits into the machine's memory.

Beyond that, TensorFlow 1.15 overflows 32-bit numbers or crashes, without saying why.
"""

import contextlib
import os
import pathlib
from typing import NamedTuple

from absl import logging

from deepfm.config import MAX_FIELDS, MAX_NUMBER
from deepfm.errors import BadInput

# Bytes of a process besides the model (200 MB more with TensorFlow 2.15), and numbers kept for each
# number of a layer in training; both are below what was measured, so that nothing that fits is
# refused.
_BESIDE, _OF_A_LAYER = 3 * 10**8, 1.5


class Load(NamedTuple):
    """What a job keeps in memory for a model besides its weights; the defaults are inference's.

    Attributes:
        batch_size: records that a replica computes at once.
        replicas: replicas in a process.
        copies: copies of the variables in a process.
        processes: processes on this machine, each with its own copies.
        trains: whether it trains.
        moments: numbers that the optimizer keeps for each weight.
        dense: whether the gradient of a table is as large as the table.
        evaluates: whether it evaluates during training, which takes another copy of the weights.
    """

    batch_size: int = 1
    replicas: int = 1
    copies: int = 1
    processes: int = 1
    trains: bool = False
    moments: int = 0
    dense: bool = False
    evaluates: bool = False


_OF_WEIGHTS = Load()


def check_sizes(config, one_machine: bool = True, load: Load = _OF_WEIGHTS):
    """Refuses (BadInput) sizes that no model can have, whether from a flag or a file, or, if it
    is on `one_machine`, that this machine cannot hold."""
    if not 1 <= config.field_size <= MAX_FIELDS:
        raise BadInput(f"--field_size must be between 1 and {MAX_FIELDS}, not {config.field_size}.")
    numbers = {name: getattr(config, name) for name in ("feature_size", "embedding_size")}
    for name, number in {**numbers, "deep_layers": max(config.deep_layers)}.items():
        if not 1 <= number <= MAX_NUMBER:
            raise BadInput(
                f"--{name} must be between 1 and {MAX_NUMBER}, TensorFlow's largest "
                f"size, not {number}."
            )
    if not one_machine:
        return
    needed, there = _needed(config, load), _memory()
    given = ",".join(map(str, config.deep_layers))
    sizes = (
        f"--feature_size={config.feature_size}, --embedding_size={config.embedding_size}, "
        f"--deep_layers={given} and --batch_size={load.batch_size}"
    )
    what = "training" if load.trains else "this job"
    if needed > there:
        raise BadInput(
            f"{sizes}: {what} takes {needed / 1e9:,.1f} GB, but only {there / 1e9:,.1f} GB may "
            "be used here; choose smaller sizes, or parameter servers (--distribution=ps)."
        )
    free = _free()
    if needed > free:
        logging.warning(
            "%s takes about %.1f GB, but only %.1f GB are free: other programs use the rest.",
            what.capitalize(), needed / 1e9, free / 1e9,
        )  # fmt: skip


def _needed(config, load) -> float:
    """Bytes that a job takes on this machine, at least."""
    layers = [config.field_size * config.embedding_size, *config.deep_layers, 1]
    kernels = [x * y for x, y in zip(layers, layers[1:])]
    tables, weights = config.feature_size * (config.embedding_size + 1), sum(kernels)
    numbers = load.copies * (tables + weights)
    batch = load.replicas * load.batch_size * sum(layers)
    if load.trains:
        numbers += load.copies * load.moments * (tables + weights)
        # Gradients; and a checkpoint copies what is not cut into slices.
        numbers += weights + load.dense * tables + max(kernels)
        numbers += load.evaluates * (tables + weights)
        batch *= _OF_A_LAYER
    return load.processes * (4 * (numbers + batch) + _BESIDE)


def available() -> int:
    """Bytes of memory that this machine has free and this process may use."""
    return min(_free(), _memory())


def _memory() -> int:
    """Bytes that this process may use: the machine's, or what its control group allows."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max"
            found.append(int(pathlib.Path(path).read_text()))
    return min(found)


def _free() -> int:
    """Bytes of memory that are free, or that the kernel frees on demand."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        _, _, rest = pathlib.Path("/proc/meminfo").read_text().partition("MemAvailable:")
        return int(rest.split()[0]) * 1024
    return _memory()
