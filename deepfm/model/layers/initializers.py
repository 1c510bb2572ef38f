"""Initial values that do not depend on how many parts a variable is cut into."""

import numpy as np

from deepfm.kernels.ops import TENSORFLOW
from deepfm.runtime.tf import tf

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


def normal(stddev, seed, ops, epoch=None):
    """Initializer of an embedding table, with other numbers in each epoch, int64 [], if that is
    given."""
    draw = lambda shape, seed, _: tf.random.stateless_normal(shape, seed, stddev=stddev)
    return _in_blocks(draw, seed, ops, epoch)


def write_normal(table, stddev, seed, epoch):
    """Writes what `normal` gives into a table, in place: an op."""
    seeds, shape = _seeds(seed, epoch), table.shape.as_list()
    rows = _rows_of_block(shape)
    draw = lambda i: tf.random.stateless_normal([rows, shape[1]], seeds(i), stddev=stddev)
    return _write(table, draw, rows)


def write_alike(variable, row):
    """Writes the same row, [1, ...], into all rows of a variable, in place: an op."""
    rows = min(_BLOCK, variable.shape.as_list()[0])
    block = tf.broadcast_to(row, [rows, *variable.shape.as_list()[1:]])
    return _write(variable, lambda i: block, rows)


def _write(variable, draw, rows):
    """Writes block after block of `rows` rows, draw(i), into a variable."""
    length = variable.shape.as_list()[0]

    def put(i):
        begin, end = i * rows, tf.minimum((i + 1) * rows, length)
        where, block = tf.range(begin, end), draw(i)[: end - begin]
        scatter = tf.raw_ops.ResourceScatterUpdate
        written = scatter(resource=variable.handle, indices=where, updates=block)
        with tf.control_dependencies([written]):
            return i + 1

    blocks = -(-length // rows)
    return tf.while_loop(
        lambda i: i < blocks, put, [tf.constant(0)], parallel_iterations=1, back_prop=False
    ).op


_BLOCK = 1 << 18  # numbers to draw at once


def _rows_of_block(shape):
    return min(max(_BLOCK // max(shape[-1], 1), 1), shape[0])


def _seeds(seed, epoch=None):
    """The function i -> int [2], the seed of the numbers of block i."""
    if epoch is None:
        return lambda i: tf.stack([seed, i])
    seed += epoch * (1 << 32)
    return lambda i: tf.stack([seed, tf.cast(i, tf.int64)])


def _in_blocks(draw, seed, ops=TENSORFLOW, epoch=None):
    """An initializer whose rows do not depend on how many parts the variable is cut into.

    TensorFlow's own initializers give each part of a partitioned variable the same numbers.

    Args:
        draw: (shape, seed int [2], shape of the whole variable) -> float32.
        seed: the variable's seed.
        ops: Ops, which allocate the memory.
        epoch: as for `normal`.
    """
    seeds = _seeds(seed, epoch)

    def initialize(shape, dtype=None, partition_info=None):
        full, first = list(shape), 0
        if partition_info:
            full, first = partition_info.full_shape, partition_info.var_offset[0]
        rows = _rows_of_block(full)
        last = first + shape[0]
        if rows == full[0]:  # the loop would be some fifty operators for each small variable
            values = draw(full, seeds(0), full)
            return values[first:last] if partition_info else values

        def put(i, values):
            begin, end = tf.maximum(i * rows, first), tf.minimum((i + 1) * rows, last)
            block = draw([rows, *full[1:]], seeds(i), full)
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
