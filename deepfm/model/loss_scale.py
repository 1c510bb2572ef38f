"""Dynamic loss scaling, for gradients of float16."""

from deepfm.model.gradients import Wrapper
from deepfm.runtime.tf import tf

v1 = tf.compat.v1


class _LossScale(tf.train.experimental.DynamicLossScale):
    """Starts at 2^15; halves after a gradient that is not finite, doubles after 2,000 good steps.

    Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2. Checkpoints leave it
    out, so a model can continue with or without mixed precision; all towers share one.
    """

    def _add_weight(self, name, initial_value, dtype=None):
        start = v1.constant_initializer(initial_value)
        return v1.get_variable(
            f"loss_scale/{name}", [], dtype, start, trainable=False, use_resource=True,
            collections=[v1.GraphKeys.LOCAL_VARIABLES],
        )  # fmt: skip

    def update(self, grads):
        """Updates by the rows' values; TensorFlow's own would turn rows into whole tables."""
        values = lambda grads: [getattr(g, "values", g) for g in grads]
        if tf.distribute.has_strategy():
            extended = tf.distribute.get_strategy().extended
            return super().update(extended.call_for_each_replica(values, args=(grads,)))
        return super().update(values(grads))


class _Conditional(tf.train.experimental.MixedPrecisionLossScaleOptimizer):
    """Applies gradients if all are finite; variables keep the names they have without it."""

    def _apply_gradients(self, *args):
        with v1.name_scope(None):  # instead of the condition's scope
            return super()._apply_gradients(*args)


class LossScaled(Wrapper):
    """Scales the loss up and its gradients down; if these are not finite, weights stay as they are.

    Unlike in TensorFlow, such a step counts, because it has used its records. This is the innermost
    wrapper, so it sees the gradients as applied, and all processes decide the same.
    """

    def __init__(self, optimizer):
        super().__init__(_Conditional(optimizer, _LossScale()))

    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        applied = self._optimizer.apply_gradients(grads_and_vars, None, name)
        with tf.control_dependencies([applied]):
            return tf.group(global_step.assign_add(1, read_value=False))
