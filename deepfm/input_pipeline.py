"""Which records this process reads, in which order, batch then parse.

    files -> share -> parallel reads -> cache -> shuffle -> batch -> parse -> repeat -> prefetch
    channel -> share -> cache -> shuffle -> batch -> repeat -> parse -> prefetch   (Pipe mode)

Records are parsed a batch at a time, by one native op a batch, which is many times as fast as one
call a record. Nothing is dropped: the last batch of an epoch is as short as it is.

B: records in a batch. F: fields.
"""

import functools
import itertools
import os
from typing import FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import tensorflow as tf
from absl import logging

from deepfm import bad_records, datasets, pipe_mode, records

# tf.data's own tuning takes more of two cores than it gives back.
_PARSERS = max(1, len(os.sched_getaffinity(0)) // 2)  # batches parsed at the same time
_PREFETCHED = 4  # parsed batches that wait for the training step
_CHUNK = 256  # records that pass between threads at once: one by one costs more than reading them


class InputConfig(NamedTuple):
    """How records are read.

    Attributes:
        batch_size: B, of this process.
        num_epochs: times that each record is read.
        shuffle_buffer: records among which the next is drawn; 0 keeps the order.
        cache: none, memory, or the path of a cache file.
        num_parallel_reads: files read at the same time; 1 where the order matters.
        read_buffer_bytes: of each file that is read.
        seed: of the order.
        with_labels: False where TFRecords may lack a label; labels are then 0.
        num_shares: processes that divide the records of the data set among them.
        share: which part this process reads.
        replicas: replicas of this process, among which its batch is split evenly.
        split: yield each replica's part of a batch by itself, one after the other.
        in_step: all processes yield the same number of batches, where need be empty ones.
        rows_of_processes: the records of an epoch that each process reads, by rank; None where
            that is not known.
        process: the rank of this one.
    """

    batch_size: int
    num_epochs: int = 1
    shuffle_buffer: int = 0
    cache: str = "none"
    num_parallel_reads: int = 1
    read_buffer_bytes: int = 8 << 20
    seed: int = 1
    with_labels: bool = True
    num_shares: int = 1
    share: int = 0
    replicas: int = 1
    split: bool = False
    in_step: bool = False
    rows_of_processes: Optional[Tuple[int, ...]] = None
    process: int = 0


class Range(NamedTuple):
    """Records begin ... end - 1 of a file; `whole` where that is all of it."""

    path: str
    begin: int
    end: Optional[int]
    whole: bool


class Skipped(NamedTuple):
    """The bad records of a damaged file, by number, which training passes over."""

    path: str
    places: FrozenSet[str]


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
        A function () -> tf.data.Dataset of ({"feat_ids": int64 [B, F], "feat_vals": float32
        [B, F]}, labels float32 [B]). With several processes or replicas the features also hold
        "weights" float32 [B]: what each example counts in the mean loss of a replica, so that the
        mean over replicas is that of the global batch, although its parts differ in size; 0 for
        what only fills up a batch. In step, but with unknown rows, batches never end, and the
        features also hold "rows" float32 [2]: the records of this batch and of the next one, of
        which the model makes the mean over all processes; weights have to be divided by the first,
        and the end is where the second is 0. Reading fails with tf.errors.InvalidArgumentError or
        DataLossError at a bad record; `bad_records.find_bad` tells which.
    """

    def parse(raw):
        if data.data_format == "libsvm":
            labels, ids, values = records.parse_lines(raw, schema)
        else:
            labels, ids, values = records.parse_examples(raw, schema, config.with_labels)
        return {"feat_ids": ids, "feat_vals": values}, labels

    def nothing():
        """A batch of no examples, which the parsers do not take."""
        width = [0, schema.field_size]
        features = {"feat_ids": tf.zeros(width, tf.int64), "feat_vals": tf.zeros(width)}
        return features, tf.zeros([0])

    def weigh(raw, weight, rows_of_steps=None):
        """A batch whose examples count `weight`, filled up to a multiple of the replicas."""
        features, labels = tf.cond(tf.size(raw) > 0, lambda: parse(raw), nothing)
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

    def input_fn():
        if data.pipe:
            dataset = pipe_mode.records(data.pipe)
            if config.num_shares > 1:
                dataset = dataset.shard(config.num_shares, config.share)
        else:
            ranges = divide(data.files, damaged, config.num_shares)[config.share]
            dataset = _read_all(ranges, data, config, damaged)
        if config.cache != "none":
            dataset = dataset.cache("" if config.cache == "memory" else config.cache)
        if config.shuffle_buffer > 1:
            dataset = dataset.shuffle(config.shuffle_buffer, seed=config.seed)
        dataset = dataset.batch(config.batch_size * config.replicas)
        if config.in_step and config.rows_of_processes is None:
            # Repeated first: the end, of which there is one, comes after all epochs.
            dataset = _with_rows(dataset.repeat(config.num_epochs))
            dataset = dataset.map(weigh, num_parallel_calls=_PARSERS)
            return dataset.prefetch(_PREFETCHED)
        if config.replicas == 1 and not config.in_step:
            dataset = dataset.map(parse, num_parallel_calls=_PARSERS)
        else:
            dataset = _with_weights(dataset, config)
            dataset = dataset.map(weigh, num_parallel_calls=_PARSERS)
        if config.split and config.replicas > 1:
            dataset = dataset.flat_map(lambda *batch: _parts(batch, config.replicas))
        return dataset.repeat(config.num_epochs).prefetch(_PREFETCHED)

    return input_fn


def divide(
    files: Sequence[datasets.DataFile], damaged: Sequence[Skipped], num_shares: int
) -> List[List[Range]]:
    """Divides records evenly, to within one, and as whole files where these are even.

    The records of all files, one after the other, are cut into contiguous parts. A pure function
    of its arguments: all processes make the same plan.

    Args:
        files: with their rows, unless there is one share.
        damaged: the files whose bad records do not count.
        num_shares: parts to cut.

    Returns:
        The ranges of each share.
    """
    if num_shares == 1:
        return [[Range(file.path, 0, None, True) for file in files]]
    bad = {file.path: len(file.places) for file in damaged}
    rows = [file.rows - bad.get(file.path, 0) for file in files]
    cuts = [sum(rows) * i // num_shares for i in range(num_shares + 1)]
    shares = [[] for _ in range(num_shares)]
    first = 0  # of the file, counted over all files
    for file, count in zip(files, rows):
        for share, (low, high) in zip(shares, zip(cuts, cuts[1:])):
            begin, end = max(low - first, 0), min(high - first, count)
            if begin < end:
                share.append(Range(file.path, begin, end, end - begin == count))
        first += count
    return shares


def log_division(files: Sequence[datasets.DataFile], damaged: Sequence[Skipped], num_shares: int):
    """Logs which records each process reads."""
    if num_shares == 1:
        return
    for i, ranges in enumerate(divide(files, damaged, num_shares)):
        rows = sum(r.end - r.begin for r in ranges)
        name = lambda r: os.path.basename(r.path) + ("" if r.whole else f"[{r.begin}:{r.end}]")
        names = [name(r) for r in ranges]
        if len(names) > 4:
            names[2:-1] = [f"... {len(names) - 3} more ..."]
        logging.info("Process %d reads %s records: %s.", i, f"{rows:,}", ", ".join(names) or "-")


def _with_weights(dataset, config):
    """(raw string [B], weight float32 []) for each step that some process has records for."""
    if not config.in_step:
        return dataset.map(lambda raw: (raw, 1.0))
    parts = _parts_of_steps(config)
    mine = parts[:, config.process]
    weights = mine * parts.shape[1] / parts.sum(axis=1)
    dataset = dataset.concatenate(_empty_batch().repeat(int(np.sum(mine == 0))))
    return tf.data.Dataset.zip(
        (dataset, tf.data.Dataset.from_tensor_slices(weights.astype(np.float32)))
    )


def _empty_batch():
    return tf.data.Dataset.from_tensors(tf.zeros([0], tf.string))


def _with_rows(dataset):
    """(raw string [B], B as float32 [], float32 [2]: B and that of the next batch), without end."""

    def look_ahead(before, raw):
        rows = tf.cast(tf.stack([tf.size(before), tf.size(raw)]), tf.float32)
        return raw, (before, rows[0], rows)

    endless = dataset.concatenate(_empty_batch().repeat())
    scan = tf.data.experimental.scan(tf.zeros([0], tf.string), look_ahead)
    return endless.apply(scan).skip(1)


def _parts_of_steps(config):
    """int [steps, processes]: the records that each process has for each step of an epoch."""
    size = config.batch_size * config.replicas
    rows = np.array(config.rows_of_processes)
    steps = -(-rows.max() // size)
    return np.clip(rows - size * np.arange(steps)[:, np.newaxis], 0, size)


def rows_of_share(
    data: datasets.DataSet, damaged: Sequence[Skipped], config: InputConfig
) -> Optional[int]:
    """The records of an epoch that this process reads, or None where that is not known."""
    if data.rows is None:
        return None
    if config.num_shares == 1:
        return data.rows - sum(len(file.places) for file in damaged)
    return sum(
        r.end - r.begin for r in divide(data.files, damaged, config.num_shares)[config.share]
    )


def steps_per_epoch(config: InputConfig) -> Optional[int]:
    """Steps of an epoch: of every process where they keep in step, else of all together.

    None where the rows are not known.
    """
    if config.rows_of_processes is None:
        return None
    size = config.batch_size * config.replicas
    steps = [-(-rows // size) for rows in config.rows_of_processes]
    return max(steps) if config.in_step else sum(steps)


def _parts(batch, replicas):
    """The batch in equal parts, one after the other."""
    cut = lambda x: tf.reshape(x, tf.concat([[replicas, -1], tf.shape(x)[1:]], 0))
    shaped = lambda x: tf.ensure_shape(cut(x), [replicas, None, *x.shape[1:]])
    return tf.data.Dataset.from_tensor_slices(tf.nest.map_structure(shaped, batch))


def _read_all(ranges, data, config, damaged) -> tf.data.Dataset:
    """string []: the raw records of the ranges, in their order unless they are shuffled."""
    skipped = {file.path: file.places for file in damaged}
    read = lambda path: _read(path, data.files, data.data_format, config.read_buffer_bytes)
    plain = lambda r: r.whole and r.path not in skipped
    parts = []
    for together, group in itertools.groupby(ranges, key=plain):
        if together:
            parts.append(_interleave([r.path for r in group], read, config))
            continue
        for r in group:
            if r.path in skipped:
                part = _read_past_damage(r.path, data.data_format, skipped[r.path])
            else:
                part = read(r.path).unbatch()
            parts.append(part if r.whole else part.skip(r.begin).take(r.end - r.begin))
    empty = tf.data.Dataset.from_tensors(tf.zeros([], tf.string)).take(0)
    return functools.reduce(lambda a, b: a.concatenate(b), parts or [empty])


def _interleave(paths: List[str], read, config):
    """string []: the records of the files; `read` gives a file's as string [n]."""
    files = tf.data.Dataset.from_tensor_slices(paths)
    if config.shuffle_buffer > 1:
        files = files.shuffle(len(paths), seed=config.seed)
    parallel = min(config.num_parallel_reads, len(paths))
    if parallel == 1:
        chunks = files.flat_map(read)
    else:
        chunks = files.interleave(read, cycle_length=parallel, num_parallel_calls=parallel)
    return chunks.unbatch()


def _read(path, files, data_format, buffer_bytes):
    """string [n]: the raw records of a file, in chunks."""
    if data_format == "tfrecord":
        gzip = tf.strings.regex_full_match(path, r".*\.gz")
        compression = tf.where(gzip, "GZIP", "")
        chunks = tf.data.TFRecordDataset(path, compression, buffer_bytes).batch(_CHUNK)
        return _to_the_end(chunks, path, files)

    # TextLineDataset leaves out every carriage return, and makes 3:15 of "3:1\r5".
    def blocks(path):
        return bad_records.read_blocks(path.decode(), buffer_bytes)

    text = tf.data.Dataset.from_generator(blocks, tf.string, [], [path])
    lines = lambda block: tf.compat.v1.string_split([block], "\n").values
    return text.map(lambda block: records.drop_blank(lines(block)))


def _to_the_end(chunks, path, files):
    """Chunks of a TFRecord file; fails at the end where a plain file holds more than was read.

    TFRecordDataset takes a file that is cut inside the header of a record for one that ends there.
    """
    plain = [file for file in files if not file.path.endswith(".gz")]
    here = tf.equal([file.path for file in plain] or [""], path)
    size = tf.reduce_sum(tf.boolean_mask(np.int64([file.bytes for file in plain] or [0]), here))

    def count(read, chunk):
        """A chunk as it is, and the bytes read so far; after the last one comes an empty one."""
        lengths = tf.cast(tf.strings.length(chunk), tf.int64) + records.FRAME
        whole = (tf.size(chunk) > 0) | tf.equal(read, size) | ~tf.reduce_any(here)
        with tf.control_dependencies([tf.debugging.Assert(whole, ["bytes that are no record"])]):
            return read + tf.reduce_sum(lengths), tf.identity(chunk)

    with_end = chunks.concatenate(_empty_batch())
    return with_end.apply(tf.data.experimental.scan(tf.zeros([], tf.int64), count))


def _read_past_damage(path, data_format, places):
    """The good records of a file, read by the slow reader, which can go on after damage."""

    def good():
        for place, payload, _ in bad_records.numbered(path, data_format):
            if place not in places:
                yield payload

    return tf.data.Dataset.from_generator(good, tf.string, [])
