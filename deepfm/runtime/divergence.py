"""The error message for a model that is no longer finite."""

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
    found = []
    for variable in v1.trainable_variables():
        with tf.device(variable.device):
            finite = tf.math.is_finite(variable)
            bad = tf.size(finite, out_type=tf.int64) - tf.math.count_nonzero(finite)
            largest = tf.reduce_max(tf.abs(variable))
            found.append((bad, tf.size(finite, out_type=tf.int64), largest))
    bad, size, largest = map(tf.stack, zip(*found))
    share = tf.cast(bad, tf.float64) / tf.cast(size, tf.float64)
    worst = tf.cond(tf.reduce_any(bad > 0), lambda: tf.argmax(share), lambda: tf.argmax(largest))
    names = tf.constant([variable.op.name for variable in v1.trainable_variables()])
    for column in (names, bad, size, largest):
        v1.add_to_collection(_WORST, column[worst])
    return tuple(v1.get_collection(_WORST))
