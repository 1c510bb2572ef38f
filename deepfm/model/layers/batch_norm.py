"""Batch norm over the global batch, however many replicas share it.

    y = gamma (x - mean) / sqrt(variance + epsilon) + beta

Ioffe and Szegedy, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal
Covariate Shift", ICML 2015, https://arxiv.org/abs/1502.03167, algorithm 1. Training uses the mean
and the (biased) variance of all replicas' examples in the step; evaluation, inference and exports
use their moving averages. Variables and moving averages are those of
tf.layers.batch_normalization, so either can continue from the other's checkpoints.

B: examples in a replica's part of the batch. R: replicas that take the step together. n: units.
"""

from typing import Callable, NamedTuple, Optional

from deepfm.runtime.tf import tf

v1 = tf.compat.v1

# gradient_override_map's name for the BiasAdd of a layer that batch norm follows in training.
# Subtracting the mean cancels the bias, so its gradient is 0. Computing it would give rounding
# errors, different ones in each mode, which Adam would scale up to whole steps.
BIAS_ADD = "BiasAddBeforeBatchNorm"


@tf.RegisterGradient(BIAS_ADD)
def _bias_add_grad(op, by_y):
    return by_y, tf.zeros_like(op.inputs[1])


class BatchPart(NamedTuple):
    """A replica's part of the global batch; the defaults describe a single replica.

    Attributes:
        counts: float32 [B], weight of each example in the moments; 0 for an example that only fills
            up the batch; None: all weigh 1.
        stack: Mode.stack.
        moves: whether this replica updates the moving averages; False if another one, with which
            it shares them, does.
    """

    counts: Optional[tf.Tensor] = None
    stack: Optional[Callable] = None
    moves: bool = True


def batch_norm(x, name, decay, part=None, epsilon=1e-3):
    """Normalises x; creates the variables NAME/{gamma, beta, moving_mean, moving_variance}.

    Args:
        x: float32 [B, n].
        name: name of the layer.
        decay: decay of the moving averages.
        part: BatchPart in training, else None.
        epsilon: added to the variance.

    Returns:
        float32 [B, n].
    """
    with v1.variable_scope(name) as scope:
        create = lambda name, initializer, **options: v1.get_variable(
            name, x.shape[1:], initializer=initializer, **options
        )
        gamma = create("gamma", v1.ones_initializer())
        beta = create("beta", v1.zeros_initializer())
        scope.set_partitioner(None)
        # Every replica updates its own copy in the same way, so any copy may be saved.
        copies = dict(
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
        moving_mean = create("moving_mean", v1.zeros_initializer(), **copies)
        moving_variance = create("moving_variance", v1.ones_initializer(), **copies)
        if part is None:
            return tf.nn.batch_normalization(x, moving_mean, moving_variance, beta, gamma, epsilon)
        moments = number, mean, variance = _moments(x, part, f"{name}_moments")
        if part.moves:
            rate = tf.where(number > 0, 1 - decay, 0.0)
            _move(moving_mean, mean, rate)
            _move(moving_variance, variance, rate)
        return _normalized(x, gamma, beta, moments, epsilon, part, f"{name}_gradient")


def _move(average, value, rate):
    with tf.device(average.device):
        moved = average.assign_sub((average - value) * rate)
    v1.add_to_collection(v1.GraphKeys.UPDATE_OPS, moved)


def _moments(x, part, name):
    """The global batch's sum of example weights, float32 [], and its mean and variance, float32
    [n]; all 0 if it holds no examples.

    Combines the parts' moments as in Chan, Golub and LeVeque, "Updating Formulae and a Pairwise
    Algorithm for Computing Sample Variances", 1979. Unlike E[x^2] - E[x]^2 this loses no digits
    if a mean is large beside its standard deviation.
    """
    x = tf.stop_gradient(x)
    if part.counts is None:
        number = tf.cast(tf.shape(x)[0], tf.float32)
    else:
        number = tf.reduce_sum(part.counts)
    mean = tf.math.divide_no_nan(tf.reduce_sum(_weighted(x, part), axis=0), number)
    squares = tf.reduce_sum(_weighted(tf.square(x - mean), part), axis=0)
    if part.stack:
        parts = part.stack(tf.concat([number[tf.newaxis], mean, squares], axis=0), name)
        numbers, means, squares = tf.split(parts, [1, *2 * x.shape[1:].as_list()], axis=1)
        number = tf.reduce_sum(numbers)
        mean = tf.reduce_sum(tf.math.divide_no_nan(numbers, number) * means, axis=0)
        squares = tf.reduce_sum(squares + numbers * tf.square(means - mean), axis=0)
    return number, mean, tf.math.divide_no_nan(squares, number)


def _normalized(x, gamma, beta, moments, epsilon, part, name):
    """y, with the gradient of algorithm 1, whose two sums go over all replicas."""
    number, *of_batch = moments

    @tf.custom_gradient
    def normalize(x, gamma, beta, mean, variance):
        inverse = tf.math.rsqrt(variance + epsilon)
        centered = x - mean

        def gradient(by_y):
            by_beta = tf.reduce_sum(by_y, axis=0)
            by_gamma = tf.reduce_sum(by_y * centered, axis=0) * inverse
            sums = tf.stack([by_beta, by_gamma])
            if part.stack:
                sums = tf.reduce_sum(part.stack(sums, name), axis=0)
            by_mean, by_scale = tf.unstack(tf.math.divide_no_nan(sums, number))
            shared = by_mean + centered * (inverse * by_scale)
            by_x = (by_y - _weighted(shared, part)) * (gamma * inverse)
            return by_x, by_gamma, by_beta, None, None

        return centered * (gamma * inverse) + beta, gradient

    return normalize(x, gamma, beta, *of_batch)


def _weighted(x, part):
    """Each example times its weight: float32 [B, n] -> [B, n]."""
    return x if part.counts is None else part.counts[:, tf.newaxis] * x
