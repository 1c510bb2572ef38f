"""DeepFM: a factorisation machine and an MLP that share their embeddings.

    logits = bias + first_order + second_order + deep;  prob = sigmoid(logits)

Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017,
https://arxiv.org/abs/1703.04247; the equation numbers below are that paper's.

Where a field holds several values they are pooled into one weight and one embedding, which then
stand for the field in all three parts; of a field without a value both are 0.

B: examples in the batch. F: fields. K: embedding size. U: distinct feature ids in the batch.
M: the most values of an example in the batch. N: values of the batch.
"""

import functools
import math
from typing import NamedTuple, Optional, Tuple

import numpy as np
import tensorflow as tf

from deepfm import batch_norm, kernels, metrics, optimizers
from deepfm.hooks import EXAMPLES, ROWS_OF_STEPS

v1 = tf.compat.v1


class ModelConfig(NamedTuple):
    """What defines the model.

    Attributes:
        field_size: F.
        feature_size: rows of the embedding tables; ids lie in [0, feature_size).
        embedding_size: K.
        deep_layers: width of each hidden layer.
        dropout: for each hidden layer the rate at which units are dropped (NOT a keep probability).
        batch_norm: Linear -> batch norm -> ReLU -> dropout, instead of Linear -> ReLU -> dropout.
        batch_norm_decay: of the moving statistics.
        loss_type: log_loss or square_loss.
        l2_reg: lambda of the L2 terms, each lambda/2 * sum of squares, not divided by B.
        l2_scope: batch (each distinct table row of the global batch, once per step) or table (whole
            tables). The MLP's kernels are covered in both.
        lazy_updates: update only the table rows of the batch.
        embedding_init_stddev: of the normal distribution that both tables start from.
        seed: of the initial weights and of dropout.
        pooling: what becomes of a field's values: their sum, mean or (element by element) max, each
            value being its feature's row, scaled. Of one value all are the same, which is why the
            mean is over the number of values, and not over their sum.
        multi_valued: whether exported models take fields of several values.
        hash_buckets: of the strings that ids are hashes of, and that exported models take too; 0:
            ids are no hashes; None: not known.
        logit_offset: added to the logits in all but training; see `logit_offset`.
        feature_map: fingerprint of the feature map whose ids the model learns; None: not known.
    """

    field_size: int
    feature_size: int
    embedding_size: int = 32
    deep_layers: Tuple[int, ...] = (256, 128, 64)
    dropout: Tuple[float, ...] = (0.5, 0.5, 0.5)
    batch_norm: bool = False
    batch_norm_decay: float = 0.9
    loss_type: str = "log_loss"
    l2_reg: float = 0.0
    l2_scope: str = "batch"
    lazy_updates: bool = True
    embedding_init_stddev: float = 0.01
    seed: int = 1
    pooling: str = "sum"
    multi_valued: bool = False
    hash_buckets: Optional[int] = None
    logit_offset: float = 0.0
    feature_map: Optional[str] = None


def logit_offset(sampling_rates):
    """What turns the logit of a model of sampled records into that of the original ones.

    Where a share w of the negatives was kept, q = p / (p + (1 - p) / w), that is
    logit(q) = logit(p) + log(w); in general w is negative rate / positive rate. He et al.,
    "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014, section 6.3.

    Args:
        sampling_rates: SamplingRates, both above 0.
    """
    return math.log(sampling_rates.negative) - math.log(sampling_rates.positive)


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
        layer = v1.layers.Dense(units, name=f"deep_{i}", kernel_initializer=_glorot(config, i))
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
            x = kernels.relu_dropout(x, _seed_of_step(config.seed, i), _dropped(rate))
        else:
            x = _drop(tf.nn.relu(x), rate, [config.seed, i])
    layer = v1.layers.Dense(1, name="deep_out", kernel_initializer=_glorot(config, -1))
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
tf.RegisterGradient(_MATMUL[True])(functools.partial(_matmul_grad, transpose=kernels.transpose))


def _glorot(config, layer):
    """Initializer of a kernel: normal of variance 2 / (inputs + outputs), cut off at 2 stddev.

    Glorot and Bengio, AISTATS 2010.
    """

    def draw(shape, seed, full_shape):
        # The truncated normal's own standard deviation is not 1 but this.
        stddev = np.sqrt(2 / sum(full_shape)) / 0.87962566103423978
        return tf.random.stateless_truncated_normal(shape, seed, stddev=stddev)

    return _in_blocks(draw, config.seed * 1000 + layer)


def _normal(stddev, seed, compiled):
    """Initializer of an embedding table."""
    draw = lambda shape, seed, _: tf.random.stateless_normal(shape, seed, stddev=stddev)
    return _in_blocks(draw, seed, compiled)


_BLOCK = 1 << 18  # numbers that are drawn at once


def _in_blocks(draw, seed, compiled=False):
    """An initializer whose rows are the same in however many parts the variable lies.

    TensorFlow's own give each part of a partitioned variable the same numbers.

    Args:
        draw: (shape, seed int [2], shape of the whole variable) -> float32.
        seed: of the variable.
        compiled: bool; whether the compiled kernels give the memory.
    """

    def initialize(shape, dtype=None, partition_info=None):
        full, first = list(shape), 0
        if partition_info:
            full, first = partition_info.full_shape, partition_info.var_offset[0]
        rows = min(max(_BLOCK // max(full[-1], 1), 1), full[0])  # of a block
        last = first + shape[0]
        if rows == full[0]:  # the loop would be some fifty operators for each small variable
            return draw(full, tf.stack([seed, 0]), full)[first:last]

        def put(i, values):
            begin, end = tf.maximum(i * rows, first), tf.minimum((i + 1) * rows, last)
            block = draw([rows, *full[1:]], tf.stack([seed, i]), full)
            block = block[begin - i * rows : end - i * rows]
            where = tf.range(begin, end) - first
            return i + 1, tf.raw_ops.InplaceUpdate(x=values, i=where, v=block)

        # Blocks that are put together at the end would be there twice.
        here = compiled and not partition_info  # parameter servers need not have the kernels
        values = kernels.zeros(shape) if here else tf.raw_ops.Empty(shape=shape, dtype=dtype)
        _, values = tf.while_loop(
            lambda i, _: i * rows < last, put, [first // rows, values],
            parallel_iterations=2, back_prop=False,
        )  # fmt: skip
        return tf.ensure_shape(values, shape)

    return initialize


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


class Tables(NamedTuple):
    """The two embedding tables and what a batch takes from them.

    Attributes:
        tables: the variables, float32 [feature_size] and [feature_size, K] (or their partitions).
        rows: what was gathered of each: float32 [U] and [U, K].
        embeddings: float32 [B, F K], scaled by the feature values.
        fm: float32 [B], first_order + second_order.
    """

    tables: list
    rows: list
    embeddings: tf.Tensor
    fm: tf.Tensor


def counts_rows_once(config):
    """Whether the batch's ids are made distinct: for lazy updates, and for L2 by distinct rows."""
    return config.lazy_updates or config.l2_scope == "batch"


class Values(NamedTuple):
    """The values of a batch.

    Attributes:
        ids: int64 [N].
        x: float32 [N], what each feature's row is scaled by.
        counts: int32 [B F], the values of each field, in order; None where each has one.
    """

    ids: tf.Tensor
    x: tf.Tensor
    counts: Optional[tf.Tensor]


def values_of(features, config):
    """The Values of the model's input."""
    ids, x = features["feat_ids"], features["feat_vals"]
    if "feat_counts" not in features:
        flat = lambda x: tf.reshape(tf.reshape(x, [-1, config.field_size]), [-1])
        return Values(flat(ids), flat(x), None)
    counts = tf.reshape(features["feat_counts"], [-1, config.field_size])
    lengths = tf.reduce_sum(counts, axis=1)
    there = tf.sequence_mask(lengths, tf.shape(ids)[1])  # [B, M]
    whole = tf.equal(tf.reduce_sum(lengths), tf.size(ids))
    flat = lambda x: tf.cond(whole, lambda: tf.reshape(x, [-1]), lambda: tf.boolean_mask(x, there))
    return Values(flat(ids), flat(x), tf.reshape(counts, [-1]))


def look_up(values, config, training, compiled=False):
    """Takes the rows of a batch out of both tables, scales them, and pools those of a field.

    The ids are made distinct once for both tables, so that each row is gathered and its gradient
    combined, sent and applied once. What the batch makes of its rows is then a product with a
    sparse matrix that holds the feature values: one pass forward, and one backward in which
    gradients are scaled and combined at once; the sum over a field's values comes with it. (Not so
    in the article's configuration, whose gradients are dense in any case.)

    Args:
        values: Values.
        config: ModelConfig.
        training: bool; the ids have then been checked.
        compiled: bool; whether the compiled kernels do it. They take one value of each field.

    Returns:
        Tables.
    """
    normal = _normal(config.embedding_init_stddev, config.seed, compiled)
    tables = [
        v1.get_variable("fm_w", [config.feature_size], initializer=v1.zeros_initializer()),
        v1.get_variable("fm_v", [config.feature_size, config.embedding_size], initializer=normal),
    ]
    ids, x, counts = values
    compiled = compiled and counts is None and counts_rows_once(config)
    small = tf.int32 if training and config.feature_size <= tf.int32.max else tf.int64
    if compiled:
        distinct, where = kernels.unique(ids, small)  # [U], [N]
    elif counts_rows_once(config):
        distinct, where = tf.unique(tf.cast(ids, small))  # int32 take two thirds of the time
    else:
        distinct, where = ids, None
    # Under a strategy this replica's table; of the whole, all rows would be read.
    own = [t.get() for t in tables] if tf.distribute.has_strategy() else tables
    # 'div' keeps neighbouring rows together: a checkpoint means the same with any parts.
    if compiled and all(hasattr(t, "handle") for t in own):  # not cut into parts
        rows = [kernels.gather(t, distinct) for t in own]
    else:
        rows = [tf.nn.embedding_lookup(t, distinct, partition_strategy="div") for t in own]
    if compiled:
        return Tables(tables, rows, *kernels.look_up(*rows, where, x, config.field_size))

    def one_each():
        """(weights [B F, 1], embeddings [B F, K], sums of their squares [B])."""
        embeddings = _scaled(rows[1], where, x)
        if where is None:
            squares = tf.reduce_sum(tf.square(embeddings), axis=1, keepdims=True)
        else:
            lengths = tf.reduce_sum(tf.square(rows[1]), axis=1, keepdims=True)  # [U, 1]
            squares = _scaled(lengths, where, tf.square(x))
        squares = tf.reduce_sum(tf.reshape(squares, [-1, config.field_size]), axis=1)
        return _scaled(rows[0][:, tf.newaxis], where, x), embeddings, squares

    def pooled():
        places = tf.repeat(tf.range(tf.size(counts)), counts)  # [N]
        by = x
        if config.pooling == "mean":
            by = x / tf.gather(tf.cast(counts, tf.float32), places)
        pool = lambda rows: _pooled(rows, where, by, places, counts, config.pooling)
        weights, embeddings = pool(rows[0][:, tf.newaxis]), pool(rows[1])
        of_example = tf.reshape(embeddings, [-1, config.field_size * config.embedding_size])
        return weights, embeddings, tf.reduce_sum(tf.square(of_example), axis=1)

    if counts is None:
        weighted, embeddings, squares = one_each()
    else:
        same = tf.reduce_all(tf.equal(counts, 1))
        weighted, embeddings, squares = tf.cond(same, one_each, pooled)
    linear = first_order(tf.reshape(weighted, [-1, config.field_size]))
    of_fields = tf.reshape(embeddings, [-1, config.field_size, config.embedding_size])
    flat = tf.reshape(embeddings, [-1, config.field_size * config.embedding_size])
    return Tables(tables, rows, flat, linear + second_order(of_fields, squares))


def _scaled(rows, where, by, places=None, counts=None):
    """Rows by their places, scaled, and summed where several have the same place.

    Args:
        rows: float32 [U, n].
        where: int32 [N], the row of each value; None: they have a row each.
        by: float32 [N].
        places: int32 [N], the place of each value, where there is `where`; None: its own.
        counts: [number of places]; given with `places`.

    Returns:
        float32 [number of places, n].
    """
    if where is None:
        return rows * by[:, tf.newaxis]
    uses = optimizers.uses_of_rows(where, tf.shape(rows)[0], places, counts)
    return tf.raw_ops.SparseTensorDenseMatMul(**uses, a_values=by, b=rows)


def _pooled(rows, where, by, places, counts, pooling):
    """As `_scaled`, but with pooling max the largest in place of the sum; 0 for an empty place."""
    if pooling != "max" and where is not None:
        return _scaled(rows, where, by, places, counts)
    pool = tf.math.unsorted_segment_max if pooling == "max" else tf.math.unsorted_segment_sum
    found = pool(_scaled(rows, where, by), places, tf.size(counts))
    return tf.where(counts > 0, found, tf.zeros_like(found))  # of nothing the maximum is -3.4e38


class Network(NamedTuple):
    """The model's output and what its loss needs: logits float32 [B], Tables, MLP kernels."""

    logits: tf.Tensor
    tables: Tables
    kernels: list


def network(features, config, training, compiled=False, part=batch_norm.WHOLE):
    """Builds the model; creates its variables.

    Args:
        features: {"feat_ids": int64 [B, F], "feat_vals": float32 [B, F]}; where a field may hold
            several values or none int64 and float32 [B, M], and "feat_counts" int [B, F].
        config: ModelConfig.
        training: bool.
        compiled: bool; whether the compiled kernels do what they can.
        part: batch_norm.Part.

    Returns:
        Network.
    """
    bias = v1.get_variable("fm_bias", [1], initializer=v1.zeros_initializer())
    tables = look_up(values_of(features, config), config, training, compiled)
    deep_logits, weights = deep(tables.embeddings, config, training, compiled, part)
    return Network(bias + tables.fm + deep_logits, tables, weights)


def example_losses(logits, labels, loss_type):
    """The loss of each example: log loss, or (label - prob)^2. float32 [B], [B] -> [B]."""
    if loss_type == "square_loss":
        return tf.square(labels - tf.sigmoid(logits))
    return tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)


def l2_terms(net, config, with_gradient):
    """The L2 part of the loss, lambda/2 * sum of squares.

    Args:
        net: Network.
        config: ModelConfig.
        with_gradient: whether the second term has a gradient here; else the optimizer adds it.

    Returns:
        (the term of the MLP's kernels and, with l2_scope=table, of the whole tables; the term of
        the batch's distinct table rows).
    """
    if not config.l2_reg:
        return tf.constant(0.0), tf.constant(0.0)
    square = lambda xs: config.l2_reg * tf.add_n([tf.nn.l2_loss(x) for x in xs])
    if config.l2_scope == "table":
        return square(net.kernels + net.tables.tables), tf.constant(0.0)
    rows = square(net.tables.rows)
    return square(net.kernels), rows if with_gradient else tf.stop_gradient(rows)


def _part(features, distribution):
    """The batch_norm.Part of a replica in training."""
    counts = None
    if "weights" in features:
        counts = tf.cast(features["weights"] > 0, tf.float32)
    return batch_norm.Part(counts, distribution.stack, distribution.owns_variables())


def make_model_fn(config, optimizer_config, distribution):
    """Makes the Estimator's model_fn.

    Args:
        config: ModelConfig.
        optimizer_config: optimizers.OptimizerConfig.
        distribution: distribution.Distribution.

    Returns:
        model_fn(features, labels, mode), features as in `network` and, in training, perhaps
        `weights` float32 [B] and `rows` float32 [2] (see input_pipeline), labels float32 [B];
        predicts `prob` float32 [B]. All but training is of logits + logit_offset.
    """

    def model_fn(features, labels, mode):
        training = mode == tf.estimator.ModeKeys.TRAIN
        scope = v1.get_variable_scope()
        cut = distribution.partitioner if training else None
        with v1.variable_scope(scope, use_resource=True, partitioner=cut):
            compiled = training and distribution.compiled
            part = _part(features, distribution) if training else batch_norm.WHOLE
            net = network(features, config, training, compiled, part)
        logits = net.logits if training else net.logits + config.logit_offset
        prob = tf.sigmoid(logits, name="prob")
        if mode == tf.estimator.ModeKeys.PREDICT:
            predictions = {"prob": prob}
            return tf.estimator.EstimatorSpec(mode, predictions=predictions)
        labels = tf.reshape(labels, [-1])
        losses = example_losses(logits, labels, config.loss_type)
        if not training:
            ops = metrics.evaluation_ops(labels, logits, prob, losses, distribution.gather)
            return tf.estimator.EstimatorSpec(
                mode, loss=tf.reduce_mean(losses), eval_metric_ops=ops
            )
        weights = features.get("weights", tf.ones_like(labels))
        if "rows" in features:
            rows = distribution.average(features["rows"], "rows")  # [2]
            v1.add_to_collection(ROWS_OF_STEPS, rows)
            weights = tf.math.divide_no_nan(weights, rows[0])
        v1.add_to_collection(EXAMPLES, tf.math.count_nonzero(weights))
        mean_loss = tf.reduce_sum(losses * weights) / tf.maximum(
            tf.cast(tf.size(losses), tf.float32), 1.0
        )  # a process without records for this step has an empty batch
        with_gradient = optimizers.loss_has_l2_of_rows(optimizer_config, distribution)
        weights_l2, rows_l2 = l2_terms(net, config, with_gradient)
        loss = mean_loss + weights_l2 + rows_l2
        # Of all replicas; what Estimator makes a mean of itself it is given as it is.
        told = tf.stack([loss, mean_loss, weights_l2 + rows_l2])
        told = distribution.average(told, "losses")
        everyones_loss = told[0]
        if distribution.replicas_per_process > 1:
            told = tf.reduce_mean(distribution.stack(told, "losses_of_replicas"), axis=0)
        if distribution.owns_variables():
            metrics.summarize(config.loss_type, told[1])
            metrics.summarize("l2", told[2])
        optimizer = optimizers.make_optimizer(optimizer_config, distribution)
        # The moving statistics of batch norm move with the weights.
        with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
            train_op = optimizer.minimize(loss, v1.train.get_or_create_global_step())
        return tf.estimator.EstimatorSpec(mode, loss=everyones_loss, train_op=train_op)

    return model_fn
