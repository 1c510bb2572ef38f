"""DeepFM: a factorisation machine and an MLP that share their embeddings.

    logits = bias + first_order + second_order + deep;  prob = sigmoid(logits)

Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017,
https://arxiv.org/abs/1703.04247.

B: examples in the batch. F: fields. M: the most values of an example in the batch.
"""

from typing import NamedTuple

import tensorflow as tf

from deepfm.kernels.ops import TENSORFLOW
from deepfm.model.embeddings import Tables, look_up, values_of
from deepfm.model.layers import deep, first_kernel

v1 = tf.compat.v1


class Network(NamedTuple):
    """The model's output and what its loss needs: logits float32 [B], Tables, MLP kernels."""

    logits: tf.Tensor
    tables: Tables
    kernels: list


def network(features, config, part=None, ops=TENSORFLOW):
    """Builds the model; creates its variables.

    Args:
        features: {"feat_ids": int64 [B, F], "feat_vals": float32 [B, F]}; if a field may hold
            several values or none, int64 and float32 [B, M], and "feat_counts" int [B, F].
        config: ModelConfig.
        part: batch_norm.BatchPart in training, else None.
        ops: Ops.

    Returns:
        Network.
    """
    bias = v1.get_variable("fm_bias", [1], initializer=v1.zeros_initializer())
    tables = look_up(values_of(features, config), config, part is not None, ops)
    kernel = first_kernel(config)
    x, fm = tables.project(kernel)
    deep_logits, weights = deep(x, kernel, config, part, ops)
    return Network(bias + fm + deep_logits, tables, weights)
