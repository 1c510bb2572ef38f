"""Loss scaling, for gradients in float16."""

import tensorflow as tf

from deepfm.model.gradients import Wrapper

v1 = tf.compat.v1


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


class LossScaled(Wrapper):
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
