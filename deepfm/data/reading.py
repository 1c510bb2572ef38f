"""The raw records that a process reads, epoch after epoch: which they are, and in which order.

The order is a pure function of the files, of the seed and of the number of the epoch. So training
that was interrupted goes on in the middle of an epoch as if it had never stopped: whole files that
it has used are not opened again, and of the others it reads past what it has used.

In each epoch the files are drawn in another order and read in groups: the files of a group side by
side, their records through one shuffle buffer. A group has so many records that the buffer is
filled several times over.
"""

import contextlib
import fcntl
import glob
import hashlib
import os
from typing import Callable, NamedTuple, Sequence

import tensorflow as tf

from deepfm.data import datasets, pipe_mode
from deepfm.data.shares import Skipped, divide, groups
from deepfm.errors import BadInput
from deepfm.kernels.ops import CHUNK
from deepfm.runtime import remote_files

_WHOLE, _PART, _DAMAGED = range(3)  # kinds of ranges, which are read in different ways


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
        make_batches: (chunks of config.ops, number of the epoch int64 []) -> dataset.
    """
    if data.pipe:
        fresh = lambda epoch: _chunks_of_channel(data.pipe, config)
    else:
        ranges = divide(data.files, damaged, config.num_shares)[config.share]
        fresh = lambda epoch: _of_files(ranges, data, damaged, config, epoch)
    shuffled = lambda chunks, epoch: _drawn(
        chunks, config, _seed(config, epoch), _used(config, epoch)
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
    again = lambda chunks: lambda e: make_batches(shuffled(chunks, e), e)
    if config.cache != "memory":
        chunks = chunks.cache(_cache_file(config, data))
        return epochs(config.first_epoch).flat_map(again(chunks))
    if config.first_epoch + 1 >= config.num_epochs:  # nobody would read it
        return epochs(config.first_epoch).flat_map(again(chunks))
    # TensorFlow's own cache in memory would be another one in each epoch's call of a function.
    memory = []
    keep = lambda chunk: memory.append(chunk) or chunk
    shape = config.ops.chunk_shape
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


def _drawn(chunks, config, seed, used=None):
    """Chunks of records in the order of shuffling, without the first `used` of them."""
    if config.shuffle_buffer <= 1 and used is None:
        return chunks
    skip = 0 if used is None else used
    return config.ops.rechunked(chunks, CHUNK, config.shuffle_buffer, seed, skip)


def _chunks_of_channel(pipe, config):
    dataset = pipe_mode.records(pipe)
    if config.num_shares > 1:
        dataset = dataset.shard(config.num_shares, config.share)
    return config.ops.pack(dataset.batch(CHUNK))


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
        return _drawn(chunks, config, plan.seed, used)

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
        return data.format.read(path, data.files, config)

    def part(path, begin, count):
        chunks = data.format.read(path, data.files, config)
        return config.ops.rechunked(chunks, CHUNK, skip=begin, take=count)

    def past_damage(path, begin, count):
        good = lambda path: _good(path.decode(), data.format, places[path.decode()])
        dataset = tf.data.Dataset.from_generator(good, tf.string, [], args=(path,))
        return config.ops.pack(dataset.skip(begin).take(count).batch(CHUNK))

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


def _good(path, data_format, places):
    """The good records of a file, read by the slow reader, which can go on after damage."""
    for place, payload, _ in data_format.numbered(path):
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
        config.num_parallel_reads, config.shuffle_buffer, config.seed, config.ops.packed,
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


@contextlib.contextmanager
def naming_damaged_cache(cache: str):
    """Turns an error of a cache file (`--cache`), which has no bad records, into one that says what
    to do."""
    kinds = tf.errors.DataLossError, tf.errors.InternalError, tf.errors.NotFoundError
    try:
        yield
    except kinds as error:
        if cache in ("none", "memory"):
            raise
        text = remote_files.cause(error).rpartition("Original message: ")[2]
        kind = type(error).__name__
        why = text if text.startswith(kind) else f"{kind}: {text}"
        raise OSError(
            f"--cache={cache} cannot be read or written ({why}); delete {cache}-* and run the same "
            "command again."
        ) from error
