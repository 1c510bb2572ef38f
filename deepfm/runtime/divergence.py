"""What in the data makes training go wrong, and the message for a model that is not finite."""

import glob
import os
import time

import numpy as np
from absl import logging

from deepfm.errors import BadInput
from deepfm.runtime.tf import tf

v1 = tf.compat.v1

_SYNC_SECONDS = 60  # that a checkpoint may take
_LARGE = 100  # of a value; at a rate of .001, Adam then moves a logit by .1 in a step
_SATURATED = 0.1  # share of the predictions
_FIGURES = "deepfm_figures_of_weights"  # collection


def diverged(step, what, figures, model_dir):
    """The error for a model that is no longer finite; `figures` are those of figures_of_weights."""
    end = time.monotonic() + _SYNC_SECONDS  # a checkpoint may still be on its way to the disk
    while glob.glob(os.path.join(model_dir, "model.ckpt-*_*")) and time.monotonic() < end:
        time.sleep(0.02)
    kept = tf.train.latest_checkpoint(model_dir)
    state = f"the last good checkpoint is {kept}" if kept else "no checkpoint was saved before"
    worst = max(range(len(figures)), key=lambda i: (figures[i][0] / figures[i][1], figures[i][2]))
    name, (bad, size, largest) = v1.trainable_variables()[worst].op.name, figures[worst]
    where = f"{bad:,.0f} of {size:,.0f} are not finite" if bad else f"the largest is {largest:.3g}"
    return BadInput(
        f"step {step}: {what}; the weights {name} are worst, {where}; {state}. Try a smaller "
        "--learning_rate, or --clip_norm=10."
    )


def figures_of_weights():
    """Of each trainable variable its non-finite numbers, numbers, largest number: float64 [3]."""
    made = v1.get_collection(_FIGURES)  # by another hook
    for variable in [] if made else v1.trainable_variables():
        with tf.device(variable.device):
            value = tf.convert_to_tensor(variable)
            bad = tf.math.count_nonzero(~tf.math.is_finite(value))
            figures = bad, value.shape.num_elements(), tf.reduce_max(tf.abs(value))
            v1.add_to_collection(_FIGURES, tf.stack([tf.cast(x, tf.float64) for x in figures]))
    return v1.get_collection(_FIGURES)


def warn_of_values(ranges):
    """Warns of fields with large values; of each, `ranges` has [smallest, largest] or None, as in
    dataset.json."""
    large = [i for i, x in enumerate(ranges) if x and max(-x[0], x[1]) > _LARGE]
    if large:
        others = f", and {len(large) - 1} more fields are like it" if large[1:] else ""
        logging.warning(
            "Field %d is not scaled: its values reach from %.6g to %.6g (dataset.json)%s. "
            "Predictions will saturate: scale it to [0, 1], or take logarithms.",
            large[0], *ranges[large[0]], others,
        )  # fmt: skip


def warn_of_saturation(share: float, name: str):
    """Warns of predictions that are mostly 0 or 1; `share` of those on `name` are."""
    if share > _SATURATED:
        logging.warning(
            "%.0f %% of the predictions on %s are saturated: 0 or 1 to seven digits. Scale the "
            "values of the records, or try a smaller --learning_rate.", 100 * share, name,
        )  # fmt: skip


def out_of_order(tenths) -> bool:
    """Whether labels come in an order that is not random.

    In random order, the number of label 1 in n records is off its expectation by more than t with
    probability at most 2 exp(-t^2 / 2 / (n p (1 - p) + t/3)) (Bernstein's inequality). The limit is
    where that is 3e-8: at 6 standard errors, or more of them if the records are few. `tenths` has
    [records, records with label 1] of each tenth of the records, as they are read.
    """
    rows, positives = np.transpose(tenths)
    rate = positives.sum() / max(rows.sum(), 1)
    off = np.abs(positives - rate * rows)
    return bool((off > 6 * np.sqrt(rows * rate * (1 - rate) + off / 3)).any())


class LabelOrder(v1.train.SessionRunHook):
    """Warns of the labels of a run's first epoch if they are all alike, or come in no random order.

    Args:
        progress: ProgressHook, which comes before this hook.
        job: JobConfig; the processes of its Mode look together, at the same step or at the end.
        name: of the data.
        steps: own steps of the epoch; None if unknown; 0 if some were taken before: the rest of an
            epoch's labels need not be like all of them.
        epochs: number of epochs from there on.
    """

    def __init__(self, progress, job, name, steps, epochs):
        self._progress, self._processes, self._epochs = progress, job.distribution, max(epochs, 1)
        self._buffer = job.input.shuffle_buffer
        self._name, self._steps, self._is_checked = name, steps, False

    def after_run(self, run_context, run_values):
        if self._processes.synchronous and self._progress.steps == self._steps:
            self.check()

    def check(self):
        """Looks at the labels so far, once; all processes call it."""
        if self._is_checked:
            return
        self._is_checked, steps = True, self._progress.steps
        steps = min(steps, steps // self._epochs if self._steps is None else self._steps)
        tenths = np.sum(self._processes.exchange(self._progress.tenths(steps)), axis=0)
        rows, positives = map(int, tenths.sum(axis=0))
        if not self._processes.chief or not rows:
            return
        if positives in (0, rows):
            logging.warning(
                "All %s labels of %s are %d: nothing can be learned from them.",
                f"{rows:,}", self._name, bool(positives),
            )  # fmt: skip
        elif out_of_order(tenths):
            rates = [100 * y / x for x, y in tenths if x]
            logging.warning(
                "The labels of %s are not in random order: between %.1f and %.1f %% are 1 in "
                "tenths of an epoch. Shuffle the records once (python -m "
                "data_tools.rebalance), or give a --shuffle_buffer (now %d) as large as the data.",
                self._name, min(rates), max(rates), self._buffer,
            )  # fmt: skip
