"""What a step reads from the rows of the tables: distinct ids, gathering, the FM, CowClip's limits.

K: embedding size. N: values. U: distinct ids. csrc/rows.cc has the compiled operators.
"""

import numpy as np

from deepfm.kernels.build import raw_ops
from deepfm.runtime.tf import tf, variable_shape


class Plain:
    """With TensorFlow's operators."""

    def unique(self, ids, dtype):
        """As tf.unique: int64 [N] -> (distinct ids `dtype` [U], the place of each id int32 [N]).

        int32 takes two thirds of the time.
        """
        return tf.unique(tf.cast(ids, dtype))

    def gather(self, table, indices):
        """Rows of a table, which may be cut into parts: int [U] -> float32 [U, ...]."""
        # 'div' keeps neighbouring rows together, so any partitioning can read a checkpoint.
        return tf.nn.embedding_lookup(table, indices, partition_strategy="div")

    def look_up(self, weights, embeddings, where, x, counts, field_size, plain):
        """The MLP's input and the FM's terms of a batch.

        Args:
            weights: float32 [U].
            embeddings: float32 [U, K].
            where: int32 [N], the row of each value; None: value i has row i.
            x: float32 [N], the factor for each row.
            counts: int32 [B F], number of values in each field; None if each has one.
            field_size: F.
            plain: () -> the same as this returns.

        Returns:
            (float32 [B, F K], the scaled embeddings; float32 [B], first_order + second_order).
        """
        return plain()

    def clip_rows(self, table, indices, values, ratio, min_norm):
        """Clips the gradients of rows as CowClip does; see model/cowclip.py.

        Args:
            table: a resource variable.
            indices: int [U], its rows.
            values: float32 [U, K + 1], the gradient of each and, in the last column, its count.
            ratio, min_norm: r and zeta.

        Returns:
            float32 [U, ...], gradients of the shape of the rows.
        """
        rows = table.sparse_read(indices)
        width = values.shape[1].value - 1
        norm = lambda x: tf.sqrt(tf.reduce_sum(tf.square(x), axis=1, keepdims=True))
        grad, counts = values[:, :width], values[:, width:]
        limit = counts * tf.maximum(ratio * norm(tf.reshape(rows, [-1, width])), min_norm)
        factor = tf.math.divide_no_nan(limit, tf.maximum(norm(grad), limit))
        return tf.reshape(grad * factor, tf.shape(rows))

    def zeros(self, shape, dtype=tf.float32, partition_info=None):
        """The initializer of an optimizer's slots for a table; always float32."""
        return tf.zeros(shape, dtype)

    def empty(self, shape):
        """Uninitialized float32 memory for a table that is written before it is read."""
        return tf.raw_ops.Empty(shape=shape, dtype=tf.float32)


class Compiled:
    """As Plain, with the compiled operators."""

    def unique(self, ids, dtype):
        return raw_ops().deepfm_unique(ids, dtype)

    def gather(self, table, indices):
        rows = raw_ops().deepfm_gather_rows(table.handle, indices)
        rows.set_shape([None, *table.shape[1:]])
        return rows

    def look_up(self, weights, embeddings, where, x, counts, field_size, plain):
        if where is None or counts is not None:
            return plain()
        scaled, fm, _ = raw_ops().deepfm_look_up(weights, embeddings, where, x, field_size)
        scaled.set_shape([None, field_size * embeddings.shape[1]])
        return scaled, fm

    def clip_rows(self, table, indices, values, ratio, min_norm):
        clipped = raw_ops().deepfm_clip_rows(
            table.handle, indices, values, ratio=ratio, min_norm=min_norm
        )
        return tf.ensure_shape(clipped, [None, *table.shape[1:]])

    def zeros(self, shape, dtype=tf.float32, partition_info=None):
        """Zeros whose rows are faster to reach than those of tf.zeros."""
        return raw_ops().deepfm_zeros(np.int64(tf.TensorShape(shape).as_list()))

    empty = zeros


@tf.RegisterGradient("DeepfmGatherRows")
def _gather_grad(op, by_rows):
    table, indices = op.inputs
    shape = variable_shape(table, indices.dtype)
    return tf.IndexedSlices(by_rows, indices, shape), None


@tf.RegisterGradient("DeepfmLookUp")
def _look_up_grad(op, by_scaled, by_fm, _):
    by_rows = raw_ops().deepfm_look_up_grad(
        *op.inputs, op.outputs[2], by_scaled, by_fm, op.get_attr("field_size")
    )
    return [*by_rows, None, None]
