"""The optimizers, row-wise ("lazy") for the embedding tables.

A step's gradients are finished here, once for the global batch and whatever the mode: rows that
several replicas sent are combined, L2 of the batch's rows is added, the norm is clipped; then the
optimizer touches only those rows.
"""

from typing import Callable, Dict, NamedTuple

import tensorflow as tf

from deepfm import kernels, metrics

v1 = tf.compat.v1

DECAY = "learning_rate_decay"  # name of the variable that the learning rate is multiplied by


class OptimizerConfig(NamedTuple):
    """What defines the optimizer.

    Attributes:
        name: a key of OPTIMIZERS.
        learning_rate: as used, --learning_rate_scale multiplied in.
        clip_norm: largest global norm of the gradients; 0 does not clip.
        l2_rows: lambda of the L2 term of the batch's distinct table rows; 0 where tables have none
            or carry it whole.
        lazy_updates: update only the table rows of the batch.
        use_amp: scale the loss, for gradients in float16.
    """

    name: str = "adam"
    learning_rate: float = 0.001
    clip_norm: float = 0.0
    l2_rows: float = 0.0
    lazy_updates: bool = True
    use_amp: bool = False


def of_model(config: OptimizerConfig, model) -> OptimizerConfig:
    """The config with what a ModelConfig says of the tables' rows."""
    l2_rows = model.l2_reg if model.l2_scope == "batch" else 0.0
    return config._replace(l2_rows=l2_rows, lazy_updates=model.lazy_updates)


class _LazyAdam(v1.train.AdamOptimizer):
    """Adam whose moments of a row move only when the row is in the batch.

    The update of tf.contrib.opt.LazyAdamOptimizer (beta powers count steps, not the row's uses),
    without that one's second gather of the moments, and without loading contrib.

    Args:
        rate: float or float32 [].
        compiled: bool; whether the compiled kernels do it.
        l2_rows: lambda of the L2 term of the rows that are updated; only of the compiled kernels.
    """

    def __init__(self, rate, compiled=False, l2_rows=0.0):
        super().__init__(rate)
        self._compiled, self._l2_rows = compiled, l2_rows

    def _zeros_slot(self, var, slot_name, op_name):
        if not self._compiled:
            return super()._zeros_slot(var, slot_name, op_name)
        return self._get_or_make_slot_with_initializer(
            var, kernels.zeros_initializer, var.shape, var.dtype.base_dtype, slot_name, op_name
        )

    def _prepare(self):
        super()._prepare()
        beta1_power, beta2_power = self._get_beta_accumulators()
        rate = self._lr_t * tf.sqrt(1 - beta2_power) / (1 - beta1_power)
        self._numbers = rate, self._beta1_t, self._beta2_t, self._epsilon_t

    def _resource_apply_dense(self, grad, var):
        if not self._compiled:
            return super()._resource_apply_dense(grad, var)
        m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
        return kernels.adam(var, m, v, grad, *self._numbers)

    def _resource_apply_sparse(self, grad, var, indices):
        m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
        if self._compiled:
            return kernels.adam_rows(var, m, v, indices, grad, *self._numbers, self._l2_rows)
        rate = self._numbers[0]
        m_rows = m.sparse_read(indices)
        m_rows += (1 - self._beta1_t) * (grad - m_rows)
        v_rows = v.sparse_read(indices)
        v_rows += (1 - self._beta2_t) * (tf.square(grad) - v_rows)
        step = rate * m_rows / (tf.sqrt(v_rows) + self._epsilon_t)
        # Raw ops: the variables' own methods end by reading, and so copying, the whole table.
        scatter = tf.raw_ops.ResourceScatterUpdate
        return tf.group(
            scatter(resource=m.handle, indices=indices, updates=m_rows),
            scatter(resource=v.handle, indices=indices, updates=v_rows),
            tf.raw_ops.ResourceScatterSub(resource=var.handle, indices=indices, updates=step),
        )


class _Ftrl(v1.train.FtrlOptimizer):
    """Ftrl whose slots a MirroredStrategy can make.

    TensorFlow's own first makes a constant beside the variable, for which it asks the variable for
    its handle where only a replica may.
    """

    def _create_slots(self, var_list):
        start = v1.constant_initializer(self._initial_accumulator_value)
        for v in var_list:
            self._get_or_make_slot_with_initializer(
                v, start, v.shape, v.dtype.base_dtype, "accum", self._name
            )
            self._zeros_slot(v, "linear", self._name)


# rate -> optimizer. Hyperparameters that are not flags are those of the article's code.
OPTIMIZERS: Dict[str, Callable] = {
    "adam": _LazyAdam,
    "adagrad": lambda rate: v1.train.AdagradOptimizer(rate, initial_accumulator_value=1e-8),
    "sgd": v1.train.GradientDescentOptimizer,
    "momentum": lambda rate: v1.train.MomentumOptimizer(rate, momentum=0.95),
    "ftrl": _Ftrl,
}


# Numbers that each keeps for each weight.
MOMENTS: Dict[str, int] = {"adam": 2, "adagrad": 1, "sgd": 0, "momentum": 1, "ftrl": 2}


def _in_kernels(config, distribution):
    """Whether the compiled kernels do the whole update, and L2 of the batch's rows with it."""
    whole = config.name == "adam" and config.lazy_updates and not config.clip_norm
    return bool(distribution.compiled and not distribution.partitioner and whole)


def loss_has_l2_of_rows(config, distribution):
    """Whether the gradient of the loss has L2 of the batch's rows; if not, the optimizer adds it.

    Of several replicas only the optimizer sees each row of the *global* batch once.

    Args:
        config: OptimizerConfig.
        distribution: distribution.Distribution.
    """
    return distribution.replicas_in_step == 1 and not _in_kernels(config, distribution)


class _Wrapper(v1.train.Optimizer):
    """An optimizer that hands over to another one."""

    def __init__(self, optimizer):
        super().__init__(use_locking=False, name=type(self).__name__)
        self._optimizer = optimizer

    def compute_gradients(self, *args, **kwargs):
        return self._optimizer.compute_gradients(*args, **kwargs)

    def get_slot(self, *args):
        return self._optimizer.get_slot(*args)

    def get_slot_names(self):
        return self._optimizer.get_slot_names()

    def variables(self):
        return self._optimizer.variables()


class _LossScale(tf.train.experimental.DynamicLossScale):
    """2^15 at first; halved where a gradient is not finite, doubled after 2,000 steps that are.

    Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2. It is no part of a
    checkpoint, so a model goes on with mixed precision or without; and it is one for all towers.
    """

    def _add_weight(self, name, initial_value, dtype=None):
        start = v1.constant_initializer(initial_value)
        return v1.get_variable(
            f"loss_scale/{name}", [], dtype, start, trainable=False, use_resource=True,
            collections=[v1.GraphKeys.LOCAL_VARIABLES],
        )  # fmt: skip

    def update(self, grads):
        """TensorFlow's own would make whole tables of the rows."""
        values = lambda grads: [getattr(g, "values", g) for g in grads]
        if tf.distribute.has_strategy():
            extended = tf.distribute.get_strategy().extended
            return super().update(extended.call_for_each_replica(values, args=(grads,)))
        return super().update(values(grads))


class _Conditional(tf.train.experimental.MixedPrecisionLossScaleOptimizer):
    """Applies gradients where all are finite, with variables of the same names as without it."""

    def _apply_gradients(self, *args):
        with v1.name_scope(None):  # in place of that of the condition
            return super()._apply_gradients(*args)


class LossScaled(_Wrapper):
    """Scales the loss up and its gradients down; where these are not finite a step changes nothing.

    Other than in TensorFlow such a step counts: it has used its records. Stands within all other
    wrappers, so that it sees what is applied, and all processes decide alike.
    """

    def __init__(self, optimizer):
        super().__init__(_Conditional(optimizer, _LossScale()))

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        applied = self._optimizer.apply_gradients(grads_and_vars, None, name)
        with tf.control_dependencies([applied]):
            return tf.group(global_step.assign_add(1, read_value=False))


class RowWise(_Wrapper):
    """Finishes the gradients of one global step, then hands them to another optimizer.

    Distributed modes wrap around this, so that it sees what the replicas sent together; under a
    tf.distribute.Strategy it adds them up by itself.

    Args:
        optimizer: whose update is applied.
        config: OptimizerConfig.
        distinct: whether each row comes at most once; False where replicas' rows are concatenated.
    """

    def __init__(self, optimizer, config, distinct):
        super().__init__(optimizer)
        self._config = config
        self._distinct = distinct

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
            metrics.summarize("gradient_norm", norm)
        variables = [v for _, v in grads_and_vars]
        if replicas > 1:  # the optimizer adds the replicas' gradients up once more
            grads = [tf.math.scalar_mul(1 / replicas, g) for g in grads]
        return self._optimizer.apply_gradients(zip(grads, variables), global_step, name)

    def _finish(self, grad, variable):
        if not isinstance(grad, tf.IndexedSlices):
            return grad
        values, indices = grad.values, grad.indices
        with tf.device(variable.device):  # so that its rows need not travel
            if not self._distinct:
                indices, where = tf.unique(indices)
                values = _combine(values, where, tf.size(indices))
            if self._config.l2_rows > 0:
                values += self._config.l2_rows * tf.gather(variable, indices)
        rows = tf.IndexedSlices(values, indices, grad.dense_shape)
        return rows if self._config.lazy_updates else tf.convert_to_tensor(rows)


class Averaged(_Wrapper):
    """Averages gradients over processes before another optimizer applies them.

    Dense gradients are added up as they are. Table rows travel as rows: each process sends its ids
    as soon as it has them, and then the rows of all tables side by side, each row once; here the
    rows of all processes are combined.

    Args:
        optimizer: that applies them.
        add_up: (tensor, name) -> its sum over the processes.
        gather: (tensor [n, ...], name) -> [sum of n, ...], what all processes have.
        size: processes.
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
            sums = _combine(everyones, where, tf.size(together))
            for i, shape, values in zip(group, shapes, tf.split(sums, widths, axis=1)):
                values = tf.reshape(values, [-1, *shape])
                averaged[i] = tf.IndexedSlices(values, together, grads[i].dense_shape)
        return averaged


def uses_of_rows(where, count, places=None, counts=None):
    """Which row stands at which place, as a sparse matrix of SparseTensorDenseMatMul.

    Args:
        where: int32 [n], the row of each use.
        count: int32 [], of the rows.
        places: int32 [n], the place of each use; None: use i is place i.
        counts: of any type [number of places]; given with `places`.

    Returns:
        {"a_indices": int32 [n, 2], "a_shape": int64 [2]}.
    """
    number = tf.size(where if places is None else counts)
    places = tf.range(number) if places is None else places
    return {
        "a_indices": tf.transpose(tf.stack([places, where])),
        "a_shape": tf.cast(tf.stack([number, count]), tf.int64),
    }


def _combine(rows, where, count):
    """The sums of the rows that go to the same place.

    As a product with a sparse matrix, which takes half the time of UnsortedSegmentSum.

    Args:
        rows: float32 [n, ...].
        where: int32 [n], below count.
        count: int32 [].

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


def _source(indices):
    """The ids that a gather was given, which the gather's gradient has reshaped."""
    return indices.op.inputs[0] if indices.op.type == "Reshape" else indices


def _add_up(strategy, grads_and_vars):
    """The gradients of all replicas added up, on each of them."""
    sums = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, grads_and_vars)
    return [(g, v) for g, (_, v) in zip(sums, grads_and_vars)]


def _trusting(optimizer):
    """The optimizer, told not to combine equal rows again: RowWise has done so."""
    # SGD has no such method: it adds each row by itself.
    if type(optimizer)._resource_apply_sparse is not v1.train.Optimizer._resource_apply_sparse:
        optimizer._resource_apply_sparse_duplicate_indices = optimizer._resource_apply_sparse
    return optimizer


def make_optimizer(config, distribution):
    """The optimizer of a mode.

    Args:
        config: OptimizerConfig.
        distribution: distribution.Distribution.

    Returns:
        tf.train.Optimizer.
    """
    # Cut where evaluation stops improving (--learning_rate_decay_on_plateau); kept in checkpoints.
    decay = v1.get_variable(
        DECAY, [], initializer=v1.ones_initializer(), trainable=False, use_resource=True
    )
    rate = config.learning_rate * decay
    if distribution.owns_variables():
        metrics.summarize("learning_rate", rate)
    in_kernels = _in_kernels(config, distribution)
    options = {}
    if config.name == "adam":
        options["compiled"] = distribution.compiled and not distribution.partitioner
        options["l2_rows"] = config.l2_rows if in_kernels else 0.0
    optimizer = OPTIMIZERS[config.name](rate, **options)
    if not distribution.strategy:
        optimizer = _trusting(optimizer)
    if config.use_amp:
        optimizer = LossScaled(optimizer)
    # Processes that send each other rows combine them before (Averaged).
    distinct = distribution.replicas_per_process == 1
    if in_kernels or loss_has_l2_of_rows(config, distribution):
        config = config._replace(l2_rows=0.0)
    return distribution.wrap_optimizer(RowWise(optimizer, config, distinct))
