"""The raw records that a process reads, epoch after epoch: which ones, and in which order.

The order is a pure function of the files, the seed and the epoch's number. So interrupted training
resumes in the middle of an epoch as if it had never stopped: it does not reopen groups of files
that it has used up, and skips the used records of the next one.

Each epoch shuffles the files and reads them in groups: the files of a group in parallel, their
records through one shuffle buffer. A group has enough records to fill the buffer several times.
"""

import contextlib
import glob
import hashlib
import os
from typing import Callable, NamedTuple, Sequence

import numpy as np

from deepfm.config import InputConfig, Position, Share
from deepfm.data import datasets, pipe_mode
from deepfm.data.shares import Skipped, divide, groups
from deepfm.errors import BadInput
from deepfm.kernels.ops import TENSORFLOW, Ops
from deepfm.kernels.reading import CHUNK
from deepfm.records import atomic_files
from deepfm.runtime import remote_files
from deepfm.runtime.tf import tf

_WHOLE, _PART, _DAMAGED = range(3)  # kinds of ranges, each read in its own way


class Source(NamedTuple):
    """What a process reads.

    Attributes:
        data: the files, or the channel.
        asked: InputConfig.
        share: Share of the records.
        position: Position where reading begins.
        damaged: files with bad records that are skipped (`--max_bad_records`).
        ops: Ops to read, shuffle, batch and parse with; all give the same records.
    """

    data: datasets.DataSet
    asked: InputConfig
    share: Share = Share()
    position: Position = Position()
    damaged: Sequence[Skipped] = ()
    ops: Ops = TENSORFLOW


def each_epoch(
    source: Source, used: int, make_batches: Callable[[tf.data.Dataset, tf.Tensor], tf.data.Dataset]
) -> tf.data.Dataset:
    """Applies `make_batches` to the raw records of each epoch, one epoch after the other.

    Args:
        used: records of the first epoch to skip, because training has used them.
        make_batches: (chunks of source.ops, number of the epoch int64 []) -> dataset.
    """
    data, cache, first = source.data, source.asked.cache, source.position.epoch
    epochs = lambda first: tf.data.Dataset.range(first, source.asked.num_epochs)
    left_out = lambda epoch: tf.where(tf.equal(epoch, first), np.int64(used), np.int64(0))

    def drawn(chunks, seed, skip):
        """Chunks of the shuffled records, without the first `skip`."""
        buffer = source.asked.shuffle_buffer
        if buffer <= 1 and not used:
            return chunks
        return source.ops.rechunked(chunks, CHUNK, buffer, seed, skip)

    if data.pipe:
        records, share = pipe_mode.records(data.pipe, data.format.in_pipe), source.share
        records = records.shard(share.of, share.index) if share.of > 1 else records
        chunks = source.ops.pack(records.batch(CHUNK).map(data.format.clean))
    elif cache == "none":
        draw = lambda chunks, plan: drawn(chunks, plan.seed, plan.used)
        read = lambda epoch: _each_group(source, epoch, left_out(epoch), draw)
        return epochs(first).flat_map(lambda epoch: make_batches(read(epoch), epoch))
    else:  # the cache holds all records, in the order of the files
        beginning = tf.zeros([], tf.int64)
        chunks = _each_group(source, beginning, beginning, lambda chunks, plan: chunks)

    def again(chunks):
        shuffled = lambda epoch: drawn(chunks, _seed(source, epoch), left_out(epoch))
        return lambda epoch: make_batches(shuffled(epoch), epoch)

    if cache not in ("none", "memory"):
        chunks = chunks.cache(_cache_file(source))
    if cache != "memory" or first + 1 >= source.asked.num_epochs:  # no later epoch would read it
        return epochs(first).flat_map(again(chunks))
    # TensorFlow's own memory cache would start empty in each epoch's function call.
    memory = []
    keep = lambda chunk: memory.append(chunk) or chunk
    shape = source.ops.chunk_shape
    known = lambda chunk: tf.ensure_shape(chunk, shape)
    keeping = chunks.map(lambda chunk: known(tf.compat.v1.py_func(keep, [chunk], tf.string)))
    remembered = tf.data.Dataset.from_generator(lambda: memory, tf.string, shape)
    now = tf.data.Dataset.range(first, first + 1).flat_map(again(keeping))
    return now.concatenate(epochs(first + 1).flat_map(again(remembered)))


def _seed(source, epoch, group=0):
    """The seed of a shuffle buffer."""
    return (source.asked.seed * 1000003 + epoch * 1009 + group) % (1 << 31)


class _Plan(NamedTuple):
    """A group of ranges as tensors: what to read in parallel, how to shuffle it, what to skip.

    Attributes:
        paths: string [n].
        begins, counts: int64 [n], in records; count -1: all.
        kinds: int64 [n].
        seed: int64 [], seed of the shuffle buffer.
        used: int64 [], records to skip, because training has used them.
    """

    paths: tf.Tensor
    begins: tf.Tensor
    counts: tf.Tensor
    kinds: tf.Tensor
    seed: tf.Tensor
    used: tf.Tensor


def _plans(source, ranges, epoch, used):
    """The _Plans of the records that are left of an epoch."""
    bad = {file.path for file in source.damaged}
    for i, group in enumerate(groups(ranges, source.asked, source.position.by_rows, epoch)):
        rows = sum(r.end - r.begin for r in group) if used else None
        if used and used >= rows:
            used -= rows
            continue
        yield _Plan(
            [r.path for r in group],
            [r.begin for r in group],
            [-1 if r.whole else r.end - r.begin for r in group],
            [_DAMAGED if r.path in bad else _WHOLE if r.whole else _PART for r in group],
            _seed(source, epoch, i),
            used,
        )
        used = 0


def _each_group(source, epoch, used, arrange):
    """The chunks of each group's records, one group after the other.

    Args:
        epoch, used: int64 [].
        arrange: (chunks of a group, its _Plan) -> chunks.
    """
    ranges = divide(source.data.files, source.damaged, source.share.of)[source.share.index]
    plans = tf.data.Dataset.from_generator(
        lambda epoch, used: _plans(source, ranges, int(epoch), int(used)),
        _Plan(tf.string, tf.int64, tf.int64, tf.int64, tf.int64, tf.int64),
        _Plan([None], [None], [None], [None], [], []),
        args=(epoch, used),
    )
    return plans.flat_map(lambda plan: arrange(_chunks_of_group(source, ranges, plan), plan))


def _chunks_of_group(source, ranges, plan):
    """The records of a group, read in parallel, in chunks: string [n] or packed."""
    data, damaged, ops = source.data, source.damaged, source.ops
    bad = {file.path: file for file in damaged}
    parallel = min(source.asked.num_parallel_reads, len(ranges))

    all_whole = all(r.whole for r in ranges)

    def of_kind(kind):
        columns = (plan.paths, plan.begins, plan.counts)
        if damaged or not all_whole:
            chosen = tf.where(tf.equal(plan.kinds, kind))[:, 0]
            columns = tuple(tf.gather(column, chosen) for column in columns)
        return tf.data.Dataset.from_tensor_slices(columns)

    def whole(path, begin, count):
        return data.format.read(path, data.files, source.asked.read_buffer_bytes, ops)

    def part(path, begin, count):
        return ops.rechunked(whole(path, begin, count), CHUNK, skip=begin, take=count)

    def good(path):
        """The good records of a file, from the slow reader, which can continue after damage; and
        what stands in for the bad ones."""
        damaged = bad[path.decode()]
        for place, payload, _ in data.format.numbered(damaged.path):
            payload = damaged.stand_in if place in damaged.places else payload
            if payload is not None:
                yield payload

    def past_damage(path, begin, count):
        dataset = tf.data.Dataset.from_generator(good, tf.string, [], args=(path,))
        return ops.pack(dataset.skip(begin).take(count).batch(CHUNK))

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


_locks = {}  # path -> descriptor of a file that stays open and locked while this process lives


def _cache_file(source):
    """The path of a cache file for exactly these records, which only this process may use.

    Deletes what an interrupted process has left half-written.
    """
    data, share, asked = source.data, source.share, source.asked
    if not all(file.identity for file in data.files):
        data = datasets.identified(data)
    others = [data.format.chunks_by_buffer and asked.read_buffer_bytes]
    others += [(file.path, sorted(file.places)) for file in source.damaged]
    what = repr((
        [(f.path, f.identity[:2]) for f in data.files], data.name, share.of, share.index,
        asked.num_parallel_reads, asked.shuffle_buffer, asked.seed, source.ops.packed,
        source.position.by_rows, *filter(None, others),
    ))  # fmt: skip
    path = f"{asked.cache}-{hashlib.sha1(what.encode()).hexdigest()[:12]}"
    if path in _locks:
        return path
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
    if not atomic_files.lock(lock, if_unknown=True):
        raise BadInput(
            f"--cache={asked.cache}: another process uses {path}; give this one another --cache."
        )
    _locks[path] = lock
    for stale in glob.glob(f"{glob.escape(path)}_*"):
        os.remove(stale)
    return path


@contextlib.contextmanager
def naming_damaged_cache(cache: str):
    """Turns an error of a cache file (`--cache`), which is not a bad record, into one that says
    what to do."""
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
