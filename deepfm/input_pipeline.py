"""Which records this process reads, in which order, batch then parse.

    files -> read in parallel -> cache -> shuffle -> batch -> parse -> repeat -> prefetch

Records are parsed a batch at a time, by one native op a batch, which is many times as fast as one
call a record. Nothing is dropped: the last batch of an epoch is as short as it is.

B: records in a batch. F: fields.
"""

import os
from typing import FrozenSet, List, NamedTuple, Tuple

import tensorflow as tf

from deepfm import bad_records, datasets, records

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
    """

    batch_size: int
    num_epochs: int = 1
    shuffle_buffer: int = 0
    cache: str = "none"
    num_parallel_reads: int = 1
    read_buffer_bytes: int = 8 << 20
    seed: int = 1
    with_labels: bool = True


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
        [B, F]}, labels float32 [B]). Reading fails with tf.errors.InvalidArgumentError or
        DataLossError at a bad record; `bad_records.find_bad` tells which.
    """

    def parse(raw):
        if data.data_format == "libsvm":
            labels, ids, values = records.parse_lines(raw, schema)
        else:
            labels, ids, values = records.parse_examples(raw, schema, config.with_labels)
        return {"feat_ids": ids, "feat_vals": values}, labels

    def input_fn():
        dataset = _read_all(data, config, damaged)
        if config.cache != "none":
            dataset = dataset.cache("" if config.cache == "memory" else config.cache)
        if config.shuffle_buffer > 1:
            dataset = dataset.shuffle(config.shuffle_buffer, seed=config.seed)
        dataset = dataset.batch(config.batch_size).map(parse, num_parallel_calls=_PARSERS)
        return dataset.repeat(config.num_epochs).prefetch(_PREFETCHED)

    return input_fn


def _read_all(data, config, damaged) -> tf.data.Dataset:
    """string []: the raw records of all files."""
    skipped = {file.path: file.places for file in damaged}
    paths = [file.path for file in data.files if file.path not in skipped]
    read = lambda path: _read(path, data.data_format, config.read_buffer_bytes)
    dataset = _interleave(paths, read, config) if paths else None
    for path, places in skipped.items():
        rest = _read_past_damage(path, data.data_format, places)
        dataset = dataset.concatenate(rest) if dataset else rest
    return dataset


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


def _read(path, data_format, buffer_bytes):
    """string [n]: the raw records of a file, in chunks."""
    gzip = tf.strings.regex_full_match(path, r".*\.gz")
    compression = tf.where(gzip, "GZIP", "")
    if data_format == "tfrecord":
        return tf.data.TFRecordDataset(path, compression, buffer_bytes).batch(_CHUNK)
    lines = tf.data.TextLineDataset(path, compression, buffer_bytes)
    return lines.batch(_CHUNK).map(records.drop_blank)


def _read_past_damage(path, data_format, places):
    """The good records of a file, read by the slow reader, which can go on after damage."""

    def good():
        for place, payload, _ in bad_records.numbered(path, data_format):
            if place not in places:
                yield payload

    return tf.data.Dataset.from_generator(good, tf.string, [])
