"""What the MLP's first layer costs on distinct rows, and on the whole matrix."""

import time

import numpy as np
import tensorflow as tf

from data_tools.common.planted_model import Shape, draw_ranks, field_cardinalities
from deepfm.kernels import compiled
from deepfm.kernels.compiled import COMPILED

v1 = tf.compat.v1
_UNITS, _BATCHES, _SECONDS = 128, 4, 1.0


def costs(shape: Shape, batch: int, width: int, on_distinct: bool) -> float:
    """CPU-seconds per million examples, forward and backward, on one thread.

    Args:
        shape: of the data whose ids are drawn.
        batch: examples.
        width: K.
        on_distinct: whether on distinct rows, rather than on the whole matrix.
    """
    random, fields = np.random.RandomState(1), shape.field_size
    sizes = [1] * shape.numeric_fields + field_cardinalities(shape).tolist()
    found = []
    for _ in range(_BATCHES):
        ranks = draw_ranks(random.random_sample([batch, fields]), np.array(sizes), shape.zipf)
        ids = (np.cumsum(sizes) - sizes + ranks).ravel()
        distinct, where = np.unique(ids, return_inverse=True)
        found.append((distinct.astype(np.int32), where.astype(np.int32)))
    threads = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    with tf.Graph().as_default(), v1.Session(config=threads) as session:
        batches = tf.data.Dataset.from_generator(
            lambda: found, (tf.int32, tf.int32), ([None], [None])
        )
        distinct, where = v1.data.make_one_shot_iterator(batches.cache().repeat()).get_next()
        normal = lambda *dims: v1.Variable(tf.random.normal(dims), use_resource=True)
        table, kernel = normal(shape.feature_size, width), normal(fields * width, _UNITS)
        rows, kernel, x = tf.gather(table, distinct), kernel.read_value(), tf.ones([batch * fields])
        weights, counts = rows[:, 0], None

        def whole():
            matrix, fm = COMPILED.look_up(weights, rows, where, x, counts, fields, None)
            return tf.matmul(matrix, kernel), fm

        values = where, x, counts
        before = compiled.largest_share
        compiled.largest_share = lambda *_: 2.0 if on_distinct else 0.0
        try:
            outputs = COMPILED.first_layer(weights, rows, *values, kernel, fields, "sum", whole)
        finally:
            compiled.largest_share = before
        by = [tf.ones_like(y) for y in outputs]
        fetched = [tf.reshape(y, [-1])[0] for y in tf.gradients(outputs, [rows, kernel], by)]
        session.run(v1.global_variables_initializer())
        step = session.make_callable(fetched)
        for _ in range(2 * _BATCHES):
            step()
        steps, began, cpu = 0, time.monotonic(), time.process_time()
        while time.monotonic() - began < _SECONDS:
            step()
            steps += 1
        return 1e6 * (time.process_time() - cpu) / (steps * batch)


def points(shape_of_share):
    """[(what varies, its value, Shape, batch, K)]; `shape_of_share`: share at 1,024 -> Shape."""
    usual = shape_of_share(0.214)
    shares = (0.08, 0.14, 0.214, 0.28, 0.35)
    return [
        *(("share of distinct pairs", share, shape_of_share(share), 1024, 32) for share in shares),
        *(("batch", 256 << i, usual, 256 << i, 32) for i in range(8)),
        *(("embedding size", 8 << i, usual, 1024, 8 << i) for i in range(5)),
    ]
