"""The MLP's first layer and the FM, on the distinct (field, id) pairs of a batch.

B: examples. F: fields. H: units. K: embedding size. N: values. U: distinct ids.
"""

from deepfm.kernels.build import raw_ops
from deepfm.runtime.tf import tf


class Plain:
    """With TensorFlow's operators."""

    def pairs(self, where, x, counts, num_ids, config):
        """The distinct (field, id) pairs of a batch, for `first_layer`; None if it needs none.

        Args:
            where, x, counts: as for `look_up`.
            num_ids: int32 [], U.
            config: ModelConfig.
        """

    def first_layer(self, weights, embeddings, where, x, counts, pairs, kernel, field_size, whole):
        """The product of the MLP's input with the first layer's kernel, and the FM's terms.

        Args:
            weights, embeddings, where, x, counts, field_size: as for `look_up`.
            pairs: from `pairs`.
            kernel: float32 [F K, H].
            whole: () -> the same as this returns, from the matrix that `look_up` returns.

        Returns:
            (float32 [B, H]; float32 [B], first_order + second_order).
        """
        return whole()


class Compiled:
    """As Plain, with the compiled operators."""

    def pairs(self, where, x, counts, num_ids, config):
        several = counts is not None
        of_values = several and config.pooling == "max"
        if of_values or largest_share(config.embedding_size, config.deep_layers[0]) <= 0:
            return None
        return raw_ops().deepfm_pairs(
            where, x, counts if several else tf.zeros([0], tf.int32), num_ids,
            field_size=config.field_size, mean=several and config.pooling == "mean",
        )  # fmt: skip

    def first_layer(self, weights, embeddings, where, x, counts, pairs, kernel, field_size, whole):
        if pairs is None:
            return whole()
        units, several = kernel.shape[1].value, counts is not None
        places = tf.size(counts if several else where)
        share = tf.size(pairs.rows) / tf.maximum(places, 1)  # the batch alone decides
        few = share < largest_share(embeddings.shape[1].value, units)
        if not several:
            y, fm = _of_pairs_or_values(weights, embeddings, kernel, where, x, pairs, few)
            return tf.ensure_shape(y, [None, units]), fm

        def distinct():
            y, fm, *_ = raw_ops().deepfm_first_layer(weights, embeddings, kernel, *pairs)
            return tf.ensure_shape(y, [None, units]), fm

        return tf.cond(few, distinct, whole)

    def applied_first_layer(self, weights, embeddings, ids, x, kernel, field_size):
        """As `first_layer`, of fields with one value each, while the weights stay as they are.

        Keeps the products of rows from batch to batch. What it finds of an example is the same, to
        the bit, whatever else is in the batch.

        Args:
            weights, embeddings: the tables.
            ids: int64 [N].
            x, kernel, field_size: as for `first_layer`.
        """
        y, fm = raw_ops().deepfm_applied_first_layer(
            weights.handle, embeddings.handle, kernel, ids, x, field_size
        )
        return tf.ensure_shape(y, [None, kernel.shape[1].value]), fm


def largest_share(width, units):
    """The share of distinct (field, id) pairs up to which the first layer is faster on these.

    A line through the shares at which both took the same time, on an AMD EPYC with AVX2: .37 with
    embeddings of 32 and 128 units, .43 with 32 and 256, .23 with 16 and 64, .19 with 8 and 32.
    Below 0 for small layers, whose pairs need not even be looked for.
    """
    return 0.48 - 2.9 * (width + units) / (width * units)


def _of_pairs_or_values(weights, embeddings, kernel, where, x, pairs, few):
    """The first layer and the FM of fields with one value each.

    Its gradient chooses once more between distinct pairs and the whole matrix. TensorFlow's own
    gradient of a choice fills a zero gradient for each path not taken, and adds it: as many bytes
    as the rows and the kernel have.

    Args:
        weights, embeddings, kernel, where, x: as for Ops.first_layer.
        pairs: outputs of DeepfmPairs.
        few: bool [], whether to use them.

    Returns:
        (float32 [B, H]; float32 [B]), as Ops.first_layer.
    """
    field_size = kernel.shape[0].value // embeddings.shape[1].value

    @tf.custom_gradient
    def layer(*inputs):
        weights, embeddings, kernel = inputs

        def of_pairs():
            return raw_ops().deepfm_first_layer(*inputs, *pairs)

        def of_values():
            scaled, fm, sums = raw_ops().deepfm_look_up(weights, embeddings, where, x, field_size)
            return tf.matmul(scaled, kernel), fm, sums, scaled

        y, fm, sums, kept = tf.cond(few, lambda: list(of_pairs()), lambda: list(of_values()))

        def gradient(by_y, by_fm):
            def back_to_pairs():
                return raw_ops().deepfm_first_layer_grad(*inputs, *pairs, sums, by_y, by_fm, kept)

            def back_to_values():
                by_scaled = tf.matmul(by_y, kernel, transpose_b=True)
                by_kernel = tf.transpose(tf.matmul(by_y, kept, transpose_a=True))
                by_rows = raw_ops().deepfm_look_up_grad(
                    weights, embeddings, where, x, sums, by_scaled, by_fm, field_size
                )
                return [*by_rows, by_kernel]

            return tf.cond(few, lambda: list(back_to_pairs()), back_to_values)

        return (y, fm), gradient

    return layer(weights, embeddings, kernel)


@tf.RegisterGradient("DeepfmFirstLayer")
def _first_layer_grad(op, by_y, by_fm, *_):
    _, _, sums, projected = op.outputs
    by_inputs = raw_ops().deepfm_first_layer_grad(*op.inputs, sums, by_y, by_fm, projected)
    return [*by_inputs] + [None] * (len(op.inputs) - 3)
