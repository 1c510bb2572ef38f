"""The input pipeline: which records this process reads, in which order, batched, then parsed.

    files -> share -> parallel reads -> cache -> shuffle -> batch -> parse -> prefetch
    channel -> share -> cache -> shuffle -> batch -> parse -> prefetch   (Pipe mode)

Everything up to the batch is made anew in each epoch (`reading`). One native op parses a whole
batch, which is many times as fast as one call per record. Nothing is dropped: the last batch of an
epoch may be short.

B: records in a batch. F: fields.
"""

from typing import Callable, Tuple

from deepfm.config import InputConfig
from deepfm.data import reading, records, shares
from deepfm.runtime import utilization
from deepfm.runtime.tf import no_autotuning, tf


def parallel(asked: InputConfig, processes: int) -> Tuple[int, int]:
    """(batches parsed at the same time, parsed ones that wait) for one of a host's processes.

    By default half of the process's cores parse, as steps need the others, and twice as many
    batches wait, at least 4. tf.data's autotuning costs more than it gains on two cores.
    """
    parsers = asked.num_parsers or max(int(utilization.cores()) // (2 * processes), 1)
    return parsers, asked.prefetch_batches or max(2 * parsers, 4)


def make_input_fn(
    source: reading.Source, schema: records.Schema, mode, ahead: Callable[[dict], dict] = None
) -> Callable[[], tf.data.Dataset]:
    """Makes an Estimator's input_fn.

    Args:
        source: what this process reads.
        schema: what each record must look like.
        mode: modes.common.mode.Mode, which says how many replicas share a batch, and which
            processes keep in step.
        ahead: the features of a batch -> the same with more, where no replicas share a batch.

    Returns:
        A function () -> tf.data.Dataset of (features, labels float32 [B]), the features as
        `Format.parse` gives them. With several processes or replicas the features also hold
        "weights" float32 [B]: the weight of each example in the mean loss of a replica, chosen so
        that the mean over replicas is that of the global batch, although its parts differ in size;
        0 for padding. If processes keep in step, but the number of rows is unknown, batches never
        end, and the features also hold "rows" float32 [2]: the records of this batch and of the
        next, which the model averages over all processes; it divides the weights by the first, and
        the data end when the second is 0. If examples are weighted, the features hold
        "example_weights" float32 [B], 0 for padding. Reading fails with
        tf.errors.InvalidArgumentError or DataLossError at a bad record; `bad_records.find_bad`
        finds which.
    """
    position, ops = source.position, source.ops
    replicas = mode.replicas_per_process
    size = source.asked.batch_size * replicas  # records of a step of this process
    parsers, prefetched = parallel(source.asked, mode.local_size)

    def parse(raw):
        features, labels = source.data.format.parse(raw, schema, ops)
        if source.asked.example_weights is False:
            features.pop("example_weights", None)
        return features, labels

    def weigh(raw, weight, rows_of_steps=None):
        """A batch whose examples weigh `weight`, padded to a multiple of the replicas."""
        features, labels = parse(raw)
        rows = tf.shape(labels)[0]
        fill = -rows % replicas
        filled = tf.cast(rows + fill, tf.float32)
        weights = tf.fill([rows], weight * filled / tf.cast(tf.maximum(rows, 1), tf.float32))
        # Repeats the last example, so that only embedding rows of the batch are touched.
        where = tf.minimum(tf.range(rows + fill), rows - 1)
        of_examples = {name: features.pop(name) for name in ["example_weights"] if name in features}
        of_examples["weights"] = weights
        features = {name: tf.gather(x, where) for name, x in features.items()}
        features.update((name, tf.pad(x, [[0, fill]])) for name, x in of_examples.items())
        if rows_of_steps is not None:
            features["rows"] = rows_of_steps
        return features, tf.gather(labels, where)

    def made(*raw):
        features, labels = (weigh if mode.in_step or replicas > 1 else parse)(*raw)
        return ahead(features) if ahead and replicas == 1 else features, labels

    known = position.rows_of_processes is not None

    def batches(dataset, epoch):
        dataset = ops.rechunked(dataset, size)
        if not mode.in_step:
            return dataset if replicas == 1 else dataset.map(lambda raw: (raw, 1.0))
        if not known:
            return dataset
        first = tf.where(tf.equal(epoch, position.epoch), position.step, 0)
        weights = shares.weights_of_steps(position.rows_of_processes, size, mode.rank)
        left = tf.constant(weights, tf.float32)[first:]
        return tf.data.Dataset.zip(
            (_endless(dataset, ops), tf.data.Dataset.from_tensor_slices(left))
        )

    # Autograph would find nothing to rewrite, in seconds.
    @tf.autograph.experimental.do_not_convert
    def input_fn():
        dataset = reading.each_epoch(source, position.used(size, mode.rank), batches)
        if not known and position.step:
            dataset = dataset.skip(position.step)
        if mode.in_step and not known:
            dataset = _with_rows(dataset, ops)
        dataset = dataset.map(made, num_parallel_calls=parsers)
        # tf.data's optimizations and autotuning find nothing here, and take time.
        options = tf.data.Options()
        options.experimental_optimization.apply_default_optimizations = False
        no_autotuning(options)
        return dataset.prefetch(prefetched).with_options(options)

    return input_fn


def _with_rows(dataset, ops):
    """Endless (raw batch, its B as float32 [], float32 [2]: its B and that of the next batch)."""

    def look_ahead(before, raw):
        sizes = [ops.num_records(batch) for batch in (before, raw)]
        rows = tf.cast(tf.stack(sizes), tf.float32)
        return raw, (before, rows[0], rows)

    scan = tf.data.experimental.scan(ops.no_records(), look_ahead)
    return _endless(dataset, ops).apply(scan).skip(1)


def _endless(dataset, ops):
    """Raw batches, followed by empty ones without end."""
    return dataset.concatenate(tf.data.Dataset.from_tensors(ops.no_records()).repeat())
