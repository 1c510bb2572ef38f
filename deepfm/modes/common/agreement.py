"""Checks that processes which take each step together have the same flags, data and weights.

Each process updates its own copy of the model with the same sums. If one of them relies on its own
files, flags or clock, its model becomes a different one, and nothing else would show that.
"""

from typing import Any, Dict, List

from deepfm.errors import BadInput
from deepfm.runtime.tf import tf

v1 = tf.compat.v1

EVERY = 1000  # steps between two comparisons of the weights
_NUMBERS = 1 << 16  # of a variable that one comparison covers
_STRIDE = 7919  # rows by which the compared ones move on from one step to the next
_TOLERANCE = 1e-4  # of the sum of absolute values; other kinds of processors round differently


def check_alike(values: List[Dict[str, Any]]):
    """Refuses (BadInput) a value that differs, of {flag: value} of each process, by rank, without
    those that it does not know."""
    first, *others = values
    for rank, theirs in enumerate(others, 1):
        for name, value in first.items():
            if theirs.get(name, value) != value:
                raise BadInput(
                    f"--{name}: rank 0 has {value}, rank {rank} has {theirs[name]}; start all "
                    "ranks with the same flags, code and data."
                )


class SameWeights(v1.train.SessionRunHook):
    """Compares the weights of all processes every EVERY steps and at the end.

    It compares the sum of all rows of a small variable, and of a changing subset of a large one, by
    Mode.gather. The message names the newest checkpoint of model_dir.
    """

    def __init__(self, gather, model_dir: str):
        self._gather, self._model_dir = gather, model_dir
        self._steps = 0

    def begin(self):
        step = tf.cast(v1.train.get_global_step(), tf.int64)
        self._names = [variable.op.name for variable in v1.global_variables()]
        parts = [_some(variable, step) for variable in v1.global_variables()]
        sums = [tf.stack([tf.reduce_sum(x), tf.reduce_sum(tf.abs(x))]) for x in parts]
        self._all = self._gather(tf.stack(sums)[tf.newaxis], "same_weights")  # [ranks, V, 2]

    def after_run(self, run_context, run_values):
        self._steps += 1
        if self._steps % EVERY == 0:
            self._compare(run_context.session)

    def end(self, session):
        if self._steps % EVERY:
            self._compare(session)

    def _compare(self, session):
        sums = session.run(self._all)
        differ = abs(sums[:, :, 0] - sums[0, :, 0]) > _TOLERANCE * sums[0, :, 1]
        if not differ.any():
            return
        rank, variable = next(zip(*differ.nonzero()))
        kept = tf.train.latest_checkpoint(self._model_dir)
        raise OSError(
            f"rank {rank} has different weights than rank 0 (sum of {self._names[variable]}: "
            f"{sums[rank, variable, 0]:.9g} against {sums[0, variable, 0]:.9g}), found after "
            f"{self._steps} steps. Do not trust the model since the last comparison; the newest "
            f"checkpoint is {kept or 'none'}."
        )


def _some(variable, step):
    """float64 [n]: the numbers of a variable; of a large one, a subset that changes by the step."""
    rows = variable.shape.as_list()[0] if variable.shape.ndims else 1
    width = variable.shape.num_elements() // max(rows, 1)
    count = max(_NUMBERS // max(width, 1), 1)
    with tf.device(variable.device):
        if count < rows:
            where = (tf.range(count, dtype=tf.int64) * (rows // count) + step * _STRIDE) % rows
            variable = tf.gather(variable, where)
        return tf.cast(tf.reshape(variable, [-1]), tf.float64)
