"""The error message for a model that is no longer finite."""

import numpy as np
import tensorflow as tf

from deepfm.errors import BadInput

v1 = tf.compat.v1


_WORST = "deepfm_worst_weights"  # collection: what worst_weights returns


def diverged(step, what, worst, model_dir):
    """The error for a model that is no longer finite; `worst` is what worst_weights gives."""
    kept = tf.train.latest_checkpoint(model_dir)
    state = f"the last good checkpoint is {kept}" if kept else "no checkpoint was saved before"
    name, bad, size, largest = worst
    where = f"the weights {name.decode()} are worst, "
    where += f"{bad:,} of {size:,} are not finite" if bad else f"the largest is {largest:.3g}"
    return BadInput(
        f"step {step}: {what}; {where}; {state}. Try a smaller --learning_rate, or --clip_norm=10."
    )


def worst_weights():
    """(name string [], non-finite numbers int64 [], size int64 [], largest number float32 []) of
    the variable with the largest share of non-finite numbers or else the largest number."""
    if v1.get_collection(_WORST):  # made by another hook
        return tuple(v1.get_collection(_WORST))
    variables, found = v1.trainable_variables(), []
    for variable in variables:
        with tf.device(variable.device):
            value = tf.convert_to_tensor(variable)
            bad = tf.reduce_sum(tf.cast(~tf.math.is_finite(value), tf.int64))
            found.append((bad, tf.reduce_max(tf.abs(value))))
    bad, largest = map(tf.stack, zip(*found))
    size = np.int64([variable.shape.num_elements() for variable in variables])
    worst = tf.cond(
        tf.reduce_any(bad > 0), lambda: tf.argmax(bad / size), lambda: tf.argmax(largest)
    )
    for column in ([variable.op.name for variable in variables], bad, size, largest):
        v1.add_to_collection(_WORST, tf.gather(column, worst))
    return tuple(v1.get_collection(_WORST))
