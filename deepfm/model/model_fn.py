"""The Estimator's model_fn: the network with its loss, its optimizer and its metrics.

B: examples in the batch. F: fields.
"""

import math

from deepfm.kernels.ops import TENSORFLOW
from deepfm.model import groups, metrics, optimizers
from deepfm.model.candidates import logits_of_candidates
from deepfm.model.gradients import L2_OF_ROWS
from deepfm.model.layers.batch_norm import BatchPart
from deepfm.model.network import logits_side_by_side, network
from deepfm.runtime.tf import summarize, tf
from deepfm.runtime.throughput import ARRIVED, EXAMPLES, ROWS_OF_STEPS

v1 = tf.compat.v1


def logit_offset(sampling_rates):
    """What to add to a logit learned from sampled records to get that of the original records.

    Where a share w of the negatives was kept, q = p / (p + (1 - p) / w), that is
    logit(q) = logit(p) + log(w); in general w is negative rate / positive rate. He et al.,
    "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014, section 6.3.
    Both rates are above 0.
    """
    return math.log(sampling_rates.negative) - math.log(sampling_rates.positive)


def example_losses(logits, labels, loss_type):
    """The loss of each example: log loss, or (label - prob)^2. float32 [B], [B] -> [B]."""
    if loss_type == "square_loss":
        return tf.square(labels - tf.sigmoid(logits))
    return tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=logits)


def weighted_mean(losses, weights, stack=None, replicas=1):
    """A replica's part of sum(weights * losses) / sum(weights) over the global batch.

    The mean of all parts is the whole. 0 if all weights are 0.

    Args:
        losses, weights: float32 [B], those of this replica.
        stack, replicas: Mode.stack and Mode.replicas_in_step.

    Returns:
        float32 [].
    """
    total = tf.reduce_sum(weights)
    if stack:
        total = tf.reduce_sum(stack(total, "example_weights"))
    return tf.math.divide_no_nan(tf.reduce_sum(losses * weights) * replicas, total)


def l2_terms(net, config, with_gradient):
    """The L2 part of the loss, lambda/2 * sum of squares.

    Args:
        with_gradient: whether the second term has a gradient here; if not, the optimizer adds it.

    Returns:
        (the term of the MLP's kernels and, with l2_scope=table, of the whole tables; the term of
        the batch's distinct table rows).
    """

    def penalty(weight, xs):
        return weight * tf.add_n([tf.nn.l2_loss(x) for x in xs]) if weight else tf.constant(0.0)

    deep = config.l2_reg if config.l2_reg_deep is None else config.l2_reg_deep
    kernels = penalty(deep, net.kernels)
    if config.l2_scope == "table":
        return kernels + penalty(config.l2_reg, net.tables.tables), tf.constant(0.0)
    rows = penalty(config.l2_reg, net.tables.rows)
    return kernels, rows if with_gradient else tf.stop_gradient(rows)


def make_model_fn(
    config, optimizer_config, distribution, ops=TENSORFLOW, side_by_side=(0, 1), grouping=None
):
    """Makes the Estimator's model_fn.

    Args:
        distribution: modes.common.mode.Mode.
        side_by_side: (size, most) of the batches that are applied at once outside training.
        grouping: groups.Grouping of evaluations, or None.

    Returns:
        model_fn(features, labels, mode): features as in `network`, or to predict the arguments
        user, items and item_fields of `logits_of_candidates`; perhaps with `example_weights`
        float32 [B], in training also with `weights` float32 [B] and `rows` float32 [2] (see
        input_pipeline); labels float32 [B]; predicts `prob` and `logits` float32 [B], of which
        exports have the first. All modes but training use logits + logit_offset.
    """

    replicas, of_process = distribution.replicas_in_step, distribution.replicas_per_process

    def model_fn(features, labels, mode):
        training = mode == tf.estimator.ModeKeys.TRAIN
        scope = v1.get_variable_scope()
        cut = distribution.partitioner if training else None
        with v1.variable_scope(scope, use_resource=True, partitioner=cut):
            if training:
                counts = features.get("example_weights")
                if counts is None and "weights" in features:
                    counts = tf.cast(features["weights"] > 0, tf.float32)
                part = BatchPart(counts, distribution.stack, distribution.owns_variables())
                net = network(features, config, part, ops)
                of_batches = [net.logits]
            else:
                devices = distribution.evaluate_on
                if "items" in features:
                    found = [logits_of_candidates(**features, config=config, ops=ops)]
                else:
                    found = logits_side_by_side(features, config, ops, *side_by_side, devices)
                of_batches = [logits + config.logit_offset for logits in found]
        logits = tf.concat(of_batches, axis=0)
        if len(of_batches) == 1:
            prob = tf.sigmoid(logits, name="prob")
        else:  # a sigmoid's last bits depend on its place in a tensor
            prob = tf.concat([tf.sigmoid(x) for x in of_batches], axis=0, name="prob")
        if mode == tf.estimator.ModeKeys.PREDICT:
            return tf.estimator.EstimatorSpec(mode, {"prob": prob, "logits": logits})
        labels = tf.reshape(labels, [-1])
        losses = example_losses(logits, labels, config.loss_type)
        of_examples = features.get("example_weights")
        if not training:
            results = metrics.evaluation_ops(
                labels, logits, prob, losses, distribution.gather, of_examples
            )
            if grouping:
                ids = groups.values_of(features, config.field_size, grouping.fields)
                figures = groups.evaluation_ops(
                    grouping, ids, labels, logits, prob, distribution.gather, of_examples
                )
                results.update(figures)
            mean_loss = tf.reduce_mean(losses)
            if of_examples is not None:
                mean_loss = weighted_mean(losses, of_examples)
            return tf.estimator.EstimatorSpec(mode, loss=mean_loss, eval_metric_ops=results)
        weights = features.get("weights", tf.ones_like(labels))
        if "rows" in features:
            rows = distribution.average(features["rows"], "rows")  # [2]
            v1.add_to_collection(ROWS_OF_STEPS, rows)
            weights = tf.math.divide_no_nan(weights, rows[0])
        there = tf.not_equal(weights, 0)
        counted = [there, there & (labels > 0), there & (tf.abs(logits) > metrics.SATURATED)]
        v1.add_to_collection(ARRIVED, labels)
        v1.add_to_collection(EXAMPLES, tf.reduce_sum(tf.cast(tf.stack(counted), tf.int64), axis=1))
        if of_examples is not None:
            mean_loss = weighted_mean(losses, of_examples, distribution.stack, replicas)
        else:
            mean_loss = tf.reduce_sum(losses * weights) / tf.maximum(
                tf.cast(tf.size(losses), tf.float32), 1.0
            )  # a process without records for this step has an empty batch
        with_gradient = optimizers.loss_has_l2_of_rows(optimizer_config, distribution, ops)
        weights_l2, rows_l2 = l2_terms(net, config, with_gradient)
        loss, l2 = mean_loss + weights_l2 + rows_l2, weights_l2
        if replicas == 1:
            l2 += rows_l2
        # Averages over all replicas; Estimator itself averages the loss over those of a process.
        logged = distribution.average(tf.stack([mean_loss, l2]), "losses")
        if of_process > 1:
            logged = tf.reduce_mean(distribution.stack(logged, "losses_of_replicas"), axis=0)
        mean_loss, l2 = tf.unstack(logged)
        if distribution.owns_variables():
            summarize(config.loss_type, mean_loss)
        occurrences = None
        if optimizer_config.cowclip_ratio:
            padded = "weights" in features
            occurrences = net.tables.occurrences(features["weights"] > 0 if padded else None)
        optimizer = optimizers.make_optimizer(optimizer_config, distribution, ops, occurrences)
        # Batch norm's moving averages are updated together with the weights.
        with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
            train_op = optimizer.minimize(loss, v1.train.get_or_create_global_step())
        shown = mean_loss + l2
        of_rows = v1.get_collection(L2_OF_ROWS)[-1:]  # of towers, the last one alone has it
        if of_rows:
            l2 += of_rows[0]
            shown += of_rows[0] * (1 if distribution.strategy else of_process)
        several = replicas > 1 and optimizer_config.l2_rows
        if of_rows if several else distribution.owns_variables():
            summarize("l2", l2)
        return tf.estimator.EstimatorSpec(mode, loss=shown, train_op=train_op)

    return model_fn
