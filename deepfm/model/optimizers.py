"""The optimizers, row-wise ("lazy") for the embedding tables.

Each is handed finished gradients (gradients.RowWise) and touches the rows of the batch alone.
"""

from typing import Callable, Dict

import tensorflow as tf

from deepfm.config import OptimizerConfig
from deepfm.kernels import bindings
from deepfm.model import metrics
from deepfm.model.gradients import RowWise
from deepfm.model.loss_scale import LossScaled

v1 = tf.compat.v1

DECAY = "learning_rate_decay"  # name of the variable that the learning rate is multiplied by


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
            var, bindings.zeros_initializer, var.shape, var.dtype.base_dtype, slot_name, op_name
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
        return bindings.adam(var, m, v, grad, *self._numbers)

    def _resource_apply_sparse(self, grad, var, indices):
        m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
        if self._compiled:
            return bindings.adam_rows(var, m, v, indices, grad, *self._numbers, self._l2_rows)
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
        distribution: Distribution.
    """
    return distribution.replicas_in_step == 1 and not _in_kernels(config, distribution)


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
        distribution: Distribution.

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
