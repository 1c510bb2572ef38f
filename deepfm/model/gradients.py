"""What happens to a step's gradients before an optimizer applies them.

This module finishes them, once per global batch and in every mode: it combines rows that several
replicas or processes sent, clips each by its own norm (CowClip), adds L2 of the batch's rows, and
clips the norm of all.
"""

from deepfm.model import cowclip
from deepfm.runtime.tf import summarize, tf

v1 = tf.compat.v1

# Collection: float32 [], the L2 term of the distinct rows of the global batch of several replicas.
L2_OF_ROWS = "deepfm_l2_of_rows"


class Wrapper(v1.train.Optimizer):
    """An optimizer that delegates to another one."""

    def __init__(self, optimizer):
        super().__init__(use_locking=False, name=type(self).__name__)
        self._optimizer = optimizer

    def compute_gradients(self, *args, **kwargs):
        return self._optimizer.compute_gradients(*args, **kwargs)


class RowWise(Wrapper):
    """Finishes the gradients of one global step, then hands them to another optimizer.

    Distributed modes wrap around this, so that it sees the replicas' gradients already combined;
    under a tf.distribute.Strategy it adds them up itself.

    Args:
        optimizer: the optimizer that applies the update.
        config: OptimizerConfig.
        distinct: whether each row occurs at most once; False if replicas' rows are concatenated.
        occurrences: cowclip.Occurrences of this replica, if config.cowclip_ratio is not 0.
        l2_shown: lambda of the L2 term that L2_OF_ROWS receives; 0: none.
    """

    def __init__(self, optimizer, config, distinct, ops, occurrences=None, l2_shown=0.0):
        super().__init__(optimizer)
        self._config, self._l2_shown, self._squares = config, l2_shown, []
        self._distinct = distinct
        self._ops, self._occurrences = ops, occurrences

    def compute_gradients(self, *args, **kwargs):
        found = super().compute_gradients(*args, **kwargs)
        if not self._config.cowclip_ratio:
            return found
        return [(cowclip.with_counts(g, v, self._occurrences), v) for g, v in found]

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        grads_and_vars = [(g, v) for g, v in grads_and_vars if g is not None]
        replicas = 1
        if tf.distribute.has_strategy():
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            grads_and_vars = tf.distribute.get_replica_context().merge_call(
                _add_up, args=(grads_and_vars,)
            )
        grads = [self._finish(g, v) for g, v in grads_and_vars]
        if self._config.clip_norm > 0:
            grads, norm = tf.clip_by_global_norm(grads, self._config.clip_norm)
            summarize("gradient_norm", norm)
        variables = [v for _, v in grads_and_vars]
        if replicas > 1:  # the optimizer adds up the replicas' gradients once more
            grads = [tf.math.scalar_mul(1 / replicas, g) for g in grads]
        if self._squares:
            v1.add_to_collection(L2_OF_ROWS, self._l2_shown * tf.add_n(self._squares))
        with tf.control_dependencies(self._squares):  # which are of the rows before the update
            return self._optimizer.apply_gradients(zip(grads, variables), global_step, name)

    def _finish(self, grad, variable):
        if not isinstance(grad, tf.IndexedSlices):
            return grad
        values, indices, config = grad.values, grad.indices, self._config
        with tf.device(variable.device):  # so that its rows stay on their device
            if not self._distinct:
                indices, where = tf.unique(indices)
                values = combine(values, where, tf.size(indices))
            if config.cowclip_ratio:
                limits = config.cowclip_ratio, config.cowclip_min_norm
                values = self._ops.clip_rows(variable, indices, values, *limits)
            if config.l2_rows or self._l2_shown:
                before = tf.gather(variable, indices)
            if self._l2_shown:
                self._squares.append(tf.nn.l2_loss(before))
            if config.l2_rows > 0:
                values += config.l2_rows * before
        rows = tf.IndexedSlices(values, indices, grad.dense_shape)
        return rows if config.lazy_updates else tf.convert_to_tensor(rows)


def uses_of_rows(where, count, places=None, counts=None):
    """The sparse matrix, for SparseTensorDenseMatMul, that puts rows into places.

    Args:
        where: int32 [n], the row of each use.
        count: int32 [], number of rows.
        places: int32 [n], the place of each use; None: use i has place i.
        counts: [number of places], of any type; given with `places`.

    Returns:
        {"a_indices": int32 [n, 2], "a_shape": int64 [2]}.
    """
    number = tf.size(where if places is None else counts)
    places = tf.range(number) if places is None else places
    return {
        "a_indices": tf.transpose(tf.stack([places, where])),
        "a_shape": tf.cast(tf.stack([number, count]), tf.int64),
    }


def combine(rows, where, count):
    """Sums the rows that go to the same place.

    A product with a sparse matrix does it in half the time of UnsortedSegmentSum.

    Args:
        rows: float32 [n, ...].
        where: int32 [n], the place of each row, below count.
        count: int32 [], number of places.

    Returns:
        float32 [count, ...].
    """
    shape = rows.shape[1:]
    sums = tf.raw_ops.SparseTensorDenseMatMul(
        **uses_of_rows(where, count),
        a_values=tf.ones_like(where, tf.float32),
        b=tf.reshape(rows, [-1, shape.num_elements()]),
        adjoint_a=True,
    )
    return tf.reshape(sums, [-1, *shape])


def _add_up(strategy, grads_and_vars):
    """The gradients of all replicas added up, on each of them."""
    sums = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, grads_and_vars)
    return [(g, v) for g, (_, v) in zip(sums, grads_and_vars)]
