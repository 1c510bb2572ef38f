"""Adam, for whole variables and for rows of a table. U: distinct rows."""

from deepfm.kernels.build import raw_ops
from deepfm.runtime.tf import tf


class Plain:
    """With TensorFlow's operators."""

    def adam(self, variable, m, v, grad, rate, beta1, beta2, epsilon):
        """Applies Adam to a resource variable; `rate` includes the bias correction."""
        return tf.raw_ops.ResourceApplyAdam(
            var=variable.handle, m=m.handle, v=v.handle, beta1_power=0.0, beta2_power=0.0, lr=rate,
            beta1=beta1, beta2=beta2, epsilon=epsilon, grad=grad,
        )  # fmt: skip

    def adam_rows(self, variable, m, v, indices, grad, rate, beta1, beta2, epsilon, l2=0.0):
        """As `adam`, for distinct rows only, with their gradient + l2 * row.

        The update of tf.contrib.opt.LazyAdamOptimizer (beta powers count steps, not the row's
        uses), without its second gather of the moments, and without loading contrib.
        """
        if l2:
            grad += l2 * variable.sparse_read(indices)
        m_rows = m.sparse_read(indices)
        m_rows += (1 - beta1) * (grad - m_rows)
        v_rows = v.sparse_read(indices)
        v_rows += (1 - beta2) * (tf.square(grad) - v_rows)
        step = rate * m_rows / (tf.sqrt(v_rows) + epsilon)
        # Raw ops, because the variables' own methods end by reading, and so copying, the table.
        scatter = tf.raw_ops.ResourceScatterUpdate
        return tf.group(
            scatter(resource=m.handle, indices=indices, updates=m_rows),
            scatter(resource=v.handle, indices=indices, updates=v_rows),
            tf.raw_ops.ResourceScatterSub(resource=variable.handle, indices=indices, updates=step),
        )

    def elapsed_adam(
        self, variable, m, v, seen, indices, grad, now, run_step, rate, beta1, beta2, epsilon, l2
    ):
        """Adam for distinct rows, at once for all n steps since each was last in a batch.

        Dense Adam also moves the rows that a batch lacks: their moments decay, the first one goes
        on moving them, and L2 shrinks them. This does the same for the batch's rows alone. The
        second moment decays by the n steps that have passed. What the coming steps would do is
        done in advance, for n of them, as that is how often the row comes:

            v := beta2^n v + (1 - beta2) g^2                  s = sqrt(v) + epsilon
            m := beta1 m + (1 - beta1) g
            w := (w - rate (1 + beta1 + ... + beta1^(n-1)) m / s) / (1 + rate l2 n / s)
            m := beta1^(n-1) m

        The last line of w is the implicit Euler step of w' = -rate l2 w / s: it never overshoots 0.
        So each row meets the same equilibrium of gradient and L2 as in dense training, whatever its
        frequency. With n = 1 and l2 = 0 it is Adam.

        Args:
            seen: variable int64 [rows], the number of steps until each row was last in a batch.
            now: int64 [], number of steps with this one.
            run_step: int, the step at which the run began; rows not seen since count from it.
            l2: lambda.
        """
        before = seen.sparse_read(indices)
        n = tf.cast(tf.maximum(now - tf.maximum(before, run_step), 1), tf.float32)
        n = tf.reshape(n, [-1] + [1] * (len(variable.shape) - 1))
        rows, m_rows = variable.sparse_read(indices), m.sparse_read(indices)
        m_rows += (1 - beta1) * (grad - m_rows)
        v_rows = tf.pow(beta2, n) * v.sparse_read(indices) + (1 - beta2) * tf.square(grad)
        scale = tf.sqrt(v_rows) + epsilon
        moves = rate * (1 - tf.pow(beta1, n)) / (1 - beta1)
        rows = (rows * scale - moves * m_rows) / (scale + rate * l2 * n)
        m_rows *= tf.pow(beta1, n - 1)
        scatter = tf.raw_ops.ResourceScatterUpdate
        put = lambda to, what: scatter(resource=to.handle, indices=indices, updates=what)
        with tf.control_dependencies([n]):  # which has read what this replaces
            updated = put(seen, tf.fill(tf.shape(indices), now))
        return tf.group(updated, put(m, m_rows), put(v, v_rows), put(variable, rows))


class Compiled:
    """As Plain, with the compiled operators."""

    def adam(self, variable, m, v, grad, *numbers):
        return raw_ops().deepfm_adam(variable.handle, m.handle, v.handle, grad, *numbers)

    def adam_rows(self, variable, m, v, indices, grad, *numbers, l2=0.0):
        handles = variable.handle, m.handle, v.handle
        return raw_ops().deepfm_adam_rows(*handles, indices, grad, *numbers, l2=l2)

    def elapsed_adam(self, variable, m, v, seen, indices, grad, now, run_step, *numbers, l2):
        handles = variable.handle, m.handle, v.handle, seen.handle
        return raw_ops().deepfm_elapsed_adam_rows(
            *handles, indices, now, grad, *numbers, run_step=run_step, l2=l2
        )
