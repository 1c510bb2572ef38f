"""Which records this process reads, in which order, batch then parse.

    files -> share -> parallel reads -> cache -> shuffle -> batch -> parse -> prefetch
    channel -> share -> cache -> shuffle -> batch -> parse -> prefetch   (Pipe mode)

up to the batch in each epoch anew (`reading`). Records are parsed a batch at a time, by one
native op a batch, which is many times as fast as one call a record. Nothing is dropped: the last
batch of an epoch is as short as it is.

B: records in a batch. F: fields.
"""

import os
from typing import Tuple

import tensorflow as tf

from deepfm.config import InputConfig
from deepfm.data import datasets, reading, records, shares
from deepfm.data.shares import Skipped
from deepfm.kernels.ops import TENSORFLOW

# tf.data's own tuning takes more of two cores than it gives back.
_PARSERS = max(1, len(os.sched_getaffinity(0)) // 2)  # batches parsed at the same time


_PREFETCHED = 4  # parsed batches that wait for the training step


def make_input_fn(
    data: datasets.DataSet,
    schema: records.Schema,
    config: InputConfig,
    damaged: Tuple[Skipped, ...] = (),
):
    """Makes an Estimator's input_fn.

    Args:
        data: the files.
        schema: what each record must look like.
        config: InputConfig.
        damaged: the files with bad records that are passed over (`--max_bad_records`).

    Returns:
        A function () -> tf.data.Dataset of (features, labels float32 [B]), the features as
        `Format.parse` gives them. With several processes or replicas the features also hold
        "weights" float32 [B]: what each example counts in the mean loss of a replica, so that the
        mean over replicas is that of the global batch, although its parts differ in size; 0 for
        what only fills up a batch. In step, but with unknown rows, batches never end, and the
        features also hold "rows" float32 [2]: the records of this batch and of the next one, of
        which the model makes the mean over all processes; weights have to be divided by the first,
        and the end is where the second is 0. Reading fails with tf.errors.InvalidArgumentError or
        DataLossError at a bad record; `bad_records.find_bad` tells which.
    """

    ops = config.ops or TENSORFLOW
    config = config._replace(ops=ops)

    def parse(raw):
        return data.format.parse(raw, schema, config.with_labels, ops)

    def weigh(raw, weight, rows_of_steps=None):
        """A batch whose examples count `weight`, filled up to a multiple of the replicas."""
        nothing = lambda: data.format.nothing(schema)
        some = ops.num_records(raw) > 0
        features, labels = tf.cond(some, lambda: parse(raw), nothing)
        rows = tf.shape(labels)[0]
        fill = -rows % config.replicas
        filled = tf.cast(rows + fill, tf.float32)
        weights = tf.fill([rows], weight * filled / tf.cast(tf.maximum(rows, 1), tf.float32))
        # Repeats the last example: no embedding row that the batch does not hold is touched.
        where = tf.minimum(tf.range(rows + fill), rows - 1)
        features = {name: tf.gather(x, where) for name, x in features.items()}
        features["weights"] = tf.pad(weights, [[0, fill]])
        if rows_of_steps is not None:
            features["rows"] = rows_of_steps
        return features, tf.gather(labels, where)

    known = config.rows_of_processes is not None
    size = config.batch_size * config.replicas

    def batches(dataset, epoch):
        dataset = ops.rechunked(dataset, size)
        if config.in_step and not known or config.replicas == 1 and not config.in_step:
            return dataset
        return _with_weights(dataset, config, epoch)

    # Their source holds nothing that would have to be rewritten, which takes seconds.
    @tf.autograph.experimental.do_not_convert
    def input_fn():
        dataset = reading.each_epoch(data, damaged, config, batches)
        if not known and config.first_step:
            dataset = dataset.skip(config.first_step)
        if config.in_step and not known:
            dataset = _with_rows(dataset, config)
        weighed = config.in_step or config.replicas > 1
        dataset = dataset.map(weigh if weighed else parse, num_parallel_calls=_PARSERS)
        if config.split and config.replicas > 1:
            dataset = dataset.flat_map(lambda *batch: _parts(batch, config.replicas))
        # The optimizations find nothing here, and nothing is left to be tuned: both take time.
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False
        options.experimental_optimization.autotune = False
        return dataset.prefetch(_PREFETCHED).with_options(options)

    return input_fn


def _with_weights(dataset, config, epoch):
    """(raw batch, weight float32 []) for each step that some process has records for."""
    if not config.in_step:
        return dataset.map(lambda raw: (raw, 1.0))
    parts = shares.parts_of_steps(config)
    weights = parts[:, config.process] * parts.shape[1] / parts.sum(axis=1)
    weights = tf.constant(weights, tf.float32)
    left = weights[tf.where(tf.equal(epoch, config.first_epoch), config.first_step, 0) :]
    return tf.data.Dataset.zip(
        (_endless(dataset, config), tf.data.Dataset.from_tensor_slices(left))
    )


def _with_rows(dataset, config):
    """(raw batch, B as float32 [], float32 [2]: B and that of the next batch), without end."""

    def look_ahead(before, raw):
        sizes = [config.ops.num_records(batch) for batch in (before, raw)]
        rows = tf.cast(tf.stack(sizes), tf.float32)
        return raw, (before, rows[0], rows)

    scan = tf.data.experimental.scan(config.ops.no_records(), look_ahead)
    return _endless(dataset, config).apply(scan).skip(1)


def _endless(dataset, config):
    """Raw batches, and after the last of them empty ones."""
    return dataset.concatenate(tf.data.Dataset.from_tensors(config.ops.no_records()).repeat())


def _parts(batch, replicas):
    """The batch in equal parts, one after the other."""
    cut = lambda x: tf.reshape(x, tf.concat([[replicas, -1], tf.shape(x)[1:]], 0))
    shaped = lambda x: tf.ensure_shape(cut(x), [replicas, None, *x.shape[1:]])
    return tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(shaped, batch))
