"""The two embedding tables, and what a batch looks up in them.

If a field holds several values, they are pooled into one weight and one embedding, which all three
terms use for that field; for a field without a value both are 0.

B: examples in the batch. F: fields. K: embedding size. U: distinct feature ids in the batch.
M: the most values of an example in the batch. N: values of the batch.
"""

from typing import Any, Callable, NamedTuple, Optional

from deepfm.model import gradients
from deepfm.model.cowclip import Occurrences
from deepfm.model.layers.initializers import normal
from deepfm.model.layers.terms import first_order, first_product, second_order
from deepfm.runtime.tf import copy_here, tf

v1 = tf.compat.v1


NAMES = "fm_w", "fm_v"  # of the variables


def is_table(variable):
    """Whether a variable is an embedding table, or a part or a copy of one."""
    return variable.op.name.split("/")[0] in NAMES


def is_drawn(variable):
    """Whether a variable is the table that starts from random numbers, or a copy of it."""
    return variable.trainable and variable.op.name.split("/")[0] == NAMES[1]


class Tables(NamedTuple):
    """The two embedding tables and what a batch looks up in them.

    Attributes:
        tables: the variables, float32 [feature_size] and [feature_size, K] (or their partitions).
        rows: the rows gathered from each: float32 [U] and [U, K].
        terms: () -> (float32 [B, F K], the embeddings scaled by the feature values; float32 [B],
            first_order + second_order). For layers such as docs/extending.md adds.
        project: kernel float32 [F K, H] -> (their product float32 [B, H], the second of `terms`).
        occurrences: (bool [B], which examples count, or None: all) -> Occurrences of the values.
    """

    tables: list
    rows: list
    terms: Callable
    project: Callable
    occurrences: Callable


class Distinct(NamedTuple):
    """What is distinct in a batch.

    Attributes:
        ids: int32 or int64 [U]; of the article's configuration, those of all values.
        where: int32 [N], the place there of each value's id; None: value i has place i.
        pairs: what `Ops.pairs` gives.
    """

    ids: tf.Tensor
    where: Optional[tf.Tensor] = None
    pairs: Any = None


class Values(NamedTuple):
    """The values of a batch.

    Attributes:
        ids: int64 [N].
        x: float32 [N], the factor for each feature's row.
        counts: int32 [B F], number of values in each field, in order; None if each has one.
        distinct: their Distinct, if `ahead` has found it.
    """

    ids: tf.Tensor
    x: tf.Tensor
    counts: Optional[tf.Tensor]
    distinct: Optional[Distinct] = None


def ahead(features, config, ops):
    """The features of a batch to train on, and their Distinct, for the input pipeline.

    That takes an eighth of a step, and is known before the step begins: so another core finds it
    during the step before.
    """
    found = distinct_of(values_of(features, config), config, True, ops)
    found = {name: x for name, x in found._asdict().items() if x is not None}  # as tf.data wants
    return {**features, "distinct": found} if "where" in found else features


def values_of(features, config):
    """The Values of the model's input."""
    ids, x, found = features["feat_ids"], features["feat_vals"], features.get("distinct")
    found = found and Distinct(**found)
    if "feat_counts" not in features:
        flat = lambda x: tf.reshape(tf.reshape(x, [-1, config.field_size]), [-1])
        return Values(flat(ids), flat(x), None, found)
    counts = tf.reshape(features["feat_counts"], [-1, config.field_size])
    lengths = tf.reduce_sum(counts, axis=1)
    there = tf.sequence_mask(lengths, tf.shape(ids)[1])  # [B, M]
    whole = tf.equal(tf.reduce_sum(lengths), tf.size(ids))
    flat = lambda x: tf.cond(whole, lambda: tf.reshape(x, [-1]), lambda: tf.boolean_mask(x, there))
    return Values(flat(ids), flat(x), tf.reshape(counts, [-1]), found)


def applied_first_layer(values, kernel, config, ops):
    """The first layer's product and the FM of a model that is applied, if these are known sooner.

    Args:
        kernel: float32 [F K, H].

    Returns:
        As `Tables.project`; None if the rows of each batch have to be looked up.
    """
    if not ops.keeps_rows or values.counts is not None or config.feature_size > tf.int32.max:
        return None
    kernel = tf.convert_to_tensor(kernel)
    own = _own(_tables(config, ops))
    return ops.applied_first_layer(*own, values.ids, values.x, kernel, config.field_size)


def _tables(config, ops):
    """The two variables."""
    start = normal(config.embedding_init_stddev, config.seed, ops)
    return [
        v1.get_variable(NAMES[0], [config.feature_size], initializer=v1.zeros_initializer()),
        v1.get_variable(NAMES[1], [config.feature_size, config.embedding_size], initializer=start),
    ]


def _own(tables):
    """Under a strategy, this replica's copies; gathering from mirrored variables reads all rows."""
    return [copy_here(t) for t in tables] if tf.distribute.has_strategy() else tables


def look_up(values, config, training, ops) -> Tables:
    """Gathers the rows of a batch from both tables, scales them, and pools those of a field.

    The ids are made distinct once for both tables, so that each row is gathered, and its gradient
    combined, sent and applied, only once. Scaling is then a product with a sparse matrix of the
    feature values: one pass forward, and one backward, which scales and combines gradients at
    once; it also sums over a field's values. (The ids stay as they are in the article's
    configuration, whose gradients are dense anyway.)

    Args:
        training: bool; if True, the ids have been checked.
    """
    tables = _tables(config, ops)
    distinct, where, pairs = values.distinct or distinct_of(values, config, training, ops)
    rows = [ops.gather(t, distinct) for t in _own(tables)]
    plain = lambda: _terms(*rows, where, values, config)
    of_values = where, values.x, values.counts
    terms = lambda: ops.look_up(*rows, *of_values, config.field_size, plain)

    def project(kernel):
        kernel = tf.convert_to_tensor(kernel)

        def whole():
            embeddings, fm = terms()
            return first_product(embeddings, kernel, training), fm

        return ops.first_layer(*rows, *of_values, pairs, kernel, config.field_size, whole)

    occurrences = lambda there: _occurrences(distinct, where, values, config.field_size, there)
    return Tables(tables, rows, terms, project, occurrences)


def distinct_of(values, config, training, ops) -> Distinct:
    """The Distinct of Values; the arguments are those of `look_up`."""
    if not (config.lazy_updates or config.l2_scope == "batch"):  # which is about distinct rows
        return Distinct(values.ids)
    small = training and config.feature_size <= tf.int32.max
    ids, where = ops.unique(values.ids, tf.int32 if small else tf.int64)
    return Distinct(ids, where, ops.pairs(where, values.x, values.counts, tf.size(ids), config))


def _occurrences(distinct, where, values, field_size, there):
    """The Occurrences of a batch's distinct ids: each value of an example that counts is one."""
    count = tf.size(distinct)
    if there is not None:
        of_example = field_size
        if values.counts is not None:
            of_example = tf.reduce_sum(tf.reshape(values.counts, [-1, field_size]), axis=1)
        of_values = tf.repeat(there, of_example)
        where = tf.where(of_values, where, tf.fill(tf.shape(where), count))  # which is left out
    no_weights = tf.constant([], tf.float32)
    return Occurrences(distinct, tf.raw_ops.Bincount(arr=where, size=count, weights=no_weights))


def _terms(weights, embeddings, where, values, config):
    """Does the work of Ops.look_up with TensorFlow's own ops."""
    _, x, counts, _ = values

    def one_each():
        """(weights [B F, 1], embeddings [B F, K], sums of their squares [B])."""
        scaled = _scaled(embeddings, where, x)
        if where is None:
            squares = tf.reduce_sum(tf.square(scaled), axis=1, keepdims=True)
        else:
            lengths = tf.reduce_sum(tf.square(embeddings), axis=1, keepdims=True)  # [U, 1]
            squares = _scaled(lengths, where, tf.square(x))
        squares = tf.reduce_sum(tf.reshape(squares, [-1, config.field_size]), axis=1)
        return _scaled(weights[:, tf.newaxis], where, x), scaled, squares

    def pooled():
        places = tf.repeat(tf.range(tf.size(counts)), counts)  # [N]
        by = x
        if config.pooling == "mean":
            by = x / tf.gather(tf.cast(counts, tf.float32), places)
        pool = lambda rows: _pooled(rows, where, by, places, counts, config.pooling)
        pooled_weights, scaled = pool(weights[:, tf.newaxis]), pool(embeddings)
        of_example = tf.reshape(scaled, [-1, config.field_size * config.embedding_size])
        return pooled_weights, scaled, tf.reduce_sum(tf.square(of_example), axis=1)

    if counts is None:
        weighted, scaled, squares = one_each()
    else:
        same = tf.reduce_all(tf.equal(counts, 1))
        weighted, scaled, squares = tf.cond(same, one_each, pooled)
    linear = first_order(tf.reshape(weighted, [-1, config.field_size]))
    of_fields = tf.reshape(scaled, [-1, config.field_size, config.embedding_size])
    flat = tf.reshape(scaled, [-1, config.field_size * config.embedding_size])
    return flat, linear + second_order(of_fields, squares)


def _scaled(rows, where, by, places=None, counts=None):
    """The scaled row of each value, summed over the values that share a place.

    Args:
        rows: float32 [U, n].
        where: int32 [N], the row of each value; None: value i has row i.
        by: float32 [N], the factors.
        places: int32 [N], the place of each value, only with `where`; None: value i has place i.
        counts: [number of places]; given with `places`.

    Returns:
        float32 [number of places, n].
    """
    if where is None:
        return rows * by[:, tf.newaxis]
    uses = gradients.uses_of_rows(where, tf.shape(rows)[0], places, counts)
    return tf.raw_ops.SparseTensorDenseMatMul(**uses, a_values=by, b=rows)


def _pooled(rows, where, by, places, counts, pooling):
    """Like `_scaled`, but with pooling=max the maximum instead of the sum; 0 for an empty place."""
    if pooling != "max" and where is not None:
        return _scaled(rows, where, by, places, counts)
    pool = tf.math.unsorted_segment_max if pooling == "max" else tf.math.unsorted_segment_sum
    found = pool(_scaled(rows, where, by), places, tf.size(counts))
    return tf.where(counts > 0, found, tf.zeros_like(found))  # an empty maximum is -3.4e38
