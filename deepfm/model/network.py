"""DeepFM: a factorisation machine and an MLP that share their embeddings.

    logits = bias + first_order + second_order + deep;  prob = sigmoid(logits)

Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017,
https://arxiv.org/abs/1703.04247.

B: examples in the batch. F: fields. M: the most values of an example in the batch.
"""

from typing import NamedTuple, Optional

import numpy as np

from deepfm.kernels.ops import TENSORFLOW
from deepfm.model.embeddings import Tables, applied_first_layer, look_up, values_of
from deepfm.model.layers.terms import deep, first_kernel
from deepfm.runtime.tf import tf

v1 = tf.compat.v1


class Network(NamedTuple):
    """The model's output and what its loss needs: logits float32 [B], Tables, MLP kernels."""

    logits: tf.Tensor
    tables: Optional[Tables]
    kernels: list


def network(features, config, part=None, ops=TENSORFLOW, first=None) -> Network:
    """Builds the model; creates its variables.

    Args:
        features: {"feat_ids": int64 [B, F], "feat_vals": float32 [B, F]}; if a field may hold
            several values or none, int64 and float32 [B, M], and "feat_counts" int [B, F]. None:
            only `first` is known, and the result has no tables.
        part: batch_norm.BatchPart in training, else None.
        first: what `Tables.project` returns, if known.
    """
    bias = v1.get_variable("fm_bias", [1], initializer=v1.zeros_initializer())
    tables = None
    if features:
        tables = look_up(values_of(features, config), config, part is not None, ops)
    kernel = tf.identity(first_kernel(config))  # crosses the network once, if it is on a server
    x, fm = first or tables.project(kernel)
    deep_logits, weights = deep(x, kernel, config, part, ops)
    return Network(bias + fm + deep_logits, tables, weights)


def logits_side_by_side(features, config, ops, size, most, devices=()):
    """The logits of several batches, each computed as if it were alone, but all at the same time.

    A batch alone keeps few cores busy: much of the work on it has to be done in turn.

    Args:
        features, config, ops: as for `network`.
        size: examples in each batch but the last; 0: all are one batch.
        most: the most batches that there may be.
        devices: what shares the examples evenly, instead of in batches of `size`; (): TensorFlow
            chooses.

    Returns:
        [float32 [examples of the batch] of each batch].
    """
    with v1.variable_scope(v1.get_variable_scope(), reuse=v1.AUTO_REUSE):
        values, kernel = values_of(features, config), first_kernel(config)
        first = applied_first_layer(values, kernel, config, ops)
        if not size:
            return [network(features, config, ops=ops, first=first).logits]
        examples = tf.shape(features["feat_ids"])[0]
        if devices:
            size, most = -(-examples // len(devices)), len(devices)
        sizes = tf.clip_by_value(examples - size * np.arange(most), 0, size)
        batches = [
            dict(zip(features, x)) for x in zip(*(tf.split(x, sizes) for x in features.values()))
        ]
        firsts = zip(*(tf.split(x, sizes) for x in first)) if first else [None] * most
        found = []
        for batch, of_batch, device in zip(batches, firsts, devices or [""] * most):
            with tf.device(device):  # "" changes nothing
                found.append(network(batch, config, ops=ops, first=of_batch).logits)
        return found
