"""Initial values that do not depend on how many parts a variable is cut into."""

import numpy as np
import tensorflow as tf

from deepfm.kernels.ops import TENSORFLOW

v1 = tf.compat.v1


def glorot(config, layer):
    """Initializer of a kernel: normal of variance 2 / (inputs + outputs), truncated at 2 stddev.

    Glorot and Bengio, AISTATS 2010.
    """

    def draw(shape, seed, full_shape):
        # The standard deviation of the truncated normal is this, not 1.
        stddev = np.sqrt(2 / sum(full_shape)) / 0.87962566103423978
        return tf.random.stateless_truncated_normal(shape, seed, stddev=stddev)

    return _in_blocks(draw, config.seed * 1000 + layer)


def normal(stddev, seed, ops):
    """Initializer of an embedding table."""
    draw = lambda shape, seed, _: tf.random.stateless_normal(shape, seed, stddev=stddev)
    return _in_blocks(draw, seed, ops)


_BLOCK = 1 << 18  # numbers to draw at once


def _in_blocks(draw, seed, ops=TENSORFLOW):
    """An initializer whose rows do not depend on how many parts the variable is cut into.

    TensorFlow's own initializers give each part of a partitioned variable the same numbers.

    Args:
        draw: (shape, seed int [2], shape of the whole variable) -> float32.
        seed: the variable's seed.
        ops: Ops, which allocate the memory.
    """

    def initialize(shape, dtype=None, partition_info=None):
        full, first = list(shape), 0
        if partition_info:
            full, first = partition_info.full_shape, partition_info.var_offset[0]
        rows = min(max(_BLOCK // max(full[-1], 1), 1), full[0])  # in a block
        last = first + shape[0]
        if rows == full[0]:  # the loop would be some fifty operators for each small variable
            return draw(full, tf.stack([seed, 0]), full)[first:last]

        def put(i, values):
            begin, end = tf.maximum(i * rows, first), tf.minimum((i + 1) * rows, last)
            block = draw([rows, *full[1:]], tf.stack([seed, i]), full)
            block = block[begin - i * rows : end - i * rows]
            where = tf.range(begin, end) - first
            return i + 1, tf.raw_ops.InplaceUpdate(x=values, i=where, v=block)

        # Concatenating blocks at the end would need their memory twice.
        _, values = tf.while_loop(
            lambda i, _: i * rows < last, put, [first // rows, ops.empty(shape)],
            parallel_iterations=2, back_prop=False,
        )  # fmt: skip
        return tf.ensure_shape(values, shape)

    return initialize
