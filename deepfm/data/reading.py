"""The raw records that a process reads, epoch after epoch: which they are, and in which order.

The order is a pure function of the files, of the seed and of the number of the epoch. So training
that was interrupted goes on in the middle of an epoch as if it had never stopped: whole files that
it has used are not opened again, and of the others it reads past what it has used.

In each epoch the files are drawn in another order and read in groups: the files of a group side by
side, their records through one shuffle buffer. A group has so many records that the buffer is
filled several times over.
"""

import fcntl
import glob
import hashlib
import os
from typing import Callable, List, Mapping, NamedTuple, Optional, Sequence

import numpy as np
import tensorflow as tf
from absl import logging

from deepfm.data import bad_records, datasets, pipe_mode, records, text_lines
from deepfm.errors import BadInput
from deepfm.kernels import bindings

_CHUNK = 256  # records that pass between threads at once: one by one costs more than reading them
_BUFFERS = 4  # times that the shuffle buffer is filled in a group of files, at least
_WHOLE, _PART, _DAMAGED = range(3)  # kinds of ranges, which are read in different ways


class Range(NamedTuple):
    """Records begin ... end - 1 of a file; `whole` where that is all, and then end may be None."""

    path: str
    begin: int
    end: Optional[int]
    whole: bool


class Skipped(NamedTuple):
    """The bad records of a damaged file, which training passes over: {place: reason}."""

    path: str
    places: Mapping[str, str]


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
    bad = {file.path: len(file.places) for file in damaged}
    rows = [None if f.rows is None else f.rows - bad.get(f.path, 0) for f in files]
    if num_shares == 1:
        return [[Range(file.path, 0, count, True) for file, count in zip(files, rows)]]
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


def groups(ranges: Sequence[Range], config, epoch: int) -> List[List[Range]]:
    """The ranges of an epoch in the order of reading, in groups that are read side by side.

    Args:
        ranges: of this process.
        config: InputConfig.
        epoch: its number, from 0.
    """
    if config.shuffle_buffer > 1:
        order = np.random.RandomState([config.seed, epoch]).permutation(len(ranges))
        ranges = [ranges[i] for i in order]
    found, rows = [[]], 0
    for r in ranges:
        if len(found[-1]) >= config.num_parallel_reads and rows >= _BUFFERS * config.shuffle_buffer:
            found.append([])
            rows = 0
        found[-1].append(r)
        rows += (r.end or 0) - r.begin if config.by_rows else 0
    if len(found) > 1 and rows < config.shuffle_buffer:
        last = found.pop()
        found[-1] += last
    return [group for group in found if group]


def each_epoch(
    data: datasets.DataSet,
    damaged: Sequence[Skipped],
    config,
    make_batches: Callable[[tf.data.Dataset, tf.Tensor], tf.data.Dataset],
) -> tf.data.Dataset:
    """What `make_batches` makes of the raw records of each epoch, one after the other.

    Args:
        data: the files, or the channel.
        damaged: files with bad records that are passed over.
        config: InputConfig.
        make_batches: (raw records, number of the epoch int64 []) -> dataset; `batched` makes
            batches of these records, which are string [], or with config.compiled packed chunks.
    """
    if data.pipe:
        of_channel = _chunks_of_channel if config.compiled else _of_channel
        fresh = lambda epoch: of_channel(data.pipe, config)
    else:
        ranges = divide(data.files, damaged, config.num_shares)[config.share]
        fresh = lambda epoch: _of_files(ranges, data, damaged, config, epoch)
    shuffled = lambda dataset, epoch: _drawn(
        dataset, config, _seed(config, epoch), _used(config, epoch)
    )
    epochs = lambda first: tf.data.Dataset.range(first, config.num_epochs)
    if config.cache == "none":
        read = fresh if not data.pipe else lambda epoch: shuffled(fresh(epoch), epoch)
        return epochs(config.first_epoch).flat_map(lambda e: make_batches(read(e), e))
    if data.pipe:
        chunks = _chunks_of_channel(data.pipe, config)
    else:
        whole = config._replace(first_epoch=0, first_step=0)  # what is kept are all records
        first = tf.constant(0, tf.int64)
        chunks = _chunks_of_files(ranges, data, damaged, whole, first)
    again = lambda chunks: lambda e: make_batches(shuffled(_of_chunks(chunks, config), e), e)
    if config.cache != "memory":
        chunks = chunks.cache(_cache_file(config, data))
        return epochs(config.first_epoch).flat_map(again(chunks))
    if config.first_epoch + 1 >= config.num_epochs:  # nobody would read it
        return epochs(config.first_epoch).flat_map(again(chunks))
    # TensorFlow's own cache in memory would be another one in each epoch's call of a function.
    memory = []
    keep = lambda chunk: memory.append(chunk) or chunk
    shape = [2 if config.compiled else None]
    known = lambda chunk: tf.ensure_shape(chunk, shape)
    keeping = chunks.map(lambda chunk: known(tf.compat.v1.py_func(keep, [chunk], tf.string)))
    remembered = tf.data.Dataset.from_generator(lambda: memory, tf.string, shape)
    now = tf.data.Dataset.range(config.first_epoch, config.first_epoch + 1)
    return now.flat_map(again(keeping)).concatenate(
        epochs(config.first_epoch + 1).flat_map(again(remembered))
    )


def _seed(config, epoch, group=0):
    """The seed of a shuffle buffer."""
    return (config.seed * 1000003 + epoch * 1009 + group) % (1 << 31)


def _used(config, epoch):
    """How many records of an epoch training has used already; None: none of any epoch."""
    if not config.used:
        return None
    used = tf.constant(config.used, tf.int64)
    return tf.where(tf.equal(epoch, config.first_epoch), used, tf.zeros_like(used))


def _of_chunks(chunks, config):
    """The records of chunks; the compiled kernels take the chunks."""
    return chunks if config.compiled else chunks.unbatch()


def _drawn(dataset, config, seed, used=None):
    """Records in the order of shuffling, without the first `used` of them."""
    shuffle, buffer = config.shuffle_buffer > 1, config.shuffle_buffer
    if config.compiled and (shuffle or used is not None):
        return bindings.chunks(dataset, _CHUNK, buffer, seed, 0 if used is None else used)
    if shuffle:
        dataset = dataset.shuffle(buffer, seed=seed, reshuffle_each_iteration=False)
    return dataset if used is None else dataset.skip(used)


def batched(dataset, config, size: int) -> tf.data.Dataset:
    """Batches, string [B] or packed, of the records that `each_epoch` hands over."""
    return bindings.chunks(dataset, size) if config.compiled else dataset.batch(size)


def num_records(batch, config):
    """int32 []: how many a batch, or chunk, has."""
    return bindings.num_packed(batch) if config.compiled else tf.size(batch)


def no_records(config):
    """A batch, or chunk, without a record."""
    return tf.zeros([2 if config.compiled else 0], tf.string)


def _packed(chunks, config):
    """Chunks of string [n] as those that the kernels take, where these are used."""
    return chunks.map(bindings.pack) if config.compiled else chunks


def _of_channel(pipe, config):
    dataset = pipe_mode.records(pipe)
    return dataset.shard(config.num_shares, config.share) if config.num_shares > 1 else dataset


def _chunks_of_channel(pipe, config):
    return _packed(_of_channel(pipe, config).batch(_CHUNK), config)


class _Plan(NamedTuple):
    """A group of ranges as tensors: what is read side by side, shuffled, and left out of it.

    Attributes:
        paths: string [n].
        begins, counts: int64 [n], records; -1: all.
        kinds: int64 [n].
        seed: int64 [], of the shuffle buffer.
        used: int64 [], records that are left out, as training has used them.
    """

    paths: tf.Tensor
    begins: tf.Tensor
    counts: tf.Tensor
    kinds: tf.Tensor
    seed: tf.Tensor
    used: tf.Tensor


def _plans(ranges, damaged, config, epoch):
    """The _Plans of the records of an epoch that are left of it."""
    bad = {file.path for file in damaged}
    used = config.used if epoch == config.first_epoch else 0
    for i, group in enumerate(groups(ranges, config, epoch)):
        rows = sum(r.end - r.begin for r in group) if used else None
        if used and used >= rows:
            used -= rows
            continue
        yield _Plan(
            [r.path for r in group],
            [r.begin for r in group],
            [-1 if r.whole else r.end - r.begin for r in group],
            [_DAMAGED if r.path in bad else _WHOLE if r.whole else _PART for r in group],
            _seed(config, epoch, i),
            used,
        )
        used = 0


def _each_group(ranges, damaged, config, epoch, read):
    """What `read` makes of each group's _Plan, one after the other."""
    plans = tf.data.Dataset.from_generator(
        lambda epoch: _plans(ranges, damaged, config, int(epoch)),
        _Plan(tf.string, tf.int64, tf.int64, tf.int64, tf.int64, tf.int64),
        _Plan([None], [None], [None], [None], [], []),
        args=(epoch,),
    )
    return plans.flat_map(read)


def _of_files(ranges, data, damaged, config, epoch):
    """The records of an epoch that are left of it, shuffled."""

    def read(plan):
        chunks = _chunks_of_group(plan, ranges, data, damaged, config)
        used = plan.used if config.used else None
        return _drawn(_of_chunks(chunks, config), config, plan.seed, used)

    return _each_group(ranges, damaged, config, epoch, read)


def _chunks_of_files(ranges, data, damaged, config, epoch):
    """The records of an epoch in chunks, string [n] or packed, in the order of the files."""
    read = lambda plan: _chunks_of_group(plan, ranges, data, damaged, config)
    return _each_group(ranges, damaged, config, epoch, read)


def _chunks_of_group(plan, ranges, data, damaged, config):
    """The records of a group in chunks, string [n] or packed, read side by side."""
    places = {file.path: file.places for file in damaged}
    parallel = min(config.num_parallel_reads, len(ranges))

    all_whole = all(r.whole for r in ranges)

    def of_kind(kind):
        columns = (plan.paths, plan.begins, plan.counts)
        if damaged or not all_whole:
            chosen = tf.where(tf.equal(plan.kinds, kind))[:, 0]
            columns = tuple(tf.gather(column, chosen) for column in columns)
        return tf.data.Dataset.from_tensor_slices(columns)

    def whole(path, begin, count):
        return _read(path, data, config)

    def part(path, begin, count):
        chunks = _read(path, data, config)
        if config.compiled:
            return bindings.chunks(chunks, _CHUNK, skip=begin, take=count)
        return chunks.unbatch().skip(begin).take(count).batch(_CHUNK)

    def past_damage(path, begin, count):
        good = lambda path: _good(path.decode(), data.data_format, places[path.decode()])
        dataset = tf.data.Dataset.from_generator(good, tf.string, [], args=(path,))
        return _packed(dataset.skip(begin).take(count).batch(_CHUNK), config)

    if parallel == 1:
        chunks = of_kind(_WHOLE).flat_map(whole)
    else:
        chunks = of_kind(_WHOLE).interleave(
            whole, cycle_length=parallel, num_parallel_calls=parallel
        )
    if not all_whole:
        chunks = chunks.concatenate(of_kind(_PART).flat_map(part))
    if damaged:
        chunks = chunks.concatenate(of_kind(_DAMAGED).flat_map(past_damage))
    return chunks


def _read(path, data, config):
    """The raw records of a file, in chunks, string [n] or packed."""
    buffer_bytes = config.read_buffer_bytes
    if data.data_format == "tfrecord":
        if config.compiled and not any(file.path.endswith(".gz") for file in data.files):
            here, size = _size(path, data.files)
            chunks = bindings.records(path, buffer_bytes, _CHUNK, tf.where(here, size, -1))
            # A file takes as many turns as below.
            return chunks.concatenate(tf.data.Dataset.from_tensors(no_records(config)))
        gzip = tf.strings.regex_full_match(path, r".*\.gz")
        compression = tf.where(gzip, "GZIP", "")
        chunks = tf.data.TFRecordDataset(path, compression, buffer_bytes).batch(_CHUNK)
        return _packed(_to_the_end(chunks, path, data.files), config)

    # TextLineDataset leaves out every carriage return, and makes 3:15 of "3:1\r5".
    def blocks(path):
        return text_lines.read_blocks(path.decode(), buffer_bytes)

    text = tf.data.Dataset.from_generator(blocks, tf.string, [], [path])
    lines = lambda block: tf.compat.v1.string_split([block], "\n").values
    slow = lambda block: records.drop_blank(lines(block))
    if not config.compiled:
        return text.map(slow)

    def split(block):
        good, found = bindings.split_lines(block)
        return tf.cond(good, lambda: found, lambda: bindings.pack(slow(block)))

    return text.map(split)


def _to_the_end(chunks, path, files):
    """Chunks of a TFRecord file; fails at the end where a plain file holds more than was read.

    TFRecordDataset takes a file that is cut inside the header of a record for one that ends there.
    """
    here, size = _size(path, files)

    def count(read, chunk):
        """A chunk as it is, and the bytes read so far; after the last one comes an empty one."""
        lengths = tf.cast(tf.strings.length(chunk), tf.int64) + records.FRAME
        whole = (tf.size(chunk) > 0) | tf.equal(read, size) | ~here
        with tf.control_dependencies([tf.debugging.Assert(whole, ["bytes that are no record"])]):
            return read + tf.reduce_sum(lengths), tf.identity(chunk)

    counted = tf.data.experimental.scan(tf.zeros([], tf.int64), count)
    nothing = tf.data.Dataset.from_tensors(tf.zeros([0], tf.string))
    return chunks.concatenate(nothing).apply(counted)


def _size(path, files):
    """(whether a path is that of a plain file: bool []; its bytes: int64 [])."""
    plain = [file for file in files if not file.path.endswith(".gz")]
    here = tf.equal([file.path for file in plain] or [""], path)
    sizes = np.int64([file.bytes for file in plain] or [0])
    return tf.reduce_any(here), tf.reduce_sum(sizes * tf.cast(here, tf.int64))


def _good(path, data_format, places):
    """The good records of a file, read by the slow reader, which can go on after damage."""
    for place, payload, _ in bad_records.numbered(path, data_format):
        if place not in places:
            yield payload


_locks = {}  # path -> a file that is open and locked for the life of this process


def _cache_file(config, data):
    """The path of a cache file of just these records, from which this process alone may write.

    What an interrupted process left of it half-written is deleted.
    """
    if not all(file.identity for file in data.files):
        data = datasets.identified(data)
    what = repr((
        [(f.path, f.identity[:2]) for f in data.files], data.name, config.num_shares, config.share,
        config.num_parallel_reads, config.shuffle_buffer, config.seed, config.compiled,
        config.by_rows,
    ))  # fmt: skip
    path = f"{config.cache}-{hashlib.sha1(what.encode()).hexdigest()[:12]}"
    if path in _locks:
        return path
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BadInput(
            f"--cache={config.cache}: another process uses {path}; give this one another path."
        ) from error
    _locks[path] = lock
    for stale in glob.glob(f"{glob.escape(path)}_*"):
        os.remove(stale)
    return path
