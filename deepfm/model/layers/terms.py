"""The three terms of DeepFM: first order, second order, and the MLP.

Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017,
https://arxiv.org/abs/1703.04247; the equation numbers below are that paper's.

B: examples in the batch. F: fields. K: embedding size.
"""

from deepfm.kernels.ops import TENSORFLOW
from deepfm.model.layers import batch_norm
from deepfm.model.layers.initializers import glorot
from deepfm.runtime.tf import tf

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
        squares: float32 [B], sum_ik e_ik^2, if already known.

    Returns:
        float32 [B].
    """
    if squares is None:
        squares = tf.reduce_sum(tf.square(embeddings), axis=[1, 2])
    sums = tf.reduce_sum(embeddings, axis=1)  # [B, K]
    return 0.5 * (tf.reduce_sum(tf.square(sums), axis=1) - squares)


def first_kernel(config):
    """The kernel of the MLP's first layer, a variable float32 [F K, H]."""
    shape = [config.field_size * config.embedding_size, config.deep_layers[0]]
    return v1.get_variable("deep_0/kernel", shape, initializer=glorot(config, 0))


def first_product(x, kernel, training):
    """x @ kernel of the first layer: float32 [B, F K], [F K, H] -> [B, H]."""
    with v1.get_default_graph().gradient_override_map({"MatMul": _MATMUL} if training else {}):
        return tf.matmul(x, kernel, name="deep_0/MatMul")


def deep(x, kernel, config, part=None, ops=TENSORFLOW):
    """The MLP over the concatenated embeddings, eq. (3) and (4).

    Args:
        x: float32 [B, H], the embeddings times the kernel of the first layer.
        kernel: that kernel.
        part: BatchPart in training, which turns on dropout and batch norm's batch statistics; else
            None.

    Returns:
        (float32 [B], the layers' kernels, for the L2 term).
    """
    weights = [kernel]
    graph, gradients = v1.get_default_graph(), {"MatMul": _MATMUL} if part else {}
    hidden = dict(gradients)
    if part and config.batch_norm:
        hidden["BiasAdd"] = batch_norm.BIAS_ADD
    for i, (units, rate) in enumerate(zip(config.deep_layers, config.dropout)):
        with graph.gradient_override_map(hidden):
            if i > 0:
                x, kernel = _product(x, f"deep_{i}", units, glorot(config, i))
                weights.append(kernel)
            x = _add_bias(x, f"deep_{i}", units)
        if config.batch_norm:
            how = config.batch_norm_decay, part, config.batch_norm_epsilon
            x = batch_norm.batch_norm(x, f"batch_norm_{i}", *how)
        if part and rate > 0:
            x = ops.relu_dropout(x, seed_of_step(config.seed, i), dropped(rate))
        else:
            x = tf.nn.relu(x)
    with graph.gradient_override_map(gradients):
        x, kernel = _product(x, "deep_out", 1, glorot(config, -1))
        x = _add_bias(x, "deep_out", 1)
    return x[:, 0], [*weights, kernel]


def _product(x, name, units, start):
    """x times the kernel of a layer, and that kernel."""
    kernel = v1.get_variable(f"{name}/kernel", [x.shape[1].value, units], initializer=start)
    kernel = tf.identity(kernel)  # crosses the network once, if it is on a server
    return tf.matmul(x, kernel, name=f"{name}/MatMul"), kernel


def _add_bias(x, name, units):
    bias = v1.get_variable(f"{name}/bias", [units], initializer=v1.zeros_initializer())
    return tf.nn.bias_add(x, bias, name=f"{name}/BiasAdd")


_MATMUL = "MatMulOfExamples"


@tf.RegisterGradient(_MATMUL)
def _matmul_grad(op, dy):
    """The gradient of examples @ kernel; computes the kernel's as (dy^T @ examples)^T.

    Eigen takes a third longer for examples^T @ dy.
    """
    x, kernel = op.inputs
    dx = tf.matmul(dy, kernel, transpose_b=True)
    return dx, tf.transpose(tf.matmul(dy, x, transpose_a=True))


def dropped(rate):
    """How many of the 65,536 values of a unit's random bits drop the unit."""
    return min(round(rate * 65536), 65535)


def seed_of_step(seed, layer):
    """int64 [2]: the seed for a layer's dropout in this step."""
    step = tf.cast(v1.train.get_or_create_global_step(), tf.int64)
    return tf.stack([tf.constant(seed * 1000 + layer, tf.int64), step])
