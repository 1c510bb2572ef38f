"""The three terms of DeepFM: first order, second order, and the MLP.

Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017,
https://arxiv.org/abs/1703.04247; the equation numbers below are that paper's.

B: examples in the batch. F: fields. K: embedding size.
"""

import functools

import tensorflow as tf

from deepfm.kernels import bindings
from deepfm.model import batch_norm
from deepfm.model.initializers import glorot

v1 = tf.compat.v1


def first_order(weighted):
    """The linear term of the FM, eq. (2): sum_i w_i x_i.

    Args:
        weighted: float32 [B, F], the first-order weight of each feature, scaled by its value.

    Returns:
        float32 [B].
    """
    return tf.reduce_sum(weighted, axis=1)


def second_order(embeddings, squares=None):
    """The pairwise term of the FM, eq. (2): sum over pairs i < j of <e_i, e_j>.

    In O(F K) by Rendle's identity, 1/2 sum_k ((sum_i e_ik)^2 - sum_i e_ik^2); "Factorization
    Machines", ICDM 2010, lemma 3.1.

    Args:
        embeddings: float32 [B, F, K], already scaled by the feature values.
        squares: float32 [B], sum_ik e_ik^2 where it is known already.

    Returns:
        float32 [B].
    """
    if squares is None:
        squares = tf.reduce_sum(tf.square(embeddings), axis=[1, 2])
    sums = tf.reduce_sum(embeddings, axis=1)  # [B, K]
    return 0.5 * (tf.reduce_sum(tf.square(sums), axis=1) - squares)


def deep(embeddings, config, training, compiled=False, part=batch_norm.WHOLE):
    """The MLP over the concatenated embeddings, eq. (3) and (4).

    Args:
        embeddings: float32 [B, F K].
        config: ModelConfig.
        training: bool; whether units are dropped and batch statistics are used.
        compiled: bool; whether the compiled kernels do it.
        part: batch_norm.Part, which batch norm's statistics in training are of.

    Returns:
        (float32 [B], the kernels of the layers for the L2 term).
    """
    x, weights = embeddings, []
    graph, gradients = v1.get_default_graph(), {"MatMul": _MATMUL[compiled]} if training else {}
    hidden = dict(gradients)
    if training and config.batch_norm:
        hidden["BiasAdd"] = batch_norm.BIAS_ADD
    for i, (units, rate) in enumerate(zip(config.deep_layers, config.dropout)):
        layer = v1.layers.Dense(units, name=f"deep_{i}", kernel_initializer=glorot(config, i))
        with graph.gradient_override_map(hidden):
            x = layer.apply(x)
        weights.append(layer.kernel)
        if config.batch_norm:
            x = batch_norm.batch_norm(
                x, f"batch_norm_{i}", config.batch_norm_decay, part if training else None
            )
        if not training or rate == 0:
            x = tf.nn.relu(x)
        elif compiled:
            x = bindings.relu_dropout(x, _seed_of_step(config.seed, i), _dropped(rate))
        else:
            x = _drop(tf.nn.relu(x), rate, [config.seed, i])
    layer = v1.layers.Dense(1, name="deep_out", kernel_initializer=glorot(config, -1))
    with graph.gradient_override_map(gradients):
        x = layer.apply(x)
    weights.append(layer.kernel)
    return x[:, 0], weights


_MATMUL = {False: "MatMulOfExamples", True: "CompiledMatMulOfExamples"}


def _matmul_grad(op, dy, transpose):
    """The gradient of examples @ kernel, the kernel's in the order of dy^T @ examples.

    Of examples^T @ dy Eigen takes a third longer.
    """
    x, kernel = op.inputs
    dx = tf.matmul(dy, kernel, transpose_b=True)
    return dx, transpose(tf.matmul(dy, x, transpose_a=True))


tf.RegisterGradient(_MATMUL[False])(functools.partial(_matmul_grad, transpose=tf.transpose))


tf.RegisterGradient(_MATMUL[True])(functools.partial(_matmul_grad, transpose=bindings.transpose))


def _drop(x, rate, seed):
    """Drops units at `rate`; which ones is a function of the seed, the layer and the step alone.

    A unit takes 16 random bits, so the rate is met to 1/65,536.
    """
    rows, units = tf.shape(x)[0], int(x.shape[1])
    pairs = tf.random.stateless_uniform(
        [rows, -(-units // 2)], _seed_of_step(*seed), -(1 << 31), (1 << 31) - 1, tf.int32
    )
    noise = tf.reshape(tf.bitcast(pairs, tf.int16), [rows, -1])[:, :units]
    dropped = _dropped(rate)
    kept = tf.cast(noise >= tf.constant(dropped - 32768, tf.int16), x.dtype)
    return x * (kept * (65536 / (65536 - dropped)))


def _dropped(rate):
    """Of 65,536 values of a unit's random bits, those with which it is dropped."""
    return min(round(rate * 65536), 65535)


def _seed_of_step(seed, layer):
    """int64 [2]: the seed of a layer's dropout in this step."""
    step = tf.cast(v1.train.get_or_create_global_step(), tf.int64)
    return tf.stack([tf.constant(seed * 1000 + layer, tf.int64), step])
