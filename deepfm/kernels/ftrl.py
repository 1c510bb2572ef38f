"""FTRL without L1, for whole variables and for rows of a table."""

from deepfm.kernels.build import raw_ops
from deepfm.runtime.tf import tf


class Plain:
    """With TensorFlow's operators."""

    def ftrl(self, variable, accum, linear, grad, rate):
        """Applies FTRL without L1 to a resource variable.

        McMahan et al., "Ad Click Prediction: a View from the Trenches", KDD 2013, algorithm 1:

            n' := n + g^2
            z := z + g - (sqrt(n') - sqrt(n)) / rate w
            w := -rate z / sqrt(n')

        with n in `accum` and z in `linear`.
        """
        return tf.raw_ops.ResourceApplyFtrl(
            var=variable.handle, accum=accum.handle, linear=linear.handle, grad=grad, lr=rate,
            l1=0.0, l2=0.0, lr_power=-0.5,
        )  # fmt: skip

    def ftrl_rows(self, variable, accum, linear, indices, grad, rate, l2=0.0):
        """As `ftrl`, for distinct rows only, with their gradient + l2 * row."""
        if l2:
            grad += l2 * variable.sparse_read(indices)
        return tf.raw_ops.ResourceSparseApplyFtrl(
            var=variable.handle, accum=accum.handle, linear=linear.handle, grad=grad,
            indices=indices, lr=rate, l1=0.0, l2=0.0, lr_power=-0.5,
        )  # fmt: skip


class Compiled:
    """As Plain, with the compiled operators."""

    def ftrl(self, variable, accum, linear, grad, rate):
        return raw_ops().deepfm_ftrl(variable.handle, accum.handle, linear.handle, grad, rate)

    def ftrl_rows(self, variable, accum, linear, indices, grad, rate, l2=0.0):
        handles = variable.handle, accum.handle, linear.handle
        return raw_ops().deepfm_ftrl_rows(*handles, indices, grad, rate, l2=l2)
