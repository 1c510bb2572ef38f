"""ReLU and dropout in one pass."""

from deepfm.kernels.build import raw_ops
from deepfm.runtime.tf import tf


class Plain:
    """With TensorFlow's operators."""

    def relu_dropout(self, x, seed, dropped):
        """max(x, 0) with dropout; the seed alone decides which units are dropped.

        A unit uses 16 random bits, so a rate is exact to 1/65,536.

        Args:
            x: float32 [B, n].
            seed: int64 [2].
            dropped: how many of the 65,536 values of a unit's bits drop it.

        Returns:
            float32 [B, n].
        """
        rows, units = tf.shape(x)[0], int(x.shape[1])
        pairs = tf.random.stateless_uniform(
            [rows, -(-units // 2)], seed, -(1 << 31), (1 << 31) - 1, tf.int32
        )
        noise = tf.reshape(tf.bitcast(pairs, tf.int16), [rows, 2 * pairs.shape[1]])[:, :units]
        kept = tf.cast(noise >= tf.constant(dropped - 32768, tf.int16), x.dtype)
        return tf.nn.relu(x) * (kept * (65536 / (65536 - dropped)))


class Compiled:
    """As Plain, with the compiled operators."""

    def relu_dropout(self, x, seed, dropped):
        return raw_ops().deepfm_relu_dropout(x, seed, dropped)


@tf.RegisterGradient("DeepfmReluDropout")
def _relu_dropout_grad(op, by_y):
    dropped = op.get_attr("dropped")
    return raw_ops().deepfm_relu_dropout_grad(op.outputs[0], by_y, dropped), None
