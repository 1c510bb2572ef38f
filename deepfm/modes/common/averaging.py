"""The gradients of several processes, averaged over a network."""

from deepfm.model.gradients import Wrapper, combine
from deepfm.runtime.tf import tf


class Averaged(Wrapper):
    """Averages gradients over processes before another optimizer applies them.

    Dense gradients are all-reduced. Gradients of tables travel as rows: each process sends its ids
    as soon as it has them, and then the rows of all tables side by side, each row once; every
    process then combines the rows of all.

    Args:
        optimizer: the optimizer that applies them.
        add_up: (tensor, name) -> its sum over the processes.
        gather: (tensor [n, ...], name) -> [sum of n, ...], those of all processes.
        size: number of processes.
    """

    def __init__(self, optimizer, add_up, gather, size):
        super().__init__(optimizer)
        self._add_up, self._gather, self._size = add_up, gather, size

    def compute_gradients(self, loss, *args, **kwargs):
        return self._optimizer.compute_gradients(loss / self._size, *args, **kwargs)

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        grads_and_vars = [(g, v) for g, v in grads_and_vars if g is not None]
        rows = iter(self._rows([g for g, _ in grads_and_vars if isinstance(g, tf.IndexedSlices)]))
        averaged = [
            (next(rows), v)
            if isinstance(g, tf.IndexedSlices)
            else (self._add_up(g, v.op.name.replace("/", "_")), v)
            for g, v in grads_and_vars
        ]
        return self._optimizer.apply_gradients(averaged, global_step, name)

    def _rows(self, grads):
        averaged = [None] * len(grads)
        for ids in dict.fromkeys(_source(g.indices) for g in grads):
            group = [i for i, g in enumerate(grads) if _source(g.indices) is ids]
            shapes = [grads[i].values.shape[1:] for i in group]
            widths = [shape.num_elements() for shape in shapes]
            columns = [tf.reshape(grads[i].values, [-1, w]) for i, w in zip(group, widths)]
            together, where = tf.unique(self._gather(ids, f"ids_{group[0]}"))
            everyones = self._gather(tf.concat(columns, axis=1), f"rows_{group[0]}")
            sums = combine(everyones, where, tf.size(together))
            for i, shape, values in zip(group, shapes, tf.split(sums, widths, axis=1)):
                values = tf.reshape(values, [-1, *shape])
                averaged[i] = tf.IndexedSlices(values, together, grads[i].dense_shape)
        return averaged


def _source(indices):
    """The ids that were given to a gather, before the gather's gradient reshaped them."""
    return indices.op.inputs[0] if indices.op.type == "Reshape" else indices
